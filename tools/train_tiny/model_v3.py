"""The DeepSeek-V3 architecture in PyTorch: latent attention, group-limited sigmoid routing, the MTP layer.

Attention is the naive form (keys and values expanded from the latent), in chunks of queries under
one additive mask per chunk; documents packed into one sequence do not see each other. Weights live
in one dict under the official tensor names (experts stacked: `...experts.gate_proj` [E, I, H]).
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from layers import Model, chosen_weights, dense_mixture, linear, mlp, rms_norm, rope, rope_table, sub, tokens_per_expert, yarn_frequencies

Tensor = torch.Tensor
CHUNK = 1024  # queries at a time: what lies behind the last of them is not computed


@dataclass
class V3Config:
    """Field names as in the published config.json; rope_* and mscale* lie in its rope_scaling."""
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 384
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    num_attention_heads: int = 2
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    rope_original: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    rms_norm_eps: float = 1e-6

    pad_to = 8  # sequence lengths are multiples of this

    @property
    def softmax_scale(self) -> float:
        m = 0.1 * self.mscale_all_dim * math.log(self.rope_factor) + 1 if self.rope_factor > 1 else 1.0
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * m * m


def mlp_shapes(prefix: str, hidden: int, width: int, experts: int = 0) -> dict[str, tuple[int, ...]]:
    """gate_proj, up_proj and down_proj of one MLP, or of a stack of experts (which have no `.weight`)."""
    end, stack = ("", (experts,)) if experts else (".weight", ())
    return {f"{prefix}gate_proj{end}": (*stack, width, hidden), f"{prefix}up_proj{end}": (*stack, width, hidden),
            f"{prefix}down_proj{end}": (*stack, hidden, width)}


def shapes(c: V3Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model: name -> shape. The MTP layer's copies of embedding and head are left out."""
    h, n, out = c.hidden_size, c.num_attention_heads, {}
    out["model.embed_tokens.weight"] = out["lm_head.weight"] = (c.vocab_size, h)
    out["model.norm.weight"] = (h,)
    for i in range(c.num_hidden_layers + 1):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = out[p + "post_attention_layernorm.weight"] = (h,)
        a = p + "self_attn."
        out[a + "q_a_proj.weight"], out[a + "q_a_layernorm.weight"] = (c.q_lora_rank, h), (c.q_lora_rank,)
        out[a + "q_b_proj.weight"] = (n * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank)
        out[a + "kv_a_proj_with_mqa.weight"] = (c.kv_lora_rank + c.qk_rope_head_dim, h)
        out[a + "kv_a_layernorm.weight"] = (c.kv_lora_rank,)
        out[a + "kv_b_proj.weight"] = (n * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        out[a + "o_proj.weight"] = (h, n * c.v_head_dim)
        if i < c.first_k_dense_replace:
            out.update(mlp_shapes(p + "mlp.", h, c.intermediate_size))
        else:
            out[p + "mlp.gate.weight"] = (c.n_routed_experts, h)
            out[p + "mlp.gate.e_score_correction_bias"] = (c.n_routed_experts,)
            out.update(mlp_shapes(p + "mlp.experts.", h, c.moe_intermediate_size, c.n_routed_experts))
            out.update(mlp_shapes(p + "mlp.shared_experts.", h, c.moe_intermediate_size))
    for name in ("enorm", "hnorm", "shared_head.norm"):
        out[f"{p}{name}.weight"] = (h,)
    out[p + "eh_proj.weight"] = (h, 2 * h)
    return out


def init(c: V3Config, seed: int) -> dict[str, Tensor]:
    """Fresh float32 weights."""
    g = torch.Generator().manual_seed(seed)
    w = {}
    for name, shape in shapes(c).items():
        if "norm." in name:
            w[name] = torch.ones(shape)
        elif name.endswith("bias"):
            w[name] = torch.zeros(shape)
        else:
            std = 0.02 if "embed" in name or "lm_head" in name else shape[-1] ** -0.5 * 0.5
            w[name] = torch.randn(shape, generator=g) * std
    return w


def masks(start: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """What each chunk of queries may see of the keys up to its end: [B, 1, queries, keys], 0 or -inf."""
    t = start.shape[1]
    pos = torch.arange(t, device=start.device)
    out = []
    for i in range(0, t, CHUNK):
        end = min(i + CHUNK, t)
        seen = (pos[None, :end] <= pos[i:end, None])[None] & (pos[None, None, :end] >= start[:, i:end, None])
        out.append(torch.zeros(seen.shape, dtype=dtype, device=start.device).masked_fill_(~seen, float("-inf")).unsqueeze(1))
    return out


def attention(h: Tensor, p: dict, mask: list[Tensor], table: Tensor, c: V3Config, offset: int = 0, main_kv=None, own_kv: tuple = ()):
    """One attention layer. Returns (output, (keys, values)).

    offset, main_kv and own_kv serve repeated drafting: row t then stands at position t + offset,
    sees main_kv of rows <= t, and the keys and values of its own earlier drafts.
    """
    t, n, nope, rank = h.shape[1], c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
    table = table[offset:offset + t]
    cq = rms_norm(linear(h, p["q_a_proj.weight"]), p["q_a_layernorm.weight"], c.rms_norm_eps)
    q = rope(linear(cq, p["q_b_proj.weight"]).unflatten(-1, (n, -1)), table).transpose(1, 2)
    latent, turn = linear(h, p["kv_a_proj_with_mqa.weight"]).split([rank, c.qk_rope_head_dim], -1)
    latent = rms_norm(latent, p["kv_a_layernorm.weight"], c.rms_norm_eps)
    wide = linear(latent, p["kv_b_proj.weight"]).unflatten(-1, (n, -1)).transpose(1, 2)
    turn = rope(turn, table).unsqueeze(1).expand(-1, n, -1, -1)
    k, v = torch.cat([wide[..., :nope], turn], -1), wide[..., nope:]
    own = (*own_kv, (k, v)) if main_kv is not None else ()
    keys, values = main_kv if main_kv is not None else (k, v)
    out = []
    for i, m in zip(range(0, t, CHUNK), mask):
        end = min(i + CHUNK, t)
        ks, vs = [keys[:, :, :end]] + [x[0][:, :, i:end] for x in own], [values[:, :, :end]] + [x[1][:, :, i:end] for x in own]
        if own:
            others = ~torch.eye(end - i, dtype=torch.bool, device=m.device)
            alone = m.new_zeros(others.shape).masked_fill(others, float("-inf")).expand(m.shape[0], 1, -1, -1)
            m = torch.cat([m] + [alone] * len(own), -1)
        out.append(F.scaled_dot_product_attention(q[:, :, i:end], torch.cat(ks, 2), torch.cat(vs, 2), attn_mask=m, scale=c.softmax_scale))
    o = torch.cat(out, 2).transpose(1, 2).flatten(-2)
    return linear(o, p["o_proj.weight"]), (k, v)


def route(h: Tensor, p: dict, c: V3Config) -> Tensor:
    """Mixture weights [B, T, E] f32, zero where not chosen: the best experts of the best groups."""
    a = torch.sigmoid(F.linear(h.float(), p["gate.weight"].float()))
    wish = (a + p["gate.e_score_correction_bias"]).detach().unflatten(-1, (c.n_group, -1))
    best = wish.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
    lost = F.one_hot(best, c.n_group).sum(-2) == 0
    wish = wish.masked_fill(lost.unsqueeze(-1), float("-inf")).flatten(-2)
    return chosen_weights(a, wish.topk(c.num_experts_per_tok, -1).indices, c.routed_scaling_factor)


def swiglu_weights(p: dict, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(p[f"{prefix}{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj"))


def ffn(h: Tensor, p: dict, c: V3Config):
    """A dense layer, or routed plus shared experts. Returns (output, tokens per expert [E] or None)."""
    if "gate.weight" not in p:
        return mlp(h, *swiglu_weights(p, ""), 0.0), None
    weight = route(h, p, c)
    y = dense_mixture(h, p["experts.gate_proj"], p["experts.up_proj"], p["experts.down_proj"], weight, 0.0)
    return y + mlp(h, *swiglu_weights(p, "shared_experts."), 0.0), tokens_per_expert(weight)


class V3(Model):
    """The forward passes: trunk, head and MTP layer."""

    head = "lm_head.weight"

    def __init__(self, config: V3Config, weights: dict[str, Tensor], max_len: int, compiled: bool = False):
        super().__init__(config, weights, dict(attention=attention, ffn=ffn, norm=rms_norm, masks=masks), compiled)
        c = config
        freq = yarn_frequencies(c.qk_rope_head_dim, c.rope_theta, c.rope_factor, c.rope_original, c.beta_fast, c.beta_slow)
        self.table = rope_table(freq, max_len + 8).to(weights[self.head].device)
        self.blocks = [self._block(i) for i in range(c.num_hidden_layers + 1)]
        self.mtp_prefix = f"model.layers.{c.num_hidden_layers}."

    def _block(self, i: int) -> dict:
        p = sub(self.w, f"model.layers.{i}.")
        return {"attn_norm": p["input_layernorm.weight"], "ffn_norm": p["post_attention_layernorm.weight"],
                "attn": sub(p, "self_attn."), "ffn": sub(p, "mlp.")}

    def routed_layers(self) -> list[str]:
        """Name prefixes in the order of the loads that trunk and mtp report."""
        return [f"model.layers.{i}.mlp." for i in range(self.c.first_k_dense_replace, self.c.num_hidden_layers + 1)]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.f["norm"](x, self.w[name], self.c.rms_norm_eps)

    def block(self, x: Tensor, p: dict, mask: list[Tensor], **draft):
        eps, t = self.c.rms_norm_eps, x.shape[1]
        y, kv = self.f["attention"](self.f["norm"](x, p["attn_norm"], eps), p["attn"], mask, self.table[:t + 4], self.c, **draft)
        x = x + y
        y, load = self.f["ffn"](self.f["norm"](x, p["ffn_norm"], eps), p["ffn"], self.c)
        return x + y, kv, load

    def masks_of(self, start: Tensor) -> list[Tensor]:
        return self.f["masks"](start, self.w["model.embed_tokens.weight"].dtype)

    def trunk(self, ids: Tensor, start: Tensor):
        """What the last layer leaves [B, T, H], no indexer loss, loads (one [E] per routed layer)."""
        x, mask, loads = F.embedding(ids, self.w["model.embed_tokens.weight"]), self.masks_of(start), []
        for p in self.blocks[:-1]:
            x, _, load = self.block(x, p, mask)
            if load is not None:
                loads.append(load)
        return x, 0.0, loads

    def head_input(self, x: Tensor, prefix: str = "") -> Tensor:
        """Normed vectors that the output head multiplies, of the main model or (any prefix) of the MTP layer."""
        return self.norm(x, self.mtp_prefix + "shared_head.norm.weight" if prefix else "model.norm.weight")

    def mtp(self, x: Tensor, ids: Tensor, start: Tensor, step: int = 1, main_kv=None, own_kv=()):
        """Draft `step` (1, 2, ...): x of row t (from trunk or the draft before) and token t+step -> x that predicts t+step+1."""
        nxt = F.pad(ids[:, step:], (0, step))
        e = self.norm(F.embedding(nxt, self.w["model.embed_tokens.weight"]), self.mtp_prefix + "enorm.weight")
        h = self.norm(self.head_input(x, "" if step == 1 else "mtp.0."), self.mtp_prefix + "hnorm.weight")
        x = linear(torch.cat([e, h], -1), self.w[self.mtp_prefix + "eh_proj.weight"])
        draft = dict(offset=step - 1, main_kv=main_kv, own_kv=tuple(own_kv)) if step > 1 else {}
        return self.block(x, self.blocks[-1], self.masks_of(start), **draft)
