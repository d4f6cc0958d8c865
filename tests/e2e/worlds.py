"""A world of ranks in processes, for tests."""

import os
import pathlib
import signal
import subprocess

import pytest
from conftest import HADAL, for_gpu
from serving import TINY, Server, free_port, wait_until

FAULTY = pathlib.Path(HADAL).parent / "drive_ranks"
SMALL = ("--threads", 1, "--max-running", 16, "--context", 1024, "--backend", "cpu")
NO_DEVICE = "UCX finds no network device without /sys/class/net"
# what the environment of another launcher says is not meant for these ranks
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "UCX_TLS"))}
# environments: memory that ranks share themselves, or UCX alone
TRANSPORTS = {"shared memory": {}}
UCX_MEMORY = {"UCX_TLS": "sysv,self"}
if os.path.exists("/sys/class/net"):  # where UCX finds its devices
    TRANSPORTS["tcp"] = {"UCX_TLS": "tcp,self"}
KEY = {"HADAL_RANK_KEY": "a secret of all ranks"}

needs_ucx = pytest.mark.skipif(
    "built without UCX" in subprocess.run([HADAL, "serve", TINY, "--ep", "2", "--backend", "cpu", "--rank", "0", "--world", "2", "--meet", "127.0.0.1:1", "--start-seconds", "1", "--no-sandbox", "--port", "0"], capture_output=True, text=True).stderr,
    reason="this build has no UCX",
)  # fmt: skip


def free_address(host="127.0.0.1"):
    return f"{host}:{free_port(host)}"


def end_mpirun(server):
    """By rank 0, which the others follow; mpirun would not wait for them. Returns how many there were."""
    pid = server.process.pid
    children = [int(p) for p in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    first = [p for p in children if b"OMPI_COMM_WORLD_RANK=0\0" in pathlib.Path(f"/proc/{p}/environ").read_bytes()]
    assert len(first) == 1
    os.kill(first[0], signal.SIGTERM)
    assert server.wait() == 0, server.log.decode()
    return len(children)


class World:
    """Rank 0 with the other ranks, which are the processes `ranks[1:]`."""

    def __init__(self, n, *flags, env=None, meet=None, wrap=lambda rank: [], faults=None, before=lambda world: None, serve=Server, base=SMALL, program=HADAL):
        """faults: of ranks, as drive_ranks takes them. before: called before rank 0 is started. serve: makes rank 0.
        base: flags of all tests. program: of the ranks."""
        self.program = program
        self.meet = meet or free_address()
        self.env = {**CLEAN, **(env or {})}
        self.flags = [*base, *flags, "--world", n, "--meet", self.meet]
        self.wrap = wrap
        self.ranks = [None] * n
        for rank in range(1, n):
            self.start(rank, (faults or {}).get(rank))
        before(self)
        fault = (faults or {}).get(0)
        self.server = serve(*self.flags, "--rank", 0, program=FAULTY if fault else program, env={**self.env, "FAULT": fault} if fault else self.env)
        self.ranks[0] = self.server.process

    def start(self, rank, fault=None):
        words = [*self.wrap(rank), *for_gpu([FAULTY if fault else self.program, "serve", TINY, *self.flags, "--rank", rank])]
        env = {**self.env, "FAULT": fault} if fault else self.env
        self.ranks[rank] = subprocess.Popen([str(w) for w in words], env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def close(self):
        """Ends rank 0; the others end with it. Returns what they said."""
        if self.server.process.poll() is None:
            self.server.signal(signal.SIGTERM)
        self.server.wait()
        return [(p.communicate()[1], p.returncode) for p in self.ranks[1:]]

    def close_idle(self):
        """The same, once nothing runs: no page of a group's KV pools is held, whatever was lost before."""
        held = lambda: sum(float(line.rsplit(" ", 1)[1]) for line in self.server.get("/metrics").text.splitlines() if line.startswith("hadal_kv_used_tokens"))
        wait_until(lambda: self.server.stats()["hadal_living_requests"] == 0 and held() == 0, "all pages are given back")
        assert self.server.stats()["hadal_audits_failed_total"] == 0
        return self.close()

    def kill(self):
        for p in self.ranks:
            if p and p.poll() is None:
                p.send_signal(signal.SIGCONT)
                p.kill()
                p.wait()
