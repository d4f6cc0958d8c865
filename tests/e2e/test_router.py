"""hadal router in front of servers: every reply as the server itself gives it, and what happens when
servers refuse, drain, die and come back, and when clients leave."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import subprocess

import pytest
from conftest import HADAL
from serving import Hosts, Listening, Server, events_of, free_port, read_all, read_until, wait_until
from test_metrics import stream

FLAGS = ("--threads", "1", "--max-running", "16")
CHAT = {"messages": [{"role": "user", "content": "What is 347 + 586?"}], "seed": 7, "max_tokens": 24}


class Router(Listening):
    def __init__(self, *flags, port=0, env=None, launcher=()):
        words = [*launcher, HADAL, "router", "--port", str(port), *flags]
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **(env or {})})
        first = self.process.stdout.readline().decode()
        assert first.startswith("hadal "), self.process.stderr.read().decode()
        self.port = int(first.rsplit(":", 1)[1])
        assert self.process.stdout.readline() == b"ready\n"

    def servers(self):
        return self.get("/router/servers").json["servers"]

    def wait_up(self, n):
        wait_until(lambda: sum(s["up"] for s in self.servers()) == n, f"{n} servers up")
        return self

    def figure(self, name):
        text = self.get("/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        log = self.process.communicate()[1].decode()
        assert self.process.returncode == 0, log


def of(server):
    return f"127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def servers():
    both = [Server(*FLAGS) for _ in range(2)]
    yield both
    for s in both:
        s.close()


@pytest.fixture
def route():
    started = []

    def start(*flags, **options):
        started.append(Router(*flags, **options))
        return started[-1]

    yield start
    for router in started:
        router.close()


@pytest.fixture
def router(route, servers):
    return route("--decode", ",".join(of(s) for s in servers)).wait_up(2)


def settled(value):
    """Without what differs between two replies to one request: ids, times, figures of the cache."""
    if isinstance(value, dict):
        skipped = ("id", "created", "created_at", "completed_at", "item_id", "usage", "meta_info", "cached_tokens")
        return {k: settled(v) for k, v in value.items() if k not in skipped}
    return [settled(v) for v in value] if isinstance(value, list) else value


def texts(value):
    """What a stream says, whose pieces depend on how many tokens a step brings."""
    if isinstance(value, dict):
        return "".join(v if k in ("content", "text", "delta") and isinstance(v, str) else texts(v) for k, v in value.items() if k != "response")
    return "".join(map(texts, value)) if isinstance(value, list) else ""


def told(reply):
    """The text of a stream, its kinds of events in the order in which they first came, and its end."""
    events = list(events_of(reply.body.split(b"\n")))
    documents = [json.loads(e) for e in events if e != b"[DONE]"]
    text = documents[-1]["text"] if "meta_info" in documents[-1] else "".join(map(texts, documents))
    return text, list(dict.fromkeys(d.get("type", "") for d in documents)), events[-1] == b"[DONE]"


BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "1, 2, 3,", "seed": 3, "max_tokens": 16},
    "/v1/messages": {**CHAT, "max_tokens": 12},
    "/v1/responses": {"input": "What is 2 + 2?", "max_output_tokens": 12, "temperature": 0},
    "/generate": {"text": "1, 2,", "sampling_params": {"max_new_tokens": 8, "temperature": 0}},
    "/tokenize": {"prompt": "one two"},
    "/chat/completions": CHAT,
}


@pytest.mark.parametrize("path", BODIES)
def test_replies_equal_those_of_the_server(router, servers, path):
    body = {k: v for k, v in BODIES[path].items() if path != "/v1/messages" or k != "seed"} | ({"temperature": 0} if path == "/v1/messages" else {})
    straight, routed = servers[0].post(path, body), router.post(path, body)
    assert straight.status == routed.status == 200, routed.text
    assert settled(straight.json) == settled(routed.json)
    assert straight.headers["Content-Type"] == routed.headers["Content-Type"]


@pytest.mark.parametrize("path", [p for p in BODIES if p != "/tokenize"])
def test_streams_equal_those_of_the_server(router, servers, path):
    body = {k: v for k, v in BODIES[path].items() if k != "seed"} | {"stream": True}
    if path != "/generate":
        body["temperature"] = 0
    replies = [s.post(path, body) for s in (servers[0], router)]
    assert all(r.headers["Content-Type"] == "text/event-stream" for r in replies)
    assert told(replies[0]) == told(replies[1])


@pytest.mark.parametrize(
    "method, path, body",
    [
        ("GET", "/v1/models", None),
        ("GET", "/version", None),
        ("GET", "/", None),
        ("GET", "/nothing", None),
        ("GET", "/generate", None),
        ("POST", "/v1/chat/completions", "{"),
        ("POST", "/v1/chat/completions", {"messages": []}),
        ("POST", "/v1/messages", {"messages": []}),
        ("GET", "/v1/responses/resp_unknown", None),
        ("GET", "/v1/models/none?a=%41%20b", None),
    ],
)
def test_other_replies_are_the_same_bytes(router, servers, method, path, body):
    headers = {"Content-Type": "application/json"}
    straight, routed = (s.request(method, path, body=body, headers=headers) for s in (servers[0], router))
    assert (straight.status, settled(straight.json) if path == "/v1/models" else straight.body) == (routed.status, settled(routed.json) if path == "/v1/models" else routed.body)
    kept = [k for k in straight.headers if k not in ("Date", "X-Request-Id", "Content-Length")]
    assert {k: straight.headers[k] for k in kept} == {k: routed.headers[k] for k in kept}


def test_one_trace_id(router, servers):
    reply = router.post("/v1/chat/completions", CHAT, headers={"X-Request-Id": "trace-1"})
    assert reply.headers["X-Request-Id"] == "trace-1"


def test_a_stored_response_is_found(router):
    ids = [router.post("/v1/responses", {"input": f"{i}", "max_output_tokens": 4, "store": True}).json["id"] for i in range(4)]
    assert [router.get(f"/v1/responses/{i}").json["id"] for i in ids] == ids
    assert router.post("/v1/responses", {"input": "on", "previous_response_id": ids[0], "max_output_tokens": 4}).status == 200


def test_admin_requests_reach_all(router, servers):
    try:
        assert router.post("/pause_generation", {"mode": "in_place"}).status == 200
        assert all(s.loads()["paused"] for s in servers)
    finally:
        assert router.post("/continue_generation", {}).status == 200
    assert not any(s.loads()["paused"] for s in servers)


def test_64_clients(router, servers):
    bodies = [{**CHAT, "seed": i, "messages": [{"role": "user", "content": f"What is {i} + {i}?"}]} for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        routed = list(pool.map(lambda b: settled(router.post("/v1/chat/completions", b).json), bodies))
        straight = list(pool.map(lambda b: settled(servers[0].post("/v1/chat/completions", b).json), bodies))
    assert routed == straight
    assert all(s["requests"] > 0 for s in router.servers())
    wait_until(lambda: router.figure("hadal_router_living_requests") == 0, "no request is left")
    assert all(s["inflight"] == 0 for s in router.servers())


def test_prompts_that_begin_alike_go_to_one_server(router):
    def ask(text):
        return router.post("/v1/completions", {"prompt": text, "max_tokens": 1, "temperature": 0})

    for turn in range(6):
        assert ask("word " * 300 + f"turn {turn}").status == 200
    assert sorted(s["requests"] for s in router.servers()) == [0, 6]
    assert router.figure("hadal_router_cached_tokens_total") > 1000


def test_a_client_that_leaves_is_cancelled(router, servers):
    body = json.dumps({**CHAT, "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()
    for stream in (True, False):
        asked = body if stream else body.replace(b'"stream": true', b'"stream": false')
        s = router.socket()
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(asked) + asked)
        wait_until(lambda: sum(x.loads()["num_running_reqs"] for x in servers) == 1, "it runs")
        s.close()
        wait_until(lambda: sum(x.loads()["num_running_reqs"] for x in servers) == 0, "it was cancelled")
    wait_until(lambda: router.figure("hadal_router_cancelled_total") == 2, "both are counted")


def test_no_server(route):
    router = route("--decode", f"127.0.0.1:{free_port()}")
    assert (router.get("/health").status, router.get("/health").text) == (503, "no server")
    reply = router.post("/v1/chat/completions", CHAT)
    assert (reply.status, reply.code) == (503, "no_server")
    assert reply.headers["Retry-After"] == "1"


def test_a_killed_server_loses_no_answer(route, servers):
    """Whole replies are computed again elsewhere, and streams go on there."""
    victim = Server(*FLAGS)
    router = route("--decode", f"{of(victim)},{of(servers[0])}").wait_up(2)
    bodies = [{**CHAT, "seed": i, "max_tokens": 200, "ignore_eos": True} for i in range(16)]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        replies = [pool.submit(router.post, "/v1/chat/completions", b) for b in bodies]
        streams = [pool.submit(router.post, "/v1/chat/completions", {**b, "stream": True}) for b in bodies]
        wait_until(lambda: victim.loads()["num_running_reqs"] > 4, "it has work")
        victim.process.kill()
        replies, streams = [r.result() for r in replies], [s.result() for s in streams]
    victim.process.communicate()
    assert [r.status for r in replies] == [200] * 16
    assert [settled(r.json) for r in replies] == [settled(servers[0].post("/v1/chat/completions", b).json) for b in bodies]
    assert all(told(s)[2] for s in streams)
    assert [told(s)[0] for s in streams] == [r.json["choices"][0]["message"]["content"] for r in replies]
    wait_until(lambda: [s["up"] for s in router.servers()] == [False, True], "the router knows")
    again = Server(*FLAGS, port=victim.port)
    router.wait_up(2)
    again.close()


STREAMS = {
    "chat": ("/v1/chat/completions", {**CHAT, "max_tokens": 150, "ignore_eos": True}),
    "no seed": ("/v1/chat/completions", {**CHAT, "seed": None, "max_tokens": 150, "ignore_eos": True, "temperature": 1}),
    "choices": ("/v1/completions", {"prompt": "1, 2,", "seed": 3, "n": 3, "max_tokens": 80, "ignore_eos": True}),
    "stops at once": ("/v1/completions", {"prompt": "1, 2,", "seed": 3, "n": 2, "max_tokens": 150, "ignore_eos": True, "stop": ["97"]}),
    "prompts": ("/v1/completions", {"prompt": ["a", "b"], "seed": 3, "max_tokens": 100, "ignore_eos": True, "stream_options": {"include_usage": True}}),
    "reasoning": ("/v1/chat/completions", {**CHAT, "max_tokens": 300, "chat_template_kwargs": {"thinking": True}}),
}


def pieces_of(events):
    """What the choices say, their ends, the ids, and how often a role came."""
    texts, ends, names, roles = {}, {}, set(), 0
    for event in events:
        if event == b"[DONE]":
            continue
        document = json.loads(event)
        assert "error" not in document, document
        names.add((document["id"], document["created"]))
        for c in document["choices"]:
            delta = c.get("delta", c)
            roles += "role" in delta
            text = (delta.get("reasoning_content") or "") + "|" + (delta.get("content") or delta.get("text") or "")
            was = texts.get(c["index"], ("", ""))
            texts[c["index"]] = tuple(a + b for a, b in zip(was, text.split("|", 1)))
            if c.get("finish_reason"):
                assert c["index"] not in ends
                ends[c["index"]] = c["finish_reason"]
    return texts, ends, len(names), roles


def while_its_server_dies(route, servers, path, body, after=b"data: "):
    """Returns the bytes of a stream whose server is killed when the first of these come."""
    dying = Server(*FLAGS)
    router = route("--decode", f"{of(dying)},{of(servers[0])}").wait_up(2)
    for _ in range(100):  # until the one that dies has it
        with router.socket() as s:
            data = json.dumps(body).encode()
            before = dying.loads()["num_running_reqs"]
            s.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
            head = read_until(s, after)
            if dying.loads()["num_running_reqs"] > before:
                dying.process.kill()
                rest = read_all(s)
                break
    dying.wait()
    assert b": hadal" not in head + rest
    assert router.figure("hadal_router_streams_resumed_total") == 1
    return head + rest


# FT51: a decode server dies in the middle of a stream
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_goes_on_elsewhere(route, servers, name):
    path, body = STREAMS[name]
    body = {k: v for k, v in body.items() if v is not None} | {"stream": True}
    events = list(events_of(while_its_server_dies(route, servers, path, body).split(b"\n")))
    assert events[-1] == b"[DONE]"
    got = pieces_of(events)
    assert got[2] == 1
    if name != "no seed":
        straight = pieces_of(events_of(servers[1].post(path, body).body.split(b"\n")))
        assert (got[0], got[1], got[3]) == (straight[0], straight[1], straight[3])


TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}
FUNCTION = {"type": "function", "name": "add", "description": "adds", "parameters": TOOL["input_schema"]}
ASK = [{"role": "user", "content": "What is 3 + 4?"}]
OTHER_STREAMS = {
    "messages": ("/v1/messages", {"messages": ASK, "seed": 4, "max_tokens": 200, "temperature": 1}),
    "messages that think": ("/v1/messages", {"messages": ASK, "seed": 5, "max_tokens": 300, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    "messages that call": ("/v1/messages", {"messages": ASK, "seed": 6, "max_tokens": 300, "tools": [TOOL], "tool_choice": {"type": "any"}}),
    "responses": ("/v1/responses", {"input": ASK, "seed": 4, "max_output_tokens": 200, "temperature": 1, "ignore_eos": True}),
    "responses that think": ("/v1/responses", {"input": ASK, "seed": 5, "max_output_tokens": 300, "reasoning": {"effort": "high"}}),
    "responses that call": ("/v1/responses", {"input": ASK, "seed": 6, "max_output_tokens": 300, "tools": [FUNCTION], "tool_choice": "required"}),
    "generate": ("/generate", {"text": "1, 2,", "sampling_params": {"max_new_tokens": 150, "sampling_seed": 3, "ignore_eos": True}}),
    "generate, ids and scores": ("/generate", {"input_ids": [5, 6, 7], "rid": "mine", "return_logprob": True, "sampling_params": {"max_new_tokens": 120, "n": 2, "temperature": 1, "sampling_seed": 3, "ignore_eos": True}}),
}
VARYING = {"usage", "created_at", "id", "item_id", "call_id", "e2e_latency", "cached_tokens", "spec_draft_tokens", "spec_accepted_tokens", "num_retractions"}


def without(document, names):
    if isinstance(document, dict):
        return {k: without(v, names) for k, v in document.items() if k not in names}
    return [without(v, names) for v in document] if isinstance(document, list) else document


def story_of(events):
    """What a stream tells: its events without what differs from server to server, and neighboring pieces of
    a text as one."""
    story, ids = [], {}
    for at, event in enumerate(events):
        if event == b"[DONE]":
            continue
        document = json.loads(event)
        assert document.get("type") != "error" and "error" not in document, document
        if "sequence_number" in document:
            assert document.pop("sequence_number") == at
        if "output_index" in document:
            ids.setdefault(document["output_index"], set()).update({document.get("item_id"), document.get("item", {}).get("id")} - {None})
        delta = document.get("delta")
        text = delta if isinstance(delta, str) else next((delta[k] for k in ("text", "thinking", "partial_json") if k in delta), None) if delta else None
        key = without({k: v for k, v in document.items() if text is None or k != "delta"}, VARYING)
        if text is not None and story and story[-1][0] == key and story[-1][1] is not None:
            story[-1] = (key, story[-1][1] + text)
        else:
            story.append((key, text))
    assert all(len(names) == 1 for names in ids.values())
    return story


def last_of(events):
    """Of events that repeat all: the last one of each choice. Each has more than the one before."""
    last = {}
    for event in events:
        if event == b"[DONE]":
            continue
        document = json.loads(event)
        index, ids = document.get("index", 0), document["output_ids"]
        assert index not in last or (ids[: len(last[index]["output_ids"])] == last[index]["output_ids"] and document["meta_info"]["id"] == last[index]["meta_info"]["id"])
        assert index not in last or last[index]["meta_info"]["finish_reason"] is None
        last[index] = document
    return {k: without(v, VARYING) for k, v in last.items()}


@pytest.mark.parametrize("name", OTHER_STREAMS)
def test_any_stream_goes_on_elsewhere(route, servers, name):
    path, body = OTHER_STREAMS[name]
    body = {**body, "stream": True}
    tell = last_of if path == "/generate" else story_of
    after = (b"partial_json" if path == "/v1/messages" else b"arguments.delta") if "call" in name else b"data: "
    got = while_its_server_dies(route, servers, path, body, after)
    straight = servers[1].post(path, body).body
    assert tell(events_of(got.split(b"\n"))) == tell(events_of(straight.split(b"\n")))


LONG = [{"prompt": f"{i}. " + "Tell me of a river and a hill. " * 40, "max_tokens": 1, "seed": 1} for i in range(8)]


def cached(router, body):
    return router.post("/v1/completions", body).json["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_restarted_router_and_another_one_know_what_is_cached(route, servers):
    """The servers tell what prompts they were sent, by any router."""
    for s in servers:
        assert s.post("/flush_cache").status == 200
    flags = ("--decode", ",".join(of(s) for s in servers))
    first, beside = route(*flags).wait_up(2), route(*flags).wait_up(2)
    assert [cached(first, b) for b in LONG] == [0] * 8
    before = [s["requests"] for s in first.servers()]
    assert min(before) > 0  # both have some
    told = lambda r: r.figure("hadal_router_learned_prefixes_total")
    wait_until(lambda: told(beside) == told(first) > 0, "the other one has heard of them")
    assert all(cached(beside, b) > 0 for b in LONG)
    again = route(*flags).wait_up(2)
    wait_until(lambda: told(again) == told(first), "it knows what the first one knew")
    assert all(cached(again, b) > 0 for b in LONG)
    assert again.figure("hadal_router_cached_tokens_total") > 0


def test_FT64_router_dies(servers):
    """Its streams end, and their requests with them; another one on its port answers at once and knows what is cached."""
    flags, port = ("--decode", ",".join(of(s) for s in servers)), free_port()
    body = {"prompt": "The dog that a router forgot. " * 40, "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
    first = Router(*flags, port=port).wait_up(2)
    with stream(first, "POST", "/v1/completions", {**body, "stream": True}) as reply:
        events = events_of(reply)
        next(events)
        first.process.kill()
        first.process.communicate()
        with contextlib.suppress(http.client.HTTPException, OSError):
            assert b"[DONE]" not in list(events)
    for s in servers:
        wait_until(lambda s=s: s.loads()["num_running_reqs"] == 0, "nobody is left of those whose router died")
    second = Router(*flags, port=port).wait_up(2)
    assert cached(second, {**body, "max_tokens": 4}) > 128
    second.close()


def test_FT65_stale_picture(route):
    """What a router believes to be cached is gone: the prompt is computed again, to the same text."""
    both = [Server(*FLAGS) for _ in range(2)]
    r = route("--decode", ",".join(of(s) for s in both)).wait_up(2)
    body = {"prompt": "A story of a cat that nobody remembers. " * 40, "max_tokens": 12, "temperature": 0}
    want = r.post("/v1/completions", body).json
    again = r.post("/v1/completions", body).json
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 128
    for s in both:
        assert s.post("/flush_cache").status == 200
    got = r.post("/v1/completions", body).json  # before a report says so
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert got["choices"][0]["text"] == again["choices"][0]["text"] == want["choices"][0]["text"]
    for s in both:
        s.close()


def test_a_flushed_server_is_known_to_be_empty(route):
    server = Server(*FLAGS)
    router = route("--decode", of(server)).wait_up(1)
    guessed = lambda: router.figure("hadal_router_cached_tokens_total")
    cached(router, LONG[0])
    assert guessed() == 0
    cached(router, LONG[0])
    assert guessed() > 0
    wait_until(lambda: router.figure("hadal_router_learned_prefixes_total") > 0, "it has heard of the prompt")
    assert server.post("/flush_cache").status == 200
    wait_until(lambda: router.figure("hadal_router_forgotten_servers_total") == 1, "it has heard of the flush")
    before = guessed()
    assert cached(router, LONG[0]) == 0 and guessed() == before
    server.close()


def test_servers_of_a_name_join_and_leave(route, tmp_path):
    """As those of a Kubernetes service without an address of its own."""
    hosts, port = Hosts(tmp_path), free_port()
    resolve = hosts.resolve
    resolve(2)
    here = [Server(*FLAGS, "--host", f"127.0.0.{n}", port=port) for n in (2, 3)]
    router = route("--decode", f"dns:many.example:{port}", launcher=hosts.launcher).wait_up(1)
    names = lambda: sorted(s["server"] for s in router.servers() if s["up"])
    ask = lambda i: router.post("/v1/completions", {"prompt": f"{i}, ", "max_tokens": 4, "seed": i}).status
    body = json.dumps({"prompt": "1", "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
    with router.socket() as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        read_until(s, b"data: ")
        resolve(2, 3)
        wait_until(lambda: names() == [f"127.0.0.{n}:{port}" for n in (2, 3)], "the second one has joined")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:  # together, so that one server is not enough
            assert set(pool.map(ask, range(8))) == {200}
        assert {s["server"]: s["requests"] for s in router.servers()}[f"127.0.0.3:{port}"] > 0
        resolve(3)
        wait_until(lambda: [s["server"] for s in router.servers() if not s["gone"]] == [f"127.0.0.3:{port}"], "the first one leaves")
        before = [s["requests"] for s in router.servers() if s["gone"]]
        assert {ask(i) for i in range(4)} == {200}
        assert [s["requests"] for s in router.servers() if s["gone"]] in (before, [])  # none: its last stream has ended
        assert b"[DONE]" in read_all(s)  # what runs there ends there
    wait_until(lambda: names() == [f"127.0.0.3:{port}"], "it has left")
    resolve()  # nobody knows the name: the last answer holds
    assert {ask(i) for i in range(4)} == {200} and names() == [f"127.0.0.3:{port}"]
    for s in here:
        s.close()


def test_a_draining_server_loses_nothing(route, servers):
    leaving = Server(*FLAGS)
    router = route("--decode", f"{of(leaving)},{of(servers[0])}").wait_up(2)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        first = [pool.submit(router.post, "/v1/chat/completions", {**CHAT, "seed": i, "max_tokens": 100, "ignore_eos": True}) for i in range(8)]
        wait_until(lambda: leaving.loads()["num_running_reqs"] > 0, "it has work")
        leaving.signal(signal.SIGTERM)
        later = [pool.submit(router.post, "/v1/chat/completions", {**CHAT, "seed": i}) for i in range(16)]
        assert {r.result().status for r in first + later} == {200}
    assert leaving.wait() == 0  # by itself: a second signal would end it at once


def test_keys(route):
    env = {"HADAL_API_KEY": "k" * 16, "HADAL_ADMIN_KEY": "a" * 16}
    server = Server(*FLAGS, env=env)
    router = route("--decode", of(server), env=env)
    key, admin = ({"Authorization": "Bearer " + c * 16} for c in "ka")
    wait_until(lambda: router.get("/health").status == 200, "the server is up")
    assert router.post("/v1/chat/completions", CHAT).status == 401
    assert router.get("/metrics").status == 401
    assert router.post("/v1/chat/completions", CHAT, headers=key).status == 200
    assert router.post("/flush_cache", headers=key).status == 403
    assert router.post("/flush_cache", headers=admin).status == 200
    server.close()


@pytest.mark.parametrize(
    "flags, names",
    [
        ((), "--decode"),
        (("--decode", "host"), "HOST:PORT"),
        (("--decode", "a:1,a:1"), "twice"),
        (("--decode", "dns:host"), "HOST:PORT"),
        (("--decode", "a:1", "--prefill", "a:b"), "--prefill"),
        (("--decode", "a:1", "--host", "0.0.0.0"), "--api-key-file"),
    ],
)
def test_refused(refused, flags, names):
    assert names in refused("router", "--port", "0", *flags)
