"""make_model.py - tiny random models of every family, written from a config.

model_shapes.py has the configs, and which tensors a model has.

    python3 make_model.py NAME OUT_DIR     with NAME one of CONFIGS
"""
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import checkpoint_io as io  # noqa: E402
from model_shapes import CONFIGS, V2, V3, V4, V4_DSPARK, V32, drafter_layers, shapes  # noqa: E402, F401

# ---- values ------------------------------------------------------------------------------


def values(rng, shape, kind, config):
    if kind == "table":
        rows = [rng.permutation(config["n_routed_experts"])[: shape[1]] for _ in range(shape[0])]
        return io.from_array(np.array(rows, np.int64))
    noise = rng.standard_normal(shape).astype(np.float32)
    if kind.startswith("matrix"):
        noise /= np.sqrt(np.float32(shape[1]))
    else:
        noise *= np.float32(0.1)
        if kind.startswith("norm"):
            noise += 1
    return io.from_array(noise) if kind.endswith("f32") else io.bf16(noise)


def tensors(config, seed=0, mtp_copies=True):
    rng = np.random.default_rng(seed)
    made = {name: values(rng, shape, kind, config)
            for name, (shape, kind) in shapes(config, mtp_copies).items()}
    for name in made:  # the copies in MTP layers are copies
        if ".layers." in name and name.endswith(".embed_tokens.weight"):
            made[name] = made["model.embed_tokens.weight"]
        if name.endswith(".shared_head.head.weight") and "lm_head.weight" in made:
            made[name] = made["lm_head.weight"]
    return made


def write_model(directory, config, made=None, shards=1):
    """Writes config.json and the weights, random ones unless they are given."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    io.write_checkpoint(directory, tensors(config) if made is None else made, shards)
    return directory


if __name__ == "__main__":
    write_model(sys.argv[2], CONFIGS[sys.argv[1]])
