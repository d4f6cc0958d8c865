"""Ranks that divide the memory of the experts and fetch the others' (--dwdp): the answers are those of
one rank, however many ranks there are and however far ahead they fetch. With HADAL_BACKEND=cuda they are
on GPUs, or share one."""

import json

import pytest
from conftest import BACKEND, run_hadal
from serving import TINY, Server, wait_until
from test_experts import answers, live_stats
from test_ranks import check_pause_and_abort, group_metric
from test_rebalance import figure
from toy_models import make_toy_model

FLAGS = ("--threads", 2, "--max-running", 24, "--context", 512, "--backend", BACKEND)
TIGHT = ("--threads", 2, "--max-running", 12, "--context", 512, "--kv-tokens", 1024, "--chunk", 16, "--backend", BACKEND)


def answers_of(*flags):
    server = Server(*flags)
    try:
        return answers(server)
    finally:
        server.close()


@pytest.fixture(scope="module")
def want():
    """The answers of one rank, which has all experts."""
    return answers_of(*FLAGS)


@pytest.mark.parametrize("ranks, depth", [(2, 1), (3, 2), (4, 3)])  # 16 experts: 5, 5 and 6 of three ranks
def test_crowds_get_the_answers_of_one_rank(serve, want, ranks, depth):
    server = serve(*FLAGS, "--dwdp", ranks, "--prefetch-depth", depth)
    assert answers(server) == want
    if ranks == 2:
        assert answers(server) == want  # with prefix caches
    parallel = server.get("/server_info").json["parallel"]
    assert (parallel["ranks"], parallel["dp"], parallel["ep"], parallel["dwdp"]) == (ranks, ranks, 1, ranks)
    assert min(group_metric(server, "steps_total")) > 0
    # of 16 experts in 7 layers each rank lacks what it does not hold
    assert figure(server, "experts_elsewhere") == 7 * 16 * (ranks - 1)
    assert figure(server, "experts_fetched_total") > 0 == figure(server, "expert_fetches_failed_total")
    assert live_stats(server)["experts_elsewhere"]["source"] == "peer"


# 16 experts: two ranks of 8 and 3 or 4 of the other; 5, 5 and 6 of three, with 2 or 3; 4 of four, with 11 that all but one have
@pytest.mark.parametrize("ranks, copies", [(2, 7), (3, 7), (4, 44)])
def test_experts_on_several_ranks_are_fetched_less(serve, want, ranks, copies):
    server = serve(*FLAGS, "--dwdp", ranks, "--redundant", copies)
    assert answers(server) == want
    assert figure(server, "experts_elsewhere") == 7 * (16 * (ranks - 1) - copies)
    assert figure(server, "experts_fetched_total") > 0 == figure(server, "expert_fetches_failed_total")


def test_retracted_requests_and_chunks(want):
    plain = answers_of(*TIGHT)
    for flags in ((), ("--ep", 2)):
        assert answers_of(*TIGHT, "--dwdp", 2, *flags) == plain


@pytest.mark.threads
@pytest.mark.parametrize("flags", [(), ("--dwdp-from", 4)])
def test_pause_and_abort_reach_all_ranks(serve, flags):
    check_pause_and_abort(serve("--threads", 2, "--dwdp", 2, "--max-running", 2, "--context", 512, "--backend", BACKEND, *flags))


def test_a_rank_with_nothing_to_do_runs_no_steps(serve):
    server = serve("--threads", 2, "--dwdp", 2, "--context", 512, "--backend", BACKEND)
    assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 30, "ignore_eos": True}).status == 200
    wait_until(lambda: sum(group_metric(server, "generation_tokens_total")) == 30, "all tokens")
    idle, busy = sorted(group_metric(server, "steps_total"))
    assert idle == 0 < busy


def dispatches(server):
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("hadal_rank_exchanges_total") and 'kind="dispatch"' in line)


# 16 experts: two parts of 8, each of two ranks; three parts of 6 slots, two of which are copies; two parts, of 2, 3 and 3
@pytest.mark.parametrize(
    "ranks, parts, flags",
    [
        (2, 2, ()),
        pytest.param(2, 3, ("--prefetch-depth", 2), marks=pytest.mark.long),
        pytest.param(3, 2, ("--prefetch-depth", 3), marks=pytest.mark.long),
        pytest.param(2, 2, ("--overlap", 2), marks=pytest.mark.long),
    ],
)
def test_ranks_that_fetch_within_parts_that_exchange_rows(serve, want, ranks, parts, flags):
    server = serve(*FLAGS, "--dwdp", ranks, "--ep", parts, *flags)
    for _ in range(2):  # then with prefix caches
        assert answers(server) == want
    parallel = server.get("/server_info").json["parallel"]
    assert (parallel["ranks"], parallel["dp"], parallel["ep"], parallel["dwdp"]) == (ranks * parts, ranks * parts, parts, ranks)
    slots = -(-16 // parts) * parts
    assert figure(server, "experts_elsewhere") == 7 * slots * (ranks - 1)
    assert figure(server, "experts_fetched_total") > 0 == figure(server, "expert_fetches_failed_total")
    assert dispatches(server) > 0 and min(group_metric(server, "generation_tokens_total")) > 0


@pytest.mark.parametrize("ranks, rows", [(2, 1), (2, 8), (4, 8), (2, "auto")])
def test_steps_of_few_rows_exchange_them(serve, want, ranks, rows):
    """Decode by expert parallelism, longer steps by fetches: whatever the form, the answers are the same."""
    server = serve(*FLAGS, "--dwdp", ranks, "--dwdp-from", rows)
    for _ in range(2):
        assert answers(server) == want
    parallel = server.get("/server_info").json["parallel"]
    assert (parallel["ranks"], parallel["dp"], parallel["ep"]) == (ranks, ranks, ranks)
    steps, fetched = sum(group_metric(server, "steps_total")), figure(server, "expert_fetch_steps_total")
    if rows == "auto":  # what pays depends on the machine
        assert figure(server, "expert_fetch_from_rows") > 0 and 0 <= fetched < steps
        return
    assert figure(server, "expert_fetch_from_rows") == rows
    assert 0 < fetched <= steps and figure(server, "experts_fetched_total") > 0
    assert dispatches(server) > 0  # of drafts, if of nothing else
    if rows > 1:
        assert fetched < steps


@pytest.mark.parametrize("ranks, cp, rows", [(2, 2, 8), (4, "auto", 1)])
def test_ranks_that_divide_prompts_fetch_experts(serve, want, ranks, cp, rows):
    """One attention group: long steps divide their rows, and each rank fetches experts for its own."""
    server = serve(*FLAGS, "--dwdp", ranks, "--cp", cp, "--dwdp-from", rows)
    for _ in range(2):
        assert answers(server) == want
    parallel = server.get("/server_info").json["parallel"]
    assert (parallel["ranks"], parallel["dp"], parallel["cp"], parallel["ep"]) == (ranks, 1, ranks, ranks)
    assert 0 < figure(server, "expert_fetch_steps_total") <= figure(server, "steps_total")
    assert figure(server, "experts_fetched_total") > 0 and dispatches(server) > 0


def test_divided_prompts_with_chunks_and_retraction(want):
    assert answers_of(*TIGHT, "--dwdp", 2, "--cp", 2, "--dwdp-from", 4) == answers_of(*TIGHT)


def test_steps_of_few_rows_with_chunks_and_retraction(want):
    assert answers_of(*TIGHT, "--dwdp", 2, "--dwdp-from", 8) == answers_of(*TIGHT)


def test_draft_blocks(tmp_path):
    model = make_toy_model("v4_dspark", tmp_path)

    def said(*flags):
        command = ["generate", model, "--raw", "-p", "the cat", "--max-tokens", 30, "--json", "--backend", "cpu"]
        done = run_hadal(*command, "--threads", 2, "--temperature", 1, "--draft-tokens", 5, *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plain = said()
    for fetched in (said("--dwdp", 2), said("--dwdp", 2, "--ep", 2)):
        assert fetched["text"] == plain["text"] and fetched["drafted"] == plain["drafted"] > 0


@pytest.mark.parametrize(
    "flags, why",
    [
        (("--dwdp", 2, "--tp", 2), "it takes the place of tp and dp"),
        (("--dwdp", 2, "--ep", 2, "--dp", 4), "it takes the place of tp and dp"),
        (("--dwdp", 2, "--ep", 2, "--redundant", 2), "redundant experts need ep or dwdp alone"),
        (("--dwdp", 2, "--ep", 2, "--rebalance", "auto"), "experts do not move between groups of ranks that fetch them"),
        (("--dwdp", 2, "--ep", 2, "--dwdp-from", 8), "with ep some rows are exchanged in all steps"),
        (("--dwdp", 9, "--ep", 2), "8 experts cannot be shared by dwdp 9"),
        (("--dwdp", 8, "--ep", 16), "dwdp 8 with ep 16: at most 64 ranks"),
        (("--dwdp", 2, "--backend", "null"), "the null backend has no weights to share"),
        (("--dwdp", 17), "16 experts cannot be shared by dwdp 17"),
        (("--dwdp", 2, "--redundant", 15), "redundant is 15: with dwdp 2 it must be 0 to 14"),
        (("--dwdp", 2, "--redundant", 2, "--expert-split", "local"), "experts have no copies without redundant slots"),
        (("--dwdp", 2, "--experts-disk", 1), "several ranks hold parts of them"),
        (("--dwdp", 2, "--layout", "auto", "--ranks", 2), "give none of them, no dwdp"),
        (("--prefetch-depth", 2), "prefetch_depth is for dwdp above 1"),
        (("--dwdp", 2, "--rebalance", "auto"), "experts are on one rank"),
        (("--dwdp-from", 8), "dwdp_from is for dwdp above 1"),
        (("--dwdp", 2, "--dwdp-from", "much"), "dwdp_from is 'much'; must be auto or 1 to"),
        (("--dwdp", 2, "--dwdp-from", 0), "dwdp_from is '0'; must be auto or 1 to"),
        (("--dwdp", 2, "--dwdp-from", 8, "--redundant", 2), "experts have other places"),
        (("--dwdp", 2, "--dwdp-from", 8, "--rebalance", "auto"), "experts have other places"),
        (("--dwdp", 3, "--dwdp-from", 8), "experts must divide by dwdp"),  # two would lie on two ranks
        (("--dwdp", 2, "--cp", 2), "with cp, shorter steps exchange rows: give dwdp_from"),
        (("--dwdp", 4, "--dwdp-from", 8, "--cp", 2), "cp must be as large, or auto"),
    ],
)
def test_what_cannot_be_is_refused(refused, flags, why):
    assert why in refused("generate", TINY, "-p", "hi", *flags)
