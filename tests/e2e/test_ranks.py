"""One model on several ranks answers as on one."""

import contextlib
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, run_hadal
from serving import Server, wait_until
from toy_models import make_toy_model

CLIENTS = 16
FLAGS = ("--threads", 2, "--max-running", CLIENTS)
LAYOUTS = {
    ("--ep", 2): {"ranks": 2, "dp": 1, "heads": 1, "ep": 2, "etp": 1, "dense_tp": 1, "head_tp": 2},
    ("--tp", 4): {"ranks": 4, "dp": 1, "heads": 4, "ep": 1, "etp": 4, "dense_tp": 4, "head_tp": 4},
    ("--tp", 2, "--ep", 2): {"ranks": 2, "dp": 1, "heads": 2, "ep": 2, "etp": 1, "dense_tp": 2, "head_tp": 2},
    ("--cp", 2, "--ep", 2): {"ranks": 2, "dp": 1, "heads": 1, "cp": 2, "ep": 2, "etp": 1, "dense_tp": 1, "head_tp": 2},
    ("--cp", "auto", "--ep", 2): {"ranks": 2, "dp": 1, "heads": 1, "cp": 2, "cp_from": 16, "ep": 2, "etp": 1, "dense_tp": 1, "head_tp": 2},
    ("--dp", 2, "--ep", 2): {"ranks": 2, "dp": 2, "heads": 1, "ep": 2, "etp": 1, "dense_tp": 1, "head_tp": 1},
}


def body_of(i):
    return {
        "prompt": f"Story {i}. Once upon a time there was a {['cat', 'dog', 'boy', 'girl'][i % 4]}",
        "max_tokens": 24,
        "temperature": 0.7 if i % 2 else 0,
        "seed": i,
    }


def answers(server):
    def ask(i):
        reply = server.post("/v1/completions", body_of(i))
        assert reply.status == 200, reply.text
        choice = reply.json["choices"][0]
        return choice["text"], choice["finish_reason"]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, range(CLIENTS)))


@pytest.fixture(scope="module")
def alone():
    """The answers of one rank."""
    server = Server(*FLAGS)
    assert server.get("/server_info").json["parallel"]["ranks"] == 1
    got = answers(server)
    server.close()
    assert len(set(got)) > CLIENTS / 2
    return got


# the thread sanitizer sees groups that divide heads, and groups that exchange rows
SEEN_BY_TSAN = [("--tp", 2, "--ep", 2), ("--dp", 2, "--ep", 2)]


@pytest.mark.parametrize("layout", [pytest.param(x, marks=[pytest.mark.threads] if x in SEEN_BY_TSAN else []) for x in LAYOUTS], ids=lambda x: " ".join(map(str, x)))
def test_sixteen_clients_get_the_same_answers(serve, alone, layout):
    server = serve(*FLAGS, *layout)
    assert server.get("/server_info").json["parallel"] == {**LAYOUTS[layout], "sum_in_ranks": False}
    assert answers(server) == alone


@pytest.mark.parametrize("layout, micro", [(("--dp", 2, "--ep", 2), 2), (("--tp", 2, "--ep", 2), 3)], ids=lambda x: str(x))
def test_steps_in_micro_batches(serve, alone, layout, micro):
    server = serve(*FLAGS, *layout, "--overlap", micro)
    assert server.get("/server_info").json["parallel"] == {**LAYOUTS[layout], "sum_in_ranks": False, "overlap": micro, "overlap_from": 0}
    assert answers(server) == alone
    assert server.stats()["hadal_micro_batch_steps_total"] > 0


@pytest.mark.parametrize("how", ["auto", "off"])
def test_cpus_do_not_overlap_by_themselves(serve, how):
    server = serve(*FLAGS, "--ep", 2, "--overlap", how)
    answers(server)
    assert "overlap" not in server.get("/server_info").json["parallel"]
    assert server.stats()["hadal_micro_batch_steps_total"] == 0


def test_where_nothing_overlaps_it_is_refused():
    flags = ("generate", ROOT / "models" / "tiny-v3", "-p", "the")
    for more, why in {
        ("--overlap", 2): "overlap 2: there are no ranks that exchange rows in a step",
        ("--overlap", 3, "--dwdp", 2): "overlap 3: there are no ranks that exchange rows in a step",
        ("--overlap", 2, "--tp", 2, "--backend", "cuda"): "ranks on GPUs: overlap 2 is not there yet",
        ("--overlap", 4, "--tp", 2): "overlap '4' is not auto, off, 2 or 3",
        ("--overlap", 2, "--tp", 2, "--mla", "naive"): "mla naive with overlap 2: it computes whole sequences",
    }.items():
        said = run_hadal(*flags, *more)
        assert said.returncode != 0 and why in said.stderr, said.stderr


def group_metric(server, name):
    text = server.get("/metrics").text
    return [int(n) for n in re.findall(rf'^hadal_group_{name}{{.*group="\d+"}} (\d+)$', text, re.MULTILINE)]


def test_requests_go_where_their_prefix_is(serve):
    server = serve("--threads", 2, "--dp", 3, "--ep", 3)
    prefix = "The cat sat on the mat and looked at the little girl. " * 12
    for i in range(9):
        reply = server.post("/v1/completions", {"prompt": f"{i % 3} {prefix} {i}", "max_tokens": 4})
        assert reply.status == 200, reply.text
    wait_until(lambda: sum(group_metric(server, "generation_tokens_total")) == 36, "all tokens")
    # three prompts, each first in a group of its own and then twice where its pages are
    assert group_metric(server, "generation_tokens_total") == [12, 12, 12]
    assert all(n > 0 for n in group_metric(server, "cached_tokens_total"))
    assert group_metric(server, "running_reqs") == [0, 0, 0]
    with contextlib.closing(server.connection()) as c:
        c.request("GET", "/engine/live")
        shown = json.loads(next(line[5:] for line in c.getresponse() if line.startswith(b"data:")))
    assert [g["output_tokens"] for g in shown["groups"]] == [12, 12, 12]


def rank_figures(server):
    return server.get("/server_info").json["rank_figures"]


def check_rank_figures(server):
    """Of four ranks, two attention groups, behind answers."""
    # those of another process come with its next heartbeat
    wait_until(lambda: len({r["passes"] for r in rank_figures(server)["ranks"]}) == 1, "all have told of the same passes")
    figures = rank_figures(server)
    assert figures["active"] == 4 and figures["epoch"] == 1 and 1 <= figures["imbalance"] <= 4
    assert [(r["rank"], r["state"], r["group"]) for r in figures["ranks"]] == [(i, "active", i // 2) for i in range(4)]
    for r in figures["ranks"]:
        assert r["passes"] > 10 and r["compute_seconds"] > 0 and sum(r["recent"].values()) <= 1.01
        for kind in ("all_gather", "broadcast", "dispatch", "combine"):
            x = r["exchanges"][kind]
            assert 0 <= x["wait_seconds"] <= x["seconds"] and x["seconds"] > 0
            assert x["bytes"] > 0 or (kind == "broadcast" and r["rank"] % 2 == 0)  # leaders send them
    of = lambda kind, what: [r["exchanges"][kind][what] for r in figures["ranks"]]
    assert len({*of("dispatch", "calls"), *of("combine", "calls")}) == 1
    text = server.get("/metrics").text
    seen = {line.rsplit(" ", 1)[0].split(",", 1)[1]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("hadal_rank_exchange_bytes_total{")}
    assert len(seen) == 4 * 6
    assert [seen[f'rank="{i}",kind="dispatch"}}'] for i in range(4)] == of("dispatch", "bytes")
    with contextlib.closing(server.connection()) as c:
        c.request("GET", "/engine/live")
        shown = json.loads(next(line[5:] for line in c.getresponse() if line.startswith(b"data:")))
    assert [r["exchanges"]["combine"] for r in shown["ranks"]["ranks"]] == [r["exchanges"]["combine"] for r in figures["ranks"]]


def test_figures_of_each_rank(serve):
    server = serve("--threads", 2, "--dp", 2, "--tp", 2, "--ep", 4)
    answers(server)
    check_rank_figures(server)


def test_one_rank_exchanges_nothing(serve):
    server = serve()
    assert "rank_figures" not in server.get("/server_info").json
    assert "hadal_rank_exchange" not in server.get("/metrics").text


def check_pause_and_abort(server):
    """Of two groups."""
    body = {"max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(6) as pool:
        replies = [pool.submit(server.post, "/v1/completions", {**body, "prompt": f"Story {i}"}) for i in range(6)]
        wait_until(lambda: min(group_metric(server, "running_reqs")) > 0, "both groups compute")
        assert server.post("/pause_generation", {"mode": "in_place"}).status == 200
        steps = group_metric(server, "steps_total")
        assert server.post("/abort_request", {"abort_all": True}).status == 200
        assert all(r.result().json["choices"][0]["finish_reason"] == "abort" for r in replies)
        assert group_metric(server, "steps_total") == steps
    assert server.post("/continue_generation", {}).status == 200
    assert server.post("/flush_cache", {}).status == 200
    reply = server.post("/v1/completions", {"prompt": "Story", "max_tokens": 3})
    assert len(reply.json["choices"]) == 1


def test_pause_and_abort_reach_all_groups(serve):
    check_pause_and_abort(serve("--threads", 2, "--dp", 2, "--ep", 2, "--max-running", 2, "--context", 512))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_draft_blocks_on_several_ranks(layout, tmp_path):
    model = make_toy_model("v4_dspark", tmp_path)

    def said(*flags):
        command = ["generate", model, "--raw", "-p", "the cat", "--max-tokens", 30, "--json", "--backend", "cpu"]
        done = run_hadal(*command, "--threads", 2, "--temperature", 1, *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plain, drafted = said("--drafter", "none"), said("--draft-tokens", 5, *layout)
    assert drafted["drafted"] > 0
    assert drafted["text"] == plain["text"] == said("--draft-tokens", 5)["text"]


def dispatched(server):
    """Bytes of rows that came to all ranks' experts, and in how many exchanges."""
    ranks = rank_figures(server)["ranks"]
    return [sum(r["exchanges"].get("dispatch", {what: 0})[what] for r in ranks) for what in ("bytes", "calls")]


def test_rows_travel_as_fp8(serve):
    """Fewer bytes, and texts that no layout changes."""
    seen = {}
    for layout in [("--ep", 2), ("--dp", 2, "--ep", 2)]:
        server = serve(*FLAGS, *layout, "--dispatch-dtype", "fp8")
        assert server.get("/server_info").json["parallel"]["dispatch_dtype"] == "fp8"
        seen[layout] = answers(server)
        if layout == ("--ep", 2):
            narrow = serve_prompt(server)
            server.close()
    assert len(set(map(str, seen.values()))) == 1
    wide = serve_prompt(serve(*FLAGS, "--ep", 2))
    assert 3 * narrow < wide  # 264 bytes and a weight of 1,024 and a weight


def serve_prompt(server):
    """Bytes for each exchange of rows of a long prompt."""
    bytes_before, calls_before = dispatched(server)
    server.post("/v1/completions", {"prompt": "The cat sat on the mat. " * 40, "max_tokens": 1})
    bytes_after, calls_after = dispatched(server)
    return (bytes_after - bytes_before) / (calls_after - calls_before)


def test_rows_that_do_not_travel_have_no_type():
    flags = ("generate", ROOT / "models" / "tiny-v4", "-p", "the", "--backend", "cpu", "--dispatch-dtype", "fp8")
    for more, why in {
        (): "dispatch_dtype fp8 needs ep above 1: no rows travel to experts",
        ("--tp", 2): "dispatch_dtype fp8 needs ep above 1",
        ("--dwdp", 2, "--dwdp-from", 64): "dispatch_dtype fp8 with dwdp_from: rows of steps that fetch experts",
    }.items():
        said = run_hadal(*flags, *more)
        assert said.returncode == 2 and why in said.stderr, said.stderr


def test_layout_auto_says_why(serve):
    parallel = serve("--threads", 2, "--layout", "auto", "--ranks", 2).get("/server_info").json["parallel"]
    assert (parallel["ranks"], parallel["dp"], parallel["ep"]) == (2, 2, 2)
    assert parallel["reason"].startswith("2 ranks as tp 1, dp 2, ep 2: ")
    flags = ("generate", ROOT / "models" / "tiny-v4", "-p", "the", "--backend", "cpu")
    for more, why in {
        ("--layout", "auto", "--ranks", 2, "--ep", 2): "chooses tp, dp and ep: give none of them",
        ("--ranks", 2): "are for layout auto",
        ("--layout", "auto", "--ranks", 2, "--rank-memory", 9999): "no layout of 2 ranks fits",
    }.items():
        said = run_hadal(*flags, *more)
        assert said.returncode != 0 and why in said.stderr


def test_what_cannot_be_divided_is_refused():
    flags = ("generate", ROOT / "models" / "tiny-v4", "-p", "the", "--backend", "cpu", "--tp", 4)
    said = run_hadal(*flags, "--ep", 6)
    assert said.returncode != 0 and "one must be a multiple of the other" in said.stderr
    said = run_hadal(*flags, "--sum-in-ranks")
    assert said.returncode != 0 and "cuts through its quantization blocks" in said.stderr
