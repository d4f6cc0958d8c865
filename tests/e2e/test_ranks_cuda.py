"""Ranks on GPUs as processes of one host: they answer as one rank on one GPU, also when one of them is
lost. The processes share a GPU if there are too few; each then waits for its slice of time in every
exchange, so tests have few steps."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import Server, wait_until
from test_cuda import on_gpu
from test_ranks import body_of, rank_figures
from worlds import needs_ucx

pytestmark = [on_gpu, needs_ucx]
CLIENTS, TOKENS = 8, 24
ON_GPU = ("--max-running", 8, "--context", 512, "--kv-tokens", 8192, "--backend", "cuda")
LAYOUTS = [("--tp", 2), ("--ep", 2), ("--dp", 2, "--ep", 2)]


def answers(server, then=lambda: None, tokens=TOKENS):
    def ask(i):
        reply = server.post("/v1/completions", {**body_of(i), "max_tokens": tokens, "ignore_eos": True})
        assert reply.status == 200, reply.text
        return reply.json["choices"][0]["text"]

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, i) for i in range(CLIENTS)]
        then()
        return [a.result() for a in asked]


@pytest.fixture(scope="module")
def alone():
    server = Server(*ON_GPU)
    want = answers(server)
    server.close()
    assert len(set(want)) > CLIENTS / 2
    return want


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: " ".join(map(str, x)))
def test_processes_answer_as_one_rank(world, alone, layout):
    w = world(2, *layout, base=ON_GPU)
    assert answers(w.server) == alone
    info = w.server.get("/server_info").json
    assert info["parallel"]["ranks"] == 2
    assert [r["state"] for r in rank_figures(w.server)["ranks"]] == ["active", "active"]
    wait_until(lambda: all(r["passes"] >= TOKENS for r in rank_figures(w.server)["ranks"]), "both tell of their passes")
    assert all(code == 0 for _, code in w.close())


def lose(w, rank):
    """In the middle of answers."""
    wait_until(lambda: w.server.loads()["num_running_reqs"] > CLIENTS / 2, "many run")
    w.ranks[rank].send_signal(signal.SIGKILL)
    w.ranks[rank].wait()


def await_health(w, begin):
    wait_until(lambda: w.server.get("/health").text.startswith(begin), begin)


def test_requests_of_a_lost_group_go_on_in_the_other(world, alone):
    w = world(2, "--dp", 2, "--ep", 2, base=ON_GPU)
    assert answers(w.server, lambda: lose(w, 1)) == alone
    await_health(w, "degraded: rank 1 is lost: ")
    w.start(1)
    await_health(w, "ok")
    assert answers(w.server) == alone
    assert all(code == 0 for _, code in w.close())


def test_requests_wait_for_a_rank_that_cannot_be_spared(world, alone):
    w = world(2, "--tp", 2, base=ON_GPU)

    def lose_and_return():
        lose(w, 1)
        await_health(w, "rank 1 is lost: ")
        w.start(1)

    assert answers(w.server, lose_and_return) == alone
    await_health(w, "ok")
    assert all(code == 0 for _, code in w.close())
