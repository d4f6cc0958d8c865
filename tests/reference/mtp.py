#!/usr/bin/env python3
"""The four families and their multi-token prediction layer, in float64, to be read and believed.

    tests/reference/mtp.py CASE_DIR            compares with CASE_DIR/expect.npy
    tests/reference/mtp.py CASE_DIR --write    also writes CASE_DIR/expect_mtp.npy

Every function takes a whole sequence [n, ...] and keeps no state: no cache, no chunks, naive
attention. The Hugging Face library ignores MTP tensors, so this file is what `--mtp` is tested
against: the main logits show that its equations are right, and the MTP layer reuses them.

Row t of the draft logits combines the hidden state after token t with token t + 1 and predicts
token t + 2. The last row has no next token; it takes the arg-max of its own main logits.
"""

import json
import pathlib
import struct
import sys

import numpy as np

# ---- reading a case ----


def read_safetensors(path):
    """{name: float64 or int64 array}"""
    raw = path.read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + n]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = raw[8 + n + begin : 8 + n + end]
        if entry["dtype"] == "BF16":
            bits = np.frombuffer(data, "<u2").astype(np.uint32) << 16
            array = bits.view(np.float32).astype(np.float64)
        elif entry["dtype"] == "F32":
            array = np.frombuffer(data, "<f4").astype(np.float64)
        elif entry["dtype"] == "I64":
            array = np.frombuffer(data, "<i8")
        else:
            raise ValueError(f"{name}: {entry['dtype']}")
        tensors[name] = array.reshape(entry["shape"])
    return tensors


def rope_settings(config):
    """{"main": ..., "compress": ...} whichever way the config spells them."""
    if "rope_parameters" in config:
        found = config["rope_parameters"]
        return found if "main" in found else {"main": found}
    scaling = config.get("rope_scaling") or {}
    scaling = {**scaling, "rope_type": scaling.get("type", "default")}
    if config["model_type"] != "deepseek_v4":
        return {"main": {**scaling, "rope_theta": config["rope_theta"]}}
    return {"main": {"rope_type": "default", "rope_theta": config["rope_theta"]},
            "compress": {**scaling, "rope_theta": config["compress_rope_theta"]}}  # fmt: skip


# ---- what the families share ----


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x, weight, eps):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def magnitude(factor, a):
    return 0.1 * a * np.log(factor) + 1 if factor > 1 else 1.0


def frequencies(settings, dim):
    i = np.arange(dim // 2)
    f = settings["rope_theta"] ** (-2.0 * i / dim)
    if settings["rope_type"] == "default":
        return f

    def corr(turns):
        length = settings["original_max_position_embeddings"]
        return dim * np.log(length / (2 * np.pi * turns)) / (2 * np.log(settings["rope_theta"]))

    low = max(np.floor(corr(settings["beta_fast"])), 0)
    high = min(np.ceil(corr(settings["beta_slow"])), dim - 1)
    ramp = np.clip((i - low) / (high - low if high != low else 0.001), 0, 1)
    return f * (1 - ramp) + f / settings["factor"] * ramp


def rotate(x, position, f, pairs="interleaved", inverse=False):
    """x [n, ..., dim] with one position per row."""
    angle = np.multiply.outer(np.asarray(position, np.float64), f)
    angle = angle.reshape(angle.shape[:1] + (1,) * (x.ndim - 2) + angle.shape[1:])
    cos, sin = np.cos(angle), np.sin(angle) * (-1 if inverse else 1)
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    one = slice(0, None, 2) if pairs == "interleaved" else slice(0, half)
    two = slice(1, None, 2) if pairs == "interleaved" else slice(half, None)
    out[..., one] = x[..., one] * cos - x[..., two] * sin
    out[..., two] = x[..., two] * cos + x[..., one] * sin
    return out


def product(subscripts, a, b):
    return np.einsum(subscripts, a, b, optimize=True)


def best(scores, k):
    """Indices of the k largest of the last axis, the lowest index first among equals."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def chosen_mask(scores, k):
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, best(scores, k), True, -1)
    return mask


# ---- V2, V3, V3.2 ----


class Mla:
    def __init__(self, config, tensors):
        self.c, self.w = config, tensors
        self.eps = config["rms_norm_eps"]
        rope = rope_settings(config)["main"]
        self.f = frequencies(rope, config["qk_rope_head_dim"])
        self.scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
        self.cos_factor = 1.0
        if rope["rope_type"] != "default":
            one, all_dim = rope.get("mscale", 0), rope.get("mscale_all_dim", 0)
            m = magnitude(rope["factor"], all_dim) if all_dim else 1.0
            self.scale *= m * m
            self.cos_factor = magnitude(rope["factor"], one) / m if one and all_dim else 1.0

    def linear(self, name, x):
        return x @ self.w[name + ".weight"].T

    def norm(self, name, x):
        inner = name.endswith(("q_a_layernorm", "kv_a_layernorm"))  # of the latents
        return rms(x, self.w[name + ".weight"], 1e-6 if inner else self.eps)

    def index_mask(self, p, h, latent, causal):
        """[n, n]: the keys that each query attends to."""
        c, n = self.c, len(h)
        rope = c["qk_rope_head_dim"]
        q = self.linear(p + "wq_b", latent).reshape(n, c["index_n_heads"], -1)
        k = self.linear(p + "wk", h)
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
        k = k * self.w[p + "k_norm.weight"] + self.w[p + "k_norm.bias"]
        t = np.arange(n)
        q[..., :rope] = rotate(q[..., :rope], t, self.f, "halves")
        k[..., :rope] = rotate(k[..., :rope], t, self.f, "halves")
        weight = self.linear(p + "weights_proj", h) * (q.shape[1] * q.shape[2]) ** -0.5
        score = np.einsum("ta,tau->tu", weight, np.maximum(np.einsum("tad,ud->tau", q, k), 0))
        score[~causal] = -np.inf
        return chosen_mask(score, min(c["index_topk"], n)) & causal

    def attention(self, p, h):
        c, n = self.c, len(h)
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        t = np.arange(n)
        latent = None
        if c["q_lora_rank"]:
            latent = self.norm(p + "q_a_layernorm", self.linear(p + "q_a_proj", h))
            q = self.linear(p + "q_b_proj", latent)
        else:
            q = self.linear(p + "q_proj", h)
        q = q.reshape(n, heads, nope + rope)
        ckv = self.linear(p + "kv_a_proj_with_mqa", h)
        kv = self.norm(p + "kv_a_layernorm", ckv[:, : c["kv_lora_rank"]])
        kv = self.linear(p + "kv_b_proj", kv).reshape(n, heads, nope + c["v_head_dim"])
        k_rope = rotate(ckv[:, c["kv_lora_rank"] :], t, self.f) * self.cos_factor
        q_rope = rotate(q[..., nope:], t, self.f) * self.cos_factor
        score = np.einsum("tad,uad->atu", q[..., :nope], kv[..., :nope])
        score = (score + np.einsum("tad,ud->atu", q_rope, k_rope)) * self.scale
        mask = np.tri(n, dtype=bool)
        if p + "indexer.wk.weight" in self.w:
            mask = self.index_mask(p + "indexer.", h, latent, mask)
        out = np.einsum("atu,uad->tad", softmax(np.where(mask, score, -np.inf)), kv[..., nope:])
        return self.linear(p + "o_proj", out.reshape(n, -1))

    def mlp(self, p, h):
        gated = silu(self.linear(p + "gate_proj", h)) * self.linear(p + "up_proj", h)
        return self.linear(p + "down_proj", gated)

    def route(self, p, h):
        """Expert ids and weights [n, k]."""
        c, n = self.c, len(h)
        logits = self.linear(p + "gate", h)
        v2 = c["model_type"] == "deepseek_v2"
        score = softmax(logits) if v2 else sigmoid(logits)
        choice = score if v2 else score + self.w[p + "gate.e_score_correction_bias"]
        if not v2 or c.get("topk_method") == "group_limited_greedy":
            group = choice.reshape(n, c["n_group"], -1)
            rank = group.max(-1) if v2 else np.sort(group, -1)[..., -2:].sum(-1)
            kept = chosen_mask(rank, c["topk_group"])[..., None]
            choice = np.where(kept, group, -np.inf).reshape(n, -1)
        ids = best(choice, c["num_experts_per_tok"])
        weight = np.take_along_axis(score, ids, -1)
        if c["norm_topk_prob"]:
            weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)
        return ids, weight * c["routed_scaling_factor"]

    def moe(self, p, h):
        ids, weight = self.route(p, h)
        out = self.mlp(p + "shared_experts.", h)
        for e in range(self.c["n_routed_experts"]):
            t, slot = np.nonzero(ids == e)
            out[t] += weight[t, slot, None] * self.mlp(f"{p}experts.{e}.", h[t])
        return out

    def layer(self, number, x):
        p = f"model.layers.{number}."
        x = x + self.attention(p + "self_attn.", self.norm(p + "input_layernorm", x))
        h = self.norm(p + "post_attention_layernorm", x)
        ffn = self.moe if p + "mlp.gate.weight" in self.w else self.mlp
        return x + ffn(p + "mlp.", h)

    def main(self, tokens):
        """Logits, and the hidden state that the MTP layer takes: after the final norm."""
        x = self.w["model.embed_tokens.weight"][tokens]
        for number in range(self.c["num_hidden_layers"]):
            x = self.layer(number, x)
        hidden = self.norm("model.norm", x)
        return self.linear("lm_head", hidden), hidden

    def draft(self, hidden, following):
        number = self.c["num_hidden_layers"]
        p = f"model.layers.{number}."
        e = self.norm(p + "enorm", self.w["model.embed_tokens.weight"][following])
        x = np.concatenate([e, self.norm(p + "hnorm", hidden)], -1)
        x = self.layer(number, self.linear(p + "eh_proj", x))
        return self.linear("lm_head", self.norm(p + "shared_head.norm", x))


# ---- V4 ----


class V4:
    piece = 1 << 30  # queries whose attention is computed at a time; fewer need less memory

    def __init__(self, config, tensors):
        self.c, self.w = config, tensors
        self.eps = config["rms_norm_eps"]
        rope = rope_settings(config)
        dim = config["qk_rope_head_dim"]
        self.f = {kind: frequencies(rope[kind], dim) for kind in rope}

    def linear(self, name, x):
        return x @ self.w[name + ".weight"].T

    def norm(self, name, x):
        return rms(x, self.w[name + ".weight"], self.eps)

    def rotate_tail(self, x, position, kind, inverse=False):
        rope = self.c["qk_rope_head_dim"]
        tail = rotate(x[..., -rope:], position, self.f[kind], inverse=inverse)
        return np.concatenate([x[..., :-rope], tail], -1)

    def streams_norm(self, streams):
        """[n, hc, H] as one vector per token, divided by its root mean square."""
        return rms(streams.reshape(len(streams), -1), 1.0, self.eps)

    def collapse(self, p, streams):
        """HC_pre: the layer's input, and how its output joins the streams."""
        c, hc = self.c, self.c["hc_mult"]
        m = self.streams_norm(streams) @ self.w[p + "_fn"].T
        base, scale = self.w[p + "_base"], self.w[p + "_scale"]
        pre = sigmoid(m[:, :hc] * scale[0] + base[:hc]) + c["hc_eps"]
        post = 2 * sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        mix = softmax((m[:, 2 * hc :] * scale[2] + base[2 * hc :]).reshape(-1, hc, hc))
        mix = mix + c["hc_eps"]
        mix = mix / (mix.sum(1, keepdims=True) + c["hc_eps"])
        for _ in range(c["hc_sinkhorn_iters"] - 1):
            mix = mix / (mix.sum(2, keepdims=True) + c["hc_eps"])
            mix = mix / (mix.sum(1, keepdims=True) + c["hc_eps"])
        return np.einsum("ti,tih->th", pre, streams), post, mix

    def expand(self, y, streams, post, mix):
        """HC_post; the sum runs over the first index of mix."""
        return post[..., None] * y[:, None, :] + np.einsum("tij,tih->tjh", mix, streams)

    def head(self, p, streams):
        m = self.streams_norm(streams) @ self.w[p + "hc_head_fn"].T
        pre = sigmoid(m * self.w[p + "hc_head_scale"] + self.w[p + "hc_head_base"])
        return np.einsum("ti,tih->th", pre + self.c["hc_eps"], streams)

    def compress(self, p, h, ratio):
        """Entries [n // ratio, d], rotated at the first token of each window."""
        ape = self.w[p + "ape"]
        d = len(self.w[p + "norm.weight"])
        n = len(h) // ratio * ratio
        overlap = ape.shape[1] == 2 * d
        value = self.linear(p + "wkv", h[:n]).reshape(-1, ratio, ape.shape[1])
        gate = self.linear(p + "wgate", h[:n]).reshape(value.shape) + ape
        if overlap:  # the first half belongs to the next window's entry
            before = np.zeros_like(value[:, :, :d])
            silent = np.full_like(before, -np.inf)
            before[1:], silent[1:] = value[:-1, :, :d], gate[:-1, :, :d]
            value = np.concatenate([before, value[:, :, d:]], 1)
            gate = np.concatenate([silent, gate[:, :, d:]], 1)
        share = np.moveaxis(softmax(np.moveaxis(gate, 1, -1)), -1, 1)
        entry = self.norm(p + "norm", (share * value).sum(1))
        return self.rotate_tail(entry, np.arange(len(entry)) * ratio, "compress")

    def entry_mask(self, p, h, latent, ratio, n_entries, t):
        """[len(t), n_entries]: the compressed entries that each of the queries t attends to."""
        c = self.c
        visible = np.arange(n_entries) < (t[:, None] + 1) // ratio
        if p + "indexer.wq_b.weight" not in self.w:
            return visible
        p += "indexer."
        key = self.compress(p + "compressor.", h, ratio)
        q = self.linear(p + "wq_b", latent[t]).reshape(len(t), c["index_n_heads"], -1)
        q = self.rotate_tail(q, t, "compress")
        weight = self.linear(p + "weights_proj", h[t]) * (q.shape[1] * q.shape[2]) ** -0.5
        score = np.einsum("ta,taw->tw", weight, np.maximum(product("tad,wd->taw", q, key), 0))
        score[~visible] = -np.inf
        return chosen_mask(score, min(c["index_topk"], n_entries)) & visible

    def attention(self, p, h):
        c, n = self.c, len(h)
        heads, d, t = c["num_attention_heads"], c["head_dim"], np.arange(len(h))
        compressed, ratio, entries = p + "compressor.ape" in self.w, 0, None
        kind = "compress" if compressed else "main"
        latent = self.norm(p + "q_norm", self.linear(p + "wq_a", h))
        q = rms(self.linear(p + "wq_b", latent).reshape(n, heads, d), 1.0, self.eps)
        q = self.rotate_tail(q, t, kind)
        kv = self.rotate_tail(self.norm(p + "kv_norm", self.linear(p + "wkv", h)), t, kind)
        if compressed:
            ratio = len(self.w[p + "compressor.ape"])
            entries = self.compress(p + "compressor.", h, ratio)
        parts = []
        for begin in range(0, n, self.piece):
            own = t[begin : begin + self.piece]
            near = t[max(0, begin - c["sliding_window"]) : own[-1] + 1]
            behind = own[:, None] - near
            mask, keys = (behind >= 0) & (behind < c["sliding_window"]), kv[near]
            if compressed:
                keys = np.concatenate([keys, entries])
                seen = self.entry_mask(p, h, latent, ratio, len(entries), own)
                mask = np.concatenate([mask, seen], -1)
            score = np.where(mask, product("tad,ud->atu", q[own], keys) * d**-0.5, -np.inf)
            sink = np.broadcast_to(self.w[p + "attn_sink"][:, None, None], (heads, len(own), 1))
            share = softmax(np.concatenate([score, sink], -1))[..., :-1]
            parts.append(product("atu,ud->tad", share, keys))
        out = self.rotate_tail(np.concatenate(parts), t, kind, inverse=True)
        groups = c["o_groups"]
        wo_a = self.w[p + "wo_a.weight"].reshape(groups, c["o_lora_rank"], -1)
        z = np.einsum("tgi,goi->tgo", out.reshape(n, groups, -1), wo_a)
        return self.linear(p + "wo_b", z.reshape(n, -1))

    def mlp(self, p, h):
        limit = self.c["swiglu_limit"]
        gate = np.minimum(self.linear(p + "w1", h), limit)
        up = np.clip(self.linear(p + "w3", h), -limit, limit)
        return self.linear(p + "w2", silu(gate) * up)

    def route(self, p, h, tokens):
        """Expert ids and weights [n, k]."""
        c = self.c
        score = np.sqrt(np.logaddexp(0, self.linear(p + "gate", h)))
        if p + "gate.tid2eid" in self.w:
            ids = self.w[p + "gate.tid2eid"][tokens]
        else:
            ids = best(score + self.w[p + "gate.bias"], c["num_experts_per_tok"])
        weight = np.take_along_axis(score, ids, -1)
        return ids, weight / (weight.sum(-1, keepdims=True) + 1e-20) * c["routed_scaling_factor"]

    def moe(self, p, h, tokens):
        ids, weight = self.route(p, h, tokens)
        out = self.mlp(p + "shared_experts.", h)
        for e in range(self.c["n_routed_experts"]):
            t, slot = np.nonzero(ids == e)
            out[t] += weight[t, slot, None] * self.mlp(f"{p}experts.{e}.", h[t])
        return out

    def layer(self, p, streams, tokens):
        h, post, mix = self.collapse(p + "hc_attn", streams)
        y = self.attention(p + "attn.", self.norm(p + "attn_norm", h))
        streams = self.expand(y, streams, post, mix)
        h, post, mix = self.collapse(p + "hc_ffn", streams)
        y = self.moe(p + "ffn.", self.norm(p + "ffn_norm", h), tokens)
        return self.expand(y, streams, post, mix)

    def main(self, tokens, rows=slice(None)):
        """Logits of the rows, and the streams that the MTP layer takes: after the last layer."""
        x = self.w["embed.weight"][tokens]
        streams = np.repeat(x[:, None, :], self.c["hc_mult"], 1)
        for number in range(self.c["num_hidden_layers"]):
            streams = self.layer(f"layers.{number}.", streams, tokens)
        return self.linear("head", self.norm("norm", self.head("", streams[rows]))), streams

    def draft(self, streams, following):
        p = "mtp.0."
        e = self.linear(p + "e_proj", self.norm(p + "enorm", self.w["embed.weight"][following]))
        g = self.linear(p + "h_proj", self.norm(p + "hnorm", streams))
        streams = self.layer(p, e[:, None, :] + g, following)
        return self.linear("head", self.norm(p + "norm", self.head(p, streams)))


def open_case(path):
    """The model, its tokens, and whether the checkpoint has an MTP layer."""
    path = pathlib.Path(path)
    config = json.loads((path / "config.json").read_text())
    tensors = read_safetensors(path / "model.safetensors")
    family = V4 if config["model_type"] == "deepseek_v4" else Mla
    has_mtp = any(name.endswith("enorm.weight") for name in tensors)
    tokens = np.array(json.loads((path / "tokens.json").read_text()))
    return family(config, tensors), tokens, has_mtp


def main_and_draft(path):
    """Main logits [n, vocab], and the draft logits or None."""
    model, tokens, has_mtp = open_case(path)
    logits, hidden = model.main(tokens)
    if not has_mtp:
        return logits, None
    following = np.append(tokens[1:], logits[-1].argmax())
    return logits, model.draft(hidden, following)


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    logits, drafts = main_and_draft(folder)
    n = len(logits)
    expect = np.load(folder / "expect.npy")
    print(f"{folder.name}: main logits differ from expect.npy by {np.abs(logits - expect).max():.1e}")
    if drafts is not None and "--write" in sys.argv[2:]:
        np.save(folder / "expect_mtp.npy", drafts.astype(np.float32))
        print(f"wrote expect_mtp.npy, standard deviation {drafts.std():.2f}")
