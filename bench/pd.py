#!/usr/bin/env python3
"""Long prompts beside running answers: one server, and a prefill server beside a decode server on the same
device, as a Markdown table.

    bench/pd.py [MODEL_DIR] [--streams 4] [--prompt 6000] [--every 2] [--seconds 12] [--rounds 3] [--threads 2]

Answers stream all the time, each with a short prompt; a long prompt of two tokens of output arrives every so many
seconds. Gaps are between the events of a stream; *quiet* is the median gap without long prompts, *beside* that with
them. *First token* is the median of long prompts, beside the streams and on idle servers. HADAL names the program;
on a GPU both servers share it, on a CPU each has half of the threads. The ways take turns; medians of the rounds."""

import argparse
import http.client
import json
import statistics
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from serving import Server  # noqa: E402
from test_pd import Peer, role_flags  # noqa: E402
from test_router import free_port, of  # noqa: E402

HEADS = ["way", "worst gap, ms", "p99", "median", "quiet", "beside / quiet", "tokens/s", "first token, ms", "of idle servers"]


def times(port, ids, tokens, headers):
    """When the events of a streamed answer came."""
    link = http.client.HTTPConnection("127.0.0.1", port)
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", **headers})
    reply = link.getresponse()
    if reply.status != 200:
        sys.exit(reply.read().decode())
    for line in reply:
        if line.startswith(b"data: {"):
            yield time.perf_counter()
    link.close()


class Way:
    def __init__(self, server, headers):
        self.server, self.headers, self.asked = server, headers, 0

    def prompt(self, n):
        """Token ids that no earlier prompt began with."""
        self.asked += 1
        return [5 + (self.asked * 7919 + i * (i + self.asked)) % 2000 for i in range(n)]

    def first(self, n):
        begun = time.perf_counter()
        return next(times(self.server.port, self.prompt(n), 2, self.headers)) - begun

    def answer(self, left, gaps):
        while not left.is_set():
            last = None
            for now in times(self.server.port, self.prompt(20), 200, {}):
                if last:
                    gaps.append(now - last)
                last = now
                if left.is_set():
                    break

    def load(self, streams, seconds, every, length):
        """Gaps of the streams, events a second, and times to the first token of long prompts."""
        left, gaps, firsts, asking = threading.Event(), [[] for _ in range(streams)], [], []
        running = [threading.Thread(target=self.answer, args=(left, g)) for g in gaps]
        for t in running:
            t.start()
        time.sleep(1)
        for g in gaps:
            g.clear()
        begun = time.perf_counter()
        while (at := time.perf_counter() - begun) < seconds:
            if length:
                asking.append(threading.Thread(target=lambda: firsts.append(self.first(length))))
                asking[-1].start()
            time.sleep(min(every, seconds - at))
        left.set()
        spent = time.perf_counter() - begun
        for t in [*running, *asking]:
            t.join()
        every_gap = sorted(g for each in gaps for g in each)
        return every_gap, len(every_gap) / spent, firsts


def measure(way, args):
    idle = statistics.median(way.first(args.prompt) for _ in range(3))
    quiet, _, _ = way.load(args.streams, args.seconds / 3, args.seconds, 0)
    gaps, rate, firsts = way.load(args.streams, args.seconds, args.every, args.prompt)
    still, median = statistics.median(quiet), statistics.median(gaps)
    return [1e3 * gaps[-1], 1e3 * gaps[len(gaps) * 99 // 100], 1e3 * median, 1e3 * still, median / still, rate, 1e3 * statistics.median(firsts), 1e3 * idle]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "models" / "tiny-v4"))
    for name, value in {"streams": 4, "prompt": 6000, "rounds": 3, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--every", type=float, default=2)
    parser.add_argument("--seconds", type=float, default=12)
    args = parser.parse_args()
    flags = ["--no-drafts", "--max-running", args.streams + 8, "--kv-tokens", 80000, "--token-history", "off"]
    halves = [*flags, "--threads", max(args.threads // 2, 1), "--kv-host", "0.2"]
    pool = Server(*flags, "--threads", args.threads, model=args.model)
    listen = f"127.0.0.1:{free_port()}"
    prefill = Peer(*halves, *role_flags("prefill", listen), model=args.model)
    prefill.listen = listen
    decode = Peer(*halves, *role_flags("decode", peers=[prefill]), model=args.model).wait_paired()
    ways = {"one server": Way(pool, {}), "prefill and decode": Way(decode, {"X-Hadal-Prefill": of(prefill)})}
    found = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            found[name].append(measure(way, args))
    print("| " + " | ".join(HEADS) + " |\n|" + "---|" * len(HEADS))
    rows = {name: [statistics.median(x) for x in zip(*figures)] for name, figures in found.items()}
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{x:.2f}" if x < 10 else f"{x:.0f}" for x in row) + " |")
    one, two = rows.values()
    print(f"\nworst gap {two[0] / one[0]:.2f} of one server's (goal 0.25), tokens/s {two[5] / one[5]:.2f} (goal 0.95)")
    print(f"first token of idle servers: {two[7] - one[7]:.2f} ms later than of one server")
    for s in (decode, prefill, pool):
        s.close()


if __name__ == "__main__":
    main()
