"""The tasks of `hadal eval --suite tiny`, asked by 32 clients: a server whose experts are elsewhere replies as one
that has all of them. One task of nearly each name; with ./test --long all 1,600."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import BACKEND, LONG
from serving import TINY, Server
from test_experts import THREE, TWO
from test_rebalance import figure

CLIENTS, LONG_PROMPTS = 32, "recall_"
FLAGS = ("--threads", 2, "--max-running", 32, "--context", 8192, "--backend", BACKEND)


def load_tasks():
    """The first of each name, then the second ones."""
    by_name = {}
    for line in (TINY / "eval" / "tiny.jsonl").open():
        task = json.loads(line)
        if LONG or not task["task"].startswith(LONG_PROMPTS):
            by_name.setdefault(task["task"], []).append(task)
    tasks = [t for turn in zip(*by_name.values()) for t in turn]
    return tasks if LONG else tasks[:CLIENTS]


def ask(server, task):
    """The reply's message without the ids of calls, which are drawn anew, why it ended, and tokens."""
    body = {"messages": task["messages"], "max_tokens": task["max_tokens"], "temperature": 0, "chat_template_kwargs": {"thinking": task["thinking"]}}
    with contextlib.closing(server.connection(timeout=1800)) as patient:  # prompts of 3,500 tokens for 32 clients
        reply = server.post("/v1/chat/completions", {**body, **({"tools": task["tools"]} if "tools" in task else {})}, connection=patient)
    assert reply.status == 200, reply.text
    choice = reply.json["choices"][0]
    for call in choice["message"].get("tool_calls") or []:
        assert call.pop("id")
    usage = reply.json["usage"]
    return json.dumps(choice), usage["prompt_tokens"], usage["completion_tokens"]


def replies(server):
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda task: ask(server, task), load_tasks()))


@pytest.fixture(scope="module")
def want():
    server = Server(*FLAGS)
    try:
        return replies(server)
    finally:
        server.close()


@pytest.mark.parametrize("flags", [("--dwdp", 2), ("--experts-host", TWO), ("--experts-disk", THREE)], ids=lambda flags: flags[0])
def test_replies_are_those_of_resident_experts(serve, want, flags):
    server = serve(*FLAGS, *flags)
    have = replies(server)
    for task, h, w in zip(load_tasks(), have, want):
        assert h == w, task
    assert len(have) == (1600 if LONG else CLIENTS) and sum(tokens for _, _, tokens in want) > 700
    assert figure(server, "experts_fetched_total") > 1000 and figure(server, "expert_fetches_failed_total") == 0
