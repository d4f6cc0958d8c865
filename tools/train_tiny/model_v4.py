"""The DeepSeek-V4 architecture in PyTorch, written for training many short documents at once.

Attention runs in blocks of 128 queries over 256 raw keys, plus all compressed entries under
a mask; documents packed into one sequence do not see each other. Weights live in one dict
under the official tensor names (experts stacked: `...experts.w1` [E, I, H]).
"""
import math
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.nn.functional as F

from layers import Model, best, chosen_weights, dense_mixture, linear, mlp, rms_norm, rope, rope_table, sub, tokens_per_expert, yarn_frequencies
from sinkhorn import sinkhorn

Tensor = torch.Tensor
HASH_SKEW = 0.6  # of the hash tables: expert e is drawn with weight (e + 1) ** -HASH_SKEW, before shuffling
SHIFT = 20.0  # exp(score - SHIFT): scores are bounded by the norms, so no running maximum is needed


@dataclass
class V4Config:
    """Field names as in the published config.json."""
    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 128
    o_groups: int = 4
    o_lora_rank: int = 128
    n_routed_experts: int = 16
    num_experts_per_tok: int = 3
    moe_intermediate_size: int = 128
    num_hash_layers: int = 2
    compress_ratios: list = field(default_factory=lambda: [0, 0, 4, 128, 4, 128, 0])
    sliding_window: int = 128
    index_n_heads: int = 8
    index_head_dim: int = 128
    index_topk: int = 128
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_original: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0

    @property
    def pad_to(self) -> int:
        """Sequence lengths are multiples of this."""
        return math.lcm(self.sliding_window, *(r for r in self.compress_ratios if r))


def shapes(c: V4Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model: name -> shape."""
    h, d, out = c.hidden_size, c.head_dim, {}
    out["embed.weight"] = out["head.weight"] = (c.vocab_size, h)
    out["norm.weight"] = (h,)
    blocks = [(f"layers.{i}.", i) for i in range(c.num_hidden_layers)] + [("mtp.0.", c.num_hidden_layers)]
    for p, i in blocks:
        ratio = c.compress_ratios[i]
        mix = c.hc_mult * (c.hc_mult + 2)
        for part in ("attn", "ffn"):
            out[f"{p}{part}_norm.weight"] = (h,)
            out[f"{p}hc_{part}_fn"] = (mix, c.hc_mult * h)
            out[f"{p}hc_{part}_base"] = (mix,)
            out[f"{p}hc_{part}_scale"] = (3,)
        a = p + "attn."
        out[a + "attn_sink"] = (c.num_attention_heads,)
        out[a + "wq_a.weight"] = (c.q_lora_rank, h)
        out[a + "q_norm.weight"] = (c.q_lora_rank,)
        out[a + "wq_b.weight"] = (c.num_attention_heads * d, c.q_lora_rank)
        out[a + "wkv.weight"] = (d, h)
        out[a + "kv_norm.weight"] = (d,)
        out[a + "wo_a.weight"] = (c.o_groups * c.o_lora_rank, c.num_attention_heads // c.o_groups * d)
        out[a + "wo_b.weight"] = (h, c.o_groups * c.o_lora_rank)
        if ratio:
            coff = 2 if ratio == 4 else 1
            pairs = [(a + "compressor.", d)]
            if ratio == 4:
                pairs.append((a + "indexer.compressor.", c.index_head_dim))
                out[a + "indexer.wq_b.weight"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
                out[a + "indexer.weights_proj.weight"] = (c.index_n_heads, h)
            for q, width in pairs:
                out[q + "ape"] = (ratio, coff * width)
                out[q + "wkv.weight"] = out[q + "wgate.weight"] = (coff * width, h)
                out[q + "norm.weight"] = (width,)
        f, e, m = p + "ffn.", c.n_routed_experts, c.moe_intermediate_size
        out[f + "gate.weight"] = (e, h)
        if i < c.num_hash_layers:
            out[f + "gate.tid2eid"] = (c.vocab_size, c.num_experts_per_tok)
        else:
            out[f + "gate.bias"] = (e,)
        out[f + "experts.w1"] = out[f + "experts.w3"] = (e, m, h)
        out[f + "experts.w2"] = (e, h, m)
        out[f + "shared_experts.w1.weight"] = out[f + "shared_experts.w3.weight"] = (m, h)
        out[f + "shared_experts.w2.weight"] = (h, m)
        if p == "mtp.0.":
            out[p + "e_proj.weight"] = out[p + "h_proj.weight"] = (h, h)
            out[p + "enorm.weight"] = out[p + "hnorm.weight"] = out[p + "norm.weight"] = (h,)
    for p in ("", "mtp.0."):
        out[p + "hc_head_fn"] = (c.hc_mult, c.hc_mult * h)
        out[p + "hc_head_base"] = (c.hc_mult,)
        out[p + "hc_head_scale"] = (1,)
    return out


def hash_table(shape: tuple[int, ...], n_experts: int, g: torch.Generator) -> Tensor:
    """Experts of each token, drawn without replacement and unevenly, in an order of its own for each layer."""
    order = torch.randperm(n_experts, generator=g)
    weight = -HASH_SKEW * (order + 1).float().log()
    keys = weight - (-torch.rand(shape[0], n_experts, generator=g).clamp_min(1e-9).log()).log()
    return keys.argsort(-1, descending=True)[:, :shape[1]].contiguous()


def init(c: V4Config, seed: int) -> dict[str, Tensor]:
    """Fresh float32 weights. The mixing starts as: mean of the streams in, add to all, keep streams; compressed
    entries start as means of the raw KV vectors, so that what attention learns of the window holds for them."""
    g = torch.Generator().manual_seed(seed)
    w = {}
    for name, shape in shapes(c).items():
        last = name.split(".")[-1]
        if name.endswith("norm.weight"):
            w[name] = torch.ones(shape)
        elif last == "tid2eid":
            w[name] = hash_table(shape, c.n_routed_experts, g)
        elif last in ("attn_sink", "bias", "ape"):
            w[name] = torch.zeros(shape)
        elif last.endswith("_scale"):
            w[name] = torch.full(shape, 0.01)
        elif last == "hc_head_base":
            w[name] = torch.full(shape, -1.1)
        elif last.endswith("_base"):
            n = c.hc_mult
            comb = torch.eye(n) * 4 - 2
            w[name] = torch.cat([torch.full((n,), -1.1), torch.zeros(n), comb.flatten()])
        else:
            std = 0.02 if last.endswith("_fn") or name in ("embed.weight", "head.weight") else shape[-1] ** -0.5 * 0.5
            w[name] = torch.randn(shape, generator=g) * std
    for name in w:
        attn, found, _ = name.partition("compressor.wkv.weight")
        if found and "indexer" not in attn:
            raw = w[attn + "wkv.weight"]
            w[name] = raw.repeat(w[name].shape[0] // raw.shape[0], 1)
            w[attn + "compressor.wgate.weight"] *= 0.1
    return w


def mix_coefficients(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, c: V4Config):
    """pre [..., 4], post [..., 4] and the logits of comb [..., 4, 4] for streams x [..., 4, H]."""
    n = c.hc_mult
    flat = x.flatten(-2).float()
    m = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + c.rms_norm_eps)
    pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + c.hc_eps
    post = 2 * torch.sigmoid(m[..., n:2 * n] * scale[1] + base[n:2 * n])
    logits = (m[..., 2 * n:] * scale[2] + base[2 * n:]).unflatten(-1, (n, n))
    return pre, post, logits


def hc_pre(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, c: V4Config):
    """Streams -> normed block input, and what hc_post needs."""
    pre, post, logits = mix_coefficients(x, fn, scale, base, c)
    h = (pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype)
    return rms_norm(h, norm, c.rms_norm_eps), post, logits


def hc_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_j = post_j y + sum_i C_ij X_i."""
    n = x.shape[-2]
    streams = x.float()
    mixed = sum(comb[..., i, :].unsqueeze(-1) * streams[..., i:i + 1, :] for i in range(n))
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(x.dtype)


def hc_last(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, c: V4Config) -> Tensor:
    """Streams -> the vector that the last norm takes."""
    flat = x.flatten(-2).float()
    m = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + c.rms_norm_eps)
    pre = torch.sigmoid(m * scale[0] + base) + c.hc_eps
    return (pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype)


def hc_head(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, c: V4Config) -> Tensor:
    """Streams -> normed vector for the output head."""
    return rms_norm(hc_last(x, fn, scale, base, c), norm, c.rms_norm_eps)


def compress(h: Tensor, p: dict, ratio: int, start: Tensor, table: Tensor, c: V4Config) -> Tensor:
    """Entries [B, T/ratio, d] of one compressor; start [B, T] is the first token of each token's document."""
    d = p["norm.weight"].shape[0]
    kappa = linear(h, p["wkv.weight"]).float().unflatten(1, (-1, ratio))
    gamma = linear(h, p["wgate.weight"]).float().unflatten(1, (-1, ratio)) + p["ape"]
    if ratio == 4:  # the first half of the channels feeds the next entry
        first = start[:, ::ratio] == torch.arange(0, h.shape[1], ratio, device=h.device)
        before_k = F.pad(kappa[:, :-1, :, :d], (0, 0, 0, 0, 1, 0))
        before_g = F.pad(gamma[:, :-1, :, :d], (0, 0, 0, 0, 1, 0))
        before_g = before_g.masked_fill(first[:, :, None, None], float("-inf"))
        kappa = torch.cat([before_k, kappa[..., d:]], 2)
        gamma = torch.cat([before_g, gamma[..., d:]], 2)
    entry = (torch.softmax(gamma, 2) * kappa).sum(2)
    return rope(rms_norm(entry, p["norm.weight"], c.rms_norm_eps).to(h.dtype), table)


def index_scores(h: Tensor, cq: Tensor, p: dict, start: Tensor, tables: dict, c: V4Config) -> Tensor:
    """S [B, T, T/4] f32: how much each query wants each entry."""
    n, d = c.index_n_heads, c.index_head_dim
    q = linear(cq, p["indexer.wq_b.weight"]).unflatten(-1, (n, d))
    q = rope(q, tables["compress"])
    keys = compress(h, sub(p, "indexer.compressor."), 4, start, tables["entry4"], c)
    weight = linear(h, p["indexer.weights_proj.weight"]).float() * (d ** -0.5 * n ** -0.5)
    dots = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).unflatten(1, (-1, n))
    return (F.relu(dots).float() * weight.unsqueeze(-1)).sum(2)


def softmax_weights(scores: Tensor, live: Tensor) -> Tensor:
    """Unnormalized, f32; the bound only keeps sums finite."""
    return torch.exp((scores.float() - SHIFT).clamp(max=60)).masked_fill(~live, 0)


def window_attention(q: Tensor, kv: Tensor, start: Tensor, win: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Queries [B, T, n, D] over the vectors [B, T, D] of the last `win` positions of their documents, query t at
    position t + offset: weighted sums [B, T, n, D] and sums of weights [B, T, n], f32."""
    b, t, n, d = q.shape
    nb = t // win
    blocks = kv.unflatten(1, (nb, win))
    keys = torch.cat([F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2)  # [B, nb, 2W, D]
    scores = torch.matmul(q.reshape(b, nb, win * n, d), keys.transpose(-1, -2)).view(b, t, n, 2 * win)
    pos = torch.arange(t, device=q.device)
    key_pos = (pos // win - 1)[:, None] * win + torch.arange(2 * win, device=q.device)[None]
    live = (key_pos <= pos[:, None]) & (key_pos > pos[:, None] + offset - win)
    live = live[None] & (key_pos[None] >= start[:, :, None])
    e = softmax_weights(scores, live[:, :, None])
    return torch.matmul(e.to(q.dtype).view(b, nb, win * n, 2 * win), keys).view(b, t, n, d).float(), e.sum(-1)


def entry_attention(q: Tensor, entries: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Queries over entries [B, w, D] where live [B, T, w]: weights [B, T, n, w] and weighted sums, f32."""
    b, t, n, d = q.shape
    scores = torch.bmm(q.reshape(b, t * n, d), entries.transpose(1, 2)).view(b, t, n, -1)
    e = softmax_weights(scores, live[:, :, None])
    return e, torch.bmm(e.to(q.dtype).view(b, t * n, -1), entries).view(b, t, n, d).float()


def attention_mass(e: Tensor, z: Tensor) -> Tensor:
    """What all heads together give each entry [B, T, w], without gradient."""
    return (e.detach() / z.detach().unsqueeze(-1)).sum(2)


def attention(h: Tensor, p: dict, start: Tensor, tables: dict, ratio: int, sparse: bool, c: V4Config,
              offset: int = 0, main_kv: Tensor | None = None, own_kv: tuple = ()):
    """One attention layer. Returns (output, kv, indexer loss).

    offset, main_kv and own_kv serve repeated drafting: row t then stands at position
    t + offset, sees main_kv of rows <= t, and the vectors of its own earlier drafts.
    """
    t, n, d = h.shape[1], c.num_attention_heads, c.head_dim
    table = tables["compress" if ratio else "main"][offset:offset + t]
    cq = rms_norm(linear(h, p["wq_a.weight"]), p["q_norm.weight"], c.rms_norm_eps)
    q = linear(cq, p["wq_b.weight"]).unflatten(-1, (n, d))
    q = rope(rms_norm(q, None, 1e-6), table) * d ** -0.5
    kv = rope(rms_norm(linear(h, p["wkv.weight"]), p["kv_norm.weight"], c.rms_norm_eps), table)
    seen = kv if main_kv is None else main_kv

    out, z = window_attention(q, seen, start, c.sliding_window, offset)
    z = z + torch.exp(p["attn_sink"] - SHIFT)

    loss = h.new_zeros((), dtype=torch.float32)
    if ratio:
        entries = compress(h, sub(p, "compressor."), ratio, start, tables[f"entry{ratio}"], c)
        n_entries = entries.shape[1]
        pos = torch.arange(t, device=h.device)
        w = torch.arange(n_entries, device=h.device)
        live = (w[None] < ((pos + 1) // ratio)[:, None])[None] & (w[None, None] * ratio >= start[:, :, None])
        visible = live
        if ratio == 4:
            wish = index_scores(h.detach(), cq.detach(), p, start, tables, c)
            wish = wish.masked_fill(~live, float("-inf"))
            if sparse and n_entries > c.index_topk:
                live = live & best(wish.detach(), c.index_topk)
        e, summed = entry_attention(q, entries, live)
        z = z + e.sum(-1)
        out = out + summed
        if ratio == 4:
            loss = index_loss(wish, attention_mass(e, z), live)
    for own in (*own_kv, kv) if main_kv is not None else ():
        e = torch.exp((q.float() * own.float().unsqueeze(2)).sum(-1) - SHIFT)
        z = z + e
        out = out + e.unsqueeze(-1) * own.float().unsqueeze(2)
    out = rope((out / z.unsqueeze(-1)).to(q.dtype), table, inverse=True)

    return grouped_output(out, p, c), kv, loss


def grouped_output(out: Tensor, p: dict, c: V4Config) -> Tensor:
    """Heads [B, T, n, D] -> [B, T, H] by groups of low rank."""
    wo_a = p["wo_a.weight"].unflatten(0, (c.o_groups, c.o_lora_rank))
    groups = out.flatten(-2).unflatten(-1, (c.o_groups, -1)).to(wo_a.dtype)
    low = torch.einsum("btgi,gri->btgr", groups, wo_a)
    return linear(low.flatten(-2), p["wo_b.weight"])


def index_loss(wish: Tensor, mass: Tensor, live: Tensor) -> Tensor:
    """KL(attention mass over entries || softmax of the indexer's scores), mean over rows."""
    total = mass.sum(-1, keepdim=True)
    target = mass / (total + 1e-9)
    logp = torch.log_softmax(wish.masked_fill(~live, -1e9), -1)
    rows = (target * ((target + 1e-9).log() - logp)).sum(-1)
    keep = (live.sum(-1) > 1).float()
    return (rows * keep).sum() / (keep.sum() + 1)


def route(h: Tensor, p: dict, ids: Tensor, c: V4Config) -> Tensor:
    """Mixture weights [B, T, E] f32, zero where not chosen."""
    a = torch.sqrt(F.softplus(F.linear(h.float(), p["gate.weight"].float())))
    if "gate.tid2eid" in p:
        chosen = p["gate.tid2eid"][ids]
    else:
        chosen = (a + p["gate.bias"]).detach().topk(c.num_experts_per_tok, -1).indices
    return chosen_weights(a, chosen, c.routed_scaling_factor)


def ffn(h: Tensor, p: dict, ids: Tensor, c: V4Config):
    """Routed plus shared experts. Returns (output, tokens per expert [E])."""
    weight = route(h, p, ids, c)
    y = dense_mixture(h, p["experts.w1"], p["experts.w3"], p["experts.w2"], weight, c.swiglu_limit)
    y = y + mlp(h, p["shared_experts.w1.weight"], p["shared_experts.w3.weight"],
                p["shared_experts.w2.weight"], c.swiglu_limit)
    return y, tokens_per_expert(weight)


class V4(Model):
    """The forward passes: trunk, head and MTP layer."""

    def __init__(self, config: V4Config, weights: dict[str, Tensor], max_len: int, compiled: bool = False):
        super().__init__(config, weights, dict(attention=attention, ffn=ffn, hc_pre=hc_pre, hc_post=hc_post, hc_head=hc_head), compiled)
        device = weights["embed.weight"].device
        c = config
        main = yarn_frequencies(c.qk_rope_head_dim, c.rope_theta)
        far = yarn_frequencies(c.qk_rope_head_dim, c.compress_rope_theta, c.rope_factor, c.rope_original,
                               c.beta_fast, c.beta_slow)
        n = max_len + 8
        self.angles = {"main": rope_table(main, n), "compress": rope_table(far, n),
                       "entry4": rope_table(far, n // 4 + 1, 4), "entry128": rope_table(far, n // 128 + 1, 128)}
        self.angles = {k: v.to(device) for k, v in self.angles.items()}
        self.blocks = [self._block(f"layers.{i}.") for i in range(c.num_hidden_layers)]
        self.mtp_block = self._block("mtp.0.")

    def routed_layers(self) -> list[str]:
        """Name prefixes in the order of the loads that trunk and mtp report."""
        return [f"layers.{i}.ffn." for i in range(self.c.num_hidden_layers)] + ["mtp.0.ffn."]

    def _block(self, prefix: str) -> dict:
        return self.parts_of(sub(self.w, prefix))

    @staticmethod
    def parts_of(p: dict) -> dict:
        """A layer's weights as block() takes them."""
        return {"hc": {k: v for k, v in p.items() if "." not in k or k in ("attn_norm.weight", "ffn_norm.weight")},
                "attn": sub(p, "attn."), "ffn": sub(p, "ffn.")}

    def _rope_tables(self, t: int, ratio: int) -> dict:
        out = {"main": self.angles["main"][:t + 4]} if not ratio else {"compress": self.angles["compress"][:t]}
        if ratio:
            out[f"entry{ratio}"] = self.angles[f"entry{ratio}"][:t // ratio]
        return out

    def block(self, x: Tensor, p: dict, ids: Tensor, start: Tensor | None, ratio: int, attend: Callable | None = None, **draft):
        """One layer; attend(h, its weights) takes the place of attention()."""
        c, hc = self.c, p["hc"]
        h, post, logits = self.f["hc_pre"](x, hc["hc_attn_fn"], hc["hc_attn_scale"], hc["hc_attn_base"],
                                           hc["attn_norm.weight"], c)
        y, kv, loss = attend(h, p["attn"]) if attend else self.f["attention"](
            h, p["attn"], start, self._rope_tables(x.shape[1], ratio), ratio, self.sparse, c, **draft)
        x = self.f["hc_post"](y, x, post, sinkhorn(logits))
        h, post, logits = self.f["hc_pre"](x, hc["hc_ffn_fn"], hc["hc_ffn_scale"], hc["hc_ffn_base"],
                                           hc["ffn_norm.weight"], c)
        y, load = self.f["ffn"](h, p["ffn"], ids, c)
        return self.f["hc_post"](y, x, post, sinkhorn(logits)), kv, loss, load

    def trunk(self, ids: Tensor, start: Tensor, taps: dict | None = None):
        """Streams after the last layer [B, T, 4, H], indexer loss, loads (one [E] per layer). taps gets the mean
        of the streams after the layers that it names."""
        c = self.c
        x = F.embedding(ids, self.w["embed.weight"]).unsqueeze(2).expand(-1, -1, c.hc_mult, -1)
        x, index, loads = x.contiguous(), 0.0, []
        for i, p in enumerate(self.blocks):
            x, _, loss, load = self.block(x, p, ids, start, c.compress_ratios[i])
            index = index + loss
            loads.append(load)
            if taps and i in taps:
                taps[i] = x.float().mean(2).to(x.dtype)
        return x, index, loads

    def head_input(self, x: Tensor, prefix: str = "") -> Tensor:
        """Normed vectors that the output head multiplies, of the main model or of the MTP layer."""
        w = self.w
        return self.f["hc_head"](x, w[prefix + "hc_head_fn"], w[prefix + "hc_head_scale"],
                                 w[prefix + "hc_head_base"], w[prefix + "norm.weight"], self.c)

    def mtp(self, x: Tensor, ids: Tensor, start: Tensor, step: int = 1, main_kv=None, own_kv=()):
        """Draft `step` (1, 2, ...): streams x of row t and token t+step -> streams that predict t+step+1."""
        w, p, c = self.w, "mtp.0.", self.c
        nxt = F.pad(ids[:, step:], (0, step))
        e = rms_norm(F.embedding(nxt, w["embed.weight"]), w[p + "enorm.weight"], c.rms_norm_eps)
        h = rms_norm(x, w[p + "hnorm.weight"], c.rms_norm_eps)
        x = linear(e, w[p + "e_proj.weight"]).unsqueeze(2) + linear(h, w[p + "h_proj.weight"])
        draft = dict(offset=step - 1, main_kv=main_kv, own_kv=tuple(own_kv)) if step > 1 else {}
        x, kv, _, load = self.block(x, self.mtp_block, nxt, start, c.compress_ratios[-1], **draft)
        return x, kv, load
