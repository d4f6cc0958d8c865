"""model_shapes.py - configs of tiny models of every family, and the tensors that a model has.

shapes(config) states which tensors a model has, a second time and independently of the C
program: names and shapes as the official checkpoints have them. Both spellings of the config
are understood: the flat one of the releases and the nested one of the Hugging Face library.
Needs Python alone.
"""

# ---- configs ----------------------------------------------------------------------------

YARN = {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32,
        "beta_slow": 1, "mscale": 0.8, "mscale_all_dim": 0.7}

MLA = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
       "num_key_value_heads": 2, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
       "qk_rope_head_dim": 8, "v_head_dim": 20, "intermediate_size": 80,
       "moe_intermediate_size": 36, "n_routed_experts": 6, "n_shared_experts": 2,
       "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
       "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "hidden_act": "silu",
       "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0,
       "eos_token_id": 1, "torch_dtype": "bfloat16"}

V2 = dict(MLA, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2",
          q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy",
          scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=1.0,
          rope_theta=10000, rope_scaling=dict(YARN, type="yarn"))

V3 = dict(MLA, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3",
          q_lora_rank=28, n_group=3, topk_group=2, topk_method="noaux_tc",
          scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
          n_shared_experts=1, num_nextn_predict_layers=1, rope_theta=10000,
          rope_scaling=dict(YARN, type="yarn"))

V32 = dict(V3, architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32",
           index_n_heads=3, index_head_dim=16, index_topk=10)

V4 = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
      "vocab_size": 96, "hidden_size": 40, "num_hidden_layers": 5, "num_attention_heads": 4,
      "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 28,
      "o_groups": 2, "o_lora_rank": 12, "n_routed_experts": 6, "n_shared_experts": 1,
      "num_experts_per_tok": 2, "moe_intermediate_size": 36, "num_hash_layers": 2,
      "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
      "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "sliding_window": 16,
      "index_n_heads": 3, "index_head_dim": 16, "index_topk": 6, "hc_mult": 4,
      "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000,
      "compress_rope_theta": 160000, "rope_scaling": {
          "type": "yarn", "factor": 16, "original_max_position_embeddings": 128,
          "beta_fast": 32, "beta_slow": 1},
      "max_position_embeddings": 2048, "compress_ratios": [0, 128, 4, 128, 4, 0],
      "num_nextn_predict_layers": 1, "bos_token_id": 0, "eos_token_id": 1,
      "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
      "torch_dtype": "bfloat16"}


# As the dated releases: num_nextn_predict_layers still counts an MTP layer that is not there.
V4_DSPARK = dict(V4, compress_ratios=[0, 128, 4, 128, 4, 0, 0], dspark_block_size=5,
                 dspark_markov_rank=12, dspark_noise_token_id=90,
                 dspark_target_layer_ids=[1, 3, 4])  # fmt: skip


def drafter_layers(config):
    if "dspark_block_size" in config:
        return len(config["compress_ratios"]) - config["num_hidden_layers"]
    return config.get("num_nextn_predict_layers", 0)


def nested(config):
    """The spelling of the Hugging Face library, 5.x."""
    config = dict(config)
    scaling = dict(config.pop("rope_scaling"))
    scaling["rope_type"] = scaling.pop("type")
    scaling["rope_theta"] = config.pop("rope_theta")
    config["dtype"] = config.pop("torch_dtype")
    if config["model_type"] != "deepseek_v4":
        config["rope_parameters"] = scaling
        config["head_dim"] = config["qk_rope_head_dim"]
        if config["model_type"] == "deepseek_v32":
            n, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
            config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (n - dense)
        return config
    partial = config["qk_rope_head_dim"] / config["head_dim"]
    compress = dict(scaling, rope_theta=config["compress_rope_theta"],
                    partial_rotary_factor=partial, attention_factor=1.0)
    main = {"rope_type": "default", "rope_theta": scaling["rope_theta"],
            "partial_rotary_factor": partial}
    config["rope_parameters"] = {"main": main, "compress": compress}
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention",
             128: "heavily_compressed_attention"}
    n, hashed = config["num_hidden_layers"], config.pop("num_hash_layers")
    config["layer_types"] = [kinds[r] for r in config.pop("compress_ratios")[:n]]
    config["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (n - hashed)
    config["compress_rates"] = {kinds[4]: 4, kinds[128]: 128}
    config["partial_rotary_factor"] = partial
    return config


CONFIGS = {
    "v2": V2, "v2_low_rank_query": dict(V2, q_lora_rank=28), "v3": V3, "v32": V32, "v4": V4,
    "v2_nested": nested(V2), "v3_nested": nested(V3), "v32_nested": nested(V32),
    "v4_nested": nested(V4), "v2_tied": dict(V2, tie_word_embeddings=True),
    "v3_no_mtp": dict(V3, num_nextn_predict_layers=0), "v4_dspark": V4_DSPARK,
}

# ---- the schema, in Python ----------------------------------------------------------------


def mlp(prefix, width, hidden, names):
    gate, up, down = names
    return {f"{prefix}{gate}.weight": ((width, hidden), "matrix"),
            f"{prefix}{up}.weight": ((width, hidden), "matrix"),
            f"{prefix}{down}.weight": ((hidden, width), "matrix")}


def mla_layer(c, layer, is_moe):
    h, heads, rope = c["hidden_size"], c["num_attention_heads"], c["qk_rope_head_dim"]
    nope, v, rank = c["qk_nope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
    names = ("gate_proj", "up_proj", "down_proj")
    a = {"q_proj.weight": ((heads * (nope + rope), h), "matrix")}
    if c["q_lora_rank"]:
        q = c["q_lora_rank"]
        a = {"q_a_proj.weight": ((q, h), "matrix"), "q_a_layernorm.weight": ((q,), "norm"),
             "q_b_proj.weight": ((heads * (nope + rope), q), "matrix")}
    a["kv_a_proj_with_mqa.weight"] = ((rank + rope, h), "matrix")
    a["kv_a_layernorm.weight"] = ((rank,), "norm")
    a["kv_b_proj.weight"] = ((heads * (nope + v), rank), "matrix")
    a["o_proj.weight"] = ((h, heads * v), "matrix")
    if c["model_type"] == "deepseek_v32":
        n, d = c["index_n_heads"], c["index_head_dim"]
        a["indexer.wq_b.weight"] = ((n * d, c["q_lora_rank"]), "matrix")
        a["indexer.wk.weight"] = ((d, h), "matrix")
        a["indexer.k_norm.weight"] = ((d,), "norm f32")
        a["indexer.k_norm.bias"] = ((d,), "small f32")
        a["indexer.weights_proj.weight"] = ((n, h), "matrix")
    t = {f"self_attn.{name}": what for name, what in a.items()}
    t["input_layernorm.weight"] = t["post_attention_layernorm.weight"] = ((h,), "norm")
    if is_moe:
        t["mlp.gate.weight"] = ((c["n_routed_experts"], h), "matrix")
        if c["model_type"] != "deepseek_v2":
            t["mlp.gate.e_score_correction_bias"] = ((c["n_routed_experts"],), "small f32")
        width = c["moe_intermediate_size"]
        for e in range(c["n_routed_experts"]):
            t |= mlp(f"mlp.experts.{e}.", width, h, names)
        t |= mlp("mlp.shared_experts.", c["n_shared_experts"] * width, h, names)
    else:
        t |= mlp("mlp.", c["intermediate_size"], h, names)
    return {f"model.layers.{layer}.{name}": what for name, what in t.items()}


def mla_model(c, mtp_copies):
    h, vocab, n = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    table = ((vocab, h), "matrix")
    t = {"model.embed_tokens.weight": table, "model.norm.weight": ((h,), "norm")}
    if not c["tie_word_embeddings"]:
        t["lm_head.weight"] = table
    for layer in range(n):
        t |= mla_layer(c, layer, layer >= c["first_k_dense_replace"])
    for layer in range(n, n + c.get("num_nextn_predict_layers", 0)):
        t |= mla_layer(c, layer, True)
        prefix = f"model.layers.{layer}."
        for name in ("enorm", "hnorm", "shared_head.norm"):
            t[f"{prefix}{name}.weight"] = ((h,), "norm")
        t[f"{prefix}eh_proj.weight"] = ((h, 2 * h), "matrix")
        if mtp_copies:
            t[f"{prefix}embed_tokens.weight"] = table
            t[f"{prefix}shared_head.head.weight"] = table
    return t


def v4_ratios(c):
    if "compress_ratios" in c:
        return c["compress_ratios"][: c["num_hidden_layers"]]
    rates = c["compress_rates"]
    return [rates.get(kind, 0) for kind in c["layer_types"]]


def v4_hashed(c):
    return c.get("num_hash_layers", c.get("mlp_layer_types", []).count("hash_moe"))


def hyper(prefix, out, n_scales, c):
    return {f"{prefix}_fn": ((out, c["hc_mult"] * c["hidden_size"]), "small f32"),
            f"{prefix}_base": ((out,), "small f32"),
            f"{prefix}_scale": ((n_scales,), "small f32")}


def compressor(prefix, ratio, width, head, h):
    return {f"{prefix}ape": ((ratio, width), "small f32"),
            f"{prefix}wkv.weight": ((width, h), "matrix"),
            f"{prefix}wgate.weight": ((width, h), "matrix"),
            f"{prefix}norm.weight": ((head,), "norm")}


def v4_layer(c, prefix, ratio, hashed):
    h, d, q, heads = c["hidden_size"], c["head_dim"], c["q_lora_rank"], c["num_attention_heads"]
    groups, rank, mult = c["o_groups"], c["o_lora_rank"], c["hc_mult"]
    t = hyper("hc_attn", 2 * mult + mult * mult, 3, c)
    t |= hyper("hc_ffn", 2 * mult + mult * mult, 3, c)
    t["attn_norm.weight"] = t["ffn_norm.weight"] = ((h,), "norm")
    t["attn.attn_sink"] = ((heads,), "small f32")
    t["attn.wq_a.weight"] = ((q, h), "matrix")
    t["attn.q_norm.weight"] = ((q,), "norm")
    t["attn.wq_b.weight"] = ((heads * d, q), "matrix")
    t["attn.wkv.weight"] = ((d, h), "matrix")
    t["attn.kv_norm.weight"] = ((d,), "norm")
    t["attn.wo_a.weight"] = ((groups * rank, heads * d // groups), "matrix")
    t["attn.wo_b.weight"] = ((h, groups * rank), "matrix")
    if ratio == 4:
        n, k = c["index_n_heads"], c["index_head_dim"]
        t |= compressor("attn.compressor.", 4, 2 * d, d, h)
        t |= compressor("attn.indexer.compressor.", 4, 2 * k, k, h)
        t["attn.indexer.wq_b.weight"] = ((n * k, q), "matrix")
        t["attn.indexer.weights_proj.weight"] = ((n, h), "matrix")
    elif ratio:
        t |= compressor("attn.compressor.", ratio, d, d, h)
    t["ffn.gate.weight"] = ((c["n_routed_experts"], h), "matrix")
    if hashed:
        t["ffn.gate.tid2eid"] = ((c["vocab_size"], c["num_experts_per_tok"]), "table")
    else:
        t["ffn.gate.bias"] = ((c["n_routed_experts"],), "small f32")
    width, names = c["moe_intermediate_size"], ("w1", "w3", "w2")
    for e in range(c["n_routed_experts"]):
        t |= mlp(f"ffn.experts.{e}.", width, h, names)
    t |= mlp("ffn.shared_experts.", c["n_shared_experts"] * width, h, names)
    return {prefix + name: what for name, what in t.items()}


def dspark_stages(c):
    h, rank, stages = c["hidden_size"], c["dspark_markov_rank"], drafter_layers(c)
    t, last = {}, f"mtp.{stages - 1}."
    for stage in range(stages):
        t |= v4_layer(c, f"mtp.{stage}.", 0, False)
    t["mtp.0.main_proj.weight"] = ((h, len(c["dspark_target_layer_ids"]) * h), "matrix")
    t["mtp.0.main_norm.weight"] = t[last + "norm.weight"] = ((h,), "norm")
    t |= hyper(last + "hc_head", c["hc_mult"], 1, c)
    for name in ("markov_w1", "markov_w2"):
        t[f"{last}markov_head.{name}.weight"] = ((c["vocab_size"], rank), "matrix")
    t[last + "confidence_head.proj.weight"] = ((1, h + rank), "matrix")
    return t


def v4_model(c):
    h, mult = c["hidden_size"], c["hc_mult"]
    table = ((c["vocab_size"], h), "matrix")
    t = {"embed.weight": table, "head.weight": table, "norm.weight": ((h,), "norm")}
    t |= hyper("hc_head", mult, 1, c)
    for layer, ratio in enumerate(v4_ratios(c)):
        t |= v4_layer(c, f"layers.{layer}.", ratio, layer < v4_hashed(c))
    if "dspark_block_size" in c:
        return t | dspark_stages(c)
    for m in range(drafter_layers(c)):
        t |= v4_layer(c, f"mtp.{m}.", 0, False)
        t |= hyper(f"mtp.{m}.hc_head", mult, 1, c)
        for name in ("enorm", "hnorm", "norm"):
            t[f"mtp.{m}.{name}.weight"] = ((h,), "norm")
        for name in ("e_proj", "h_proj"):
            t[f"mtp.{m}.{name}.weight"] = ((h, h), "matrix")
    return t


def shapes(config, mtp_copies=True):
    """{name: (shape, kind)}; kind is "matrix", "norm", "small" (perhaps " f32") or "table"."""
    if config["model_type"] == "deepseek_v4":
        return v4_model(config)
    return mla_model(config, mtp_copies)
