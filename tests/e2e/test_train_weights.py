"""--weights of `hadal train` and `hadal rl`: the model is trained, sampled and written in BF16 or F32, whatever its files have."""

import contextlib
import json

import make_model  # noqa: F401 the path of the next one
import numpy as np
import pytest
import quantize_case as q
from conftest import ROOT
from serving import Server
from test_plan import training_plan
from test_train import digests, steps

long = pytest.mark.long
BOTH = [("tiny-v3", "f32"), pytest.param("tiny-v3", "bf16", marks=long), pytest.param("tiny-v4", "bf16", marks=long), pytest.param("tiny-v4", "f32", marks=long)]
TYPES = {"bf16": ("BF16", "bfloat16"), "f32": ("F32", "float32")}
ARGS = ["--task", "sort", "--groups", "4", "--samples", "4", "--max-tokens", "40", "--context", "128", "--lr", "1e-4", "--seed", "3", "-q"]


def read(path):
    """Name to dtype and array; BF16 and bytes as integers."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    types = {"F32": "<f4", "BF16": "<u2", "I64": "<i8"}
    out = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        data = np.frombuffer(raw[8 + size + first : 8 + size + last], types.get(entry["dtype"], "u1"))
        out[name] = entry["dtype"], data.reshape(entry["shape"])
    return out


def widened(bf16):
    return (bf16.astype(np.uint32) << 16).view(np.float32)


def rounded(f32):
    """To the nearest BF16, ties to even."""
    bits = np.ascontiguousarray(f32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def scaled(codes, scale):
    rows, cols = (128 if scale.shape[0] < codes.shape[0] else 1), (128 if scale.shape[0] < codes.shape[0] else 32)
    return codes * np.repeat(np.repeat(scale, rows, 0), cols, 1)[: codes.shape[0], : codes.shape[1]]


def values(tensors, name):
    """What a tensor of the shipped models stores, as float32."""
    dtype, data = tensors[name]
    if dtype == "BF16":
        return widened(data)
    if dtype in ("F32", "I64"):
        return data
    scale = tensors.get(name + "_scale_inv") or tensors[name.removesuffix("weight") + "scale"]
    scale = q.e8m0_decode(scale[1]) if scale[0] == "F8_E8M0" else scale[1]
    codes = q.E4M3[data] if dtype == "F8_E4M3" else q.e2m1_decode(q.unpack(data))
    return scaled(codes.astype(np.float32), scale.astype(np.float32))


def rl(hadal, model, out, *args):
    log = out.parent / f"{out.name}.log"
    done = hadal("rl", model, *ARGS, "--out", out, "--log", log, *args)
    assert done.returncode == 0, done.stderr
    return steps(log)


@pytest.mark.parametrize(("name", "kind"), BOTH)
def test_trained_in_a_plain_format(hadal, tmp_path, name, kind):
    """It begins with the stored values; sampler and trainer agree to the bit; the result is the masters in that format."""
    model, out, dtype = ROOT / "models" / name, tmp_path / "out", TYPES[kind][0]
    lines = rl(hadal, model, out, "--weights", kind, "--steps", "2")
    assert all(line["dlogp_max"] == line["k3"] == 0 for line in lines) and lines[-1]["optimizer_steps"] == 2
    before, begun = read(model / "model.safetensors"), read(out / "start" / "model.safetensors")
    assert set(begun) == {n for n in before if not n.endswith(("_scale_inv", ".scale"))}
    for n, (own, data) in begun.items():
        want = values(before, n)
        assert own == dtype or before[n][0] == own and own in ("F32", "I64"), n
        assert (data == (rounded(want) if own == "BF16" else want)).all(), n
    after, state = read(out / "step-00000002/model/model.safetensors"), read(out / "step-00000002/state.safetensors")
    masters = {n.removeprefix("master."): data for n, (_, data) in state.items() if n.startswith("master.")}
    for n, data in masters.items():
        own, result = after[n]
        assert own == begun[n][0] and (result.reshape(data.shape) == (rounded(data) if own == "BF16" else data)).all(), n
    assert any((after[n][1] != begun[n][1]).any() for n in masters)

    config = json.loads((out / "step-00000002/model/config.json").read_text())
    assert not {"quantization_config", "expert_dtype"} & set(config) and config["torch_dtype"] == TYPES[kind][1]
    said = hadal("inspect", out / "step-00000002/model", "--strict", "--values")
    assert said.returncode == 0, said.stdout + said.stderr
    assert training_plan(model, "--weights", kind) == training_plan(out / "start")
    if name == "tiny-v4":
        return
    rl(hadal, model, tmp_path / "two", "--weights", kind, "--steps", "1")
    again = rl(hadal, model, tmp_path / "two", "--weights", kind, "--steps", "2", "--resume", "--threads", "1")
    assert again[-1]["reward"] == lines[-1]["reward"]
    assert digests(tmp_path / "two/step-00000002")[:2] == digests(out / "step-00000002")[:2]


def test_a_sampler_of_other_weights_shows(hadal, tmp_path):
    """The server rounds F32 to its FP8: after a step sampler and trainer differ, by little."""
    model = ROOT / "models" / "tiny-v3"
    with contextlib.closing(Server("--weights-dir", tmp_path, model=model)) as server:
        remote = ["--rollout", f"http://127.0.0.1:{server.port}", "--rollout-dir", tmp_path]
        lines = rl(hadal, model, tmp_path / "out", "--weights", "f32", "--steps", "2", *remote)
    assert lines[0]["dlogp_max"] == 0  # the values that FP8 has, computed in float32 on both sides
    assert 0 < lines[1]["dlogp_mean"] < 0.05 and lines[1]["effective_samples"] < 1, lines


def test_refused(refused, hadal, tmp_path):
    model, data = ROOT / "models" / "tiny-v3", tmp_path / "data.jsonl"
    data.write_text('{"text": "Say heron."}\n')
    args = ["--data", data, "--out", tmp_path / "out", "--steps", "1", "--context", "64"]
    assert "--weights f32 with --init" in refused("train", model, *args, "--weights", "f32", "--init", model / "config.json")
    assert "deepseek_v41 cannot be trained" in refused("train", ROOT / "models/tiny-v41", *args, "--weights", "bf16")
    assert "'f16'" in refused("train", model, *args, "--weights", "f16")
    assert "belong to --train" in refused("plan", model / "config.json", "--weights", "f32")
    assert not (tmp_path / "out").exists()
    assert hadal("train", model, *args, "-q").returncode == 0
    assert "another --weights" in refused("train", model, *args, "--weights", "bf16", "--resume")
