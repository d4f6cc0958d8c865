#!/usr/bin/env python3
"""Gives a case random MTP tensors and the draft logits that belong to them.

    tests/reference/add_mtp.py CASE_DIR OUT_DIR [--seed N]

OUT_DIR gets the case with an MTP layer of the family (V3, V3.2 under checkpoint layer
num_hidden_layers, with the duplicated embedding and head of the official files; V4 as mtp.0)
and expect_mtp.npy, float32 [tokens, vocab], from mtp.py. A seed is taken only if the drafts
stay smooth when its weights move by a few float32 roundings: no near-ties.
"""

import argparse
import json
import pathlib
import re
import shutil
import struct
import sys

import mtp
import numpy as np

GAIN = 1.2
NUDGE = 2e-6
MAX_NUDGED_CHANGE = 2e-4


def read_raw(path):
    """{name: (dtype, shape, bytes)}"""
    raw = path.read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    entries = json.loads(raw[8 : 8 + n])
    entries.pop("__metadata__", None)
    return {name: (e["dtype"], e["shape"], raw[8 + n + e["data_offsets"][0] : 8 + n + e["data_offsets"][1]])
            for name, e in entries.items()}  # fmt: skip


def write_raw(path, tensors):
    """Wide elements first, so that every tensor is aligned."""
    size = {"I64": 8, "F32": 4, "BF16": 2}
    header, at, body = {"__metadata__": {"format": "pt"}}, 0, []
    for name, (dtype, shape, data) in sorted(tensors.items(), key=lambda i: -size[i[1][0]]):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
        body.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(body))


def stored(values, dtype):
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def random_like(rng, name, shape):
    noise = rng.standard_normal(shape)
    if re.search(r"scale$", name):
        return 0.7 + 0.1 * noise
    if re.search(r"_base$|attn_sink$|ape$", name):
        return 0.5 * noise
    if re.search(r"(gate\.bias|e_score_correction_bias)$", name):
        return 0.05 * noise
    if len(shape) == 1:
        return 0.1 * noise + (0 if name.endswith("norm.bias") else 1)
    return GAIN * shape[-1] ** -0.5 * noise


def mtp_shapes(config, tensors):
    """{name: (dtype, shape)}: an MTP layer looks like a late main layer, plus its own parts."""
    h, last = config["hidden_size"], config["num_hidden_layers"]
    if config["model_type"] != "deepseek_v4":
        like, prefix = f"model.layers.{last - 1}.", f"model.layers.{last}."
        extra = {"eh_proj.weight": [h, 2 * h], "shared_head.norm.weight": [h]}
    else:
        plain = [i for i in range(last) if f"layers.{i}.ffn.gate.bias" in tensors]
        like, prefix = f"layers.{plain[-1]}.", "mtp.0."
        extra = {"e_proj.weight": [h, h], "h_proj.weight": [h, h], "norm.weight": [h]}
    shapes = {prefix + name: ("BF16", shape) for name, shape in extra.items()}
    shapes.update({prefix + name: ("BF16", [h]) for name in ("enorm.weight", "hnorm.weight")})
    for name, (dtype, shape, _) in tensors.items():
        if name.startswith(like) and ".compressor." not in name and not (
            prefix == "mtp.0." and ".indexer." in name
        ):
            shapes[prefix + name[len(like) :]] = (dtype, shape)
        if prefix == "mtp.0." and name.startswith("hc_head_"):
            shapes[prefix + name] = (dtype, shape)
    return shapes


def drafts_of(folder, rng=None):
    """Draft logits; with rng, every MTP weight is nudged."""
    model, tokens, _ = mtp.open_case(folder)
    logits, hidden = model.main(tokens)
    following = np.append(tokens[1:], logits[-1].argmax())
    if rng:
        p = "mtp.0." if isinstance(model, mtp.V4) else f"model.layers.{model.c['num_hidden_layers']}."
        for name in [name for name in model.w if name.startswith(p)]:
            model.w[name] = model.w[name] * (1 + NUDGE * rng.standard_normal(model.w[name].shape))
    return model.draft(hidden, following)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    config = json.loads((args.case / "config.json").read_text())
    tensors = read_raw(args.case / "model.safetensors")
    args.out.mkdir(parents=True, exist_ok=True)
    config["num_nextn_predict_layers"] = 1
    (args.out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in ("tokens.json", "expect.npy"):
        shutil.copyfile(args.case / name, args.out / name)
    for seed in range(args.seed, args.seed + 100):
        rng = np.random.default_rng(seed)
        added = {name: (dtype, shape, stored(random_like(rng, name, shape), dtype))
                 for name, (dtype, shape) in mtp_shapes(config, tensors).items()}  # fmt: skip
        if config["model_type"] != "deepseek_v4":
            p = f"model.layers.{config['num_hidden_layers']}."
            added[p + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
            added[p + "shared_head.head.weight"] = tensors["lm_head.weight"]
        write_raw(args.out / "model.safetensors", {**tensors, **added})
        drafts = drafts_of(args.out)
        change = max(np.abs(drafts_of(args.out, rng) - drafts).max() for _ in range(3))
        if change <= MAX_NUDGED_CHANGE:
            break
        print(f"seed {seed}: a small nudge moves the drafts by {change:.1e}")
    else:
        sys.exit("no good seed")
    np.save(args.out / "expect_mtp.npy", drafts.astype(np.float32))
    print(f"{args.out.name}: seed {seed}, drafts std {drafts.std():.2f}")


if __name__ == "__main__":
    main()
