#!/usr/bin/env python3
"""Prompts on one process and on several that divide their rows (--cp), each with one core, in turn.

    bench/cp.py MODEL [--ranks 2] [--lengths 512 4096] [--chunk 512] [--rounds 5] [--hadal build/hadal] [-- FLAG...]

MODEL is a folder with weights. Prints a table for docs/perf: the median seconds until a prompt of so many random
tokens has its first token, and what rank 0 received by all-gathers. FLAGs go to all servers, for instance --ep 2
to those of several processes only if they name it behind `--many`.
"""

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """hadal serve as n processes, rank i on core i."""

    def __init__(self, a, n):
        self.port, meet = free_port(), free_port()
        common = [a.hadal, "serve", a.model, "--backend", "cpu", "--port", str(self.port), "--no-sandbox", "--no-drafts", "--threads", "1", "--chunk", str(a.chunk),
                  "--step-tokens", str(a.chunk + 64), "--context", str(max(a.lengths) + 64), *a.flags]  # fmt: skip
        ranks = ["--cp", str(n), "--world", str(n), "--meet", f"127.0.0.1:{meet}", *a.many] if n > 1 else []
        self.processes = []
        for i in range(n):
            words = ["taskset", "-c", str(i % os.cpu_count()), *common, *ranks, *(["--rank", str(i)] if n > 1 else [])]
            self.processes.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for _ in range(600):
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.2)
        sys.exit("a server does not start")

    def get(self, path, body=None):
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return reply.read().decode()

    def prompt(self, ids):
        began = time.monotonic()
        before = self.processor()
        self.get("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
        return time.monotonic() - began, max(b - a for a, b in zip(before, self.processor()))

    def processor(self):
        """Seconds of processor time of each process so far."""
        return [sum(int(t.read_text().split()[0]) for t in Path(f"/proc/{p.pid}/task").glob("*/schedstat")) / 1e9 for p in self.processes]

    def gathered(self):
        found = re.search(r'^hadal_rank_exchange_bytes_total\{[^}]*rank="0",kind="all_gather"} (\d+)', self.get("/metrics"), re.MULTILINE)
        return int(found[1]) if found else 0

    def close(self):
        for p in self.processes:
            p.terminate()
        for p in self.processes:
            p.wait()


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("model")
    p.add_argument("--hadal", default=str(ROOT / "build" / "hadal"))
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    p.add_argument("--chunk", type=int, default=512)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--many", nargs="*", default=[], help="words NAME=VALUE: flags of the servers of several processes")
    p.add_argument("flags", nargs="*")
    a = p.parse_args()
    a.many = [w for word in a.many for w in (f"--{word.split('=')[0]}", word.split("=")[1])]
    servers = [Server(a, 1), Server(a, a.ranks)]
    draw = random.Random(7)
    print(f"| tokens | one, s | {a.ranks} processes, s | x | one, s of a core | busiest of {a.ranks} | x | gathered, bytes a token |\n{'|---' * 8}|")
    for length in a.lengths:
        took, rounds = ([], []), a.rounds
        for s in servers:
            s.prompt([draw.randrange(10, 4000) for _ in range(length)])
        before = servers[1].gathered()
        for _ in range(rounds):
            ids = [draw.randrange(10, 4000) for _ in range(length)]
            for k, s in enumerate(servers):
                took[k].append(s.prompt(ids))
        gathered = (servers[1].gathered() - before) / rounds / length
        cells = [f"{length:,}"]
        for which in (0, 1):
            one, many = (statistics.median(t[which] for t in x) for x in took)
            cells += [f"{one:.3f}", f"{many:.3f}", f"{one / many:.2f}"]
        print(f"| {' | '.join(cells)} | {gathered:.0f} |", flush=True)
    for s in servers:
        s.close()


main()
