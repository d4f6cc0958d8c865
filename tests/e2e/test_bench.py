"""hadal bench: a set depends on its options alone, and its figures add up."""

import json
import os

import numpy as np
import pytest
from conftest import ROOT
from toy_models import make_toy_model

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
                   "--num-prompts", 3, "--input-len", 40, "--output-len", 4, "--pin")
    assert result.returncode == 0, result.stderr
    r = json.loads(result.stdout)
    assert (r["completed"], r["failed"], r["total_output_tokens"]) == (3, 0, 12)


@pytest.mark.parametrize("flags", [["--threads", "1"], pytest.param(["--threads", "2", "--muon", "--rows", "40"], marks=pytest.mark.long)])
def test_training_adds_up(hadal, tmp_path, flags):
    """The loss is that of the logits, whatever the threads and micro-batches are; nothing is learned meanwhile."""
    tokens = [[3 + i * j % 500 for j in range(1, 20 + i)] for i in range(5)]
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    model = MODEL.parent / "tiny-v3"
    said = hadal("bench", "train", model, "--tokens", tmp_path / "tokens.json", "--times", 2, "--json", *flags)
    assert said.returncode == 0, said.stderr
    report = json.loads(said.stdout)
    hadal("logits", model, "--tokens", tmp_path / "tokens.json", "--out", tmp_path / "out.npy", "-q")
    logits, at, losses = np.load(tmp_path / "out.npy").astype(np.float64), 0, []
    for one in tokens:
        rows = logits[at : at + len(one) - 1]
        top = rows.max(1)
        losses += list(np.log(np.exp(rows - top[:, None]).sum(1)) + top - rows[range(len(rows)), one[1:]])
        at += len(one)
    assert report["tokens"] == at and abs(report["loss"] - np.mean(losses)) < 1e-5
    assert abs(report["step"]["seconds"] - sum(report[p]["seconds"] for p in ("forward", "backward", "optimizer"))) < 0.2 * report["step"]["seconds"]
    assert 0 < report["forward"]["of_limit"] < 2 and report["optimizer"]["of_limit"] == 0


@pytest.mark.slow  # sanitizers have memory of their own
@pytest.mark.parametrize("keep", [0, 2])
def test_training_takes_the_planned_memory(hadal, keep):
    words = ["--sequences", 4, "--length", 256, "--times", 1, "--backend", "cpu", "--keep-activations", keep, "--json"]
    said = hadal("bench", "train", MODEL.parent / "tiny-v3", *words)
    assert said.returncode == 0, said.stderr
    report = json.loads(said.stdout)
    assert report["memory"] == pytest.approx(report["planned_memory"], rel=0.03)


def test_training_refuses_what_is_no_sequence(refused, tmp_path):
    (tmp_path / "tokens.json").write_text("[[5]]")
    refused(["bench", "train", MODEL, "--tokens", tmp_path / "tokens.json"], "training needs two")


def test_updates(hadal, tmp_path):
    """Of the model's own values, and of others; a model of another shape is refused."""
    result = hadal("bench", "update", MODEL, "--times", 3, "--json")
    assert result.returncode == 0, result.stderr
    r = json.loads(result.stdout)
    weights = MODEL / "model.safetensors"
    assert 0.9 * weights.stat().st_size < r["bytes"] < weights.stat().st_size and r["times"] == 3
    for part in "read", "check", "still", "hash", "copy", "copies":
        assert 0 < r[part]["seconds"] <= r[part]["p90"]
        assert r[part]["of_copy"] == pytest.approx(r["copy"]["seconds"] / r[part]["seconds"])
    lines = hadal("bench", "update", MODEL, "--from", MODEL, "--times", 1).stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["read", "check", "still", "hash", "copy", "copies"]
    other = make_toy_model("v4", tmp_path / "other")
    result = hadal("bench", "update", MODEL, "--from", other)
    assert result.returncode == 2 and "embed" in result.stderr


@pytest.mark.parametrize("args, words", [
    (["bench"], "throughput, latency, ops, comm, serve, update or train"),
    (["bench", "speed"], "'speed'"),
    (["bench", "latency", MODEL, "--shared-prefix", 512], "shared prefix"),
    (["bench", "latency", MODEL, "--num-prompts", 0], "num-prompts"),
    (["bench", "latency", "nowhere"], "nowhere"),
    (["bench", "latency"], "either MODEL_DIR or --dummy-weights"),
    (["bench", "latency", MODEL, "--dummy-weights", MODEL], "either MODEL_DIR or --dummy-weights"),
    (["bench", "latency", "--dummy-weights", "nowhere.json"], "nowhere.json"),
    (["bench", "update"], "MODEL_DIR"),
    (["bench", "update", "nowhere"], "nowhere"),
    (["bench", "update", MODEL, "--from", "nowhere"], "nowhere"),
    (["bench", "update", MODEL, "--times", 0], "times"),
    (["bench", "ops", "--isa", "avx2"], "--isa is for a CONFIG"),
    (["bench", "ops", MODEL, "--isa", "avx2", "--backend", "ref"], "--isa is for a CONFIG"),
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
        assert {"embed", "linear", "grouped_gemm", "attention"} <= {op["op"] for op in phase["ops"]}


@pytest.mark.parametrize("isa", ["avx512", "avx2", "plain"])
def test_operators_of_a_lesser_processor(hadal, isa):
    result = hadal("bench", "ops", MODEL, "--layers", 1, "--prompt", 1, "--repeat", 1, "--isa", isa, "--json")
    assert result.returncode == 0, result.stderr
    sets = ["plain", "avx2", "avx512"]
    allowed = ["cpu " + name for name in sets[:sets.index(isa) + 1]]
    assert json.loads(result.stdout)["backend"] in allowed


def test_operators_refuse_what_is_no_config(hadal, tmp_path):
    result = hadal("bench", "ops", tmp_path / "none.json")
    assert result.returncode != 0 and "none.json" in result.stderr


def emulate(hadal, config, *args):
    path = ROOT / "tests" / "configs" / f"{config}.json"
    result = hadal("bench", "latency", "--dummy-weights", path, "--json", "--steps", 2, *args)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def of_op(report, op):
    return [line for line in report["ops"] if line["op"] == op]


@pytest.mark.parametrize("config, layout, drafts", [
    ("tiny_v2", "tp=2", 0), ("tiny_v3", "tp=2", 0), ("tiny_v32", "tp=4", 0), ("tiny_v4", "tp=2", 3),
    ("tiny_v3", "ep=4,rank=3", 0), ("tiny_v4", "ep=5", 1),
])
def test_a_rank_of_a_layout(hadal, config, layout, drafts):
    r = emulate(hadal, config, "--emulate-rank", layout, "--batch", 3, "--context", 200, "--drafts", drafts)
    assert r["context"] == 200 and r["drafts"] == drafts
    for key in "step_seconds", "device_step_seconds", "engine_device_step_seconds", "operator_seconds":
        assert r[key] > 0
    assert sum(op["seconds"] for op in r["ops"]) == pytest.approx(r["operator_seconds"])
    assert sum(op["limit_seconds"] for op in r["ops"]) == pytest.approx(r["limit_seconds"])
    for op in r["ops"]:
        assert op["calls"] == int(op["calls"]) > 0, op
    attention = of_op(r, "attention")
    assert {op["rows"] for op in attention if op["part"] != "draft"} >= {3 * (1 + drafts)}


@pytest.mark.parametrize("layout, sizes, part", [
    ("tp=2,dp=1", (2, 1, 1), 1), ("tp=1,ep=2", (2, 1, 2), 2), ("tp=2,dp=2,ep=4", (2, 2, 4), 2), ("tp=2,ep=4", (4, 1, 4), 4),
    ("tp=4,dp=1,ep=2", (4, 1, 2), 2),
])  # fmt: skip
def test_a_rank_of_a_layout_of_serve(hadal, layout, sizes, part):
    """Ranks of an attention group divide its 8 rows at the experts; etp ranks share what they own."""
    r = emulate(hadal, "tiny_v3", "--emulate-rank", layout, "--batch", 8, "--context", 16)
    assert (r["tp"], r["dp"], r["ep"]) == sizes and r["exchanges"] > r["layers"]
    assert of_op(r, "moe_topk")[0]["rows"] == 8 // part
    one = emulate(hadal, "tiny_v3", "--emulate-rank", "tp=1", "--batch", 8, "--context", 16)
    assert r["weight_bytes"] < one["weight_bytes"]


def test_a_share_is_smaller_than_the_whole(hadal):
    args = ["--batch", 1, "--context", 64]
    whole, half = (emulate(hadal, "tiny_v3", "--emulate-rank", layout, *args) for layout in ("tp=1", "tp=2"))
    assert half["weight_bytes"] < 0.7 * whole["weight_bytes"]
    assert of_op(half, "attention")[0]["outs"] * 2 == of_op(whole, "attention")[0]["outs"]
    for a, b in zip(of_op(whole, "grouped_gemm"), of_op(half, "grouped_gemm")):
        assert a["outs"] * a["ins"] == 2 * b["outs"] * b["ins"]


def test_rows_arrive_as_the_router_sends_them(hadal):
    """Rows of all ranks' choices that fall to this one: its share of them, or of the busiest."""
    args = ["--emulate-rank", "ep=4", "--batch", 64, "--context", 16, "--layers", 2]
    even, skewed = (emulate(hadal, "tiny_v3", *args, "--router", router) for router in ("uniform", "skewed"))
    assert abs(even["expert_rows"] - 64 * 4) < 80
    assert skewed["expert_rows"] > 1.3 * even["expert_rows"]
    copies = emulate(hadal, "tiny_v3", *args, "--communication", "copies")
    assert [op["rows"] for op in of_op(copies, "gather")][0] == copies["expert_rows"]


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_layers_without_the_last_tables(hadal, layers):
    """V4.1's Engram tables are those of the layers that are kept."""
    r = hadal("bench", "latency", "--dummy-weights", ROOT / "models/tiny-v41", "--emulate-rank", "ep=2", "--layers", layers,
              "--batch", 1, "--context", 64, "--steps", 1)
    assert r.returncode == 0, r.stderr



def test_a_rank_of_more_ranks_than_rows(hadal):
    """One request of each of eight ranks, which choose two or three experts."""
    r = emulate(hadal, "tiny_v3", "--emulate-rank", "ep=8", "--batch", 1, "--context", 16)
    assert r["expert_rows"] < 8 and r["step_seconds"] > 0


def test_exchanges_take_time(hadal):
    args = ["--emulate-rank", "tp=2", "--batch", 1, "--context", 16]
    r = emulate(hadal, "tiny_v3", *args, "--exchange-us", 2000)
    assert r["exchange_us"] == 2000 and r["exchanges"] >= 2 * r["layers"]
    assert r["charged_step_seconds"] > r["step_seconds"] + 0.9 * 2e-3 * r["exchanges"]
    assert "exchange_us" not in emulate(hadal, "tiny_v3", *args)


def test_a_step_in_micro_batches(hadal):
    args = ["--emulate-rank", "ep=4", "--batch", 64, "--context", 16]
    r = emulate(hadal, "tiny_v3", *args, "--row-ns", "20000,30000", "--overlap", 2)
    assert (r["overlap"], r["dispatch_ns"], r["combine_ns"]) == (2, 20000, 30000)
    rows = 64 * r["exchanges"] / 2  # each is sent and comes back
    assert r["charged_step_seconds"] > r["step_seconds"] * 0.5 + 0.9 * rows * 50e-6
    assert r["overlapped_step_seconds"] > 0
    assert r["overlapped_activation_bytes"] < r["activation_bytes"]
    assert "overlap" not in emulate(hadal, "tiny_v3", *args)


def test_a_rank_reads_prompts(hadal):
    r = emulate(hadal, "tiny_v3", "--emulate-rank", "ep=2", "--prompt", 48, "--batch", 2, "--context", 0)
    assert r["prompt"] == 48 and of_op(r, "attention")[0]["rows"] == 96


def test_a_rank_reads_a_prompt_beside_decoding(hadal):
    r = emulate(hadal, "tiny_v4", "--emulate-rank", "ep=4", "--chunk", 40, "--batch", 5, "--context", 100)
    assert r["chunk"] == 40 and {line["rows"] for line in of_op(r, "attention")} == {45}
    assert r["mixed_steps_ahead"] == 1 and r["gap_seconds"] > 0 and r["alone_gap_seconds"] > 0


@pytest.mark.parametrize("args, words", [
    (["--emulate-rank", "tp=2"], "--dummy-weights CONFIG"),
    (["--emulate-rank", "pp=2"], "not tp=N, ep=N[,redundant=N] or tp=N,dp=N,ep=N"),
    (["--emulate-rank", "tp=2,ep=3"], "neither of tp times dp and ep is a multiple"),
    (["--emulate-rank", "ep=2", "--batch", 3, "--overlap", 2], "does not divide the 3 sequences"),
    (["--emulate-rank", "ep=2", "--prompt", 5, "--overlap", 2], "does not divide the 5 tokens"),
    (["--emulate-rank", "ep=2", "--row-ns", "5"], "not two numbers"),
    (["--emulate-rank", "ep=2", "--overlap", 5], "--overlap"),
    (["--emulate-rank", "tp=2,rank=2"], "no rank 2"),
    (["--emulate-rank", "tp=5"], "cannot be shared by tp 5"),
    (["--emulate-rank", "ep=17,redundant=2"], "cannot be shared by ep 17"),
    (["--emulate-rank", "tp=2", "--drafts", 1], "has no drafter"),
    (["--emulate-rank", "tp=2", "--drafts", 1, "--prompt", 8], "--drafts follow tokens"),
    (["--emulate-rank", "tp=2", "--chunk", 4, "--prompt", 8], "without --prompt and --drafts"),
])
def test_layouts_that_are_none(refused, args, words):
    config = [] if "CONFIG" in words else ["--dummy-weights", ROOT / "tests" / "configs" / "tiny_v32.json"]
    assert words in refused("bench", "latency", *config, *args)


def test_acceptance_is_a_list(refused):
    config = ROOT / "tests" / "configs" / "tiny_v4.json"
    args = ["--dummy-weights", config, "--emulate-rank", "tp=2", "--drafts", 2, "--acceptance"]
    for bad in "0.7;0.2", "1.2", "0.5,x":
        assert "--acceptance" in refused("bench", "latency", *args, bad)


@pytest.mark.skipif(not os.path.exists("/sys/class/net"), reason="UCX finds no network device without /sys/class/net")
def test_comm_times_every_transport_beside_memcpy_and_a_socket(hadal):
    rows = json.loads(hadal("bench", "comm", "--rounds", 5, "--json").stdout)
    made = {(r["transport"], r["operation"]) for r in rows}
    calls = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "dispatch", "combine"}
    assert {("one thread", "memcpy"), ("tcp", "socket"), *(("threads", c) for c in calls)} <= made
    if any(t == "shared memory" for t, _ in made):
        assert {(t, c) for t in ("shared memory", "tcp", "ucx memory") for c in calls} <= made
    experts = [r for r in rows if r["operation"] in ("dispatch", "combine")]
    assert len(rows) - len(experts) == 7 * (len(made) - len(experts)) and all(r["us"] > 0 and r["mb_s"] > 0 for r in rows)
    assert {r["bytes"] for r in rows} > {8192, 32768, 16 << 20}
    for r in experts:  # two ranks of 128 rows with 8 choices, of which this one has about half
        assert 900 * 16384 < r["bytes"] < 1150 * 16384 and r["bytes"] % 16384 == 0
        assert r["copy_us"] > 0 and r["limit_us"] > 0


def test_comm_between_ranks_that_compute(hadal, refused):
    rows = json.loads(hadal("bench", "comm", "--transport", "threads", "--rounds", 10, "--work-us", 50, "--json").stdout)
    assert {r["transport"] for r in rows} == {"one thread", "tcp", "threads"}  # tcp: the plain socket
    assert {r["operation"] for r in rows if r["transport"] == "threads"} == {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    assert "--work-us" in refused("bench", "comm", "--work-us", -1) and "--transport" in refused("bench", "comm", "--transport", "ib")


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="it has a GPU")
def test_comm_of_a_transport_that_is_not_here(hadal):
    done = hadal("bench", "comm", "--transport", "gpus", "--rounds", 5)
    assert done.returncode and "--transport gpus: not here, with 0 GPUs" in done.stderr and not done.stdout
