"""--mla naive: near the absorbed form however a prompt is cut, the same bits from any number of
threads and beside any sequence, and refused where there is no such form."""

import json

import numpy as np
import pytest
from conftest import ROOT, run_hadal
from make_model import CONFIGS, write_model

TINY = ROOT / "models" / "tiny-v3"
on_gpu = pytest.mark.skipif("\ngpu 0" not in run_hadal("version").stdout, reason="needs a GPU and a build with CUDA")


def logits(tmp_path, model, tokens, *flags):
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    out = tmp_path / "out.npy"
    result = run_hadal("logits", model, "--tokens", tmp_path / "tokens.json", "--out", out,
                       "--quiet", *flags)
    assert result.returncode == 0, result.stderr
    return np.load(out)


def naive(tmp_path, model, tokens, *flags):
    return logits(tmp_path, model, tokens, "--mla", "naive", *flags)


@pytest.fixture(scope="module")
def text():
    cases = json.loads((TINY / "golden" / "cases.json").read_text())
    return sum((case["tokens"] for case in cases), [])[:460]


def near(a, b):
    return np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)


# 200: cached keys are made anew, as 200 rows pay for them. 90: they do not, so that only the first
# piece is computed in this form. A prompt that is decoded from 300 on goes on in the other form.
@pytest.mark.parametrize("flags", [[], ["--chunk", "200"], ["--chunk", "90"], ["--decode-from", "300"]])
def test_naive_is_near_absorbed(tmp_path, text, flags):
    absorbed, other = logits(tmp_path, TINY, text), naive(tmp_path, TINY, text, *flags)
    assert not np.array_equal(absorbed, other)
    assert near(other, absorbed)


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_small_models(tmp_path, name):
    model = write_model(tmp_path / "model", CONFIGS[name])
    tokens = np.random.default_rng(5).integers(96, size=150).tolist()
    absorbed = logits(tmp_path, model, tokens)
    for flags in ([], ["--chunk", "64"], ["--backend", "ref"]):
        assert near(naive(tmp_path, model, tokens, *flags), absorbed), flags


# the widths of V2 and V3, which alone a GPU has
WIDE = dict(CONFIGS["v2"], kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_real_widths(tmp_path, backend):
    """On a GPU sequences of 128 rows and more have the form: here not the second pieces."""
    model = write_model(tmp_path / "model", WIDE)
    tokens = [np.random.default_rng(n).integers(96, size=n).tolist() for n in (300, 7, 200)]
    on = ["--backend", backend] + (["--precision", "fast"] if backend == "cuda" else [])
    absorbed = logits(tmp_path, model, tokens, *on)
    for flags in ([], ["--chunk", "210"], ["--decode-from", "290"]):
        other = naive(tmp_path, model, tokens, *on, *flags)
        assert not np.array_equal(other, absorbed), flags
        limit = 2e-2 if backend == "cuda" else 1e-5
        assert np.linalg.norm(other - absorbed) < limit * np.linalg.norm(absorbed), flags


@on_gpu
def test_a_gpu_has_one_precision_and_one_width_less(tmp_path, refused):
    refused("generate", TINY, "-p", "x", "--backend", "cuda", "--mla", "naive", "--precision", "exact")
    refused("generate", TINY, "-p", "x", "--backend", "cuda", "--mla", "naive", "--precision", "fast")


def test_threads_and_neighbours_do_not_change_a_bit(tmp_path, text):
    whole = naive(tmp_path, TINY, text)
    assert np.array_equal(whole, naive(tmp_path, TINY, text, "--threads", "3"))
    short = text[:30]
    beside = naive(tmp_path, TINY, [short, text, text[:200]])
    assert np.array_equal(beside[30:490], whole)
    assert np.array_equal(beside[:30], naive(tmp_path, TINY, short))
    # In steps of 200 the short ones are over while the long one goes on.
    assert np.array_equal(naive(tmp_path, TINY, [short, text, text[:200]], "--chunk", "200")[30:490],
                          naive(tmp_path, TINY, text, "--chunk", "200"))


def test_a_step_may_have_both_forms(tmp_path, text):
    """Behind 200 cached keys 200 rows are enough, and 100 and 20 are not."""
    lists = [text[:300], text, text[:220], text[:410]]
    assert near(naive(tmp_path, TINY, lists, "--chunk", "200"), logits(tmp_path, TINY, lists))


def test_answers_with_drafts(hadal):
    command = ["generate", TINY, "-p", "What is 12 + 30?", "--max-tokens", "24", "-q", "--temperature", "0"]
    assert hadal(*command, "--mla", "naive").stdout == hadal(*command).stdout


@pytest.mark.parametrize("backend", ["cuda", "null"])
def test_other_backends_have_one_form(refused, backend):
    refused("generate", TINY, "-p", "x", "--backend", backend, "--mla", "naive")


@pytest.mark.parametrize("name", ["v32", "v4"])
def test_other_families_have_one_form(tmp_path, name):
    model = write_model(tmp_path / "model", CONFIGS[name])
    (tmp_path / "tokens.json").write_text("[1, 2, 3]")
    result = run_hadal("logits", model, "--tokens", tmp_path / "tokens.json", "--out",
                       tmp_path / "out.npy", "--mla", "naive")
    assert result.returncode == 2 and "mla naive" in result.stderr


def test_neither_absorbed_nor_naive(refused):
    assert "--mla" in refused("generate", TINY, "-p", "x", "--mla", "native")


def test_every_command_that_computes_has_it(hadal):
    for command in (["generate"], ["chat"], ["serve"], ["eval"], ["logits"], ["replay"],
                    ["bench", "ops"], ["bench", "latency"]):
        assert "--mla" in hadal(*command, "--help").stdout, command


def test_the_server_shows_it(serve):
    assert serve().get("/server_info").json["mla"] == "absorbed"
