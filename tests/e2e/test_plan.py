"""hadal plan: a table, JSON, an explanation and a chart of layouts, for released models and the
shipped one; files of GPUs; refusals."""

import json
import math
import subprocess
import sys

import pytest
from conftest import HADAL, ROOT, run_hadal
from serving import Server

CONFIGS = ROOT / "tests" / "configs"


def plan(config, *args):
    done = run_hadal("plan", CONFIGS / f"{config}.json", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def predicted(config, *args):
    return json.loads(plan(config, *args, "--json"))


def test_does_flash_fit_four_h200():
    """64 users of 32K tokens: which layouts fit, and which is best."""
    args = ("--gpus", 4, "--users", 64, "--prompt", 30000, "--output", 2000)
    all = predicted("v4_flash", *args)
    assert all["note"] == "predicted, not measured"
    assert {(x["layout"]["tp"], x["layout"]["dp"], x["layout"]["ep"]) for x in all["layouts"]} == {(4, 1, 1), (4, 1, 2), (4, 1, 4), (2, 2, 4), (1, 4, 4)}
    assert all["load"]["users"] == 64 and all["gpu"]["memory_gb"] == 150.75
    for x in all["layouts"]:
        b = x["bytes"]
        assert b["weights"] == sum(b["weights_by_part"].values())
        assert b["free"] == pytest.approx(148.75e9 - b["weights"] - b["kv"] - b["activations"])
        assert x["fits"] == (b["free"] >= 0)
        for step in (x["prefill"], x["decode"]):
            assert step["seconds"] == pytest.approx(step["kernel_seconds"] + step["exchange_seconds"])
            assert sum(e["bytes_inside"] + e["bytes_outside"] for e in step["exchanges"]) == pytest.approx(step["bytes_sent"])
    assert any(x["best"] for x in all["layouts"])
    lines = plan("v4_flash", *args).splitlines()
    assert lines[0].startswith("PREDICTED, not measured") and "64 requests" in lines[2]
    assert sum(line.startswith("* tp=") for line in lines) == sum(x["best"] for x in all["layouts"])
    assert "--kv-tokens 512000" in lines[-1]  # of 16 users: with one attention group per GPU


def test_a_model_that_does_not_fit():
    (x,) = predicted("v4_flash", "--gpus", 1)["layouts"]
    assert not x["fits"] and not x["best"] and x["bytes"]["free"] < 0
    assert "No layout fits: the nearest lacks" in plan("v4_flash")
    assert "No layout fits" not in plan("v4_flash", "--gpus", 2)


def test_entries_in_host_memory():
    """V4-Flash has 21 layers with an indexer, whose entries are 512 bfloat16 for 4 tokens."""
    args = ("--gpus", 4, "--layout", "tp=1,dp=4,ep=4", "--users", 256, "--prompt", 200000, "--output", 20000)
    (none,), (some,) = (predicted("v4_flash", *args, "--hisparse", n)["layouts"] for n in ("off", 40000))
    tokens = 64 * 220000
    assert none["bytes"]["host_entries"] == 0 and not none["fits"]
    assert some["bytes"]["host_entries"] == 21 * tokens // 4 * 1024
    buffers = 21 * (40000 * (1024 + 12) + tokens)  # rows with their owner and last use; a number for each entry
    assert none["bytes"]["kv"] - some["bytes"]["kv"] == pytest.approx(some["bytes"]["host_entries"] - buffers, rel=1e-3)
    assert some["fits"] and "--hisparse 40000" in plan("v4_flash", *args, "--hisparse", 40000)
    for config, said in (("v4_flash", "a position selects 512 entries"), ("v3", "this model's attention reads all entries")):
        refused = run_hadal("plan", CONFIGS / f"{config}.json", "--hisparse", 511)
        assert refused.returncode == 2 and said in refused.stderr


def test_entries_in_fp8():
    """V3's 61 layers: 644 bytes of a token in place of 1,152."""
    args = ("--gpus", 72, "--layout", "dp=72,ep=72", "--users", 18432, "--prompt", 2048, "--output", 512)
    wide, packed = (predicted("v3", *args, "--kv-cache-dtype", dtype)["layouts"][0] for dtype in ("bfloat16", "fp8"))
    assert predicted("v3", *args)["layouts"][0] == wide
    assert packed["bytes"]["kv"] / wide["bytes"]["kv"] == pytest.approx(644 / 1152)
    assert "--kv-cache-dtype fp8" in plan("v3", *args, "--kv-cache-dtype", "fp8")
    few, why = ("--gpus", 8, "--layout", "tp=8,dp=1,ep=8", "--kv-cache-dtype"), "more than 16 heads of a rank; here it has 16"
    for flags, said in ((("fp8",), why), (("fp4",), "fp4 is V4.1's own")):
        refused = run_hadal("plan", CONFIGS / "v3.json", *few, *flags)
        assert refused.returncode == 2 and said in refused.stderr, refused.stderr


def test_hisparse_where_it_pays():
    """A larger batch against what it fetches: V4's layers select one of 98 entries, V3.2's one of 30 with TP8 less gain."""
    args = ("--gpus", 4, "--layout", "tp=1,dp=4,ep=4", "--prompt", 200000, "--output", 20000, "--hisparse", "auto")

    def chosen(model, *more):
        (layout,) = predicted(model, *more)["layouts"]
        return layout["hisparse"], layout

    few, _ = chosen("v4_flash", *args, "--users", 64)
    assert (few["on"], few["rows"]) == (False, 0) and "all entries fit" in plan("v4_flash", *args, "--users", 64)
    many, layout = chosen("v4_flash", *args, "--users", 480)
    assert many["on"] and layout["fits"] and many["requests"] == 120 and 40 < many["fitting"] < 60
    assert 0 < many["miss_seconds"] < many["gain_seconds"]
    (fixed,) = predicted("v4_flash", *args[:-1], many["rows"], "--users", 480)["layouts"]
    assert fixed["hisparse"]["miss_seconds"] == many["miss_seconds"]
    assert fixed["user_tokens_per_second"] == pytest.approx(layout["user_tokens_per_second"])
    text = plan("v4_flash", *args, "--users", 480)
    assert "hisparse: on; " in text and "its batch gains" in text and f"--hisparse {many['rows']}" in text
    dear = ("--gpus", 8, "--layout", "tp=8,dp=1,ep=8", "--users", 100, "--prompt", 60000, "--output", 2000, "--hisparse", "auto")
    not_worth, layout = chosen("v3_2_exp", *dear)
    assert not not_worth["on"] and not layout["fits"] and not_worth["miss_seconds"] > not_worth["gain_seconds"] > 0
    assert "hisparse: off; " in plan("v3_2_exp", *dear)
    assert "attention selects no entries" in plan("v3", "--hisparse", "auto")


def test_spare_slots_and_balance():
    """Spare slots take memory; unbalanced experts take time."""
    even = ("--gpus", 8, "--layout", "tp=1,dp=8,ep=8", "--users", 512)
    (plain,), (spare,), (skewed,) = (predicted("v3", *even, *more)["layouts"] for more in ([], ["--redundant", 8], ["--balancedness", 0.5]))
    assert spare["bytes"]["spare_slots"] * 33 == pytest.approx(spare["bytes"]["weights_by_part"]["routed experts"], rel=1e-6)
    assert spare["bytes"]["weights"] - plain["bytes"]["weights"] == pytest.approx(spare["bytes"]["spare_slots"], rel=0.01)
    assert skewed["decode"]["seconds"] > plain["decode"]["seconds"]
    assert skewed["decode"]["bytes_sent"] == pytest.approx(2 * plain["decode"]["bytes_sent"])


def test_drafts_overlap_and_price():
    args = ("--gpus", 4, "--layout", "tp=4", "--users", 1)
    (plain,), (drafts,), (overlap,) = (predicted("v4_flash", *args, *more)["layouts"] for more in ([], ["--drafts", 3, "--accepted", 1.5], ["--overlap"]))
    assert drafts["user_tokens_per_second"] == pytest.approx(2.5 / drafts["decode"]["seconds"])
    assert drafts["decode"]["seconds"] > plain["decode"]["seconds"]
    assert overlap["decode"]["seconds"] == pytest.approx(max(plain["decode"]["kernel_seconds"], plain["decode"]["exchange_seconds"]))
    (priced,) = predicted("v4_flash", *args, "--price", 3)["layouts"]
    assert priced["price_per_million_output_tokens"] == pytest.approx(4 * 3 / 3600 / priced["output_tokens_per_second"] * 1e6)
    assert "$ per" in plan("v4_flash", *args, "--price", 3) and "$" not in plan("v4_flash", *args)


def test_long_prompts_are_chunks(tmp_path):
    """Each chunk sees more keys: twice the prompt takes more than twice the time."""
    ttft = [predicted("v3", "--gpus", 8, "--layout", "tp=8", "--prompt", n, "--users", 1)["layouts"][0]["ttft_seconds"] for n in (8192, 16384, 131072)]
    assert ttft[1] > 2 * ttft[0] and ttft[2] > 8 * ttft[1]


def test_explain():
    text = plan("v4_flash", "--gpus", 2, "--explain")
    for words in ("bytes of a rank", "routed experts", "KV pools", "a step of prefill", "a step of decode", "grouped_swiglu", "kernel: 1.5 us + max("):
        assert words in text


def test_chart(tmp_path):
    page = tmp_path / "plan.html"
    plan("r1", "--gpus", 8, "--chart", page)
    text = page.read_text()
    assert "<svg" in text and "tp=1,dp=8,ep=8" in text and "Pareto front" in text and "not measured" in text


def test_a_gpu_from_a_file(tmp_path):
    """Twice the memory rate halves the part of a step that reads."""
    file = tmp_path / "gpu.json"
    steps = []
    for rate in (4, 8):
        file.write_text(json.dumps({"like": "h200", "memory_tb_s": rate, "launch_us": 0}))
        (x,) = predicted("v3", "--gpus", 8, "--layout", "tp=8", "--gpu", file, "--users", 1)["layouts"]
        steps.append(x["decode"]["kernel_seconds"])
    assert steps[0] == pytest.approx(2 * steps[1], rel=0.01)
    assert math.isfinite(steps[0])


def test_experts_from_other_ranks():
    (x,) = predicted("v3", "--gpus", 4, "--layout", "dwdp=4")["layouts"]
    assert x["dwdp"] == 4 and not x["fits"] and x["decode"]["fetch_seconds"] > 0 and x["bytes"]["staged_experts"] > 0
    assert x["decode"]["seconds"] == x["decode"]["fetch_seconds"]
    text = plan("v4_flash", "--gpus", 4, "--layout", "dwdp=4", "--explain")
    assert "experts of two layers" in text and "serve's options of the one with most: --dwdp 4 --max-running" in text
    assert "dense MLPs: weights / n" in plan("v3", "--gpus", 8, "--layout", "tp=8", "--explain")


@pytest.mark.long
def test_from_which_prompt_on_dwdp_pays(tmp_path):
    """The shortest prompt whose kernels hide the copies: twice the link halves it, or nearly so; a slow one hides nothing."""
    rows = {}
    for rate in (395, 790, 1):
        (tmp_path / "gpu.json").write_text(json.dumps({"like": "h200", "link_gb_s": rate}))
        args = ("--gpus", 4, "--gpu", tmp_path / "gpu.json", "--layout", "dwdp=4")
        (x,) = predicted("v4_flash", *args)["layouts"]
        rows[rate] = x["hidden_rows"]
        assert (f"hide the copies from {rows[rate]} tokens" if rate > 1 else "no prompt of up to 64K") in plan("v4_flash", *args)
    assert rows[1] == 0 and 0.45 < rows[790] / rows[395] < 0.75
    (at,) = predicted("v4_flash", "--gpus", 4, "--layout", "dwdp=4", "--users", 4, "--prompt", rows[395], "--chunk", rows[395])["layouts"]
    assert at["prefill"]["kernel_seconds"] == pytest.approx(at["prefill"]["fetch_seconds"], rel=0.001)
    (less,) = predicted("v4_flash", "--gpus", 4, "--layout", "dwdp=4", "--users", 4, "--prompt", rows[395] - 1, "--chunk", rows[395])["layouts"]
    assert less["prefill"]["kernel_seconds"] < less["prefill"]["fetch_seconds"]


def test_experts_in_host_memory():
    """Of what has no room, a step copies what rows chose, and its kernels wait for that."""
    args = ("--gpu", "h100", "--users", 1, "--experts", "host")
    (x,) = predicted("v4_flash", *args, "--host-memory", 192)["layouts"]
    assert x["fits"] and 0.35 < x["resident_experts"] < 0.45
    others = 1 - x["resident_experts"]
    assert x["elsewhere_bytes"] == pytest.approx(43 * others * 256 * (3 * 4096 * 2048 * 17 / 32), rel=0.01)
    step = x["decode"]
    assert step["fetch_bytes"] == pytest.approx(x["elsewhere_bytes"] * (1 - (1 - 1 / 256) ** 6))
    assert step["fetch_seconds"] == pytest.approx(step["fetch_bytes"] / 55.4e9)
    assert step["seconds"] == pytest.approx(step["kernel_seconds"] + step["fetch_seconds"])
    b, experts = x["bytes"], x["bytes"]["weights_by_part"]["routed experts"]
    assert experts == pytest.approx(0.8 * (85.5e9 - 2e9 - b["kv"] - (b["weights"] - experts)), rel=1e-3)  # as serve's auto
    text = plan("v4_flash", *args)
    assert "GB in host memory" in text and "predicted: " in text and "--experts-host auto" in text and "--precision official" in text
    assert x["prefill"]["seconds"] == pytest.approx(max(x["prefill"]["kernel_seconds"], x["prefill"]["fetch_seconds"]))
    # processors of the host as fast as the link: each does half
    (both,) = predicted("v4_flash", *args, "--host-rate", 55.4)["layouts"]
    assert x["on_host"] == 0 and both["on_host"] == pytest.approx(0.5)
    assert both["decode"]["fetch_seconds"] == pytest.approx(step["fetch_seconds"] / 2)
    assert both["prefill"]["fetch_seconds"] == pytest.approx(x["prefill"]["fetch_seconds"])
    text = plan("v4_flash", *args, "--host-rate", 55.4)
    assert "the host computes 50 % of those" in text and "--experts-host-compute auto" in text
    (all,) = predicted("v4_flash", "--gpu", "b200", "--users", 1, "--experts", "host")["layouts"]
    assert all["resident_experts"] == 1 and all["decode"]["fetch_bytes"] == 0 == all["bytes"]["staged_experts"]


def test_experts_on_disk():
    """A step of decode reads what rows choose, and one of many rows all that has no room."""
    args = ("--gpu", "cpu", "--precision", "exact", "--users", 1, "--experts", "disk")
    (x,) = predicted("v4_flash", *args)["layouts"]
    assert x["fits"] and 0.1 < x["resident_experts"] < 0.2
    assert x["decode"]["fetch_bytes"] == pytest.approx(x["elsewhere_bytes"] * (1 - (1 - 1 / 256) ** 6))
    assert x["prefill"]["fetch_bytes"] == pytest.approx(x["elsewhere_bytes"], rel=1e-3)
    text = plan("v4_flash", *args)
    assert "GB on disk" in text and "--experts-disk auto" in text


@pytest.mark.long
def test_prompts_and_answers_on_gpus_of_their_own():
    args = ("--prefill", 2, "--decode", 2, "--users", 64, "--prompt", 8000, "--output", 1000)
    x = predicted("v4_flash", *args)
    assert {(p["servers"], p["layout"]["tp"], p["layout"]["dp"]) for p in x["decode"]} == {(1, 2, 1), (1, 1, 2), (2, 1, 1)}
    assert not any(p["fits"] for p in x["prefill"] if p["servers"] == 2)
    assert x["pairs"]
    for pair in x["pairs"]:
        prefill, decode = x["prefill"][pair["prefill"]], x["decode"][pair["decode"]]
        assert prefill["best"] and decode["best"]
        assert pair["requests_per_second"] == min(p["requests_per_second"] for p in (prefill, decode))
        assert pair["output_tokens_per_second"] == pytest.approx(1000 * pair["requests_per_second"])
        assert pair["transfer_seconds"] == pytest.approx(25e-6 + pair["kv_bytes_of_prompt"] / 50e9)
        assert pair["ttft_seconds"] == pytest.approx(prefill["ttft_seconds"] + pair["transfer_seconds"])
    text = plan("v4_flash", *args, "--price", 3, "--explain")
    for words in ("prefill on 2 GPUs", "decode on 2 GPUs", "MB of KV pages", "in prefill would be even", "per Mtoken", "a step of decode"):
        assert words in text
    assert "none of" in plan("v3", "--prefill", 1, "--decode", 1)


def test_the_shipped_model():
    done = run_hadal("plan", ROOT / "models" / "tiny-v4")
    assert done.returncode == 0 and "* tp=1,dp=1,ep=1" in done.stdout


@pytest.mark.parametrize("tp, dp", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("model", ["tiny-v4", "tiny-v3"])
def test_serve_has_the_planned_bytes(model, tp, dp):
    """As serve says after opening: the KV pools of all ranks, and the weights of one that has all."""
    load = ("--users", 6, "--prompt", 400, "--output", 112, "--chunk", 96)
    done = run_hadal("plan", ROOT / "models" / model, "--gpus", tp * dp, "--layout", f"tp={tp},dp={dp},ep={tp * dp}", "--kv-cache-dtype", "bfloat16", *load, "--json")
    (x,) = json.loads(done.stdout)["layouts"]
    ranks = [w for k, n in (("--tp", tp), ("--dp", dp), ("--ep", tp * dp)) if n > 1 for w in (k, n)]
    server = Server(*ranks, "--max-running", 6 // dp, "--context", 512, "--kv-tokens", 6 // dp * 512, "--chunk", 96, "--no-drafts", "--kv-cache-dtype", "bfloat16", model=ROOT / "models" / model)
    used = server.get("/server_info").json["internal_states"][0]["memory_usage"]
    server.close()
    assert tp * dp * x["bytes"]["kv"] / 1e9 == pytest.approx(used["kvcache"], rel=1e-6)
    if tp * dp == 1:
        assert x["bytes"]["weights"] / 1e9 == pytest.approx(used["weight"], rel=0.01)


# 2 layers of the model, one with experts, and 4,096 words: a rank of it takes some seconds to make
MADE_UP = {"num_hidden_layers": 2, "vocab_size": 4096, "num_nextn_predict_layers": 0}


@pytest.mark.parametrize(
    "config, layout, changes",
    [("v4_flash", (1, 16), {"num_hash_layers": 1, "compress_ratios": [4, 128]}), ("v3", (1, 32), {"first_k_dense_replace": 1}), ("r1_nvfp4", (8, 1), {"first_k_dense_replace": 1})],
)
def test_a_made_up_rank_has_the_planned_bytes(tmp_path, config, layout, changes):
    (tp, ep), made_up = layout, {**json.loads((CONFIGS / f"{config}.json").read_text()), **MADE_UP, **changes}
    (tmp_path / "config.json").write_text(json.dumps(made_up))
    done = run_hadal("plan", tmp_path, "--gpus", tp * ep, "--layout", f"tp={tp},dp={ep},ep={ep}", "--json")
    assert done.returncode == 0, done.stderr
    rank = f"ep={ep}" if ep > 1 else f"tp={tp}"
    opened = run_hadal("bench", "latency", "--dummy-weights", tmp_path, "--emulate-rank", rank, "--context", 256, "--steps", 1, "--json")
    assert opened.returncode == 0, opened.stderr
    planned = json.loads(done.stdout)["layouts"][0]["bytes"]["weights"]
    assert planned == pytest.approx(json.loads(opened.stdout)["weight_bytes"], rel=0.01)


def training_plan(model, *args):
    done = run_hadal("plan", model, "--train", "--json", *args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def peak_bytes(command):
    """The peak memory of a command that succeeds. A small process starts it, since the kernel counts what
    a process had before exec, which is the size of the process that started it."""
    code = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)")
    return int(subprocess.check_output([sys.executable, "-c", code, *map(str, command)]))


def test_training(tmp_path):
    """The peak of a real run is below the plan's, and not far."""
    model = ROOT / "models" / "tiny-v3"
    alone, four = training_plan(model, "--threads", 2), training_plan(model, "--threads", 2, "--dp", 4)
    assert alone["gradients"] == 4 * alone["trained"] and alone["masters"] == 12 * alone["trained"]
    assert four["masters"] == pytest.approx(alone["masters"] / 4, abs=12) and four["gradients"] == alone["gradients"]
    assert training_plan(model, "--rows", 256)["activations"] < alone["activations"]
    frozen = training_plan(model, "--freeze", "embedding,experts")
    assert frozen["trained"] < alone["trained"] < training_plan(model, "--mtp")["trained"]
    assert alone["peak"] == sum(alone[k] for k in ("weights", "gradients", "masters", "activations", "update"))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"tokens": [3 + (i * j) % 300 for j in range(1, 257)]}) + "\n" for i in range(1, 9)))
    command = [HADAL, "train", model, "--data", data, "--out", tmp_path / "out", "--steps", "1", "--batch", "8", "--threads", "2", "-q"]
    used = peak_bytes(command)
    assert 0.9 * alone["peak"] < used < alone["peak"] + 20e6


def test_context_parallelism():
    """Sooner than ranks that all compute the whole prompt's attention; the options are those of serve."""
    args = ("--gpus", 4, "--users", 1, "--prompt", 131072, "--chunk", 8192)
    (divided,), (same,) = (predicted("v4_flash", *args, "--layout", x)["layouts"] for x in ("cp=4,ep=4", "tp=1,ep=4"))
    assert divided["layout"]["cp"] == 4 and divided["layout"]["tp"] == same["layout"]["cp"] == 1
    assert divided["ttft_seconds"] < 0.6 * same["ttft_seconds"]
    assert "--tp 1 --cp 4 --dp 1 --ep 4" in plan("v4_flash", *args, "--layout", "cp=4,ep=4")


def test_rows_that_travel_as_fp8():
    """A row of Flash is 4,224 bytes, priced as 8,192 else; layouts in which no rows travel stay as they are."""
    args = ("--gpus", 4, "--users", 64)
    wide, packed = ({tuple(x["layout"][k] for k in ("tp", "dp", "ep")): x for x in predicted("v4_flash", *args, "--dispatch-dtype", t)["layouts"]} for t in ("float32", "fp8"))
    assert wide.keys() == packed.keys()
    for (tp, dp, ep), x in packed.items():
        same = wide[tp, dp, ep]
        assert same["layout"]["dispatch_dtype"] == "float32" and x["layout"]["dispatch_dtype"] == ("fp8" if ep > 1 else "float32")
        for step in ("prefill", "decode"):
            sent, less = ({(e["part"], e["operation"]): e["bytes_inside"] for e in y[step]["exchanges"]} for y in (same, x))
            assert sent.keys() == less.keys() and any(name == "dispatch" for _, name in sent) == (ep > 1)
            for (part, name), bytes in less.items():
                assert bytes == pytest.approx(sent[part, name] * (4224 / 8192 if name == "dispatch" else 1))
        more = x["bytes"]["activations"] - same["bytes"]["activations"]
        assert (more > 2048 * 4224 if tp == 1 else more > 0) if ep > 1 else more == 0
        assert (x["ttft_seconds"] < same["ttft_seconds"]) if ep > 1 else x == same
    text = plan("v4_flash", *args, "--layout", "dp=4,ep=4", "--dispatch-dtype", "fp8")
    assert "--tp 1 --dp 4 --ep 4 --dispatch-dtype fp8 --max-running" in text


def test_refusals(refused, tmp_path):
    flash = CONFIGS / "v4_flash.json"
    assert "layers drop rows of prompts" in refused("plan", CONFIGS / "v4_1_flash.json", "--gpus", 2, "--layout", "cp=2")
    assert "is not for 4 GPUs" in refused("plan", flash, "--gpus", 4, "--layout", "tp=4,cp=2")
    assert "is no GPU (h100, h200, b200, cpu)" in refused("plan", flash, "--gpu", "a100")
    assert "neither auto nor tp=N" in refused("plan", flash, "--layout", "pp=2")
    assert "is not for 4 GPUs" in refused("plan", flash, "--gpus", 4, "--layout", "tp=2")
    assert "5.0 GB of host memory do not hold the experts" in refused("plan", flash, "--experts", "host", "--host-memory", 5)
    assert "a layout of one rank" in refused("plan", flash, "--gpus", 2, "--layout", "tp=2", "--experts", "host")
    assert "dwdp is alone" in refused("plan", flash, "--gpus", 4, "--layout", "dwdp=4,tp=4")
    assert "belong together" in refused("plan", flash, "--prefill", 2)
    assert "--gpus 3 is not" in refused("plan", flash, "--gpus", 3, "--prefill", 1, "--decode", 1)
    assert "for one pool" in refused("plan", flash, "--prefill", 1, "--decode", 1, "--layout", "tp=1")
    assert "this model knows" in refused("plan", flash, "--prompt", 2000000)
    for layout in ("tp=2", "dwdp=2"):
        assert "needs ep above 1: no rows travel" in refused("plan", flash, "--gpus", 2, "--layout", layout, "--dispatch-dtype", "fp8")
    assert "slots do not divide" in refused("plan", flash, "--gpus", 3, "--layout", "dp=3,ep=3", "--redundant", 1)
    assert "accepted of 1" in refused("plan", flash, "--drafts", 1, "--accepted", 2)
    assert "has no drafter" in refused("plan", CONFIGS / "v2_lite.json", "--drafts", 1)
    assert "cannot write" in refused("plan", flash, "--gpus", 2, "--chart", tmp_path / "none" / "x.html", code=4)
    assert "belong to --train" in refused("plan", flash, "--rows", 64)
    assert "a GPU caches bfloat16 or fp8" in refused("plan", flash, "--kv-cache-dtype", "float32")
    for other in (["--gpus", 2], ["--users", 3], ["--hisparse", 512], ["--price", 1], ["--precision", "exact"], ["--kv-cache-dtype", "fp8"], ["--dispatch-dtype", "fp8"]):
        assert "--train plans training" in refused("plan", flash, "--train", *other)
    assert "cannot freeze 'foo'" in refused("plan", flash, "--train", "--freeze", "foo")
    (tmp_path / "gpu.json").write_text('{"like": "h200", "speed": 1}')
    assert "speed is no number of a GPU" in refused("plan", flash, "--gpu", tmp_path / "gpu.json")


def test_the_page_has_the_predictions(monkeypatch):
    """docs/plan.md compares published speeds with what plan says now."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import make_plan

    page = make_plan.PAGE.read_text()
    for row in make_plan.ROWS:
        line = "| " + " | ".join(make_plan.speed_row(HADAL, *row)) + " |"
        assert line in page, line
