"""The HTTP layer under crowds and hostile clients: quotas, slow and vanishing clients by the
hundred, bodies that are too much, and bytes that stop anywhere."""

import resource
import socket
import time

import pytest
from serving import LEAK_CHECKED, read_all, reset, wait_until
from test_server_http import ADMIN, HOST, JSON, KEPT, USER, bearer, get, post, status_of

MANY = 300 if LEAK_CHECKED else 1000


def body_of(n, path=b"/wait", headers=b""):
    return post(b"x" * n, b"Content-Length: %d\r\n" % n + headers, path)


# ---- what takes long ----

WORKERS = 2


@pytest.mark.threads
@pytest.mark.parametrize("n", [10, 200000])
def test_what_takes_long_keeps_nobody_waiting(drive, n):
    """R10, FT32: with one HTTP thread, others are served while handlers of large bodies, or those that
    handed themselves over, take their time; one of them does not keep the next from beginning."""
    d = drive(threads=1)
    slow = [d.socket() for _ in range(WORKERS + 2)]
    for i, s in enumerate(slow):
        s.sendall(body_of(n))
        wait_until(lambda: d.state()["waiting"] == min(i + 1, WORKERS), "as many as there are threads for it")
    assert d.get("/echo").status == 200
    reset(slow.pop())  # before it is handled
    assert d.get("/go").status == 200
    for s in slow:
        answer = read_all(s)
        assert status_of(answer) == 200 and b'"n":%d,' % n in answer
        s.close()
    wait_until(lambda: d.state()["calls"] == 1, "nothing is left")


def test_end_while_a_large_body_waits(drive):
    d = drive(threads=1)
    large = [d.socket() for _ in range(3)]
    for s in large:
        s.sendall(body_of(100000, b"/hold"))
    wait_until(lambda: d.state()["held"] == 3, "all are held")


def test_all_bodies_together_are_bounded(drive):
    d = drive(bodies=600000)
    with d.socket() as first, d.socket() as second:
        first.sendall(post(b"x" * 250000, b"Content-Length: 260000\r\n"))
        wait_until(lambda: d.state()["bodies"] == 250000, "it is held")
        second.sendall(body_of(400000, b"/echo"))
        answer = read_all(second)
        assert status_of(answer) in (503, None)
        assert d.post("/echo", {}).status == 200
        first.sendall(b"x" * 10000)
        assert status_of(read_all(first)) == 200
    wait_until(lambda: d.state()["bodies"] == 0, "all is given back")
    assert d.request("POST", "/echo", body="x" * 200000, headers={"Content-Type": "application/json"}).status == 200


def test_any_number_of_headers(drive):
    reply = drive().get("/headers?n=40")
    assert reply.status == 200 and sum(h.startswith("X-") and h[2:].isdigit() for h in reply.headers) == 40


# ---- quotas ----


def test_calls_of_one_key_at_once(drive):
    d = drive(keys={"HADAL_API_KEY": USER, "HADAL_ADMIN_KEY": ADMIN}, key_calls=2)
    key = b"Authorization: Bearer " + USER.encode() + b"\r\n"
    busy = [d.socket() for _ in range(2)]
    for s in busy:
        s.sendall(body_of(2, b"/keep", key))
    wait_until(lambda: d.state()["held"] == 2, "both are handled")
    refused = d.post("/user", {}, headers=bearer(USER))
    assert refused.status == 429 and refused.code == "key_quota" and refused.headers["Retry-After"] == "1"
    assert d.post("/user", {}, headers=bearer(ADMIN)).status == 200  # another key
    assert d.post("/user", {}).status == 401
    for s in busy:
        s.close()
    wait_until(lambda: d.state()["calls"] == 1, "both are gone")
    kept = d.connection()
    for _ in range(20):  # one after the other is never two at once
        assert d.post("/user", {}, headers=bearer(USER), connection=kept).status == 200
        assert d.post("/user", {}, headers=bearer(USER)).status == 200
    kept.close()


def test_requests_that_end_early_give_their_place_back(drive):
    d = drive(keys={"HADAL_API_KEY": USER}, key_calls=1)
    key = b"Authorization: Bearer " + USER.encode() + b"\r\n"
    for _ in range(5):
        with d.socket() as s:  # leaves inside its body
            s.sendall(post(b"x", b"Content-Length: 100\r\n" + key, b"/user"))
            wait_until(lambda: d.state()["calls"] == 2, "it is there")
        wait_until(lambda: d.state()["calls"] == 1, "it is gone")
        assert status_of(d.raw(post(b"", b"Content-Length: 2000000\r\n" + key, b"/user"))) == 413
    assert d.post("/user", {}, headers=bearer(USER)).status == 200


def test_addresses_that_fail_to_show_a_key(drive):
    """Section 5.1: after so many 401s a minute an address hears 429, whatever key it shows."""
    d = drive(keys={"HADAL_API_KEY": USER}, failures=3)
    for _ in range(3):
        assert d.post("/user", {}, headers=bearer("wrong-key-0123456789")).status == 401
    for key in ("wrong-key-0123456789", USER):
        blocked = d.post("/user", {}, headers=bearer(key))
        assert blocked.status == 429 and blocked.code == "too_many_failures" and 1 <= int(blocked.headers["Retry-After"]) <= 20
    assert d.get("/echo").status == 200  # needs no key


# ---- crowds ----


@pytest.fixture
def files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 16384), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_slowloris(drive, files):
    """FT16, H02, H03: hundreds that drip bytes, in every phase, while a good client is served."""
    d = drive(connections=4000, header_s=1, body_s=1)
    starts = [b"", b"GET", b"GET /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nX-", post(b"{", b"Content-Length: 4000\r\n")]
    crowd = [d.socket() for _ in range(MANY)]
    for i, s in enumerate(crowd):
        s.setblocking(False)
        s.send(starts[i % len(starts)] or b"G")
    kept = d.connection()
    left = set(crowd)
    served = 0
    while left:  # every byte is new hope for a clock that counts from the last one
        time.sleep(0.05)  # so that no request is complete before its time is over
        for s in list(left):
            try:
                s.send(b"a")
            except OSError:
                left.discard(s)
        assert d.get("/echo", connection=kept).status == 200
        served += 1
    assert served > 1
    wait_until(lambda: d.state()["calls"] == 1, "nothing is left")
    assert d.state()["timed_out"] == MANY
    for s in crowd:
        s.close()
    kept.close()


def test_connections_beyond_the_limit(drive):
    """Those that are there are served, others are closed at once until somebody leaves."""
    n = 20
    d = drive(connections=n)
    kept = [d.connection() for _ in range(n)]
    for c in kept:
        assert d.get("/echo", connection=c).status == 200
    for _ in range(3 * n):
        s = d.socket()
        try:
            assert s.recv(1) == b""
        except ConnectionResetError:
            pass
        s.close()
    for c in kept:
        assert d.get("/echo", connection=c).status == 200
    kept.pop().close()

    def is_served():
        try:
            return d.get("/echo").status == 200
        except OSError:
            return False

    wait_until(is_served, "a place is free again")
    for c in kept:
        assert d.get("/echo", connection=c).status == 200
        c.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_thousands_of_streams_vanish_at_once(drive, files, leave):
    """FT11"""
    n = 4 * MANY
    d = drive(connections=2 * n)  # and for looks at the state whose ends are not seen yet
    crowd = [d.socket() for _ in range(n)]
    for s in crowd:
        s.sendall(post(b"{}", b"Content-Length: 2\r\n", b"/quiet"))
    wait_until(lambda: d.state()["held"] == n, "all stream")
    for s in crowd:
        leave(s)
    wait_until(lambda: d.state()["left"] == n, "all are seen to leave")
    wait_until(lambda: d.state()["calls"] == 1, "nothing is left of them")
    assert d.get("/echo").status == 200


def test_connect_and_reset(drive):
    """FT11: connect, send a bit, reset, as fast as it goes."""
    d = drive()
    request = post(b"{}", b"Content-Length: 2\r\n", b"/hold")
    for i in range(MANY):
        s = d.socket()
        s.sendall(request[: 1 + i % len(request)])
        reset(s)
    wait_until(lambda: d.state()["calls"] == 1 and d.state()["connections"] == 1, "nothing is left")


# ---- an exchange that ends at every byte ----

EXCHANGES = {
    "echo": post(b'{"a": 1}', b"Content-Length: 8\r\n"),
    "chunks": post(b"4\r\n{\"a\"\r\n4\r\n: 1}\r\n0\r\nX: 1\r\n\r\n", b"Transfer-Encoding: chunked\r\n"),
    "stream": get(b"/stream?n=3&late=1"),
    "pipeline": get(b"/echo", KEPT) + get(b"/stream", HOST),
    "continue": post(b'{"a": 1}', b"Expect: 100-continue\r\nContent-Length: 8\r\n"),
}


@pytest.mark.parametrize("leave", [socket.socket.close, reset, lambda s: s.shutdown(socket.SHUT_WR)], ids=["close", "reset", "half"])
@pytest.mark.parametrize("name", EXCHANGES)
def test_request_that_ends_at_every_byte(drive, name, leave):
    """FT01, FT02, H42"""
    d = drive(idle_s=1)
    whole = EXCHANGES[name]
    crowd = []
    for cut in range(len(whole)):
        s = d.socket()
        s.sendall(whole[:cut])
        leave(s)
        crowd.append(s)
    assert d.get("/echo").status == 200
    for s in crowd:
        if s.fileno() >= 0:
            read_all(s)
            s.close()
    wait_until(lambda: d.state()["calls"] == 1, "nothing is left")


def test_answer_that_is_left_at_every_byte(drive):
    """FT06, FT08: a reader leaves after any number of bytes of an answer or a stream."""
    d = drive()
    for path in (b"/echo", b"/stream?n=5&late=1"):
        request = get(path, HOST + b"Connection: close\r\n")
        with d.socket() as s:
            s.sendall(request)
            whole = len(read_all(s))
        for n in range(1, whole, 3):
            with d.socket() as s:
                s.sendall(request)
                missing = n  # chunks are cut as they come: in fewer of them a stream ends before
                while missing and (piece := s.recv(missing)):
                    missing -= len(piece)
                reset(s) if n % 2 else None
    wait_until(lambda: d.state()["calls"] == 1, "nothing is left")


def test_random_slices(drive):
    """H01, FT14: however the bytes of a request are cut, the answer is the same."""
    import random

    d = drive()
    cuts = random.Random(1)
    for name, whole in EXCHANGES.items():
        once = d.raw(whole)
        for _ in range(5):
            with d.socket() as s:
                at = 0
                while at < len(whole):
                    n = cuts.randint(1, 40)
                    s.sendall(whole[at : at + n])
                    at += n
                pieces = read_all(s)
            strip = lambda answer: [line for line in answer.split(b"\r\n") if not line.startswith((b"Date:", b"X-Request-Id:", b'{"method"', b"HTTP/1.1 100"))]
            if name != "stream" and name != "pipeline":  # chunks of a stream are cut as they come
                assert strip(pieces) == strip(once), name
            assert pieces.count(b"200 OK") == once.count(b"200 OK")
