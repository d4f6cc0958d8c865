"""Entries in host memory, of which the device has those that were selected lately (--hisparse), tiers and ranks that divide
prompts (--cp) change nothing that a client sees: each alone and with each other, in many conversations with common prefixes, half of
them sampled and some with constraints, with little memory, drafts and expert parallelism. --long: all pairs."""

import concurrent.futures
import os
import re

import pytest
from conftest import BACKEND
from serving import Server
from toy_models import make_toy_model

CLIENTS = 32
TOP_K = {"v4": 6, "v32": 10}
FLAGS = ("--max-running", CLIENTS, "--context", 400, "--backend", BACKEND)
LONG = os.environ.get("HADAL_TEST_LONG")
TIGHT = ("--kv-tokens", 2500)  # requests are retracted
DRAFTS = ("--draft-tokens", 3)
TIERS = ("--kv-host", 0.01)


@pytest.fixture(scope="module", params=TOP_K)
def toy(request, tmp_path_factory):
    return request.param, make_toy_model(request.param, tmp_path_factory.mktemp("hisparse") / "model")


def prompt_of(i, turn):
    common = [5 + k * (i % 3 + 2) % 80 for k in range(130 + 40 * (i % 2))]
    return common + [8 + (k * k + i) % 70 for k in range(20 + 3 * i + 60 * turn)]


def ask(server, i, turn):
    constraint = {"regex": "[a-z ]{10,40}"} if i % 4 == 3 else {"ignore_eos": True}
    sampling = {"max_new_tokens": 24, "temperature": 0.8 * (i % 2), "sampling_seed": i, **constraint}
    reply = server.post(
        "/generate",
        {"input_ids": prompt_of(i, turn), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2},
    )
    assert reply.status == 200, reply.text
    info = reply.json["meta_info"]
    return reply.json["output_ids"], info["output_token_logprobs"], info["output_top_logprobs"]


def conversations(server):
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        return [list(pool.map(ask, [server] * CLIENTS, range(CLIENTS), [turn] * CLIENTS)) for turn in range(2)]


def metric(server, name):
    return int(re.search(rf"^hadal_{name}{{.*}} (\d+)$", server.get("/metrics").text, re.MULTILINE)[1])


def tier_pages(server, name):
    lines = [x for x in server.get("/metrics").text.splitlines() if x.startswith(f"hadal_kv_tier_{name}{{") and 'tier="host"' in x and 'pool="entries"' in x]
    return sum(float(x.split()[-1]) for x in lines)


def ways(top_k):
    """Rows of HiSparse's buffers, 0: none; and flags."""
    yield top_k, ("--chunk", 37)
    yield 5 * top_k + 3, (*TIGHT, *DRAFTS)
    yield 100000, ("--kv-tokens", 20000)
    yield 3 * top_k, ("--tp", 2, "--cp", 2)
    yield 2 * top_k, (*TIGHT, *TIERS, "--ep", 2)
    yield 0, (*TIGHT, *TIERS, *DRAFTS, "--cp", 3)
    if not LONG:
        return
    for alone in (TIERS, ("--kv-write", "through", *TIERS), ("--cp", 2), ("--cp", 4), ("--ep", 2)):
        for rows in (0, top_k, 4 * top_k):
            yield rows, (*TIGHT, *alone)
            yield rows, (*TIGHT, *DRAFTS, *alone)
    for cp in (2, 3, 4):
        yield 0, (*TIGHT, *TIERS, "--cp", cp)
        yield top_k, (*TIERS, "--cp", cp, "--chunk", 37)
    yield 0, (*TIGHT, *DRAFTS, "--cp", 2, "--ep", 2)
    yield top_k, (*TIGHT, *TIERS, *DRAFTS, "--cp", 2, "--ep", 2)
    yield 3 * top_k, (*TIGHT, *TIERS, "--dp", 2, "--ep", 2)


def test_clients_see_the_same(toy):
    family, model = toy
    top_k = TOP_K[family]
    alone = Server(*FLAGS, "--no-drafts", model=model)
    want = conversations(alone)
    assert metric(alone, "hisparse_rows") == 0
    alone.close()
    shares, retracted = {}, 0
    for rows, flags in ways(top_k):
        server = Server(*FLAGS, *(("--hisparse", rows) if rows else ()), *flags, model=model)
        assert conversations(server) == want, (rows, flags)
        if "--dp" not in flags:
            retracted += metric(server, "num_retracted_requests_total")
            assert metric(server, "cached_tokens_total") > 0
            assert metric(server, "hisparse_rows") == rows and (metric(server, "hisparse_host_bytes") > 0) == (rows > 0)
        if rows and "--dp" not in flags:
            shares[rows, flags] = metric(server, "hisparse_fetched_total") / metric(server, "hisparse_selected_total")
        assert (tier_pages(server, "saved_pages_total") > 0) == (TIERS[0] in flags), (rows, flags)
        server.close()
    assert retracted > 0
    assert 0 < shares[100000, ("--kv-tokens", 20000)] < shares[top_k, ("--chunk", 37)] <= 1
