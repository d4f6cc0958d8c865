"""hadal bench: a set depends on its options alone, and its figures add up."""

import json

import pytest
from conftest import ROOT

MODEL = ROOT / "models" / "tiny-v4"
SET = ["--num-prompts", 12, "--input-len", 96, "--output-len", 10, "--range-ratio", 0.5, "--seed", 3]


@pytest.fixture
def bench(hadal):
    def run(kind, *args, backend="null"):
        result = hadal("bench", kind, MODEL, "--backend", backend, "--json", "-q", *args)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run


def test_figures_add_up(bench):
    r = bench("throughput", *SET)
    assert r["completed"] == 12 and r["failed"] == 0
    assert 12 * 48 <= r["total_input_tokens"] <= 12 * 96
    assert 12 * 5 <= r["total_output_tokens"] <= 12 * 10
    assert r["output_throughput"] == pytest.approx(r["total_output_tokens"] / r["duration"])
    assert r["total_throughput"] == pytest.approx(r["input_throughput"] + r["output_throughput"])
    for name in "e2e_latency", "ttft", "tpot", "itl":
        assert 0 <= r[f"median_{name}_ms"] <= r[f"p90_{name}_ms"] <= r[f"p95_{name}_ms"]
        assert r[f"p95_{name}_ms"] <= r[f"p99_{name}_ms"] <= r[f"max_{name}_ms"]
    assert r["median_ttft_ms"] <= r["median_e2e_latency_ms"]


def test_the_seed_decides_the_set(bench):
    sizes = [bench("throughput", *SET[:-1], seed)["total_input_tokens"] for seed in (3, 3, 4)]
    assert sizes[0] == sizes[1] != sizes[2]


def test_a_shared_prefix_is_cached_per_group(bench):
    one = ["--num-prompts", 8, "--input-len", 512, "--output-len", 4, "--max-concurrency", 1]
    assert bench("latency", *one)["cached_tokens"] == 0
    shared = bench("latency", *one, "--shared-prefix", 384, "--groups", 2)
    assert shared["cached_tokens"] == (8 - 2) * 384


def test_latency_is_one_request_at_a_time(bench):
    assert bench("latency", *SET)["concurrency"] <= 1


def test_arrivals_follow_the_rate(bench):
    r = bench("throughput", "--num-prompts", 60, "--input-len", 8, "--output-len", 1, "--request-rate", 400)
    assert r["duration"] > 0.5 * 60 / 400


def test_drafts_of_the_model_and_forced_ones(bench):
    real = bench("latency", *SET, "--draft-tokens", 3, backend="cpu")
    assert len(real["accepted_at"]) == 3 and all(0 <= a <= 1 for a in real["accepted_at"])
    forced = bench("latency", "--num-prompts", 2, "--input-len", 32, "--output-len", 64, "--draft-tokens", 3,
                   "--forced-acceptance", 3, backend="cpu")
    assert forced["accepted_at"] == [1, 1, 1] and forced["accept_length"] > 3.5


def test_the_table(hadal):
    result = hadal("bench", "throughput", MODEL, "--backend", "null", "-q", *SET)
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    assert all(len(line) == 50 for line in lines if line[0] in "=-")
    for label in "Successful requests:", "Accept length:", "Median TTFT (ms):", "P99 ITL (ms):":
        assert any(line.startswith(label) for line in lines)


@pytest.mark.parametrize("backend", ["cpu", "null"])
@pytest.mark.parametrize("config", ["tiny_v2", "tiny_v3", "tiny_v32", "tiny_v4"])
def test_dummy_weights_need_no_checkpoint(hadal, config, backend):
    path = ROOT / "tests" / "configs" / f"{config}.json"
    result = hadal("bench", "throughput", "--dummy-weights", path, "--backend", backend, "--json", "-q",
                   "--num-prompts", 3, "--input-len", 40, "--output-len", 4)
    assert result.returncode == 0, result.stderr
    r = json.loads(result.stdout)
    assert (r["completed"], r["failed"], r["total_output_tokens"]) == (3, 0, 12)


@pytest.mark.parametrize("args, words", [
    (["bench"], "throughput, latency or ops"),
    (["bench", "speed"], "'speed'"),
    (["bench", "latency", MODEL, "--shared-prefix", 512], "shared prefix"),
    (["bench", "latency", MODEL, "--num-prompts", 0], "num-prompts"),
    (["bench", "latency", "nowhere"], "nowhere"),
    (["bench", "latency"], "either MODEL_DIR or --dummy-weights"),
    (["bench", "latency", MODEL, "--dummy-weights", MODEL], "either MODEL_DIR or --dummy-weights"),
    (["bench", "latency", "--dummy-weights", "nowhere.json"], "nowhere.json"),
])
def test_refusals(refused, args, words):
    assert words in refused(*args)


def test_operators_add_up(hadal):
    args = ["--layers", 2, "--prompt", 24, "--context", 40, "--batch", 3, "--repeat", 1]
    result = hadal("bench", "ops", MODEL, *args, "--cpu-time", "--json")
    assert result.returncode == 0, result.stderr
    r = json.loads(result.stdout)
    assert (r["layers"], r["threads"], r["prefill"]["rows"], r["decode"]["rows"]) == (2, 1, 24, 3)
    for phase in r["prefill"], r["decode"]:
        assert sum(op["seconds"] for op in phase["ops"]) <= phase["seconds"]
        assert sum(op["limit_seconds"] for op in phase["ops"]) == pytest.approx(phase["limit_seconds"])
        assert {"embed", "linear", "linear_grouped", "attend"} <= {op["op"] for op in phase["ops"]}


def test_operators_refuse_what_is_no_config(hadal, tmp_path):
    result = hadal("bench", "ops", tmp_path / "none.json")
    assert result.returncode != 0 and "none.json" in result.stderr
