"""Write a trained DSpark drafter in the official format, beside the model that it drafts for:
`export_dspark.py small.pt MODEL` makes MODEL/dspark/model.safetensors, with the stages alone, and its config.json,
which is the model's with the drafter's keys. OUT may name another folder.
"""
import argparse
import json
import os

import torch
from safetensors.torch import save_file

from export import official, write_json


def export(small: str, model: str, out: str) -> None:
    s = torch.load(small, map_location="cpu", weights_only=True)
    os.makedirs(out, exist_ok=True)
    tensors = official({**{k: w.float() for k, w in s["master"].items()}, **s["biases"]}, s["run"]["family"], False)
    save_file(tensors, f"{out}/model.safetensors", metadata={"format": "pt"})
    config = json.load(open(f"{model}/config.json"))
    config["compress_ratios"] = config["compress_ratios"][:config["num_hidden_layers"]] + [0] * s["run"]["stages"]
    config.update({"dspark_" + k: v for k, v in s["run"]["dspark"].items()})
    write_json(f"{out}/config.json", config)
    print(f"{out}/model.safetensors: {os.path.getsize(f'{out}/model.safetensors')} bytes, {len(tensors)} tensors, step {s['step']}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("small")
    ap.add_argument("model")
    ap.add_argument("out", nargs="?")
    a = ap.parse_args()
    export(a.small, a.model, a.out or f"{a.model}/dspark")
