"""hadal serve as a process: start, keys, admin endpoints, metrics, draining, faults."""

import concurrent.futures
import json
import os
import signal
import socket
import ssl
import subprocess

import pytest
from conftest import HADAL
from serving import TINY, Server, events_of, read_all, reset, wait_until
from test_weight_ways import Starting

CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def plain():
    server = Server("--metrics-compat", "both")
    yield server
    server.close()


@pytest.fixture(scope="module")
def null():
    """Tokens out of thin air: everything but the model."""
    server = Server("--backend", "null", "--max-running", "64", "--kv-tokens", "65536")
    yield server
    server.close()


def stream_of(server, body):
    c = server.connection()
    c.request("POST", "/v1/completions", body=json.dumps({**body, "stream": True}), headers={"Content-Type": "application/json"})
    return c, c.getresponse()


def quiet(server):
    load = server.loads()
    return load["num_running_reqs"] + load["num_waiting_reqs"] == 0 and load["num_used_tokens"] == 0


# ---- what the server says of itself ----


def test_start_says_what_matters(plain):
    assert f"http://127.0.0.1:{plain.port}" in plain.said and "curl " in plain.said and "sandbox" in plain.said


def test_health(plain):
    reply = plain.get("/health")
    assert (reply.status, reply.text) == (200, "ok")
    assert plain.get("/health_generate").status == 200
    assert plain.get("/version").json["engine"] == "hadal"


def test_health_while_it_starts():
    """Some servers are too fast to be met."""
    for _ in range(50):
        early = Starting()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            started = pool.submit(Server, "--threads", 1, port=early.port)
            reply = early.first_reply("/health")
            started.result().close()
        if reply.status == 503:
            break
    assert reply.text == "starting" and reply.headers["Retry-After"] == "1"


def test_model_and_server_info(plain):
    info = plain.get("/model_info").json
    assert info["model_type"] == "deepseek_v4" and info["is_generation"] is True
    assert plain.get("/get_model_info").json == info
    info = plain.get("/server_info").json
    assert info["port"] == 0 and info["max_total_num_tokens"] > 0
    assert info["internal_states"][0]["memory_usage"]["weight"] > 0


def test_metrics_count_a_request(plain):
    before = plain.stats()
    reply = plain.post("/v1/chat/completions", {**CHAT, "max_tokens": 20}).json
    after = plain.stats()
    usage = reply["usage"]

    def grew(name):
        return after[name] - before.get(name, 0)

    for prefix in ("hadal_", "sglang:", "vllm:"):
        assert grew(prefix + "prompt_tokens_total") == usage["prompt_tokens"]
        assert grew(prefix + "generation_tokens_total") >= usage["completion_tokens"]
        assert grew(prefix + "time_to_first_token_seconds_count") == 1
        assert grew(prefix + "e2e_request_latency_seconds_count") == 1
    assert grew("hadal_queue_time_seconds_count") == 1 and grew("hadal_steps_total") > 0
    assert after["hadal_expert_balancedness"] > 0 and after["process_resident_memory_bytes"] > 1e6


def test_metrics_are_well_formed(plain):  # E10
    plain.post("/v1/chat/completions", {**CHAT, "max_tokens": 2, 'no"such\nfield': 1})
    kinds, seen = {}, set()
    for line in plain.get("/metrics").text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert name not in kinds, f"{name} twice"
            kinds[name] = kind
        elif not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            float(value)
            assert series not in seen and "such" not in series
            seen.add(series)
            name = series.split("{")[0]
            base = next((name[: -len(s)] for s in ("_bucket", "_sum", "_count") if name.endswith(s) and name[: -len(s)] in kinds), name)
            assert base in kinds, name
    buckets = [s for s in seen if s.startswith("hadal_time_to_first_token_seconds_bucket")]
    assert len(buckets) > 10 and 'le="+Inf"' in "".join(buckets)


def test_histogram_buckets_grow(plain):
    counts = [float(line.rsplit(" ", 1)[1]) for line in plain.get("/metrics").text.splitlines() if line.startswith("hadal_inter_token_latency_seconds_bucket")]
    assert counts == sorted(counts)


def test_live_view(plain):
    c = plain.connection()
    c.request("GET", "/engine/live")
    seen = []
    busy, _ = stream_of(plain, {**LONG, "max_tokens": 8000})  # until it was seen
    for event in events_of(c.getresponse()):
        seen.append(json.loads(event))
        if any(o["requests"] for o in seen) and any("experts" in o for o in seen) and len(seen) > 4:
            break
    c.close()
    busy.close()
    wait_until(lambda: plain.loads()["num_running_reqs"] == 0, "the request is freed")
    assert {"t", "stats", "rates", "ttft_ms", "itl_ms", "requests"} <= set(seen[0])
    running = next(o for o in seen if o["requests"])["requests"][0]
    assert running["phase"] in ("waiting", "prefill", "decode") and running["prompt_tokens"] > 0
    experts = next(o for o in seen if "experts" in o)["experts"]
    assert all(len(layer) == experts["n_experts"] for layer in experts["layers"])


def test_page_is_locked_down(plain):  # E14
    reply = plain.get("/")
    assert reply.status == 200 and "text/html" in reply.headers["Content-Type"]
    policy = reply.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy


# ---- control ----


def test_pause_and_continue(plain):  # E07
    assert plain.post("/pause_generation", {"mode": "retract"}).status == 200
    assert plain.post("/pause_generation", {"mode": "retract"}).status == 200
    wait_until(lambda: plain.loads()["paused"], "the step thread rests")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(plain.post, "/v1/completions", {"prompt": "Hello", "max_tokens": 3})
        wait_until(lambda: plain.loads()["num_waiting_reqs"] == 1, "it waits")
        assert plain.get("/health").status == 200  # paused on purpose is not sick
        assert plain.post("/continue_generation", {}).status == 200
        assert waiting.result().status == 200
    assert plain.post("/continue_generation").status == 200


def test_flush(plain):
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 20, "max_tokens": 2}
    plain.post("/v1/completions", body)
    assert plain.post("/v1/completions", body).json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert plain.post("/flush_cache").status == 200
    assert plain.post("/v1/completions", body).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_flush_while_busy(plain):
    plain.post("/pause_generation", {"mode": "in_place"})
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        busy = pool.submit(plain.post, "/v1/completions", {"prompt": "Hello", "max_tokens": 3})
        wait_until(lambda: plain.loads()["num_waiting_reqs"] == 1, "it waits")
        assert plain.post("/flush_cache").status == 200  # one that waits holds no pages
        plain.post("/continue_generation")
        patient = pool.submit(plain.get, "/flush_cache?timeout=60")
        assert busy.result().status == 200 and patient.result().status == 200
    assert plain.get("/flush_cache?timeout=never").status == 400


@pytest.mark.threads
def test_abort(plain):
    for stop in ({"rid": "story-"}, {"abort_all": True}):
        plain.post("/pause_generation", {"mode": "in_place"})
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            busy = pool.submit(plain.post, "/v1/completions", LONG, headers={"X-Request-Id": "story-1"})
            wait_until(lambda: plain.loads()["num_waiting_reqs"] == 1, "it waits")
            assert plain.post("/abort_request", {"rid": "another"}).status == 200
            assert plain.loads()["num_waiting_reqs"] == 1
            assert plain.post("/abort_request", stop).status == 200
            plain.post("/continue_generation")
            assert busy.result().json["choices"][0]["finish_reason"] == "abort"
    wait_until(lambda: quiet(plain), "nothing is left")


CONTROL_ROWS = [
    ("/abort_request", {}, 400),
    ("/abort_request", {"rid": 5}, 400),
    ("/abort_request", {"rid": ""}, 400),
    ("/abort_request", {"abort_all": "yes"}, 400),
    ("/abort_request", {"rid": "unknown"}, 200),
    ("/abort_request", [], 400),
    ("/pause_generation", {"mode": "sideways"}, 400),
    ("/pause_generation", {"mode": 1}, 400),
    ("/start_profile", {}, 400),
    ("/stop_profile", {}, 400),
    ("/start_profile", {"num_steps": 0}, 400),
]


@pytest.mark.parametrize("path, body, status", CONTROL_ROWS)
def test_control_refuses(plain, path, body, status):
    reply = plain.post(path, body)
    assert reply.status == status, reply.text
    if status == 400:
        assert reply.json["error"]["type"] == "invalid_request_error"


def test_profile(serve, tmp_path):
    s = serve("--trace-dir", tmp_path)
    assert s.post("/start_profile", {"profile_prefix": "../x"}).status == 400
    assert s.post("/start_profile", {"profile_prefix": "mine"}).status == 200
    assert s.post("/start_profile").status == 409
    s.post("/v1/completions", {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True})
    reply = s.post("/stop_profile")
    assert reply.status == 200
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("mine-") and str(file) in reply.text
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["name"] for e in events}
    assert "step" in names and "/v1/completions" in names
    assert sum(e["args"].get("steps", 0) for e in events) > 0


# ---- what is not there ----

NO_PATHS = {
    "E04 leading up": "../../etc/passwd",
    "E04 from the root": "/etc/passwd",
    "E04 a link": "LINK",
    "E05 a pipe": "FIFO",
    "E05 a device": "/dev/zero",
    "E05 own memory": "/proc/self/mem",
    "E05 a folder": "/tmp",
    "E09 a missing file": "/no/such/file",
    "E09 a forbidden file": "/etc/shadow",
}
LOADERS = ["/update_weights_from_disk", "/v1/load_lora_adapter", "/load_lora_adapter", "/load_weights", "/update_weights_from_distributed", "/save_remote_model", "/reload"]


@pytest.mark.parametrize("row", NO_PATHS)
def test_no_path_is_taken_from_a_request(plain, tmp_path, row):
    """Nothing loads on demand, and wherever a name may stand it is a name: whatever it leads to, the
    answer is the same, and a pipe finds nobody who opens it."""
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to("/etc/passwd")
    path = {"FIFO": str(fifo), "LINK": str(link)}.get(NO_PATHS[row], NO_PATHS[row])
    for loader in LOADERS:
        said = [plain.post(loader, {key: name for key in ("model_path", "lora_path", "lora_name", "path")}) for name in (path, "model")]
        assert said[0].status in (404, 501) and said[0].body == said[1].body

    def answer(name):
        reply = plain.post("/v1/chat/completions", {**CHAT, "max_tokens": 2, "temperature": 0, "model": name})
        return reply.status, reply.json["choices"]

    assert answer(path) == answer("another-model")
    for field in ("lora_path", "chat_template", "prompt_embeds"):
        assert plain.post("/v1/chat/completions", {**CHAT, "max_tokens": 2, field: path}).status == 400
    content = [{"type": "image_url", "image_url": {"url": f"file://{path}"}}]
    assert plain.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}).status == 400
    assert plain.post("/start_profile", {"profile_prefix": path}).status == 400
    with pytest.raises(OSError):
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))


def test_E06_weights_stay_what_they_were(plain):
    """Nobody can exchange them, not even two at once."""
    body = {**CHAT, "max_tokens": 8, "temperature": 0}
    before = plain.post("/v1/chat/completions", body).json["choices"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(plain.post, LOADERS[0], {"model_path": str(TINY)}) for _ in range(2)]
        assert {b.result().status for b in both} <= {404, 501}
    assert plain.post("/v1/chat/completions", body).json["choices"] == before


ADMIN = ["/flush_cache", "/abort_request", "/pause_generation", "/continue_generation", "/start_profile", "/stop_profile"]


def test_E02_admin_paths_of_a_public_server(serve, tmp_path):
    """There is one listener: who can be reached by others does nothing for them without the admin key,
    also where no key is set at all."""
    s = serve("--backend", "null", "--host", "0.0.0.0", "--insecure-no-auth")
    assert s.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200
    for path in ADMIN:
        reply = s.post(path, {"abort_all": True})
        assert (reply.status, reply.code) == (403, "admin_key_needed"), path
    keys = tmp_path / "keys"
    keys.write_text("a-user-key-0123456789\n")
    keys.chmod(0o600)
    s = serve("--backend", "null", "--api-key-file", keys, env={"HADAL_ADMIN_KEY": "the-admin-key-0123456789"})
    for path in ADMIN:
        assert s.post(path, {"abort_all": True}).status == 401, path
        assert s.post(path, {"abort_all": True}, headers={"x-api-key": "a-user-key-0123456789"}).status == 403, path
    assert s.post("/flush_cache", headers={"x-api-key": "the-admin-key-0123456789"}).status == 200


@pytest.mark.parametrize("value", ["0", "-5", "1000000000", "x", ""])
@pytest.mark.parametrize("name", ["X-Request-Timeout", "X-Request-Deadline", "Request-Timeout", "Grpc-Timeout", "X-Envoy-Upstream-Rq-Timeout-Ms", "X-Stainless-Timeout"])
def test_R50_deadlines_in_headers_are_without_effect(plain, name, value):
    """Clients send them for themselves; no answer is cut by one, or refused for one."""
    body = {**LONG, "max_tokens": 6, "temperature": 0}
    said = plain.post("/v1/completions", body, headers={name: value}).json
    assert said["choices"] == plain.post("/v1/completions", body).json["choices"]
    assert said["usage"]["completion_tokens"] == 6


# ---- clients that leave ----


EXPENSIVE = {
    "a long prompt": {"prompt": "aB3 " * 20000},
    "a crowd of prompts": {"prompt": ["word " * 5000] * 8},
    "a schema": {"prompt": "a", "json_schema": json.dumps({"enum": ["x" * 40 + str(i) for i in range(3000)]})},
    "a pattern": {"prompt": "a", "regex": "([a-z]{1,20} ){1,20}"},
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_FT04_leaves_while_its_request_is_read(plain, name):
    """Tokenizing and compiling end for nobody: no answer is computed, and nothing is left."""
    before = plain.stats()["hadal_generation_tokens_total"]
    plain.post("/pause_generation", {"mode": "in_place"})
    body = json.dumps({**LONG, **EXPENSIVE[name], "max_tokens": 400}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for leave in (socket.socket.close, reset, reset):
        s = plain.socket()
        s.sendall(head.encode() + body)
        leave(s)
    wait_until(lambda: plain.stats()["hadal_living_answers"] == 0 and plain.loads()["num_waiting_reqs"] == 0, "nobody waits")
    plain.post("/continue_generation")
    assert plain.post("/v1/completions", {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True}).status == 200
    wait_until(lambda: quiet(plain), "nothing is left")
    assert plain.stats()["hadal_generation_tokens_total"] - before < 400


@pytest.mark.threads
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_vanished_client_frees_its_request(plain, stream, leave):  # FT06, FT07
    """Its tokens would take seconds: that they do not is seen by how few were generated."""
    before = plain.stats()["hadal_generation_tokens_total"]
    body = json.dumps({**LONG, "max_tokens": 4000, "stream": stream})
    s = plain.socket()
    s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    wait_until(lambda: plain.loads()["num_running_reqs"] == 1, "it runs")
    leave(s)
    wait_until(lambda: quiet(plain), "its place and its pages are free")
    assert plain.stats()["hadal_generation_tokens_total"] - before < 3000


def test_the_others_are_untouched(plain):  # FT09
    body = {**LONG, "max_tokens": 40, "seed": 1}
    alone = plain.post("/v1/completions", body).json["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        honest = pool.submit(plain.post, "/v1/completions", body)
        for _ in range(5):
            c, response = stream_of(plain, LONG)
            response.readline()
            reset(c.sock)
        assert honest.result().json["choices"][0]["text"] == alone
    wait_until(lambda: quiet(plain), "nothing is left")


def test_slow_reader_is_cut_off_and_the_rest_goes_on(serve):  # FT12
    s = serve("--backend", "null", "--stream-buffer-kb", "16", "--stall-seconds", "1", "--kv-tokens", "80000")
    with s.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({**LONG, "max_tokens": 8000, "n": 8, "stream": True})
        slow.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(lambda: s.stats()["hadal_http_slow_readers_total"] == 1, "it is cut off")
        assert s.post("/v1/completions", {"prompt": "Hi", "max_tokens": 5}).status == 200
        wait_until(lambda: quiet(s), "its place is free")


@pytest.mark.threads
def test_churn(null):  # FT11
    for round in range(60):
        s = null.socket()
        body = json.dumps({**LONG, "stream": bool(round % 2)})
        s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        if round % 3:
            s.recv(100)
        reset(s)
    wait_until(lambda: quiet(null), "nothing is left")
    assert null.post("/v1/completions", {"prompt": "Hi", "max_tokens": 5}).status == 200


# ---- load ----


@pytest.mark.threads
def test_many_at_once_are_right(null):
    def ask(i):
        reply = null.post("/v1/completions", {"prompt": f"number {i}", "max_tokens": 16, "ignore_eos": True, "seed": i})
        assert reply.status == 200
        return reply.json["usage"]["completion_tokens"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(200))) == {16}


def test_full_queue(serve):  # FT17
    s = serve("--queue", "2", "--max-running", "1", "--context", "512")
    s.post("/pause_generation", {"mode": "in_place"})
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        kept = [pool.submit(s.post, "/v1/completions", {"prompt": "Hi", "max_tokens": 2}) for _ in range(3)]
        wait_until(lambda: s.loads()["num_waiting_reqs"] == 3, "one for the place, two for the queue")
        refused = s.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2})
        assert refused.status == 429 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert s.get("/health").status == 200
        s.post("/continue_generation")
        assert [k.result().status for k in kept] == [200, 200, 200]


# ---- the end ----


@pytest.mark.threads
def test_sigterm_drains(serve):  # FT36, E11
    s = serve()
    c, response = stream_of(s, {**LONG, "max_tokens": 60})
    response.readline()
    kept = s.connection()
    assert s.get("/health", connection=kept).status == 200
    s.signal(signal.SIGTERM)
    wait_until(lambda: s.get("/health").text == "draining", "it says so")
    late = s.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, connection=kept)
    assert late.status == 503 and late.code == "draining" and late.headers["Retry-After"]
    events = list(events_of(response))
    assert events[-1] == b"[DONE]"
    c.close()
    kept.close()
    assert s.wait() == 0


def test_drain_ends_in_time(serve):  # FT36
    s = serve("--drain-seconds", "0")
    c, response = stream_of(s, {**LONG, "max_tokens": 4000})
    response.readline()
    s.signal(signal.SIGTERM)
    assert s.wait() == 0
    c.close()


def test_second_signal_is_at_once(serve):  # FT37
    s = Server()
    c, response = stream_of(s, {**LONG, "max_tokens": 8000})
    response.readline()
    s.signal(signal.SIGINT)
    wait_until(lambda: s.get("/health").status == 503, "it drains")
    s.signal(signal.SIGINT)
    assert s.wait() == 130
    c.close()


def test_restart_on_the_same_port():  # FT43
    first = Server("--backend", "null")
    port = first.port
    stream_of(first, LONG)
    first.process.kill()
    first.wait()
    second = subprocess.Popen([HADAL, "serve", TINY, "--backend", "null", "--no-sandbox", "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert f":{port}".encode() in second.stdout.readline()
    second.terminate()
    second.communicate()
    assert second.returncode == 0


def test_second_instance_is_told(plain, refused):  # L06, L30
    assert f"port {plain.port}" in refused("serve", TINY, "--port", plain.port, code=4)


REFUSED_STARTS = [
    (["--host", "0.0.0.0"], 2, "--api-key-file"),
    (["--host", "no.such.host.invalid"], 4, "no.such.host.invalid"),
    (["--port", "65536"], 2, "out of range"),
    (["--port", "-1"], 2, "out of range"),
    (["--api-key", "secret"], 2, "--api-key"),
    (["--api-key-file", "/no/such/file"], 2, "/no/such/file"),
    (["--tls-cert", "/etc/passwd"], 2, "--tls-key"),
    (["--backend", "magic"], 2, "magic"),
    (["--log-requests", "/no/such/dir/log"], 4, "/no/such/dir/log"),
    (["--trace-dir", "/no/such/dir"], 4, "--trace-dir /no/such/dir: No such file"),
    (["--trace-dir", "/etc/passwd"], 4, "--trace-dir /etc/passwd: Not a directory"),
    (["--cors", "https://a.example/"], 2, "'https://a.example/' is no origin"),
    (["--cors", "https://a.example,b.example"], 2, "'b.example' is no origin"),
    (["--cors", "null"], 2, "'null' is no origin"),
    (["--cors", ",".join(f"https://a{i}" for i in range(17))], 2, "--cors: more than 16"),
    (["--public-name", "http://a.example"], 2, "'http://a.example' is no host name"),
    (["--public-name", "a.example:80"], 2, "'a.example:80' is no host name"),
]


@pytest.mark.parametrize("flags, code, word", REFUSED_STARTS)
def test_refused_starts(refused, flags, code, word):  # L06, L07, L08, L10, L11
    assert word in refused("serve", TINY, *(["--port", "0"] if "--port" not in flags else []), *flags, code=code)


def test_refused_keys(refused, tmp_path):  # L09, L11
    def check(text, mode=0o600):
        file = tmp_path / "keys"
        file.write_text(text)
        file.chmod(mode)
        return refused("serve", TINY, "--port", "0", "--api-key-file", file)

    assert "16" in check("short\n")
    assert "no key" in check("# only a comment\n\n")
    assert "chmod" in check("a-key-that-is-long-enough\n", 0o644)
    assert "character" in check("a key with spaces in it\n")
    assert "at most" in check("a" * 513 + "\n")


def test_missing_model(refused):  # L13
    refused("serve", "/no/such/model", "--port", "0", "--no-sandbox")


# ---- keys and TLS ----


def test_keys_are_reloaded(serve, tmp_path):
    file = tmp_path / "keys"
    file.write_text("first-key-0123456789\n")
    file.chmod(0o600)
    s = serve("--api-key-file", file)

    def status(key):
        return s.post("/tokenize", {"prompt": "a"}, headers={"Authorization": f"Bearer {key}"}).status

    assert s.get("/health").status == 200 and s.get("/metrics").status == 401
    assert status("first-key-0123456789") == 200 and status("other-key-0123456789") == 401
    file.write_text("# rotated\nother-key-0123456789\n")
    s.signal(signal.SIGHUP)
    wait_until(lambda: status("other-key-0123456789") == 200, "the new key is known")
    assert status("first-key-0123456789") == 401
    file.write_text("bad\n")
    s.signal(signal.SIGHUP)
    wait_until(lambda: s.get("/health").status == 200, "it goes on")
    assert status("other-key-0123456789") == 200


def test_tenants_do_not_share_prefixes(serve, tmp_path):
    file = tmp_path / "keys"
    file.write_text("first-key-0123456789\nother-key-0123456789\n")
    file.chmod(0o600)
    s = serve("--api-key-file", file)
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 20, "max_tokens": 2}

    def cached(key):
        reply = s.post("/v1/completions", body, headers={"x-api-key": key}).json
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("first-key-0123456789") == 0
    assert cached("first-key-0123456789") > 0
    assert cached("other-key-0123456789") == 0


def test_tls(serve, tmp_path):
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"], capture_output=True)
    if made.returncode:
        pytest.skip("openssl is not installed")
    s = serve("--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(s.socket()) as t:
        body = json.dumps({**LONG, "max_tokens": 10, "stream": True})
        t.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = read_all(t)
    assert answer.startswith(b"HTTP/1.1 200") and b"[DONE]" in answer
    with s.socket() as plain_text:
        plain_text.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" not in read_all(plain_text)


# ---- sandbox, log, crash dump ----


def test_sandbox(serve):  # L37
    s = serve()
    status = dict(line.split(":\t", 1) for line in open(f"/proc/{s.process.pid}/status").read().splitlines() if ":\t" in line)
    assert status["NoNewPrivs"] == "1" and status["Umask"] == "0077"
    limits = open(f"/proc/{s.process.pid}/limits").read().splitlines()
    assert [line.split()[4:6] for line in limits if line.startswith("Max core")] == [["0", "0"]]
    if "no seccomp" not in s.said:
        for task in os.listdir(f"/proc/{s.process.pid}/task"):
            text = open(f"/proc/{s.process.pid}/task/{task}/status").read()
            assert "Seccomp:\t2" in text
    free = serve("--no-sandbox")
    assert "Seccomp:\t0" in open(f"/proc/{free.process.pid}/status").read()


def test_replay(serve, hadal, tmp_path):
    log = tmp_path / "log"
    s = serve("--log-requests", log)
    s.post("/v1/chat/completions", {**CHAT, "max_tokens": 12, "temperature": 1, "seed": 7})
    s.post("/v1/messages", {**CHAT, "model": "tiny-v4", "max_tokens": 12})
    s.post("/generate", {"text": "Once", "sampling_params": {"max_new_tokens": 6}})
    assert s.post("/v1/completions", {"prompt": [5] * 10, "max_tokens": 10**6}).status == 400  # not computed: no line
    c, response = stream_of(s, {**LONG, "max_tokens": 12, "n": 2})
    assert list(events_of(response))[-1] == b"[DONE]"
    c.close()
    s.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["path"] for line in lines] == ["/v1/chat/completions", "/v1/messages", "/generate", "/v1/completions"]
    assert lines[0]["output_tokens"] == 12 and lines[0]["ttft_ms"] > 0
    again = hadal("replay", log, TINY)
    assert again.returncode == 0 and again.stdout.splitlines()[-1].startswith("4 the same, 0 different"), again.stdout + again.stderr
    lines[0]["answer"] = lines[0]["answer"].replace('"content":"', '"content":"X')
    log.write_text("\n".join(map(json.dumps, lines)))
    again = hadal("replay", log, TINY)
    assert again.returncode == 1 and "1 different" in again.stdout
    log.write_text("{}\nnonsense\n")
    assert hadal("replay", log, TINY).returncode == 2


def test_replayed_responses_continue_each_other(serve, hadal, tmp_path):
    """Whole, streamed and in the background; one of another log is named."""
    log = tmp_path / "log"
    s = serve("--log-requests", log)
    kept = {"max_output_tokens": 8, "temperature": 1}
    first = s.post("/v1/responses", {"input": "Once", **kept}).json["id"]
    second = s.post("/responses", {"input": "More", "previous_response_id": first, "background": True, **kept}).json["id"]
    wait_until(lambda: s.get(f"/v1/responses/{second}").json["status"] in ("completed", "incomplete"), "it ends")
    events = s.post("/v1/responses", {"input": "And", "previous_response_id": second, "stream": True, **kept}).text
    third = json.loads(events.split("data: ")[1].split("\n")[0])["response"]["id"]
    assert s.post("/v1/responses", {"input": "Now", "previous_response_id": third, **kept}).status == 200
    s.close()
    lines = log.read_text().splitlines()
    assert len(lines) == 4
    again = hadal("replay", log, TINY)
    assert again.returncode == 0 and again.stdout.splitlines()[-1].startswith("4 the same, 0 different"), again.stdout + again.stderr
    log.write_text("\n".join(lines[1:]))
    again = hadal("replay", log, TINY)
    assert again.stdout.count("continues a response that is not in the file before it") == 3 and again.stdout.splitlines()[-1].endswith("3 skipped")


def test_crash_dump_is_replayed(hadal, tmp_path):  # FT41
    dump = tmp_path / "dump"
    s = Server("--crash-dump", dump)
    s.post("/pause_generation", {"mode": "in_place"})
    c = s.connection()
    body = {"prompt": "Hello \u00e9\n", "max_tokens": 5}
    c.request("POST", "/v1/completions", body=json.dumps(body), headers={"Content-Type": "application/json"})
    wait_until(lambda: s.loads()["num_waiting_reqs"] == 1, "it waits")
    assert dump.read_bytes() == b""
    s.signal(signal.SIGSEGV)
    assert s.wait() != 0
    c.close()
    head, rest = dump.read_text().split("\n", 1)
    assert json.loads(head)["path"] == "/v1/completions" and json.loads(rest) == body
    again = hadal("replay", dump, TINY)
    assert again.returncode == 0 and "1 without an answer to compare" in again.stdout, again.stdout + again.stderr


def test_crash_dump_outlives_restarts(hadal, tmp_path):  # FT41
    """Whoever starts it again need not have looked: the dump is kept aside, and every start says so."""
    dump, kept = tmp_path / "dump", tmp_path / "dump.1"
    body = json.dumps({"prompt": "Hello", "max_tokens": 2})
    dump.write_text(json.dumps({"path": "/v1/completions", "seed": 1, "bytes": len(body)}) + f"\n{body}\n")
    for _ in range(2):
        s = Server("--backend", "null", "--crash-dump", dump)
        s.close()
        line = next(line for line in s.log.decode().splitlines() if "crash_dump_kept" in line)
        assert f'replay="hadal replay {kept} {TINY}"' in line and "dumps=1" in line
    assert dump.read_bytes() == b""
    again = hadal("replay", kept, TINY)
    assert again.returncode == 0 and "1 without an answer to compare" in again.stdout, again.stdout + again.stderr
    kept.unlink()
    s = Server("--backend", "null", "--crash-dump", dump)
    s.close()
    assert b"crash_dump_kept" not in s.log
