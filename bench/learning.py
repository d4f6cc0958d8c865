#!/usr/bin/env python3
"""Learning curves of `hadal rl` on fresh lists: the share of held-out lists that are sorted, by step, for some seeds.

    bench/learning.py [--hadal build/hadal] [--seeds 1 2 3] [--steps 60] [--every 10] [--held-out 1000] [--out DIR]
                      [--control shuffled] [--rate 4e-5] [--svg FILE] [--backend cpu] [--threads 2]
    bench/learning.py --logs DIR [--svg FILE]

Every step has new lists, and those that are held out are never trained on. Prints a table with 95 % intervals (Wilson) of the first and
last measurement, and the seconds that learning took, without measuring. `--control` gives rewards that must not teach. `--svg` plots
the curves. `--logs` reads what runs left in DIR, NAME.log each."""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from plots import plot, table


def interval(share, n, z=1.96):
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return [(middle + sign * half) / (1 + z * z / n) for sign in (-1, 1)]


def learn(args, seed, log):
    """Writes the log of a run: a line for every step, and one for the model before."""
    command = [args.hadal, "rl", args.model, "--task", args.task, "--algorithm", "dr-grpo", "--groups", 32, "--samples", 8]
    command += ["--lr", args.rate, "--context", 256, "--held-out", args.held_out, "--eval-every", args.every, "--seed", seed]
    command += ["--backend", args.backend, "--threads", args.threads, "--steps", args.steps, "--out", log.with_suffix(""), "--log", log, "-q"]
    command += ["--reward-control", args.control] if args.control else []
    done = subprocess.run([str(c) for c in command], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stderr)


def summary(args, name, log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    held = [(line["step"], line["held_out_reward"]) for line in lines if "held_out_reward" in line]
    steps = [line for line in lines if line["step"]]
    first, last = (interval(held[at][1], args.held_out) for at in (0, -1))
    seconds = sum(line[f"{part}_seconds"] for line in steps for part in ("sample", "reward", "train", "update"))
    apart = "yes" if last[0] > first[1] else "no"
    row = [name, *(f"{held[at][1]:.3f} ({i[0]:.3f} to {i[1]:.3f})" for at, i in ((0, first), (-1, last))), apart]
    row += [len(steps), round(seconds), max(line["dlogp_max"] for line in steps)]
    return held, row


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hadal", default=str(ROOT / "build/hadal"))
    p.add_argument("--model", default=str(ROOT / "models/tiny-v3"))
    p.add_argument("--task", default="sort")
    p.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--every", type=int, default=10)
    p.add_argument("--held-out", type=int, default=1000)
    p.add_argument("--rate", default="4e-5")
    p.add_argument("--control", choices=("shuffled", "flipped", "zero"))
    p.add_argument("--backend", default="cpu")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--out", help="folder of logs and models; default: none is kept")
    p.add_argument("--logs", type=Path)
    p.add_argument("--svg")
    args = p.parse_args()
    curves, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        folder = args.logs or Path(args.out or folder)
        names = [f"{args.control or 'seed'} {seed}" for seed in args.seeds]
        for name, seed in zip(names, args.seeds) if not args.logs else ():
            folder.mkdir(parents=True, exist_ok=True)
            learn(args, seed, folder / f"{name}.log")
        for log in sorted(folder.glob("*.log")) if args.logs else [folder / f"{name}.log" for name in names]:
            held, row = summary(args, log.stem, log)
            curves[log.stem] = held
            rows.append(row)
            print(f"{log.stem}: " + ", ".join(f"{step}: {share:.3f}" for step, share in held), flush=True)
    print(table(["run", "before (95 %)", "after (95 %)", "apart", "steps", "seconds", "largest \\|dlog p\\|"], rows), end="")
    if args.svg:
        steps = [step for step, _ in next(iter(curves.values()))]
        lines = {name: [share for _, share in held] for name, held in curves.items()}
        low = 0.5 if min(min(line) for line in lines.values()) > 0.5 else 0.0
        svg = plot(f"{args.held_out} held-out lists, {Path(args.model).name}", "step", "sorted", steps, lines, low=low)
        Path(args.svg).write_text(svg)


if __name__ == "__main__":
    main()
