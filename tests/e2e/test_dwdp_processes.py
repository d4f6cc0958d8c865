"""Ranks that divide the experts (--dwdp), as processes and on hosts: the answers are those of one rank, also
while a rank is lost and comes back."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import as_root, run_hadal
from hosts import host, ip  # host: a fixture
from serving import TINY, Server, wait_until
from test_experts import live_stats
from test_processes import replies
from test_rank_loss import LOST, alone, answers, await_health, figure, lose  # alone: a fixture
from test_ranks import check_pause_and_abort, group_metric
from worlds import CLEAN, KEY, NO_DEVICE, SMALL, TRANSPORTS, free_address, needs_ucx

pytestmark = needs_ucx


@pytest.mark.parametrize("ranks, depth", [(2, 1), (3, 2), (4, 3)])  # 16 experts: 5, 5 and 6 of three ranks
def test_processes_give_the_answers_of_one_rank(world, alone, ranks, depth):
    w = world(ranks, "--dwdp", ranks, "--prefetch-depth", depth)
    assert answers(w.server) == alone
    if ranks == 2:
        assert answers(w.server) == alone  # with prefix caches
    parallel = w.server.get("/server_info").json["parallel"]
    assert (parallel["ranks"], parallel["dp"], parallel["dwdp"]) == (ranks, ranks, ranks)
    assert min(group_metric(w.server, "generation_tokens_total")) > 0
    # of 16 experts in 7 layers each rank lacks what it does not hold
    assert figure(w.server, "experts_elsewhere") == 7 * 16 * (ranks - 1)
    assert figure(w.server, "experts_fetched_total") > 0 == figure(w.server, "expert_fetches_failed_total")
    assert live_stats(w.server)["experts_elsewhere"]["source"] == "peer"
    assert all(code == 0 for _, code in w.close())


def test_parts_that_exchange_rows(world, alone):
    """Two ranks fetch each other's experts of a part, and rows travel between the two parts: also with a rank
    fewer, when each of three has a part of its own, and when it is back."""
    w = world(4, "--dwdp", 2, "--ep", 2)
    assert answers(w.server) == alone
    parallel = w.server.get("/server_info").json["parallel"]
    assert (parallel["ranks"], parallel["ep"], parallel["dwdp"]) == (4, 2, 2)
    assert figure(w.server, "experts_elsewhere") == 7 * 16
    fetched = figure(w.server, "experts_fetched_total")
    assert fetched > 0 == figure(w.server, "expert_fetches_failed_total")
    assert answers(w.server, lambda: lose(w, 3, signal.SIGKILL)) == alone
    await_health(w, "degraded: " + LOST.format(3))
    assert figure(w.server, "experts_elsewhere") == 0
    w.ranks[3].wait()
    w.start(3)
    await_health(w, "ok")
    assert answers(w.server) == alone
    assert figure(w.server, "experts_elsewhere") == 7 * 16 and figure(w.server, "experts_fetched_total") > fetched
    assert all(code == 0 for _, code in w.close())


def test_drafts_log_probabilities_and_grammars(world):
    """What the sampler and the scheduler of a rank learn of a request, on each of two ranks."""
    server = Server(*SMALL)
    want = replies(server)
    server.close()
    w = world(2, "--dwdp", 2)
    for _ in range(2):
        assert replies(w.server) == want
        w.server.post("/v1/completions", {"prompt": "The next in turn", "max_tokens": 1})
        assert w.server.post("/flush_cache", {}).status == 200
    assert min(group_metric(w.server, "generation_tokens_total")) > 100


def test_retracted_requests_and_chunks(world):
    tight = ("--kv-tokens", 1024, "--chunk", 16)
    server = Server(*SMALL, *tight)
    want = answers(server)
    server.close()
    w = world(2, "--dwdp", 2, *tight)
    assert answers(w.server) == want


def test_pause_and_abort_reach_all_ranks(world):
    check_pause_and_abort(world(2, "--dwdp", 2).server)


def test_a_long_step_of_one_rank_does_not_delay_the_others(world):
    """A prompt in one step takes as long as hundreds of steps; what another rank computes is done before it."""
    w = world(2, "--dwdp", 2, base=("--threads", 1, "--max-running", 2, "--context", 4096, "--chunk", 4096, "--backend", "cpu"))
    ids = [605 + (7 * i + i // 300) % 300 for i in range(4000)]
    ended = {}

    def ask(name, ids, n):
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": n, "temperature": 0, "ignore_eos": True}}
        assert w.server.post("/generate", body).status == 200
        ended[name] = time.monotonic()

    with ThreadPoolExecutor(2) as pool:
        begun = time.monotonic()
        long = pool.submit(ask, "long", ids, 1)
        time.sleep(0.3)
        short = pool.submit(ask, "short", ids[:10], 60)
        long.result(), short.result()
    assert min(group_metric(w.server, "generation_tokens_total")) > 0
    assert ended["short"] < ended["long"], [ended[k] - begun for k in ended]


def test_another_number_of_processes_is_refused():
    said = run_hadal("serve", TINY, *SMALL, "--dwdp", 2, "--rank", 0, "--world", 3, "--meet", free_address(), env=CLEAN)
    assert said.returncode == 2 and "3 processes for dwdp 2 and ep 1, which have 2 ranks" in said.stderr
    said = run_hadal("serve", TINY, *SMALL, "--dwdp", 2, "--dwdp-from", 8, "--rank", 0, "--world", 2, "--meet", free_address(), env=CLEAN)
    assert said.returncode == 2 and "ranks are in several processes" in said.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_go_on_without_a_lost_rank(world, alone, how):
    copies = 8 if how == signal.SIGKILL else 0
    w = world(3, "--dwdp", 3, "--redundant", copies)
    assert answers(w.server, lambda: lose(w, 1, how)) == alone
    await_health(w, "degraded: " + LOST.format(1))
    assert figure(w.server, "experts_elsewhere") == 7 * (16 - copies)  # of two ranks
    fetched = figure(w.server, "experts_fetched_total")
    if how == signal.SIGKILL:
        w.ranks[1].wait()
        w.start(1)
    else:
        w.ranks[1].send_signal(signal.SIGCONT)
    await_health(w, "ok")
    assert answers(w.server) == alone
    assert figure(w.server, "experts_elsewhere") == 7 * (16 * 2 - copies)
    assert figure(w.server, "experts_fetched_total") > fetched
    assert all(code == 0 for _, code in w.close())


def test_one_rank_is_left_with_all_experts(world, alone):
    w = world(2, "--dwdp", 2)
    assert answers(w.server, lambda: lose(w, 1, signal.SIGKILL)) == alone
    await_health(w, "degraded: " + LOST.format(1))
    assert figure(w.server, "experts_elsewhere") == 0
    assert answers(w.server) == alone
    assert w.close()[0][1] == -signal.SIGKILL and w.server.process.returncode == 0


@pytest.mark.threads
def test_a_short_answer_while_a_rank_is_lost_and_returns(world):
    """Short enough for the thread sanitizer; the rank that returns finds no epoch, and waits for the next."""
    body = {"prompt": "The next in turn", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    text = lambda server: server.post("/v1/completions", body).json["choices"][0]["text"]
    server = Server(*SMALL)
    want = text(server)
    server.close()
    w = world(2, "--dwdp", 2)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(text, w.server) for _ in range(4)]
        wait_until(lambda: figure(w.server, "generation_tokens_total") > 2, "some tokens are out")
        w.ranks[1].kill()
        assert [a.result() for a in asked] == [want] * 4
    await_health(w, "degraded: " + LOST.format(1))
    w.ranks[1].wait()
    w.start(1)
    await_health(w, "ok")
    assert text(w.server) == want
    assert all(code == 0 for _, code in w.close())


# ---- two hosts ----

tcp = pytest.mark.skipif("tcp" not in TRANSPORTS, reason=NO_DEVICE)


def two_hosts(world, host, ranks, depth, *flags, dwdp=None, split=None):
    """The last rank is on the other host, or those from `split` on."""
    name, net, veth = host
    first = split or ranks - 1
    wrap = lambda rank: ["ip", "netns", "exec", name, "env", f"UCX_NET_DEVICES={veth[1]}"] if rank >= first else []
    env = {**KEY, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": veth[0]}
    return world(ranks, "--dwdp", dwdp or ranks, "--prefetch-depth", depth, *flags, env=env, meet=f"{net}.1:30178", wrap=wrap)


@as_root
@tcp
@pytest.mark.parametrize("ranks, depth", [(2, 1), (3, 3)])
def test_experts_of_another_host_are_read_there(world, host, alone, ranks, depth):
    w = two_hosts(world, host, ranks, depth)
    assert answers(w.server) == alone
    assert answers(w.server) == alone  # with prefix caches
    assert figure(w.server, "expert_network_bytes_total") > 0
    if ranks == 2:  # no rank has a peer on its own host
        assert figure(w.server, "expert_network_bytes_total") == figure(w.server, "expert_fetch_bytes_total")
    assert figure(w.server, "expert_file_bytes_total") == 0 == figure(w.server, "expert_fetches_failed_total")
    assert all(code == 0 for _, code in w.close())


@as_root
@tcp
@pytest.mark.parametrize("split", [2, 3])
def test_parts_on_two_hosts(world, host, alone, split):
    """Of four ranks the last ones are on the other host: with two, each host has a part and reads no expert of the
    other one; with one, the second part's ranks read each other's experts over the network."""
    w = two_hosts(world, host, 4, 1, "--ep", 2, dwdp=2, split=split)
    assert answers(w.server) == alone
    assert figure(w.server, "experts_fetched_total") > 0 == figure(w.server, "expert_fetches_failed_total")
    assert (figure(w.server, "expert_network_bytes_total") > 0) == (split == 3)
    assert all(code == 0 for _, code in w.close())


@as_root
@tcp
def test_copies_on_the_own_host_are_nearer(world, host, alone):
    """Ranks 0 and 1 lack only what the other has: nothing comes from the other host, but what its rank reads."""
    w = two_hosts(world, host, 3, 1, "--redundant", 16)
    assert answers(w.server) == alone
    one, two = figure(w.server, "expert_network_bytes_total"), figure(w.server, "expert_fetch_bytes_total")
    assert 0 < one < two and figure(w.server, "expert_fetches_failed_total") == 0
    assert answers(w.server, lambda: lose(w, 2, signal.SIGKILL)) == alone
    await_health(w, "degraded: " + LOST.format(2))
    assert answers(w.server) == alone


@as_root
@tcp
def test_a_cut_cable_between_ranks(world, host, alone):
    w = two_hosts(world, host, 2, 2)
    assert answers(w.server) == alone
    veth = host[2]
    ip("link", "set", veth[0], "down")
    wait_until(lambda: w.server.get("/health").text == "degraded: rank 1 is lost: it was silent for 1000 ms", "rank 0 goes on")
    assert answers(w.server) == alone
    ip("link", "set", veth[0], "up")
    await_health(w, "ok")
    before = figure(w.server, "expert_network_bytes_total")
    assert answers(w.server) == alone
    assert figure(w.server, "expert_network_bytes_total") > before
    assert all(code == 0 for _, code in w.close())


@as_root
@tcp
def test_a_rank_of_another_host_is_killed(world, host, alone):
    w = two_hosts(world, host, 3, 1)
    assert answers(w.server, lambda: lose(w, 2, signal.SIGKILL)) == alone
    await_health(w, "degraded: " + LOST.format(2))
    assert answers(w.server) == alone
    w.start(2)
    await_health(w, "ok")
    assert answers(w.server) == alone
