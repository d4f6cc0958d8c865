"""Write a trained DSpark drafter in the official format: `export_dspark.py small.pt MODEL`.

A V4 model has an MTP layer, so the stages lie beside it: MODEL/dspark/model.safetensors with them alone, and config.json,
which is the model's with the drafter's keys. A V4.1 model drafts with its stages only: they become the second of two files
of the checkpoint, and config.json and model.safetensors.index.json say so.
"""
import argparse
import json
import os

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dspark import DSparkConfig
from export import official, write_json
from families import family_of

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors_of(path: str) -> dict[str, int]:
    """Tensors of a file, with the bytes of each."""
    with safe_open(path, "pt") as f:
        return {k: f.get_tensor(k).nbytes for k in f.keys()}


def add_file(model: str, tensors: dict[str, torch.Tensor]) -> str:
    """The second of two files of a checkpoint that had one; returns its path."""
    first, second = (f"{model}/{name}" for name in FILES)
    if not os.path.exists(first):
        os.rename(f"{model}/model.safetensors", first)
    save_file(tensors, second, metadata={"format": "pt"})
    tensors_in = {name: tensors_of(path) for name, path in zip(FILES, (first, second))}
    where = {k: name for name, inside in tensors_in.items() for k in inside}
    size = sum(sum(inside.values()) for inside in tensors_in.values())
    write_json(f"{model}/model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})
    return second


def export(small: str, model: str) -> None:
    s = torch.load(small, map_location="cpu", weights_only=True)
    run = s["run"]
    tensors = official({**{k: w.float() for k, w in s["master"].items()}, **s["biases"]}, run["family"], False)
    config = json.load(open(f"{model}/config.json"))
    inside = family_of(config).nested
    keys = config["text_config"] if inside else config
    keys["compress_ratios"] = keys["compress_ratios"][:keys["num_hidden_layers"]] + [0] * run["stages"]
    keys.update(DSparkConfig(**run["dspark"]).to_json())
    if inside:
        keys["num_nextn_predict_layers"] = run["stages"]
        file, out = add_file(model, tensors), model
    else:
        out = f"{model}/dspark"
        os.makedirs(out, exist_ok=True)
        file = f"{out}/model.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
    write_json(f"{out}/config.json", config)
    print(f"{file}: {os.path.getsize(file)} bytes, {len(tensors)} tensors, step {s['step']}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("small")
    ap.add_argument("model")
    a = ap.parse_args()
    export(a.small, a.model)
