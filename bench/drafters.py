#!/usr/bin/env python3
"""Tokens a step of a model's drafters, by task, as a Markdown table.

    bench/drafters.py [MODEL_DIR] [--limit 10] [--tasks story,recall_500,...] [--drafters mtp:3,mtp:7,dspark:5,dspark:7] [--running 1]

A drafter is NAME:N, N drafts a step. Runs `hadal eval` for each; the answers are the same for all, and the last column
says so. A step gives one token and the drafts that it accepts. With --seconds the table has output tokens per second of
the whole run instead, its start and prompts included: compare only on a quiet machine."""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
HADAL = os.environ.get("HADAL", str(ROOT / "build" / "hadal"))
TASKS = "story,story_question,addition_3,sort,recall_500,recall_1000,tools,json_answer,about"


def evaluate(args, task, drafter):
    name, n = drafter.split(":")
    with tempfile.NamedTemporaryFile() as out:
        words = ["eval", args.model, "--suite", "tiny", "--task", task, "--limit", args.limit, "--drafter", name, "--draft-tokens", n]
        words += ["--running", args.running, "--context", 6000, "-q", "--json", out.name]
        begun = time.monotonic()
        subprocess.run([HADAL, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - begun
        (found,) = json.load(open(out.name))["tasks"]
    tokens = found["output_tokens"]
    rate = tokens / seconds if args.seconds else tokens / (tokens - found["accepted"])
    return rate, (tokens, found["right"])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", default=str(ROOT / "models" / "tiny-v4"))
    p.add_argument("--limit", type=int, default=10)
    p.add_argument("--running", type=int, default=1)
    p.add_argument("--tasks", default=TASKS)
    p.add_argument("--drafters", default="mtp:3,mtp:7,dspark:5,dspark:7")
    p.add_argument("--seconds", action="store_true")
    args = p.parse_args()
    drafters = args.drafters.split(",")
    print("| task | " + " | ".join(d.replace(":", ", ") for d in drafters) + " | same answers |")
    print("|---" * (len(drafters) + 2) + "|")
    for task in args.tasks.split(","):
        found = [evaluate(args, task, d) for d in drafters]
        same = len({answers for _, answers in found}) == 1
        print(f"| {task} | " + " | ".join(f"{rate:.2f}" for rate, _ in found) + f" | {'yes' if same else 'NO'} |", flush=True)


if __name__ == "__main__":
    main()
