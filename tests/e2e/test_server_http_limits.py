"""Where the limits of the HTTP library lie, which has a memory of its own per connection: what does
not fit there, any mixture of it, and what is left behind. And answers that nobody reads."""

import pathlib
import random
import socket

import pytest
from serving import LEAK_CHECKED, read_all, reset, wait_until
from test_server_http import HOST, KEPT, chunked, get, post, status_of

RESTS = {"calls": 1, "connections": 1, "streams": 0, "bodies": 0, "held": 0, "timed_out": 0}
MIB = 1 << 20


@pytest.fixture(scope="module")
def http_server():
    from serving import Driver

    driver = Driver(threads=1)
    yield driver
    driver.close()


def comes_to_rest(d):
    """Every counter is back. A request that hung until its deadline shows in timed_out."""
    now = {}

    def rests():
        now.update(d.state())
        return all(now[name] == value for name, value in RESTS.items())

    try:
        wait_until(rests, "rest")
    except AssertionError:
        raise AssertionError({name: now[name] for name in RESTS}) from None


def extended(n):
    return post(b"5;" + b"x" * n + b"\r\n12345\r\n0\r\n\r\n", b"Transfer-Encoding: chunked\r\n")


def with_cookies(cookies):
    return post(b"{}", b"Cookie: " + cookies + b"\r\nContent-Length: 2\r\n")


# Around 17 arguments, 64 headers, a line of 8 KiB, a header of 16 KiB, 32 KiB of headers, and what the
# library's memory holds. Of library: its own answer, and none where there was no room for one.
ARGUMENTS = (15, 16, 17, 63, 64, 65, 500, 562, 600, 700, 1000, 5000, 8000)
BYTES = (8000, 8180, 8192, 8200, 15000, 16370, 16384, 16400, 20000, 30000, 32768, 33000, 38000)
LARGER = (40000, 60000, 76000, 80000, 200000)
TOO_LARGE = {413, 414, 431, None}

ROWS = {
    **{f"H29 {n} ampersands": (get(b"/echo?" + b"&" * n), {200} if n <= 16 else {400}) for n in ARGUMENTS},
    **{f"H29 {n} arguments": (get(b"/echo?" + b"a&" * (n - 1) + b"a"), {200} if n <= 16 else {400, 414}) for n in ARGUMENTS},
    **{f"H29 {n} arguments of a POST": (post(b"{}", b"Content-Length: 2\r\n", b"/user?" + b"a=b&" * n), {200} if n <= 16 else {400, 414}) for n in ARGUMENTS},
    **{f"H29 {n} arguments of an unknown path": (get(b"/nothing?" + b"&" * n), {404} if n <= 16 else {400}) for n in ARGUMENTS},
    **{f"H21 target of {n}": (get(b"/echo?" + b"a" * n), {200} if n + 6 <= 8192 else {414, None}) for n in BYTES + LARGER},
    **{f"H22 header of {n}": (get(headers=HOST + b"X: " + b"a" * n + b"\r\n"), {200} if n + 1 <= 16384 else TOO_LARGE) for n in BYTES + LARGER},
    **{f"H22 cookie of {n}": (with_cookies(b"a=" + b"a" * n), {200} if n + 8 <= 16384 else TOO_LARGE) for n in BYTES + LARGER},
    **{f"H22 {n} cookies": (with_cookies(b"a=b;" * n), {200} if n <= 180 else {200, *TOO_LARGE}) for n in (1, 60, 180, 250, 500, 2000, 4000, 8000)},
    **{f"H22 {n} headers": (get(headers=HOST + b"X:\r\n" * n), {200} if n + 2 <= 64 else TOO_LARGE) for n in (61, 62, 63, 64, 200, 500, 1000, 5000, 20000)},
    **{f"H17 {n} folded lines": (get(headers=HOST + b"X: 1\r\n" + b" 1\r\n" * n), {400, *TOO_LARGE}) for n in (1, 500, 5000, 20000)},
    **{f"H10 extension of {n}": (extended(n), {200} if n < 8000 else {200, 400}) for n in BYTES},
    **{f"H14 trailer of {n}": (chunked(b"{}", trailer=b"X: " + b"a" * n + b"\r\n"), {200} if n + 1 <= 16384 else TOO_LARGE) for n in BYTES + LARGER},
    **{f"H14 {n} trailers": (chunked(b"{}", trailer=b"X:\r\n" * n), {200} if n <= 64 else TOO_LARGE) for n in (64, 65, 100, 500, 1000, 5000, 20000)},
}


@pytest.mark.parametrize("name", ROWS)
def test_at_the_limits_of_the_library(http_server, name):
    data, expected = ROWS[name]
    answer = http_server.raw(data)
    assert status_of(answer) in expected, answer[:500]
    comes_to_rest(http_server)


@pytest.mark.parametrize("n", [10000, 15000, 16000, 30000])
def test_one_request_one_answer(http_server, n):
    """What does not fit is said once: a POST with a cookie used to get the library's answer twice."""
    assert http_server.raw(with_cookies(b"a=" + b"a" * n)).count(b"HTTP/1.1") == 1


def test_a_connection_owns_its_request(drive):
    """A request that the library drops by itself ends with its connection, and so does the server."""
    d = drive()
    for _ in range(50):
        with d.socket() as s:
            s.sendall(with_cookies(b"a=b;" * 4000))
            reset(s)
        assert d.raw(get(b"/echo?" + b"&" * 700)).count(b"HTTP/1.1 400") == 1
    comes_to_rest(d)


def test_end_after_what_the_library_dropped(serve):
    """FT33: only what a handler saw can be waited for, and nothing else is."""
    s = serve()
    for data in (get(b"/nothing?" + b"&" * 700), with_cookies(b"a=b;" * 4000)) * 10:
        s.raw(data)
    wait_until(lambda: s.stats()["hadal_http_calls"] == 1, "nothing is left")
    s.close()


# ---- any mixture ----

METHODS = [b"GET", b"POST", b"HEAD", b"OPTIONS", b"DELETE", b"BREW", b"", b"A" * 40]
PATHS = [b"/echo", b"/echo/a", b"/user", b"/hold", b"/nothing", b"*", b"/stream?n=3", b"/large?n=100000", b"/quiet"]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.10", b""]
NAMES = [b"Host", b"Cookie", b"Connection", b"Content-Length", b"Transfer-Encoding", b"Expect", b"Origin", b"Content-Type", b"X", b"", b" X", b"Authorization", b"Upgrade", b"Range"]
VALUES = [b"127.0.0.1", b"a=b", b"close", b"keep-alive", b"5", b"chunked", b"100-continue", b"null", b"application/json", b"", b"\x80", b"a\0b", b"-1"]
ENDS = [b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r\n ", b"\r"]
SIZES = [0, 1, 2, 17, 64, 300, 600, 2000, 9000, 17000, 40000]


def many(rng, text):
    """At most so much that a client which is not read, and waits, can still say that it leaves."""
    return text * (rng.choice(SIZES) // len(text) if rng.random() < 0.2 else rng.randrange(4))


def hostile_line(rng):
    target = rng.choice(PATHS)
    if rng.random() < 0.3:
        target += b"?" + many(rng, rng.choice([b"&", b"a&", b"a=b&", b"=&", b"%41&", b"a"]))
    return rng.choice(METHODS) + b" " + target + b" " + rng.choice(VERSIONS)


def hostile_header(rng):
    value = rng.choice(VALUES)
    if rng.random() < 0.1:
        value += many(rng, rng.choice([b";a=b", b"x", b", ", b'"', b";"]))
    return rng.choice(NAMES) + rng.choice([b": ", b":", b" : ", b""]) + value


def hostile_body(rng):
    chunks = [b"5", b"5;" + many(rng, b"x"), b"0", b"-1", b"ffffffffffffffff", b"1" * 17, b"5 "]
    body = b"".join(rng.choice(chunks) + rng.choice(ENDS) + b"12345" + rng.choice(ENDS) for _ in range(rng.randrange(4)))
    return body + b"0\r\n" + many(rng, b"X: 1\r\n") + b"\r\n"


def hostile(rng):
    """Most of it is nearly right, so that every part is reached."""
    lines = [hostile_line(rng) if rng.random() < 0.7 else b"POST /echo HTTP/1.1", b"Host: 127.0.0.1"]
    if rng.random() < 0.3:
        lines.append(rng.choice([b"Transfer-Encoding: chunked", b"Content-Length: 30"]))
    lines += [hostile_header(rng) for _ in range(rng.choice([0, 1, 2, 3, 70]))]
    return b"".join(line + (b"\r\n" if rng.random() < 0.95 else rng.choice(ENDS)) for line in lines) + b"\r\n" + hostile_body(rng)


def send_pieces(s, rng, data):
    try:
        while data:
            n = rng.choice([1, 100, 5000, len(data)])
            s.sendall(data[:n])
            data = data[n:]
        if rng.random() < 0.8:
            s.shutdown(socket.SHUT_WR)
            read_all(s)
        elif rng.random() < 0.5:
            reset(s)
    except OSError:
        pass


def play(d, seed, n):
    rng = random.Random(seed)
    for i in range(n):
        with d.socket() as s:
            send_pieces(s, rng, b"".join(hostile(rng) for _ in range(rng.choice([1, 1, 1, 2]))))
        try:
            comes_to_rest(d)
        except AssertionError as e:
            raise AssertionError(f"request {i} of seed {seed}: {e}") from None
    assert d.get("/echo").status == 200


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_leave_nothing(http_server, seed):
    play(http_server, seed, 50 if LEAK_CHECKED else 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_more_random_requests_leave_nothing(http_server, seed):
    play(http_server, seed, 1000)


# ---- answers that are not read ----


def large(n, headers=KEPT):
    return get(b"/large?n=%d" % n, headers)


def content(n):
    return bytes(ord("a") + i % 23 for i in range(23)) * (n // 23 + 1)


def test_large_answers_are_whole(http_server):
    sizes = [1, 65536, 65537, 5 * MIB, 100, 300000]
    with http_server.socket() as s:
        s.sendall(b"".join(large(n) for n in sizes[:-1]) + large(sizes[-1], HOST))
        answer = read_all(s)
    for n in sizes:
        head, answer = answer.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200") and b"Content-Length: %d\r\n" % n in head + b"\r\n"
        assert answer[:n] == content(n)[:n]
        answer = answer[n:]
    assert answer == b""
    head = http_server.raw(get(b"/large?n=100000", HOST, method=b"HEAD"))
    assert b"Content-Length: 100000\r\n" in head and head.endswith(b"\r\n\r\n")
    comes_to_rest(http_server)


def resident(d):
    status = pathlib.Path(f"/proc/{d.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


@pytest.mark.threads
def test_unread_answers_are_bounded(drive):
    """FT12: many readers that ask for large answers and do not read them."""
    d = drive(bodies=40 * MIB)
    before = resident(d)
    slow = [d.socket() for _ in range(12)]
    for s in slow:
        s.sendall(large(12 * MIB))
    statuses = [status_of(s.recv(12)) for s in slow]
    assert sorted(statuses) == [200] * 3 + [503] * 9
    assert 36 * MIB <= d.state()["bodies"] <= 40 * MIB
    assert LEAK_CHECKED or "tsan" in str(d.process.args[0]) or resident(d) - before < 100 * MIB
    refused = d.get("/large?n=%d" % (12 * MIB))
    assert refused.status == 503 and refused.headers["Retry-After"] == "1" and refused.code == "out_of_memory"
    assert d.get("/echo").status == 200 and d.get("/large?n=65536").status == 200
    for s in slow:
        reset(s)
    wait_until(lambda: d.state()["bodies"] == 0, "all is given back")
    assert len(d.get("/large?n=%d" % (12 * MIB)).body) == 12 * MIB
    never = d.get("/large?n=%d" % (41 * MIB))
    assert never.status == 413 and never.code == "answer_too_large"


def test_unread_answers_of_the_server_are_bounded(serve):
    """An answer may be many times its request."""
    s = serve("--max-body-mb", "1", "--max-bodies-mb", "3")
    body = b'{"tokens":[' + b",".join([b"300"] * 200000) + b"]}"
    asked = post(body, b"Content-Length: %d\r\n" % len(body), b"/detokenize", KEPT)
    with s.socket() as first, s.socket() as second:
        first.sendall(asked)
        head = first.recv(4096)
        assert status_of(head) == 200 and s.stats()["hadal_http_held_body_bytes"] > 1500000
        second.sendall(asked)
        assert status_of(second.recv(4096)) == 503
        assert s.stats()["hadal_http_held_body_bytes"] <= 3 * MIB
    wait_until(lambda: s.stats()["hadal_http_held_body_bytes"] == 0, "all is given back")
    text = s.post("/detokenize", {"tokens": [300] * 200000}).json
    assert text["text"] == text["prompt"] == text["content"] and len(text["text"]) >= 200000


def test_reader_of_a_large_answer_that_stalls_is_cut_off(drive):
    d = drive(stall_s=1)
    with d.socket() as s:
        s.sendall(large(20 * MIB))
        wait_until(lambda: d.state()["cut_off"] == 1, "it is cut off")
    wait_until(lambda: d.state()["bodies"] == 0, "its answer is gone")


@pytest.mark.threads
@pytest.mark.parametrize("n, size", [(1, 4 * MIB), (1, 17000), (20, 500000), (3000, 700)])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("writer_sends", [0, 1])
def test_no_event_is_too_large(drive, n, size, late, writer_sends):
    """FT12: an empty buffer takes any event, and who reads on is not cut off."""
    d = drive(stream=16384, writer_sends=writer_sends)
    with d.socket() as s:
        s.sendall(get(b"/stream?n=%d&bytes=%d&late=%d" % (n, size, late), HOST))
        answer = read_all(s).split(b"\r\n\r\n", 1)[1]
    assert answer.count(b"x") == n * size and answer.endswith(b"0\r\n\r\n")
    assert d.state()["cut_off"] == 0


@pytest.mark.threads
def test_streams_share_the_bound(drive):
    """A reader may be far behind for a while, but all of them hold no more than there is."""
    d = drive(stream=16384, bodies=8 * MIB)
    slow = [d.socket() for _ in range(12)]
    for s in slow:
        s.sendall(b"POST /pour HTTP/1.1\r\n" + HOST + b"\r\n")
    wait_until(lambda: d.state()["cut_off"] == 12, "every one that does not read is cut off")
    assert d.state()["bodies"] <= 8 * MIB + 12 * 32768
    for s in slow:
        s.close()
    wait_until(lambda: d.state()["streams"] == 0 and d.state()["bodies"] == 0, "nothing is left")
