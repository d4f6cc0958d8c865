"""Prefill and decode on servers of several ranks, in other layouts on each side: a request has the reply of
one rank on one server."""

import concurrent.futures
import os

import pytest
from serving import Server, free_port, wait_until
from test_pd import FLAGS, PAGE, SCHEMA, Pd, Peer, flush, ids, role_flags
from test_ranks import group_metric
from test_router import settled
from worlds import World, needs_ucx

LONG = os.environ.get("HADAL_TEST_LONG")
# of the prefill side, and of the decode side
LAYOUTS = {
    "tp 2, one rank": (["--tp", 2], []),
    "dp 2 ep 2, tp 2 ep 2": (["--dp", 2, "--ep", 2], ["--tp", 2, "--ep", 2]),
    "cp 2 hisparse, hisparse": (["--cp", 2, "--hisparse", 300], ["--hisparse", 256, "--draft-tokens", 3]),
}
if LONG:
    LAYOUTS |= {
        "one rank, tp 2": ([], ["--tp", 2]),
        "ep 2, dp 2 tp 2": (["--ep", 2], ["--dp", 2, "--tp", 2]),
        "cp 3, tp 2 hisparse": (["--cp", 3], ["--tp", 2, "--hisparse", 400]),
        "cp 4 hisparse, ep 2": (["--cp", 4, "--hisparse", 512, "--kv-write", "through"], ["--ep", 2]),
        "hisparse, cp 2": (["--hisparse", 300, "--chunk", 100], ["--cp", 2]),
    }
WORLDS = {
    "tp 2, one rank": (["--tp", 2], None),
    "cp 2 hisparse, one rank": (["--cp", 2, "--hisparse", 300], None),
    "dp 2 ep 2, dp 2 ep 2": (["--dp", 2, "--ep", 2], ["--dp", 2, "--ep", 2]),
}
if LONG:
    WORLDS["ep 2, tp 2"] = (["--ep", 2], ["--tp", 2])
BODIES = [
    {"prompt": ids(2 * PAGE + 44, 1), "max_tokens": 16, "seed": 1, "logprobs": 2},
    {"prompt": ids(3 * PAGE + 16, 2), "max_tokens": 12, "temperature": 0, "logprobs": 2},
    {"prompt": ids(PAGE + 72, 3), "max_tokens": 20, "seed": 8, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
]


@pytest.fixture(scope="module")
def straight():
    server = Server(*FLAGS)
    yield [settled(server.post("/v1/completions", b).json) for b in BODIES]
    server.close()


def check(prefill, decode, straight):
    """Both sides have the reply of one server, and every whole page was fetched, then is cached. Every
    attention group of both sides takes part."""
    for body, right in zip(BODIES, straight):
        before = decode.figure("received_tokens_total")
        assert settled(decode.ask(prefill, body).json) == right
        assert decode.figure("received_tokens_total") - before == len(body["prompt"]) // PAGE * PAGE
        assert settled(decode.ask(prefill, body).json) == right
    assert decode.figure("skipped_total", reason="cached") == len(BODIES)
    flush(prefill, decode)
    with concurrent.futures.ThreadPoolExecutor(2 * len(BODIES)) as pool:
        said = list(pool.map(lambda b: settled(decode.ask(prefill, b).json), BODIES + BODIES))
    assert said == straight + straight
    for server in (prefill, decode):
        assert all(n > 0 for n in group_metric(server, "generation_tokens_total"))
        assert server.figure("leases_aborted_total") == 0
    wait_until(lambda: prefill.is_quiet() and decode.is_quiet(), "no lease is left")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_are_threads(straight, layout):
    of_prefill, of_decode = LAYOUTS[layout]
    prefill = Pd("prefill", *of_prefill)
    try:
        decode = Pd("decode", *of_decode, peers=[prefill]).wait_paired()
        try:
            check(prefill, decode, straight)
        finally:
            decode.close()
    finally:
        prefill.close()


def test_pages_that_were_sent_come_back_to_every_rank(straight):
    """What a page was copied to host memory for does not matter: it is evicted there, and read again."""
    prefill = Pd("prefill", "--tp", 2, "--kv-tokens", 8 * PAGE, "--context", 8 * PAGE)
    try:
        decode = Pd("decode", peers=[prefill]).wait_paired()
        assert settled(decode.ask(prefill, BODIES[1]).json) == straight[1]
        decode.close()
        for start in (40, 41):
            prefill.post("/v1/completions", {"prompt": ids(7 * PAGE, start), "max_tokens": 1})
        before = prefill.get("/metrics").text
        assert settled(prefill.post("/v1/completions", BODIES[1]).json) == straight[1]
        assert host_tokens(prefill.get("/metrics").text) - host_tokens(before) == 3 * PAGE
    finally:
        prefill.close()


def host_tokens(metrics):
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith("hadal_kv_tier_cached_tokens_total{") and 'tier="host"' in line)


class PdWorld(World):
    """A server with a role whose ranks are processes."""

    def __init__(self, role, flags, peers=(), **options):
        listen = f"127.0.0.1:{free_port()}" if role == "prefill" else None
        super().__init__(2, "--kv-host", "0.2", *role_flags(role, listen, peers), *flags, serve=Peer, **options)
        self.server.listen = listen


@needs_ucx
@pytest.mark.parametrize("layout", WORLDS)
def test_ranks_that_are_processes(straight, layout):
    of_prefill, of_decode = WORLDS[layout]
    worlds = [PdWorld("prefill", of_prefill)]
    prefill = worlds[0].server
    try:
        if of_decode is None:
            decode = Pd("decode", peers=[prefill])
        else:
            worlds.append(PdWorld("decode", of_decode, peers=[prefill]))
            decode = worlds[1].server
        check(prefill, decode.wait_paired(), straight)
        decode.close()
    finally:
        for w in worlds:
            w.kill()


@needs_ucx
@pytest.mark.parametrize("layout", ["--ep 2", "--dp 2 --ep 2"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_rank_that_is_lost(straight, side, layout):
    """Its server's ranks begin anew, with empty caches in other memory."""
    layout = layout.split()
    world = PdWorld("prefill", layout)
    prefill = world.server
    try:
        if side == "decode":
            other, world = world, PdWorld("decode", layout, peers=[prefill])
            decode = world.server.wait_paired()
        else:
            other, decode = None, Pd("decode", peers=[prefill]).wait_paired()
        for _ in range(2):
            body, right = BODIES[0], straight[0]
            assert settled(decode.ask(prefill, body).json) == right
            world.ranks[1].kill()
            world.ranks[1].wait()
            assert settled(decode.ask(prefill, BODIES[1]).json) == straight[1]
            wait_until(lambda: prefill.is_quiet() and decode.is_quiet(), "no lease is left")
            world.start(1)
            wait_until(lambda: world.server.get("/health").text == "ok", "all ranks work")
            flush(prefill, decode)
        before = decode.figure("received_tokens_total")
        assert settled(decode.ask(prefill, BODIES[2]).json) == straight[2]
        assert decode.figure("received_tokens_total") - before == PAGE
        decode.close()
    finally:
        world.kill()
        if other:
            other.kill()


def test_another_order_of_sums_is_refused():
    prefill = Pd("prefill")
    try:
        decode = Pd("decode", "--tp", 2, "--ep", 2, "--sum-in-ranks", peers=[prefill])
        why = "this server has another order of sums (--sum-in-ranks)"
        wait_until(lambda: why in decode.get("/server_info").json["peers"][0]["why"], why)
        decode.close()
    finally:
        prefill.close()
