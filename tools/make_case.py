#!/usr/bin/env python3
"""Makes reference cases: a small random model and the logits the Hugging Face library gives it.

    tools/make_case.py v3_moonlight OUT_DIR            one of the shapes below
    tools/make_case.py v4 OUT_DIR --seed 7 --tokens 200 --set hidden_size=96 --set o_groups=4
    tools/make_case.py --list

Needs torch and transformers (5.17 or later). A case is config.json, model.safetensors (bfloat16
with the float32 tensors of the official checkpoints, V4 under the official names), tokens.json
and expect.npy: float32 logits [tokens, vocab] of the eager float32 model after each token.

Discrete choices (experts, index top-k) make logits jump where two scores nearly tie, and then
two exact programs may rightly differ. So a seed is taken only if the library agrees with itself,
prefill against token-by-token decode, and stays smooth when the weights move by a few float32
roundings; otherwise the next seed is tried. An index score is a sum over heads of rectified
products: with fewer than ten heads many scores are exactly zero, all tied.
"""

import argparse
import json
import pathlib
import re
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

GAIN = 1.2  # standard deviation of a matrix times the root of its inputs: keeps logits near 1
SELF_AGREEMENT = 3e-5  # prefill against decode
NUDGE = 2e-6  # relative change of every weight in the smoothness runs
MAX_NUDGED_CHANGE = 5e-4

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1}  # fmt: skip

V2 = dict(
    model_type="deepseek_v2", vocab_size=160, hidden_size=96, intermediate_size=120,
    moe_intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
    q_lora_rank=None, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=20,
    n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, first_k_dense_replace=1,
    moe_layer_freq=1, n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False,
    routed_scaling_factor=1.0, max_position_embeddings=512,
    rope_parameters=dict(YARN, rope_theta=10000.0, mscale=0.8, mscale_all_dim=0.7),
)  # fmt: skip

V3 = dict(
    model_type="deepseek_v3", vocab_size=160, hidden_size=80, intermediate_size=144,
    moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
    q_lora_rank=48, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=32,
    n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=4, first_k_dense_replace=1,
    n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
    num_nextn_predict_layers=1, max_position_embeddings=512, rope_interleave=True,
    rope_parameters=dict(YARN, rope_theta=10000.0, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip

V32 = dict(
    V3, model_type="deepseek_v32", index_n_heads=14, index_head_dim=24, index_topk=20,
)  # fmt: skip
del V32["rope_interleave"]

V4 = dict(
    model_type="deepseek_v4", vocab_size=160, hidden_size=64, moe_intermediate_size=40,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1, head_dim=32,
    qk_rope_head_dim=8, q_lora_rank=40, o_groups=2, o_lora_rank=24, n_routed_experts=10,
    n_shared_experts=1, num_experts_per_tok=3, scoring_func="sqrtsoftplus", norm_topk_prob=True,
    routed_scaling_factor=1.5, swiglu_limit=10.0, sliding_window=24, index_n_heads=12,
    index_head_dim=16, index_topk=9, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
    num_nextn_predict_layers=1, max_position_embeddings=2048, rope_theta=10000.0,
    compress_rope_theta=160000.0,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    layer_types=["sliding_attention", "heavily_compressed_attention",
                 "compressed_sparse_attention", "heavily_compressed_attention"],
    mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
    rope_parameters=dict(YARN, factor=16.0, original_max_position_embeddings=128),
)  # fmt: skip

WINDOW, CSA, HCA = ("sliding_attention", "compressed_sparse_attention",
                    "heavily_compressed_attention")  # fmt: skip

# name: (base, tokens, overrides). The plain families first.
CASES = {
    "v2": (V2, 160, {}),
    "v3": (V3, 160, {}),
    "v32": (V32, 160, {}),
    "v4": (V4, 280, {}),
    # V2 as the 236B model: low-rank query, groups, a scale; more layers and heads than usual
    "v2_groups": (V2, 150, dict(
        hidden_size=72, num_attention_heads=6, num_key_value_heads=6, q_lora_rank=28,
        kv_lora_rank=36, qk_nope_head_dim=20, qk_rope_head_dim=12, v_head_dim=16,
        n_routed_experts=12, n_group=4, topk_group=2, topk_method="group_limited_greedy",
        routed_scaling_factor=16.0, num_experts_per_tok=3, n_shared_experts=1,
        moe_intermediate_size=24, intermediate_size=100, vocab_size=131,
        rope_parameters=dict(YARN, rope_theta=10000.0, factor=40.0, mscale=0.707,
                             mscale_all_dim=0.707))),
    # one dense layer only, two layers, no YaRN, rope theta of its own
    "v2_plain": (V2, 200, dict(
        num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, hidden_size=60,
        qk_nope_head_dim=18, qk_rope_head_dim=6, v_head_dim=23, kv_lora_rank=34,
        n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=30,
        n_shared_experts=3, vocab_size=101,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0})),
    # Moonlight: direct query, one group, no YaRN, other eps
    "v3_moonlight": (V3, 180, dict(
        q_lora_rank=None, n_group=1, topk_group=1, hidden_size=72, num_attention_heads=3,
        num_key_value_heads=3, qk_nope_head_dim=20, qk_rope_head_dim=12, v_head_dim=28,
        kv_lora_rank=44, n_routed_experts=9, n_shared_experts=2, num_experts_per_tok=2,
        moe_intermediate_size=28, routed_scaling_factor=2.446, rms_norm_eps=1e-5,
        num_nextn_predict_layers=0, vocab_size=149,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0})),
    # every layer MoE, all groups kept, many small experts
    "v3_wide": (V3, 220, dict(
        num_hidden_layers=4, first_k_dense_replace=0, n_routed_experts=30, n_group=5,
        topk_group=3, num_experts_per_tok=7, moe_intermediate_size=12, hidden_size=88,
        num_attention_heads=8, num_key_value_heads=8, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=12, q_lora_rank=20, kv_lora_rank=24, vocab_size=97)),
    # what the library can and no release does: half-split pairs, no shared expert, an eps
    # that the norms inside the attention must not take for theirs
    "v3_unusual": (V3, 70, dict(
        rms_norm_eps=1e-2, rope_interleave=False, n_shared_experts=0, num_hidden_layers=2,
        hidden_size=40, intermediate_size=56, moe_intermediate_size=20, n_routed_experts=6,
        n_group=3, num_experts_per_tok=2, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12,
        qk_rope_head_dim=10, v_head_dim=14, num_nextn_predict_layers=0, vocab_size=61,
        rope_parameters=dict(YARN, rope_theta=10000.0, original_max_position_embeddings=24,
                             mscale=1.0, mscale_all_dim=0.8))),
    # most layers dense; weights not renormalized
    "v3_dense": (V3, 150, dict(
        num_hidden_layers=4, first_k_dense_replace=3, norm_topk_prob=False,
        routed_scaling_factor=1.0, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=3, vocab_size=113)),
    "v32_narrow": (V32, 230, dict(
        num_hidden_layers=2, index_n_heads=13, index_head_dim=40, index_topk=33,
        qk_rope_head_dim=12, qk_nope_head_dim=28, v_head_dim=18, num_attention_heads=5,
        num_key_value_heads=5, n_routed_experts=10, n_group=1, topk_group=1,
        num_experts_per_tok=3, vocab_size=127)),
    # the whole index head is rotated; a top-k of a few tokens
    "v32_rope": (V32, 140, dict(
        index_head_dim=16, index_n_heads=16, index_topk=7, hidden_size=64,
        num_hidden_layers=3, moe_intermediate_size=20, n_routed_experts=8, n_group=2,
        topk_group=1, num_experts_per_tok=3, q_lora_rank=36, intermediate_size=80,
        vocab_size=89)),
    "v3_small": (V3, 130, dict(
        hidden_size=64, num_hidden_layers=2, moe_intermediate_size=24, n_routed_experts=8,
        n_group=4, topk_group=2, num_experts_per_tok=3, intermediate_size=96, q_lora_rank=28,
        v_head_dim=20, vocab_size=107)),
    # other rates, groups and streams; the clamp binds
    "v4_odd": (V4, 210, dict(
        num_hidden_layers=5, hidden_size=56, num_attention_heads=6, head_dim=40,
        qk_rope_head_dim=12, q_lora_rank=28, o_groups=3, o_lora_rank=20, n_routed_experts=7,
        num_experts_per_tok=2, moe_intermediate_size=32, sliding_window=17, index_n_heads=11,
        index_head_dim=20, index_topk=11, hc_mult=3, hc_sinkhorn_iters=7, swiglu_limit=0.8,
        routed_scaling_factor=2.5, vocab_size=103,
        compress_rates={CSA: 6, HCA: 40},
        layer_types=[HCA, CSA, WINDOW, CSA, HCA],
        mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe", "moe"],
        rope_parameters=dict(YARN, factor=4.0, original_max_position_embeddings=96))),
    # the smallest that has every kind of layer, at the released rates
    "v4_small": (V4, 150, dict(
        num_hidden_layers=3, hidden_size=48, head_dim=24, qk_rope_head_dim=8, q_lora_rank=24,
        o_lora_rank=16, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
        sliding_window=20, index_topk=10, vocab_size=96,
        layer_types=[WINDOW, HCA, CSA], mlp_layer_types=["hash_moe", "moe", "moe"])),
    # an index head wider than the attention's, a window of a few tokens, two streams
    "v4_wide_index": (V4, 90, dict(
        num_hidden_layers=2, hidden_size=40, num_attention_heads=2, head_dim=12,
        qk_rope_head_dim=6, q_lora_rank=20, o_groups=1, o_lora_rank=16, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, sliding_window=3, index_n_heads=10,
        index_head_dim=28, index_topk=5, hc_mult=2, hc_sinkhorn_iters=3, vocab_size=61,
        num_nextn_predict_layers=0, layer_types=[CSA, CSA], mlp_layer_types=["hash_moe", "moe"],
        compress_rates={CSA: 4, HCA: 24})),
    # window only, and a window of the whole context
    "v4_window": (V4, 130, dict(
        num_hidden_layers=2, layer_types=[WINDOW, WINDOW], mlp_layer_types=["moe", "moe"],
        sliding_window=200, o_groups=4, vocab_size=83)),
    # as Flash in small: released rates and order, one output group per head
    "v4_flash": (V4, 300, dict(
        num_hidden_layers=6, layer_types=[WINDOW, WINDOW, CSA, HCA, CSA, HCA],
        mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 3, o_groups=4, sliding_window=16,
        index_topk=13, n_routed_experts=8, moe_intermediate_size=24, hidden_size=56)),
}  # fmt: skip


def build(config):
    config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    return config, model.float().eval()


# Float32 in the official checkpoints; the rest is bfloat16.
KEPT_FLOAT32 = re.compile(
    r"e_score_correction_bias|sinks|_hc\.(fn|base|scale)|hc_head\.hc_|position_bias"
)


def random_values(rng, name, tensor, n_experts):
    shape = tuple(tensor.shape)
    if name.endswith("tid2eid"):
        return np.stack([rng.permutation(n_experts)[: shape[1]] for _ in range(shape[0])])
    noise = rng.standard_normal(shape)
    if noise.size == 0:  # no shared expert
        return noise
    if "e_score_correction_bias" in name:
        return 0.05 * noise
    if re.search(r"sinks|position_bias|(_hc\.|hc_)base", name):
        return 0.5 * noise
    if re.search(r"(_hc\.|hc_)scale", name):
        return 0.7 + 0.1 * noise
    if name.endswith("norm.bias"):
        return 0.1 * noise
    if len(shape) == 1:  # norms
        return 1.0 + 0.1 * noise
    return GAIN * shape[-1] ** -0.5 * noise


@torch.no_grad()
def randomize(model, rng, n_experts):
    for name, tensor in model.state_dict().items():
        values = torch.from_numpy(np.asarray(random_values(rng, name, tensor, n_experts)))
        if tensor.is_floating_point() and not KEPT_FLOAT32.search(name):
            values = values.to(torch.bfloat16)
        tensor.copy_(values)


@torch.no_grad()
def prefill(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()


@torch.no_grad()
def decode(model, tokens, first):
    """One prefill of `first` tokens, then token by token."""
    out = model(torch.tensor([tokens[:first]]), use_cache=True)
    rows = [out.logits[0]]
    for token in tokens[first:]:
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0])
    return torch.cat(rows).float().numpy()


@torch.no_grad()
def nudged(model, tokens, rng):
    """Prefill with every weight moved by a few roundings; the weights are put back."""
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            noise = torch.from_numpy(rng.standard_normal(tuple(tensor.shape)).astype(np.float32))
            tensor.mul_(1 + NUDGE * noise)
    logits = prefill(model, tokens)
    for name, tensor in model.state_dict().items():
        tensor.copy_(saved[name])
    return logits


def why_not(model, tokens, expect, rng):
    """The reason to try another seed, or None."""
    if not np.isfinite(expect).all():
        return "not finite"
    change = np.abs(decode(model, tokens, 1) - expect).max()
    if change > SELF_AGREEMENT:
        return f"decode differs from prefill by {change:.1e}"
    for _ in range(4):
        change = np.abs(nudged(model, tokens, rng) - expect).max()
        if change > MAX_NUDGED_CHANGE:
            return f"a small nudge moves the logits by {change:.1e}"
    return None


# Hugging Face names to those of the official V4 checkpoints, in order of application.
V4_NAMES = [
    (r"^lm_head\.", "head."), (r"^model\.", ""), (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"), (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."), (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.", ".attn."), (r"\.mlp\.", ".ffn."), (r"\.sinks$", ".attn_sink"),
    (r"\.compressor\.indexer\.(scorer\.)?(q_b_proj|weights_proj)\.", r".indexer.\2."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."), (r"\.position_bias$", ".ape"),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."), (r"\.kv_proj\.", ".wkv."),
    (r"\.(q_a|q_b|o_a|o_b)_proj\.", r".w\1."), (r"\.q_a_norm\.", ".q_norm."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
]  # fmt: skip


def official_tensors(model, is_v4):
    """{name in the file: tensor}; stacked experts become one tensor each."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        stored = tensor
        if tensor.is_floating_point() and not KEPT_FLOAT32.search(name):
            stored = tensor.to(torch.bfloat16)
        stem, _, leaf = name.rpartition(".")
        if stem.endswith(".experts"):
            parts = {"gate_proj": 0, "up_proj": 1} if leaf == "gate_up_proj" else {leaf: 0}
            for part, half in parts.items():
                for e, expert in enumerate(stored):
                    rows = expert.shape[0] // len(parts)
                    tensors[f"{stem}.{e}.{part}.weight"] = expert[half * rows : (half + 1) * rows]
        else:
            tensors[name] = stored
    if is_v4:
        experts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        renamed = {}
        for name, tensor in tensors.items():
            name = re.sub(r"(\.experts\.\d+\.)(\w+)\.", lambda m: m[1] + experts[m[2]] + ".", name)
            for pattern, new in V4_NAMES:
                name = re.sub(pattern, new, name)
            renamed[name] = tensor
        tensors = renamed
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def flat_form(config):
    """The spelling of the official releases: rope_theta with rope_scaling; V4's integer lists."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    if config["model_type"] == "deepseek_v4":
        rates = config.pop("compress_rates")
        rates = {WINDOW: 0, **rates}
        n_mtp = config["num_nextn_predict_layers"]
        config["compress_ratios"] = [rates[t] for t in config.pop("layer_types")] + [0] * n_mtp
        config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
        config.pop("partial_rotary_factor")
        config["topk_method"] = "noaux_tc"
        rope = rope["compress"]
        for key in ("attention_factor", "partial_rotary_factor", "rope_theta"):
            rope.pop(key, None)
    else:
        config["rope_theta"] = rope.pop("rope_theta")
        for key in ("head_dim", "qk_head_dim", "layer_types", "mlp_layer_types"):
            config.pop(key, None)
        if config["model_type"] != "deepseek_v2":
            config.update(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
        else:
            config["scoring_func"] = "softmax"
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    return config


def make(name, out, seed, n_tokens, overrides, flat):
    base, default_tokens, changes = CASES[name]
    values = {**base, **changes, **overrides}
    n_tokens = n_tokens or default_tokens
    config, model = build(values)
    for attempt in range(seed, seed + 200):
        rng = np.random.default_rng(attempt)
        randomize(model, rng, config.n_routed_experts)
        tokens = rng.integers(0, config.vocab_size, n_tokens).tolist()
        expect = prefill(model, tokens)
        reason = why_not(model, tokens, expect, rng)
        if not reason:
            break
        print(f"{name}: seed {attempt}: {reason}", file=sys.stderr)
    else:
        sys.exit(f"{name}: no good seed in {seed}..{seed + 199}")
    out.mkdir(parents=True, exist_ok=True)
    stored = json.loads(config.to_json_string(use_diff=False))
    written = {key: value for key, value in stored.items() if key in values or key in KEPT_KEYS}
    written.update(architectures=[type(model).__name__], dtype="bfloat16")
    if config.model_type == "deepseek_v4":
        written["qk_rope_head_dim"] = config.qk_rope_head_dim
    if flat:
        written = flat_form(written)
    (out / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    save_file(official_tensors(model, config.model_type == "deepseek_v4"),
              out / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    (out / "tokens.json").write_text(json.dumps(tokens) + "\n")
    np.save(out / "expect.npy", expect)
    size = sum(f.stat().st_size for f in out.iterdir())
    print(f"{name}: seed {attempt}, {n_tokens} tokens, {size} bytes, logits std {expect.std():.2f}")


# Written although no shape above sets them.
KEPT_KEYS = {
    "attention_bias", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "layer_types",
    "mlp_layer_types", "partial_rotary_factor", "qk_head_dim", "rms_norm_eps",
    "tie_word_embeddings", "transformers_version",
}  # fmt: skip

def parse_override(text):
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", nargs="?", choices=CASES, metavar="CASE")
    parser.add_argument("out", nargs="?", type=pathlib.Path, metavar="OUT_DIR")
    parser.add_argument("--list", action="store_true", help="name the shapes and end")
    parser.add_argument("--seed", type=int, default=1, help="first seed to try")
    parser.add_argument("--tokens", type=int, help="length of the sequence")
    parser.add_argument("--set", action="append", default=[], type=parse_override,
                        metavar="KEY=JSON", help="a config value; may be repeated")  # fmt: skip
    parser.add_argument("--flat", action="store_true",
                        help="write config.json in the official flat spelling")  # fmt: skip
    args = parser.parse_args()
    if args.list:
        print("\n".join(CASES))
    elif not args.out:
        parser.error("CASE and OUT_DIR are needed")
    else:
        torch.set_num_threads(1)
        make(args.case, args.out, args.seed, args.tokens, dict(args.set), args.flat)


if __name__ == "__main__":
    main()
