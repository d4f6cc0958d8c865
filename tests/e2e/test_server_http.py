"""The HTTP layer by itself: framing, routing, origins, limits, and clients that misbehave."""

import http.client
import json
import re
import socket

import pytest
from conftest import run_hadal
from serving import events_of, read_all, read_until, reset, wait_until

KEPT = b"Host: 127.0.0.1\r\n"
HOST = KEPT + b"Connection: close\r\n"
JSON = b"Content-Type: application/json\r\n"
OWN = b"Origin: http://127.0.0.1\r\n"


@pytest.fixture(scope="module")
def http_server():
    from serving import Driver

    driver = Driver()
    yield driver
    driver.close()


def status_of(answer):
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else None


def get(path=b"/echo", headers=HOST, version=b"HTTP/1.1", method=b"GET"):
    return method + b" " + path + b" " + version + b"\r\n" + headers + b"\r\n"


def post(body, headers=b"", path=b"/echo", host=HOST):
    return b"POST " + path + b" HTTP/1.1\r\n" + host + JSON + headers + b"\r\n" + body


def chunked(*chunks, trailer=b""):
    body = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks)
    return post(body + b"0\r\n" + trailer + b"\r\n", b"Transfer-Encoding: chunked\r\n")


# Names that only begin or end like this machine's may point to it, for a page that is elsewhere.
REBOUND = [b"127.evil.example", b"127.0.0.1.evil.example", b"127.0.0.256", b"127.1", b"localhost.evil.example", b"0.0.0.0"]

# What is the HTTP library's to decide differs between its versions: from 1.0 on it answers 400 to a bare
# LF, and closes where the request line holds a NUL.
LIBRARY = tuple(map(int, re.search(r"libmicrohttpd (\d+)\.(\d+)", run_hadal("version").stdout).groups()))
BARE_LF = {200} if LIBRARY < (1, 0) else {400}
NUL_IN_LINE = {400} if LIBRARY < (1, 0) else {400, None}

# The rows of bad input that are about framing, headers and routing. Every one is followed by a
# check that nothing is left behind. Several statuses: which of them is not the point.
ROWS = {
    "H05 content-length and transfer-encoding": (post(b"0\r\n\r\n", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"), {400}),
    "H06 two different lengths": (post(b"12345", b"Content-Length: 5\r\nContent-Length: 6\r\n"), {400}),
    "H06 two equal lengths": (post(b"12345", b"Content-Length: 5\r\nContent-Length: 5\r\n"), {400}),
    "H06 a list of lengths": (post(b"12345", b"Content-Length: 5, 5\r\n"), {400}),
    "H07 length -1": (post(b"", b"Content-Length: -1\r\n"), {400}),
    "H07 length +5": (post(b"12345", b"Content-Length: +5\r\n"), {400}),
    "H07 length 0x10": (post(b"", b"Content-Length: 0x10\r\n"), {400}),
    "H07 empty length": (post(b"", b"Content-Length: \r\n"), {400}),
    "H07 length 5 5": (post(b"12345", b"Content-Length: 5 5\r\n"), {400}),
    "H07 length 2^64 - 1": (post(b"", b"Content-Length: 18446744073709551615\r\n"), {400, 413}),
    "H07 length 2^64": (post(b"", b"Content-Length: 18446744073709551616\r\n"), {400, 413}),
    "H08 length above the limit": (post(b"", b"Content-Length: 1048577\r\n"), {413}),
    "H09 chunk size -2": (post(b"-2\r\n\r\n0\r\n\r\n", b"Transfer-Encoding: chunked\r\n"), {400}),
    "H10 chunk size of 17 digits": (post(b"1" * 17 + b"\r\nx\r\n0\r\n\r\n", b"Transfer-Encoding: chunked\r\n"), {400, 413}),
    "H10 chunk size 0x5": (post(b"0x5\r\n12345\r\n0\r\n\r\n", b"Transfer-Encoding: chunked\r\n"), {400}),
    "H11 chunk without its line end": (post(b"5\r\n12345X0\r\n\r\n", b"Transfer-Encoding: chunked\r\n"), {400}),
    "H10 empty chunk size": (post(b"\r\n12345\r\n0\r\n\r\n", b"Transfer-Encoding: chunked\r\n"), {400}),
    "H10 space behind a chunk size": (post(b"5 ;x\r\n12345\r\n0\r\n\r\n", b"Transfer-Encoding: chunked\r\n"), {400}),
    "H14 1,000 trailers": (chunked(b"{}", trailer=b"".join(b"X-%d: 1\r\n" % i for i in range(1000))), {431}),
    "H14 length as a trailer": (chunked(b"{}", trailer=b"Content-Length: 5\r\n"), {200}),
    "H15 chunked in HTTP/1.0": (b"POST /echo HTTP/1.0\r\n" + HOST + JSON + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", {400}),
    "H15 gzip, chunked": (post(b"0\r\n\r\n", b"Transfer-Encoding: gzip, chunked\r\n"), {400, 501}),
    "H15 identity transfer": (post(b"", b"Transfer-Encoding: identity\r\n"), {400, 501}),
    "H15 xchunked": (post(b"", b"Transfer-Encoding: xchunked\r\n"), {400, 501}),
    "H15 chunked twice": (post(b"0\r\n\r\n", b"Transfer-Encoding: chunked, chunked\r\n"), {400, 501}),
    "H15 two transfer encodings": (post(b"0\r\n\r\n", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"), {400, 501}),
    "H16 bare CR in a value": (get(headers=HOST + b"X-Test: a\rb\r\n"), {400}),
    "H18 space before the colon": (get(headers=HOST + b"X-Test : 1\r\n"), {400}),
    "H18 header with a bracket": (get(headers=HOST + b"X(: 1\r\n"), {400}),
    "H18 header with DEL": (get(headers=HOST + b"X\x7f: 1\r\n"), {400}),
    "H18 header with a high byte": (get(headers=HOST + b"X\x80: 1\r\n"), {400}),
    "H21 target of 9 KiB": (get(b"/" + b"a" * 9216), {414}),
    "H22 header of 17 KiB": (get(headers=HOST + b"X-Test: " + b"a" * 17408 + b"\r\n"), {431}),
    "H22 headers of 33 KiB": (get(headers=HOST + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(34))), {431}),
    "H22 65 headers": (get(headers=HOST + b"".join(b"X-%d: 1\r\n" % i for i in range(64))), {431}),
    "H24 preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 505}),
    "H24 HTTP/3.0": (get(version=b"HTTP/3.0"), {400, 505}),
    "H24 HTTP/0.9": (get(version=b"HTTP/0.9"), {400, 505}),
    "H26 no Host": (get(headers=b""), {400}),
    "H26 two Hosts": (get(headers=KEPT + KEPT), {400}),
    "H26 Host a/b?c": (get(headers=b"Host: a/b?c\r\n"), {400}),
    "H26 Host x@y": (get(headers=b"Host: x@y\r\n"), {400}),
    "H26 Host [::1": (get(headers=b"Host: [::1\r\n"), {400}),
    "H26 Host with a bad port": (get(headers=b"Host: localhost:99999999\r\n"), {400}),
    "H26 Host with a port that is none": (get(headers=b"Host: localhost:99999\r\n"), {400}),
    "H26 Host [127.0.0.1]": (get(headers=b"Host: [127.0.0.1]\r\n"), {400}),
    "H26 Host [.:.]": (get(headers=b"Host: [.:.]\r\n"), {400}),
    "H27 Host of somebody else": (get(headers=b"Host: evil.example\r\n"), {421}),
    **{f"H27 Host {name.decode()}": (get(headers=b"Host: " + name + b"\r\n"), {421}) for name in REBOUND},
    **{f"H27 {name.decode()} as its own origin": (post(b"{}", b"Host: " + name + b":80\r\nOrigin: http://" + name + b":80\r\nContent-Length: 2\r\n", b"/admin", b"Connection: close\r\n"), {421}) for name in REBOUND},
    "H27 Host in the loopback network": (get(headers=b"Host: 127.3.2.1:80\r\nConnection: close\r\n"), {200}),
    "H27 Host [0:0:0:0:0:0:0:1]": (get(headers=b"Host: [0:0:0:0:0:0:0:1]\r\nConnection: close\r\n"), {200}),
    "H28 absolute target": (get(b"http://evil.example/echo"), {421}),
    "H29 dots": (get(b"/v1/../echo"), {404}),
    "H29 two slashes": (get(b"//echo"), {404}),
    "H29 escaped dots": (get(b"/v1/%2e%2e/echo"), {404}),
    "H29 escaped letter": (get(b"/ech%6f"), {404}),
    "H29 upper case": (get(b"/ECHO"), {404}),
    "H29 slash behind": (get(b"/user/", method=b"POST"), {404}),
    "H29 %00": (get(b"/echo%00"), {400}),
    "H29 broken escape": (get(b"/echo?q=%zz"), {400}),
    "H29 17 arguments": (get(b"/echo?" + b"&".join(b"a%d=1" % i for i in range(17))), {400}),
    "H30 TRACE": (get(method=b"TRACE"), {405}),
    "H30 CONNECT": (get(method=b"CONNECT"), {405}),
    "H30 DELETE": (get(method=b"DELETE"), {405}),
    "H30 lower-case method": (get(method=b"post"), {400}),
    "H30 method of 1 KiB": (get(method=b"A" * 1024), {400, 405}),
    "H31 foreign preflight": (get(headers=HOST + b"Origin: https://evil.example\r\n", method=b"OPTIONS"), {403}),
    "H31 foreign page posts": (post(b"{}", b"Origin: https://evil.example\r\nContent-Length: 2\r\n"), {403}),
    "H31 null origin posts": (post(b"{}", b"Origin: null\r\nContent-Length: 2\r\n"), {403}),
    "H32 plain text": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}", {415}),
    "H32 form": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 2\r\n\r\n{}", {200}),
    "H32 a page's form": (b"POST /echo HTTP/1.1\r\n" + HOST + OWN + b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 2\r\n\r\n{}", {415}),
    "H32 untyped": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n{}", {200}),
    "H32 untyped, of a page": (b"POST /echo HTTP/1.1\r\n" + HOST + OWN + b"Content-Length: 2\r\n\r\n{}", {415}),
    "H40 utf-16": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Type: application/json; charset=utf-16\r\nContent-Length: 2\r\n\r\n{}", {415}),
    "H39 gzip body": (post(b"xx", b"Content-Encoding: gzip\r\nContent-Length: 2\r\n"), {415}),
    "H36 expects too much": (post(b"", b"Expect: 100-continue\r\nContent-Length: 99999999\r\n"), {413}),
    "H36 unknown expectation": (post(b"", b"Expect: magic\r\nContent-Length: 2\r\n"), {417}),
    "E01 unknown path": (get(b"/nothing"), {404}),
    "E08 model of 10 KiB": (get(b"/echo/" + b"a" * 10240), {414}),
    "E08 model %ff": (get(b"/echo/%01"), {400, 404}),
    "H14 trailer": (chunked(b"{}", trailer=b"X-Trailer: 1\r\n"), {200}),
    "H38 not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + b"\r\n\r\n", {400, None}),
    "H37 upgrade to h2c": (get(headers=HOST + b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"), {200}),
    "H37 upgrade to a web socket": (get(headers=HOST + b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"), {200}),
    "H17 folded line": (get(headers=HOST + b"X-Test: a\r\n b\r\n"), {400}),
    "H17 folded last line": (get(headers=HOST + b"X-Test: a\r\n\tb\r\n"), {400}),
    "H18 no name": (get(headers=HOST + b": 1\r\n"), {400}),
    "H18 no name, not last": (get(headers=b": 1\r\n" + HOST), {400}),
    "H19 NUL in a value": (get(headers=b"X-Test: a\0b\r\n" + HOST), {400}),
    "H19 NUL in the last value": (get(headers=HOST + b"X-Test: a\0b\r\n"), {400}),
    "H19 NUL behind a value": (get(headers=HOST + b"X-Test: a\0\r\n"), {400}),
    "H19 NUL and a line end": (get(headers=HOST + b"X-Test: a\0\r\nX-More: b\r\n"), {400}),
    "H19 NUL in an empty value": (get(headers=HOST + b"X-Test: \0\r\n"), {400}),
    "H19 NUL in a name": (get(headers=HOST + b"X-\0Test: a\r\n"), {400}),
    "H19 NUL in the target": (get(b"/echo\0/other"), NUL_IN_LINE),
    "H19 NUL in the query": (get(b"/echo?a=1&b=\0c"), NUL_IN_LINE),
    "H19 NUL in the method": (get(method=b"GET\0"), NUL_IN_LINE),
    "H19 NUL in the version": (get(version=b"HTTP/1.1\0"), NUL_IN_LINE),
    "H16 bare line feeds": (get().replace(b"\r", b""), BARE_LF),
    "H19 NUL before the headers": (get(headers=b"\0" + HOST), {400}),
    "H17 folded first line": (get(headers=b" folded: 1\r\n" + HOST), {400}),
    "H28 not a target": (get(b"echo"), {400}),
    "H24 no version": (b"GET /echo\r\n" + HOST + b"\r\n", {400, 505, None}),
}


def many_headers(n, size):
    return b"".join(b"X-%d:%s%s%s\r\n" % (i, b" \t"[: i % 3], b"v" * size, b" " * (i % 2)) for i in range(n))


# What is unusual and still right, one after the other on one connection and cut in any way.
UNUSUAL = {
    "as large as may be": get(b"/echo?" + b"a" * 4000, KEPT + many_headers(30, 900)),
    "one large header": get(headers=KEPT + b"X-Test: " + b"a" * 15000 + b"\r\n"),
    "many headers": get(headers=KEPT + many_headers(62, 1)),
    "empty values": get(headers=b"X-Empty:\r\nX-Blank:   \r\n" + KEPT + b"X-End:\r\n"),
    "arguments": get(b"/echo?&a&b=&=c&&d=%20+e?f", KEPT),
    **({"bare line feeds": get(headers=KEPT).replace(b"\r", b"")} if BARE_LF == {200} else {}),
    "an empty line before": b"\r\n" + get(headers=KEPT),
    "cookies": get(headers=KEPT + b"Cookie: a=b; c=\"d\"\r\nCookie: e=f\r\n"),
    "a body": post(b'{"a": 1}', b"Content-Length: 8\r\n", host=KEPT),
    "high bytes": get(headers=KEPT + b"X-Test: \xe4\xb8\xad\xff\r\n"),
}


@pytest.mark.parametrize("piece", [1 << 20, 4000, 700, 13])
def test_nothing_right_is_refused(http_server, piece):
    """The other side of H17 .. H19: what leaves no gap between its parts is taken."""
    for first in UNUSUAL:
        with http_server.socket() as s:
            for data in (UNUSUAL[first], *UNUSUAL.values(), get()):
                for at in range(0, len(data), piece):
                    s.sendall(data[at : at + piece])
            answers = read_all(s)
        assert answers.count(b"HTTP/1.1 200 OK") == len(UNUSUAL) + 2, (first, answers[-600:])


@pytest.mark.parametrize("name", ROWS)
def test_bad_framing(http_server, name):
    data, expected = ROWS[name]
    answer = http_server.raw(data)
    assert status_of(answer) in expected, answer[:500]
    if b"application/json" in answer and status_of(answer) != 200:
        error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
        assert error["type"].endswith("_error") and error["message"], error
    wait_until(lambda: http_server.state()["calls"] == 1, "only the question itself lives")


def test_what_arrives(http_server):
    reply = http_server.post("/echo/a%2Fb%20c?q=x%20y+z&r=1", {"a": "\u0000é"}, headers={"X-Test": "one, two", "X-Request-Id": "mine-1"})
    assert reply.status == 200
    echo = reply.json
    assert echo["method"] == "POST" and echo["tail"] == "a/b c" and echo["q"] == "x y z"
    assert echo["x"] == "one, two" and json.loads(echo["body"]) == {"a": "\u0000é"}
    assert echo["id"] == "mine-1" == reply.headers["X-Request-Id"]
    assert reply.headers["X-Content-Type-Options"] == "nosniff"


def test_request_ids_of_ours_differ(http_server):
    ids = {http_server.get("/echo").headers["X-Request-Id"] for _ in range(5)}
    assert len(ids) == 5
    odd = http_server.get("/echo", headers={"X-Request-Id": "a" * 129}).headers["X-Request-Id"]
    assert len(odd) == 16


def test_header_injection_stays_a_value(http_server):  # H20
    reply = http_server.get("/echo", headers={"X-Test": "a%0d%0aX-Evil: 1"})
    assert reply.json["x"] == "a%0d%0aX-Evil: 1" and "X-Evil" not in reply.headers


def test_connection_is_kept(http_server):
    c = http_server.connection()
    for path, status in [("/echo", 200), ("/nothing", 404), ("/echo", 200), ("/user", 405), ("/stream?n=3", 200), ("/echo", 200)]:
        assert http_server.get(path, connection=c).status == status
    sock = c.sock
    assert http_server.post("/echo", {"a": 1}, connection=c).status == 200
    assert c.sock is sock
    c.close()


def test_pipelined_requests(http_server):  # H33
    answer = http_server.raw(get(b"/echo?q=1", KEPT) + post(b"{}", b"Content-Length: 2\r\n", host=KEPT) + get(b"/echo?q=2"))
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.index(b'"q":"1"') < answer.index(b'"method":"POST"') < answer.index(b'"q":"2"')


def test_garbage_after_a_body(http_server):  # H35
    answer = http_server.raw(post(b"{}", b"Content-Length: 2\r\n", host=KEPT) + b"\x00\xff garbage\r\n\r\n")
    assert answer.count(b'"method"') == 1 and b"200" not in answer.split(b"}", 1)[1]


def test_endless_headers(drive):  # H23
    d = drive()
    with d.socket() as s:
        try:
            s.sendall(b"GET /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            for i in range(400):
                s.sendall(b"X-%d: " % i + b"a" * 1000 + b"\r\n")
        except OSError:
            pass
        assert status_of(read_all(s)) in (431, None)
    wait_until(lambda: d.state()["calls"] == 1, "nothing is left")


def test_delete_does_not_eat_the_next_request(http_server):  # H34
    answer = http_server.raw(get(method=b"DELETE", headers=KEPT) + get(b"/echo?q=2"))
    assert status_of(answer) == 405 and b'"q":"2"' in answer


def test_byte_by_byte(http_server):  # H01
    with http_server.socket() as s:
        for byte in post(b'{"a": 1}', b"Content-Length: 8\r\n"):
            s.sendall(bytes([byte]))
        answer = read_all(s)
    assert status_of(answer) == 200 and b'"n":8' in answer


def test_many_small_chunks(http_server):  # H12
    body = b"1\r\nx\r\n" * 20000 + b"0\r\n\r\n"
    answer = http_server.raw(post(body, b"Transfer-Encoding: chunked\r\n"))
    assert status_of(answer) == 200 and b'"n":20000' in answer


def test_endless_chunks_end_at_the_limit(http_server):  # H13
    with http_server.socket() as s:
        s.sendall(post(b"", b"Transfer-Encoding: chunked\r\n"))
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        try:
            for _ in range(64):
                s.sendall(chunk)
        except OSError:
            pass
        answer = read_all(s)
    assert status_of(answer) in (413, None)
    wait_until(lambda: http_server.state()["calls"] == 1, "the call is gone")


def test_http_1_0_stream_is_closed_at_its_end(http_server):  # H25
    answer = http_server.raw(b"GET /stream?n=2 HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
    assert status_of(answer) == 200 and answer.count(b"data: ") == 2 and b"chunked" not in answer


def test_head_has_no_body(http_server):
    answer = http_server.raw(get(method=b"HEAD", headers=HOST))
    assert status_of(answer) == 200 and answer.endswith(b"\r\n\r\n")


def test_own_and_friendly_origins(http_server):
    own = {"Origin": f"http://127.0.0.1:{http_server.port}"}
    assert http_server.post("/echo", {}, headers=own).status == 200
    friend = http_server.post("/echo", {}, headers={"Origin": "https://friend.example"})
    assert friend.status == 200
    assert friend.headers["Access-Control-Allow-Origin"] == "https://friend.example"
    preflight = http_server.request("OPTIONS", "/echo", headers={"Origin": "https://friend.example", "Access-Control-Request-Method": "POST"})
    assert preflight.status == 204 and "POST" in preflight.headers["Access-Control-Allow-Methods"]
    evil = http_server.request("OPTIONS", "/echo", headers={"Origin": "https://evil.example"})
    assert not [h for h in evil.headers if h.lower().startswith("access-control")]
    assert "Access-Control-Allow-Origin" not in http_server.get("/echo", headers={"Origin": "https://evil.example"}).headers


def test_anthropic_shape(http_server):
    reply = http_server.request("POST", "/echo/x", body="{}", headers={"Content-Type": "text/plain"})
    assert reply.status == 415 and reply.json["type"] == "error"
    assert set(reply.json["error"]) == {"type", "message", "details"}


# ---- clients that leave ----


def leave_by_close(s):
    s.close()


def leave_by_half_close(s):
    s.shutdown(socket.SHUT_WR)


@pytest.mark.threads
@pytest.mark.parametrize("leave", [leave_by_close, reset, leave_by_half_close])
def test_client_that_leaves_is_seen(drive, leave):  # FT06, FT07
    d = drive()
    sockets = [d.socket() for _ in range(10)]
    for s in sockets:
        s.sendall(post(b"{}", b"Content-Length: 2\r\n", b"/hold"))
    wait_until(lambda: d.state()["held"] == 10, "all are held")
    for s in sockets:
        leave(s)
    wait_until(lambda: d.state()["left"] == 10, "all are seen to leave")
    wait_until(lambda: d.state()["calls"] == 1, "nothing is left of them")


def test_half_closed_client_is_served_where_allowed(drive):  # FT14
    d = drive(half_close=1)
    with d.socket() as s:
        s.sendall(post(b"{}", b"Content-Length: 2\r\n", b"/hold"))
        wait_until(lambda: d.state()["held"] == 1, "it is held")
        s.shutdown(socket.SHUT_WR)
        assert d.state()["left"] == 0
        reset(s)
    wait_until(lambda: d.state()["left"] == 1, "it left altogether")


@pytest.mark.parametrize("cut", range(0, 100, 7))
def test_client_leaves_inside_its_request(http_server, cut):  # H42
    whole = post(b'{"a": 1}', b"Content-Length: 8\r\n")
    with http_server.socket() as s:
        s.sendall(whole[: min(cut, len(whole) - 1)])
        reset(s)
    wait_until(lambda: http_server.state()["calls"] == 1, "nothing is left")


@pytest.mark.threads
@pytest.mark.parametrize("writer_sends", [0, 1])
def test_slow_reader_is_cut_off(drive, writer_sends):  # FT12
    d = drive(stream=65536, writer_sends=writer_sends)
    with d.socket() as s:
        s.sendall(b"POST /pour HTTP/1.1\r\n" + HOST + b"\r\n")
        wait_until(lambda: d.state()["cut_off"] == 1, "it is cut off")
        wait_until(lambda: d.state()["streams"] == 0, "its stream is gone")


@pytest.mark.parametrize("writer_sends", [0, 1])
def test_reader_that_stalls_is_cut_off(drive, writer_sends):  # FT12
    d = drive(stall_s=1, stream=1 << 26, writer_sends=writer_sends)
    with d.socket() as s:
        s.sendall(b"GET /stream?n=4000&bytes=4096&late=1 HTTP/1.1\r\n" + HOST + b"\r\n")
        wait_until(lambda: d.state()["cut_off"] == 1, "it is cut off")
        wait_until(lambda: d.state()["streams"] == 0, "its stream is gone")


@pytest.mark.threads
@pytest.mark.parametrize("writer_sends", [0, 1])
def test_streams_are_whole(drive, writer_sends):
    """Every byte arrives in order, from whichever thread it came."""
    d = drive(stream=1 << 22, writer_sends=writer_sends)
    connections = [d.connection() for _ in range(16)]
    for i, c in enumerate(connections):
        c.request("GET", f"/stream?n=500&bytes={100 + i}&late={i % 2}")
    for i, c in enumerate(connections):
        events = list(events_of(c.getresponse()))
        assert events == [b"x" * (100 + i)] * 500
        c.close()


def test_silent_stream_gets_comments(drive):
    d = drive(keep_alive_s=1)
    with d.socket() as s:
        s.sendall(post(b"{}", b"Content-Length: 2\r\n", b"/quiet"))
        read_until(s, b": ping\n\n")


# ---- deadlines and limits ----


def test_headers_that_never_end(drive):  # H02, H03
    d = drive(header_s=1)
    with d.socket() as s:
        s.sendall(b"GET /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        assert status_of(read_all(s)) in (408, None)
    with d.socket() as s:  # not a byte
        assert read_all(s) == b""
    wait_until(lambda: d.state()["timed_out"] == 2, "both were counted")


def test_body_that_never_comes(drive):  # H04
    d = drive(body_s=1)
    with d.socket() as s:
        s.sendall(post(b"{", b"Content-Length: 1000\r\n"))
        assert status_of(read_all(s)) == 408
    wait_until(lambda: d.state()["calls"] == 1, "nothing is left")


def test_idle_connection_is_closed(drive):
    d = drive(idle_s=1)
    with d.socket() as s:
        s.sendall(get(headers=KEPT))
        assert status_of(read_all(s)) == 200


def test_connections_of_one_address(drive):
    d = drive(per_address=4)
    held = [d.socket() for _ in range(3)]
    for s in held:
        s.sendall(post(b"{}", b"Content-Length: 2\r\n", b"/hold"))
    wait_until(lambda: d.state()["held"] == 3, "three are held")
    more = [d.socket() for _ in range(4)]
    assert any(read_all_soon(s) for s in more)
    for s in held + more:
        s.close()


def read_all_soon(s):
    """True: the server closed it."""
    try:
        s.sendall(get(headers=HOST))
        return read_all(s) == b""
    except OSError:
        return True


def test_many_idle_connections(drive):  # FT15
    d = drive(connections=1000)
    idle = [d.socket() for _ in range(500)]
    wait_until(lambda: d.state()["connections"] == 501, "all are there")
    assert d.get("/echo").status == 200
    for s in idle:
        s.close()
    wait_until(lambda: d.state()["connections"] == 1, "all are gone")


# ---- keys ----

USER = "user-key-0123456789"
ADMIN = "admin-key-0123456789"


@pytest.fixture(scope="module")
def locked():
    from serving import Driver

    driver = Driver(keys={"HADAL_API_KEY": USER, "HADAL_ADMIN_KEY": ADMIN})
    yield driver
    driver.close()


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


KEY_ROWS = [
    ("/echo/x", {}, 200),
    ("/user", {}, 401),
    ("/user", bearer(USER), 200),
    ("/user", {"Authorization": f"bearer  {USER}"}, 200),
    ("/user", {"x-api-key": USER}, 200),
    ("/user", bearer(ADMIN), 200),
    ("/user", bearer(USER + "x"), 401),
    ("/user", bearer(USER[:-1]), 401),
    ("/user", bearer(""), 401),
    ("/user", {"Authorization": "Basic " + USER}, 401),
    ("/user", {"Authorization": USER}, 401),
    ("/user", bearer("a" * 10240), 401),
    ("/admin", {}, 401),
    ("/admin", bearer(USER), 403),
    ("/admin", bearer(ADMIN), 200),
    ("/nothing", {}, 404),
    ("/nothing", bearer(USER), 404),
]


@pytest.mark.parametrize("path, headers, status", KEY_ROWS)
def test_keys(locked, path, headers, status):  # H41, E03
    reply = locked.post(path, {}, headers=headers)
    assert reply.status == status
    if status == 200:
        assert reply.json["salted"] == (path != "/echo/x")
    if status == 401:
        assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert USER not in reply.text and reply.json["error"]["type"] == "authentication_error"


def test_two_authorizations(locked):  # H41
    one = f"Authorization: Bearer {USER}\r\n".encode()
    assert status_of(locked.raw(get(b"/user", HOST + one + one))) == 400


def test_without_keys_all_is_open_on_loopback(http_server):
    assert http_server.post("/user", {}).status == 200
    assert http_server.post("/admin", {}).status == 200
