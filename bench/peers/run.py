#!/usr/bin/env python3
"""Ours and llama.cpp on the same shapes, in alternation: prompt and decoding, medians.

    bench/peers/run.py --venv DIR [--hadal build/hadal] [--case a] [--layers N] [--rounds 3]
                       [--ours "--precision fast"]

Cases: a, V2-Lite; b, a slice of V3's shape with fewer layers and experts; c, one of V4's. All
three without --case. Batch 8 is eight sequences in the peer's parallel slots.

Installs the PyPI packages llama-cpp-python (which compiles for this processor) and gguf into
DIR if they are not there. One thread and its processor time by default, so that other programs
on the machine disturb both sides alike; --threads N measures by the clock."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PACKAGES = ["llama-cpp-python", "gguf", "numpy"]
CASES = {"a": ("v2-lite-q.json", 4), "b": ("v3-slice.json", 3), "c": ("v4-slice.json", 6)}


def install(venv):
    python = os.path.join(venv, "bin", "python")
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    have = subprocess.run([python, "-c", "import llama_cpp, gguf, numpy"], capture_output=True)
    if have.returncode != 0:
        subprocess.run([python, "-m", "pip", "install", *PACKAGES], check=True)
    return python


def output(command):
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def clock(a):
    return ["--threads", str(a.threads)] if a.threads else ["--cpu-time"]


def ours(a, batch):
    return output(
        [a.hadal, "bench", "ops", a.config, "--layers", str(a.layers), "--json", "--prompt"]
        + [str(a.prompt), "--context", str(a.prompt), "--batch", str(batch), *clock(a)]
        + a.ours.split()
    )


def theirs(a, python, gguf):
    command = [python, os.path.join(HERE, "llama_cpp_step.py"), gguf, "--prompt"]
    command += [str(a.prompt), "--context", str(a.prompt), "--batches", "1", "8", *clock(a)]
    return output(command)


def round_of(a, python, ggufs, figures):
    for batch in (1, 8):
        o = ours(a, batch)
        step = o["decode"]
        figures.setdefault(("ours", batch), []).append(batch / step["seconds"])
        figures.setdefault(("limit", batch), []).append(batch / step["limit_seconds"])
        if batch == 1:
            step = o["prefill"]
            figures.setdefault(("ours", 0), []).append(a.prompt / step["seconds"])
            figures.setdefault(("limit", 0), []).append(a.prompt / step["limit_seconds"])
    for name, path in ggufs.items():
        t = theirs(a, python, path)
        figures.setdefault((name, 0), []).append(a.prompt / t["prefill"])
        for batch in (1, 8):
            figures.setdefault((name, batch), []).append(batch / t["decode"][str(batch)])


def write_ggufs(a, python, folder):
    ggufs = {}
    for name in ("MXFP4", "Q4_0"):
        ggufs[name] = os.path.join(folder, name + ".gguf")
        code = (
            "import json, sys; sys.path.insert(0, sys.argv[1]); import gguf_dummy as g;"
            "g.write(sys.argv[2], json.load(open(sys.argv[3])), int(sys.argv[4]),"
            " g.Q[sys.argv[5]], 4096)"
        )
        arguments = [HERE, ggufs[name], a.config, str(a.layers), name]
        subprocess.run([python, "-c", code, *arguments], check=True)
    return ggufs


def print_table(a, ggufs, figures):
    with open(a.config) as f:
        config = json.load(f)
    how = f"{a.threads} threads, by the clock" if a.threads else "1 thread, processor time"
    print(f"{os.path.basename(a.config)}, {a.layers} layers of {config['num_hidden_layers']};")
    print(f"{how}; tokens/s, medians of {a.rounds} rounds {a.ours}")
    print(f"{'':24}{'ours':>9}{'limit':>9}{'MXFP4':>9}{'ratio':>7}{'Q4_0':>9}{'ratio':>7}")
    rows = [(0, f"prompt of {a.prompt}"), (1, "decode, batch 1"), (8, "decode, batch 8")]
    for batch, title in rows:
        m = {k: statistics.median(figures[k, batch]) for k in ("ours", "limit", *ggufs)}
        line = f"{title:24}{m['ours']:9.1f}{m['limit']:9.1f}"
        for name in ggufs:
            line += f"{m[name]:9.1f}{m['ours'] / m[name]:7.2f}"
        print(line, flush=True)


def run_case(a, python):
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        ggufs = write_ggufs(a, python, folder)
        for _ in range(a.rounds):
            round_of(a, python, ggufs, figures)
    print_table(a, ggufs, figures)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--venv", required=True)
    p.add_argument("--hadal", default=os.path.join(ROOT, "build", "hadal"))
    p.add_argument("--case", choices=CASES, action="append", help="may be given again")
    p.add_argument("--config", help="a config of the caller's instead of the cases")
    p.add_argument("--layers", type=int, help="of the model; as many as the case has")
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--threads", type=int, default=0, help="0: one, by processor time")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--ours", default="", help="further options of hadal bench ops")
    a = p.parse_args()
    python = install(a.venv)
    cases = [(os.path.abspath(a.config), 4)] if a.config else [CASES[name] for name in a.case or CASES]
    layers = a.layers
    for config, most in cases:
        a.config, a.layers = os.path.join(HERE, "configs", config), layers or most
        run_case(a, python)


main()
