#!/usr/bin/env python3
"""Ours and llama.cpp on the same shapes, in alternation: prompt and decoding, medians of rounds.

    bench/peers/run.py --venv DIR [--folder DIR] [--case a] [--threads 1] [--side fast] [--rounds 3]
                       [--layers N] [--cpu-time]

Everything but DIR has a default, so that the first option alone gives all tables: the cases a,
V2-Lite's shape, b, a slice of V3's with fewer layers and experts, and c, one of V4's; one and two
threads; and the sides exact and fast (ours) and MXFP4 and Q4_0 (the peer's). Batch 8 is eight
sequences in the peer's parallel slots. Tables are in Markdown.

With --folder what was measured is kept there: a run that was broken off goes on where it stood, and
with more --rounds it adds to them. --cpu-time is for a machine with other work: one thread on both
sides, and its processor time.

Installs the PyPI packages llama-cpp-python (which compiles for this processor) and gguf into
the --venv DIR if they are not there."""

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PACKAGES = ["llama-cpp-python", "gguf", "numpy"]
CASES = {"a": ("v2-lite-q.json", 4), "b": ("v3-slice.json", 3), "c": ("v4-slice.json", 6)}
OURS, THEIRS = ["exact", "fast"], ["MXFP4", "Q4_0"]
FIGURES = {"prompt": "prompt of {}", "1": "decode, batch 1", "8": "decode, batch 8"}
LONGEST = 1200  # seconds of one measurement


def install(venv):
    python = os.path.join(venv, "bin", "python")
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    have = subprocess.run([python, "-c", "import llama_cpp, gguf, numpy"], capture_output=True)
    if have.returncode != 0:
        subprocess.run([python, "-m", "pip", "install", *PACKAGES], check=True)
    return python


class Failed(Exception):
    pass


def output(command):
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise Failed(f"took more than {LONGEST} s") from None
    if run.returncode < 0:
        raise Failed(f"killed by {signal.Signals(-run.returncode).name}")
    if run.returncode:
        raise Failed((run.stderr.strip().splitlines() or ["failed"])[-1])
    return run.stdout


class Bench:
    def __init__(self, a, python, folder):
        self.a, self.python, self.folder = a, python, folder
        self.path = os.path.join(folder, "measured.jsonl")
        self.measured = []
        if os.path.exists(self.path):
            with open(self.path) as f:
                self.measured = [json.loads(line) for line in f]

    def layers(self, case):
        return self.a.layers or CASES[case][1]

    def config(self, case):
        return os.path.join(HERE, "configs", CASES[case][0])

    def key(self, case, threads, side):
        """What else a measurement depends on is a part of it."""
        return {"case": case, "threads": threads, "side": side, "layers": self.layers(case),
                "prompt": self.a.prompt, "cpu_time": self.a.cpu_time}

    def of(self, case, threads, side):
        key = self.key(case, threads, side)
        return [m for m in self.measured if m["key"] == key]

    def clock(self, threads):
        return ["--cpu-time"] if self.a.cpu_time else ["--threads", str(threads)]

    def ours(self, case, threads, precision):
        def step(batch, prompt):
            return json.loads(output(
                [self.a.hadal, "bench", "ops", self.config(case), "--json", "--precision", precision,
                 "--layers", str(self.layers(case)), "--batch", str(batch), "--prompt", str(prompt),
                 "--context", str(self.a.prompt), "--repeat", str(self.a.repeat), *self.clock(threads)]))

        one, eight = step(1, self.a.prompt), step(8, 1)
        steps = {"prompt": (one["prefill"], self.a.prompt), "1": (one["decode"], 1), "8": (eight["decode"], 8)}
        return {"figures": {name: n / s["seconds"] for name, (s, n) in steps.items()},
                "limits": {name: n / s["limit_seconds"] for name, (s, n) in steps.items()}}

    def gguf(self, case, kind):
        path = os.path.join(self.folder, f"{case}-{self.layers(case)}-{kind}.gguf")
        if not os.path.exists(path):
            code = (
                "import json, os, sys; sys.path.insert(0, sys.argv[1]); import gguf_dummy as g;"
                "g.write(sys.argv[2] + '.part', json.load(open(sys.argv[3])), int(sys.argv[4]),"
                " g.Q[sys.argv[5]], 4096); os.rename(sys.argv[2] + '.part', sys.argv[2])"
            )
            output([self.python, "-c", code, HERE, path, self.config(case), str(self.layers(case)), kind])
        return path

    def theirs(self, case, threads, kind):
        command = [self.python, os.path.join(HERE, "llama_cpp_step.py"), self.gguf(case, kind)]
        command += ["--prompt", str(self.a.prompt), "--context", str(self.a.prompt)]
        command += ["--repeat", str(self.a.repeat), *self.clock(threads)]
        t = json.loads(output(command))
        figures = {n: int(n) / t["decode"][n] for n in ("1", "8")}
        return {"figures": {"prompt": self.a.prompt / t["prefill"], **figures}, "version": t["version"]}

    def measure(self, case, threads, side):
        m = {"key": self.key(case, threads, side), "load": os.getloadavg()[0],
             "at": datetime.datetime.now().isoformat(timespec="minutes")}
        try:
            m.update((self.ours if side in OURS else self.theirs)(case, threads, side))
        except Failed as why:
            m["error"] = str(why)
        self.measured.append(m)
        if "error" not in m:  # a failure is told in the table, and tried again by the next run
            with open(self.path, "a") as f:
                f.write(json.dumps(m) + "\n")
        shown = m.get("error") or ", ".join(f"{k} {v:.1f}" for k, v in m["figures"].items())
        print(f"{m['at']} case {case}, {threads} threads, {side}: {shown}", file=sys.stderr, flush=True)

    def run(self):
        """Round by round, so that sides are measured side by side; each begins with another one."""
        for r in range(self.a.rounds):
            for case in self.a.case:
                for threads in self.a.threads:
                    for i in range(len(self.a.side)):
                        side = self.a.side[(i + r) % len(self.a.side)]
                        done = self.of(case, threads, side)
                        if len(done) <= r and not any("error" in m for m in done):
                            self.measure(case, threads, side)

    def print_table(self, case, threads):
        sides, limits, notes, seen = {}, {}, [], []
        for side in self.a.side:
            done = self.of(case, threads, side)
            good = [m for m in done if "error" not in m]
            notes += [f"{side} failed: {m['error']}" for m in done if "error" in m][:1]
            seen += good
            for name in FIGURES:
                if good:
                    sides[side, name] = statistics.median(m["figures"][name] for m in good)
                limits.setdefault(name, []).extend(m["limits"][name] for m in good if "limits" in m)
        if not seen:
            return print(f"\nCase {case}, {threads} threads: nothing measured; {'; '.join(notes)}")
        with open(self.config(case)) as f:
            of = json.load(f)["num_hidden_layers"]
        how = "one thread's processor time" if self.a.cpu_time else f"threads: {threads}, by the clock"
        version = next((m["version"] for m in seen if "version" in m), "not measured")
        loads = [m["load"] for m in seen]
        print(f"\nCase {case}: {CASES[case][0]}, {self.layers(case)} of {of} layers; {how}; tokens/s, medians of "
              f"{min(len(self.of(case, threads, s)) for s in self.a.side)} rounds or more; {seen[0]['at']} to "
              f"{seen[-1]['at']}; llama-cpp-python {version}; load average {min(loads):.1f} to {max(loads):.1f}.")
        pairs = [(o, t) for o in self.a.side if o in OURS for t in self.a.side if t in THEIRS]
        heads = [*self.a.side, "limit", *(f"{o} / {t}" for o, t in pairs)]
        print(f"\n| | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|")
        for name, title in FIGURES.items():
            cells = [f"{sides[s, name]:.1f}" if (s, name) in sides else "" for s in self.a.side]
            cells.append(f"{statistics.median(limits[name]):.1f}" if limits[name] else "")
            for o, t in pairs:
                both = (o, name) in sides and (t, name) in sides
                cells.append(f"{sides[o, name] / sides[t, name]:.2f}" if both else "")
            print(f"| {title.format(self.a.prompt)} | {' | '.join(cells)} |")
        for note in notes:
            print(f"\n{note}")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--venv", required=True)
    p.add_argument("--folder", help="where models and figures are kept; else they are deleted")
    p.add_argument("--hadal", default=os.path.join(ROOT, "build", "hadal"))
    p.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--side", choices=OURS + THEIRS, nargs="+", default=OURS + THEIRS)
    p.add_argument("--layers", type=int, help="of the model; as many as the case has")
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--repeat", type=int, default=3, help="steps whose median a round takes")
    p.add_argument("--cpu-time", action="store_true", help="one thread, by its processor time")
    a = p.parse_args()
    if a.cpu_time:
        a.threads = [1]
    python = install(a.venv)
    with tempfile.TemporaryDirectory() as temporary:
        if a.folder:
            os.makedirs(a.folder, exist_ok=True)
        bench = Bench(a, python, a.folder or temporary)
        try:
            bench.run()
        except KeyboardInterrupt:
            print("broken off; what there is:", file=sys.stderr)
        for case in a.case:
            for threads in a.threads:
                bench.print_table(case, threads)


main()
