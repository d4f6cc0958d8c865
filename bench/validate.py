#!/usr/bin/env python3
"""Predicted against measured steps of every layout that this machine can run, as a Markdown table.

    bench/validate.py [--models models/tiny-v4,models/tiny-v3] [--ranks 2,4,8] [--batch 8] [--rounds 3]
                      [--processes] [--save FILE]

Predicted from times that are measured here, and from nothing else:

- a rank's own time: a step of `hadal bench latency --emulate-rank`, without other ranks. As many run at once as
  there are cores, each with one thread, so that they share caches and memory as ranks do. More ranks than
  cores take turns: a step lasts ranks / cores times as long;
- exchanges: those that `hadal plan --json` traces in a step of the layout, and the broadcast of the step's
  rows, each with the time that `hadal bench comm --work-us` gives for its operation and bytes, between ranks that
  compute as long as a rank of this step does between two exchanges.

Measured is `hadal bench throughput` of the model with ranks as threads, or, with --processes, a server of processes
under `hadal bench serve`. Prediction and measurement alternate, round by round; each is the least of its rounds, because other
programs only add to it. --save appends
to a file, leaves out what is in it, and prints the table of all. HADAL names the program (default build/hadal)."""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess

from served import HADAL, ROOT, Served, hadal

CORES = len(os.sched_getaffinity(0))
CONTEXT, OUTPUT, PROMPT, PROMPTS = 32, 96, 256, 6
MOST_WORK = 200  # us; with more, exchanges take hardly longer, and a bench of them does
HEADER = 8192  # bytes of a broadcast of a step's rows, about


def layouts(ranks):
    """Of so many ranks: (tp, dp, ep)."""
    for tp in (1, 2, 4, 8):
        for dp in (1, 2, 4, 8):
            for ep in (1, ranks):
                if (tp * dp == ranks and (dp == 1 or ep == ranks)) or (dp == 1 and tp < ranks == ep):
                    yield tp, dp, ep


def start(*words):
    return subprocess.Popen([HADAL, *map(str, words), "--json"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process):
    out, why = process.communicate()
    if process.returncode:
        raise RuntimeError(why.strip()[-300:])
    return json.loads(out)


class Step:
    """A step of a layout: `seqs` sequences of each attention group, PROMPT rows of each or one."""

    def __init__(self, model, layout, prefill, batch):
        self.model, self.layout, self.prefill = model, layout, prefill
        self.tp, self.dp, self.ep = layout
        self.name, self.phase = pathlib.Path(model).name, "prefill" if prefill else "decode"
        self.ranks = max(self.tp * self.dp, self.ep)
        self.seqs = 1 if prefill else max(1, batch // self.dp)
        self.tokens = self.seqs * self.dp * (PROMPT if prefill else 1)
        self.text = ",".join(f"{k}={n}" for k, n in zip(("tp", "dp", "ep"), layout))
        self.options = [w for k, n in zip(("--tp", "--dp", "--ep"), layout) if n > 1 for w in (k, n)]

    def own_seconds(self):
        shape = ["--context", 0, "--prompt", PROMPT, "--steps", 5] if self.prefill else ["--context", CONTEXT + OUTPUT // 2, "--steps", 40]
        words = ["bench", "latency", "--dummy-weights", self.model, "--emulate-rank", self.text, "--drafts", 0,
                 "--threads", 1, "--batch", self.seqs, *shape]  # fmt: skip
        beside = [start(*words) for _ in range(min(CORES, self.ranks))]
        return statistics.mean(result(p)["step_seconds"] for p in beside)

    def exchanges(self):
        """(operation, calls, bytes of all ranks together) of a step."""
        plan = hadal("plan", self.model, "--gpus", self.ranks, "--gpu", "cpu", "--layout", self.text, "--users", self.seqs * self.dp,
                     "--prompt", PROMPT if self.prefill else CONTEXT, "--output", OUTPUT, "--chunk", PROMPT)  # fmt: skip
        group = self.ranks // self.dp
        all_bytes = lambda e: (e["bytes_inside"] + e["bytes_outside"]) / e["calls"] * group / max(group - 1, 1)
        of = plan["layouts"][0]["prefill" if self.prefill else "decode"]["exchanges"]
        broadcasts = [("broadcast", (group > 1) + (self.dp > 1), HEADER)]
        return [(e["operation"], e["calls"], all_bytes(e)) for e in of] + broadcasts

    def exchange_seconds(self, own, transport):
        exchanges = self.exchanges()
        between = own / max(1, sum(n for _, n, _ in exchanges))
        comm = hadal("bench", "comm", "--transport", transport.replace(" ", "-"), "--ranks", self.ranks, "--rounds", 30, "--work-us", min(MOST_WORK, max(1, round(between * 1e6))))
        return sum(n * time_of(comm, transport, operation, size) for operation, n, size in exchanges)

    def load(self, server):
        if self.prefill:
            n = PROMPTS * self.dp
            return ["--concurrency" if server else "--max-concurrency", self.dp, "--num-prompts", n, "--input-len", PROMPT, "--output-len", 1]
        n = self.seqs * self.dp
        return ["--concurrency" if server else "--max-running", n if server else self.seqs, "--num-prompts", n, "--input-len", CONTEXT,
                "--output-len", OUTPUT]  # fmt: skip

    def seconds_of(self, m, each):
        """Of a step of decode `each`. Prompts come one at a time; those of several groups at once, which need not begin together."""
        if not self.prefill:
            return m[each] / 1e3
        return m["median_ttft_ms"] / 1e3 if self.dp == 1 else m["duration"] / PROMPTS

    def measured_threads(self):
        m = hadal("bench", "throughput", self.model, *self.options, "--threads", CORES, "--no-drafts", "-q", "--chunk", PROMPT, *self.load(False))
        return self.seconds_of(m, "median_itl_ms")

    def measured_processes(self):
        options = ["--threads", 1, "--no-drafts", "--chunk", PROMPT, "--max-running", self.seqs, "--context", 512]
        with Served(self.model, *self.options, *options, world=self.ranks) as server:
            m = server.load(*self.load(True))
        return self.seconds_of(m, "median_tpot_ms")  # tokens may be read several at a time


def time_of(comm, transport, operation, size):
    """Between the sizes that were measured on lines."""
    name = {"all-reduce": "all_reduce", "broadcast": "broadcast"}.get(operation, "all_gather")
    at = sorted((r["bytes"], r["us"]) for r in comm if r["transport"] == transport and r["operation"] == name)
    (x0, y0), (x1, y1) = next(((a, b) for a, b in zip(at, at[1:]) if size <= b[0]), (at[-2], at[-1]))
    return max(0, 1e-6 * (y0 + (max(size, x0) - x0) * (y1 - y0) / (x1 - x0)))


def validate(step, rounds, processes):
    """The least of rounds: own and exchange seconds, predicted; measured."""
    found = []
    for _ in range(rounds):
        own = step.own_seconds()
        between = step.exchange_seconds(own, "shared memory" if processes else "threads")
        measured = step.measured_processes() if processes else step.measured_threads()
        found.append((own * max(1, step.ranks / CORES), between, measured))
    own, between, measured = (min(x) for x in zip(*found))
    return {"model": step.name, "layout": step.text, "ranks": step.ranks, "phase": step.phase, "as": "processes" if processes else "threads", "own": own, "exchanges": between, "measured": measured, "tokens": step.tokens}  # fmt: skip


def table(rows):
    print("| model | ranks as | layout | step | own ms | exchanges ms | predicted ms | measured ms | predicted tok/s | measured tok/s | error |")
    print("|" + " --- |" * 11)
    errors = {}
    for r in rows:
        predicted = r["own"] + r["exchanges"]
        error = predicted / r["measured"] - 1
        errors.setdefault((r["as"], r["phase"]), []).append((abs(error), f"{r['model']} {r['layout']}"))
        print(f"| {r['model']} | {r['as']} | {r['layout']} | {r['phase']} | {r['own'] * 1e3:.2f} | {r['exchanges'] * 1e3:.2f} | "
              f"{predicted * 1e3:.2f} | {r['measured'] * 1e3:.2f} | {r['tokens'] / predicted:.0f} | {r['tokens'] / r['measured']:.0f} | {error:+.0%} |")  # fmt: skip
    for (of, phase), e in [*errors.items(), (("all", "steps"), sum(errors.values(), []))]:
        worst = max(e)
        print(f"\n{of}, {phase}: median error {statistics.median(x for x, _ in e):.1%} of {len(e)}, worst {worst[0]:.0%} ({worst[1]})")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", default="models/tiny-v4,models/tiny-v3")
    p.add_argument("--ranks", default="2,4,8")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--processes", action="store_true")
    p.add_argument("--save", type=pathlib.Path)
    a = p.parse_args()
    rows = [json.loads(line) for line in a.save.open()] if a.save and a.save.exists() else []
    of = "processes" if a.processes else "threads"
    done = {(r["model"], r["layout"], r["phase"], r["as"]) for r in rows}
    for ranks in map(int, filter(None, a.ranks.split(","))):
        for layout, model, prefill in itertools.product(layouts(ranks), a.models.split(","), (False, True)):
            step = Step(model, layout, prefill, a.batch)
            if (step.name, step.text, step.phase, of) in done:
                continue
            rows.append(validate(step, a.rounds, a.processes))
            if a.save:
                with a.save.open("a") as to:
                    print(json.dumps(rows[-1]), file=to)
    table(rows)


main()
