"""The tasks of the suite, asked by many clients: a server whose experts are elsewhere replies as one
that has all of them. With ./test --long all 1,600."""

import pytest
from conftest import BACKEND, LONG
from serving import Server
from suite import load_tasks, replies
from test_experts import THREE, TWO
from test_rebalance import figure

CLIENTS = 32 if LONG else 12
FLAGS = ("--threads", 2, "--max-running", 32, "--context", 8192, "--backend", BACKEND)
TASKS = load_tasks(CLIENTS)


@pytest.fixture(scope="module")
def want():
    server = Server(*FLAGS)
    try:
        return replies(server, TASKS, CLIENTS)
    finally:
        server.close()


@pytest.mark.parametrize("flags", [("--dwdp", 2), ("--experts-host", TWO), ("--experts-disk", THREE)], ids=lambda flags: flags[0])
def test_replies_are_those_of_resident_experts(serve, want, flags):
    server = serve(*FLAGS, *flags)
    have = replies(server, TASKS, CLIENTS)
    for task, h, w in zip(TASKS, have, want):
        assert h == w, task
    assert len(have) == (1600 if LONG else CLIENTS) and sum(tokens for _, _, tokens in want) > 200
    assert figure(server, "experts_fetched_total") > 1000 and figure(server, "expert_fetches_failed_total") == 0
