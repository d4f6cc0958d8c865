"""Experts move between ranks while the server answers; the answers stay those of one rank. With
HADAL_BACKEND=cuda ranks are on GPUs, or share one."""

import time

import pytest
from conftest import BACKEND, ROOT
from serving import wait_until
from test_ranks import answers, body_of


def figure(server, name):
    lines = [line.split() for line in server.get("/metrics").text.splitlines()]
    return next(float(words[1]) for words in lines if words and words[0].split("{")[0] == f"hadal_{name}")


LAYOUTS = {
    "experts": ("--ep", 4, "--expert-split", "turns"),
    "all rows": ("--ep", 4, "--expert-split", "flow"),
    "groups": ("--dp", 2, "--tp", 2, "--ep", 4, "--expert-split", "local"),
    "halves of experts": ("--tp", 4, "--ep", 2, "--expert-split", "flow"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_answers_stay_while_experts_move(serve, layout):
    if BACKEND == "cuda" and layout[-1] != "turns":
        pytest.skip("rows are split over copies in turns only")
    flags = ("--threads", 2, "--max-running", 16, "--backend", BACKEND)
    want = answers(serve(*flags))
    server = serve(*flags, *layout, "--redundant", 8, "--rebalance", 8)
    for _ in range(2):
        assert answers(server) == want
    assert figure(server, "rebalance_plans_total") > 0
    assert figure(server, "expert_moves_total") > 0
    assert figure(server, "rebalance_interrupted_total") == 0
    assert 0 < figure(server, "rank_balancedness") <= figure(server, "rank_balancedness_bound") + 0.05 <= 1.05


@pytest.mark.parametrize("layout", [("--ep", 2), ("--dp", 3, "--ep", 3), ("--tp", 3, "--ep", 6)], ids=lambda v: " ".join(map(str, v)))
@pytest.mark.parametrize("model, spare", [("tiny-v3", 4), ("tiny-v4", 8)])
def test_answers_stay_while_experts_move_in_every_step(serve, model, spare, layout):
    if BACKEND == "cuda" and layout[:2] == ("--dp", 3):
        pytest.skip("three ranks with requests of their own")
    flags, of = ("--threads", 2, "--max-running", 16, "--backend", BACKEND), {"model": ROOT / "models" / model}
    want = answers(serve(*flags, **of))
    server = serve(*flags, *layout, "--redundant", spare, "--rebalance", 1, **of)
    assert answers(server) == want
    assert figure(server, "expert_moves_total") > 0 and figure(server, "rebalance_interrupted_total") == 0


@pytest.mark.long
def test_ranks_are_in_balance_again_when_the_topic_switches(serve, monkeypatch):
    """The short form of bench/rebalance.py, as often as it takes: a window of few rows is uneven by
    chance."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    import rebalance

    clients, flags = 8, ("--threads", 2, "--max-running", 8, "--backend", BACKEND)
    asked = {t: of for t, of in rebalance.questions(4).items() if t in ("stories", "sums")}
    alone = serve(*flags)
    wanted = {topic: [rebalance.answer(alone, body) for body in of] for topic, of in asked.items()}
    server = serve(*flags, "--ep", 4, "--redundant", 8, "--rebalance", "auto")
    load = rebalance.Load(server, asked, wanted, clients)
    try:
        for topic in asked:
            load.topic, looks = topic, rebalance.figures(server)["looks"]
            f = {"looks": looks, "now": 0, "bound": 1, "start": 0}
            while f["now"] < f["bound"] - 0.08 or f["now"] < f["start"] + 0.1 or f["looks"] < looks + 3:
                assert f["looks"] < looks + 40, (topic, f)  # looks, not seconds: they are slow under load
                time.sleep(0.05)
                f = rebalance.figures(server)
    finally:
        load.end()
    assert load.answers > clients and load.different == []


def test_a_plan_can_be_ordered(serve):
    server = serve("--ep", 2, "--redundant", 4, "--rebalance", "auto", "--threads", 2, "--backend", BACKEND)
    reply = server.post("/rebalance", {})
    assert reply.status == 200 and reply.json["status"] == "ok" and reply.json["plans"] == 0

    def ordered():
        server.post("/v1/completions", body_of(0))
        server.post("/rebalance", {})
        return figure(server, "rebalance_plans_total") > 0

    wait_until(ordered, "an ordered plan is carried out")
    assert figure(server, "experts_with_one_copy") > 0


def test_one_rank_has_nothing_to_move(serve):
    server = serve("--threads", 1)
    reply = server.post("/rebalance", {})
    assert reply.status == 400 and "--rebalance" in reply.text
    assert figure(server, "rank_balancedness") == 1
