"""Pieces shared by the V4 and V3 models: linear, norms, rotary tables, the dense mixture, the frame of a model.

Everything but the frame is a plain function over tensors, so that it can be compiled by itself and
tested by itself. Shapes: B sequences, T tokens, H hidden, E experts, I expert width.
"""
import math

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
F32_WORK = ("norm.weight", "hc_", "attn_sink", "ape", "bias", "gate.weight", "layernorm")  # float32 in every run


def sub(p: dict, prefix: str) -> dict:
    """The entries of p under a prefix, without it."""
    return {k[len(prefix):]: v for k, v in p.items() if k.startswith(prefix)}


def working(name: str, w: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """A weight as the model reads it: matrices in dtype, what is small and delicate as it is."""
    keep = any(part in name for part in F32_WORK) or not w.is_floating_point()
    return w.to(device, w.dtype if keep else dtype)


def linear(x: Tensor, w: Tensor) -> Tensor:
    """y = W x in the dtype of the weight (bf16 in training, f32 in the golden checks)."""
    return F.linear(x.to(w.dtype), w)


def rms_norm(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm, all in f32, one cast at the end."""
    f = x.float()
    f = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)
    if w is not None:
        f = f * w.float()
    return f.to(x.dtype)


def yarn_frequencies(dim: int, theta: float, factor: float = 1.0, original: int = 0,
                     beta_fast: float = 32, beta_slow: float = 1) -> Tensor:
    """Rotary frequencies [dim/2]; factor 1 means no scaling."""
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if factor == 1.0:
        return freq

    def corr(rotations: float) -> float:
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(corr(beta_fast)), 0)
    high = min(math.ceil(corr(beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return freq * (1 - ramp) + freq / factor * ramp


def rope_table(freq: Tensor, n: int, stride: int = 1) -> Tensor:
    """[n, dim/2, 2] cosines and sines of positions 0, stride, 2*stride, ..."""
    angle = torch.arange(n, dtype=torch.float64)[:, None] * stride * freq[None]
    return torch.stack([angle.cos(), angle.sin()], -1).float()


def rope(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2*table.shape[-2] channels, interleaved pairs.

    x [B, T, D] or [B, T, heads, D]; table [T, d/2, 2].
    """
    d = table.shape[-2] * 2
    if x.dim() == 4:
        table = table[:, None]
    cos, sin = table[..., 0], table[..., 1]
    if inverse:
        sin = -sin
    tail = x[..., -d:].float().unflatten(-1, (d // 2, 2))
    a, b = tail[..., 0], tail[..., 1]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([x[..., :-d], turned.to(x.dtype)], -1)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up with V4's clamps (limit 0: none)."""
    if limit > 0:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    return F.silu(gate) * up


def dense_mixture(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weight: Tensor, limit: float) -> Tensor:
    """All experts on all tokens, weighted by weight [..., E] (zero where not chosen).

    w1, w3 [E, I, H], w2 [E, H, I]. At 16 small experts three plain products are cheaper
    than sorting tokens, and they need no padding.
    """
    n_experts, inter, hidden = w1.shape
    gate = linear(x, w1.reshape(-1, hidden))
    up = linear(x, w3.reshape(-1, hidden))
    act = swiglu(gate.float(), up.float(), limit).unflatten(-1, (n_experts, inter))
    act = (act * weight.unsqueeze(-1)).flatten(-2).to(w2.dtype)
    return F.linear(act, w2.permute(1, 0, 2).reshape(hidden, -1))


def mlp(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float) -> Tensor:
    """One SwiGLU block; w1 gate, w3 up [I, H], w2 down [H, I]."""
    return linear(swiglu(linear(x, w1).float(), linear(x, w3).float(), limit).to(w2.dtype), w2)


def chosen_weights(scores: Tensor, chosen: Tensor, scale: float) -> Tensor:
    """Mixture weights [..., E]: the scores of the chosen experts, normalized to `scale`, zero elsewhere."""
    mask = F.one_hot(chosen, scores.shape[-1]).sum(-2)
    picked = scores * mask
    return picked / (picked.sum(-1, keepdim=True) + 1e-20) * scale


def best(score: Tensor, k: int) -> Tensor:
    """Mask of the k largest of the last dimension, of equal ones the first."""
    if score.shape[-1] <= k:
        return torch.ones_like(score, dtype=torch.bool)
    least = score.topk(k, -1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = score > least, score == least
    return above | equal & (equal.cumsum(-1, dtype=torch.int32) <= k - above.sum(-1, keepdim=True, dtype=torch.int32))


def tokens_per_expert(weight: Tensor) -> Tensor:
    return (weight.detach() > 0).float().sum((0, 1))


class Model:
    """Weights by name, and the parts of the forward pass: as they are, or through torch.compile."""

    head = "head.weight"
    mtp = None  # the pass of the MTP layer, where there is one

    def __init__(self, config, weights: dict[str, Tensor], parts: dict, compiled: bool):
        self.c, self.w = config, weights
        self.sparse = False  # let the indexer choose; means nothing where there is none
        self.plain = parts
        self.fast = {k: torch.compile(f, dynamic=False) for k, f in parts.items()} if compiled else parts
        self.f = self.fast

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.w[self.head])
