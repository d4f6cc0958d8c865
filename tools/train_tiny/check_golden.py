"""Compare our models with reference logits: `check_golden.py DIR` holds config.json, model.safetensors,
tokens.json and expect.npy (float32 logits after each token), perhaps expect_mtp.npy (the first draft; the last
row takes the arg-max of its own main logits). The proof that what is trained is the architecture.
"""
import json
import os
import sys

import numpy as np
import torch
from safetensors.torch import load_file

from export import load_weights, stack_experts
from families import family_of


def read_weights(path: str, j: dict) -> dict[str, torch.Tensor]:
    """Float32 weights of a checkpoint, quantized or not, experts stacked."""
    if "quantization_config" in j:
        return load_weights(path)
    w = {k: v.float() if v.is_floating_point() else v for k, v in load_file(f"{path}/model.safetensors").items()}
    w = {k: v for k, v in w.items() if not k.endswith((".embed_tokens.weight", ".shared_head.head.weight")) or k == "model.embed_tokens.weight"}
    return stack_experts(w)


def run(path: str, j: dict, ids: list[int], drafts: bool) -> list[np.ndarray]:
    """Logits after each token, and of the first drafts."""
    family = family_of(j)
    c, n, w = family.from_json(j), len(ids), read_weights(path, j)
    c.tokenizer = f"{path}/tokenizer.json"
    if not any(k.startswith("mtp.") for k in family.shapes(c)):
        w = {k: v for k, v in w.items() if not k.startswith("mtp.")}
    for name, shape in missing(family.shapes(c), w).items():
        w[name] = torch.zeros(shape)
    padded = -(-(n + 1) // c.pad_to) * c.pad_to
    model = family.model(c, w, padded)
    model.sparse = True
    t = torch.nn.functional.pad(torch.tensor(ids), (0, padded - n))[None]
    with torch.no_grad():
        x, _, _ = model.trunk(t, torch.zeros_like(t))
        out = [model.logits(model.head_input(x))[0, :n].float()]
        if drafts:
            t[0, n] = out[0][-1].argmax()
            x, _, _ = model.mtp(x, t, torch.zeros_like(t))
            out.append(model.logits(model.head_input(x, "mtp.0."))[0, :n].float())
    return [x.numpy() for x in out]


def missing(want: dict, w: dict) -> dict:
    """Check what is there; return the shapes of what is missing (the MTP layer, if the case has none)."""
    absent = {}
    for name, shape in want.items():
        if name not in w:
            absent[name] = shape
        elif tuple(w[name].shape) != tuple(shape):
            raise ValueError(f"{name}: {tuple(w[name].shape)}, expected {shape}")
    extra = set(w) - set(want)
    if extra:
        raise ValueError(f"unknown {sorted(extra)[:5]}, missing {sorted(absent)[:5]}")
    return absent


def main() -> None:
    path = sys.argv[1]
    torch.set_num_threads(1)
    j = json.load(open(f"{path}/config.json"))
    ids = json.load(open(f"{path}/tokens.json"))
    names = [n for n in ("expect", "expect_mtp") if os.path.exists(f"{path}/{n}.npy")]
    worst = 0.0
    for name, got in zip(names, run(path, j, ids, len(names) > 1)):
        expect = np.load(f"{path}/{name}.npy")
        diff = np.abs(got - expect).max()
        worst = max(worst, diff)
        print(f"{path} {name}: max abs diff {diff:.2e}, relative {np.linalg.norm(got - expect) / np.linalg.norm(expect):.2e}")
    sys.exit(int(worst >= 1e-3))


if __name__ == "__main__":
    main()
