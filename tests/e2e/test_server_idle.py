"""Requests of every kind, ended in every way: after them a server holds what a fresh one does."""

import concurrent.futures
import json
import os

import pytest
from serving import Server, reset, wait_until

MESSAGES = [{"role": "user", "content": "What is 347 + 586?"}]
ADD = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SHORT = {"max_tokens": 4}
LONG = {"max_tokens": 4000, "ignore_eos": True}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}}}

# Path, body, what makes it long.
KINDS = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, LONG),
    "chat n": ("/v1/chat/completions", {"messages": MESSAGES, "n": 3, "logprobs": True, "top_logprobs": 2}, LONG),
    "chat thinking": ("/v1/chat/completions", {"messages": MESSAGES, "thinking": {"type": "enabled"}}, LONG),
    "chat tools": ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{"type": "function", "function": ADD}], "tool_choice": "required"}, LONG),
    "chat schema": ("/v1/chat/completions", {"messages": MESSAGES, "response_format": SCHEMA}, {}),
    "completions": ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 1}, LONG),
    "generate": ("/generate", {"text": ["a", "b"]}, {"sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}),
    "messages": ("/v1/messages", {"messages": MESSAGES}, {"max_tokens": 4000}),
    "responses": ("/v1/responses", {"input": "hi"}, {"max_output_tokens": 4000, "ignore_eos": True}),
}
SHORTENED = {"generate": {"sampling_params": {"max_new_tokens": 4}}, "responses": {"max_output_tokens": 4}}


def send(server, path, body, request_id):
    text = json.dumps(body).encode()
    s = server.socket()
    s.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-Request-Id: %s\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), request_id.encode(), len(text), text))
    return s


def ends(server, name, s):
    s.shutdown(2)
    s.close()


def is_reset(server, name, s):
    reset(s)


def leaves_after_its_first_bytes(server, name, s):
    s.recv(1)
    s.close()


def is_aborted(server, name, s):
    def heard():
        assert server.post("/abort_request", {"rid": name}).status == 200
        s.settimeout(0.05)
        try:
            return s.recv(1)
        except TimeoutError:
            return None

    wait_until(heard, "it is aborted, or told why not")
    s.close()


WAYS = {f.__name__: f for f in (ends, is_reset, leaves_after_its_first_bytes, is_aborted)}
STREAMED_ONLY = {"leaves_after_its_first_bytes"}


def one_of_each(server):
    """Every kind to its end, refused, and cut short in every way, streamed and not."""
    work = []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for kind, (path, body, long) in KINDS.items():
            for stream in (False, True):
                short = {**body, **SHORTENED.get(kind, SHORT), "stream": stream}
                work.append(pool.submit(answered, server, path, short, 200))
                work.append(pool.submit(answered, server, path, {**short, "temperature": -1, "sampling_params": {"temperature": -1}}, 400))
                for how, way in WAYS.items():
                    if how in STREAMED_ONLY and not stream:
                        continue
                    name = f"{kind}-{stream}-{how}".replace(" ", "-")

                    def run(path=path, body={**body, **long, "stream": stream}, name=name, way=way):
                        way(server, name, send(server, path, body, name))

                    work.append(pool.submit(run))
        work.append(pool.submit(in_the_background, server))
        for w in work:
            w.result()


def answered(server, path, body, status):
    assert server.post(path, body).status == status


def in_the_background(server):
    made = server.post("/v1/responses", {"input": "hi", "background": True, "max_output_tokens": 4000, "ignore_eos": True}).json
    assert server.post(f"/v1/responses/{made['id']}/cancel").status == 200


RESTS = {"hadal_living_requests": 0, "hadal_living_answers": 0, "hadal_num_running_reqs": 0, "hadal_num_queue_reqs": 0, "hadal_kv_used_tokens": 0, "hadal_window_usage": 0, "hadal_http_streams": 0, "hadal_http_held_body_bytes": 0, "hadal_http_calls": 1, "hadal_http_connections": 1}


def comes_to_rest(server):
    """What still differs from a server at rest; the look itself is one call on one connection."""
    now = server.stats()
    return {name: now[name] for name, value in RESTS.items() if now[name] != value}


@pytest.mark.threads
def test_nothing_is_left(tmp_path):
    """FT28: requests, answers, pages, streams, bodies, connections and descriptors."""
    log = tmp_path / "log"
    s = Server("--max-running", "4", "--log-requests", log)
    one_of_each(s)
    wait_until(lambda: comes_to_rest(s) == {}, "rest")
    files = len(os.listdir(f"/proc/{s.process.pid}/fd"))
    tasks = len(os.listdir(f"/proc/{s.process.pid}/task"))
    before = s.stats()
    one_of_each(s)
    wait_until(lambda: comes_to_rest(s) == {}, "rest")
    wait_until(lambda: s.stats()["hadal_audits_total"] > before["hadal_audits_total"], "an audit")
    now = s.stats()
    assert now["hadal_audits_failed_total"] == 0
    assert now["hadal_num_requests_total"] > before["hadal_num_requests_total"]
    assert now["hadal_kv_available_tokens"] + now["hadal_kv_evictable_tokens"] == now["hadal_max_total_num_tokens"]
    assert len(os.listdir(f"/proc/{s.process.pid}/task")) == tasks
    wait_until(lambda: len(os.listdir(f"/proc/{s.process.pid}/fd")) <= files, "the last look's connection is closed")
    assert s.post("/flush_cache").status == 200
    wait_until(lambda: s.stats()["hadal_kv_available_tokens"] == now["hadal_max_total_num_tokens"], "every page is free")
    s.close()
    computed = [json.loads(line) for line in log.read_text().splitlines()]
    assert 0 < len(computed) <= now["hadal_num_requests_total"]  # who left before the submission has no line
    assert {line["status"] for line in computed} == {200, 499}
