#!/usr/bin/env python3
"""V4-Flash on all GPUs of a machine, beside one rank of it alone on one GPU.

    bench/gpus.py [GPUS [CASE...]]      # 2, 4 or 8; default: all that nvidia-smi lists. Cases: sums, bits, ep

The model has random weights of the published shape and formats. "one rank" is `--emulate-rank`: the
shard of one rank, whose exchanges take no time; "predicted" has exchanges that take as long as the
gather or sum of 16 KiB that `hadal bench comm` measures in the same run. HADAL names the program
(default build-cuda/hadal). Prints a table for docs/perf/README.md; what fails is named and left out.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
HADAL = os.environ.get("HADAL", str(ROOT / "build-cuda" / "hadal"))
MODEL = "--dummy-weights tests/configs/v4_flash.json --backend cuda --precision official"
ONE = "--num-prompts 2 --warmup 1 --input-len 1000 --output-len 300 --forced-acceptance 1.5 --draft-tokens 3"
EACH = 32  # requests of a rank under load
MANY = f"--input-len 500 --output-len 400 --draft-tokens 0 --max-running {EACH}"
HEADS = ["case", "step, ms", "one rank", "exchanges", "predicted", "step / predicted", "tokens/s"]


def hadal(words, **more):
    done = subprocess.run([HADAL, *words.split()], cwd=ROOT, capture_output=True, text=True, **more)
    if done.returncode:
        print(f"hadal {words}: failed: {(done.stderr or done.stdout).strip()[-300:]}", flush=True)
        return None
    return json.loads(done.stdout)


def exchange_us(gpus):
    rows = hadal(f"bench comm --ranks {gpus} --transport gpus --json") or []
    times = [r["us"] for r in rows if r["transport"] == "gpus" and r["bytes"] == 16384 and r["operation"] in ("all_reduce", "all_gather")]
    return round(statistics.mean(times)) if times else None


def cases(n):
    many = n * EACH
    yield "sums", f"TP{n}, one user, 3 drafts, sums", f"latency {MODEL} {ONE} --tp {n} --sum-in-ranks", f"tp={n} --drafts 3"
    yield "bits", f"TP{n}, one user, 3 drafts, same bits", f"latency {MODEL} {ONE} --tp {n}", f"tp={n} --drafts 3"
    yield "ep", f"EP{n}, {many} users", f"throughput {MODEL} {MANY} --dp {n} --ep {n} --num-prompts {many}", f"ep={n} --batch {EACH}"


def row(title, load, rank, us):
    ours = hadal(f"bench {load} --json -q")
    one = hadal(f"bench latency {MODEL} --emulate-rank {rank} --context 1150 --exchange-us {us} --json")
    if not ours or not one:
        return None
    step, predicted = ours["median_itl_ms"], 1e3 * one["charged_step_seconds"]
    return [title, f"{step:.2f}", f"{1e3 * one['engine_device_step_seconds']:.2f}", f"{one['exchanges']} of {us} us",
            f"{predicted:.2f}", f"{step / predicted:.2f}", f"{ours['output_throughput']:.0f}"]  # fmt: skip


def main():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    gpus = int(sys.argv[1]) if len(sys.argv) > 1 else len(listed)
    wanted = sys.argv[2:] or ["sums", "bits", "ep"]
    if gpus < 2 or any(name not in ("sums", "bits", "ep") for name in wanted):
        sys.exit(__doc__.strip())
    us = exchange_us(gpus)
    if us is None:
        sys.exit("error: no exchange between GPUs was measured")
    print(f"{gpus} of: {listed[0].split(' (UUID')[0]}")
    for r in [HEADS, ["---"] * len(HEADS)]:
        print(f"| {' | '.join(r)} |")
    for name, *case in cases(gpus):
        if name in wanted and (r := row(*case, us)):
            print(f"| {' | '.join(r)} |", flush=True)


if __name__ == "__main__":
    main()
