"""Prefill and decode on different servers: a request has the same reply as on one server, whatever the
prefill server has, does or loses."""

import concurrent.futures
import json
import pathlib
import re
import socket

import pytest
from serving import Hosts, Server, TINY, free_port, read_all, wait_until
from test_router import Router, of, settled

FLAGS = ("--threads", "1", "--max-running", "8", "--kv-host", "0.2")
PAGE = 128  # tokens, of both models
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}


def ids(n, start=0):
    return [(i * 37 + start * 11) % 1000 + 5 for i in range(n)]


class Peer(Server):
    """A server with a role, and its figures."""

    listen = None

    def figure(self, name, **labels):
        """The sum of a figure's series that have these labels."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            name_of = line.split("{")[0]
            if name_of == f"hadal_pd_{name}" and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def stats_of(self, name, reason):
        (line,) = (line for line in self.get("/metrics").text.splitlines() if line.startswith(f"hadal_{name}{{") and f'reason="{reason}"' in line)
        return float(line.rsplit(" ", 1)[1])

    def wait_paired(self, n=1):
        wait_until(lambda: self.figure("peer_up") == n, f"{n} peers are up")
        return self

    def is_quiet(self):
        return self.figure("leases") == 0

    def ask(self, prefill, body, path="/v1/completions"):
        headers = {"X-Hadal-Prefill": prefill if isinstance(prefill, str) else of(prefill)}
        return self.post(path, body, headers=headers)


def role_flags(role, listen=None, peers=()):
    words = ["--role", role]
    if listen:
        words += ["--transfer-listen", listen]
    if peers:
        words += ["--prefill-peers", ",".join(p if isinstance(p, str) else f"{of(p)}={p.listen}" for p in peers)]
    return words


class Pd(Peer):
    """A small one."""

    def __init__(self, role, *flags, listen=None, peers=(), **options):
        if role != "decode":
            self.listen = listen or f"127.0.0.1:{free_port()}"
        super().__init__(*FLAGS, *role_flags(role, self.listen, peers), *flags, **options)


def read_some(s, n):
    data = b""
    while len(data) < n:
        piece = s.recv(n - len(data))
        assert piece, data
        data += piece
    return data


def flush(*servers):
    for s in servers:
        wait_until(lambda s=s: s.post("/flush_cache").status == 200, "the cache is empty")


@pytest.fixture(scope="module")
def alone():
    server = Server(*FLAGS)
    yield server
    server.close()


@pytest.fixture(scope="module")
def pair():
    prefill = Pd("prefill")
    decode = Pd("decode", peers=[prefill]).wait_paired()
    yield prefill, decode
    wait_until(lambda: prefill.is_quiet() and decode.is_quiet(), "no lease is left")
    decode.close()
    prefill.close()


BODIES = {
    "drafts": {"prompt": ids(300, 1), "max_tokens": 24, "seed": 1},
    "no drafts": {"prompt": ids(300, 2), "max_tokens": 20, "seed": 2, "draft_tokens": 0},
    "greedy": {"prompt": ids(400, 3), "max_tokens": 12, "temperature": 0},
    "choices": {"prompt": ids(260, 4), "max_tokens": 16, "seed": 4, "n": 3},
    "two prompts": {"prompt": [ids(150, 5), ids(270, 6)], "max_tokens": 12, "seed": 5},
    "log-probabilities": {"prompt": ids(280, 7), "max_tokens": 12, "seed": 6, "logprobs": 3},
    "of the prompt": {"prompt": ids(200, 8), "max_tokens": 4, "seed": 8, "echo": True, "logprobs": 1},
    "penalties": {"prompt": ids(200, 9), "max_tokens": 12, "seed": 7, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "constraint": {"prompt": ids(200, 10), "max_tokens": 30, "seed": 8, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
}


@pytest.mark.parametrize("name", BODIES)
def test_the_reply_is_that_of_one_server(alone, pair, name):
    prefill, decode = pair
    body = BODIES[name]
    before = decode.figure("pages_total", side="receive")
    said = decode.ask(prefill, body)
    assert said.status == 200, said.text
    assert settled(said.json) == settled(alone.post("/v1/completions", body).json)
    fetched = decode.figure("pages_total", side="receive") - before
    assert (fetched > 0) == (name != "of the prompt")  # its scores need computed rows


@pytest.mark.parametrize("n", [1, 2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE + 64, 1000])
def test_prompts_of_any_length(alone, pair, n):
    prefill, decode = pair
    body = {"prompt": ids(n, n), "max_tokens": 6, "seed": n}
    before = decode.figure("received_tokens_total")
    assert settled(decode.ask(prefill, body).json) == settled(alone.post("/v1/completions", body).json)
    assert decode.figure("received_tokens_total") - before == (n - 1) // PAGE * PAGE


def test_only_what_lacks_is_sent(alone, pair):
    prefill, decode = pair
    first, second = ids(2 * PAGE + 1, 50), ids(5 * PAGE + 1, 50)
    flush(prefill, decode)
    counts = []
    for prompt in (first, second, second):
        before = decode.figure("received_tokens_total")
        body = {"prompt": prompt, "max_tokens": 8, "seed": 5}
        assert settled(decode.ask(prefill, body).json) == settled(alone.post("/v1/completions", body).json)
        counts.append(decode.figure("received_tokens_total") - before)
    assert counts == [2 * PAGE, 3 * PAGE, 0]


@pytest.fixture
def busy(pair):
    """Requests that run on the decode server, so that a prefill there is predicted to take longer."""
    _, decode = pair
    body = json.dumps({"prompt": "1", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    clients = [decode.socket() for _ in range(4)]
    for s in clients:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    wait_until(lambda: decode.loads()["num_running_reqs"] == 4, "they run")
    yield
    for s in clients:
        s.close()


def test_a_conversation_by_the_router(alone, pair, busy):
    prefill, decode = pair
    router = Router("--decode", of(decode), "--prefill", of(prefill)).wait_up(2)
    try:
        wait_until(lambda: sum(s["running"] for s in router.servers() if s["role"] == "decode") == 4, "the router knows")
        before = decode.figure("leases_owned_total", side="receive")
        messages = [{"role": "user", "content": "".join(f"What is {i} + {i * 7}? " for i in range(100))}]
        for _ in range(2):
            body = {"messages": messages, "max_tokens": 12, "seed": 9}
            said = router.post("/v1/chat/completions", body).json
            assert settled(said) == settled(alone.post("/v1/chat/completions", body).json)
            messages = [*messages, said["choices"][0]["message"], {"role": "user", "content": "And 3 + 4? " * 120}]
        assert decode.figure("leases_owned_total", side="receive") == before + 2
    finally:
        router.close()


def test_many_at_once(alone, pair):
    prefill, decode = pair
    flush(prefill, decode)
    bodies = [{"prompt": ids(200 + 40 * i, 60 + i % 3), "max_tokens": 6, "seed": i} for i in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        said = list(pool.map(lambda b: settled(decode.ask(prefill, b).json), bodies))
    assert said == [settled(alone.post("/v1/completions", b).json) for b in bodies]
    wait_until(lambda: prefill.is_quiet() and decode.is_quiet(), "no lease is left")


def test_unknown_names_and_none(alone, pair):
    prefill, decode = pair
    body = {"prompt": ids(150, 70), "max_tokens": 4, "seed": 1}
    straight = settled(alone.post("/v1/completions", body).json)
    for name in ("127.0.0.1:1", "", "x" * 2000, "a b\tc"):
        assert settled(decode.ask(name, body).json) == straight
    assert decode.figure("skipped_total", reason="unknown") == 4
    assert settled(prefill.ask(prefill, body).json) == straight  # a role that fetches nothing


def test_a_client_that_leaves_ends_the_lease(pair):
    prefill, decode = pair
    flush(prefill, decode)
    prefill.post("/pause_generation", {"mode": "in_place"})
    try:
        body = json.dumps({"prompt": ids(900, 80), "max_tokens": 4}).encode()
        with decode.socket() as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-Hadal-Prefill: %s\r\nContent-Length: %d\r\n\r\n" % (of(prefill).encode(), len(body)) + body)
            for server, side in ((prefill, "send"), (decode, "receive")):
                wait_until(lambda: server.figure("leases", side=side) == 1, "the lease is open")
        wait_until(lambda: decode.is_quiet() and prefill.figure("leases_aborted_total", reason="cancel") >= 1, "the lease is over")
    finally:
        prefill.post("/continue_generation", {})
    wait_until(lambda: prefill.is_quiet() and prefill.loads()["num_running_reqs"] == 0, "nothing runs for it")


def under_way(prefill, decode, body, then):
    """Asks while the prefill server is paused, and calls then(). Returns the reply."""
    prefill.post("/pause_generation", {"mode": "in_place"})
    before = decode.figure("leases_total", side="receive")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        said = pool.submit(decode.ask, prefill, body)
        wait_until(lambda: decode.figure("leases_total", side="receive") > before, "the lease is open")
        then()
        return said.result()


def test_a_prefill_server_that_is_killed_and_comes_back(alone):
    prefill = Pd("prefill")
    decode = Pd("decode", peers=[prefill]).wait_paired()
    try:
        body = {"prompt": ids(700, 90), "max_tokens": 16, "seed": 3}
        straight = settled(alone.post("/v1/completions", body).json)
        assert settled(under_way(prefill, decode, body, prefill.process.kill).json) == straight
        prefill.wait()
        assert decode.is_quiet() and decode.figure("leases_aborted_total", reason="peer") == 1
        flush(decode)
        assert settled(decode.ask(prefill, body).json) == straight
        assert decode.figure("skipped_total", reason="down") == 1
        prefill = Pd("prefill", listen=prefill.listen, port=prefill.port)
        decode.wait_paired()
        flush(decode)
        assert settled(decode.ask(prefill, body).json) == straight
        assert decode.figure("leases_owned_total", side="receive") == 1
    finally:
        decode.close()
        prefill.close()


def test_a_prefill_server_that_takes_too_long(alone):
    prefill = Pd("prefill")
    decode = Pd("decode", "--prefill-seconds", "1", peers=[prefill]).wait_paired()
    try:
        body = {"prompt": ids(400, 95), "max_tokens": 8, "seed": 3}
        said = under_way(prefill, decode, body, lambda: None)
        assert settled(said.json) == settled(alone.post("/v1/completions", body).json)
        assert decode.figure("leases_aborted_total", reason="deadline") == 1
        prefill.post("/continue_generation", {})
        wait_until(prefill.is_quiet, "no lease is left")
    finally:
        decode.close()
        prefill.close()


def two_of_both_roles(*flags):
    ports = [free_port() for _ in range(4)]
    names = [f"127.0.0.1:{p}=127.0.0.1:{t}" for p, t in (ports[:2], ports[2:])]
    one = Pd("both", *flags, listen=f"127.0.0.1:{ports[1]}", port=ports[0], peers=[names[1]])
    two = Pd("both", *flags, listen=f"127.0.0.1:{ports[3]}", port=ports[2], peers=[names[0]])
    return [s.wait_paired(2) for s in (one, two)]  # one it fetches from, and one that fetches from it


@pytest.fixture(scope="module")
def both():
    one, two = two_of_both_roles()
    yield one, two
    wait_until(lambda: one.is_quiet() and two.is_quiet(), "no lease is left")
    one.close()
    two.close()


def test_both_roles_serve_each_other(alone, both):
    one, two = both
    for i, (here, there) in enumerate([(one, two), (two, one)]):
        before = here.figure("leases_owned_total", side="receive")
        body = {"prompt": ids(300, 100 + i), "max_tokens": 8, "seed": 3}
        assert settled(here.ask(there, body).json) == settled(alone.post("/v1/completions", body).json)
        assert here.figure("leases_owned_total", side="receive") == before + 1


def computed(server):
    """Prompt tokens that a server has computed itself."""
    lines = dict(line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines() if line and line[0] != "#")
    return sum(float(v) * (1 if "prompt_tokens_total" in k else -1) for k, v in lines.items() if k.split("{")[0] in ("hadal_prompt_tokens_total", "hadal_cached_tokens_total"))


def answered(prefill, decode, n):
    """The tokens of a prompt of n and of as many that the decode server has generated."""
    body = {"prompt": ids(n, 110), "max_tokens": n, "ignore_eos": True, "return_token_ids": True, "seed": 3}
    known = body["prompt"] + decode.ask(prefill, body).json["choices"][0]["token_ids"]
    assert len(known) == 2 * n
    wait_until(lambda: prefill.is_quiet() and decode.is_quiet(), "no lease is left")
    return known


def test_what_was_decoded_goes_back(alone, both):
    """The next turn of a conversation computes its new tokens only, on the prefill server too."""
    prefill, decode = both
    flush(prefill, decode)
    known = answered(prefill, decode, 150)
    before = [s.figure("received_tokens_total") for s in both], computed(prefill)
    body = {"prompt": known + ids(300, 111), "max_tokens": 8, "seed": 4}
    assert settled(decode.ask(prefill, body).json) == settled(alone.post("/v1/completions", body).json)
    wait_until(lambda: prefill.is_quiet() and decode.is_quiet(), "no lease is left")
    came = [s.figure("received_tokens_total") - b for s, b in zip(both, before[0], strict=True)]
    assert came == [PAGE, 2 * PAGE]  # of the answer to the prefill server; of the new prompt to the decode server
    assert computed(prefill) - before[1] == 2 * PAGE + 1


def test_an_answer_that_does_not_come_back_is_computed(alone):
    prefill, decode = two_of_both_roles("--prefill-seconds", "2")
    try:
        known = answered(prefill, decode, 150)
        body = {"prompt": known + ids(300, 111), "max_tokens": 8, "seed": 4}
        decode.post("/pause_generation", {"mode": "in_place"})
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            said = pool.submit(decode.ask, prefill, body)
            wait_until(lambda: prefill.figure("leases_aborted_total", reason="deadline") >= 1, "the prefill server waits no longer")
            decode.post("/continue_generation", {})
            assert settled(said.result().json) == settled(alone.post("/v1/completions", body).json)
        wait_until(lambda: prefill.is_quiet() and decode.is_quiet(), "no lease is left")
    finally:
        decode.close()
        prefill.close()


def test_strangers_harm_nobody(alone, pair):
    """X05, X06, X27: connections that say nothing, half a frame, a byte now and then, or what is no frame."""
    prefill, decode = pair
    host, port = prefill.listen.split(":")
    silent, half, slow, wrong, flood = (socket.create_connection((host, int(port)), timeout=60) for _ in range(5))
    challenge = read_some(half, 48)  # a header and a nonce
    half.sendall(challenge[:20])
    wrong.sendall(b"GET / HTTP/1.1\r\n\r\n" * 3)
    assert read_all(wrong)[48:] == b""  # closed at once
    flood.sendall(challenge[:28] + b"\xff" * 4 + challenge[32:])
    body = {"prompt": ids(300, 120), "max_tokens": 4, "seed": 3}
    owned = decode.figure("leases_owned_total", side="receive")
    assert settled(decode.ask(prefill, body).json) == settled(alone.post("/v1/completions", body).json)
    assert decode.figure("leases_owned_total", side="receive") == owned + 1
    more = [socket.create_connection((host, int(port)), timeout=60) for _ in range(40)]  # the oldest go
    for s in (silent, half, slow, flood):
        try:
            slow.sendall(challenge[:1])
        except OSError:
            pass
        read_all(s)
        s.close()
    for s in (*more, wrong):
        s.close()
    assert decode.figure("peer_up") == 1


# X09, X10: pages that the other side would not have computed
REFUSED = {
    "weights": ({"model": "copy"}, "this server has another weights"),
    "family": ({"model": TINY.parent / "tiny-v3"}, "this server has another model family"),
    "page size": ({"flags": ("--drafter", "none")}, "this server has another page size"),
    "number format": ({"flags": ("--backend", "ref")}, "this server has another number format"),
    "cache format": ({"flags": ("--kv-cache-dtype", "bfloat16")}, "this server has another number format"),
    "key": ({"env": {"HADAL_PEER_KEY": "another key of 16"}}, "was not made with the key"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_another_server_is_refused_by_name(pair, tmp_path, what):
    prefill, _ = pair
    options, why = REFUSED[what]
    options = dict(options)
    if options.get("model") == "copy":
        options["model"] = tmp_path / "copy"
        options["model"].mkdir()
        for f in filter(pathlib.Path.is_file, TINY.iterdir()):
            (options["model"] / f.name).write_bytes(f.read_bytes())
        weights = next(options["model"].glob("*.safetensors"))
        data = bytearray(weights.read_bytes())
        data[-1000:] = bytes(1000)
        weights.write_bytes(data)
    decode = Pd("decode", *options.pop("flags", ()), peers=[prefill], **options)
    try:
        wait_until(lambda: why in decode.get("/server_info").json["peers"][0]["why"], why)
        assert decode.ask(prefill, {"prompt": ids(3), "max_tokens": 1}).status == 200
        assert decode.figure("skipped_total", reason="down") == 1
        assert decode.get("/server_info").json["peers"][0]["up"] is False
    finally:
        decode.close()
    assert why in decode.log.decode()


def test_prefill_servers_of_a_name_join_and_leave(alone, tmp_path):
    """The list of the decode server names none of them."""
    hosts, port, at = Hosts(tmp_path), free_port(), free_port()
    key = {"HADAL_PEER_KEY": "p" * 32}
    flags = lambda n: (*FLAGS, "--host", f"127.0.0.{n}", *role_flags("prefill", f"127.0.0.{n}:{at}"))
    hosts.resolve(2)
    prefill = [Server(*flags(n), port=port, env=key) for n in (2, 3)]
    decode = Pd("decode", peers=[f"dns:many.example:{port}={at}"], env=key, launcher=hosts.launcher).wait_paired(1)

    def fetches(n, body):
        """Whether pages of this prompt come from a server; the answer is right in any case."""
        before = decode.figure("pages_total", side="receive")
        said = decode.ask(f"127.0.0.{n}:{port}", body)
        assert said.status == 200 and settled(said.json) == settled(alone.post("/v1/completions", body).json)
        return decode.figure("pages_total", side="receive") > before

    body = lambda i: {"prompt": ids(300, 900 + i), "max_tokens": 8, "seed": i}
    assert fetches(2, body(1)) and not fetches(3, body(2))
    hosts.resolve(2, 3)
    decode.wait_paired(2)
    assert fetches(3, body(3))
    hosts.resolve(3)
    wait_until(lambda: not fetches(2, body(4)) or flush(decode), "the first one leaves")
    assert fetches(3, body(5))
    prefill[0].close()
    names = lambda: [p["name"] for p in decode.get("/server_info").json["peers"]]
    wait_until(lambda: names() == [f"127.0.0.3:{port}"], "it is forgotten")
    hosts.resolve(2, 3)
    prefill[0] = Server(*flags(2), port=port, env=key)
    decode.wait_paired(2)
    assert fetches(2, body(6))
    decode.close()
    for s in prefill:
        s.close()


def test_one_request_id_is_in_every_log(tmp_path):
    """From the client to the router, the decode server and the prefill server."""
    prefill = Pd("prefill")
    decode = Pd("decode", "--log-access", tmp_path / "decode", peers=[prefill]).wait_paired()
    router = Router("--decode", of(decode), "--prefill", of(prefill), "--log-access", str(tmp_path / "router")).wait_up(2)
    hold = decode.post("/pause_generation")  # the prefill server is sooner
    assert hold.status == 200, hold.text
    with concurrent.futures.ThreadPoolExecutor() as pool:
        replies = [pool.submit(router.post, "/v1/completions", {"prompt": ids(900, 60 + i), "max_tokens": 2}, headers={"X-Request-Id": f"trace-{i}"}) for i in range(3)]
        wait_until(lambda: prefill.figure("leases_total", side="send") > 0, "a prompt is sent to the prefill server")
        assert decode.post("/continue_generation").status == 200
        assert [r.result().headers["X-Request-Id"] for r in replies] == [f"trace-{i}" for i in range(3)]
    wait_until(lambda: prefill.is_quiet() and decode.is_quiet(), "no lease is left")
    for process in (router, decode, prefill):
        process.close()
    for log in ("router", "decode"):
        lines = [json.loads(line) for line in (tmp_path / log).read_text().splitlines()]
        assert sorted(e["request_id"] for e in lines if e["path"] == "/v1/completions") == [f"trace-{i}" for i in range(3)]
    fetched = re.findall(rb"pages_fetched request_id=(trace-\d) peer=%s end=done" % of(prefill).encode(), decode.log)
    sent = re.findall(rb"pages_sent request_id=(trace-\d) peer=\S+:%d end=done" % decode.port, prefill.log)
    assert sorted(sent) == sorted(fetched) and fetched, prefill.log + decode.log


def shown(router, name, **labels):
    """The sum of a router's series with these labels."""
    lines = [line for line in router.get("/metrics").text.splitlines() if line.startswith(f"hadal_router_{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(f'{k}="{v}"' in line for k, v in labels.items()))


def test_the_router_shows_leases_links_waiting_and_cached_share(tmp_path):
    prefill = Pd("prefill")
    decode = Pd("decode", peers=[prefill]).wait_paired()
    router = Router("--decode", of(decode), "--prefill", of(prefill)).wait_up(2)
    body = {"prompt": ids(700, 80), "max_tokens": 2}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert prefill.post("/pause_generation").status == 200
        reply = pool.submit(decode.ask, prefill, body)  # its lease is granted, and no page comes
        wait_until(lambda: shown(router, "server_leases", server=of(decode), side="receive", state="granted") == 1, "the lease is shown")
        wait_until(lambda: shown(router, "server_leases", server=of(prefill), side="send", state="granted") == 1, "on the other side too")
        wait_until(lambda: shown(router, "server_waiting", server=of(decode), reason="prefill") == 1, "the request waits for pages")
        assert decode.stats_of("waiting_answers", reason="prefill") == 1
        assert prefill.post("/continue_generation").status == 200
        assert reply.result().status == 200
        wait_until(lambda: shown(router, "server_leases") == 0, "no lease is left")
        moved = decode.figure("peer_bytes_total", direction="in")
        assert moved > 100_000  # pages
        wait_until(lambda: shown(router, "link_bytes_total", server=of(decode), direction="in") >= moved, "the bytes are shown")
        wait_until(lambda: shown(router, "link_bytes_total", server=of(prefill), side="send", direction="out") >= moved, "on the other side too")
        (server,) = (s for s in router.servers() if s["server"] == of(decode))
        assert [(link["peer"], link["side"], link["up"]) for link in server["links"]] == [(of(prefill), "receive", True)]
        assert decode.post("/v1/completions", body).status == 200
        hits = decode.stats()["hadal_cache_hit_rate"]
        assert 0.5 < hits < 1
        wait_until(lambda: abs(shown(router, "server_cached_share", server=of(decode)) - hits) < 1e-9, "the cached share is shown")
        assert decode.post("/pause_generation").status == 200
        paused = pool.submit(decode.post, "/v1/completions", {"prompt": "1", "max_tokens": 1})
        wait_until(lambda: shown(router, "server_waiting", server=of(decode), reason="pause") == 1, "a request waits for the end of the pause")
        assert decode.post("/continue_generation").status == 200
        assert paused.result().status == 200
        long = [pool.submit(decode.post, "/v1/completions", {"prompt": "1", "max_tokens": 1500, "ignore_eos": True}) for _ in range(10)]
        wait_until(lambda: shown(router, "server_waiting", server=of(decode), reason="place") == 2, "two of ten wait for a place")
        decode.post("/abort_request", {"abort_all": True})
        for r in long:
            r.result()
    decode.close()
    prefill.close()
    wait_until(lambda: not any("links" in s for s in router.servers()), "nothing is shown of servers that are down")
    router.close()
