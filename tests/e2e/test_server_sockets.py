"""What --host listens on: every address of the name that this machine has, all on one port."""

import contextlib
import http.client
import json
import os
import shlex
import shutil
import socket
import subprocess

import pytest
from conftest import HADAL
from serving import TINY, read_all

HI = json.dumps({"prompt": "a", "max_tokens": 3})
NULL = ["--backend", "null"]
SERVE = ["serve", TINY, *NULL]


def has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as s:
        s.bind(("::1", 0))
        return True
    return False


def bracket(address):
    return f"[{address}]" if ":" in address else address


def listens(server):
    """The addresses that the start names."""
    line = next(line for line in server.said.splitlines() if line.startswith("  listens "))
    pairs = [word.rsplit(":", 1) for word in line.split(None, 1)[1].split(", ")]
    assert {int(port) for _, port in pairs} == {server.port}
    return [address.strip("[]") for address, _ in pairs]


def ask(server, address, host=None):
    c = http.client.HTTPConnection(address, server.port, timeout=60)
    c.request("POST", "/v1/completions", HI, {"Content-Type": "application/json", "Host": host or f"{bracket(address)}:{server.port}"})
    status = c.getresponse().status
    c.close()
    return status


def refuses(address, port):
    try:
        socket.create_connection((address, port), timeout=60).close()
    except OSError:
        return True
    return False


@pytest.fixture
def machine(tmp_path):
    """machine(hosts): a program that is hadal on a machine with this /etc/hosts, or none, and no name server."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody have mounts of his own (unshare -m)")

    def make(hosts):
        etc = tmp_path / "etc"
        etc.mkdir()
        for name in ("passwd", "group", "ld.so.cache"):
            shutil.copy(f"/etc/{name}", etc)
        (etc / "nsswitch.conf").write_text("hosts: files\n")
        (etc / "host.conf").write_text("multi on\n")
        if hosts:
            (etc / "hosts").write_text(hosts)
        program = tmp_path / "hadal"
        program.write_text(f"#!/bin/sh\nexec unshare -m sh -c 'mount --bind {shlex.quote(str(etc))} /etc && exec \"$@\"' sh {shlex.quote(HADAL)} \"$@\"\n")
        program.chmod(0o755)
        return program

    return make


@pytest.mark.threads
@pytest.mark.parametrize("port", ["any", "fixed"])
def test_localhost_is_both_loopback_addresses(serve, port):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1] if port == "fixed" else 0
    s = serve(*NULL, "--host", "localhost", port=number)
    own = ["127.0.0.1", "::1"] if has_ipv6() else ["127.0.0.1"]
    assert sorted(listens(s)) == own
    assert f"http://localhost:{s.port}" in s.said
    for address in own:
        assert ask(s, address) == 200
        assert ask(s, address, "localhost") == 200
        assert ask(s, address, "evil.example") == 421
    s.close()
    assert all(refuses(address, s.port) for address in own)


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "[::1]"), ("0.0.0.0", "0.0.0.0"), ("::", "[::]")])
def test_an_address_is_what_is_said(serve, host, url):
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    s = serve(*NULL, "--host", host, "--insecure-no-auth")
    assert s.said.splitlines()[0].endswith(f"http://{url}:{s.port}")
    assert listens(s) == [host]
    assert ask(s, host) == 200
    if host == "::":
        assert ask(s, "127.0.0.1") == 200, "alone, it takes IPv4 too"


def test_every_address_of_a_name(serve, machine):
    """Repeated ones once, those that this machine lacks not at all; the name itself is served."""
    program = machine("127.0.0.1 many\n127.0.0.2 many\n127.0.0.2 many\n127.0.0.3 many\n192.0.2.1 many\n::1 many\n")
    s = serve(*NULL, "--host", "many", program=program)
    own = ["127.0.0.1", "127.0.0.2", "127.0.0.3"] + (["::1"] if has_ipv6() else [])
    assert sorted(listens(s)) == own
    assert [ask(s, address, f"many:{s.port}") for address in own] == [200] * len(own)
    assert ask(s, "127.0.0.2", "evil.example") == 421
    s.close()
    assert b"address_left_out" in s.log and b"192.0.2.1" in s.log


def test_one_address_that_others_reach_needs_keys(machine):
    if not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    program = machine("::1 half\n0.0.0.0 half\n")
    said = subprocess.run([program, *SERVE, "--port", "0", "--host", "half"], capture_output=True, text=True)
    assert said.returncode == 2 and "--api-key-file" in said.stderr


def test_no_address_of_the_name_is_here(machine):
    program = machine("192.0.2.1 away\n")
    said = subprocess.run([program, *SERVE, "--port", "0", "--host", "away"], capture_output=True, text=True)
    assert said.returncode == 4 and "192.0.2.1" in said.stderr


def test_localhost_without_a_file_of_hosts(serve, machine):
    s = serve(*NULL, "--host", "localhost", program=machine(None))
    assert "127.0.0.1" in listens(s) and ask(s, "127.0.0.1") == 200


def test_a_port_that_is_taken_on_one_address_is_named(hadal):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = hadal(*SERVE, "--host", "localhost", "--port", taken.getsockname()[1])
    assert said.returncode == 4 and "on 127.0.0.1 is taken by another program" in said.stderr


def test_streams_on_all_addresses_end_when_the_server_does(serve):
    """A stop waits for answers that run on any of them and refuses new connections on all."""
    s = serve(*NULL, "--host", "localhost", "--null-step-us", "20000")
    body = json.dumps({"prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True})
    clients = []
    for address in listens(s):
        c = socket.create_connection((address, s.port), timeout=120)
        c.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        assert b"200 OK" in c.recv(65536)
        clients.append(c)
    s.close()
    assert all(b"[DONE]" in read_all(c) for c in clients)
