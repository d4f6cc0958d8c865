"""The tasks of the suite, asked by 64 clients: several ranks reply as one, as threads, as processes that mpirun starts,
on two hosts, and while one of them is killed and comes back."""

import shutil
import signal

import pytest
from hosts import host  # noqa: F401
from serving import Server, wait_until
from suite import load_tasks, replies
from worlds import CLEAN, KEY, NO_DEVICE, TRANSPORTS, end_mpirun, free_address, needs_ucx

pytestmark = [needs_ucx, pytest.mark.long]
CLIENTS = 64
FLAGS = ("--max-running", 64, "--context", 8192, "--backend", "cpu")
LAYOUT = ("--tp", 2, "--ep", 2)
TASKS = load_tasks(CLIENTS)


@pytest.fixture(scope="module")
def want():
    server = Server(*FLAGS)
    try:
        return replies(server, TASKS, CLIENTS)
    finally:
        server.close()


def check(server, want, then=lambda: None):
    for task, h, w in zip(TASKS, replies(server, TASKS, CLIENTS, then), want):
        assert h == w, task
    assert server.get("/server_info").json["parallel"]["ranks"] == 4


def test_threads(serve, want):
    check(serve(*FLAGS, "--tp", 4), want)


def test_processes_of_mpirun(want):
    if not shutil.which("mpirun"):
        pytest.skip("mpirun is not installed")
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    server = Server(*FLAGS, *LAYOUT, "--meet", free_address(), launcher=launcher, env=CLEAN)
    check(server, want)
    assert end_mpirun(server) == 4


@pytest.mark.skipif("tcp" not in TRANSPORTS, reason=NO_DEVICE)
def test_two_hosts(world, host, want):  # noqa: F811
    name, net, veth = host
    wrap = lambda rank: ["ip", "netns", "exec", name, "env", f"UCX_NET_DEVICES={veth[1]}"] if rank > 1 else []
    env = {**KEY, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": f"{veth[0]},lo"}
    check(world(4, *LAYOUT, env=env, meet=f"{net}.1:30178", wrap=wrap, base=FLAGS).server, want)


def test_a_rank_is_killed_and_comes_back(world, want):
    w = world(4, *LAYOUT, base=FLAGS)

    def lose():
        wait_until(lambda: w.server.loads()["num_running_reqs"] > CLIENTS / 4, "many run")
        w.ranks[3].send_signal(signal.SIGKILL)
        wait_until(lambda: w.server.get("/health").text.startswith("degraded: rank 3 is lost"), "it is missed")
        w.ranks[3].communicate()
        w.start(3)

    check(w.server, want, lose)
    wait_until(lambda: w.server.get("/health").text == "ok", "rank 3 is back")
    check(w.server, want)
