#!/usr/bin/env python3
"""Steps of one emulated rank in one micro-batch and in two (docs/ranks.md#two-batch-overlap).

    bench/overlap.py [CASE...]      # default: all of CASES

The other ranks are missing: exchanges are kernels of one thread that only take time. Cases with latencies
take those that DeepEP has published (64 ranks, 128 rows: 173 us to the experts, 314 us back), by rows.
Cases with a share take as much time as makes exchanges so large a part of a step without overlap. Layers
are the first ones of the model alone. "two halves" is what two steps of half the rows take, one after the other and without
exchanges: two micro-batches take at least as long. HADAL names the program (default build-cuda/hadal). Prints a table
for docs/perf/README.md; what fails is named and left out.
"""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
HADAL = os.environ.get("HADAL", str(ROOT / "build-cuda" / "hadal"))
V3 = "--dummy-weights tests/configs/v3.json --backend cuda --precision official"
DECODE = f"{V3} --emulate-rank ep=72 --layers 9 --context 2048 --steps 12"
PREFILL = f"{V3} --emulate-rank ep=32 --layers 6 --context 0 --steps 3"
DENSE, TO_EXPERTS, BACK, LATENCY_US = 3, 1230, 2335, 15
SHARE = 0.35
CASES = {
    **{f"decode-{n}": (f"V3 EP72, decode, {n} rows", DECODE, ("batch", n), n, 9, None) for n in (16, 32, 64, 128, 256)},
    "decode-256-share": ("V3 EP72, decode, 256 rows", DECODE, ("batch", 256), 256, 9, SHARE),
    "prefill-4": ("V3 EP32, prefill, 16,384 rows", f"{PREFILL} --prompt 4096", ("batch", 4), 16384, 6, SHARE),
    "prefill-1": ("V3 EP32, prefill, 4,096 rows", f"{PREFILL} --batch 1", ("prompt", 4096), 4096, 6, SHARE),
}  # fmt: skip
HEADS = ["case", "exchanges of a step", "one, ms", "two, ms", "gain", "two halves, ms", "activations, one, GB", "two, GB"]


def hadal(words):
    done = subprocess.run([HADAL, "bench", "latency", *words.split(), "--json"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(f"hadal {words}: failed: {(done.stderr or done.stdout).strip()[-300:]}", flush=True)
        return None
    return json.loads(done.stdout)


def step_of(r):
    return r.get("engine_device_step_seconds") or r["step_seconds"]


def row(title, words, size, rows, layers, share):
    moe = layers - DENSE
    half = hadal(f"{words} --{size[0]} {size[1] // 2}")
    words = f"{words} --{size[0]} {size[1]}"
    costs, times = f"--exchange-us {LATENCY_US}", (TO_EXPERTS, BACK)
    if share:
        alone = hadal(words)
        if not alone:
            return None
        each = 1e9 * step_of(alone) * share / (1 - share) / (moe * rows)
        costs, times = "", (round(each / 3), round(each * 2 / 3))
    r = hadal(f"{words} {costs} --row-ns {times[0]},{times[1]} --overlap 2")
    if not r or not half:
        return None
    of = lambda kind: r[f"{kind}_device_step_seconds"] or r[f"{kind}_step_seconds"]
    one, two = of("charged"), of("overlapped")
    free = step_of(r)
    return [title, f"{100 * (1 - free / one):.0f} %", f"{1e3 * one:.2f}", f"{1e3 * two:.2f}", f"{one / two:.2f}", f"{2e3 * step_of(half):.2f}",
            f"{r['activation_bytes'] / 1e9:.3f}", f"{r['overlapped_activation_bytes'] / 1e9:.3f}"]  # fmt: skip


def main():
    wanted = sys.argv[1:] or list(CASES)
    if any(name not in CASES for name in wanted):
        sys.exit(__doc__.strip())
    for r in [HEADS, ["---"] * len(HEADS)]:
        print(f"| {' | '.join(r)} |", flush=True)
    for name in wanted:
        r = row(*CASES[name])
        if r:
            print(f"| {' | '.join(r)} |", flush=True)


main()
