"""--precision fast: near enough, the same bits in whatever way a sequence is cut, and refused
where there is one precision only. --no-batch-invariance: near enough, and only where it is asked for."""

import json
import os
import re
import sys

import numpy as np
import pytest
from conftest import GOLDEN, NO_SHARED, ROOT, SHARED, run_hadal

sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "reference")]
import make_model  # noqa: E402
import official as v41_rounded  # noqa: E402
import quantize_case as q  # noqa: E402

TINY = ROOT / "models" / "tiny-v4"
has_gpu = re.search("\ngpu 0 .*cuda path", run_hadal("version").stdout)
has_fast = "avx2" in run_hadal("version").stdout
on_gpu = pytest.mark.skipif(not has_gpu, reason="needs a GPU and a build with CUDA for it (make CUDA=1)")
both = pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=on_gpu)])


def logits(tmp_path, model, tokens, *flags):
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    out = tmp_path / "out.npy"
    result = run_hadal("logits", model, "--tokens", tmp_path / "tokens.json", "--out", out,
                       "--quiet", *flags)
    assert result.returncode == 0, result.stderr
    return np.load(out)


@both
def test_fast_is_near_exact(tmp_path, backend):
    """On a trained model: random ones have routers that a rounding turns."""
    tokens = json.loads((TINY / "golden" / "cases.json").read_text())[1]["tokens"][:80]
    exact = logits(tmp_path, TINY, tokens, "--backend", backend)
    fast = logits(tmp_path, TINY, tokens, "--backend", backend, "--precision", "fast")
    assert np.array_equal(exact, fast) == (backend == "cpu" and not has_fast)
    assert np.linalg.norm(exact - fast) < 0.005 * np.linalg.norm(exact)
    best = np.sort(exact, -1)
    clear = best[:, -1] - best[:, -2] > 0.05
    assert clear.sum() > 60
    assert np.array_equal(exact.argmax(-1)[clear], fast.argmax(-1)[clear])


def test_exact_where_nothing_is_faster(hadal):
    """On a processor without the products that fast is made of."""
    result = hadal("bench", "ops", TINY, "--layers", "1", "--prompt", "2", "--repeat", "1",
                   "--isa", "plain", "--precision", "fast")
    assert "computing_exactly" in result.stderr and "AVX2" in result.stderr
    assert ", fast" not in result.stdout.splitlines()[0]


def test_the_formats_of_this_machine_are_named(serve):
    """By hadal version, --help and the server's first lines; not in what is installed elsewhere."""
    version = run_hadal("version").stdout
    fast = re.search(r"^ +fast +cpu: ([^;\n]+)", version, re.M)[1]
    assert fast in (("14-bit integers (AVX2)", "14-bit integers (AVX-512 VNNI)", "bfloat16 (AVX-512 BF16)") if has_fast else ("float32",))
    assert re.search(r"^ +official +(needs a GPU|gpu: FP8)", version, re.M)
    for command in ("serve", "generate", "logits", "bench ops"):
        assert f"here fast is {fast}" in " ".join(run_hadal(*command.split(), "--help").stdout.split())
    said = serve("--backend", "cpu", "--precision", "fast").said
    how = "fast" if has_fast else "fast, computed as exact"
    assert f"  precision  {how}: activations of products in {fast}\n" in said
    assert "  precision  exact: activations of products in float32\n" in serve("--backend", "cpu").said
    assert "  precision" not in serve("--backend", "null").said
    assert "here fast" not in run_hadal("manual", "serve").stdout


@both
@pytest.mark.parametrize("name, wanted", [("v2", "nvfp4"), ("v32", "fp8"), ("v4", "fp4")])
def test_ways_do_not_change_a_bit(tmp_path, name, wanted, backend):
    source = make_model.write_model(tmp_path / "plain", make_model.CONFIGS[name])
    q.convert(source, tmp_path / "q", wanted)
    tokens = np.random.default_rng(3).integers(96, size=70).tolist()
    fast = ["--precision", "fast", "--backend", backend]
    whole = logits(tmp_path, tmp_path / "q", tokens, *fast)
    assert np.isfinite(whole).all()
    for flags in (["--chunk", "7"], ["--decode-from", "20"], ["--threads", "3"]):
        other = logits(tmp_path, tmp_path / "q", tokens, *fast, *flags)
        assert np.array_equal(whole, other), flags


@on_gpu
def test_official_is_near_exact(tmp_path):
    """On a trained model, and the same bits in whatever way a sequence is cut."""
    tokens = json.loads((TINY / "golden" / "cases.json").read_text())[1]["tokens"][:80]
    exact = logits(tmp_path, TINY, tokens, "--backend", "cuda")
    official = ["--backend", "cuda", "--precision", "official"]
    rounded = logits(tmp_path, TINY, tokens, *official)
    assert 0 < np.linalg.norm(exact - rounded) < 0.03 * np.linalg.norm(exact)
    best = np.sort(exact, -1)
    clear = best[:, -1] - best[:, -2] > 0.3
    assert np.array_equal(exact.argmax(-1)[clear], rounded.argmax(-1)[clear])
    for flags in (["--chunk", "7"], ["--decode-from", "20"]):
        assert np.array_equal(rounded, logits(tmp_path, TINY, tokens, *official, *flags)), flags


@on_gpu
@pytest.mark.parametrize("flags, used", [((), "official"), (("--kv-cache-dtype", "float32"), "exact")])
def test_a_gpu_is_official_by_default(serve, flags, used):
    """Where it has the entries that are asked for."""
    server = serve("--backend", "cuda", "--precision", "auto", *flags)
    assert server.get("/server_info").json["precision"] == used
    assert f"  precision  {used}: activations of products in " in server.said


def relative(got, want):
    """Of every row."""
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def test_v41_rounds_as_its_own_program(tmp_path):
    """x of FP8 and FP4 matrices, window vectors, entries, keys and queries of the indexer, and bfloat16 where a
    GPU has it: logits of tests/reference/official.py --narrow, in whatever way a sequence is cut. In one row a
    number of float64 lies on the other side of a border."""
    case = GOLDEN / "v41_small"
    want, plain = np.load(case / "expect_official.npy"), np.load(case / "expect.npy")
    tokens = json.loads((case / "tokens.json").read_text())
    on = ["--backend", "ref", "--precision", "official"]
    whole = logits(tmp_path, case, tokens, *on)
    assert (relative(whole, want) > 1e-5).sum() <= 1 and np.median(relative(plain, want)) > 0.1
    for flags in (["--chunk", "7"], ["--decode-from", "3"]):
        assert np.array_equal(whole, logits(tmp_path, case, tokens, *on, *flags)), flags


@on_gpu
def test_a_gpu_rounds_v41_as_the_reference(tmp_path):
    """As far as bfloat16 in attention allows, which moves numbers over borders (docs/perf/log/2026-11-29-v41-steps.md);
    operators are compared in tests/ops."""
    model = ROOT / "models" / "tiny-v41"
    tokens = json.loads((model / "golden" / "cases.json").read_text())[1]["tokens"][:80]
    on = ["--precision", "official"]
    exact = logits(tmp_path, model, tokens, "--backend", "cpu")
    want = logits(tmp_path, model, tokens, "--backend", "ref", *on)
    got = logits(tmp_path, model, tokens, "--backend", "cuda", *on)
    assert np.linalg.norm(got - want) < 1.2 * np.linalg.norm(exact - want)
    assert np.array_equal(got.argmax(-1), want.argmax(-1))
    for flags in (["--chunk", "7"], ["--decode-from", "3"]):
        assert np.array_equal(got, logits(tmp_path, model, tokens, "--backend", "cuda", *on, *flags)), flags


def test_v41_rounds_as_its_cache_stores(tmp_path):
    """Float32 entries that are rounded, and entries that are stored so, give the same bits."""
    case = GOLDEN / "v41_small"
    tokens = json.loads((case / "tokens.json").read_text())
    on = ["--backend", "ref", "--precision", "official"]
    assert np.array_equal(logits(tmp_path, case, tokens, *on), logits(tmp_path, case, tokens, *on, "--kv-cache-dtype", "fp4"))


@pytest.mark.skipif(not SHARED.is_dir(), reason=NO_SHARED)
def test_v41_rounds_as_the_shared_case(tmp_path):
    """The program that official.py is, has the shared case's logits. With bfloat16 where a GPU has it, 45
    rows are those of ref: a number on the other side of a border would move all rows after it."""
    case = SHARED / "cases" / "deepseek_v41"
    want = np.load(case / "expect_exact_rounding.npy")
    model, tokens = v41_rounded.open_case(case)
    assert relative(model.main(tokens)[0][-len(want):], want).max() < 1e-5
    part = tokens[100:145]
    narrow, _ = v41_rounded.open_case(case, True)
    got = logits(tmp_path, case, part.tolist(), "--backend", "ref", "--precision", "official")
    assert relative(got, narrow.main(part)[0]).max() < 1e-5 < relative(got, model.main(part)[0]).min()


@pytest.mark.parametrize("backend", ["ref", "null"])
def test_other_backends_have_no_fast(refused, backend):
    line = refused("generate", TINY, "-p", "x", "--backend", backend, "--precision", "fast")
    assert "precision fast" in line


@pytest.mark.parametrize("backend", ["cpu", "null"] + ([] if has_gpu else ["auto"]))
def test_official_is_for_a_gpu(refused, backend):
    line = refused("generate", TINY, "-p", "x", "--backend", backend, "--precision", "official")
    assert "precision official" in line


def test_neither_exact_nor_fast(refused):
    assert "--precision" in refused("generate", TINY, "-p", "x", "--precision", "fats")


LIBRARY = ["--no-batch-invariance"]


@on_gpu
@pytest.mark.parametrize("name", ["tiny-v3", "tiny-v4"])
def test_without_batch_invariance_is_near_exact(tmp_path, name):
    """Products of 640 rows are the library's; in pieces of fewer than 64 none is, and the bits are fast's."""
    model = ROOT / "models" / name
    cases = json.loads((model / "golden" / "cases.json").read_text())
    tokens = ([t for case in cases for t in case["tokens"]] * 2)[:640]
    assert len(tokens) == 640
    exact, fast, free, small, plain = (
        logits(tmp_path, model, tokens, "--backend", "cuda", "--chunk", chunk, *flags)
        for chunk, flags in (
            ("640", []),
            ("640", ["--precision", "fast"]),
            ("640", ["--precision", "fast", *LIBRARY]),
            ("63", ["--precision", "fast", *LIBRARY]),
            ("63", ["--precision", "fast"]),
        )
    )
    assert np.array_equal(small, plain) and np.array_equal(plain, fast)
    error = np.linalg.norm(exact - free) / np.linalg.norm(exact)
    assert np.linalg.norm(exact - fast) / np.linalg.norm(exact) < error < 0.03
    best = np.sort(exact, -1)
    clear = best[:, -1] - best[:, -2] > 1
    assert clear.sum() > 300
    assert np.array_equal(exact.argmax(-1)[clear], free.argmax(-1)[clear])


@on_gpu
def test_a_broken_library_is_named(tmp_path, refused):
    for version in (12, 13):
        (tmp_path / f"libcublasLt.so.{version}").write_text("")
    path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    line = refused("generate", TINY, "-p", "x", "--backend", "cuda", "--precision", "fast", *LIBRARY,
                   env={**os.environ, "LD_LIBRARY_PATH": path})
    assert "libcublasLt.so" in line


@pytest.mark.parametrize(
    "flags, why",
    [
        ([], "precision fast"),
        (["--backend", "cpu"], "cpu"),
        (["--backend", "cpu", "--precision", "fast"], "cpu"),
        (["--backend", "ref"], "ref"),
        (["--backend", "null"], "null"),
        (["--backend", "cuda"], "precision fast"),
    ],
)
def test_batch_invariance_is_given_up_on_a_gpu_with_fast_only(refused, flags, why):
    line = refused("generate", TINY, "-p", "x", *flags, *LIBRARY)
    assert "no-batch-invariance" in line and why in line


@pytest.mark.skipif(has_gpu, reason="there is a GPU")
def test_batch_invariance_is_kept_where_there_is_no_gpu(refused):
    code = 5 if "options    cuda" in run_hadal("version").stdout else 2
    assert "no-batch-invariance is for a GPU: no CUDA" in refused("generate", TINY, "-p", "x", "--precision", "fast", *LIBRARY, code=code)


def test_every_command_that_computes_has_it(hadal):
    for command in (["generate"], ["chat"], ["serve"], ["eval"], ["logits"], ["replay"],
                    ["bench", "ops"], ["bench", "latency"]):
        text = hadal(*command, "--help").stdout
        assert "--precision" in text and "--no-batch-invariance" in text, command


def test_the_server_shows_it(serve):
    server = serve("--precision", "fast")
    info = server.get("/server_info").json
    assert info["precision"] == "fast" and info["no_batch_invariance"] is False
