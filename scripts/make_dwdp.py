#!/usr/bin/env python3
"""Writes the simulated figures of DWDP into docs/experts.md, and a prediction for four GPUs into docs/perf.

    scripts/make_dwdp.py [HADAL]     # default build/hadal; half a minute

Everything comes from `hadal simulate --dwdp`, by the parameters of TensorRT-LLM's blog 19 (R1 in
NVFP4 on 4 GB200). The prediction takes V4-Flash's from `hadal plan`. --check compares instead of writing.
"""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "experts.md"
PREDICTION = ROOT / "docs" / "perf" / "log" / "2026-11-29-dwdp-nvlink.md"
BEGIN, END = "<!-- made by scripts/make_dwdp.py -->\n", "<!-- end of what it made -->\n"
COMPUTE, EXCHANGE, FETCH = 1031.3, 126.7, 429.0  # microseconds of a layer
LENGTHS = [("1K", 0.19, 0.10), ("8K", 0.62, 0.73), ("16K", 1.52, 1.27), ("32K", 4.77, 1.17)]  # published
PUBLISHED_GAIN = 1.088
LAYERS, ROWS = 43, 16384  # of V4-Flash; of a rank and step
SKEWED = "lognormal:1,layers:8,experts:256,top-k:6,tokens:65536,passes:20"  # a generated load
MEASURED_US = 2 * 168e3 / 8  # of a layer: 168 ms for 8 layers of 8,192 rows on an H200, log/2026-11-28-experts-host.md


def run(*command):
    return json.loads(subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout)


def simulate(hadal, **numbers):
    """{order: result} of a layer."""
    spec = ",".join(f"{name}:{value:.6g}" for name, value in {"layers": 5800, **numbers}.items())
    return {r["order"]: r for r in run(hadal, "simulate", "--json", "--dwdp", spec)}


def table(head, rows):
    return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in [head, ["---"] * len(head), *rows])


def layer(of):
    rows = [
        [order, f"{r['ep_us']:.0f}", f"{r['ep_wait_us']:.0f}", f"{r['dwdp_us']:.0f}", f"{r['copy_us']:.0f}", f"{r['dwdp_us'] / r['ep_us'] - 1:+.1%}"]
        for order, r in of.items()
    ]
    return table(["order of copies", "EP, µs", "of it waiting", "DWDP, µs", "copies run", "DWDP to EP"], rows)


def lengths(hadal):
    rows = []
    for name, ratio, published in LENGTHS:
        of = simulate(hadal, compute=ratio * FETCH, exchange=ratio * FETCH * EXCHANGE / COMPUTE)
        ours = [of[order]["ep_us"] / of[order]["dwdp_us"] for order in ("sliced", "together")]
        exposed = of["together"]["exposed_us"] / of["together"]["dwdp_us"]
        rows.append([name, ratio, f"{exposed:.0%}", *(f"{x:.2f}" for x in ours), f"{published:.2f}"])
    head = ["prompt", "compute / fetch", "exposed", "EP / DWDP, sliced", "together", "published"]
    return table(head, rows)


def serving(of):
    """Output per GPU when context ranks do a part of all GPU time, and only they change."""
    faster = of["together"]["dwdp_us"] / of["together"]["ep_us"]
    part = (1 - 1 / PUBLISHED_GAIN) / (1 - faster)
    rows = [[f"{share:.0%}", f"{1 / (1 - share * (1 - faster)) - 1:+.1%}"] for share in (0.25, 0.5, part, 0.75, 1)]
    return table(["GPU time in context steps", "output per GPU"], rows)


def plan(hadal, layout, balancedness):
    """Microseconds of a layer: kernels of the busiest rank, exchange, fetch."""
    flags = ("--gpus", 4, "--users", 4, "--prompt", ROWS, "--chunk", ROWS, "--layout", layout, "--balancedness", balancedness, "--json")
    of = run(hadal, "plan", ROOT / "tests" / "configs" / "v4_flash.json", *flags)["layouts"][0]["prefill"]
    return [of[f"{part}_seconds"] / LAYERS * 1e6 for part in ("kernel", "exchange", "fetch")]


def prediction(hadal):
    skew = run(hadal, "simulate", "--generate", SKEWED, "--ranks", 4, "--plan", "none", "--json")[0]["balancedness"]
    kernels, _, fetch = plan(hadal, "dwdp=4", 1)
    rows = []
    for source, compute in (("roofline", kernels), ("measured kernels", MEASURED_US)):
        for load, balancedness in (("balanced", 1), ("skewed", skew)):
            longer, exchange, _ = plan(hadal, "dp=4,ep=4", balancedness)
            ep = compute * longer / kernels + exchange
            of = simulate(hadal, ranks=4, layers=500, jitter=0, compute=compute, exchange=exchange, fetch=fetch)
            dwdp = of["sliced"]["dwdp_us"]
            times = [f"{x / 1e3:.1f}" for x in (compute, exchange, fetch, ep, dwdp)]
            rows.append([source, load, f"{balancedness:.2f}", *times, f"{ep / dwdp:.2f}"])
    head = ["compute", "load", "balancedness of EP4", "compute, ms", "exchange", "fetch", "EP4", "DWDP4", "EP4 / DWDP4"]
    return table(head, rows)


def text(hadal):
    of = simulate(hadal)
    return (
        "One context layer; published are 1319.9 µs for EP, 161.9 of it waiting, and 1131.6 µs for DWDP (-14.3 %):\n\n"
        + layer(of)
        + "\nBy the length of a prompt, with the published ratios of compute to fetch:\n\n"
        + lengths(hadal)
        + "\nOutput of a service whose context steps become that much shorter; published is +8.8 %:\n\n"
        + serving(of)
    )


def update(page, made, check):
    old = page.read_text()
    before, rest = old.split(BEGIN)
    new = before + BEGIN + "\n" + made + "\n" + END + rest.split(END)[1]
    if not check:
        page.write_text(new)
    return new == old


def main():
    args = [a for a in sys.argv[1:] if a != "--check"]
    hadal, check = args[0] if args else ROOT / "build" / "hadal", "--check" in sys.argv
    for page, made in ((PAGE, text(hadal)), (PREDICTION, prediction(hadal))):
        if not update(page, made, check) and check:
            sys.exit(f"{page.relative_to(ROOT)} is not what the simulation gives")


main()
