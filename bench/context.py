#!/usr/bin/env python3
"""How a decoding step grows with its context, as a Markdown table.

    bench/context.py [CONFIG] [--threads 1 2] [--contexts 4096 16384 65536 131072] [--repeat 9]
                     [--cpu-time] [--hadal build/hadal]

CONFIG is models/tiny-v4 by default: weights are random, so only its shape counts. By the clock, or
with --cpu-time one thread by its processor time, for a machine with other work."""

import argparse
import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
APART = ["indexer_topk", "attention"]  # what may grow


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("config", nargs="?", default=str(ROOT / "models" / "tiny-v4"))
    p.add_argument("--hadal", default=str(ROOT / "build" / "hadal"))
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384, 65536, 131072])
    p.add_argument("--repeat", type=int, default=9)
    p.add_argument("--cpu-time", action="store_true")
    a = p.parse_args()
    how = "processor time" if a.cpu_time else "by the clock"
    print(f"Milliseconds of a decoding step, {how}, load average {os.getloadavg()[0]:.1f}:\n")
    print(f"| context | threads | step | tokens/s | {' | '.join(APART)} | everything else |")
    print("|---|---|---|---|" + "---|" * len(APART) + "---|")
    for threads in [1] if a.cpu_time else a.threads:
        for context in a.contexts:
            clock = ["--cpu-time"] if a.cpu_time else ["--threads", str(threads)]
            command = [a.hadal, "bench", "ops", a.config, "--json", "--prompt", "1", "--context",
                       str(context), "--repeat", str(a.repeat), *clock]
            step = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["decode"]
            parts = [1e3 * sum(o["seconds"] for o in step["ops"] if o["op"] == op) for op in APART]
            ms = 1e3 * step["seconds"]
            cells = [f"{context:,}", threads, f"{ms:.2f}", f"{1e3 / ms:.0f}"]
            cells += [f"{x:.2f}" for x in [*parts, ms - sum(parts)]]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


main()
