"""The tasks of `hadal eval --suite tiny`, asked by many clients of a server."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

from conftest import LONG
from serving import TINY

LONG_PROMPTS = "recall_"


def load_tasks(few):
    """The first of each name, then the second ones: as many as `few`, with ./test --long all 1,600."""
    by_name = {}
    for line in (TINY / "eval" / "tiny.jsonl").open():
        task = json.loads(line)
        if LONG or not task["task"].startswith(LONG_PROMPTS):
            by_name.setdefault(task["task"], []).append(task)
    tasks = [t for turn in zip(*by_name.values()) for t in turn]
    return tasks if LONG else tasks[:few]


def ask(server, task):
    """The reply's message without the ids of calls, which are drawn anew, why it ended, and tokens."""
    body = {"messages": task["messages"], "max_tokens": task["max_tokens"], "temperature": 0, "chat_template_kwargs": {"thinking": task["thinking"]}}
    with contextlib.closing(server.connection(timeout=1800)) as patient:  # prompts of 3,500 tokens for many clients
        reply = server.post("/v1/chat/completions", {**body, **({"tools": task["tools"]} if "tools" in task else {})}, connection=patient)
    assert reply.status == 200, reply.text
    choice = reply.json["choices"][0]
    for call in choice["message"].get("tool_calls") or []:
        assert call.pop("id")
    usage = reply.json["usage"]
    return json.dumps(choice), usage["prompt_tokens"], usage["completion_tokens"]


def replies(server, tasks, clients, then=lambda: None):
    """then: called while they are asked."""
    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(ask, server, task) for task in tasks]
        then()
        return [a.result() for a in asked]
