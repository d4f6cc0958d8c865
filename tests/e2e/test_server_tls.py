"""TLS: handshakes that stop, lie or come by the hundred, and certificates that change while serving."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess

import pytest
from serving import LEAK_CHECKED, TINY, read_all, reset, wait_until

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")

MANY = 60 if LEAK_CHECKED else 300
CLIENT = ssl.create_default_context()
CLIENT.check_hostname, CLIENT.verify_mode = False, ssl.CERT_NONE
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def make_pair(folder, name):
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    subprocess.run([*words, "-keyout", folder / "key.new", "-out", folder / "cert.new"], check=True, capture_output=True)
    for part in ("key", "cert"):  # replaced in one step, as tools that renew certificates do
        os.replace(folder / f"{part}.new", folder / f"{part}.pem")


@pytest.fixture
def secure(serve, tmp_path):
    make_pair(tmp_path, "first")

    def start(*flags):
        return serve("--backend", "null", "--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem", *flags)

    return start


def shake_hands(server):
    return CLIENT.wrap_socket(server.socket())


def request(path, body=None, connection="close"):
    text = json.dumps(body) if body else ""
    method = "POST" if body else "GET"
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def ask(server, path, body=None):
    with shake_hands(server) as s:
        s.sendall(request(path, body))
        return read_all(s).decode()


def figure(server, name):
    line = next(x for x in ask(server, "/metrics").splitlines() if x.startswith(name))
    return float(line.rsplit(" ", 1)[1])


def common_name(s):
    der = s.getpeercert(binary_form=True)
    text = subprocess.run(["openssl", "x509", "-inform", "der", "-noout", "-subject"], input=der, capture_output=True, check=True)
    return text.stdout.decode().rsplit("=", 1)[1].strip()


def first_words():
    """What a client says first."""
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        CLIENT.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


def second_words(s):
    """Goes on until the client would answer; returns what it would say, which is not sent."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = CLIENT.wrap_bio(there, back)
    while True:
        try:
            client.do_handshake()
            return back.read()
        except ssl.SSLWantReadError:
            s.sendall(back.read())
            there.write(s.recv(65536))


def say_nothing(s):
    pass


def say_half(s):
    s.sendall(first_words()[:100])


def say_first_words(s):
    s.sendall(first_words())


def say_all_but_the_end(s):
    s.sendall(second_words(s)[:-1])


STOPPED = [say_nothing, say_half, say_first_words, say_all_but_the_end]


def test_handshakes_that_stop_keep_nobody_waiting(secure):
    """They are closed when their time is over, and counted; meanwhile others are served."""
    s = secure("--header-seconds", "5", "--http-threads", "2")
    stopped = [s.socket() for _ in range(MANY)]
    for i, one in enumerate(stopped):
        STOPPED[i % len(STOPPED)](one)
    assert "200 OK" in ask(s, "/v1/chat/completions", HI)
    assert figure(s, "hadal_http_connections") > MANY
    for one in stopped:
        read_all(one)  # the server closes it
        one.close()
    wait_until(lambda: figure(s, "hadal_tls_handshakes_failed_total") == MANY, "all were counted")
    assert figure(s, "hadal_http_timeouts_total") == MANY
    assert "200 OK" in ask(s, "/v1/chat/completions", HI)


LIES = {
    "plain HTTP": request("/health"),
    "garbage": bytes(range(256)) * 16,
    "zeros": bytes(4096),
    "an endless record": b"\x16\x03\x01\xff\xff" + bytes(70000),
    "an alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "data before the handshake": b"\x17\x03\x03\x00\x10" + bytes(16),
    "the first words twice": None,
}


@pytest.mark.parametrize("what", LIES)
def test_what_is_no_handshake_is_closed_and_counted(secure, what):
    s = secure()
    for _ in range(5):
        answer = s.raw(LIES[what] or first_words() * 2)
        assert b"HTTP" not in answer
    wait_until(lambda: figure(s, "hadal_tls_handshakes_failed_total") == 5, "all were counted")
    assert "200 OK" in ask(s, "/v1/chat/completions", HI)


def test_handshakes_that_end_at_every_byte(secure):
    s = secure()
    hello, n = first_words(), 0
    step = 40 if LEAK_CHECKED else 8
    for end, leave in [(e, how) for e in range(0, len(hello), step) for how in (socket.socket.close, reset)]:
        one = s.socket()
        one.sendall(hello[:end])
        leave(one)
        n += 1
    wait_until(lambda: figure(s, "hadal_tls_handshakes_failed_total") == n, "all were seen to end")
    assert figure(s, "hadal_http_connections") == 1


def test_sessions_that_end_in_the_middle(secure):
    """After the handshake a client that leaves, with or without saying so, frees its request."""
    s = secure("--null-step-us", "20000")
    body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    for leave in (lambda t: t.close(), reset, lambda t: t.shutdown(socket.SHUT_RDWR)):
        t = shake_hands(s)
        t.sendall(request("/v1/completions", body))
        assert b"200" in t.recv(4096)
        leave(t)
        wait_until(lambda: figure(s, "hadal_living_answers") == 0, "it is gone")
    assert figure(s, "hadal_http_clients_gone_total") == 3
    assert figure(s, "hadal_tls_handshakes_failed_total") == 0


def test_a_stream_that_is_read_late_is_whole(secure):
    """What the socket does not take waits, and is encrypted when there is room."""
    s = secure()
    n = 8000
    t = shake_hands(s)
    t.sendall(request("/v1/completions", {"prompt": "a", "max_tokens": n, "ignore_eos": True, "stream": True, "return_token_ids": True}))
    wait_until(lambda: figure(s, "hadal_living_answers") == 0, "all is written")
    body = read_all(t).split(b"\r\n\r\n", 1)[1]
    text = b""
    while body and not body.startswith(b"0\r\n"):
        size, _, body = body.partition(b"\r\n")
        text, body = text + body[: int(size, 16)], body[int(size, 16) + 2 :]
    events = [json.loads(line[6:]) for line in text.split(b"\n\n") if line.startswith(b"data: {")]
    assert sum(len(e["choices"][0].get("token_ids", ())) for e in events if e["choices"]) == n
    assert text.endswith(b"data: [DONE]\n\n") and body == b"0\r\n\r\n"
    t.close()


@pytest.mark.parametrize("allowed", [False, True])
def test_half_closed(secure, allowed):
    """As without TLS: a closed sending side is a client that left, unless --allow-half-close."""
    s = secure("--null-step-us", "20000", *(["--allow-half-close"] if allowed else []))
    t = shake_hands(s)
    t.sendall(request("/v1/completions", {"prompt": "a", "max_tokens": 20, "ignore_eos": True}))
    wait_until(lambda: figure(s, "hadal_living_answers") == 1, "it is there")
    half = socket.socket(fileno=os.dup(t.fileno()))
    half.shutdown(socket.SHUT_WR)  # beneath TLS
    half.close()
    answer = b""
    try:
        while piece := t.recv(65536):
            answer += piece
    except (ssl.SSLError, OSError):
        pass
    assert (b"200 OK" in answer) == allowed
    t.close()
    wait_until(lambda: figure(s, "hadal_living_answers") == 0, "nothing is left")


def test_new_certificate(secure, tmp_path):
    """SIGHUP: later handshakes get it, living connections go on, a bad one changes nothing."""
    s = secure()
    living = shake_hands(s)
    assert common_name(living) == "first"

    def reload(word):
        before = s.process.stderr.fileno()
        s.signal(signal.SIGHUP)
        while word not in s.log:
            piece = os.read(before, 65536)
            assert piece, s.log
            s.log += piece

    make_pair(tmp_path, "second")
    reload(b"certificate_reloaded")
    with shake_hands(s) as fresh:
        assert common_name(fresh) == "second"
    (tmp_path / "cert.pem").write_text("no certificate\n")
    reload(b"certificate_not_reloaded")
    with shake_hands(s) as fresh:
        assert common_name(fresh) == "second"
    (tmp_path / "cert.pem").unlink()
    s.log = b""
    reload(b"certificate_not_reloaded")
    assert b"cert.pem" in s.log
    living.sendall(request("/health", connection="keep-alive"))
    assert b"200 OK" in living.recv(4096)
    living.close()


def test_pair_that_does_not_belong_together(tmp_path, refused):
    make_pair(tmp_path, "first")
    os.replace(tmp_path / "key.pem", tmp_path / "other.pem")
    make_pair(tmp_path, "second")
    said = refused("serve", TINY, "--port", "0", "--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "other.pem")
    assert "other.pem" in said
