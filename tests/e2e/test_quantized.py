"""Quantized checkpoints: their formats are recognized, and compute like their plain copies."""
import json

import make_model
import numpy as np
import pytest
import quantize_case as q
from make_model import CONFIGS, io

# ---- the encoders of the tool, against vectors that the C ones are tested with too ------------


def test_e4m3():
    codes = np.arange(256, dtype=np.uint8)
    numbers = codes & 0x7F != 0x7F
    assert (q.e4m3_encode(q.E4M3[numbers]) == codes[numbers]).all()
    assert q.E4M3[0x7E] == 448 and q.E4M3[1] == 2.0**-9 and np.isnan(q.E4M3[[0x7F, 0xFF]]).all()
    assert q.e4m3_encode(np.float32(1e9)) == 0x7E and q.e4m3_encode(np.float32("nan")) == 0x7F
    assert q.E4M3[q.e4m3_encode(np.float32([17, 19, -17]))].tolist() == [16, 20, -16]


def test_e2m1():
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert q.e2m1_encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert q.e2m1_encode(np.float32([-100, -0.1, 0.26])).tolist() == [15, 8, 1]
    codes = np.arange(16, dtype=np.uint8)
    assert (q.e2m1_encode(q.e2m1_decode(codes)) == codes).all()
    assert (q.unpack(q.pack(codes.reshape(2, 8))) == codes.reshape(2, 8)).all()
    assert q.pack(np.uint8([[1, 15]])).tolist() == [[0xF1]]


def test_e8m0():
    assert q.e8m0_decode(np.uint8([0, 127, 130])).tolist() == [2.0**-127, 1, 8]
    assert q.e8m0_ceil(np.float32([1, 1.01, 0.5, 3, 448])).tolist() == [127, 128, 126, 129, 136]


def test_bf16():
    assert io.bf16(np.float32([1.00390625, 1.01171875])).data.view("<u2").tolist() == [
        0x3F80, 0x3F82]


# ---- recognized -------------------------------------------------------------------------------

COMBINATIONS = [("v2", "fp8"), ("v2", "nvfp4"), ("v3", "fp8"), ("v3", "nvfp4"), ("v32", "fp8"),
                ("v32", "nvfp4"), ("v4", "fp8"), ("v4", "fp4"), ("v4", "nvfp4")]

EXPERTS = {"fp8": {"F8_E4M3"}, "fp4": {"F4_E2M1", "F8_E8M0"},
           "nvfp4": {"F4_E2M1", "F8_E4M3", "F32"}}


def widths(name):
    """Sizes that packing allows: even columns; odd in blocks and groups all the same."""
    return dict(CONFIGS[name], moe_intermediate_size=44, hidden_size=72)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name, wanted", COMBINATIONS)
def test_formats_are_recognized(hadal, tmp_path, name, wanted, shards):
    source = make_model.write_model(tmp_path / "plain", widths(name))
    q.convert(source, tmp_path / "q", wanted, tmp_path / "d", shards, block=32)
    result = hadal("inspect", "--json", "--strict", tmp_path / "q")
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    scales = {"F8_E8M0"} if name == "v4" else {"F32"}
    experts = set(seen["weights"]["main"]["parts"]["routed experts"]["formats"])
    assert experts == EXPERTS[wanted] | (scales if wanted == "fp8" else set())
    assert seen["unknown"] == [] and seen["problem"] is None
    result = hadal("inspect", "--json", "--strict", tmp_path / "d")
    plain = json.loads(result.stdout)
    assert result.returncode == 0 and plain["problem"] is None
    for group in ("main", "mtp"):
        counts = [doc["weights"][group]["total"]["parameters"] for doc in (seen, plain)]
        assert counts[0] == counts[1]


def test_tool_refuses_what_makes_no_sense(tmp_path):
    source = make_model.write_model(tmp_path / "plain", CONFIGS["v3"])
    with pytest.raises(SystemExit):
        q.convert(source, tmp_path / "q", "fp4")
    q.convert(source, tmp_path / "q", "fp8")
    with pytest.raises(SystemExit):
        q.convert(tmp_path / "q", tmp_path / "qq", "fp8")


# ---- computed ---------------------------------------------------------------------------------


def logits(hadal, directory, tokens, out):
    result = hadal("logits", directory, "--tokens", tokens, "--out", out)
    assert result.returncode == 0, result.stderr
    return np.load(out)


@pytest.mark.parametrize("name, wanted", COMBINATIONS)
def test_same_logits_as_dequantized(hadal, tmp_path, name, wanted):
    """C10: both hold the same numbers, so float32 arithmetic must give the same answers; the sizes
    are no multiples of the blocks."""
    if " logits " not in hadal("--help").stdout:
        pytest.skip("this build has no hadal logits")
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(np.random.default_rng(3).integers(96, size=150).tolist()))
    source = make_model.write_model(tmp_path / "plain", widths(name))
    q.convert(source, tmp_path / "q", wanted, tmp_path / "d", block=32)
    ours = logits(hadal, tmp_path / "q", tokens, tmp_path / "q.npy")
    same = logits(hadal, tmp_path / "d", tokens, tmp_path / "d.npy")
    assert np.isfinite(ours).all()
    assert np.linalg.norm(ours - same) <= 1e-4 * np.linalg.norm(same)
