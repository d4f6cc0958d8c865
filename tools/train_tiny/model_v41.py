"""The DeepSeek-V4.1 architecture in PyTorch, for training many short documents at once. What it shares with V4 is
in model_v4.py.

All that happens to a token by itself sees the batch as one row [1, N, ...], so that batches of any shape with the
same number of tokens run the same compiled kernels; only attention and the indexer see rows.
"""
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.nn.functional as F

from engram import Addresses
from layers import Model, best, linear, rms_norm, rope, rope_table, sub, yarn_frequencies
from model_v4 import SHIFT, attention_mass, entry_attention, ffn, grouped_output, hc_post, index_loss, mix_coefficients, window_attention
from quantize import fp4_sim16, fp4_sim32, fp8_sim32, passed_through
from sinkhorn import sinkhorn

Tensor = torch.Tensor


@dataclass
class V41Config:
    """Field names as in the text_config of the published config.json."""
    tokenizer = ""  # where the classes of tokens come from; whoever makes the model says it
    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 10
    num_attention_heads: int = 4
    head_dim: int = 256
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 128
    o_groups: int = 4
    o_lora_rank: int = 64
    n_routed_experts: int = 12
    num_experts_per_tok: int = 3
    moe_intermediate_size: int = 128
    compress_ratios: list = field(default_factory=lambda: [0, 0, 2, 2, 2, 2, 1, 1, 1, 1])
    kv_source_layer_ids: list = field(default_factory=lambda: [2, 4, 6])
    index_source_layer_ids: list = field(default_factory=lambda: [2, 4, 6, 8])
    candidate_source_layer_id: int = 6
    candidate_topk_blocks: int = 128
    candidate_block_size: int = 8
    sliding_window: int = 128
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_topk: int = 256
    engram_layer_ids: list = field(default_factory=lambda: [1, 4])
    engram_num_embeddings: list = field(default_factory=lambda: [6126, 6332])
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 1009
    engram_n_heads: int = 2
    engram_head_dim: int = 64
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 3108
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_original: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-20
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0

    @property
    def pad_to(self) -> int:
        """Sequence lengths are multiples of this."""
        return 2 * self.sliding_window


def shapes(c: V41Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the trunk: name -> shape."""
    h, d, hc, out = c.hidden_size, c.head_dim, c.hc_mult, {}
    out["embed.weight"] = out["head.weight"] = (c.vocab_size, h)
    out["norm.weight"] = (h,)
    for i in range(c.num_hidden_layers):
        p, mix = f"layers.{i}.", hc * (hc + 2)
        for part in ("attn", "ffn"):
            out[f"{p}{part}_norm.weight"] = (h,)
            out[f"{p}hc_{part}_fn"] = (mix, hc * h)
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
        if i in c.kv_source_layer_ids:
            out[a + "compressor.wkv.weight"] = (d, h)
            if c.compress_ratios[i] > 1:
                out[a + "compressor.wgate.weight"] = (d, h)
            out[a + "compressor.norm.weight"] = (d,)
            out[a + "indexer.wk.weight"] = (c.index_head_dim, d)
            out[a + "indexer.k_norm.weight"] = (c.index_head_dim,)
        if i in c.index_source_layer_ids:
            out[a + "indexer.wq_b.weight"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            out[a + "indexer.weights_proj.weight"] = (c.index_n_heads, h)
        if i in c.engram_layer_ids:
            columns = c.engram_n_heads * (c.engram_max_ngram_size - 1)
            out[p + "engram.embed.weight"] = (c.engram_num_embeddings[c.engram_layer_ids.index(i)], c.engram_head_dim)
            out[p + "engram.wkv.weight"] = ((hc + 1) * h, columns * c.engram_head_dim)
            out[p + "engram.q_weight"] = out[p + "engram.k_weight"] = (hc, h)
        f, e, m = p + "ffn.", c.n_routed_experts, c.moe_intermediate_size
        out[f + "gate.weight"] = (e, h)
        out[f + "gate.bias"] = (e,)
        out[f + "experts.w1"] = out[f + "experts.w3"] = (e, m, h)
        out[f + "experts.w2"] = (e, h, m)
        out[f + "shared_experts.w1.weight"] = out[f + "shared_experts.w3.weight"] = (m, h)
        out[f + "shared_experts.w2.weight"] = (h, m)
    return out


def init(c: V41Config, seed: int) -> dict[str, Tensor]:
    """Fresh float32 weights. The mixing starts as: mean of the streams in, add to all, keep streams. Layers that
    read one shared cache start with the same window projection as its entries, so that what attention learns of
    the window holds for them."""
    g = torch.Generator().manual_seed(seed)
    w = {}
    for name, shape in shapes(c).items():
        last = name.split(".")[-1]
        if name.endswith(("norm.weight", "q_weight", "k_weight")):
            w[name] = torch.ones(shape)
        elif last in ("attn_sink", "bias"):
            w[name] = torch.zeros(shape)
        elif last.endswith("_scale"):
            w[name] = torch.full(shape, 0.01)
        elif last.endswith("_base"):
            n = c.hc_mult
            w[name] = torch.cat([torch.full((n,), -1.1), torch.zeros(n), (torch.eye(n) * 4 - 2).flatten()])
        else:
            std = 0.02 if last.endswith("_fn") or "embed." in name or name == "head.weight" else shape[-1] ** -0.5 * 0.5
            w[name] = torch.randn(shape, generator=g) * std
    source = None
    for i in range(c.num_hidden_layers):
        a = f"layers.{i}.attn."
        if i in c.kv_source_layer_ids:
            source = w[a + "wkv.weight"]
            w[a + "compressor.wkv.weight"] = source.clone()
            if c.compress_ratios[i] > 1:
                w[a + "compressor.wgate.weight"] *= 0.1
        elif c.compress_ratios[i]:
            w[a + "wkv.weight"] = source.clone()
    return w


def hc_enter(x: Tensor, pre: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, c: V41Config):
    """Streams mixed by what the block before predicted -> normed block input; the prediction for the next block,
    and what hc_post needs."""
    own, post, logits = mix_coefficients(x, fn, scale, base, c)
    return rms_norm(collapse(x, pre), norm, c.rms_norm_eps), own, post, logits


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype)


def project(h: Tensor, p: dict, table: Tensor, c: V41Config):
    """Latent of the query, queries [1, N, n, D] with the scale of the scores, window vectors [1, N, D]."""
    latent = rms_norm(linear(h, p["wq_a.weight"]), p["q_norm.weight"], c.rms_norm_eps)
    q = linear(latent, p["wq_b.weight"]).unflatten(-1, (c.num_attention_heads, c.head_dim))
    kv = rms_norm(linear(h, p["wkv.weight"]), p["kv_norm.weight"], c.rms_norm_eps)
    return latent, rope(q, table) * c.head_dim ** -0.5, rope(kv, table)


def write(h: Tensor, p: dict, ratio: int, table: Tensor, c: V41Config):
    """Entries and index keys of groups of `ratio` tokens. Only attention trains the latents."""
    value = linear(h, p["compressor.wkv.weight"]).float().unflatten(1, (-1, ratio))
    if ratio > 1:
        gate = linear(h, p["compressor.wgate.weight"]).float().unflatten(1, (-1, ratio))
        value = value * torch.softmax(gate, 2)
    latent = rms_norm(value.sum(2), p["compressor.norm.weight"], c.rms_norm_eps).to(h.dtype)
    key = rms_norm(linear(latent.detach(), p["indexer.wk.weight"]), p["indexer.k_norm.weight"], c.rms_norm_eps)
    return rope(latent, table), rope(key, table)


def ask(h: Tensor, latent: Tensor, p: dict, table: Tensor, c: V41Config):
    """Index queries [1, N, heads, d] and the weights of the heads [1, N, heads] f32."""
    q = linear(latent.detach(), p["indexer.wq_b.weight"]).unflatten(-1, (c.index_n_heads, c.index_head_dim))
    weight = linear(h.detach(), p["indexer.weights_proj.weight"]).float() * (c.index_head_dim * c.index_n_heads) ** -0.5
    return rope(q, table), weight


def index_scores(q: Tensor, weight: Tensor, keys: Tensor, rows: int) -> Tensor:
    """S [B, T, w] f32: how much each query wants each entry."""
    n, d = q.shape[-2:]
    dots = torch.bmm(q.reshape(rows, -1, d), keys.reshape(rows, -1, d).transpose(1, 2)).unflatten(1, (-1, n))
    return (F.relu(dots).float() * weight.view(rows, -1, n, 1)).sum(2)


def pool(score: Tensor, ratio: int, c: V41Config) -> Tensor:
    """Mask [B, T, w] of the best blocks of entries, the block of the newest entry always among them."""
    size, (_, t, n) = c.candidate_block_size, score.shape
    blocks = F.pad(score, (0, -n % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    newest = ((torch.arange(t, device=score.device) + 1) // ratio - 1) // size
    blocks = blocks.masked_fill(torch.arange(blocks.shape[-1], device=score.device) == newest[:, None], torch.inf)
    return best(blocks, c.candidate_topk_blocks).repeat_interleave(size, -1)[..., :n]


def attend(q: Tensor, kv: Tensor, entries: Tensor | None, live: Tensor | None, start: Tensor, sink: Tensor, wants_mass: bool, c: V41Config):
    """Heads' outputs [1, N, n, D], and what each entry got [B, T, w] if that is wanted."""
    b, t = start.shape
    q, kv = q.view(b, t, *q.shape[-2:]), kv.view(b, t, -1)
    out, z = window_attention(q, kv, start, c.sliding_window)
    z, mass = z + torch.exp(sink - SHIFT), None
    if entries is not None:
        e, summed = entry_attention(q, entries.view(b, -1, kv.shape[-1]), live)
        out, z = out + summed, z + e.sum(-1)
        mass = attention_mass(e, z) if wants_mass else None
    return (out / z.unsqueeze(-1)).to(q.dtype).flatten(0, 1).unsqueeze(0), mass


def output(out: Tensor, p: dict, table: Tensor, c: V41Config) -> Tensor:
    return grouped_output(rope(out, table, inverse=True), p, c)


def engram(x: Tensor, rows: Tensor, wkv: Tensor, q_weight: Tensor, k_weight: Tensor, c: V41Config) -> Tensor:
    """Streams plus the value of the table's rows [1, N, columns * d], by a gate for each stream."""
    u = linear(rows, wkv).unflatten(-1, (c.hc_mult + 1, -1)).float()
    key, value, streams = u[..., :-1, :], u[..., -1:, :], x.float()
    s = (rms_norm(streams, q_weight * k_weight, c.rms_norm_eps) * rms_norm(key, None, c.rms_norm_eps)).sum(-1) * c.hidden_size ** -0.5
    root = s.abs().clamp_min(1e-6).sqrt()
    gate = torch.sigmoid(torch.where(s < 0, -root, root))
    return (streams + gate.unsqueeze(-1) * value).to(x.dtype)


class V41(Model):
    """The forward pass of the trunk. With `rounded`, cached vectors, entries and index keys and queries are rounded
    as the official program rounds them; `index` says whether the indexers are trained."""

    def __init__(self, config: V41Config, weights: dict[str, Tensor], max_len: int, compiled: bool = False):
        parts = dict(hc_enter=hc_enter, hc_post=hc_post, project=project, write=write, ask=ask, index_scores=index_scores, attend=attend,
                     output=output, ffn=ffn, engram=engram, index_loss=index_loss, best=best)
        super().__init__(config, weights, parts, compiled)
        c, device = config, weights["embed.weight"].device
        main = yarn_frequencies(c.qk_rope_head_dim, c.rope_theta)
        far = yarn_frequencies(c.qk_rope_head_dim, c.compress_rope_theta, c.rope_factor, c.rope_original, c.beta_fast, c.beta_slow)
        self.angles = {"main": rope_table(main, max_len + 8), 1: rope_table(far, max_len), 2: rope_table(far, max_len // 2, 2)}
        self.angles = {k: v.to(device) for k, v in self.angles.items()}
        self.addresses = Addresses(c, device)
        self.blocks = [self.parts_of(sub(weights, f"layers.{i}.")) for i in range(c.num_hidden_layers)]
        self.rounded, self.index = False, True

    @staticmethod
    def parts_of(p: dict) -> dict:
        """A layer's weights as block() takes them."""
        return {**p, **{k: sub(p, k + ".") for k in ("attn", "ffn", "engram")}}

    def routed_layers(self) -> list[str]:
        """Name prefixes in the order of the loads that the trunk reports."""
        return [f"layers.{i}.ffn." for i in range(self.c.num_hidden_layers)]

    def as_cached(self, rule, x: Tensor) -> Tensor:
        return passed_through(rule, x) if self.rounded else x

    def tables(self, b: int, t: int) -> dict:
        """Rotations of all rows, one behind the other."""
        return {k: v[:t // (2 if k == 2 else 1)].repeat(b, 1, 1) for k, v in self.angles.items()}

    def choose(self, layer: int, h: Tensor, latent: Tensor, state: dict) -> None:
        """Sets what layers from this one on may read of the shared cache."""
        c, p, visible = self.c, self.blocks[layer]["attn"], state["visible"]
        width = visible.shape[-1]
        state["wish"], state["live"], state["mass"] = None, visible, []
        selects = self.sparse and width > c.index_topk
        if not (selects or self.index and torch.is_grad_enabled()):
            return
        with torch.set_grad_enabled(self.index and torch.is_grad_enabled()):
            q, weight = self.f["ask"](h, latent, p, state["tables"][1], c)
            wish = self.f["index_scores"](self.as_cached(fp4_sim32, q), weight, state["keys"], visible.shape[0])
        if self.index:
            state["wish"] = wish
        if not selects:
            return
        score = wish.detach().masked_fill(~visible, -torch.inf)
        if layer == c.candidate_source_layer_id:
            state["pool"] = pool(score, c.compress_ratios[layer], c) if width > c.candidate_topk_blocks * c.candidate_block_size else None
        elif layer > c.candidate_source_layer_id >= 0 and state["pool"] is not None:
            visible = visible & state["pool"]
            score = score.masked_fill(~visible, -torch.inf)
        state["live"] = self.f["best"](score, c.index_topk) & visible

    def attention(self, layer: int, h: Tensor, start: Tensor, state: dict) -> Tensor:
        c, f, p = self.c, self.f, self.blocks[layer]["attn"]
        ratio, tables = c.compress_ratios[layer], state["tables"]
        table = tables[1 if ratio else "main"]
        latent, q, kv = f["project"](h, p, table, c)
        kv = self.as_cached(fp8_sim32, kv)
        if layer in c.kv_source_layer_ids:
            entries, keys = f["write"](h, p, ratio, tables[ratio], c)
            state.update(entries=self.as_cached(fp4_sim16, entries), keys=self.as_cached(fp4_sim32, keys), visible=visible(start, ratio))
        if layer in c.index_source_layer_ids:
            self.choose(layer, h, latent, state)
        shared = (state["entries"], state["live"]) if ratio else (None, None)
        wants = bool(ratio) and state["wish"] is not None
        out, mass = f["attend"](q, kv, *shared, start, p["attn_sink"], wants, c)
        if wants:
            state["mass"].append(mass)
        return f["output"](out, p, table, c)

    def streams(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the tokens ids [1, N], and how the first block mixes them."""
        x = F.embedding(ids, self.w["embed.weight"]).unsqueeze(2).repeat(1, 1, self.c.hc_mult, 1)
        pre = x.new_zeros(*x.shape[:3], dtype=torch.float32)
        pre[..., 0] = 1
        return x, pre.requires_grad_(torch.is_grad_enabled())  # as in later layers, so that one kernel serves all

    def block(self, x: Tensor, pre: Tensor, p: dict, ids: Tensor, attend: Callable, c: V41Config):
        """One layer, whose attention is attend(h): streams, how the next block mixes them, the experts' load."""
        f = self.f
        h, pre, post, mix = f["hc_enter"](x, pre, p["hc_attn_fn"], p["hc_attn_scale"], p["hc_attn_base"], p["attn_norm.weight"], c)
        x = f["hc_post"](attend(h), x, post, sinkhorn(mix))
        h, pre, post, mix = f["hc_enter"](x, pre, p["hc_ffn_fn"], p["hc_ffn_scale"], p["hc_ffn_base"], p["ffn_norm.weight"], c)
        y, load = f["ffn"](h, p["ffn"], ids, c)
        return f["hc_post"](y, x, post, sinkhorn(mix)), pre, load

    def trunk(self, ids: Tensor, start: Tensor, taps: dict | None = None):
        """What the head reads, before its norm [B, T, H]; indexer loss; loads (one [E] per layer). taps gets the mean
        of the streams before the layers that it names."""
        c, f = self.c, self.f
        b, t = ids.shape
        x, pre = self.streams(ids.reshape(1, -1))
        rows = dict(zip(c.engram_layer_ids, self.addresses.rows(ids, start)))
        state, index, loads = {"tables": self.tables(b, t), "pool": None}, 0.0, []
        for i, p in enumerate(self.blocks):
            if i in rows:
                e = p["engram"]
                found = F.embedding(rows[i].view(1, b * t, -1), e["embed.weight"]).flatten(2)
                x = f["engram"](x, found, e["wkv.weight"], e["q_weight"], e["k_weight"], c)
            if taps and i in taps:
                taps[i] = x.float().mean(2).to(x.dtype).view(b, t, -1)
            x, pre, load = self.block(x, pre, p, ids, lambda h: self.attention(i, h, start, state), c)
            loads.append(load)
            if state.get("mass") and i + 1 in (*c.index_source_layer_ids, len(self.blocks)):
                index = index + f["index_loss"](state["wish"], sum(state["mass"]), state["live"])
        return collapse(x, pre).view(b, t, -1), index, loads

    def head_input(self, x: Tensor) -> Tensor:
        """Normed vectors that the output head multiplies."""
        return rms_norm(x, self.w["norm.weight"], self.c.rms_norm_eps)


def visible(start: Tensor, ratio: int) -> Tensor:
    """[B, T, T / ratio]: entries of the query's document whose groups are complete."""
    t = start.shape[1]
    pos, w = torch.arange(t, device=start.device), torch.arange(t // ratio, device=start.device)
    return (w < ((pos + 1) // ratio)[:, None])[None] & (w * ratio >= start[:, :, None])
