"""A rank that is killed, stopped or slowed at a point of its work changes no answer.

drive_ranks is hadal serve whose rank fails at a point. ./test --long tries all points.
"""

import pathlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import LONG
from serving import Server, wait_until
from test_ranks import body_of
from worlds import SMALL, TRANSPORTS, needs_ucx

pytestmark = needs_ucx
CLIENTS = 6
# over TCP libucx 1.13 aborts, once in 70 times, if a peer dies while it still connects to it
MEMORY = TRANSPORTS["shared memory"]
LAYOUTS = {  # ranks and flags
    "two groups": (2, ("--dp", 2, "--ep", 2)),
    "experts": (3, ("--ep", 3)),
    "columns": (2, ("--tp", 2)),
    "two groups of two": (4, ("--dp", 2, "--tp", 2, "--ep", 4)),
    "experts that are fetched": (3, ("--dwdp", 3)),
}
NO_ROWS = ("columns", "experts that are fetched")  # rows do not travel to experts
POINTS = {"load": 1, "prefill": 2, "decode": 4, "dispatch": 60, "combine": 60, "draft": 3, "idle": 1}


def cases():
    if not LONG:
        return [("two groups", 1, "dispatch:60:kill"), ("experts", 2, "combine:60:stop"), ("columns", 1, "draft:3:kill"), ("two groups", 1, "load:1:kill"), ("columns", 1, "idle:1:stop"), ("experts that are fetched", 1, "prefill:2:kill"), ("experts that are fetched", 2, "decode:4:stop")]
    return [
        (layout, rank, f"{point}:{n}:{how}")
        for layout, (ranks, _) in LAYOUTS.items()
        for rank in range(1, ranks)
        for point, n in POINTS.items()
        for how in ("kill", "stop", "slow")
        if layout not in NO_ROWS or point not in ("dispatch", "combine")
    ]


def answers(server):
    def ask(i):
        reply = server.post("/v1/completions", {**body_of(i), "draft_tokens": 2})
        assert reply.status == 200, reply.text
        return reply.json["choices"][0]["text"]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, range(CLIENTS)))


@pytest.fixture(scope="module")
def alone():
    server = Server(*SMALL)
    want = answers(server)
    server.close()
    return want


def is_stopped(process):
    return " T " in pathlib.Path(f"/proc/{process.pid}/stat").read_text()


def bring_back(w, rank, how, asked):
    """A rank that fails as it loads may fail after rank 0 serves. asked: may fail, too, and then ends."""
    p = w.ranks[rank]
    if how == "kill":
        wait_until(lambda: p.poll() is not None or asked.done(), "it is killed")
        assert p.poll() == -signal.SIGKILL
        w.start(rank)
    elif how == "stop":
        wait_until(lambda: is_stopped(p) or asked.done(), "it stops")
        wait_until(lambda: w.server.get("/health").text != "ok", "it is missed")
        p.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(("layout", "rank", "fault"), cases())
def test_a_fault_at_a_point(world, alone, layout, rank, fault):
    n, flags = LAYOUTS[layout]
    w = world(n, *flags, env=MEMORY, faults={rank: fault})
    how = fault.split(":")[2]
    back = threading.Event()

    def ask_until_it_is_back():
        while True:
            last = back.is_set()
            assert answers(w.server) == alone
            if last:
                return
            time.sleep(0.2)  # the point "idle" comes after a pause

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_until_it_is_back)
        try:
            bring_back(w, rank, how, asked)
        finally:
            back.set()
        asked.result()
    wait_until(lambda: w.server.get("/health").text == "ok", "all work")
    assert answers(w.server) == alone
    assert all(code == 0 for _, code in w.close_idle())


@pytest.mark.parametrize("how", ["kill", "stop", "slow"])
def test_a_fault_before_the_ranks_meet(world, alone, how):
    def mend(w):
        p = w.ranks[1]
        if how == "kill":
            assert p.wait() == -signal.SIGKILL
            w.start(1)
        elif how == "stop":
            wait_until(lambda: is_stopped(p), "it stops")
            p.send_signal(signal.SIGCONT)

    w = world(2, "--ep", 2, env=MEMORY, faults={1: f"start:1:{how}"}, before=mend)
    assert answers(w.server) == alone
    assert w.server.get("/health").text == "ok"
    assert all(code == 0 for _, code in w.close_idle())


def test_requests_end_if_rank_0_cannot_begin_anew(world):
    w = world(2, "--dp", 2, "--ep", 2, env=MEMORY, faults={0: "anew:1:fail"})

    def ask(i):
        return w.server.post("/v1/completions", {**body_of(i), "max_tokens": 800, "ignore_eos": True})

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, i) for i in range(CLIENTS)]
        wait_until(lambda: w.server.stats()["hadal_num_running_reqs"] == CLIENTS, "all run")
        w.ranks[1].kill()
        for got in asked:
            assert got.result().status == 500
    assert w.server.get("/health").text == "no memory for another place"
    later = ask(0)
    assert later.status == 500 and "no memory for another place" in later.text


def test_a_rank_is_lost_while_the_others_begin_anew(world, alone):
    w = world(3, "--ep", 3, env=MEMORY, faults={1: "anew:1:kill"})
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(answers, w.server)
        w.ranks[2].kill()
        assert w.ranks[1].wait() == -signal.SIGKILL
        assert got.result() == alone
    for rank in (1, 2):
        w.start(rank)
    wait_until(lambda: w.server.get("/health").text == "ok", "all work")
    assert answers(w.server) == alone
    assert all(code == 0 for _, code in w.close_idle())
