#!/usr/bin/env python3
"""Writes the comparison of docs/plan.md: published speeds against `hadal plan` and `hadal simulate`.

    scripts/make_plan.py [HADAL]     # default build/hadal; about a minute

--check compares instead of writing. Nothing is fitted: a row shows what is missing in the formulas.
"""

import json
import pathlib
import subprocess
import sys

from make_eplb import simulate, table

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "plan.md"
BEGIN, END = "<!-- made by scripts/make_plan.py -->\n", "<!-- end of what it made -->\n"

# What of a prediction is compared: its name, unit, digits, and how it comes from a layout on GPUs.
STEP = ("step", "ms", 2, lambda x, gpus: 1e3 * x["decode"]["seconds"])
TTFT = ("TTFT", "ms", 0, lambda x, gpus: 1e3 * x["ttft_seconds"])
USER = ("of a user", "tok/s", 0, lambda x, gpus: x["user_tokens_per_second"])
OUTPUT = ("of a GPU", "tok/s", 0, lambda x, gpus: x["output_tokens_per_second"] / gpus)
DECODE = ("decode of a node", "tok/s", 0, lambda x, gpus: 8 * x["users_of_gpu"] / x["decode"]["seconds"])
PREFILL = ("prefill of a node", "tok/s", 0, lambda x, gpus: 8 * x["prompt"] / x["prompt_seconds"])

SGLANG_EP, TRTLLM, SGLANG_V4 = "SGLang, large-scale EP", "TensorRT-LLM, R1", "SGLang, V4"
PRODUCTION, PROFILE = "DeepSeek, production", "DeepSeek, profile"
MTP = ("--drafts", 3, "--accepted")

# DeepSeek's users of a GPU in production follow from its 20 to 22 tok/s of a user: 14800 / 8 / 21.
# Source, config, GPUs, layout, users, prompt, output, further flags, what, published.
ROWS = [
    (SGLANG_EP, "v3", 72, "h100", "dp=72,ep=72", 72 * 256, 2000, 100, ("--overlap",), STEP, 91.9),
    (SGLANG_EP, "v3", 72, "h100", "dp=72,ep=72", 72 * 256, 2000, 100, ("--overlap",), DECODE, 22282),
    (PROFILE, "v3", 128, "h100", "dp=128,ep=128", 128 * 128, 4096, 100, ("--overlap",), DECODE, 18598),
    (PRODUCTION, "v3", 144, "h100", "dp=144,ep=144", 144 * 88, 4989, 1, ("--overlap",), DECODE, 14800),
    *((SGLANG_EP, "v3", 32, "h100", "dp=32,ep=32", 32, n, 1, ("--overlap", "--chunk", 16384), PREFILL, rate) for n, rate in ((1024, 57674), (2048, 54543), (4096, 50302))),
    (PROFILE, "v3", 32, "h100", "dp=32,ep=32", 32, 4096, 1, ("--overlap", "--chunk", 16384), PREFILL, 62713),
    (TRTLLM, "r1", 8, "h200", "tp=8,ep=4", 1, 1024, 2048, (*MTP, 1.82), USER, 158),
    (TRTLLM, "r1", 8, "h200", "dp=8,ep=8", 1024, 1024, 2048, (), OUTPUT, 1436),
    (SGLANG_V4, "v4_flash", 4, "h200", "tp=4", 1, 4096, 1024, (*MTP, 1.5), USER, 266),
    (SGLANG_V4, "v4_flash", 4, "h200", "tp=4", 1, 900000, 1024, (*MTP, 1.5), USER, 240),
    (SGLANG_V4, "v4_flash", 4, "h200", "tp=4", 1, 8192, 1024, ("--chunk", 8192), TTFT, 237),
    (SGLANG_V4, "v4_pro", 8, "b200", "tp=8", 1, 4096, 1024, (*MTP, 1.5), USER, 199),
]

# The published planner in Python on the same law of traffic: rows of a rank: {(plan, split): balancedness}.
BALANCE = {
    64: {("published", "round"): 0.812, ("published", "flow"): 0.898},
    256: {("published", "round"): 0.899, ("published", "flow"): 0.953},
    1024: {("published", "round"): 0.942, ("published", "flow"): 0.971},
    8192: {("published", "round"): 0.979, ("published", "flow"): 0.989},
}
RANKS, SLOTS, PLANNED_ROWS, JUDGED_STEPS = 32, 288, 2_000_000, 50


def predict(hadal, config, gpus, gpu, layout, users, prompt, output, flags):
    """The one layout of a prediction, with its load."""
    load = ("--gpus", gpus, "--gpu", gpu, "--layout", layout, "--users", users, "--prompt", prompt, "--output", output)
    command = [hadal, "plan", ROOT / "tests" / "configs" / f"{config}.json", *load, *flags, "--json"]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    (found,) = json.loads(done.stdout)["layouts"]
    return {**found, "users_of_gpu": users / gpus, "prompt": prompt}


def speed_row(hadal, source, config, gpus, gpu, layout, users, prompt, output, flags, what, published):
    name, unit, digits, value = what
    found = predict(hadal, config, gpus, gpu, layout, users, prompt, output, flags)
    predicted = value(found, gpus)
    error = f"{100 * (predicted / published - 1):+.0f} %"
    case = f"{config}, {gpus} x {gpu}, {layout}, {users} x {prompt}"
    return source, case, f"{name}, {unit}", f"{published:g}", f"{predicted:.{digits}f}", error, "yes" if found["fits"] else "no"


def balance_rows(hadal):
    for rows, known in BALANCE.items():
        tokens = rows * RANKS
        window = -(-PLANNED_ROWS // tokens)
        spec = f"lognormal:1,tokens:{tokens},passes:{window + JUDGED_STEPS},layers:4,experts:256,top-k:1"
        for (plan, split), published in known.items():
            found = simulate(hadal, spec, "--ranks", RANKS, "--slots", SLOTS, "--window", window, "--plan", plan, "--split", split)[plan]["balancedness"]
            yield rows, f"{plan}, {split}", f"{published:.3f}", f"{found:.3f}", f"{found - published:+.3f}"


def made(hadal):
    speeds = table(("published by", "case: users x prompt", "what", "published", "predicted", "error", "fits"), [speed_row(hadal, *row) for row in ROWS])
    balance = table(("rows of a rank", "plan, split", "published planner", "`hadal simulate`", "error"), list(balance_rows(hadal)))
    return f"{BEGIN}{speeds}\n{balance}{END}"


def main():
    args = [a for a in sys.argv[1:] if a != "--check"]
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    new = head + made(args[0] if args else str(ROOT / "build" / "hadal")) + rest.split(END)[1]
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new)
    elif new != page:
        sys.exit(f"{PAGE}: not what scripts/make_plan.py makes")


if __name__ == "__main__":
    main()
