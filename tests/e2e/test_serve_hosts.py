"""`--hosts` starts all ranks: here as processes, elsewhere by ssh."""

import os
import re
import signal
import socket
import subprocess

import pytest
from conftest import HADAL
from hosts import host, ssh_host  # fixtures
from serving import TINY, Server
from test_ranks import answers
from worlds import CLEAN, SMALL, free_address, needs_ucx

pytestmark = needs_ucx

SSH = """#!/bin/sh
# ssh -o BatchMode=yes -- HOST COMMAND, on this host: what an ssh server does with it
echo "$4" >> "$SSH_LOG"
[ "$4" = unreachable ] && echo "ssh: connect to host $4: no route" >&2 && exit 255
cd / && exec env -u HADAL_RANK_KEY sh -c "$5"
"""


@pytest.fixture
def ssh(tmp_path):
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    return {**CLEAN, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SSH_LOG": str(tmp_path / "log")}


def hosts_of(env):
    with open(env["SSH_LOG"]) as f:
        return f.read().split()


def children(pid):
    out = subprocess.run(["ps", "-o", "args=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [line for line in out.splitlines() if "hadal" in line]


@pytest.mark.parametrize("layout", [("--dp", 2, "--ep", 4), ("--dwdp", 4)])
def test_two_hosts_answer_as_one(ssh, layout):
    one = Server(*SMALL)
    want = answers(one)
    one.close()
    server = Server(*SMALL, *layout, "--hosts", "here,there", "--meet", free_address(), env=ssh)
    assert hosts_of(ssh) == ["there", "there"]
    assert server.get("/server_info").json["parallel"]["ranks"] == 4
    assert answers(server) == want
    others = children(server.process.pid)
    assert len(others) == 3 and not any("HADAL_RANK_KEY=" in line for line in others)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.mark.parametrize("layout", [("--tp", 2), ("--dp", 2, "--ep", 2)])
def test_two_hosts_by_an_ssh_server(ssh_host, layout):
    """As docs/ranks.md says it, and nothing more."""
    env, address = ssh_host
    one = Server(*SMALL)
    want = answers(one)
    one.close()
    server = Server(*SMALL, *layout, "--hosts", "a,b", "--meet", f"{address}:30178", env=env)
    assert answers(server) == want
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    log = server.log.decode()
    assert "rank 1@b rank_follows" in log, log
    assert re.search(r'rank_rate between="rank 0 on \S+ and rank 1 on b"', log), log


def test_processes_of_this_host(ssh):
    server = Server(*SMALL, "--ep", 2, "--hosts", "localhost", "--meet", free_address(), env=ssh)
    assert not os.path.exists(ssh["SSH_LOG"]) and len(children(server.process.pid)) == 1
    assert server.get("/server_info").json["parallel"]["ranks"] == 2
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


def refused(env, *flags, port=0):
    words = [HADAL, "serve", TINY, *SMALL, "--port", port, *flags]
    p = subprocess.run([str(w) for w in words], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return p.returncode, p.stderr


def test_a_host_that_is_not_there_ends_the_start(ssh):
    code, text = refused(ssh, "--ep", 2, "--hosts", "here,unreachable", "--meet", free_address())
    assert code == 5 and "rank 1 on unreachable ended with exit code 255" in text, text


def test_a_rank_0_that_cannot_start_stops_the_others(ssh):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = refused(ssh, "--ep", 2, "--hosts", "localhost", "--meet", free_address(), "--start-seconds", 600, port=port)
    assert code != 0 and f"port {port}" in text, text


def test_a_rank_0_that_others_do_not_reach_stops_them(ssh):
    """0x7f.1 is 127.0.0.1, as the host's own name is on Debian. Rank 0 is in its sandbox when it finds out."""
    meet = f"0x7f.1:{free_address().rsplit(':', 1)[1]}"
    code, text = refused(ssh, "--ep", 2, "--hosts", "localhost", "--meet", meet, "--start-seconds", 600)
    assert code == 2 and f"rank 0 cannot be met at {meet}: on its own host that is a loopback address" in text, text


@pytest.mark.parametrize("flags, why", [
    (("--ep", 2, "--hosts", "a,b"), "--hosts needs --meet HOST:PORT"),
    (("--ep", 2, "--hosts", "a,,b", "--meet", "127.0.0.1:1"), "'' is no name of a host"),
    (("--ep", 2, "--hosts", ""), "--hosts names no host"),
    (("--ep", 2, "--hosts", "a,-oProxyCommand=x", "--meet", "127.0.0.1:1"), "'-oProxyCommand=x' is no name of a host"),
    (("--ep", 2, "--hosts", "a,b,c", "--meet", "127.0.0.1:1"), "more hosts than 2 ranks"),
    (("--hosts", "a,b", "--meet", "127.0.0.1:1"), "for 2 to 64 ranks, not for 1"),
    (("--ep", 2, "--hosts", "a,b", "--rank", 0, "--world", 2), "no --rank"),
])  # fmt: skip
def test_refusals(ssh, flags, why):
    code, text = refused(ssh, *flags)
    assert code != 0 and why in text, text


def test_gpus_of_two_hosts_are_refused(ssh):
    words = [HADAL, "serve", TINY, "--port", "0", "--ep", "2", "--hosts", "a,b", "--backend", "cuda"]
    p = subprocess.run([str(w) for w in words], env=ssh, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert p.returncode != 0 and "no rows of GPUs travel between two hosts" in p.stderr, p.stderr
