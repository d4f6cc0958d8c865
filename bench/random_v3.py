"""A checkpoint of V3's shape with few layers, experts and words, and random weights, written with the standard library alone.

Matrices are FP8 in blocks of 128 x 128, of which all scales are one number that keeps activations about as large as they
came; random numbers repeat after a mebibyte. The tokenizer is tiny-v3's."""

import json
import math
import pathlib
import random
import shutil
import struct

ROOT = pathlib.Path(__file__).resolve().parents[1]
LAYERS, DENSE, EXPERTS = 2, 1, 16
REPEAT = 1 << 20
CODE_RMS = 128  # of random E4M3 codes, about


def shapes(c):
    """{name: (rows, columns) or (numbers,)}; names of matrices that are FP8 end in `proj`."""
    h, heads, rank, rope = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    nope, v, q = c["qk_nope_head_dim"], c["v_head_dim"], c["q_lora_rank"]
    mlp = lambda at, width: {f"{at}.gate_proj": (width, h), f"{at}.up_proj": (width, h), f"{at}.down_proj": (h, width)}
    all = {"model.embed_tokens": (c["vocab_size"], h), "lm_head": (c["vocab_size"], h), "model.norm": (h,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        all |= {f"{at}.input_layernorm": (h,), f"{at}.post_attention_layernorm": (h,)}
        all |= {f"{at}.self_attn.q_a_proj": (q, h), f"{at}.self_attn.q_a_layernorm": (q,), f"{at}.self_attn.q_b_proj": (heads * (nope + rope), q)}
        all |= {f"{at}.self_attn.kv_a_proj_with_mqa": (rank + rope, h), f"{at}.self_attn.kv_a_layernorm": (rank,)}
        all |= {f"{at}.self_attn.kv_b_proj": (heads * (nope + v), rank), f"{at}.self_attn.o_proj": (h, heads * v)}
        if layer < DENSE:
            all |= mlp(f"{at}.mlp", c["intermediate_size"])
            continue
        all |= {f"{at}.mlp.gate": (EXPERTS, h)} | mlp(f"{at}.mlp.shared_experts", c["moe_intermediate_size"])
        for e in range(EXPERTS):
            all |= mlp(f"{at}.mlp.experts.{e}", c["moe_intermediate_size"])
    return all


def repeated(piece, n):
    return (piece * (n // len(piece) + 1))[:n]


def bf16(x):
    return struct.pack("<f", x)[2:]


def tensors(c):
    """(name, type, shape, bytes) of all."""
    dice = random.Random(1)
    codes = dice.randbytes(REPEAT).translate(bytes(b - 1 if b & 0x7F == 0x7F else b for b in range(256)))  # not NaN
    for name, shape in shapes(c).items():
        n, size = math.prod(shape), 1 / math.sqrt(shape[-1])
        if len(shape) == 1:
            yield f"{name}.weight", "BF16", shape, repeated(bf16(1), 2 * n)
        elif "proj" in name:
            blocks = [math.ceil(x / 128) for x in shape]
            yield f"{name}.weight", "F8_E4M3", shape, repeated(codes, n)
            yield f"{name}.weight_scale_inv", "F32", blocks, repeated(struct.pack("<f", size / CODE_RMS), 4 * math.prod(blocks))
        else:
            numbers = b"".join(bf16(dice.gauss(0, size)) for _ in range(REPEAT // 16 - 1))
            yield f"{name}.weight", "BF16", shape, repeated(numbers, 2 * n)
    for layer in range(DENSE, LAYERS):
        yield f"model.layers.{layer}.mlp.gate.e_score_correction_bias", "F32", [EXPERTS], bytes(4 * EXPERTS)


def write(folder):
    """Writes 1.6 GB; returns the folder."""
    folder = pathlib.Path(folder)
    config = json.loads((ROOT / "bench" / "peers" / "configs" / "v3-slice.json").read_text())
    of_tokenizer = json.loads((ROOT / "models" / "tiny-v3" / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "first_k_dense_replace": DENSE, "n_routed_experts": EXPERTS, "vocab_size": of_tokenizer["vocab_size"]}
    del config["quantization_config"]["moe_quant_algo"]
    head, at = {}, 0
    for name, kind, shape, data in tensors(config):
        head[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, _, data in tensors(config):
            out.write(data)
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "tiny-v3" / file, folder / file)
    return folder
