"""Entries in host memory, of which the device has those that were selected lately (--hisparse), change nothing that
a client sees: many conversations with common prefixes, with few rows and many, little memory, drafts, constraints, ranks."""

import concurrent.futures
import re

import pytest
from conftest import BACKEND
from serving import Server
from toy_models import make_toy_model

CLIENTS = 32
TOP_K = {"v4": 6, "v32": 10}
FLAGS = ("--max-running", CLIENTS, "--context", 400, "--backend", BACKEND)


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


def test_clients_see_the_same(toy):
    family, model = toy
    top_k = TOP_K[family]
    alone = Server(*FLAGS, "--no-drafts", model=model)
    want = conversations(alone)
    assert metric(alone, "hisparse_rows") == 0
    alone.close()
    shares, retracted = [], 0
    for rows, *flags in [
        (top_k, "--chunk", 37),
        (5 * top_k + 3, "--kv-tokens", 2500, "--draft-tokens", 3),
        (100000, "--kv-tokens", 20000),
        (3 * top_k, "--tp", 2, "--cp", 2),
    ]:
        server = Server(*FLAGS, "--hisparse", rows, *flags, model=model)
        assert conversations(server) == want, (rows, flags)
        assert metric(server, "hisparse_rows") == rows and metric(server, "hisparse_host_bytes") > 0
        shares.append(metric(server, "hisparse_fetched_total") / metric(server, "hisparse_selected_total"))
        assert metric(server, "cached_tokens_total") > 0
        retracted += metric(server, "num_retracted_requests_total")
        server.close()
    assert retracted > 0
    assert 0 < shares[2] < shares[0] <= 1
