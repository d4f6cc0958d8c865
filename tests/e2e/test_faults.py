"""What fails beneath a serving process: memory, clock, device, descriptors, log, rights.

drive_faults is hadal serve whose memory, clock and device fail on command.
"""

import concurrent.futures
import fcntl
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import time

import pytest
from conftest import HADAL, as_root
from serving import LEAK_CHECKED, PATIENCE, TINY, Server, events_of, read_all, read_until, wait_until

FAULTS = pathlib.Path(HADAL).parent / "drive_faults"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Faulty(Server):
    """A server that takes commands, over the null device where flags name no other."""

    def __init__(self, *flags):
        super().__init__(*([] if "--backend" in flags else ["--backend", "null"]), *flags, program=FAULTS, stdin=subprocess.PIPE)

    def tell(self, command):
        """Returns how many requests for memory were left until one failed."""
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline().split()[1])


@pytest.fixture
def faulty():
    started = []

    def start(*flags):
        started.append(Faulty(*flags))
        return started[-1]

    yield start
    for server in started:
        if server.process.returncode is None:  # else its test saw its end
            server.close()


# ---- memory ----

ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
CALLED = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "5"},
]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "array", "items": {"type": "number"}}}, "required": ["a"]}
SHORT_OF_MEMORY = {
    "chat": ("/v1/chat/completions", HI),
    "chat with tools": ("/v1/chat/completions", {"messages": CALLED, "tools": [ADD], "max_tokens": 3, "stop": ["x"]}),
    "chat stream": ("/v1/chat/completions", {**HI, "stream": True, "stream_options": {"include_usage": True}, "zzz": 1}),
    "schema": ("/v1/chat/completions", {**HI, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}),
    "pattern": ("/v1/chat/completions", {**HI, "regex": "(a|b)+c{2,5}"}),
    "logprobs": ("/v1/chat/completions", {**HI, "logprobs": True, "top_logprobs": 2}),
    "completions": ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "echo": True}),
    "generate": ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 3}}),
    "messages": ("/v1/messages", {**HI, "stream": True, "system": "be brief"}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
    "kept items": ("/v1/responses/resp_kept/input_items", None),
    "kept response": ("/v1/responses/resp_kept", None),
    "what was not in the background": ("/v1/responses/resp_kept/cancel", {}),
    "tokenize": ("/tokenize", {"prompt": "hello there"}),
    "detokenize": ("/detokenize", {"tokens": [5, 6, 7]}),
    "models": ("/v1/models", None),
    "info": ("/server_info", None),
    "metrics": ("/metrics", None),
    "history": ("/engine/history", None),
    "requests": ("/engine/requests?request_id=nobody", None),
    "openapi": ("/openapi.json", None),
    "health": ("/health_generate", None),
    "abort": ("/abort_request", {"rid": "nobody"}),
    "flush": ("/flush_cache", {}),
    "refused": ("/v1/chat/completions", {"messages": 5}),
}
ON_THE_CPU = {"schema", "pattern", "logprobs"}


def exchange(server, path, body):
    """The status, and whether the answer was whole; None: the connection was dropped."""
    text = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    with server.socket() as s:
        try:
            s.sendall(head.encode() + text)
        except OSError:
            pass
        answer = read_all(s)
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None


@pytest.mark.parametrize("lasting", ["", " all"])
@pytest.mark.parametrize("name", SHORT_OF_MEMORY)
def test_every_request_for_memory_fails_once(short_of_memory, name, lasting):
    """FT29: whichever fails, that request is answered or dropped, and the next one is served."""
    path, body = SHORT_OF_MEMORY[name]
    server = short_of_memory["cpu" if name in ON_THE_CPU else "null"]
    usual = exchange(server, path, body)
    assert usual == (400 if name in ("refused", "what was not in the background") else 200)
    seen, n, step = set(), 1, 5 if LEAK_CHECKED else 1
    while True:
        server.tell(f"memory {n}{lasting}")
        seen.add(exchange(server, path, body))
        left = server.tell("memory 0")
        assert exchange(server, path, body) == usual, f"after failure {n}"
        if left > 1 or (left == 1 and not lasting):
            break
        n += step
    assert seen <= {usual, 500, 503, None}, seen
    assert n > 1, "nothing failed"
    wait_until(lambda: server.loads()["num_running_reqs"] == 0, "nothing is left")


@pytest.fixture(scope="module")
def short_of_memory():
    servers = {backend: Faulty("--no-sandbox", "--backend", backend, "--threads", "1") for backend in ("null", "cpu")}
    assert servers["null"].post("/v1/responses", {"input": "hi", "max_output_tokens": 1, "rid": "kept"}).json["id"] == "resp_kept"
    yield servers
    for server in servers.values():
        server.close()


# ---- the device ----


def test_device_that_hangs(faulty):
    """E11, FT20, FT35: work is due and nothing ends: sick; the process itself goes on answering."""
    s = faulty("--health-seconds", "1", "--queue", "1", "--max-running", "1")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        s.tell("hang 1")
        assert s.get("/health").text == s.get("/ping").text == "ok"  # nothing is due
        held = [pool.submit(s.post, "/v1/chat/completions", HI) for _ in range(2)]
        wait_until(lambda: s.get("/health").text == "stalled", "it says so")
        reply = s.get("/health")
        assert reply.status == 503 and reply.headers["Retry-After"]
        assert s.get("/v1/models").status == 200 and s.get("/metrics").status == 200
        wait_until(lambda: s.post("/v1/chat/completions", HI).status == 429, "the queue fills, nobody waits for it")
        assert s.get("/health_generate").text == "stalled"
        s.tell("hang 0")
        assert [h.result().status for h in held] == [200, 200]
    wait_until(lambda: s.get("/health").text == "ok", "it recovers")


@pytest.mark.parametrize("running", [False, True])
def test_client_leaves_while_the_device_hangs(faulty, running):
    """FT03, FT05, FT10: out of the queue or out of a step that is under way; the other is served."""
    s = faulty("--max-running", "1")
    s.tell("hang 1")
    body = json.dumps(HI)
    request = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    both = []
    for n in (1, 2):
        both.append(s.socket())
        both[-1].sendall(request)
        wait_until(lambda: s.stats()["hadal_living_answers"] == n, "it is there")
    leaves, stays = both if running else reversed(both)
    leaves.close()
    wait_until(lambda: s.stats()["hadal_http_clients_gone_total"] == 1, "it was seen to leave")
    s.tell("hang 0")
    assert read_all(stays).startswith(b"HTTP/1.1 200")
    stays.close()
    wait_until(lambda: s.stats()["hadal_living_answers"] == 0, "both places are free")


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_is_not_made(faulty, stream):
    """FT33: the stage behind the steps stands still. It alone is no sickness while steps end; then
    they wait for it, and that is; afterwards nothing of any answer is missing."""
    s = faulty("--health-seconds", "1", "--max-running", "1")
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "seed": 1}
    right = s.post("/v1/completions", body).json["choices"][0]["text"]
    s.tell("mute 1")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        held = pool.submit(s.post, "/v1/completions", {**body, "stream": stream})
        wait_until(lambda: s.get("/health").text == "stalled", "it says so")
        assert s.get("/v1/models").status == 200
        s.tell("mute 0")
        reply = held.result()
    pieces = [json.loads(e)["choices"][0]["text"] for e in events_of(reply.body.split(b"\n")) if e != b"[DONE]"] if stream else [reply.json["choices"][0]["text"]]
    assert "".join(pieces) == right
    wait_until(lambda: s.get("/health").text == "ok", "it recovers")


def test_sigterm_while_the_device_hangs():
    """FT36, FT42: what cannot finish does not keep the process; 75 asks to be started again."""
    s = Faulty("--health-seconds", "1", "--drain-seconds", "1")
    s.tell("hang 1")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        lost = pool.submit(exchange, s, "/v1/chat/completions", HI)
        wait_until(lambda: s.stats()["hadal_living_answers"] == 1, "it is there")
        s.signal(signal.SIGTERM)
        assert s.wait() == 75
        assert b"drain_cut_short" in s.log and b"device_stuck" in s.log
        assert lost.result() is None


def test_second_signal_while_the_device_hangs():
    """FT37"""
    s = Faulty()
    s.tell("hang 1")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        lost = pool.submit(exchange, s, "/v1/chat/completions", HI)
        wait_until(lambda: s.stats()["hadal_living_answers"] == 1, "it is there")
        s.signal(signal.SIGTERM)
        wait_until(lambda: s.get("/health").text == "draining", "it drains")
        s.signal(signal.SIGTERM)
        assert s.wait() == 130
        assert lost.result() is None


def test_crash_before_the_submitter_is_back(tmp_path):
    """FT41: the step may crash before the thread that submitted for it runs on; the dump has the request."""
    dump = tmp_path / "dump"
    s = Faulty("--crash-dump", dump)
    s.tell("crash 1")
    c = s.connection()
    c.request("POST", "/v1/chat/completions", body=json.dumps(HI), headers={"Content-Type": "application/json"})
    assert s.wait() == -signal.SIGSEGV
    c.close()
    head, rest = dump.read_text().split("\n", 1)
    assert json.loads(head)["path"] == "/v1/chat/completions" and json.loads(rest) == HI


def test_abort_before_the_submission(faulty):
    """An abort that comes between the beginning of a call and its submission holds for it."""
    s = faulty()
    s.tell("hold 1")
    c = s.connection()
    large = "x" * 70000  # for a worker, so that no HTTP thread is held
    c.request("POST", "/v1/completions", body=json.dumps({"prompt": ["a", "b"], "max_tokens": 4000, "ignore_eos": True, "zzz": large}), headers={"Content-Type": "application/json", "X-Request-Id": "one"})
    wait_until(lambda: s.stats()["hadal_living_requests"] == 1, "it begins")
    assert s.post("/abort_request", {"rid": "one"}).status == 200
    s.tell("hold 0")
    assert [choice["finish_reason"] for choice in json.loads(c.getresponse().read())["choices"]] == ["abort", "abort"]
    c.close()


# ---- the clock ----


def test_wall_clock_jumps(faulty):
    """FT85, L35: ten years to and fro, in the middle of a stream; only what is dated changes."""
    s = faulty("--queue-seconds", "60", "--ping-seconds", "300")
    years = 10 * 365 * 86400
    c = s.connection()
    c.request("POST", "/v1/completions", body=json.dumps({"prompt": "a", "max_tokens": 3000, "stream": True, "ignore_eos": True}), headers={"Content-Type": "application/json"})
    events = events_of(c.getresponse())
    for off in (years, -years, 0, -years):
        s.tell(f"clock {off}")
        next(events)
        made = s.post("/v1/chat/completions", HI)
        assert made.status == 200 and abs(made.json["created"] - time.time() - off) < PATIENCE
        assert s.get("/health").status == 200
    assert list(events)[-1] == b"[DONE]"
    s.signal(signal.SIGHUP)
    wait_until(lambda: s.get("/health").status == 200, "it goes on")
    figures = s.stats()
    assert figures["hadal_http_clients_gone_total"] == 0 and figures["hadal_http_timeouts_total"] == 0
    assert 0 <= figures["hadal_e2e_request_latency_seconds_sum"] < PATIENCE * 6


# ---- pages ----


def test_pages_that_nobody_gave_back(faulty):
    """FT28: the audit of an idle engine finds them, says so and takes all back; the process and its streams go on."""
    s = faulty()
    fresh = s.stats()
    s.post("/v1/chat/completions", HI)
    wait_until(lambda: s.stats()["hadal_audits_total"] == 1, "the first audit")
    s.tell("leak 1")
    lost = s.post("/v1/chat/completions", HI)
    assert s.stats()["hadal_kv_used_tokens"] > 0
    wait_until(lambda: s.stats()["hadal_audits_total"] == 2, "the second audit")
    now = s.stats()
    assert now["hadal_audits_failed_total"] == 1 and now["hadal_living_requests"] == 0
    assert now["hadal_kv_available_tokens"] == fresh["hadal_kv_available_tokens"] and now["hadal_kv_used_tokens"] == 0
    assert now["hadal_prompt_tokens_total"] == 2 * lost.json["usage"]["prompt_tokens"]  # counters go on
    assert s.get("/health").status == 200
    again = s.post("/v1/chat/completions", HI).json
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    wait_until(lambda: s.stats()["hadal_audits_total"] == 3, "the third audit")
    assert s.stats()["hadal_audits_failed_total"] == 1
    s.close(missed=1)


@pytest.mark.skipif(not LEAK_CHECKED, reason="only a build with the address sanitizer looks for leaks")
@pytest.mark.parametrize("flags", [[], ["--no-sandbox"]])
def test_leaked_memory_is_found(faulty, flags):
    """FT28: with the sandbox and without it, so that no server of these tests ends well with a leak."""
    s = faulty(*flags)
    assert ("traced for leaks" in s.said) == (not flags)
    s.tell("lose 50")
    s.signal(signal.SIGTERM)
    assert s.wait() != 0
    assert b"ERROR: LeakSanitizer: detected memory leaks" in s.log and b"byte(s) leaked" in s.log, s.log.decode()


# ---- the files of the model ----


@pytest.mark.parametrize("dump", [False, True])
def test_weights_cut_short_beneath_a_server(tmp_path, dump):
    """FT83: they stay mapped, so it ends, with the reason as its last words; a dump is written first."""
    model = shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("golden", "eval"))
    flags = ["--crash-dump", tmp_path / "dump"] if dump else []
    s = Server("--no-sandbox", *flags, model=model)
    endless = json.dumps({**HI, "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    with s.socket() as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                       b"Content-Length: %d\r\n\r\n%s" % (len(endless), endless))  # fmt: skip
        read_until(client, b"data: ")
        os.truncate(model / "model.safetensors", 200_000)
        assert b"[DONE]" not in read_all(client)
    assert s.wait() == 4
    assert s.log.splitlines()[-1] == b"error: a mapped file was cut short or cannot be read any more"
    if dump:
        assert b'"path":"/v1/chat/completions"' in (tmp_path / "dump").read_bytes()


@pytest.mark.parametrize("at", [0, 8, 5000, 200_000])
def test_weights_cut_short_while_they_are_read(tmp_path, at):
    """FT83: at any moment of the start it is a sentence, an answer, or the end with a reason."""
    model = shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("golden", "eval"))
    program = subprocess.Popen([HADAL, "generate", model, "-p", "hi", "--max-tokens", "2", "-q"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    os.truncate(model / "model.safetensors", at)
    said = program.communicate()[1]
    assert program.returncode in (0, 2, 4)
    assert program.returncode == 0 or (said.startswith(b"error: ") and said.count(b"\n") == 1), said


# ---- descriptors ----


def test_no_descriptor_is_left(serve):
    """FT82, L23: clients wait in the queue of the kernel, and all is well when others leave."""
    s = serve("--backend", "null", "--http-threads", "2")
    kept = s.connection()
    assert s.get("/health", connection=kept).status == 200
    used = len(os.listdir(f"/proc/{s.process.pid}/fd"))
    resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE, (used + 8, used + 8))
    crowd = [s.socket() for _ in range(40)]
    wait_until(lambda: len(os.listdir(f"/proc/{s.process.pid}/fd")) == used + 8, "all are used up")
    assert s.get("/health", connection=kept).status == 200
    assert s.post("/v1/chat/completions", HI, connection=kept).status == 200
    for c in crowd:
        c.close()
    assert s.post("/v1/chat/completions", HI).status == 200
    kept.close()


def test_few_descriptors_from_the_start(refused):
    """L23: they are raised as far as allowed; with fewer than are needed nothing starts."""

    def few(n):
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (n, n))

    assert "ulimit" in refused("serve", TINY, "--port", "0", "--backend", "null", code=4, preexec_fn=few(100))
    s = Server("--backend", "null", preexec_fn=few(200))
    kept = s.connection()
    assert s.get("/health", connection=kept).status == 200  # the first request brings the schema's along

    def came_and_open():
        now = s.stats(connection=kept)
        return now["hadal_http_accepted_connections_total"] + now["hadal_http_refused_connections_total"], now["hadal_http_connections"]

    before, _ = came_and_open()
    held = [s.socket() for _ in range(300)]
    for c in held:
        c.close()
    wait_until(lambda: came_and_open() == (before + 300, 1), "the server has seen them all come and go")
    assert s.get("/health").status == 200
    kept.close()
    s.close()
    assert b"fewer_connections" in s.log


# ---- the log ----


def test_log_that_nobody_reads(tmp_path):
    """FT84: a full pipe costs lines, which are counted and told, and no answer."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    s = Server("--backend", "null", "--api-key-file", key_file(tmp_path, KEY), stderr=writer)
    (tmp_path / "keys").write_text("too short\n")
    for _ in range(64):  # each says that the keys were not read again
        s.signal(signal.SIGHUP)
        assert s.post("/v1/chat/completions", HI, headers=bearer(KEY)).status == 200
    assert len(os.read(reader, 65536)) <= 4096
    s.signal(signal.SIGHUP)
    text = b""
    while b"log_dropped lines=" not in text:
        text += os.read(reader, 4096)
    os.close(writer)
    os.close(reader)
    s.signal(signal.SIGTERM)
    assert s.process.wait() == 0


# ---- keys, quotas, users ----

KEY, OTHER = "first-key-0123456789", "other-key-0123456789"


def key_file(folder, *keys):
    file = folder / "keys"
    file.write_text("\n".join(keys) + "\n")
    file.chmod(0o600)
    return file


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_key_quotas(serve, tmp_path):
    """FT18: what one key uses up, another still has."""
    s = serve("--backend", "null", "--api-key-file", key_file(tmp_path, KEY, OTHER), "--key-requests", "2", "--key-tokens-per-minute", "50")

    def ask(key, n):
        return s.post("/v1/completions", {"prompt": "a", "max_tokens": n, "ignore_eos": True}, headers=bearer(key))

    assert ask(KEY, 48).status == 200
    wait_until(lambda: ask(KEY, 1).status == 429, "it is charged")
    late = ask(KEY, 1)
    assert late.code == "key_quota" and 1 <= int(late.headers["Retry-After"]) <= 60
    assert s.get("/v1/models", headers=bearer(KEY)).status == 200
    assert ask(OTHER, 1).status == 200


def test_many_at_once_do_not_overdraw(serve, tmp_path):
    """What a request may use at most is set aside when it is taken; what it did not use comes back."""
    budget, n = 1000, 40
    s = serve("--backend", "null", "--null-step-us", "1000", "--max-running", "64", "--api-key-file", key_file(tmp_path, KEY, OTHER), "--key-tokens-per-minute", str(budget))

    def ask(key, **body):
        return s.post("/v1/chat/completions", {**HI, "ignore_eos": True, **body}, headers=bearer(key))

    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        replies = list(pool.map(lambda _: ask(KEY, max_tokens=95), range(n)))
    refilled = budget * (time.monotonic() - start) / 60
    used = sum(r.json["usage"]["total_tokens"] for r in replies if r.status == 200)
    assert 0 < used <= budget + refilled
    late = [r for r in replies if r.status != 200]
    assert late and all(r.status == 429 and r.code == "key_quota" and int(r.headers["Retry-After"]) >= 1 for r in late)
    def begin():
        c = s.connection()
        body = {**HI, "max_tokens": 900, "ignore_eos": True, "stream": True}
        c.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json", **bearer(OTHER)})
        response = c.getresponse()
        return response.status == 200 and next(events_of(response)) and c

    for _ in range(3):  # asked for much, used little: what was set aside is there again
        c = wait_until(begin, "the rest came back")
        assert ask(OTHER, max_tokens=900).status == 429
        c.close()
    too_much = ask(OTHER, max_tokens=budget)
    assert too_much.status == 400 and too_much.code == "key_quota" and too_much.json["error"]["param"] == "max_tokens"


def test_answers_without_a_bound_fit_their_quota(serve, tmp_path):
    s = serve("--backend", "null", "--api-key-file", key_file(tmp_path, KEY), "--key-tokens-per-minute", "200")
    reply = s.post("/v1/chat/completions", {"messages": HI["messages"], "ignore_eos": True}, headers=bearer(KEY))
    assert reply.json["usage"]["total_tokens"] == 200 and reply.json["choices"][0]["finish_reason"] == "length"


def test_quotas_need_keys(refused):
    assert "--api-key-file" in refused("serve", TINY, "--port", "0", "--key-requests", "1")
    assert "--user" in refused("serve", TINY, "--port", "0", "--group", "nogroup")


def test_broken_key_file_keeps_the_old_keys():
    """FT44, L11: and says so."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = key_file(pathlib.Path(folder), KEY)
        s = Server("--backend", "null", "--api-key-file", file)
        for broken in ("short\n", "", None):
            file.unlink(missing_ok=True) if broken is None else file.write_text(broken)
            s.signal(signal.SIGHUP)
            assert s.post("/v1/chat/completions", HI, headers=bearer(KEY)).status == 200
        s.close()
    assert b"keys_not_reloaded" in s.log and b"keys_reloaded" not in s.log


@pytest.fixture
def public_model():
    """A model that everyone may read."""
    folder = pathlib.Path("/tmp") / f"hadal-public-{os.getpid()}"
    folder.mkdir(mode=0o755)
    for file in TINY.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
            (folder / file.name).chmod(0o644)
    yield folder
    shutil.rmtree(folder)


@as_root
def test_root_becomes_a_user(serve, public_model):
    """L32"""
    s = serve("--backend", "null", "--user", "nobody", model=public_model)
    assert s.post("/v1/chat/completions", HI).status == 200
    for task in os.listdir(f"/proc/{s.process.pid}/task"):
        status = open(f"/proc/{s.process.pid}/task/{task}/status").read()
        ids = {line.split()[0]: set(line.split()[1:]) for line in status.splitlines() if line.startswith(("Uid", "Gid", "Groups", "Cap"))}
        assert "0" not in ids["Uid:"] | ids["Gid:"] | ids["Groups:"]
        assert ids["CapEff:"] == ids["CapPrm:"] == {"0" * 16}


@as_root
def test_users_that_cannot_be(refused, tmp_path):
    start = ["serve", TINY, "--port", "0", "--backend", "null"]
    assert "no such user" in refused(*start, "--user", "no-such-user-here")
    assert "no such group" in refused(*start, "--user", "nobody", "--group", "no-such-group")
    assert "root" in refused(*start, "--user", "0")
    assert "SIGHUP" in refused(*start, "--user", "nobody", "--api-key-file", key_file(tmp_path, KEY))


@as_root
def test_root_is_warned(serve):
    """L32"""
    s = serve("--backend", "null")
    s.close()
    assert b"running_as_root" in s.log


# ---- the host ----


def test_process_that_was_frozen(faulty):
    """FT86: it goes on where it was, and nobody is cut off for the time that it did not have."""
    s = faulty("--health-seconds", "1", "--stall-seconds", "1", "--ping-seconds", "1")
    s.tell("hang 1")
    c = s.connection()
    c.request("POST", "/v1/completions", body=json.dumps({"prompt": "a", "max_tokens": 50, "stream": True, "ignore_eos": True}), headers={"Content-Type": "application/json"})
    wait_until(lambda: s.stats()["hadal_living_answers"] == 1, "it is there")
    s.signal(signal.SIGSTOP)
    time.sleep(2.5)  # more than every patience above
    s.signal(signal.SIGCONT)
    s.tell("hang 0")
    assert list(events_of(c.getresponse()))[-1] == b"[DONE]"
    wait_until(lambda: s.get("/health").text == "ok", "it is well")


def test_without_standard_descriptors():
    """L39, L31: closed ones are replaced; a reader of the output that left is no death."""

    def close_all():
        for fd in range(3):
            os.close(fd)

    assert subprocess.run([HADAL, "version"], preexec_fn=close_all).returncode in (0, 4)
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run([HADAL, "version"], stdout=writer, stderr=writer).returncode == 4
    os.close(writer)
