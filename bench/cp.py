#!/usr/bin/env python3
"""Prompts on one process, and on several that divide experts alone (--ep) or the rows of prompts too (--cp), each with
one core.

    bench/cp.py MODEL [--ranks 2] [--lengths 512 4096] [--chunk 512] [--rounds 5] [--best] [--hadal build/hadal] [-- FLAG...]

MODEL is a folder with weights; FLAGs go to all servers. Prints a table for docs/perf: seconds until a prompt of so many
random tokens has its first token, the median of rounds or with --best the least, as is right beside other load; the
same of processor time, of the busiest process; and the bytes of a token that rank 0 received by all-gathers.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from served import free_port

ROOT = Path(__file__).resolve().parents[1]


class Server:
    """hadal serve as n processes, rank i on core i."""

    def __init__(self, a, n, *layout):
        self.port, meet = free_port(), free_port()
        common = [a.hadal, "serve", a.model, "--backend", "cpu", "--port", str(self.port), "--no-sandbox", "--no-drafts", "--threads", "1", "--chunk", str(a.chunk),
                  "--step-tokens", str(a.chunk + 64), "--context", str(max(a.lengths) + 64), *a.flags]  # fmt: skip
        ranks = [*layout, "--world", str(n), "--meet", f"127.0.0.1:{meet}"] if n > 1 else []
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


def measure(a, server):
    """Of each length the seconds and processor seconds of a prompt, and the bytes of a token."""
    draw, rows = random.Random(7), {}
    for length in a.lengths:
        prompt = lambda: server.prompt([draw.randrange(10, a.vocab) for _ in range(length)])
        prompt()
        before = server.gathered()
        took = list(zip(*[prompt() for _ in range(a.rounds)]))
        bytes_each = (server.gathered() - before) / a.rounds / length
        rows[length] = [min(x) if a.best else statistics.median(x) for x in took] + [bytes_each]
    server.close()
    return rows


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("model")
    p.add_argument("--hadal", default=str(ROOT / "build" / "hadal"))
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    p.add_argument("--chunk", type=int, default=512)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--best", action="store_true")
    p.add_argument("flags", nargs="*")
    a = p.parse_args()
    a.vocab = json.loads((Path(a.model) / "config.json").read_text())["vocab_size"]
    n = str(a.ranks)
    ways = {"one": measure(a, Server(a, 1)),
            f"ep {n}": measure(a, Server(a, a.ranks, "--ep", n)),
            f"cp {n} ep {n}": measure(a, Server(a, a.ranks, "--cp", n, "--ep", n))}  # fmt: skip
    heads = ["tokens", *(f"{way}, ms" for way in ways), "one / cp", "ep / cp", *(f"{way}, ms of a core" for way in ways), "one / cp", "bytes of a token"]
    print(f"Load average {os.getloadavg()[0]:.1f}:\n\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for length in a.lengths:
        one, ep, cp = (rows[length] for rows in ways.values())
        cells = [f"{length:,}", *(f"{1e3 * x[0]:.1f}" for x in (one, ep, cp)), f"{one[0] / cp[0]:.2f}", f"{ep[0] / cp[0]:.2f}"]
        cells += [*(f"{1e3 * x[1]:.1f}" for x in (one, ep, cp)), f"{one[1] / cp[1]:.2f}", f"{cp[2]:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


main()
