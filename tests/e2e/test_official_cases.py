"""Golden and shared cases, and the shipped models, in --precision official, which rounds activations: how far the logits of
every family may be from those of float32, how many best tokens may be others, and by what margin the best one led there.
docs/numerics.md has the figures."""

import json
import re

import numpy as np
import pytest
from conftest import GOLDEN, NO_SHARED, ROOT, SHARED, run_hadal

has_gpu = re.search("\ngpu 0 .*cuda path", run_hadal("version").stdout)
on_gpu = pytest.mark.skipif(not has_gpu, reason="needs a GPU and a build with CUDA for it (make CUDA=1)")

# Per family: relative error of all logits and of the median row, part of the rows with another best token, largest
# margin among those. The random models choose experts and keys among nearly equal scores, and another choice is a
# large error; V3.2's and V4.1's choose keys in every row.
FAMILIES = {
    "v2": (0.12, 0.015, 0.04, 0.2),
    "v3": (0.25, 0.05, 0.15, 0.9),
    "v32": (0.6, 0.45, 0.55, 2.5),
    "v4": (0.2, 0.05, 0.15, 1.2),
    "v41": (0.6, 0.45, 0.5, 2.0),
    "tiny": (0.1, 0.03, 0.05, 0.1),
}
CASES = {
    "v2_groups": "v2",
    "v2_plain": "v2",
    "v3_moonlight": "v3",
    "v3_small_mtp": "v3",
    "v3_unusual": "v3",
    "v32_rope_mtp": "v32",
    "v4_dspark": "v4",
    "v4_odd": "v4",
    "v4_small_mtp": "v4",
    "v4_wide_index": "v4",
    "v41_small": "v41",
    "deepseek_v2": "v2",
    "deepseek_v3": "v3",
    "deepseek_v32": "v32",
    "deepseek_v4": "v4",
    "deepseek_v41": "v41",
    "tiny-v3": "tiny",
    "tiny-v4": "tiny",
    "tiny-v41": "tiny",
}


def logits(tmp_path, model, tokens, *flags):
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    out = tmp_path / "out.npy"
    result = run_hadal("logits", model, "--tokens", tmp_path / "tokens.json", "--out", out, "--quiet", *flags)
    assert result.returncode == 0, result.stderr
    return np.load(out)


def open_case(tmp_path, name):
    """The model's folder, tokens, and logits of float32."""
    if name.startswith("tiny"):
        case = ROOT / "models" / name
        tokens = json.loads((case / "golden" / "cases.json").read_text())[1]["tokens"][:64]
        return case, tokens, logits(tmp_path, case, tokens, "--backend", "cpu", "--precision", "exact")
    case = (SHARED / "cases" if name.startswith("deepseek") else GOLDEN) / name
    return case, json.loads((case / "tokens.json").read_text()), np.load(case / "expect.npy")


def figures(got, want):
    """What FAMILIES bounds."""
    rows = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    best = np.sort(want, -1)
    other = got.argmax(-1) != want.argmax(-1)
    margins = (best[:, -1] - best[:, -2])[other]
    return np.linalg.norm(got - want) / np.linalg.norm(want), np.median(rows), other.mean(), margins.max(initial=0)


@pytest.mark.parametrize("backend", ["ref", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("name", CASES)
def test_official_is_as_near_as_its_family(tmp_path, name, backend):
    if name.startswith("deepseek") and not SHARED.is_dir():
        pytest.skip(NO_SHARED)
    case, tokens, want = open_case(tmp_path, name)
    got = logits(tmp_path, case, tokens, "--backend", backend, "--precision", "official")
    found = figures(got, want)
    print(f"\n{name} {backend}: {len(tokens)} rows, relative {found[0]:.4f}, median {found[1]:.4f}, "
          f"other best {round(found[2] * len(tokens))}, margin {found[3]:.3f}")
    if backend == "cuda":
        ref = logits(tmp_path, case, tokens, "--backend", "ref", "--precision", "official")
        print("from ref: relative %.4f, median %.5f, other best %.3f, margin %.3f" % figures(got, ref))
    assert found[0] > 0
    assert all(f <= bound for f, bound in zip(found, FAMILIES[CASES[name]])), (found, FAMILIES[CASES[name]])
