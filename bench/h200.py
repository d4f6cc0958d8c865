#!/usr/bin/env python3
"""Measures everything that docs/perf/README.md says of a GPU, and writes the tables there.

    bench/h200.py measure FOLDER [ops|torch|ranks|graphs|invariance ...]   # on the GPU: results as JSON
    bench/h200.py docs FOLDER                                     # anywhere: tables of the page

HADAL names the program (default build-cuda/hadal), PYTHON the one with torch. What fails is named
and left out. `docs` replaces the text between "<!-- NAME -->" and "<!-- end -->" of the page by the
tables of FOLDER. Dates and machines around them are edited by hand.
"""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "perf" / "README.md"
HADAL = os.environ.get("HADAL", str(ROOT / "build-cuda" / "hadal"))
PYTHON = os.environ.get("PYTHON", sys.executable)
SHOWN = 14  # operators of a rank's table

FLASH, V3 = "tests/configs/v4_flash.json", "tests/configs/v3.json"
RANKS = [  # name, title, config, layout and load, whether its operators are shown
    ("tp4-30k", "V4-Flash, TP4 rank, 30K, 3 drafts", FLASH, "tp=4 --context 30000 --drafts 3", True),
    ("tp4-900k", "V4-Flash, TP4 rank, 900K, 3 drafts", FLASH, "tp=4 --context 900000 --drafts 3", True),
    ("ep4", "V4-Flash, EP4 rank, 128 requests of 4K", FLASH, "ep=4 --batch 128 --context 4096 --steps 5", True),
    ("ep72", "V3, EP72 rank, 256 requests of 2K", V3, "ep=72 --batch 256 --context 2048 --steps 5", True),
    ("r1", "R1 NVFP4, TP4 rank, 1K, 3 drafts", "tests/configs/r1_nvfp4.json",
     "tp=4 --context 1024 --drafts 3 --acceptance 0.92,0.72,0.36", True),
    ("ep32", "V3, EP32 rank, prompts 4 x 4096, 6 of 61 layers", V3,
     "ep=32 --batch 4 --prompt 4096 --context 0 --layers 6 --steps 1", True),
    ("tp4-4k", "V4-Flash, TP4 rank, 4K, 3 drafts", FLASH, "tp=4 --context 4096 --drafts 3", False),
    ("tp4-sticky", "V4-Flash, TP4 rank, 30K, 3 drafts, sticky", FLASH,
     "tp=4 --context 30000 --drafts 3 --router sticky", False),
    ("ep4-skewed", "V4-Flash, EP4 rank, 128 requests of 4K, skewed", FLASH,
     "ep=4 --batch 128 --context 4096 --steps 5 --router skewed", False),
    ("tp4-30k-fast", "V4-Flash, TP4 rank, 30K, 3 drafts, fast", FLASH,
     "tp=4 --context 30000 --drafts 3 --precision fast", False),
    ("ep4-fast", "V4-Flash, EP4 rank, 128 requests of 4K, fast", FLASH,
     "ep=4 --batch 128 --context 4096 --steps 5 --precision fast", False),
    ("ep72-fast", "V3, EP72 rank, 256 requests of 2K, fast", V3,
     "ep=72 --batch 256 --context 2048 --steps 5 --precision fast", False),
    ("tp4-30k-exact", "V4-Flash, TP4 rank, 30K, 3 drafts, exact", FLASH,
     "tp=4 --context 30000 --drafts 3 --precision exact", False),
    ("ep4-exact", "V4-Flash, EP4 rank, 128 requests of 4K, exact", FLASH,
     "ep=4 --batch 128 --context 4096 --steps 5 --precision exact", False),
    ("ep72-exact", "V3, EP72 rank, 256 requests of 2K, exact", V3,
     "ep=72 --batch 256 --context 2048 --steps 5 --precision exact", False),
]  # fmt: skip
MODES = [("exact", ["--precision", "exact"]), ("fast", ["--precision", "fast"]), ("free", ["--precision", "fast", "--no-batch-invariance"])]
COMPARED = ("ep32", "ep72", "ep4")  # ranks, in each mode
LEAST_ROWS = 64  # of products that are compared
ONE = "bench latency models/tiny-v4 --num-prompts 3 --input-len 64 --output-len 300 --draft-tokens"
MANY = "bench throughput models/tiny-v4 --max-running 256 --num-prompts 256 --input-len 32 --output-len 160 --warmup 256 --draft-tokens"
LITE = "bench latency --dummy-weights tests/configs/v2_lite.json --num-prompts 2 --input-len 64 --output-len 100 --draft-tokens 0"
GRAPHS = [  # name, title, command
    ("tiny-1-0", "tiny-v4, one request, 0 drafts", f"{ONE} 0"),
    ("tiny-1-2", "tiny-v4, one request, 2 drafts", f"{ONE} 2"),
    ("lite-1-0", "V2-Lite, one request, 0 drafts", LITE),
    ("tiny-256-0", "tiny-v4, 256 requests, 0 drafts", f"{MANY} 0"),
    ("tiny-256-1", "tiny-v4, 256 requests, 1 draft", f"{MANY} 1"),
]


# ---- on the GPU ----


def run_into(path, *words):
    print(f"{path.name}: {' '.join(map(str, words))}", flush=True)
    done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        path.write_text(done.stdout)
    else:
        print(f"{path.name}: failed: {(done.stderr or done.stdout).strip()[-300:]}", flush=True)


def rank_words(config, load):
    return ["bench", "latency", "--backend", "cuda", "--dummy-weights", config, "--emulate-rank", *load.split()]


def measure_modes(folder):
    """Products of many rows and steps of ranks, in each mode, and torch on the same products."""
    for mode, flags in MODES:
        out = folder / f"products-{mode}.jsonl"
        run_into(out, HADAL, "bench", "ops", "--backend", "cuda", "--only", "linear", "--repeat", 5, "--json", *flags)
        many = [c for c in objects(out) if c["rows"] >= LEAST_ROWS and c["op"] != "grouped_gemm" and not c["top_k"]]
        out.write_text("".join(json.dumps(c) + "\n" for c in many))
    run_into(folder / "products-torch.jsonl", PYTHON, ROOT / "bench/peers/torch_ops.py", "--json", folder / "products-exact.jsonl")
    for name, _, config, load, _ in RANKS:
        for mode, flags in MODES if name in COMPARED else ():
            run_into(folder / f"step-{name}-{mode}.json", HADAL, *rank_words(config, load), "--json", *flags)


def measure(folder, parts):
    folder.mkdir(parents=True, exist_ok=True)
    if "ops" in parts:
        run_into(folder / "ops.jsonl", HADAL, "bench", "ops", "--backend", "cuda", "--repeat", 5, "--json")
    if "graphs" in parts:
        for name, _, command in GRAPHS:
            for suffix, flags in ("", []), ("-without", ["--no-graphs"]):
                run_into(folder / f"graphs-{name}{suffix}.json", HADAL, *command.split(), "--backend", "cuda", "-q", "--json", *flags)
    if "ranks" in parts:
        for name, _, config, load, _ in RANKS:
            run_into(folder / f"rank-{name}.json", HADAL, *rank_words(config, load), "--json")
    if "invariance" in parts:
        measure_modes(folder)
    if "torch" in parts:
        run_into(folder / "torch.jsonl", PYTHON, ROOT / "bench/peers/torch_ops.py", "--json", folder / "ops.jsonl")


# ---- as tables ----


def objects(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def loaded(path):
    return json.loads(path.read_text()) if path.exists() else None


def table(heads, rows):
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [heads, ["---"] * len(heads), *rows])


def shape_of(c):
    weights = {"F8_E4M3": "FP8", "F4_E2M1": "FP4"}.get(c["weights"], c["weights"])
    if c["op"] in ("attention", "indexer_topk"):
        return f"{c['outs']} heads, {c['n']} keys, {c['top_k']}"
    if c["op"] in ("linear_heads", "grouped_gemm"):
        return f"{c['n']} of {c['outs']} x {c['cols']} {weights}"
    return f"{c['outs']} x {c['cols']} {weights}" if c["op"] == "linear" else str(c["n"] if c["op"] == "moe_permute" else c["cols"])


def ops_table(folder):
    rows = []
    for c in objects(folder / "torch.jsonl") or objects(folder / "ops.jsonl"):
        us, peer = c["us"], c.get("peer_us")
        rows.append([c["case"], c["op"], shape_of(c), c["rows"], f"{us:.2f}", f"{c['limit_us']:.2f}", c["binds"],
                     f"{100 * c['limit_us'] / us:.1f} %", f"{c['bytes'] / us / 1e3:.0f}", f"{c['flops'] / us / 1e6:.2f}",
                     c["peer"] if peer else "", f"{peer:.2f}" if peer else "", f"{peer / us:.2f}" if peer else ""])  # fmt: skip
    heads = ["case", "operator", "shape", "rows", "us", "limit us", "binds", "of limit", "GB/s", "TFLOP/s", "torch", "torch us", "speedup"]
    return table(heads, rows) if rows else None


def rank_row(title, r):
    ms, limit = 1e3 * r["operator_seconds"], 1e3 * r["limit_seconds"]
    gb = sum(r[k] for k in ("weight_bytes", "activation_bytes", "entry_page_bytes", "window_page_bytes")) / 1e9
    row = [title, f"{ms:.2f}", f"{limit:.2f}"]
    if r["prompt"]:
        return [*row, "", f"{100 * limit / ms:.1f} % of the sum", "", f"{gb:.1f}", ""]
    step = 1e3 * r["device_step_seconds"]
    speed = r["batch"] * r["tokens_per_step"] / r["engine_device_step_seconds"]
    return [*row, f"{step:.2f}", f"{100 * limit / step:.1f} %", f"{1e6 * r['gap_seconds']:.1f}", f"{gb:.1f}", f"{speed:.0f}"]


def ranks_table(folder):
    rows = [rank_row(title, r) for name, title, *_ in RANKS if (r := loaded(folder / f"rank-{name}.json"))]
    heads = ["case", "operators", "their limits", "step on the device", "limit of it", "idle between steps, us", "memory, GB", "tokens/s"]
    return table(heads, rows) if rows else None


def operators_of(r):
    lines = [f"{'part':<16} {'operator':<14} {'rows x outs x ins':<20} {'weights':<8} {'calls':>5} {'us':>9} {'MB':>9} {'GF':>9} "
             f"{'limit us':>9} {'ratio':>7} {'lost ms':>9} {'share':>6}"]  # fmt: skip
    total = r["operator_seconds"]
    for op in sorted(r["ops"], key=lambda op: op["limit_seconds"] - op["seconds"])[:SHOWN]:
        n = op["calls"]
        shape = " x ".join(str(op[k]) for k in ("rows", "outs", "ins") if op[k])
        lines.append(f"{op['part'] + ' ' + op['stage']:<16} {op['op']:<14} {shape:<20} {op['weights']:<8} {n:>5.0f} "
                     f"{1e6 * op['seconds'] / n:>9.2f} {op['bytes'] / n / 1e6:>9.3f} {op['flops'] / n / 1e9:>9.3f} "
                     f"{1e6 * op['limit_seconds'] / n:>9.2f} {100 * op['limit_seconds'] / op['seconds']:>6.1f}% "
                     f"{1e3 * (op['seconds'] - op['limit_seconds']):>9.3f} {100 * op['seconds'] / total:>5.1f}%")  # fmt: skip
    return "\n".join(lines)


def operators_text(folder):
    parts = []
    for name, title, config, load, shown in RANKS:
        r = loaded(folder / f"rank-{name}.json")
        if shown and r:
            command = " ".join(["hadal", *rank_words(config, load)])
            parts.append(f"### {title}\n\n`{command}`\n\n```\n{operators_of(r)}\n```")
    return "\n\n".join(parts) or None


def graphs_table(folder):
    rows = []
    for name, title, _ in GRAPHS:
        r, without = loaded(folder / f"graphs-{name}.json"), loaded(folder / f"graphs-{name}-without.json")
        if not r or "graph_us" not in r:
            continue
        idle = [f"{r[k]:.1f}" if k in r else "" for k in ("median_gpu_idle_us", "mean_gpu_idle_us")]
        plain = [f"{without[k]:.{d}f}" if without else "" for k, d in (("median_tpot_ms", 2), ("output_throughput", 0))]
        rows.append([title, f"{r['graph_us']:.0f}", *idle, f"{r['host_us_per_step']:.0f}", f"{r['median_tpot_ms']:.2f}",
                     f"{r['output_throughput']:.0f}", *plain])  # fmt: skip
    heads = ["model", "GPU us", "idle us, median", "mean", "host us", "ms per token", "tokens/s", "without graphs: ms", "tokens/s"]
    return table(heads, rows) if rows else None


def products_table(folder):
    rows = []
    modes = [objects(folder / f"products-{mode}.jsonl") for mode, _ in MODES]
    for exact, fast, free, peer in zip(*modes, objects(folder / "products-torch.jsonl")):
        rows.append([exact["case"], shape_of(exact), exact["rows"], *(f"{c['us']:.1f}" for c in (exact, fast, free)),
                     f"{peer['peer_us']:.1f} {peer['peer']}", f"{exact['limit_us']:.1f}",
                     f"{fast['us'] / free['us']:.2f}"])  # fmt: skip
    heads = ["case", "shape", "rows", "exact, us", "fast", "without invariance", "torch", "limit", "fast / without"]
    return table(heads, rows) if rows else None


def steps_table(folder):
    rows = []
    for name, title, *_ in RANKS:
        modes = [loaded(folder / f"step-{name}-{mode}.json") for mode, _ in MODES] if name in COMPARED else [None]
        if all(modes):
            key = "operator_seconds" if modes[0]["prompt"] else "device_step_seconds"
            ms = [1e3 * r[key] for r in modes]
            rows.append([title, *(f"{t:.2f}" for t in ms), f"{1e3 * modes[0]['limit_seconds']:.2f}", f"{ms[1] / ms[2]:.2f}"])
    heads = ["step", "exact, ms", "fast", "without invariance", "limit", "fast / without"]
    return table(heads, rows) if rows else None


TABLES = {
    "ranks": ranks_table,
    "invariance": steps_table,
    "operators": operators_text,
    "graphs": graphs_table,
    "products": products_table,
    "cases": ops_table,
}


def write_docs(folder):
    text = PAGE.read_text()
    for name, make in TABLES.items():
        new = make(folder)
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, behind = rest.partition("<!-- end -->")
        if not begin or not end:
            sys.exit(f"error: {PAGE} has no place for {name}")
        if new:
            text = before + begin + new + "\n" + end + behind
        print(f"{name}: {'written' if new else 'no results'}")
    PAGE.write_text(text)


def main():
    known = ["ops", "graphs", "ranks", "invariance", "torch"]
    if len(sys.argv) < 3 or sys.argv[1] not in ("measure", "docs") or set(sys.argv[3:]) - set(known):
        sys.exit(__doc__.strip())
    folder = pathlib.Path(sys.argv[2])
    if sys.argv[1] == "measure":
        measure(folder, sys.argv[3:] or known)
    else:
        write_docs(folder)


if __name__ == "__main__":
    main()
