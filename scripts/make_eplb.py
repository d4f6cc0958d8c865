#!/usr/bin/env python3
"""Writes the simulated figures of docs/eplb.md, and their plots in docs/eplb/.

    scripts/make_eplb.py [HADAL]     # default build/hadal; about a minute

Everything comes from `hadal simulate` with fixed seeds. --check compares instead of writing.
"""

import json
import pathlib
import random
import subprocess
import sys

from plots import plot, table

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "eplb.md"
BEGIN, END = "<!-- made by scripts/make_eplb.py -->\n", "<!-- end of what it made -->\n"
SKEW = "lognormal:1,layers:2"


def simulate(hadal, spec, *flags):
    """{plan: result}, for the plans of one run."""
    command = [hadal, "simulate", "--generate", spec, "--json", *map(str, flags)]
    return {r["plan"]: r for r in json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)}


# ---- the figures ----


def by_ranks(hadal):
    ranks, lines, rows = [8, 16, 32, 48, 72], {}, []
    for n in ranks:
        got = simulate(hadal, f"{SKEW},passes:40,tokens:{128 * n}", "--ranks", n, "--slots", 288, "--window", 24)
        for plan, r in got.items():
            lines.setdefault(plan, []).append(r["balancedness"])
        rows.append([n, *(f"{got[p]['balancedness']:.3f}" for p in got), f"{got['flow']['bound']:.3f}", *(f"{got[p]['tokens_per_s'] / got['none']['tokens_per_s']:.2f}" for p in ("hadal", "flow"))])
    svg = plot("288 slots, 1024 rows per rank", "ranks", "balancedness", ranks, lines)
    return svg, table(["ranks", "none", "published", "hadal", "flow", "bound", "speed of hadal / none", "of flow / none"], rows)


def by_batch(hadal):
    rows = []
    for per_rank in (64, 256, 1024, 8192):
        for jitter in (0, 0.3):
            passes = 40 if per_rank < 8192 else 24
            got = simulate(hadal, f"{SKEW},passes:{passes},tokens:{4 * per_rank},jitter:{jitter}", "--ranks", 32, "--slots", 288, "--window", 16)
            rows.append([per_rank, f"{jitter:.0%}", *(f"{got[p]['balancedness']:.3f} ({got[p]['lowest']:.3f})" for p in got)])
    return table(["rows per rank", "jitter", "none", "published", "hadal", "flow"], rows)


def by_split(hadal):
    rows = []
    for n in (4, 8, 16, 32):
        for per_rank in (64, 256, 1024):
            flags = (f"{SKEW},passes:40,tokens:{per_rank * n // 8}", "--ranks", n, "--slots", 288, "--window", 24, "--plan", "hadal,flow")
            got = {split: simulate(hadal, *flags, "--split", split) for split in ("even", "local", "flow")}
            columns = [("hadal", split) for split in ("even", "local", "flow")] + [("flow", split) for split in ("local", "flow")]
            rows.append([n, per_rank, *(f"{got[split][plan]['balancedness']:.3f}" for plan, split in columns)])
    return table(["ranks", "rows per rank", "hadal: even", "local", "flow", "flow: local", "flow"], rows)


def over_time(hadal):
    got = simulate(hadal, f"{SKEW},passes:256,tokens:4096,switch:80,drift:0.01", "--ranks", 32, "--slots", 288, "--window", 16, "--every", 16)
    lines = {p: [s["balancedness"] for s in r["steps"]] for p, r in got.items()}
    svg = plot("All shares change after steps 64, 144 and 224; plans every 16 steps", "step", "balancedness", list(range(len(lines["none"]))), lines)
    return svg


def by_period(hadal):
    rows = []
    for drift in (0.02, 0.1, 0.3):
        for every in (8, 32, 0):
            got = simulate(hadal, f"{SKEW},passes:176,tokens:4096,drift:{drift}", "--ranks", 32, "--slots", 288, "--window", 16, "--every", every)
            rows.append([f"{drift:.0%}", every or "never", *(f"{got[p]['balancedness']:.3f}" for p in ("published", "hadal", "flow")), *(f"{got[p]['moves'] / 2 / max(1, got[p]['plans'] - 1):.0f}" for p in ("published", "hadal", "flow"))])
    return table(["drift per step", "plan every", "published", "hadal", "flow", "moves per plan and layer: published", "hadal", "flow"], rows)


def as_published(hadal):
    """The skew at which experts in order are as uneven on 32 ranks as TensorRT-LLM saw, and what plans leave of it."""
    load = lambda skew, ranks, slots: simulate(hadal, f"lognormal:{skew},layers:8,passes:40,tokens:{128 * ranks}", "--ranks", ranks, "--slots", slots, "--window", 24)
    uneven = lambda r: 1 / r["balancedness"] - 1
    skew = min((n / 20 for n in range(18, 28)), key=lambda s: abs(uneven(load(s, 32, 256)["none"]) - 1.564))
    before, on_32, on_36 = (load(skew, n, slots) for n, slots in ((32, 256), (32, 288), (36, 288)))
    rows = [["32, 256", "1.564", f"{uneven(before['none']):.3f}", "", "", ""]]
    for name, published, got in ("32, 288", "0.109", on_32), ("36, 288", "0.115", on_36):
        rows.append([name, published, "", *(f"{uneven(got[plan]):.3f}" for plan in ("published", "hadal", "flow"))])
    return skew, table(["ranks, slots", "published", "in order", "plan published", "hadal", "flow"], rows)


def by_hash(hadal):
    """Experts by token as in V4's first layers: 6 of 256 drawn for each of 129,280 tokens, whose frequencies follow Zipf."""
    dice, rows = random.Random(7), []
    choices = [dice.sample(range(256), 6) for _ in range(129280)]
    for skew in (0.8, 1.0, 1.2):
        loads = [0.0] * 256
        for rank, experts in enumerate(choices):
            for e in experts:
                loads[e] += 1e9 / (rank + 1) ** skew
        for ranks, slots in ((8, 264), (32, 288)):
            each = 256 // ranks
            in_order = sum(loads) / ranks / max(sum(loads[i : i + each]) for i in range(0, 256, each))
            plans = []
            for algo in ("published", "hadal", "flow"):
                command = [hadal, "eplb", "--load", "-", "--slots", str(slots), "--ranks", str(ranks), "--algo", algo]
                done = subprocess.run(command, input=json.dumps([[round(n) for n in loads]]), check=True, capture_output=True, text=True)
                plans.append(f"{json.loads(done.stdout)['balancedness'][0]:.3f}")
            rows.append([skew, f"{max(loads) / sum(loads) * 256:.1f}", f"{ranks}, {slots}", f"{in_order:.3f}", *plans])
    return table(["Zipf", "hottest / mean", "ranks, slots", "in order", "published", "hadal", "flow"], rows)


def page(hadal):
    ranks_svg, ranks = by_ranks(hadal)
    skew, published = as_published(hadal)
    text = f"""### Balancedness by ranks

`hadal simulate --generate {SKEW},...`: 256 experts, 8 per token, 288 slots, 1024 rows per rank.
Speed is that of the model of a step; it is a prediction.

{ranks}
![balancedness against ranks](eplb/ranks.svg)

### By batch

32 ranks, 288 slots; mean, and in brackets what 1 % of steps and layers are below. Jitter is the
deviation of each expert's share per step.

{by_batch(hadal)}
### By split

288 slots; plans of `hadal` and `flow`. *Even* is that of `--expert-split turns`, without chance; *local* splits
the rows of each rank alone, *flow* those of all ranks together.

{by_split(hadal)}
### When traffic changes

`published` and `flow` are planned anew, `hadal` is repaired.

![balancedness over time](eplb/time.svg)

{by_period(hadal)}
### Beside what TensorRT-LLM published

Imbalance is max / mean - 1 of the ranks. Its traffic is not published; here it is `lognormal:{skew}`, which makes experts in
order about as uneven.

{published}
### Layers that choose by token

In V4's first layers the token alone says which experts, so the frequencies of tokens are all that a plan needs.

{by_hash(hadal)}"""
    return {PAGE.parent / "eplb" / "ranks.svg": ranks_svg, PAGE.parent / "eplb" / "time.svg": over_time(hadal)}, text


def main(args):
    check = "--check" in args
    rest = [a for a in args if a != "--check"]
    files, text = page(rest[0] if rest else str(ROOT / "build" / "hadal"))
    whole = PAGE.read_text()
    before, after = whole[: whole.index(BEGIN) + len(BEGIN)], whole[whole.index(END) :]
    files[PAGE] = before + text + after
    for path, content in files.items():
        if check and path.read_text() != content:
            sys.exit(f"{path}: not as made")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)


if __name__ == "__main__":
    main(sys.argv[1:])
