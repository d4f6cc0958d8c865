#!/usr/bin/env python3
"""Writes the simulated figures of DWDP into docs/experts.md.

    scripts/make_dwdp.py [HADAL]     # default build/hadal; some seconds

Everything comes from `hadal simulate --dwdp`, by the parameters of TensorRT-LLM's blog 19 (R1 in
NVFP4 on 4 GB200). --check compares instead of writing.
"""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "experts.md"
BEGIN, END = "<!-- made by scripts/make_dwdp.py -->\n", "<!-- end of what it made -->\n"
COMPUTE, EXCHANGE, FETCH = 1031.3, 126.7, 429.0  # microseconds of a layer
LENGTHS = [("1K", 0.19, 0.10), ("8K", 0.62, 0.73), ("16K", 1.52, 1.27), ("32K", 4.77, 1.17)]  # published
PUBLISHED_GAIN = 1.088


def simulate(hadal, **numbers):
    """{order: result} of a layer."""
    spec = ",".join(f"{name}:{value:.6g}" for name, value in {"layers": 5800, **numbers}.items())
    out = subprocess.run([hadal, "simulate", "--json", "--dwdp", spec], check=True, capture_output=True, text=True).stdout
    return {r["order"]: r for r in json.loads(out)}


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


def main():
    args = [a for a in sys.argv[1:] if a != "--check"]
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    new = before + BEGIN + "\n" + text(args[0] if args else ROOT / "build" / "hadal") + "\n" + END + after
    if "--check" in sys.argv:
        sys.exit(0 if new == page else f"{PAGE.relative_to(ROOT)} is not what the simulation gives")
    PAGE.write_text(new)


main()
