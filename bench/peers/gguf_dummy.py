"""Writes a GGUF of a DeepSeek config with random weights, for measuring the peer.

Matrices of the routed experts are in one format, all others but the output head in Q8_0; the
head and the embedding are BF16, as ours are. V2 and V3 are one architecture to the peer."""

import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf import GGUFWriter

BLOCK = {Q.MXFP4: (32, 17), Q.Q4_0: (32, 18), Q.Q8_0: (32, 34)}  # elements, bytes


class Filler:
    """Random matrices, cut from one pool of blocks per format."""

    def __init__(self):
        self.random = np.random.default_rng(1)
        self.pools = {}

    def pool(self, kind):
        if kind not in self.pools:
            n, size = 1 << 16, BLOCK[kind][1]
            blocks = self.random.integers(0, 256, (n, size), dtype=np.uint8)
            if kind == Q.MXFP4:
                blocks[:, 0] = 120  # 2^-7
            else:
                blocks[:, :2] = np.frombuffer(np.float16(0.0005).tobytes(), np.uint8)
            self.pools[kind] = blocks
        return self.pools[kind]

    def matrix(self, kind, *shape):
        if kind == Q.I32:
            return (np.arange(np.prod(shape)) % 8).astype(np.int32).reshape(shape)
        if kind == Q.F32:
            return self.random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        if kind == Q.BF16:
            n = int(np.prod(shape))
            wide = self.random.standard_normal(1 << 20, np.float32) * 0.02
            half = (wide.view(np.uint32) >> 16).astype(np.uint16)
            return np.resize(half, n).reshape(shape).view(np.uint8)
        elements, size = BLOCK[kind]
        blocks = int(np.prod(shape)) // elements
        pool = self.pool(kind)
        data = np.resize(pool, (blocks, size))
        return data.reshape(*shape[:-1], shape[-1] // elements * size)


GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}


def add_words(w, n):
    """A byte-level vocabulary: the 256 bytes, one pair, and words that no text holds."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    words = [chr(b) for b in plain] + [chr(256 + i) for i in range(len(rest))] + ["ab"]
    words += [f"word{i}" for i in range(n - len(words))]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("default")
    w.add_token_list(words)
    w.add_token_types([1] * n)
    w.add_token_merges(["a b"])
    w.add_bos_token_id(n - 2)
    w.add_eos_token_id(n - 1)
    w.add_add_bos_token(False)


def add_keys(w, c, layers, context, words):
    if words:
        add_words(w, c["vocab_size"])
    else:
        w.add_tokenizer_model("no_vocab")
    w.add_vocab_size(c["vocab_size"])
    w.add_context_length(context)
    w.add_block_count(layers)
    w.add_embedding_length(c["hidden_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(1)
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(float(c["rope_theta"]))
    w.add_rope_dimension_count(c["qk_rope_head_dim"])
    w.add_q_lora_rank(c["q_lora_rank"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_expert_count(c["n_routed_experts"])
    w.add_expert_used_count(c["num_experts_per_tok"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(c["norm_topk_prob"])
    w.add_uint32(f"{w.arch}.expert_gating_func", GATING[c["scoring_func"]])


def mixture(c, experts):
    """Name, format and shape of the feed-forward matrices of a layer of experts."""
    h, inter, n = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    shared = inter * c["n_shared_experts"]
    yield "ffn_gate_inp", Q.F32, (n, h)
    for name in ("ffn_gate", "ffn_up"):
        yield name + "_exps", experts, (n, inter, h)
        yield name + "_shexp", Q.Q8_0, (shared, h)
    yield "ffn_down_exps", experts, (n, h, inter)
    yield "ffn_down_shexp", Q.Q8_0, (h, shared)


class MLA:
    """V2 and V3."""

    arch = "deepseek2"

    @staticmethod
    def add_keys(w, c, layers):
        w.add_feed_forward_length(c["intermediate_size"])
        w.add_leading_dense_block_count(c["first_k_dense_replace"])
        w.add_kv_lora_rank(c["kv_lora_rank"])
        w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
        w.add_value_length(c["kv_lora_rank"])
        w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        w.add_value_length_mla(c["v_head_dim"])
        if c.get("n_group", 1) > 1:
            w.add_uint32(f"{w.arch}.expert_group_count", c["n_group"])
            w.add_uint32(f"{w.arch}.expert_group_used_count", c["topk_group"])

    @staticmethod
    def layer(c, layer, experts):
        """Name, format and shape of a layer's arrays, inputs last."""
        h, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
        nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        yield "attn_q_a_norm", Q.F32, (c["q_lora_rank"],)
        yield "attn_kv_a_norm", Q.F32, (rank,)
        yield "attn_q_a", Q.Q8_0, (c["q_lora_rank"], h)
        yield "attn_q_b", Q.Q8_0, (heads * (nope + rope), c["q_lora_rank"])
        yield "attn_kv_a_mqa", Q.Q8_0, (rank + rope, h)
        yield "attn_k_b", Q.Q8_0, (heads, rank, nope)
        yield "attn_v_b", Q.Q8_0, (heads, c["v_head_dim"], rank)
        yield "attn_output", Q.Q8_0, (h, heads * c["v_head_dim"])
        if layer < c["first_k_dense_replace"]:
            for name in ("ffn_gate", "ffn_up"):
                yield name, Q.Q8_0, (c["intermediate_size"], h)
            yield "ffn_down", Q.Q8_0, (h, c["intermediate_size"])
            return
        if c["scoring_func"] == "sigmoid":
            yield "exp_probs_b.bias", Q.F32, (c["n_routed_experts"],)
        yield from mixture(c, experts)

    @staticmethod
    def rest(c):
        return ()


class Hybrid:
    """V4."""

    arch = "deepseek4"

    @staticmethod
    def add_keys(w, c, layers):
        def put(name, value):
            w.add_uint32(f"{w.arch}.{name}", value)

        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
        put("feed_forward_length", c["moe_intermediate_size"])
        put("attention.sliding_window", c["sliding_window"])
        put("attention.indexer.head_count", c["index_n_heads"])
        put("attention.indexer.key_length", c["index_head_dim"])
        put("attention.indexer.top_k", c["index_topk"])
        put("attention.output_group_count", c["o_groups"])
        put("attention.output_lora_rank", c["o_lora_rank"])
        put("hyper_connection.count", c["hc_mult"])
        put("hyper_connection.sinkhorn_iterations", c["hc_sinkhorn_iters"])
        put("hash_layer_count", c["num_hash_layers"])
        w.add_float32(f"{w.arch}.hyper_connection.epsilon", c["hc_eps"])
        w.add_float32(f"{w.arch}.swiglu_clamp_exp", c["swiglu_limit"])
        w.add_float32(f"{w.arch}.attention.compress_rope_freq_base", float(c["compress_rope_theta"]))
        w.add_array(f"{w.arch}.attention.compress_ratios", c["compress_ratios"][:layers])

    @staticmethod
    def layer(c, layer, experts):
        h, heads, head = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
        q, groups, rank, hc = c["q_lora_rank"], c["o_groups"], c["o_lora_rank"], c["hc_mult"]
        ratio, index = c["compress_ratios"][layer], c["index_head_dim"]
        yield "attn_sinks", Q.F32, (heads,)
        yield "attn_q_a_norm", Q.F32, (q,)
        yield "attn_kv_a_norm", Q.F32, (head,)
        yield "attn_q_a", Q.Q8_0, (q, h)
        yield "attn_q_b", Q.Q8_0, (heads * head, q)
        yield "attn_kv", Q.Q8_0, (head, h)
        yield "attn_output_a", Q.Q8_0, (groups * rank, heads * head // groups)
        yield "attn_output_b", Q.Q8_0, (h, groups * rank)
        for block in ("attn", "ffn"):
            yield f"hc_{block}_fn", Q.F32, ((2 + hc) * hc, hc * h)
            yield f"hc_{block}_base", Q.F32, ((2 + hc) * hc,)
            yield f"hc_{block}_scale", Q.F32, (3,)
        if ratio:
            wide = (2 if ratio == 4 else 1) * head
            yield "attn_compressor_kv", Q.Q8_0, (wide, h)
            yield "attn_compressor_gate", Q.Q8_0, (wide, h)
            yield "attn_compressor_ape", Q.F32, (ratio, wide)
            yield "attn_compressor_norm", Q.F32, (head,)
        if ratio == 4:
            yield "indexer.proj", Q.Q8_0, (c["index_n_heads"], h)
            yield "indexer.attn_q_b", Q.Q8_0, (c["index_n_heads"] * index, q)
            yield "indexer_compressor_kv", Q.Q8_0, (2 * index, h)
            yield "indexer_compressor_gate", Q.Q8_0, (2 * index, h)
            yield "indexer_compressor_ape", Q.F32, (ratio, 2 * index)
            yield "indexer_compressor_norm", Q.F32, (index,)
        if layer < c["num_hash_layers"]:
            yield "ffn_gate_tid2eid", Q.I32, (c["vocab_size"], c["num_experts_per_tok"])
        else:
            yield "exp_probs_b.bias", Q.F32, (c["n_routed_experts"],)
        yield from mixture(c, experts)

    @staticmethod
    def rest(c):
        hc = c["hc_mult"]
        yield "output_hc_fn", Q.F32, (hc, hc * c["hidden_size"])
        yield "output_hc_base", Q.F32, (hc,)
        yield "output_hc_scale", Q.F32, (1,)


def write(path, c, layers, experts, context, words=False):
    family = Hybrid if c["model_type"] == "deepseek_v4" else MLA
    fill = Filler()
    w = GGUFWriter(path, family.arch)
    add_keys(w, c, layers, context, words)
    family.add_keys(w, c, layers)

    def add(name, kind, shape):
        plain = kind in (Q.F32, Q.I32)
        data = np.ones(shape, np.float32) if len(shape) == 1 else fill.matrix(kind, *shape)
        full = name if name.endswith(".bias") else name + ".weight"
        w.add_tensor(full, data, raw_dtype=None if plain else kind)

    add("token_embd", Q.BF16, (c["vocab_size"], c["hidden_size"]))
    add("output", Q.BF16, (c["vocab_size"], c["hidden_size"]))
    add("output_norm", Q.F32, (c["hidden_size"],))
    for what in family.rest(c):
        add(*what)
    for i in range(layers):
        at = f"blk.{i}."
        add(at + "attn_norm", Q.F32, (c["hidden_size"],))
        add(at + "ffn_norm", Q.F32, (c["hidden_size"],))
        for name, kind, shape in family.layer(c, i, experts):
            add(at + name, kind, shape)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
