"""Rounding to the official weight formats: FP8 E4M3 with UE8M0 blocks of 128x128 (V4) or 32x32 (V4.1), packed FP4
E2M1 with UE8M0 per 32 inputs, rows of FP8 with UE8M0 per 32 (Engram), and FP8 with float32 block scales (V3).
Encode for the file, decode for the proof. At the end V4.1's rounding of what attention caches.

All functions take [..., rows, columns] in float32.
"""
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4_EDGES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])


def power_of_two_up(x: Tensor) -> Tensor:
    """Smallest power of two >= x, x > 0."""
    mantissa, exponent = torch.frexp(x)
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(x), exponent)


@dataclass
class Blocks:
    """How a family stores FP8."""
    rows: int
    cols: int
    pow2: bool = True


FP8_BLOCKS = {"v3": Blocks(128, 128, pow2=False), "v4": Blocks(128, 128), "v41": Blocks(32, 32)}
TABLE_BLOCKS = Blocks(1, 32)


def fp8_scales(w: Tensor, b: Blocks) -> Tensor:
    """Block scales [..., R, C] of a matrix whose sides are multiples of the block's."""
    s = w.unflatten(-1, (-1, b.cols)).unflatten(-3, (-1, b.rows)).abs().amax((-3, -1)).clamp_min(1e-12) / 448
    return power_of_two_up(s) if b.pow2 else s


def spread(scale: Tensor, shape: tuple, b: Blocks) -> Tensor:
    """Block scales to the size of the matrix."""
    return scale.repeat_interleave(b.cols, -1).repeat_interleave(b.rows, -2)[..., :shape[-2], :shape[-1]]


def padded(w: Tensor, b: Blocks) -> Tensor:
    """Zero rows and columns up to whole blocks."""
    return torch.nn.functional.pad(w, (0, -w.shape[-1] % b.cols, 0, -w.shape[-2] % b.rows))


def fp8_encode(w: Tensor, b: Blocks) -> tuple[Tensor, Tensor]:
    """(E4M3 codes, float32 scales)."""
    s = fp8_scales(padded(w, b), b)
    codes = (w / spread(s, w.shape, b)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, s


def fp8_decode(codes: Tensor, scale: Tensor, b: Blocks) -> Tensor:
    return codes.float() * spread(scale, codes.shape, b)


def fp8_round(w: Tensor, b: Blocks) -> Tensor:
    """The value that a reader of the file gets."""
    return fp8_decode(*fp8_encode(w, b), b)


def fp4_codes(w: Tensor) -> tuple[Tensor, Tensor]:
    """(codes 0..15 as uint8, float32 scales [..., rows, columns/32]); midpoints go to the even code."""
    groups = w.unflatten(-1, (-1, 32))
    s = power_of_two_up(groups.abs().amax(-1).clamp_min(1e-12) / 6)
    x = groups / s.unsqueeze(-1)
    code = e2m1_code(x)
    code = code + 8 * (x < 0).long() * (code > 0).long()
    return code.flatten(-2).to(torch.uint8), s


def e2m1_code(x: Tensor) -> Tensor:
    """Code of |x|, 0..7."""
    edges = FP4_EDGES.to(x.device)
    low = torch.bucketize(x.abs(), edges)                 # ties go down
    high = torch.bucketize(x.abs(), edges, right=True)    # ties go up
    return torch.where(low % 2 == 0, low, high)


def e2m1(x: Tensor) -> Tensor:
    return FP4.to(x.device)[e2m1_code(x)].copysign(x)


def fp4_decode(code: Tensor, scale: Tensor) -> Tensor:
    value = FP4.to(code.device)[(code & 7).long()] * torch.where(code >= 8, -1.0, 1.0)
    return value * scale.repeat_interleave(32, -1)


def fp4_round(w: Tensor) -> Tensor:
    return fp4_decode(*fp4_codes(w))


def fp4_pack(code: Tensor) -> Tensor:
    """Two codes a byte, even column in the low nibble; dtype int8 as in the official files."""
    return (code[..., 0::2] | (code[..., 1::2] << 4)).view(torch.int8)


def fp4_unpack(packed: Tensor) -> Tensor:
    b = packed.view(torch.uint8)
    return torch.stack([b & 15, b >> 4], -1).flatten(-2)


def e8m0_encode(scale: Tensor) -> Tensor:
    """Powers of two to biased exponents (uint8)."""
    return (torch.frexp(scale)[1] - 1 + 127).to(torch.uint8)


def e8m0_decode(code: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(code.shape), code.int() - 127)


def format_of(name: str, family: str) -> str:
    """fp4, fp8, bf16 or f32: how the official checkpoints store a tensor."""
    last = name.split(".")[-1]
    if name.endswith("tid2eid"):
        return "i64"
    if family == "v3":
        if "e_score_correction_bias" in name:
            return "f32"
        plain = ("norm" in name or "embed" in name or "lm_head" in name or "eh_proj" in name or ".gate.weight" in name)
        return "bf16" if plain else "fp8"
    if ".experts." in name:
        return "fp4"
    if name.endswith("engram.embed.weight"):
        return "table"
    if last in ("attn_sink", "ape", "bias", "bias_vl") or last.startswith("hc_"):
        return "f32"
    bf16 = ("embed.", "head.", "norm.weight", "compressor.w", "weights_proj", "gate.weight", "indexer.wk.", "q_weight", "k_weight")
    return "bf16" if any(b in name for b in bf16) else "fp8"


def round_to(w: Tensor, fmt: str, family: str) -> Tensor:
    """Float32 values as they come back from the file."""
    if fmt == "fp4":
        return fp4_round(w)
    if fmt in ("fp8", "table"):
        return fp8_round(w, blocks_of(fmt, family))
    return w.bfloat16().float() if fmt == "bf16" else w


def blocks_of(fmt: str, family: str) -> Blocks:
    return TABLE_BLOCKS if fmt == "table" else FP8_BLOCKS[family]


# ---- what V4.1 caches ----


def fp8_sim32(x: Tensor) -> Tensor:
    """Window vectors: E4M3 with a power of two per 32."""
    g = x.float().unflatten(-1, (-1, 32))
    s = power_of_two_up(g.abs().amax(-1, keepdim=True).clamp_min(1e-4) * (1 / 448))
    return ((g / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s).flatten(-2).to(x.dtype)


def fp4_sim32(x: Tensor) -> Tensor:
    """Index keys and queries: E2M1 with a power of two per 32."""
    g = x.float().unflatten(-1, (-1, 32))
    s = power_of_two_up(g.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0 ** -126) * (1 / 6))
    return (e2m1((g / s).clamp(-6, 6)) * s).flatten(-2).to(x.dtype)


def fp4_sim16(x: Tensor) -> Tensor:
    """Shared entries: E2M1 with E4M3 per 16."""
    g = x.float().unflatten(-1, (-1, 16))
    s = (g.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0 ** -9) / 6).to(torch.float8_e4m3fn).float()
    return (e2m1((g / s).clamp(-6, 6)) * s).flatten(-2).to(x.dtype)


def passed_through(rule, x: Tensor) -> Tensor:
    """Rounded by rule, the gradient as if it were not."""
    with torch.no_grad():
        change = rule(x) - x
    return x + change
