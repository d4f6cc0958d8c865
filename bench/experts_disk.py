#!/usr/bin/env python3
"""Experts on disk beside the disk, and beside the same model in memory.

    bench/experts_disk.py [--hadal build/hadal] [--layers 5] [--folder /tmp] [--rooms 0.1 0.5 1.1] [--tokens 64] [--runs 3] [--threads 1]

A random checkpoint (V2-Lite's shape in FP8 with fewer layers, an expert takes 8.7 MB). For each room, a
server answers one prompt; *read* is what it fetched in the time of that answer, *disk* the rate at which
eight threads read pieces of the same size with O_DIRECT, at random places of the same file, right after.
All in memory: the answer's time when every expert is staged, over that of a server without the option. *Limit* is
the longer of that time and of the same reads at the disk's rate.
The page cache forgets the file before each run. Needs the program, Python alone and the space; the checkpoint
is deleted at the end."""

import argparse
import concurrent.futures
import json
import mmap
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
from start import make  # noqa: E402

READERS = 8
PAGE = 4096


def forget(path):
    with open(path, "rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_rate(path, size, n):
    """Bytes per second of n reads by READERS threads."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = -(-size // PAGE) * PAGE
    places = (os.fstat(fd).st_size - size) // PAGE

    def reader(count):
        with mmap.mmap(-1, size) as to:
            for _ in range(count):
                assert os.preadv(fd, [to], random.randrange(places) * PAGE) == size

    begun = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        list(pool.map(reader, [-(-n // READERS)] * READERS))
    took = time.perf_counter() - begun
    os.close(fd)
    return -(-n // READERS) * READERS * size / took


class Server:
    def __init__(self, a, folder, *flags):
        command = [a.hadal, "serve", folder, "--port", "0", "--threads", a.threads, "--context", 512, *flags]
        self.process = subprocess.Popen([str(w) for w in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in self.process.stdout:
            if line.startswith("hadal "):
                self.url = re.search(r"http://\S+", line)[0]
            if line.startswith("ready"):
                break

    def answer(self, tokens):
        """Seconds, and what the metrics grew by."""
        body = {"prompt": "once upon a time there was", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        call = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        before, begun = self.figures(), time.perf_counter()
        urllib.request.urlopen(call).read()
        took, after = time.perf_counter() - begun, self.figures()
        return took, {name: after[name] - before[name] for name in before}

    def figures(self):
        text = urllib.request.urlopen(self.url + "/metrics").read().decode()
        return {name: float(value) for name, value in re.findall(r"^hadal_(experts?_\w+)\{.*\} (\S+)$", text, re.M)}

    def __enter__(self):
        return self

    def __exit__(self, *why):
        self.process.terminate()
        self.process.wait()


def answer(a, folder, *flags, warm=0):
    file = folder / "model.safetensors"
    forget(file)
    with Server(a, folder, *flags) as server:
        for _ in range(warm):
            server.answer(a.tokens)
        return server.answer(a.tokens)


def print_room(a, folder, room, compute):
    runs = []
    for _ in range(a.runs):
        took, grew = answer(a, folder, "--experts-disk", room)
        each = grew["expert_fetch_bytes_total"] / grew["experts_fetched_total"]
        disk = disk_rate(folder / "model.safetensors", int(each), max(64, int(grew["experts_fetched_total"]) // 4))
        used = grew["experts_used_total"]
        right = grew["experts_predicted_right_total"] / max(1, grew["experts_predicted_total"])
        ahead = grew["experts_fetched_ahead_total"] / grew["experts_fetched_total"]
        rate = grew["expert_fetch_bytes_total"] / took
        limit = max(took * rate / disk, compute) / took
        runs.append((took, grew["experts_staged_total"] / used, right, ahead, rate / 1e9, disk / 1e9, rate / disk, limit))
    took, hit, right, ahead, read, disk, ratio, limit = (statistics.median(r) for r in zip(*runs))
    print(f"| {room:g} GB | {a.tokens / took:.1f} | {hit:.0%} | {right:.0%} | {ahead:.0%} | {read:.2f} | {disk:.2f} | {ratio:.2f} | {limit:.2f} |", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--hadal", default=str(ROOT / "build" / "hadal"))
    p.add_argument("--layers", type=int, default=5)
    p.add_argument("--folder", default=None)
    p.add_argument("--rooms", type=float, nargs="+", default=[0.1, 0.5, 1.1])
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--threads", type=int, default=1)
    a = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the folder is deleted then too
    with tempfile.TemporaryDirectory(dir=a.folder) as name:
        folder = Path(name)
        size = make(folder, a.layers)
        os.sync()
        print(f"{size / 1e9:.2f} GB, {a.threads} threads, load average {os.getloadavg()[0]:.1f}, medians of {a.runs}:\n")
        pairs = [(answer(a, folder, "--experts-disk", "auto", warm=1)[0], answer(a, folder, warm=1)[0]) for _ in range(a.runs)]
        staged, plain = (statistics.median(t) for t in zip(*pairs))
        ratio = statistics.median(x / y for x, y in pairs)
        print(f"all in memory: {a.tokens / staged:.1f} tokens/s, without the option {a.tokens / plain:.1f}; median ratio of the times {ratio:.3f}\n", flush=True)
        print("| room | tokens/s | were there | predicted right | read ahead | read GB/s | disk GB/s | read / disk | limit / ours |")
        print("|---|---|---|---|---|---|---|---|---|")
        for room in a.rooms:
            print_room(a, folder, room, staged)


if __name__ == "__main__":
    main()
