#!/usr/bin/env python3
"""quantize_case.py - an unquantized model directory in the official quantized formats.

    tools/quantize_case.py CASE OUT --format fp8|fp4|nvfp4 [--dequantized DIR]
                           [--shards N] [--block N]

fp8     E4M3 in blocks of 128 x 128: F32 NAME_scale_inv for V2, V3 and V3.2; F8_E8M0 .scale
        for V4. What the official files keep in high precision stays as it is.
fp4     V4 only: routed experts as packed E2M1 with one E8M0 per 32 columns, the rest fp8.
nvfp4   E2M1 with one E4M3 per 16 columns and one F32 per matrix: every MLP for V2, V3 and
        V3.2 (the rest unquantized), the routed experts for V4 (the rest fp8).

--dequantized writes the same model with the dequantized values in F32: float32 arithmetic
must give the same logits for both.
"""
import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import checkpoint_io as io  # noqa: E402

# ---- number formats -------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_MAX, E4M3_MAX = 6.0, 448.0


def e4m3_values():
    """The 256 values of E4M3: bias 7, no infinity, 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )
    value[code & 0x7F == 0x7F] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


E4M3 = e4m3_values()


def nearest_even(magnitude, grid):
    """Index of the nearest of an ascending grid, ties to the even index, saturating."""
    middle = (grid[1:].astype(np.float64) + grid[:-1]) / 2
    magnitude = magnitude.astype(np.float64)
    index = np.searchsorted(middle, magnitude, side="left")  # a tie goes down here
    tie = (index < len(middle)) & (middle[np.minimum(index, len(middle) - 1)] == magnitude)
    return index + (tie & (index % 2 == 1))


def e4m3_encode(x):
    """float32 to E4M3 codes; saturates at 448, NaN stays NaN."""
    x = np.asarray(x, np.float32)
    code = nearest_even(np.abs(np.nan_to_num(x)), E4M3[:0x7F])
    code = np.where(np.isnan(x), 0x7F, code)
    return (code | np.signbit(x).astype(np.int64) << 7).astype(np.uint8)


def e2m1_encode(x):
    """float32 to E2M1 codes 0..15; saturates at 6."""
    x = np.asarray(x, np.float32)
    return (nearest_even(np.abs(x), E2M1) | np.signbit(x).astype(np.int64) << 3).astype(np.uint8)


def e2m1_decode(code):
    return np.where(code & 8, -E2M1[code & 7], E2M1[code & 7]).astype(np.float32)


def e8m0_decode(code):
    return np.ldexp(np.float32(1), code.astype(np.int32) - 127).astype(np.float32)


def e8m0_ceil(x):
    """The code of the smallest power of two that is at least x > 0."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float32))
    return np.clip(exponent + 127 - (mantissa == 0.5), 1, 254).astype(np.uint8)


def pack(codes):
    """Two codes per byte, the even column in the low nibble."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def unpack(packed):
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    return codes


# ---- matrices -------------------------------------------------------------------------


def block_max(w, rows, cols):
    """The largest magnitude of each block; edge blocks are smaller."""
    down = np.maximum.reduceat(np.abs(w), np.arange(0, w.shape[0], rows), axis=0)
    return np.maximum.reduceat(down, np.arange(0, w.shape[1], cols), axis=1)


def spread(scale, shape, rows, cols):
    """Block scales repeated to the shape of the matrix."""
    return np.repeat(np.repeat(scale, rows, 0), cols, 1)[: shape[0], : shape[1]]


def raw(dtype, array):
    array = np.ascontiguousarray(array)
    return io.Tensor(dtype, array.shape, array.reshape(-1).view(np.uint8))


def quantize_fp8(w, block, ue8m0):
    """(data, scale tensor, dequantized)"""
    ideal = block_max(w, block, block) / np.float32(E4M3_MAX)
    ideal[ideal == 0] = 1
    code = e8m0_ceil(ideal)
    scale = e8m0_decode(code) if ue8m0 else ideal.astype(np.float32)
    wide = spread(scale, w.shape, block, block)
    data = e4m3_encode(w / wide)
    stored = raw("F8_E8M0", code) if ue8m0 else io.from_array(scale)
    return raw("F8_E4M3", data), stored, E4M3[data] * wide


def quantize_fp4(w):
    """(packed data, scale tensor, dequantized)"""
    ideal = block_max(w, 1, 32) / np.float32(E2M1_MAX)
    ideal[ideal == 0] = 1
    code = e8m0_ceil(ideal)
    wide = spread(e8m0_decode(code), w.shape, 1, 32)
    data = e2m1_encode(w / wide)
    return (raw("I8", pack(data).view(np.int8)), raw("F8_E8M0", code),
            e2m1_decode(data) * wide)


def quantize_nvfp4(w, amax):
    """(packed data, group scales, global scale, dequantized); amax of all that share it"""
    whole = np.float32(amax / (E2M1_MAX * E4M3_MAX)) if amax > 0 else np.float32(1)
    ideal = block_max(w, 1, 16) / (np.float32(E2M1_MAX) * whole)
    ideal[ideal == 0] = 1
    scale = np.maximum(e4m3_encode(ideal), 1)  # a scale may not round to zero
    wide = spread(E4M3[scale] * whole, w.shape, 1, 16)
    data = e2m1_encode(w / wide)
    return (raw("U8", pack(data)), raw("F8_E4M3", scale), io.from_array(np.float32(whole)),
            e2m1_decode(data) * wide)


# ---- which tensors ----------------------------------------------------------------------

FP8_HF = re.compile(
    r"\.self_attn\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)\.weight$"
    r"|\.self_attn\.indexer\.(wq_b|wk)\.weight$"
    r"|\.mlp\.((experts\.\d+|shared_experts)\.)?(gate|up|down)_proj\.weight$"
)
FP8_V4 = re.compile(
    r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.weight$"
    r"|\.attn\.indexer\.wq_b\.weight$"
    r"|\.ffn\.(experts\.\d+|shared_experts)\.w[123]\.weight$"
    r"|^mtp\.\d+\.[eh]_proj\.weight$"
)
ROUTED = re.compile(r"\.experts\.\d+\.")
MLP = re.compile(r"\.mlp\.((experts\.\d+|shared_experts)\.)?(gate|up|down)_proj\.weight$")
PARTNER = {"gate_proj": "up_proj", "up_proj": "gate_proj", ".w1.": ".w3.", ".w3.": ".w1."}


def format_of(name, wanted, is_v4):
    """"fp8", "fp4", "nvfp4" or None for one tensor."""
    if is_v4:
        if wanted != "fp8" and ROUTED.search(name):
            return wanted
        return "fp8" if FP8_V4.search(name) else None
    if wanted == "nvfp4":
        return "nvfp4" if MLP.search(name) else None
    return "fp8" if FP8_HF.search(name) else None


def shared_amax(name, tensors):
    """gate and up of one MLP share the larger maximum."""
    amax = np.abs(io.to_f32(tensors[name])).max()
    for mine, other in PARTNER.items():
        if mine in name:
            partner = tensors[name.replace(mine, other)]
            return max(amax, np.abs(io.to_f32(partner)).max())
    return amax


def quantize(tensors, wanted, is_v4, block):
    """({official tensors}, {the same values in F32})"""
    out, plain = {}, {}
    for name, t in tensors.items():
        kind = format_of(name, wanted, is_v4)
        if kind is None:
            out[name] = t
            plain[name] = t if t.dtype.startswith("I") else io.from_array(io.to_f32(t))
            continue
        w, stem = io.to_f32(t), name[: -len(".weight")]
        if kind == "fp8":
            scale_name = stem + ".scale" if is_v4 else name + "_scale_inv"
            out[name], out[scale_name], value = quantize_fp8(w, block, is_v4)
        elif kind == "fp4":
            out[name], out[stem + ".scale"], value = quantize_fp4(w)
        else:
            data = quantize_nvfp4(w, shared_amax(name, tensors))
            out[name], out[stem + ".weight_scale"], out[stem + ".weight_scale_2"], value = data
            out[stem + ".input_scale"] = io.from_array(np.float32(0.01))
        plain[name] = io.from_array(value.astype(np.float32))
    return out, plain


def quantized_config(config, wanted, is_v4, block):
    config = dict(config)
    fp8 = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }
    if is_v4:
        fp8["scale_fmt"] = "ue8m0"
        config["expert_dtype"] = "fp4" if wanted == "fp4" else "fp8"
        if wanted == "nvfp4":
            fp8["moe_quant_algo"] = "NVFP4"
            del config["expert_dtype"]
    elif wanted == "nvfp4":
        fp8 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    config["quantization_config"] = fp8
    return config


def copy_rest(source, target, config):
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokens.json", "generation_config.json", "tokenizer.json",
                 "tokenizer_config.json"):
        if (source / name).exists():
            (target / name).write_bytes((source / name).read_bytes())


def convert(source, target, wanted, dequantized=None, shards=1, block=128):
    source, target = Path(source), Path(target)
    config = json.loads((source / "config.json").read_text())
    is_v4 = config["model_type"] == "deepseek_v4"
    if wanted == "fp4" and not is_v4:
        raise SystemExit("error: fp4 with E8M0 scales is a format of V4 alone")
    if config.get("quantization_config"):
        raise SystemExit(f"error: {source} is quantized already")
    out, plain = quantize(io.read_checkpoint(source), wanted, is_v4, block)
    copy_rest(source, target, quantized_config(config, wanted, is_v4, block))
    io.write_checkpoint(target, out, shards)
    if dequantized:
        copy_rest(source, Path(dequantized), config)
        io.write_checkpoint(dequantized, plain)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", help="directory with config.json and unquantized weights")
    parser.add_argument("out", help="directory to write")
    parser.add_argument("--format", required=True, choices=["fp8", "fp4", "nvfp4"])
    parser.add_argument("--dequantized", metavar="DIR")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--block", type=int, default=128, help="side of an fp8 block")
    args = parser.parse_args()
    convert(args.case, args.out, args.format, args.dequantized, args.shards, args.block)


if __name__ == "__main__":
    main()
