"""Ranks on GPUs as processes of one host: they answer as one rank, also when one of them is lost. The
processes share a GPU if there are too few; each then waits for its slice of time in every exchange, so
tests have few steps. Without a GPU they are those of drive_gpus, whose memory other processes map."""

import pathlib
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import HADAL
from serving import Server, wait_until
from test_cuda import has_gpu
from test_ranks import body_of, rank_figures
from worlds import needs_ucx

pytestmark = needs_ucx
CLIENTS, TOKENS = 8, 24
SIZES = ("--threads", 1, "--max-running", 8, "--context", 512, "--kv-tokens", 8192)
ONE = (*SIZES, "--backend", "cuda" if has_gpu else "cpu")
GPUS = {"base": (*SIZES, "--backend", "cuda", *(() if has_gpu else ("--no-sandbox",))), "program": HADAL if has_gpu else pathlib.Path(HADAL).parent / "drive_gpus"}
LAYOUTS = [("--tp", 2), ("--ep", 2, "--redundant", 4, "--expert-split", "flow"), ("--dp", 2, "--ep", 2)]


def answers(server, then=lambda: None, tokens=TOKENS, more=""):
    def ask(i):
        body = {**body_of(i), "max_tokens": tokens, "ignore_eos": True}
        body["prompt"] += more * (i + 3)
        reply = server.post("/v1/completions", body)
        assert reply.status == 200, reply.text
        return reply.json["choices"][0]["text"]

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, i) for i in range(CLIENTS)]
        then()
        return [a.result() for a in asked]


@pytest.fixture(scope="module")
def alone():
    server = Server(*ONE)
    want = answers(server)
    server.close()
    assert len(set(want)) > CLIENTS / 2
    return want


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: " ".join(map(str, x)))
def test_processes_answer_as_one_rank(world, alone, layout):
    w = world(2, *layout, **GPUS)
    assert answers(w.server) == alone
    assert w.server.get("/server_info").json["parallel"]["ranks"] == 2
    assert [r["state"] for r in rank_figures(w.server)["ranks"]] == ["active", "active"]
    wait_until(lambda: all(r["passes"] > 0 for r in rank_figures(w.server)["ranks"]), "both tell of their passes")
    assert all(code == 0 for _, code in w.close())


def test_rows_of_prompts_are_divided(world):
    """Prompts of several chunks; asked again they are found, and their rest is divided."""
    more, flags = " and it ran to the next tree, to the river and to the house", ("--chunk", 128)
    one = Server(*ONE, *flags)
    want = answers(one, tokens=8, more=more)
    one.close()
    w = world(2, "--cp", 2, *flags, **GPUS)
    assert [answers(w.server, tokens=8, more=more) for _ in range(2)] == [want, want]
    assert w.server.get("/server_info").json["parallel"]["cp"] == 2
    assert all(code == 0 for _, code in w.close())


def lose(w, rank, how=signal.SIGKILL):
    """In the middle of answers."""
    wait_until(lambda: w.server.loads()["num_running_reqs"] > CLIENTS / 2, "many run")
    w.ranks[rank].send_signal(how)


def come_back(w, rank, how=signal.SIGKILL):
    if how == signal.SIGSTOP:
        w.ranks[rank].send_signal(signal.SIGCONT)
    else:
        w.ranks[rank].wait()
        w.start(rank)


def await_health(w, begin):
    wait_until(lambda: w.server.get("/health").text.startswith(begin), begin)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_of_a_lost_group_go_on_in_the_other(world, alone, how):
    w = world(2, "--dp", 2, "--ep", 2, **GPUS)
    assert answers(w.server, lambda: lose(w, 1, how)) == alone
    await_health(w, "degraded: rank 1 is lost: ")
    come_back(w, 1, how)
    await_health(w, "ok")
    assert answers(w.server) == alone
    assert all(code == 0 for _, code in w.close())


def test_requests_wait_for_a_rank_that_cannot_be_spared(world, alone):
    w = world(2, "--tp", 2, **GPUS)

    def lose_and_return():
        lose(w, 1)
        await_health(w, "rank 1 is lost: ")
        come_back(w, 1)

    assert answers(w.server, lose_and_return) == alone
    await_health(w, "ok")
    assert all(code == 0 for _, code in w.close())
