#!/usr/bin/env python3
"""Slopes of the loss of a golden case, along a few directions per tensor, in float64.

    tests/reference/gradients.py CASE_DIR [DIRECTIONS]          writes CASE_DIR/slopes.json
    tests/reference/gradients.py CASE_DIR DIRECTIONS --mtp      writes CASE_DIR/slopes_mtp.json

The loss is the mean of -log p(token t + 1) of the main logits, and with --mtp 0.3 times the mean of
-log p(token t + 2) of the MTP layer's. Both are from the programs of mtp.py, which know
nothing of gradients: a tensor moves along a direction of random signs, and central differences of
the loss are the slope. A gradient g must satisfy <g, direction> = slope. Two step lengths must agree,
so that no expert or key is selected anew on the way.

{"loss": x, "tensors": {name: [slope, ...]}}; element i of direction k is +1 or -1, the lowest bit of
mix64(i + k 2^40), with mix64 of splitmix64.
"""

import json
import pathlib
import sys

import numpy as np

from mtp import open_case

STEPS = 1e-5, 1e-6, 1e-7  # of the tensor's mean size; the first that agrees is taken
AGREEMENT = 1e-5  # of two step lengths, relative to the slope
MTP, MTP_WEIGHT = "--mtp" in sys.argv, 0.3
FROZEN = ("indexer", "e_score_correction_bias", "gate.bias", "tid2eid")


def signs(n, k):
    z = np.arange(n, dtype=np.uint64) + np.uint64(k << 40)
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return 1.0 - 2.0 * (z & np.uint64(1)).astype(np.float64)


def mean_loss(logits, targets):
    logits = logits[: len(targets)]
    logits = logits - logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -logp[np.arange(len(targets)), targets].mean()


def loss_of(model, tokens):
    logits, hidden = model.main(tokens)
    loss = mean_loss(logits, tokens[1:])
    if not MTP:
        return loss
    return loss + MTP_WEIGHT * mean_loss(model.draft(hidden, np.append(tokens[1:], tokens[0])), tokens[2:])


def slope(model, tokens, tensor, k):
    """The five-point difference, where those of two step lengths agree; and by how much they do."""
    before, v = tensor.copy(), signs(tensor.size, k).reshape(tensor.shape)
    for part in STEPS:
        step = part * max(np.abs(before).mean(), 1e-2)

        def at(factor):
            tensor[...] = before + factor * step * v
            return loss_of(model, tokens)

        near, far = (at(1) - at(-1)) / (2 * step), (at(2) - at(-2)) / (4 * step)
        tensor[...] = before
        disagreement = abs(near - far) / (abs(near) + 1e-3)
        if disagreement < AGREEMENT:
            return (4 * near - far) / 3, disagreement
    raise ValueError(f"the slopes of two step lengths differ: {near} and {far}")


def main():
    folder, directions = pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    model, tokens, _ = open_case(folder)
    tensors, worst = {}, 0.0
    for name, tensor in model.w.items():
        if any(word in name for word in FROZEN) or is_copy(model, name) or (is_mtp(model, name) and not MTP):
            continue
        found = [slope(model, tokens, tensor, k) for k in range(directions)]
        tensors[name] = [float(f"{s:.9e}") for s, _ in found]
        worst = max(worst, *(e for _, e in found))
    with open(folder / ("slopes_mtp.json" if MTP else "slopes.json"), "w") as f:
        json.dump({"loss": loss_of(model, tokens), "tensors": tensors}, f)
        f.write("\n")
    print(f"{folder.name}: {len(tensors)} tensors, step lengths agree to {worst:.1e}")


def is_copy(model, name):
    """An MTP layer's embedding and head: those of the main model are read."""
    return is_mtp(model, name) and name.endswith(("embed_tokens.weight", "shared_head.head.weight"))


def is_mtp(model, name):
    n = model.c["num_hidden_layers"]
    return name.startswith(("mtp.", f"model.layers.{n}."))


if __name__ == "__main__":
    main()
