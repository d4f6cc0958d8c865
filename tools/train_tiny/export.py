"""Write a trained model in the official format: model.safetensors, config.json, generation_config.json and
the tokenizer files. `export.py small.pt tokenizer.json OUT`; load_model reads it back, dequantized.
"""
import json
import os
import shutil
import sys

import torch
from safetensors.torch import save_file

import model_v4
from quantize import (e8m0_decode, e8m0_encode, format_of, fp4_codes, fp4_decode, fp4_pack, fp4_unpack, fp8_encode, spread)

Tensor = torch.Tensor
E8M0 = torch.float8_e8m0fnu
MAX_LEN = 8192  # trained on rows of 4,096


def official(weights: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Float32 masters -> tensors of the file; stacked experts become one tensor each."""
    out = {}
    for name, w in weights.items():
        fmt = format_of(name, family)
        if ".experts." in name:
            head, part = name.rsplit(".", 1)
            for e in range(w.shape[0]):
                put(out, f"{head}.{e}.{part}.weight", w[e], fmt, family)
        else:
            put(out, name, w, fmt, family)
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
        code, scale = fp8_encode(w.float(), family == "v4")
        out[name] = code.contiguous()
        if family == "v4":
            out[name.removesuffix("weight") + "scale"] = e8m0_encode(scale).view(E8M0)
        else:
            out[name + "_scale_inv"] = scale.contiguous()


def v4_json(c: model_v4.V4Config, max_len: int) -> dict:
    """The flat config.json of the published V4 checkpoints."""
    skip = ("rope_factor", "rope_original", "beta_fast", "beta_slow")
    j = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    j.update({k: getattr(c, k) for k in c.__dataclass_fields__ if k not in skip})
    j.update(num_key_value_heads=1, n_shared_experts=1, num_nextn_predict_layers=1, scoring_func="sqrtsoftplus", topk_method="noaux_tc",
             norm_topk_prob=True, hidden_act="silu", attention_bias=False, attention_dropout=0.0, tie_word_embeddings=False,
             bos_token_id=0, eos_token_id=1, initializer_range=0.02, max_position_embeddings=max_len, torch_dtype="bfloat16", expert_dtype="fp4", use_cache=True,
             rope_scaling={"type": "yarn", "factor": c.rope_factor, "original_max_position_embeddings": c.rope_original, "beta_fast": c.beta_fast, "beta_slow": c.beta_slow},
             quantization_config={"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]})
    return j


def write_json(path: str, value) -> None:
    with open(path, "w") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
        f.write("\n")


def export(small: str, tokenizer: str, out: str) -> None:
    s = torch.load(small, map_location="cpu", weights_only=True)
    family = s["run"]["family"]
    os.makedirs(out, exist_ok=True)
    weights = {**{k: w.float() for k, w in s["optimizer"]["master"].items()}, **s["biases"], **s["fixed"]}
    tensors = official(weights, family)
    save_file(tensors, f"{out}/model.safetensors", metadata={"format": "pt"})
    write_json(f"{out}/config.json", v4_json(model_v4.V4Config(**s["run"]["model"]), MAX_LEN))
    write_json(f"{out}/generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.95})
    shutil.copy(tokenizer, f"{out}/tokenizer.json")
    write_json(f"{out}/tokenizer_config.json", {
        "add_bos_token": False, "add_eos_token": False, "bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>",
        "pad_token": "<｜▁pad▁｜>", "unk_token": None, "clean_up_tokenization_spaces": False, "model_max_length": MAX_LEN,
        "tokenizer_class": "PreTrainedTokenizerFast"})
    size = os.path.getsize(f"{out}/model.safetensors")
    print(f"{out}/model.safetensors: {size} bytes, {len(tensors)} tensors, step {s['step']}")


def load_weights(path: str) -> dict[str, Tensor]:
    """Float32 weights as a reader of the file gets them, experts stacked again."""
    from safetensors.torch import load_file
    raw = load_file(f"{path}/model.safetensors")
    out, experts = {}, {}
    for name, w in raw.items():
        if name.endswith((".scale", "_scale_inv")):
            continue
        if w.dtype == torch.int8:
            w = fp4_decode(fp4_unpack(w), e8m0_decode(raw[name.removesuffix("weight") + "scale"].view(torch.uint8)))
        elif w.dtype == torch.float8_e4m3fn:
            scale = raw.get(name + "_scale_inv")
            if scale is None:
                scale = e8m0_decode(raw[name.removesuffix("weight") + "scale"].view(torch.uint8))
            w = w.float() * spread(scale)[:w.shape[0], :w.shape[1]]
        elif w.is_floating_point():
            w = w.float()
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            e, part = tail.split(".")[:2]
            experts.setdefault(f"{head}.experts.{part}", {})[int(e)] = w
        else:
            out[name] = w
    for name, parts in experts.items():
        out[name] = torch.stack([parts[i] for i in range(len(parts))])
    return out


def load_model(path: str, max_len: int, device: str, dtype: torch.dtype):
    """The exported model, ready to run; matrices in dtype, the rest float32."""
    from train import F32_WORK
    j = json.load(open(f"{path}/config.json"))
    weights = {k: w.to(device, dtype if w.is_floating_point() and not any(p in k for p in F32_WORK) else w.dtype)
               for k, w in load_weights(path).items()}
    r = j["rope_scaling"]
    known = {k: j[k] for k in model_v4.V4Config.__dataclass_fields__ if k in j}
    known.update(rope_factor=r["factor"], rope_original=r["original_max_position_embeddings"], beta_fast=r["beta_fast"], beta_slow=r["beta_slow"])
    model = model_v4.V4(model_v4.V4Config(**known), weights, max_len)
    model.sparse = True
    return model


if __name__ == "__main__":
    export(*sys.argv[1:4])
