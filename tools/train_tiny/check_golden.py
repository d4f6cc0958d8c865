"""Compare our V4 model with reference logits: `check_golden.py DIR` holds config.json, model.safetensors,
tokens.json and expect.npy (float32 logits after each token). The proof that what is trained is the architecture.
"""
import json
import sys

import numpy as np
import torch
from safetensors.torch import load_file

import model_v4


def v4_config(j: dict) -> model_v4.V4Config:
    """From the nested form (layer_types, rope_parameters) or the flat one (compress_ratios, rope_scaling)."""
    if "compress_ratios" in j:
        ratios, r, hashes = j["compress_ratios"], j["rope_scaling"], j["num_hash_layers"]
        theta = j["rope_theta"]
    else:
        rate = {"sliding_attention": 0, **j["compress_rates"]}
        ratios = [rate[t] for t in j["layer_types"]] + [0]
        r, theta = j["rope_parameters"]["compress"], j["rope_parameters"]["main"]["rope_theta"]
        hashes = j["mlp_layer_types"].count("hash_moe")
    known = {k: j[k] for k in model_v4.V4Config.__dataclass_fields__ if k in j}
    known.update(compress_ratios=ratios, num_hash_layers=hashes, rope_theta=theta, rope_factor=r["factor"],
                 rope_original=r["original_max_position_embeddings"], beta_fast=r["beta_fast"], beta_slow=r["beta_slow"])
    return model_v4.V4Config(**known)


def stack_experts(w: dict[str, torch.Tensor], form: str, stacked: str) -> dict[str, torch.Tensor]:
    """`...experts.7.w1.weight` -> `...experts.w1` [E, ...]. form splits the name, stacked joins it."""
    out, groups = {}, {}
    for name, t in w.items():
        head, sep, tail = name.partition(form)
        if sep and tail.split(".")[0].isdigit():
            e, part, _ = tail.split(".")
            groups.setdefault(head + stacked + part, {})[int(e)] = t
        else:
            out[name] = t
    for name, parts in groups.items():
        out[name] = torch.stack([parts[i] for i in range(len(parts))])
    return out


def run_v4(path: str, j: dict, ids: torch.Tensor) -> torch.Tensor:
    c = v4_config(j)
    w = {k: v.float() if v.is_floating_point() else v for k, v in load_file(f"{path}/model.safetensors").items()}
    w = stack_experts(w, ".experts.", ".experts.")
    have = shapes_of(model_v4.shapes(c), w)
    n = len(ids)
    padded = -(-n // c.pad_to) * c.pad_to
    ids = torch.nn.functional.pad(ids, (0, padded - n))[None]
    for name, shape in have.items():
        w[name] = torch.zeros(shape)
    model = model_v4.V4(c, w, padded)
    model.sparse = True
    with torch.no_grad():
        x, _, _ = model.trunk(ids, torch.zeros_like(ids))
        return model.logits(model.head_input(x))[0, :n].float()


def shapes_of(want: dict, w: dict) -> dict:
    """Check what is there; return the shapes of what is missing (the MTP layer, if the case has none)."""
    missing = {}
    for name, shape in want.items():
        if name not in w:
            missing[name] = shape
        elif tuple(w[name].shape) != tuple(shape):
            raise ValueError(f"{name}: {tuple(w[name].shape)}, expected {shape}")
    extra = set(w) - set(want)
    if extra or not all(k.startswith("mtp.") for k in missing):
        raise ValueError(f"unknown {sorted(extra)[:5]}, missing {sorted(missing)[:5]}")
    return missing


def main() -> None:
    path = sys.argv[1]
    torch.set_num_threads(1)
    j = json.load(open(f"{path}/config.json"))
    ids = torch.tensor(json.load(open(f"{path}/tokens.json")))
    expect = np.load(f"{path}/expect.npy")
    got = run_v4(path, j, ids).numpy()
    diff = np.abs(got - expect).max()
    print(f"{path}: max abs diff {diff:.2e}, relative {np.linalg.norm(got - expect) / np.linalg.norm(expect):.2e}")
    sys.exit(diff >= 1e-3)


if __name__ == "__main__":
    main()
