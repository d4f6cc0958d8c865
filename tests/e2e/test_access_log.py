"""--log-access: a line per request that ended, refused ones too, and nothing of what was said."""

import json
import socket
import stat
import time

import pytest
from serving import LEAK_CHECKED, read_all, reset, wait_until

SECRET, KEY = "xyzzy-plugh", "a-key-of-some-length"
HI = {"messages": [{"role": "user", "content": f"{SECRET} hi"}], "max_tokens": 3}
NULL = ("--backend", "null")
HOST = b"Host: localhost\r\n"


class Logged:
    def __init__(self, serve, folder, *flags, **options):
        self.path = folder / "access.log"
        self.server = serve(*NULL, "--log-access", self.path, *flags, **options)

    def lines(self, n):
        """The first n lines, once they are there; there must not be more."""
        wait_until(lambda: self.path.read_bytes().count(b"\n") >= n, f"{n} lines")
        text = self.path.read_text(encoding="ascii")
        assert text.count("\n") == n and SECRET not in text and KEY not in text
        return [json.loads(line) for line in text.splitlines()]

    def one(self):
        return self.lines(1)[0]


@pytest.fixture
def logged(serve, tmp_path):
    return lambda *flags, **options: Logged(serve, tmp_path, *flags, **options)


def test_an_answer(logged):
    log = logged()
    body = json.dumps(HI)
    started = time.time()
    connection = log.server.connection()  # once, and not through the checks of Server.request
    connection.request("POST", f"/v1/chat/completions?q={SECRET}", body, {"Content-Type": "application/json", "X-Request-Id": "mine", "Authorization": f"Bearer {SECRET}"})
    usage = json.loads(connection.getresponse().read())["usage"]
    connection.close()
    line = log.one()
    assert set(line) == {"time", "method", "path", "status", "prompt_tokens", "output_tokens", "first_token_ms", "ms", "request_id"}
    assert (line["method"], line["path"], line["status"], line["request_id"]) == ("POST", "/v1/chat/completions", 200, "mine")
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert 0 < line["first_token_ms"] <= line["ms"] < (time.time() - started) * 1000
    assert time.strptime(line["time"][:19], "%Y-%m-%dT%H:%M:%S") and line["time"].endswith("Z")
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_a_stream(logged):
    log = logged()
    connection = log.server.connection()
    connection.request("POST", "/v1/messages", json.dumps({**HI, "stream": True, "model": "m"}), {"Content-Type": "application/json"})
    connection.getresponse().read()
    line = log.one()
    assert line["status"] == 200 and line["output_tokens"] == 3 and "left" not in line
    assert 0 < line["first_token_ms"] <= line["ms"]


def test_a_background_response(logged):
    log = logged()
    connection = log.server.connection()
    connection.request("POST", "/v1/responses", json.dumps({"input": SECRET, "background": True, "max_output_tokens": 3}), {"Content-Type": "application/json"})
    connection.getresponse().read()
    assert log.one()["output_tokens"] == 3


def request(line, *headers, body=b""):
    return line + b" HTTP/1.1\r\n" + HOST + b"".join(h + b"\r\n" for h in headers) + b"\r\n" + body


JSON_HEADER, KEY_HEADER = b"Content-Type: application/json", b"Authorization: Bearer " + KEY.encode()
REFUSED = {
    "no such path": (request(b"GET /nothing?" + SECRET.encode()), 404, "/nothing"),
    "method": (request(b"DELETE /health"), 405, "/health"),
    "no key": (request(b"GET /v1/models"), 401, "/v1/models"),
    "wrong key": (request(b"GET /v1/models", b"Authorization: Bearer " + SECRET.encode()), 401, "/v1/models"),
    "host": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421, "/health"),
    "origin": (request(b"POST /v1/completions", b"Origin: http://evil.example", b"Content-Length: 0"), 403, "/v1/completions"),
    "version": (b"GET /health HTTP/1.2\r\nHost: localhost\r\n\r\n", 505, "/health"),
    "target": (request(b"GET /%zz?" + SECRET.encode()), 400, "/%zz"),
    "long target": (request(b"GET /" + b"a" * 9000), 414, "/" + "a" * 511),
    "arguments": (request(b"GET /health?" + b"&" * 500), 400, "/health"),
    "header": (request(b"GET /health", b"X-Test: " + b"a" * 9000), 431, "/health"),
    "framing": (request(b"POST /v1/completions", b"Content-Length: 3", b"Transfer-Encoding: chunked"), 400, "/v1/completions"),
    "announced body": (request(b"POST /v1/completions", JSON_HEADER, KEY_HEADER, b"Content-Length: 99999999"), 413, "/v1/completions"),
    "body": (request(b"POST /v1/completions", JSON_HEADER, KEY_HEADER, b"Transfer-Encoding: chunked", body=b"200000\r\n" + b" " * (1 << 21)), 413, "/v1/completions"),
    "media": (request(b"POST /v1/completions", b"Content-Type: text/plain", KEY_HEADER, b"Content-Length: 0"), 415, "/v1/completions"),
    "no JSON": (request(b"POST /v1/completions", JSON_HEADER, KEY_HEADER, b"Content-Length: 11", body=SECRET.encode()), 400, "/v1/completions"),
    "never whole": (request(b"POST /v1/completions", JSON_HEADER, KEY_HEADER, b"Content-Length: 11"), 408, "/v1/completions"),
    "headers never whole": (b"GET /health HTTP/1.1\r\nX-Test: a", 408, "/health"),
    "odd bytes": (request(b"GET /%22%C3%A9"), 404, "/%22%C3%A9"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_refusals(logged, row):
    data, status, path = REFUSED[row]
    log = logged("--header-seconds", "1", "--body-seconds", "1", "--max-body-mb", "1", env={"HADAL_API_KEY": KEY})
    with log.server.socket() as s:
        try:
            s.sendall(data)
            if status != 408:
                s.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused before all of it was sent
        read_all(s)
    line = log.one()
    # libmicrohttpd 1.0 tells of its own refusal of a framing as of a client that left
    assert line["status"] in ({status, 499} if row == "framing" else {status})
    assert path is None or line["path"] == path
    assert "prompt_tokens" not in line and line["ms"] >= 0


def test_quotas_and_drain_are_refusals_too(logged):
    log = logged("--key-requests", "1", "--null-step-us", "200000", env={"HADAL_API_KEY": KEY})
    key = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    first = log.server.connection()
    first.request("POST", "/v1/chat/completions", json.dumps({**HI, "stream": True}), key)
    answer = first.getresponse()
    second = log.server.connection()
    second.request("POST", "/v1/chat/completions", json.dumps(HI), key)
    assert second.getresponse().status == 429
    answer.read()
    assert sorted(line["status"] for line in log.lines(2)) == [200, 429]


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave(logged, stream):
    """Before the answer there is no status of ours; in the middle of it there was one."""
    log = logged("--null-step-us", "100000")
    body = json.dumps({**HI, "max_tokens": 500, "stream": stream}).encode()
    with log.server.socket() as s:
        s.sendall(request(b"POST /v1/chat/completions", JSON_HEADER, b"Content-Length: %d" % len(body), body=body))
        wait_until(lambda: log.server.loads()["num_running_reqs"], "a running request")
        if stream:
            s.recv(1)
        reset(s)
    wait_until(lambda: "/v1/chat/completions" in log.path.read_text(), "its line")
    line = next(json.loads(x) for x in log.path.read_text().splitlines() if "/v1/chat/completions" in x)
    assert line["status"] == (200 if stream else 499) and line["left"] is True


def test_every_request_has_one_line(logged):
    log = logged()
    connection = log.server.connection()
    for i in range(50):
        connection.request("GET", "/health" if i % 2 else "/nothing")
        connection.getresponse().read()
    assert [line["status"] for line in log.lines(50)] == [404, 200] * 25


def test_to_standard_error(serve):
    server = serve(*NULL, "--log-access", "-")
    connection = server.connection()
    connection.request("GET", "/health")
    connection.getresponse().read()
    server.close()
    lines = [json.loads(line) for line in server.log.decode().splitlines() if line.startswith("{")]
    assert [line["path"] for line in lines] == ["/health"]


def test_a_full_disk_costs_lines_and_nothing_else(serve):
    server = serve(*NULL, "--log-access", "/dev/full")
    assert all(server.get("/health").status == 200 for _ in range(3))
    server.close()
    assert server.log.count(b"access_log_failed") == 1


def test_a_file_that_cannot_be_made(refused):
    words = ["serve", "models/tiny-v4", "--port", "0", *NULL, *(["--no-sandbox"] if LEAK_CHECKED else [])]
    assert "/no/such" in refused(*words, "--log-access", "/no/such/file", code=4)
