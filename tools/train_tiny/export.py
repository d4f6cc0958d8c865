"""Write a trained model in the official format: model.safetensors, config.json, generation_config.json and
the tokenizer files. `export.py [--bf16] small.pt tokenizer.json OUT`; load_model reads it back, dequantized.
With --bf16 nothing is rounded to FP8 or FP4: the same model before quantization.
"""
import argparse
import glob
import json
import os
import shutil

import torch
from safetensors.torch import save_file

from families import FAMILIES, family_of
from layers import working
from quantize import blocks_of, e8m0_decode, e8m0_encode, format_of, fp4_codes, fp4_decode, fp4_pack, fp4_unpack, fp8_decode, fp8_encode

Tensor = torch.Tensor
E8M0 = torch.float8_e8m0fnu
MAX_LEN = 8192  # trained on rows of 4,096


def official(weights: dict[str, Tensor], family: str, bf16: bool) -> dict[str, Tensor]:
    """Float32 masters -> tensors of the file; stacked experts become one tensor each."""
    out = {}
    for name, w in weights.items():
        fmt = format_of(name, family)
        if bf16 and fmt in ("fp8", "fp4", "table"):
            fmt = "bf16"
        if ".experts." in name:
            head, part = name.rsplit(".", 1)
            for e in range(w.shape[0]):
                put(out, f"{head}.{e}.{part}.weight", w[e], fmt, family)
        else:
            put(out, name, w, fmt, family)
            if family == "v41" and name.endswith("gate.bias"):  # positions in images; this model has none
                put(out, name + "_vl", w.clone(), fmt, family)
    return out


def put(out: dict[str, Tensor], name: str, w: Tensor, fmt: str, family: str) -> None:
    if fmt == "i64":
        out[name] = w.long().contiguous()
    elif fmt == "f32":
        out[name] = w.float().contiguous()
    elif fmt == "bf16":
        out[name] = w.bfloat16().contiguous()
    elif fmt == "fp4":
        code, scale = fp4_codes(w.float())
        out[name] = fp4_pack(code).contiguous()
        out[name.removesuffix("weight") + "scale"] = e8m0_encode(scale).view(E8M0)
    else:
        blocks = blocks_of(fmt, family)
        code, scale = fp8_encode(w.float(), blocks)
        out[name] = code.contiguous()
        if blocks.pow2:
            out[name.removesuffix("weight") + "scale"] = e8m0_encode(scale).view(E8M0)
        else:
            out[name + "_scale_inv"] = scale.contiguous()


def write_json(path: str, value) -> None:
    with open(path, "w") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
        f.write("\n")


def export(small: str, tokenizer: str, out: str, bf16: bool) -> None:
    s = torch.load(small, map_location="cpu", weights_only=True)
    family = FAMILIES[s["run"]["family"]]
    os.makedirs(out, exist_ok=True)
    weights = {**{k: w.float() for k, w in s["master"].items()}, **s["biases"], **s["fixed"]}
    tensors = official(weights, family.name, bf16)
    save_file(tensors, f"{out}/model.safetensors", metadata={"format": "pt"})
    config = family.to_json(family.config(**s["run"]["model"]), MAX_LEN)
    if bf16:
        config = {k: v for k, v in config.items() if k not in ("expert_dtype", "quantization_config")}
    write_json(f"{out}/config.json", config)
    write_json(f"{out}/generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.95})
    if os.path.realpath(tokenizer) != os.path.realpath(f"{out}/tokenizer.json"):
        shutil.copy(tokenizer, f"{out}/tokenizer.json")
    template = {"chat_template": family.chat_template} if family.chat_template else {}
    write_json(f"{out}/tokenizer_config.json", {
        "add_bos_token": False, "add_eos_token": False, "bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>",
        "pad_token": "<｜▁pad▁｜>", "unk_token": None, "clean_up_tokenization_spaces": False, "model_max_length": MAX_LEN,
        "tokenizer_class": "PreTrainedTokenizerFast", **template})
    size = os.path.getsize(f"{out}/model.safetensors")
    print(f"{out}/model.safetensors: {size} bytes, {len(tensors)} tensors, step {s['step']}")


def stack_experts(w: dict[str, Tensor]) -> dict[str, Tensor]:
    """`...experts.7.w1.weight` -> `...experts.w1` [E, ...]."""
    out, groups = {}, {}
    for name, t in w.items():
        head, sep, tail = name.partition(".experts.")
        if sep:
            e, part = tail.split(".")[:2]
            groups.setdefault(f"{head}.experts.{part}", {})[int(e)] = t
        else:
            out[name] = t
    for name, parts in groups.items():
        out[name] = torch.stack([parts[i] for i in range(len(parts))])
    return out


def load_weights(path: str) -> dict[str, Tensor]:
    """Float32 weights as a reader of the file or files gets them, experts stacked again."""
    from safetensors.torch import load_file
    raw = {}
    for file in sorted(glob.glob(f"{glob.escape(path)}/*.safetensors")):
        raw.update(load_file(file))
    family = family_of(json.load(open(f"{path}/config.json"))).name
    out = {}
    for name, w in raw.items():
        if name.endswith((".scale", "_scale_inv", "gate.bias_vl")):
            continue
        if w.dtype == torch.int8:
            w = fp4_decode(fp4_unpack(w), e8m0_decode(raw[name.removesuffix("weight") + "scale"].view(torch.uint8)))
        elif w.dtype == torch.float8_e4m3fn:
            scale = raw.get(name + "_scale_inv")
            if scale is None:
                scale = e8m0_decode(raw[name.removesuffix("weight") + "scale"].view(torch.uint8))
            w = fp8_decode(w, scale, blocks_of(format_of(name, family), family))
        elif w.is_floating_point():
            w = w.float()
        out[name] = w
    return stack_experts(out)


def load_model(path: str, max_len: int, device: str, dtype: torch.dtype, compiled: bool = False):
    """The exported model, ready to run; matrices in dtype, the rest float32."""
    j = json.load(open(f"{path}/config.json"))
    family = family_of(j)
    config = family.from_json(j)
    config.tokenizer = f"{path}/tokenizer.json"
    weights = {k: working(k, w, device, dtype) for k, w in load_weights(path).items()}
    model = family.model(config, weights, max_len, compiled)
    model.sparse = True
    return model


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--bf16", action="store_true")
    for name in ("small", "tokenizer", "out"):
        ap.add_argument(name)
    a = ap.parse_args()
    export(a.small, a.tokenizer, a.out, a.bf16)
