"""Servers for benchmarks, of one process or of a process for each rank, and loads on them.

HADAL names the program (default build/hadal)."""

import json
import os
import pathlib
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
HADAL = os.environ.get("HADAL", str(ROOT / "build" / "hadal"))
# what a launcher says to the ranks of another job is not meant for these
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def hadal(*words, json_to=None, **process):
    """Runs a command with --json; what it printed, or wrote to a file."""
    json_flag = ("--json", json_to) if json_to else ("--json",)
    done = subprocess.run([HADAL, *map(str, words), *json_flag], cwd=ROOT, capture_output=True, text=True, **process)
    if done.returncode:
        raise RuntimeError(f"hadal {' '.join(map(str, words[:2]))}: {(done.stderr or done.stdout).strip()[-300:]}")
    return json.loads(pathlib.Path(json_to).read_text() if json_to else done.stdout)


RUNNING = set()  # numbers of the servers' processes


class Served:
    """`hadal serve MODEL OPTIONS` on the CPU: with `world` ranks in as many processes, else in one."""

    def __init__(self, model, *options, world=1):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = [HADAL, "serve", model, "--backend", "cpu", "--port", self.port, *options]
        env = {**CLEAN, "HADAL_RANK_KEY": "a secret of all ranks"}
        ranks = [[]]
        if world > 1:
            meet = f"127.0.0.1:{free_port()}"
            ranks = [["--world", world, "--meet", meet, "--rank", r] for r in range(world)]
        self.ranks = [subprocess.Popen([str(w) for w in words + of], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                      for of in ranks]  # fmt: skip
        RUNNING.update(r.pid for r in self.ranks)
        try:
            self.wait_until_healthy()
        except RuntimeError:
            self.close()
            raise

    def wait_until_healthy(self):
        for _ in range(1200):
            if any(r.poll() is not None for r in self.ranks):
                raise RuntimeError("a rank has ended at its start")
            try:
                urllib.request.urlopen(f"{self.url}/health").close()
                return
            except (urllib.error.URLError, ConnectionError):  # not listening yet, or loading
                time.sleep(0.1)
        raise RuntimeError("the server does not begin within two minutes")

    def load(self, *words):
        """Figures of `hadal bench serve` under one load of random tokens."""
        with tempfile.NamedTemporaryFile() as to:
            found = hadal("bench", "serve", self.url, *words, "--ignore-eos", "--token-ids", 1000, "--endpoint", "completions", "-q", json_to=to.name)
        return found["levels"][0]

    def close(self):
        for r in self.ranks:
            if r.poll() is None:
                r.terminate()
        for r in self.ranks:
            r.wait()
            RUNNING.discard(r.pid)

    def __enter__(self):
        return self

    def __exit__(self, *why):
        self.close()
