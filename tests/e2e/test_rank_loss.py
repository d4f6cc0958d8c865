"""A rank that is lost in the middle of answers changes none of them, and works again when it has come
back."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import Server, events_of, wait_until
from test_ranks import body_of, group_metric, rank_figures
from worlds import SMALL, TRANSPORTS, needs_ucx

pytestmark = needs_ucx
CLIENTS = 16
LOST = "rank {} is lost: "  # and how; on a machine with much else to do, silence may come first


def ask(server, i, tokens=64):
    """Even clients stream."""
    body = {**body_of(i), "max_tokens": tokens, "ignore_eos": True}
    if i % 2:
        reply = server.post("/v1/completions", body)
        assert reply.status == 200, reply.text
        return reply.json["choices"][0]["text"]
    c = server.connection()
    try:
        c.request("POST", "/v1/completions", body=json.dumps({**body, "stream": True}), headers={"Content-Type": "application/json"})
        events = list(events_of(c.getresponse()))
    finally:
        c.close()
    assert events.pop() == b"[DONE]"
    return "".join(json.loads(e)["choices"][0]["text"] for e in events)


def answers(server, then=lambda: None):
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, server, i) for i in range(CLIENTS)]
        then()
        return [a.result() for a in asked]


@pytest.fixture(scope="module")
def alone():
    server = Server(*SMALL)
    want = answers(server)
    server.close()
    assert len(set(want)) > CLIENTS / 2
    return want


def figure(server, name):
    text = server.get("/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"hadal_{name}") and line[len("hadal_" + name)] in " {")


def await_health(w, begin):
    wait_until(lambda: w.server.get("/health").text.startswith(begin), begin)


def lose(w, rank, how):
    """In the middle of answers."""
    wait_until(lambda: w.server.loads()["num_running_reqs"] > CLIENTS / 2, "many run")
    wait_until(lambda: figure(w.server, "generation_tokens_total") > CLIENTS, "some tokens are out")
    w.ranks[rank].send_signal(how)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_of_a_lost_group_go_on_in_the_others(world, alone, how):
    w = world(2, "--dp", 2, "--ep", 2)
    assert answers(w.server, lambda: lose(w, 1, how)) == alone
    await_health(w, "degraded: " + LOST.format(1))
    assert w.server.get("/health").status == 200
    lost = rank_figures(w.server)
    assert [r["state"] for r in lost["ranks"]] == ["active", "lost"] and lost["active"] == 1
    if how == signal.SIGKILL:
        w.ranks[1].wait()
        w.start(1)
    else:
        w.ranks[1].send_signal(signal.SIGCONT)
    await_health(w, "ok")
    before = group_metric(w.server, "generation_tokens_total")[1]
    assert answers(w.server) == alone
    assert group_metric(w.server, "generation_tokens_total")[1] > before  # it computes again
    back = rank_figures(w.server)
    assert [r["state"] for r in back["ranks"]] == ["active", "active"] and back["epoch"] > lost["epoch"] > 1
    assert all(code == 0 for _, code in w.close_idle())


LAYOUTS = {
    "experts of one rank": (3, 1, ("--ep", 3)),
    "a follower of the first group": (4, 1, ("--dp", 2, "--tp", 2, "--ep", 4)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_ranks_that_are_left_take_over(world, alone, layout, transport):
    n, victim, flags = LAYOUTS[layout]
    w = world(n, *flags, env=TRANSPORTS[transport])
    assert answers(w.server, lambda: lose(w, victim, signal.SIGKILL)) == alone
    await_health(w, "degraded: " + LOST.format(victim))
    w.start(victim)
    await_health(w, "ok")
    assert all(code == 0 for _, code in w.close_idle())


def test_requests_wait_for_a_rank_that_cannot_be_spared(world, alone):
    w = world(2, "--tp", 2)
    why = LOST.format(1)

    def lose_and_return():
        lose(w, 1, signal.SIGKILL)
        await_health(w, why)
        assert w.server.get("/health").status == 503
        w.start(1)

    assert answers(w.server, lose_and_return) == alone
    await_health(w, "ok")
    w.ranks[1].kill()  # while nothing runs
    await_health(w, why)
    assert w.close_idle()[0][1] == -signal.SIGKILL and w.server.process.returncode == 0


def test_a_follower_is_lost_while_nothing_runs(world, alone):
    """One group is left, which has nothing to do."""
    w = world(4, "--dp", 2, "--tp", 2, "--ep", 4)
    w.ranks[3].kill()
    await_health(w, "degraded: " + LOST.format(3))
    assert answers(w.server) == alone
    figures = rank_figures(w.server)
    assert [r["state"] for r in figures["ranks"]] == ["active", "active", "standby", "lost"] and figures["epoch"] == 2
    w.start(3)
    await_health(w, "ok")
    assert all(code == 0 for _, code in w.close_idle())


def test_two_ranks_at_once(world, alone):
    w = world(4, "--ep", 4)

    def lose_both():
        lose(w, 3, signal.SIGKILL)
        w.ranks[1].kill()

    assert answers(w.server, lose_both) == alone
    wait_until(lambda: w.server.get("/health").text.startswith(("degraded: rank 1", "degraded: rank 3")), "two ranks work")
    for rank in (1, 3):
        w.start(rank)
    await_health(w, "ok")
    assert all(code == 0 for _, code in w.close_idle())


MOVERS = {"experts": (4, ("--ep", 4)), "groups": (3, ("--dp", 3, "--ep", 3))}


@pytest.mark.parametrize("layout", MOVERS)
def test_experts_in_balance_and_a_rank_that_is_lost_and_returns(world, alone, layout):
    """Experts have moved when it is lost; they move among those that are left, and again with it."""
    n, flags = MOVERS[layout]
    w = world(n, *flags, "--redundant", 8, "--rebalance", 8)

    def move():
        """Rounds of answers until experts have moved; all of them are those of one rank."""
        before = figure(w.server, "expert_moves_total")
        while figure(w.server, "expert_moves_total") == before:
            assert answers(w.server) == alone

    move()
    assert answers(w.server, lambda: lose(w, 2, signal.SIGKILL)) == alone
    await_health(w, "degraded: " + LOST.format(2))
    move()
    w.start(2)
    await_health(w, "ok")
    move()
    assert figure(w.server, "rank_balancedness") > 0
    assert all(code == 0 for _, code in w.close_idle())


def test_the_loss_of_rank_0_ends_the_others(world):
    w = world(2, "--ep", 2)
    w.ranks[0].kill()
    said = w.ranks[1].communicate()[1]
    assert w.ranks[1].returncode == 5 and "rank 0 is lost: its process has ended" in said
