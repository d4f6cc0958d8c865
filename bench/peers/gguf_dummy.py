"""Writes a GGUF of a DeepSeek-V2 config with random weights, for measuring the peer.

Matrices of the routed experts are in one format, all others but the output head in Q8_0; the
head and the embedding are BF16, as ours are."""

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
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(1)
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(float(c["rope_theta"]))
    w.add_rope_dimension_count(c["qk_rope_head_dim"])
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    w.add_q_lora_rank(c["q_lora_rank"])
    w.add_kv_lora_rank(c["kv_lora_rank"])
    w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    w.add_value_length(c["kv_lora_rank"])
    w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    w.add_value_length_mla(c["v_head_dim"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_expert_count(c["n_routed_experts"])
    w.add_expert_used_count(c["num_experts_per_tok"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(1.0)
    w.add_expert_weights_norm(False)


def layer_tensors(c, layer, experts):
    """Name, format and shape of a layer's matrices, inputs last."""
    h, heads, inter = c["hidden_size"], c["num_attention_heads"], c["moe_intermediate_size"]
    nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    yield "attn_q_a", Q.Q8_0, (c["q_lora_rank"], h)
    yield "attn_q_b", Q.Q8_0, (heads * (nope + rope), c["q_lora_rank"])
    yield "attn_kv_a_mqa", Q.Q8_0, (c["kv_lora_rank"] + rope, h)
    yield "attn_k_b", Q.Q8_0, (heads, c["kv_lora_rank"], nope)
    yield "attn_v_b", Q.Q8_0, (heads, c["v_head_dim"], c["kv_lora_rank"])
    yield "attn_output", Q.Q8_0, (h, heads * c["v_head_dim"])
    if layer < c["first_k_dense_replace"]:
        for name in ("ffn_gate", "ffn_up"):
            yield name, Q.Q8_0, (c["intermediate_size"], h)
        yield "ffn_down", Q.Q8_0, (h, c["intermediate_size"])
        return
    n, shared = c["n_routed_experts"], inter * c["n_shared_experts"]
    yield "ffn_gate_inp", Q.F32, (n, h)
    for name in ("ffn_gate", "ffn_up"):
        yield name + "_exps", experts, (n, inter, h)
        yield name + "_shexp", Q.Q8_0, (shared, h)
    yield "ffn_down_exps", experts, (n, h, inter)
    yield "ffn_down_shexp", Q.Q8_0, (h, shared)


def write(path, c, layers, experts, context, words=False):
    fill = Filler()
    w = GGUFWriter(path, "deepseek2")
    add_keys(w, c, layers, context, words)

    def add(name, kind, shape):
        raw = None if kind == Q.F32 else kind
        w.add_tensor(name + ".weight", fill.matrix(kind, *shape), raw_dtype=raw)

    def norm(name, n):
        w.add_tensor(name + ".weight", np.ones(n, np.float32))

    add("token_embd", Q.BF16, (c["vocab_size"], c["hidden_size"]))
    add("output", Q.BF16, (c["vocab_size"], c["hidden_size"]))
    norm("output_norm", c["hidden_size"])
    for i in range(layers):
        at = f"blk.{i}."
        norm(at + "attn_norm", c["hidden_size"])
        norm(at + "ffn_norm", c["hidden_size"])
        norm(at + "attn_q_a_norm", c["q_lora_rank"])
        norm(at + "attn_kv_a_norm", c["kv_lora_rank"])
        for name, kind, shape in layer_tensors(c, i, experts):
            add(at + name, kind, shape)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
