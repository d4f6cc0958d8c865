"""--kv-cache-dtype: entries in bfloat16, FP8 and V4.1's own formats. They are rounded once, when they are written, so that whatever a
sequence goes through, it has the same bits: chunks, neighbours, threads, ranks, tiers, drafts."""

import concurrent.futures
import itertools
import json

import numpy as np
import pytest
from conftest import BACKEND, GOLDEN, ROOT, run_hadal
from serving import Server, wait_until
from toy_models import make_toy_model

ON_GPU = BACKEND == "cuda"
PACKED = ("fp8",) if ON_GPU else ("bfloat16", "fp8")
WIDE = "bfloat16" if ON_GPU else "float32"
BASE = ("--backend", BACKEND, "--precision", "official" if ON_GPU else "exact")
DENSE = ("v2_plain", "v3_small_mtp")  # a GPU refuses fp8 for so few heads of MLA
CASES = (*(() if ON_GPU else DENSE), "v32_rope_mtp", "v4_small_mtp", "v41_small")
FLAGS = (*BASE, "--context", 400, "--max-running", 8)


def logits(tmp_path, model, tokens, *flags):
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    out = tmp_path / "out.npy"
    result = run_hadal("logits", model, "--tokens", tmp_path / "tokens.json", "--out", out, "-q", *flags)
    assert result.returncode == 0, result.stderr
    return np.load(out)


@pytest.mark.parametrize(("case", "dtype"), [(case, dtype) for case in CASES for dtype in PACKED] + ([] if ON_GPU else [("v41_small", "fp4")]))
def test_no_way_changes_a_bit(tmp_path, case, dtype):
    model = GOLDEN / case
    tokens = json.loads((model / "tokens.json").read_text())
    on = (*BASE, "--kv-cache-dtype", dtype)
    whole = logits(tmp_path, model, tokens, *on)
    assert not np.array_equal(whole, logits(tmp_path, model, tokens, *BASE))
    for flags in (["--chunk", 1], ["--chunk", 7], ["--chunk", 64], ["--threads", 3], ["--decode-from", len(tokens) // 3]):
        assert np.array_equal(logits(tmp_path, model, tokens, *on, *flags), whole), flags
    beside = logits(tmp_path, model, [tokens[:40], tokens, tokens[5:30]], *on, "--chunk", 9)
    assert np.array_equal(beside[40 : 40 + len(tokens)], whole)


@pytest.mark.skipif(ON_GPU, reason="the reference has one precision, and a GPU no fp8 with it")
@pytest.mark.parametrize("dtype", PACKED)
def test_near_the_reference(tmp_path, dtype):
    """Both backends round to the same entries but where sums differ in their last bits: a trained model's answers
    are near those from float32, and nearer to each other."""
    model = ROOT / "models" / "tiny-v3"
    tokens = sum((case["tokens"] for case in json.loads((model / "golden" / "cases.json").read_text())), [])[:200]
    on = ("--kv-cache-dtype", dtype)
    exact = logits(tmp_path, model, tokens, "--backend", BACKEND)
    own, ref = (logits(tmp_path, model, tokens, "--backend", b, *on) for b in (BACKEND, "ref"))
    size = np.linalg.norm(exact)
    away = np.linalg.norm(own - exact) / size
    assert 1e-5 < away < (0.01 if dtype == "bfloat16" else 0.1)
    assert np.linalg.norm(own - ref) / size < away / 4


def prompt_of(i, turn):
    common = [5 + k * (i % 2 + 2) % 80 for k in range(140)]
    return common + [8 + (k * k + i) % 70 for k in range(20 + 3 * i + 60 * turn)]


def ask(server, i, turn):
    sampling = {"max_new_tokens": 12, "temperature": 0.8 * (i % 2), "sampling_seed": i, "ignore_eos": True}
    body = {"input_ids": prompt_of(i, turn), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    reply = server.post("/generate", body)
    assert reply.status == 200, reply.text
    info = reply.json["meta_info"]
    return reply.json["output_ids"], info["output_token_logprobs"], info["output_top_logprobs"]


def conversations(server):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return [list(pool.map(ask, [server] * 8, range(8), [turn] * 8)) for turn in range(2)]


WAYS = [("--chunk", 37, "--draft-tokens", 3), ("--kv-tokens", 900, "--kv-host", 0.01)]
WAYS += [("--no-graphs",)] if ON_GPU else [("--tp", 2, "--cp", 2)]
SERVED = [("v32", "fp8"), ("v4", "fp8"), ("v41", "fp8" if ON_GPU else "fp4")]


@pytest.mark.parametrize(("family", "dtype"), SERVED)
def test_servers_agree(tmp_path, family, dtype):
    model = GOLDEN / "v41_small" if family == "v41" else make_toy_model(family, tmp_path / "model")
    flags = (*FLAGS, "--kv-cache-dtype", dtype)
    alone = Server(*flags, "--no-drafts", model=model)
    assert alone.get("/server_info").json["kv_cache_dtype"] == dtype
    want = conversations(alone)
    assert conversations(alone) == want  # from the prefix cache
    alone.close()
    rows = {"v32": 53, "v4": 33, "v41": 79}[family]
    ways = [way[:2] if family == "v41" and "--cp" in way else way for way in WAYS]  # which has no cp
    for way in (*ways, ("--hisparse", rows)):
        server = Server(*flags, *way, model=model)
        assert conversations(server) == want, way
        server.close()


def written(server):
    lines = [x for x in server.get("/metrics").text.splitlines() if x.startswith("hadal_kv_tier_pages{") and 'tier="disk"' in x]
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines)


def test_pages_on_a_disk_are_of_one_format(tmp_path):
    model, store = make_toy_model("v4", tmp_path / "model"), tmp_path / "store"
    store.mkdir()
    flags = (*FLAGS, "--kv-host", 0.01, "--kv-disk", f"{store}:0.1")
    first = Server(*flags, "--kv-cache-dtype", "fp8", model=model)
    want = conversations(first)
    wait_until(lambda: written(first) > 0, "pages are on the disk")
    first.close()
    refused = run_hadal("serve", model, "--port", 0, *flags)
    assert refused.returncode == 2 and "pages of another model or program" in refused.stderr
    again = Server(*flags, "--kv-cache-dtype", "fp8", model=model)
    assert conversations(again) == want
    again.close()


def test_memory_is_what_the_format_says(tmp_path):
    """Entries and keys shrink, compressor state does not."""
    model, sizes = make_toy_model("v4", tmp_path / "model"), {}
    for dtype in ("auto", WIDE, *PACKED):
        server = Server(*FLAGS, "--kv-cache-dtype", dtype, model=model)
        sizes[dtype] = server.get("/server_info").json["internal_states"][0]["memory_usage"]["kvcache"]
        server.close()
    assert sizes["auto"] == sizes[WIDE]
    assert all(sizes[wider] > sizes[dtype] for wider, dtype in itertools.pairwise((WIDE, *PACKED)))


@pytest.mark.parametrize("dtype", PACKED if ON_GPU else (*PACKED, "fp4"))
def test_cases_of_operators_have_packed_entries(dtype):
    result = run_hadal("bench", "ops", *BASE, "--kv-cache-dtype", dtype, "--only", "resident", "--repeat", "1")
    assert result.returncode == 0, result.stderr
    assert "V4 entries that are there" in result.stdout


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--kv-cache-dtype", "int4"), "int4"),
        (("--kv-cache-dtype", "fp4"), "kv_cache_dtype fp4 is V4.1's own; deepseek_v4 has none"),
        (("--kv-cache-dtype", "fp8", "--backend", "null"), "caches nothing"),
        (("--kv-cache-dtype", "fp8", "--backend", "cuda"), "kv_cache_dtype fp8 is not for cuda: with this precision it caches float32"),
        (("--kv-cache-dtype", "float32", "--backend", "cuda", "--precision", "fast"), "kv_cache_dtype float32 is not for cuda"),
        (("--kv-cache-dtype", "float32", "--precision", "official"), "with this precision it caches bfloat16 or fp8"),
    ],
)
def test_refusals(flags, why):
    done = run_hadal("serve", ROOT / "models" / "tiny-v4", "--port", 0, *flags)
    assert done.returncode == 2 and why in done.stderr, done.stderr


@pytest.mark.skipif(not ON_GPU, reason="a CPU takes it")
@pytest.mark.parametrize("family", ["v2", "v3"])
def test_few_heads_of_mla(tmp_path, family):
    model = make_toy_model(family, tmp_path / "model")
    done = run_hadal("serve", model, "--port", 0, *BASE, "--kv-cache-dtype", "fp8")
    assert done.returncode == 2 and "with more than 16 heads of a rank" in done.stderr, done.stderr
