"""Checkpoints whose tensors have other names than the releases': the library's own, those of
its save_pretrained, experts stacked in one tensor per layer, no prefix. The logits are the
golden case's, bit for bit, and nothing is left unread."""

import json
import re
import shutil

import numpy as np
import pytest
from conftest import BACKEND, GOLDEN, run_hadal
from make_model import io

SAVED_V4 = [
    (r"^embed\.", "model.embed_tokens."), (r"^(norm\.|layers\.)", r"model.\1"),
    (r"^hc_head_", "model.hc_head.hc_"), (r"\.attn\.kv_norm\.", ".attn.norm."),
]  # fmt: skip
LIBRARY_V4 = [
    (r"^head\.", "lm_head."), (r"^embed\.", "model.embed_tokens."),
    (r"^(norm\.|layers\.)", r"model.\1"), (r"^hc_head_", "model.hc_head.hc_"),
    (r"\.attn\.", ".self_attn."), (r"\.ffn\.", ".mlp."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."), (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."), (r"\.attn_sink$", ".sinks"),
    (r"\.q_norm\.", ".q_a_norm."), (r"\.compressor\.norm\.", ".compressor.kv_norm."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.indexer\.wq_b\.", ".compressor.indexer.q_b_proj."),
    (r"\.indexer\.weights_proj", ".compressor.indexer.scorer.weights_proj"),
    (r"\.ape$", ".position_bias"), (r"\.w(q_a|q_b|kv|o_a|o_b)\.", r".\1_proj."),
    (r"\.wgate\.", ".gate_proj."), (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."), (r"\.w2\.", ".down_proj."), (r"\.w3\.", ".up_proj."),
]  # fmt: skip
BARE = [(r"^model\.", "")]


def renamed(tensors, rules):
    out = {}
    for name, tensor in tensors.items():
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        assert name not in out
        out[name] = tensor
    return out


def stacked(tensors):
    """All experts of a layer in two tensors, as the library holds them."""
    out, parts = {}, {}
    for name, tensor in tensors.items():
        m = re.fullmatch(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight", name)
        if m:
            parts.setdefault(m[1], {})[int(m[2]), m[3]] = tensor
        else:
            out[name] = tensor
    for stem, experts in parts.items():
        n = 1 + max(e for e, _ in experts)
        for leaf, kinds in (("gate_up_proj", ["gate", "up"]), ("down_proj", ["down"])):
            pieces = [experts[e, kind] for e in range(n) for kind in kinds]
            rows, cols = pieces[0].shape
            out[stem + leaf] = io.Tensor(pieces[0].dtype, (n, len(kinds) * rows, cols),
                                         np.concatenate([p.data for p in pieces]))  # fmt: skip
    return out


def logits(model, tmp_path):
    out = tmp_path / "out.npy"
    result = run_hadal("logits", model, "--tokens", model / "tokens.json", "--out", out,
                       "--quiet", "--backend", BACKEND)  # fmt: skip
    assert result.returncode == 0, result.stderr
    return np.load(out).tobytes()


def respelled(case, tmp_path, change):
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / case, model)
    (model / io.SINGLE).unlink()
    io.write_checkpoint(model, change(io.read_checkpoint(GOLDEN / case)))
    return model


@pytest.mark.parametrize(
    "case,change",
    [
        pytest.param("v4_odd", lambda t: renamed(t, SAVED_V4), id="v4-saved"),
        pytest.param("v4_odd", lambda t: renamed(t, LIBRARY_V4), id="v4-library"),
        pytest.param("v4_odd", lambda t: stacked(renamed(t, LIBRARY_V4)), id="v4-stacked"),
        pytest.param("v2_plain", stacked, id="v2-stacked"),
        pytest.param("v3_moonlight", lambda t: renamed(stacked(t), BARE), id="v3-stacked-bare"),
        pytest.param("v32_rope_mtp", lambda t: renamed(t, BARE), id="v32-bare"),
    ],
)
def test_other_names(tmp_path, case, change):
    model = respelled(case, tmp_path, change)
    assert logits(model, tmp_path) == logits(GOLDEN / case, tmp_path)
    report = run_hadal("inspect", model, "--json", "--strict")
    assert report.returncode == 0, report.stdout


def test_scales_lie_beside_the_name_in_the_file(tmp_path):
    """A quantized matrix under another name has its scale under that name too."""

    def change(tensors):
        tensors = renamed(tensors, LIBRARY_V4)
        name = "model.layers.0.self_attn.q_a_proj"
        rows, cols = tensors[name + ".weight"].shape
        tensors[name + ".weight"] = io.Tensor("F8_E4M3", (rows, cols),
                                              np.full(rows * cols, 0x38, np.uint8))  # fmt: skip
        return tensors | scales

    name = "model.layers.0.self_attn.q_a_proj.weight_scale_inv"
    scales = {name: io.from_array(np.ones((1, 1), np.float32))}
    assert logits(respelled("v4_odd", tmp_path, change), tmp_path)
    shutil.rmtree(tmp_path / "model")
    scales = {}
    model = respelled("v4_odd", tmp_path, change)
    result = run_hadal("logits", model, "--tokens", model / "tokens.json", "--out", tmp_path / "x")
    assert result.returncode == 2 and "q_a_proj.weight" in result.stderr


def test_stacks_that_do_not_fit(tmp_path):
    def shortened(tensors):
        tensors = stacked(tensors)
        name = next(n for n in tensors if n.endswith("gate_up_proj"))
        n, rows, cols = tensors[name].shape
        data = tensors[name].data[: len(tensors[name].data) // n * (n - 1)]
        return tensors | {name: io.Tensor(tensors[name].dtype, (n - 1, rows, cols), data)}

    model = respelled("v2_plain", tmp_path, shortened)
    experts = json.loads((model / "config.json").read_text())["n_routed_experts"]
    result = run_hadal("logits", model, "--tokens", model / "tokens.json", "--out", tmp_path / "x")
    assert result.returncode == 2
    assert "gate_up_proj: shape mismatch" in result.stderr and f"[{experts}, " in result.stderr
