"""Rounding to the official weight formats: FP8 E4M3 with 128x128 UE8M0 blocks, packed FP4 E2M1 with
UE8M0 per 32 inputs, and FP8 with float32 block scales (V3). Encode for the file, decode for the proof.

All functions take [..., rows, columns] in float32.
"""
import torch

Tensor = torch.Tensor
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4_EDGES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])


def power_of_two_up(x: Tensor) -> Tensor:
    """Smallest power of two >= x, x > 0."""
    mantissa, exponent = torch.frexp(x)
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(x), exponent)


def blocks(w: Tensor, n: int = 128) -> Tensor:
    """[..., R, n, C, n] view of a matrix whose sides are multiples of n."""
    return w.unflatten(-1, (-1, n)).unflatten(-3, (-1, n))


def fp8_scales(w: Tensor, pow2: bool) -> Tensor:
    """Block scales [..., R, C]."""
    s = blocks(w).abs().amax((-3, -1)).clamp_min(1e-12) / 448
    return power_of_two_up(s) if pow2 else s


def spread(scale: Tensor) -> Tensor:
    """Block scales to the size of the matrix."""
    return scale.repeat_interleave(128, -1).repeat_interleave(128, -2)


def pad128(w: Tensor) -> Tensor:
    """Zero rows and columns up to multiples of 128."""
    return torch.nn.functional.pad(w, (0, -w.shape[-1] % 128, 0, -w.shape[-2] % 128))


def fp8_encode(w: Tensor, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """(E4M3 codes, float32 scales)."""
    rows, cols = w.shape[-2:]
    s = fp8_scales(pad128(w), pow2)
    codes = (w / spread(s)[..., :rows, :cols]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, s


def fp8_round(w: Tensor, pow2: bool = True) -> Tensor:
    """The value that a reader of the file gets."""
    rows, cols = w.shape[-2:]
    codes, s = fp8_encode(w, pow2)
    return codes.float() * spread(s)[..., :rows, :cols]


def fp4_codes(w: Tensor) -> tuple[Tensor, Tensor]:
    """(codes 0..15 as uint8, float32 scales [..., rows, columns/32]); midpoints go to the even code."""
    groups = w.unflatten(-1, (-1, 32))
    s = power_of_two_up(groups.abs().amax(-1).clamp_min(1e-12) / 6)
    x = groups / s.unsqueeze(-1)
    edges = FP4_EDGES.to(w.device)
    low = torch.bucketize(x.abs(), edges)                 # ties go down
    high = torch.bucketize(x.abs(), edges, right=True)    # ties go up
    code = torch.where(low % 2 == 0, low, high)
    code = code + 8 * (x < 0).long() * (code > 0).long()
    return code.flatten(-2).to(torch.uint8), s


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
    if last in ("attn_sink", "ape", "bias") or last.startswith("hc_"):
        return "f32"
    bf16 = ("embed.", "head.", "norm.weight", "compressor.w", "weights_proj", "gate.weight")
    return "bf16" if any(b in name for b in bf16) else "fp8"


def round_to(w: Tensor, fmt: str, family: str) -> Tensor:
    """Float32 values as they come back from the file."""
    if fmt == "fp4":
        return fp4_round(w)
    if fmt == "fp8":
        return fp8_round(w, family == "v4")
    return w.bfloat16().float() if fmt == "bf16" else w
