#!/usr/bin/env python3
"""Predicted against measured steps of every layout that this machine can run, as a Markdown table.

    bench/validate.py [--models models/tiny-v4,models/tiny-v3] [--ranks 2,4,8] [--batch 8] [--rounds 3]
                      [--transports threads,processes] [--json FILE]

Predicted is what `hadal plan` says of the layout's exchanges, priced with times measured here:

- a rank's own time: a step of `hadal bench latency --emulate-rank`, without other ranks. As many run at
  once as there are cores, each with one thread, so that they share caches and memory as ranks do;
- an exchange: `hadal bench comm` with as many ranks, by operation and bytes;
- more ranks than cores take turns: a step lasts the time of a rank, times ranks / cores.

Measured is `hadal bench throughput` of the model, ranks as threads, or a server of processes under
`hadal bench serve`. Prediction and measurement alternate, round by round; the table has medians. HADAL
names the program (default build/hadal)."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
HADAL = os.environ.get("HADAL", str(ROOT / "build" / "hadal"))
CORES = len(os.sched_getaffinity(0))
CONTEXT, OUTPUT, PROMPT = 32, 96, 256


def layouts(ranks):
    """Of so many ranks: (tp, dp, ep)."""
    for tp in (t for t in (1, 2, 4, 8) if t <= ranks):
        for dp in (d for d in (1, 2, 4, 8) if tp * d <= ranks):
            for ep in (1, ranks):
                if max(tp * dp, ep) == ranks and (dp == 1 or ep == ranks):
                    yield tp, dp, ep


def start(*words):
    return subprocess.Popen([HADAL, *map(str, words), "--json"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process):
    out, why = process.communicate()
    if process.returncode:
        raise RuntimeError(why.strip()[-300:])
    return json.loads(out)


def hadal(*words):
    return result(start(*words))


def text(layout):
    return ",".join(f"{k}={n}" for k, n in zip(("tp", "dp", "ep"), layout))


def options(layout):
    return [w for k, n in zip(("--tp", "--dp", "--ep"), layout) if n > 1 for w in (k, n)]


class Step:
    """A step of a layout: `seqs` sequences of each attention group, `prompt` rows of each or one."""

    def __init__(self, model, layout, prefill, batch):
        self.model, self.layout, self.prefill = model, layout, prefill
        self.dp = layout[1]
        self.ranks = max(layout[0] * layout[1], layout[2])
        self.seqs = 1 if prefill else max(1, batch // self.dp)
        self.tokens = self.seqs * self.dp * (PROMPT if prefill else 1)

    def rank_seconds(self):
        shape = ["--batch", self.seqs, "--context", 0, "--prompt", PROMPT, "--steps", 5] if self.prefill else \
            ["--batch", self.seqs, "--context", CONTEXT + OUTPUT // 2, "--steps", 60]  # fmt: skip
        words = ["bench", "latency", "--dummy-weights", self.model, "--emulate-rank", f"{text(self.layout)}",
                 "--drafts", 0, "--threads", 1 if self.ranks > 1 else CORES, *shape]  # fmt: skip
        beside = [start(*words) for _ in range(min(CORES, self.ranks))]
        return statistics.mean(result(p)["step_seconds"] for p in beside)

    def exchanges(self):
        plan = hadal("plan", self.model, "--gpus", self.ranks, "--gpu", "cpu", "--layout", text(self.layout), "--users",
                     self.seqs * self.dp, "--prompt", PROMPT if self.prefill else CONTEXT, "--output", OUTPUT, "--chunk", PROMPT)  # fmt: skip
        of = plan["layouts"][0]["prefill" if self.prefill else "decode"]
        return [(e["operation"], e["calls"], (e["bytes_inside"] + e["bytes_outside"]) / e["calls"]) for e in of["exchanges"]]

    def measured_threads(self):
        load = ["--num-prompts", 6 * self.dp, "--max-running", 1, "--input-len", PROMPT, "--output-len", 1, "--chunk", PROMPT] \
            if self.prefill else ["--num-prompts", self.seqs * self.dp, "--max-running", self.seqs, "--input-len", CONTEXT,
                                  "--output-len", OUTPUT, "--chunk", PROMPT]  # fmt: skip
        m = hadal("bench", "throughput", self.model, *options(self.layout), "--threads", max(CORES, self.ranks) if 0 else CORES,
                  "--no-drafts", "-q", *load)  # fmt: skip
        return m["duration"] / 6 if self.prefill else m["median_itl_ms"] / 1e3


def exchange_seconds(comm, transport, operation, sent, ranks):
    """Between the sizes that were measured on lines; bytes of `comm` are those of all ranks together."""
    reduces = operation == "all-reduce"
    size = sent * ranks / max(ranks - 1, 1) / (2 if reduces else 1)
    at = sorted((r["bytes"], r["us"]) for r in comm
                if r["transport"] == transport and r["operation"] == ("all_reduce" if reduces else "all_gather"))  # fmt: skip
    (x0, y0), (x1, y1) = next(((a, b) for a, b in zip(at, at[1:]) if size <= b[0]), (at[-2], at[-1]))
    return 1e-6 * max(y0 + (size - x0) * (y1 - y0) / (x1 - x0), at[0][1] if size <= at[0][0] else 0)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--models", default="models/tiny-v4,models/tiny-v3")
    p.add_argument("--ranks", default="2,4,8")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--rounds", type=int, default=3)
    a = p.parse_args()
    for ranks in map(int, a.ranks.split(",")):
        for model in a.models.split(","):
            for layout in layouts(ranks):
                for prefill in False, True:
                    s = Step(model, layout, prefill, a.batch)
                    pairs = []
                    for _ in range(a.rounds):
                        comm = hadal("bench", "comm", "--ranks", ranks, "--rounds", 200)
                        own = s.rank_seconds()
                        between = sum(n * exchange_seconds(comm, "threads", op, sent, ranks) for op, n, sent in s.exchanges())
                        m = s.measured_threads()
                        pairs.append((own * max(1, ranks / CORES), between, m))
                    own, between, m = (statistics.median(x) for x in zip(*pairs))
                    print(f"{model[-2:]} {text(layout):16} {'prefill' if prefill else 'decode':8} own {own*1e3:7.2f} exch {between*1e3:6.2f} measured {m*1e3:7.2f} "
                          f"{(own+between)/m-1:+.2f}", flush=True)


main()
