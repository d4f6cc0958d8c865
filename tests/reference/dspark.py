#!/usr/bin/env python3
"""The DSpark drafter on V4's layers, in float64, beside mtp.py.

    tests/reference/dspark.py CASE_DIR                           compares with CASE_DIR/drafts.json
    tests/reference/dspark.py CASE_DIR --add OUT_DIR [--seed N]  gives a V4 case random stages

Every function takes whole sequences and keeps no state. A block is drafted after position p,
when the main model has seen tokens 0 .. p and chosen the token at p + 1. drafts.json lists such
blocks: `position`, the `token` at position + 1 (the arg-max of the main logits there), the
greedy `drafts`, the raw `confidence` of each, its winning `logit` with the Markov term, and the
`margin` to the second.
"""

import argparse
import json
import pathlib
import shutil
import sys

import add_mtp
import mtp
import numpy as np

MIN_MARGIN = 0.01
TOLERANCE = 1e-9
SIZES = {"dspark_block_size": 4, "dspark_markov_rank": 8, "dspark_noise_token_id": 95,
         "dspark_target_layer_ids": [0, 2]}  # fmt: skip
STAGES = 2


class DSpark(mtp.V4):
    markov_embed, markov_head = "markov_head.markov_w1", "markov_head.markov_w2"

    def stages(self):
        return sorted({name.split(".")[1] for name in self.w if name.startswith("mtp.")})

    def layer(self, p, streams, tokens):
        streams = super().layer(p, streams, tokens)
        number = p.split(".")[1]
        if p.startswith("layers.") and int(number) in self.c["dspark_target_layer_ids"]:
            self.taps.append(streams.mean(1))
        return streams

    def main(self, tokens):
        """Logits, and the taps [n, taps * H]: the mean of the streams after some layers."""
        self.taps = []
        logits, _ = super().main(tokens)
        return logits, np.concatenate(self.taps, -1)

    def window_key(self, p, h, position):
        return self.rotate_tail(self.norm(p + "kv_norm", self.linear(p + "wkv", h)), position, "main")

    def block_attention(self, p, h, taps, position):
        """Every row sees the window before the block, and all rows of the block."""
        c = self.c
        heads, d, n = c["num_attention_heads"], c["head_dim"], len(h)
        at = position + 1 + np.arange(n)
        seen = np.arange(max(0, position + 1 - c["sliding_window"]), position + 1)
        x = self.norm("mtp.0.main_norm", self.linear("mtp.0.main_proj", taps[seen]))
        keys = np.concatenate([self.window_key(p, x, seen), self.window_key(p, h, at)])
        latent = self.norm(p + "q_norm", self.linear(p + "wq_a", h))
        q = mtp.rms(self.linear(p + "wq_b", latent).reshape(n, heads, d), 1.0, self.eps)
        q = self.rotate_tail(q, at, "main")
        score = np.einsum("tad,ud->atu", q, keys) * d**-0.5
        sink = np.broadcast_to(self.w[p + "attn_sink"][:, None, None], (heads, n, 1))
        share = mtp.softmax(np.concatenate([score, sink], -1))[..., :-1]
        out = self.rotate_tail(np.einsum("atu,ud->tad", share, keys), at, "main", inverse=True)
        groups = c["o_groups"]
        wo_a = self.w[p + "wo_a.weight"].reshape(groups, c["o_lora_rank"], -1)
        z = np.einsum("tgi,goi->tgo", out.reshape(n, groups, -1), wo_a)
        return self.linear(p + "wo_b", z.reshape(n, -1))

    def block(self, taps, position, token):
        """The drafts after `token`, their confidences, and the logits of every place."""
        c, last = self.c, f"mtp.{self.stages()[-1]}."
        ids = np.array([token] + [c["dspark_noise_token_id"]] * (c["dspark_block_size"] - 1))
        streams = np.repeat(self.w["embed.weight"][ids][:, None, :], c["hc_mult"], 1)
        for stage in self.stages():
            p = f"mtp.{stage}."
            h, post, mix = self.collapse(p + "hc_attn", streams)
            y = self.block_attention(p + "attn.", self.norm(p + "attn_norm", h), taps, position)
            streams = self.expand(y, streams, post, mix)
            h, post, mix = self.collapse(p + "hc_ffn", streams)
            y = self.moe(p + "ffn.", self.norm(p + "ffn_norm", h), ids)
            streams = self.expand(y, streams, post, mix)
        mixed = self.head(last, streams)
        base = self.linear("head", self.norm(last + "norm", mixed))
        drafts, confidence, logits = [], [], []
        for i in range(len(ids)):
            before = self.w[last + self.markov_embed + ".weight"][token]
            logits.append(base[i] + self.linear(last + self.markov_head, before))
            both = np.concatenate([mixed[i], before])
            confidence.append(float(self.linear(last + "confidence_head.proj", both)[0]))
            token = int(logits[-1].argmax())
            drafts.append(token)
        return drafts, confidence, np.array(logits)

    def case(self, logits, taps, position):
        token = int(logits[position].argmax())
        drafts, confidence, all_logits = self.block(taps, position, token)
        two = np.sort(all_logits, -1)[:, -2:]
        return {"position": position, "token": token, "drafts": drafts, "confidence": confidence,
                "logit": list(two[:, 1]), "margin": list(two[:, 1] - two[:, 0])}  # fmt: skip


def open_case(folder):
    config = json.loads((folder / "config.json").read_text())
    tokens = np.array(json.loads((folder / "tokens.json").read_text()))
    return DSpark(config, mtp.read_safetensors(folder / "model.safetensors")), tokens


def cases_of(folder):
    """A block after every position, those without near-ties."""
    model, tokens = open_case(folder)
    logits, taps = model.main(tokens)
    found = [model.case(logits, taps, p) for p in range(len(tokens))]
    return [case for case in found if min(case["margin"]) >= MIN_MARGIN]


def stage_shapes(config, tensors):
    """{name: (dtype, shape)}: a stage looks like a main layer without compressor and hash table."""
    h, taps, rank = config["hidden_size"], len(SIZES["dspark_target_layer_ids"]), SIZES["dspark_markov_rank"]
    plain = [i for i in range(config["num_hidden_layers"]) if f"layers.{i}.ffn.gate.bias" in tensors][-1]
    shapes = {}
    for stage in range(STAGES):
        for name, (dtype, shape, _) in tensors.items():
            if name.startswith(f"layers.{plain}.") and ".compressor." not in name and ".indexer." not in name:
                shapes[f"mtp.{stage}." + name[len(f"layers.{plain}.") :]] = (dtype, shape)
    last = f"mtp.{STAGES - 1}."
    shapes["mtp.0.main_proj.weight"] = ("BF16", [h, taps * h])
    shapes["mtp.0.main_norm.weight"] = shapes[last + "norm.weight"] = ("BF16", [h])
    for name in ("markov_w1", "markov_w2"):
        shapes[f"{last}markov_head.{name}.weight"] = ("BF16", [config["vocab_size"], rank])
    shapes[last + "confidence_head.proj.weight"] = ("BF16", [1, h + rank])
    for name, (dtype, shape, _) in tensors.items():
        if name.startswith("hc_head_"):
            shapes[last + name] = (dtype, shape)
    return shapes


def add(source, out, seed):
    """The drafts must not move when the stages' weights move by a few float32 roundings."""
    config = json.loads((source / "config.json").read_text())
    tensors = {n: t for n, t in add_mtp.read_raw(source / "model.safetensors").items() if "mtp." not in n}
    layers = config["num_hidden_layers"]
    config.update(SIZES, compress_ratios=config["compress_ratios"][:layers] + [0] * STAGES)
    rng = np.random.default_rng(seed)
    added = {name: (dtype, shape, add_mtp.stored(add_mtp.random_like(rng, name, shape), dtype))
             for name, (dtype, shape) in stage_shapes(config, tensors).items()}  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    add_mtp.write_raw(out / "model.safetensors", {**tensors, **added})
    for name in ("tokens.json", "expect.npy"):
        shutil.copyfile(source / name, out / name)
    cases = cases_of(out)
    text = ",\n".join(json.dumps(case) for case in cases)
    (out / "drafts.json").write_text(f'{{"block_size": {SIZES["dspark_block_size"]}, "cases": [\n{text}\n]}}\n')
    print(f"{out.name}: {len(cases)} blocks")


def check(folder):
    stored = json.loads((folder / "drafts.json").read_text())["cases"]
    worst = 0.0
    for got, want in zip(cases_of(folder), stored, strict=True):
        if any(got[key] != want[key] for key in ("position", "token", "drafts")):
            sys.exit(f"position {want['position']}: {got['drafts']} instead of {want['drafts']}")
        for key in ("confidence", "logit"):
            worst = max(worst, np.abs(np.subtract(got[key], want[key])).max())
    print(f"{folder.name}: {len(stored)} blocks, largest difference {worst:.1e}")
    if worst > TOLERANCE:
        sys.exit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", type=pathlib.Path)
    parser.add_argument("--add", type=pathlib.Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.add:
        add(args.case, args.add, args.seed)
    else:
        check(args.case)


if __name__ == "__main__":
    main()
