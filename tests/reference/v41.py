#!/usr/bin/env python3
"""V4.1 and its DSpark drafter, in float64, beside mtp.py and dspark.py.

    tests/reference/v41.py CASE_DIR                     compares with its expect.npy and drafts.json
    tests/reference/v41.py --make OUT_DIR [--seed N]    makes a small random case

Every function takes whole sequences and keeps no state. Weights are read in their stored formats:
FP8 in square blocks, FP4 experts, Engram rows with a scale per 32 columns. Classes of tokens come
from tokenizer.json, hashes from numpy's generator.
"""

import argparse
import json
import pathlib
import struct
import sys
import unicodedata

import add_mtp
import dspark
import mtp
import numpy as np

TOLERANCE = 1e-5  # the shared case keeps float32 logits
MIN_MARGIN = 0.01

# ---- stored formats ----

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(codes):
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(codes & 128, -value, value)


E4M3 = e4m3(np.arange(256))


def spread(scales, shape):
    """A scale per block, for every element."""
    for axis in (0, 1):
        scales = np.repeat(scales, -(-shape[axis] // scales.shape[axis]), axis)
    return scales[: shape[0], : shape[1]]


def read_tensors(path):
    """{name: float64 array}, without scales."""
    raw = add_mtp.read_raw(path)
    found = {}
    for name, (dtype, shape, data) in raw.items():
        if dtype in ("F8_E8M0", "U8") or name.endswith(".scale"):
            continue
        bits = np.frombuffer(data, np.uint8)
        if dtype == "I64":
            found[name] = bits.view("<i8").reshape(shape)
            continue
        if dtype == "BF16":
            array = (bits.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        elif dtype == "F32":
            array = bits.view("<f4").reshape(shape)
        else:
            scale = raw[name.removesuffix(".weight") + ".scale"]
            powers = 2.0 ** (np.frombuffer(scale[2], np.uint8).reshape(scale[1]).astype(float) - 127)
            array = E4M3[bits].reshape(shape)
            if dtype != "F8_E4M3":
                array = E2M1[np.stack([bits & 15, bits >> 4], -1)].reshape(shape[0], -1)
            array = array * spread(powers, array.shape)
        found[name] = array.astype(np.float64)
    return found


# ---- Engram: classes of tokens, and hashes ----


def byte_letters():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def fold(text):
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c)[0] != "M")
    text = "".join(c.lower() for c in text)
    spaced, blank = "", False
    for c in text:
        before, blank = blank, c in " \t\r\n"
        spaced += "" if blank and before else " " if blank else c
    return spaced if spaced == " " else spaced.strip()


def token_classes(folder, vocab):
    file = json.loads((folder / "tokenizer.json").read_text())
    letters, keys = byte_letters(), {}
    stored = {i: token for token, i in file["model"]["vocab"].items()}
    added = {t["id"]: t["content"] for t in file["added_tokens"]}
    found = []
    for i in range(vocab):
        text = added.get(i)
        if text is None and i in stored:
            text = bytes(letters[c] for c in stored[i]).decode(errors="replace")
        text = text or ""
        key = stored[i] if "\ufffd" in text else fold(text) or text
        found.append(keys.setdefault(key, len(keys)))
    return np.array(found), len(keys)


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def engram_primes(c):
    """One list per layer, all ascending from engram_vocab_size on."""
    columns = c["engram_n_heads"] * (c["engram_max_ngram_size"] - 1)
    primes, n = [], c["engram_vocab_size"] - 1
    for _ in c["engram_layer_ids"]:
        own = []
        while len(own) < columns:
            n += 1
            if is_prime(n):
                own.append(n)
        primes.append(own)
    return primes


def multipliers(c, layer):
    bound = (2**63 - 1) // c["engram_compressed_vocab_size"] // 2
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, c["engram_max_ngram_size"])
    return drawn * 2 + 1


def engram_rows(c, layer, classes):
    """[n, columns] rows of the layer's table; classes [n, orders] of the last tokens."""
    m = multipliers(c, layer)
    primes = engram_primes(c)[c["engram_layer_ids"].index(layer)]
    first, columns = np.cumsum([0] + primes[:-1]), []
    for i, prime in enumerate(primes):
        value = classes[:, 0] * m[0]
        for k in range(1, i // c["engram_n_heads"] + 2):
            value = value ^ classes[:, k] * m[k]
        columns.append(first[i] + value % prime)
    return np.stack(columns, -1)


# ---- the model ----


class V41(dspark.DSpark):
    markov_embed, markov_head = "markov_head.embed", "markov_head.head"

    def __init__(self, config, tensors, classes):
        config = {**config, **config.get("text_config", {})}
        config["model_type"] = "deepseek_v4"  # the rotations of mtp.py
        super().__init__(config, tensors)
        self.classes = classes
        self.windows_from = 0  # of the layers from the last source on, where the end of a prompt is replayed

    def collapse(self, p, streams):
        """The mixture that the block before predicted, and what this block predicts."""
        pre, self.pre = self.pre, None
        kept, hc, c = streams, self.c["hc_mult"], self.c
        m = self.streams_norm(kept) @ self.w[p + "_fn"].T
        own = m[:, :hc] * self.w[p + "_scale"][0] + self.w[p + "_base"][:hc]
        self.pre = mtp.sigmoid(own) + c["hc_eps"]
        _, post, mix = super().collapse(p, streams)
        return np.einsum("ti,tih->th", pre, streams), post, mix

    def start(self, n):
        self.pre = np.zeros((n, self.c["hc_mult"]))
        self.pre[:, 0] = 1

    def query(self, p, h, t, kind):
        c = self.c
        latent = self.norm(p + "q_norm", self.linear(p + "wq_a", h))
        q = self.linear(p + "wq_b", latent).reshape(len(h), c["num_attention_heads"], -1)
        return latent, self.rotate_tail(q, t, kind)

    def output(self, p, q, kv, mask, t, kind):
        c, n = self.c, len(q)
        score = np.where(mask, np.einsum("tad,ud->atu", q, kv) * c["head_dim"] ** -0.5, -np.inf)
        sink = np.broadcast_to(self.w[p + "attn_sink"][:, None, None], (*score.shape[:2], 1))
        share = mtp.softmax(np.concatenate([score, sink], -1))[..., :-1]
        out = self.rotate_tail(np.einsum("atu,ud->tad", share, kv), t, kind, inverse=True)
        wo_a = self.w[p + "wo_a.weight"].reshape(c["o_groups"], c["o_lora_rank"], -1)
        z = np.einsum("tgi,goi->tgo", out.reshape(n, c["o_groups"], -1), wo_a)
        return self.linear(p + "wo_b", z.reshape(n, -1))

    def write_shared(self, p, h, ratio):
        """Entries and index keys of groups of `ratio` tokens."""
        n = len(h) // ratio * ratio
        value = self.linear(p + "compressor.wkv", h[:n]).reshape(n // ratio, ratio, -1)
        if ratio > 1:
            gate = self.linear(p + "compressor.wgate", h[:n]).reshape(value.shape)
            share = np.exp(gate - gate.max(1, keepdims=True))
            value = value * share / share.sum(1, keepdims=True)
        latent = self.norm(p + "compressor.norm", value.sum(1))
        at = np.arange(len(latent)) * ratio
        key = self.norm(p + "indexer.k_norm", self.linear(p + "indexer.wk", latent))
        self.entries = self.rotate_tail(latent, at, "compress")
        self.keys = self.rotate_tail(key, at, "compress")

    def window_key(self, p, h, position, kind="main"):
        return self.rotate_tail(self.norm(p + "kv_norm", self.linear(p + "wkv", h)), position, kind)

    def index_query(self, q):
        return q

    def pool_of(self, score, visible):
        """[n, keys]: the keys of every row's best blocks, the newest block among them."""
        size, n = self.c["candidate_block_size"], score.shape[1]
        blocks = -(-n // size)
        padded = np.pad(score, ((0, 0), (0, blocks * size - n)), constant_values=-np.inf)
        best = padded.reshape(len(score), blocks, size).max(-1)
        for t, seen in enumerate(visible.sum(1)):
            if seen:
                best[t, (seen - 1) // size] = np.inf
        kept = mtp.chosen_mask(best, min(self.c["candidate_topk_blocks"], blocks))
        return np.repeat(kept, size, 1)[:, :n]

    def choose(self, p, layer, h, latent, ratio):
        c, n = self.c, len(h)
        visible = np.arange(len(self.keys)) < (np.arange(n)[:, None] + 1) // ratio
        q = self.linear(p + "indexer.wq_b", latent).reshape(n, c["index_n_heads"], -1)
        q = self.index_query(self.rotate_tail(q, np.arange(n), "compress"))
        weight = self.linear(p + "indexer.weights_proj", h) * (q.shape[1] * q.shape[2]) ** -0.5
        hits = np.maximum(np.einsum("tad,wd->taw", q, self.keys), 0)
        score = np.where(visible, np.einsum("ta,taw->tw", weight, hits), -np.inf)
        source = c["candidate_source_layer_id"]
        if layer == source:
            self.pool = self.pool_of(score, visible)
        elif layer > source >= 0:
            visible = visible & self.pool
            score = np.where(visible, score, -np.inf)
        self.selected = mtp.chosen_mask(score, min(c["index_topk"], len(self.keys))) & visible

    def attention(self, p, h):
        c, n = self.c, len(h)
        layer, t = int(p.split(".")[1]), np.arange(n)
        ratio = c["compress_ratios"][layer]
        kind = "compress" if ratio else "main"
        latent, q = self.query(p, h, t, kind)
        kv = self.window_key(p, h, t, kind)
        mask = np.tri(n, dtype=bool) & ~np.tri(n, k=-c["sliding_window"], dtype=bool)
        if layer >= c["kv_source_layer_ids"][-1]:
            mask &= np.arange(n) >= self.windows_from
        if layer in c["kv_source_layer_ids"]:
            self.write_shared(p, h, ratio)
        if layer in c["index_source_layer_ids"]:
            self.choose(p, layer, h, latent, ratio)
        if ratio:
            kv = np.concatenate([kv, self.entries])
            mask = np.concatenate([mask, self.selected], -1)
        return self.output(p, q, kv, mask, t, kind)

    def engram(self, layer, streams, tokens):
        c, p = self.c, f"layers.{layer}.engram."
        orders, n = c["engram_max_ngram_size"], len(tokens)
        padded = np.concatenate([[c["engram_pad_token_id"]] * (orders - 1), tokens])
        classes = self.classes[np.stack([padded[orders - 1 - i :][:n] for i in range(orders)], -1)]
        r = self.w[p + "embed.weight"][engram_rows(c, layer, classes)].reshape(n, -1)
        u = self.linear(p + "wkv", r).reshape(n, c["hc_mult"] + 1, -1)
        key, value = u[:, :-1], u[:, -1]
        weight = self.w[p + "q_weight"] * self.w[p + "k_weight"]
        s = (mtp.rms(streams, weight, self.eps) * mtp.rms(key, 1.0, self.eps)).sum(-1)
        s = s * c["hidden_size"] ** -0.5
        gate = mtp.sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(s), 1e-6)), s))
        return streams + gate[..., None] * value[:, None, :]

    def main(self, tokens):
        """Logits, and the taps [n, taps * H]: the mean of the streams before some layers."""
        c, taps = self.c, []
        streams = np.repeat(self.w["embed.weight"][tokens][:, None, :], c["hc_mult"], 1)
        self.start(len(tokens))
        for layer in range(c["num_hidden_layers"]):
            if layer in c["engram_layer_ids"]:
                streams = self.engram(layer, streams, tokens)
            if layer in c["dspark_target_layer_ids"]:
                taps.append(streams.mean(1))
            streams = mtp.V4.layer(self, f"layers.{layer}.", streams, tokens)
        logits = self.linear("head", self.norm("norm", self.head("", streams)))
        return logits, np.concatenate(taps, -1)

    def head(self, p, streams):
        return np.einsum("ti,tih->th", self.pre, streams)

    def block_attention(self, p, h, taps, position):
        n = len(h)
        at = position + 1 + np.arange(n)
        seen = np.arange(max(0, position + 1 - self.c["sliding_window"]), position + 1)
        x = self.norm("mtp.0.main_norm", self.linear("mtp.0.main_proj", taps[seen]))
        keys = np.concatenate([self.window_key(p, x, seen), self.window_key(p, h, at)])
        _, q = self.query(p, h, at, "main")
        return self.output(p, q, keys, np.ones((n, len(keys)), bool), at, "main")

    def block(self, taps, position, token):
        trunk = self.c
        self.c = {**trunk, "n_routed_experts": trunk["dspark_n_routed_experts"],
                  "num_experts_per_tok": trunk["dspark_num_experts_per_tok"]}  # fmt: skip
        self.start(trunk["dspark_block_size"])
        drafted = super().block(taps, position, token)
        self.c = trunk
        return drafted

    def case(self, logits, taps, position, token):
        drafts, confidence, all_logits = self.block(taps, position, token)
        two = np.sort(all_logits, -1)[:, -2:]
        return {"position": position, "token": token, "drafts": drafts, "confidence": confidence,
                "logit": list(two[:, 1]), "margin": list(two[:, 1] - two[:, 0])}  # fmt: skip


def open_case(folder):
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    classes, n = token_classes(folder, text["vocab_size"])
    assert n == text["engram_compressed_vocab_size"], n
    tokens = np.array(json.loads((folder / "tokens.json").read_text()))
    return V41(config, read_tensors(folder / "model.safetensors"), classes), tokens


def check(folder):
    model, tokens = open_case(folder)
    logits, taps = model.main(tokens)
    worst = np.abs(logits - np.load(folder / "expect.npy")).max()
    cases = json.loads((folder / "drafts.json").read_text())["cases"]
    for want in cases:
        got = model.case(logits, taps, want["position"], want["token"])
        if got["drafts"] != want["drafts"]:
            sys.exit(f"position {want['position']}: {got['drafts']} instead of {want['drafts']}")
        for key in ("confidence", "logit"):
            worst = max(worst, np.abs(np.subtract(got[key], want[key])).max())
    print(f"{folder.name}: {len(tokens)} tokens, {len(cases)} blocks, largest difference {worst:.1e}")
    if worst > TOLERANCE:
        sys.exit(1)


# ---- a small random case ----

MERGES = ["Ġ t", "h e", "Ġt he", "i n", "a n", "T h", "Th e", "Ġ a", "e r", "o n", "r e", "Ġ T", "Ġ Ġ"]

TEXT = {
    "model_type": "deepseek_v41_text", "hidden_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8,
    "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2, "rms_norm_eps": 1e-20,
    "moe_intermediate_size": 32, "n_routed_experts": 6, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 1.5,
    "sliding_window": 7, "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 5], "index_n_heads": 3,
    "index_head_dim": 32, "index_topk": 9, "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 5, "candidate_block_size": 3, "rope_theta": 10000,
    "compress_rope_theta": 160000, "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 64}, "max_position_embeddings": 512,
    "hc_mult": 3, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": [0, 3],
    "engram_max_ngram_size": 3, "engram_vocab_size": 31, "engram_n_heads": 2,
    "engram_head_dim": 32, "engram_pad_token_id": 2, "num_nextn_predict_layers": 2,
    "dspark_block_size": 4, "dspark_noise_token_id": 3, "dspark_target_layer_ids": [3, 5],
    "dspark_markov_rank": 8, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
    "tie_word_embeddings": False, "attention_bias": False}  # fmt: skip


def make_tokenizer():
    special = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜System｜>",
               "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]  # fmt: skip
    vocab = {token: i for i, token in enumerate(special)}
    for letter in sorted(byte_letters(), key=ord):
        vocab[letter] = len(vocab)
    for merge in MERGES:
        vocab[merge.replace(" ", "")] = len(vocab)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, token in enumerate(special)]  # fmt: skip
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
             "merges": MERGES}  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
            "decoder": byte_level, "model": model}  # fmt: skip


def fp8(values):
    """E4M3 in 32 x 32 blocks: elements and powers of two."""
    rows, cols = values.shape
    blocks = values.reshape(-(-rows // 32), min(rows, 32), -1, 32)
    power = np.ceil(np.log2(np.abs(blocks).max((1, 3)) / 448))
    scaled = values / spread(2.0**power, values.shape)
    return nearest(E4M3[:127], scaled, 128), (power + 127).astype(np.uint8)


def per_row(values, table, largest, sign):
    """A scale per row and 32 columns."""
    power = np.ceil(np.log2(np.abs(values.reshape(len(values), -1, 32)).max(-1) / largest))
    return nearest(table, values / spread(2.0**power, values.shape), sign), (power + 127).astype(np.uint8)


def nearest(table, values, sign):
    codes = np.abs(np.abs(values)[..., None] - table).argmin(-1)
    return (codes + sign * (values < 0)).astype(np.uint8)


def shapes(c):
    """{name: (format, shape)} of every tensor."""
    h, d, hc = c["hidden_size"], c["head_dim"], c["hc_mult"]
    found = {"embed.weight": ("BF16", (c["vocab_size"], h)), "head.weight": ("BF16", (c["vocab_size"], h)),
             "norm.weight": ("BF16", (h,))}  # fmt: skip
    columns = c["engram_n_heads"] * (c["engram_max_ngram_size"] - 1)
    layers = c["num_hidden_layers"]
    for layer in range(layers + c["num_nextn_predict_layers"]):
        p = f"layers.{layer}." if layer < layers else f"mtp.{layer - layers}."
        experts = c["n_routed_experts"] if layer < layers else c["dspark_n_routed_experts"]
        own = {"attn_norm.weight": ("BF16", (h,)), "ffn_norm.weight": ("BF16", (h,)),
               "attn.wq_a.weight": ("FP8", (c["q_lora_rank"], h)), "attn.q_norm.weight": ("BF16", (c["q_lora_rank"],)),
               "attn.wq_b.weight": ("FP8", (c["num_attention_heads"] * d, c["q_lora_rank"])),
               "attn.wkv.weight": ("FP8", (d, h)), "attn.kv_norm.weight": ("BF16", (d,)),
               "attn.wo_a.weight": ("FP8", (c["o_groups"] * c["o_lora_rank"], c["num_attention_heads"] * d // c["o_groups"])),
               "attn.wo_b.weight": ("FP8", (h, c["o_groups"] * c["o_lora_rank"])),
               "attn.attn_sink": ("F32", (c["num_attention_heads"],)),
               "ffn.gate.weight": ("BF16", (experts, h)), "ffn.gate.bias": ("F32", (experts,)),
               "ffn.gate.bias_vl": ("F32", (experts,))}  # fmt: skip
        for half in ("attn", "ffn"):
            own[f"hc_{half}_fn"] = ("F32", (2 * hc + hc * hc, hc * h))
            own[f"hc_{half}_base"] = ("F32", (2 * hc + hc * hc,))
            own[f"hc_{half}_scale"] = ("F32", (3,))
        for e in ["shared_experts", *(f"experts.{e}" for e in range(experts))]:
            for w in ("w1", "w2", "w3"):
                own[f"ffn.{e}.{w}.weight"] = ("FP8" if e[0] == "s" else "FP4", (c["moe_intermediate_size"], h))
        if layer in c["kv_source_layer_ids"]:
            own["attn.compressor.wkv.weight"] = ("BF16", (d, h))
            own["attn.compressor.norm.weight"] = ("BF16", (d,))
            if c["compress_ratios"][layer] > 1:
                own["attn.compressor.wgate.weight"] = ("BF16", (d, h))
            own["attn.indexer.wk.weight"] = ("BF16", (c["index_head_dim"], d))
            own["attn.indexer.k_norm.weight"] = ("BF16", (c["index_head_dim"],))
        if layer in c["index_source_layer_ids"]:
            own["attn.indexer.wq_b.weight"] = ("FP8", (c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"]))
            own["attn.indexer.weights_proj.weight"] = ("BF16", (c["index_n_heads"], h))
        if layer in c["engram_layer_ids"]:
            rows = c["engram_num_embeddings"][c["engram_layer_ids"].index(layer)]
            own["engram.embed.weight"] = ("ROWS", (rows, c["engram_head_dim"]))
            own["engram.wkv.weight"] = ("FP8", ((hc + 1) * h, columns * c["engram_head_dim"]))
            own["engram.q_weight"] = own["engram.k_weight"] = ("BF16", (hc, h))
        found |= {p + name: entry for name, entry in own.items()}
    last, rank = f"mtp.{c['num_nextn_predict_layers'] - 1}.", c["dspark_markov_rank"]
    found["mtp.0.main_proj.weight"] = ("FP8", (h, len(c["dspark_target_layer_ids"]) * h))
    found["mtp.0.main_norm.weight"] = found[last + "norm.weight"] = ("BF16", (h,))
    for name in ("embed", "head"):
        found[f"{last}markov_head.{name}.weight"] = ("BF16", (c["vocab_size"], rank))
    found[last + "confidence_head.proj.weight"] = ("BF16", (1, h + rank))
    return found


def packed(kind, values):
    """{suffix: (dtype, shape, bytes)}"""
    if kind in ("BF16", "F32"):
        return {"": (kind, list(values.shape), add_mtp.stored(values, kind))}
    codes, scales = {"FP8": fp8, "ROWS": lambda v: per_row(v, E4M3[:127], 448, 128),
                     "FP4": lambda v: per_row(v, E2M1[:8], 6, 8)}[kind](values)  # fmt: skip
    dtype = "F8_E4M3"
    if kind == "FP4":
        codes, dtype = codes[:, ::2] | codes[:, 1::2] << 4, "I8"
    return {"": (dtype, list(codes.shape), codes.tobytes()),
            ".scale": ("F8_E8M0", list(scales.shape), scales.tobytes())}  # fmt: skip


def write_file(path, tensors):
    size = {"F32": 4, "BF16": 2}
    header, at, body = {}, 0, []
    for name, (dtype, shape, data) in sorted(tensors.items(), key=lambda i: -size.get(i[1][0], 1)):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
        body.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(body))


def make(out, seed):
    rng = np.random.default_rng(seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False) + "\n")
    text = dict(TEXT, vocab_size=len(tokenizer["model"]["vocab"]))
    text["engram_compressed_vocab_size"] = token_classes(out, text["vocab_size"])[1]
    text["engram_num_embeddings"] = [sum(primes) for primes in engram_primes(text)]
    config = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41",
              "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
              "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic",
              "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
              "text_config": text}  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {}
    for name, (kind, shape) in shapes(text).items():
        values = add_mtp.random_like(rng, name, shape)
        for suffix, entry in packed(kind, values).items():
            tensors[name.removesuffix(".weight") + suffix if suffix else name] = entry
    write_file(out / "model.safetensors", tensors)
    tokens = rng.integers(4, text["vocab_size"], 90)
    tokens[0], tokens[60:70] = 0, tokens[20:30]
    (out / "tokens.json").write_text(json.dumps(tokens.tolist()) + "\n")
    model, tokens = open_case(out)
    logits, taps = model.main(tokens)
    np.save(out / "expect.npy", logits.astype(np.float32))
    cases = [model.case(logits, taps, p, int(logits[p].argmax())) for p in range(len(tokens))]
    cases = [case for case in cases if min(case["margin"]) >= MIN_MARGIN]
    lines = ",\n".join(json.dumps(case) for case in cases)
    (out / "drafts.json").write_text(f'{{"block_size": {text["dspark_block_size"]}, "cases": [\n{lines}\n]}}\n')
    print(f"{out.name}: {len(cases)} blocks, logits std {logits.std():.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", type=pathlib.Path, nargs="?")
    parser.add_argument("--make", type=pathlib.Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.make:
        make(args.make, args.seed)
    else:
        check(args.case)


if __name__ == "__main__":
    main()
