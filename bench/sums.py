#!/usr/bin/env python3
"""Supervised, then reinforcement learning: tiny-v4 learns sums of 5 digits by `hadal train` to between 30 and 70 % of sampled answers,
then by `hadal rl` to 90 % or more. Measures pass@1 and pass@8 on held-out sums, and the model's task suite, before and after each.

    bench/sums.py [--hadal build/hadal] [--backend cuda] [--out DIR] [--json FILE] [--seconds 450]
                  [--sft-rate 1e-4] [--rl-rates 4e-5] [--held-out 500] [--samples 8] [--limit 0] ...

Needs the program, python3 and this tree. The examples are written here: sums with their steps, and more other documents of the
corpus (tools/train_tiny), so that nothing else is forgotten. Checkpoints of `hadal train` are measured while it runs, and it is ended
when one is good enough; the one nearest to 50 % goes on. The runs of --rl-rates share the machine; the first to reach --goal ends all,
and so does the time. FILE always has what is known so far. Tables are printed at the end, and when it is stopped."""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from learning import interval

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tools/train_tiny")]
import arithmetic  # noqa: E402
import corpus  # noqa: E402
import make_eval  # noqa: E402
from plots import table  # noqa: E402

LOW, HIGH = 0.3, 0.7  # of sampled answers, before reinforcement learning
LOSS = 3.0  # points that another task may lose
CORPUS_TOKENS = 700  # of a document of recall
CONTEXT = 4096
EXAMPLES = 20000  # at most; then they repeat
KEPT = 16  # checkpoints of hadal train
RESERVE = 60  # seconds for what follows the last run
ANSWER = 200  # tokens


class Stopped(Exception):
    pass


# ---- data ----


def sums(rng):
    a, b = arithmetic.number(rng, 5), arithmetic.number(rng, 5)
    messages = [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": arithmetic.addition_steps(a, b)}]
    return {"messages": messages, "thinking": False}


def as_line(messages, thinking):
    line = make_eval.openai({"messages": messages})
    for m, plain in zip(messages, line["messages"]):
        if thinking and m.get("reasoning"):
            plain["reasoning_content"] = m["reasoning"]
    return {**line, "thinking": thinking}


def other(rng):
    """A conversation of the corpus on which the model was trained, with a seed that no training run had."""
    kind, thinking = rng.choices(corpus.KINDS, corpus.WEIGHTS)[0], rng.random() < 0.5
    return as_line(corpus.conversation(rng, kind, thinking, CORPUS_TOKENS), thinking)


def known(rng):
    """The longest sums that the model knows, and thinks about: longer ones without thoughts displace them first."""
    return as_line(corpus.to_messages(rng, [arithmetic.addition(rng, 4)], True), True)


def agent(rng):
    """Tools and their results: what it says of a failed call is the first that rewards for sums displace."""
    return as_line(corpus.conversation(rng, "agents", False, CORPUS_TOKENS), False)


def write_examples(path, n, seed):
    rng = random.Random(f"sums {seed}")
    kinds = [sums, agent, sums, known, sums, other, other, known]
    with open(path, "w") as f:
        for i in range(n):
            f.write(json.dumps(kinds[i % len(kinds)](rng), ensure_ascii=False) + "\n")


# ---- running ----


class Work:
    def __init__(self, args, folder):
        self.args, self.folder, self.start = args, folder, time.monotonic()
        self.found = {"arguments": {k: str(v) for k, v in vars(args).items()}, "passes": [], "suites": {}}
        self.running = []

    def left(self):
        return self.args.seconds - (time.monotonic() - self.start)

    def say(self, text):
        print(f"{time.monotonic() - self.start:6.1f} s  {text}", flush=True)

    def keep(self):
        """What is known so far, as a whole file."""
        self.found["seconds"] = round(time.monotonic() - self.start, 1)
        path = Path(self.args.json or self.folder / "sums.json")
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(beside, path)

    def begin(self, name, *words):
        """Starts a command of hadal; what it prints goes to NAME.out."""
        command = [str(w) for w in (self.args.hadal, *words, "--backend", self.args.backend, "--threads", self.args.threads)]
        with open(self.folder / f"{name}.out", "w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        process.name = name
        self.running.append(process)
        return process

    def end(self, process):
        code = process.wait()
        self.running.remove(process)
        if code:
            words = (self.folder / f"{process.name}.out").read_text()
            raise Stopped(f"{process.name}: exit {code}: {words[-2000:]}")

    def stop_all(self):
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()


def lines_of(log):
    """The whole lines of a log that may be growing."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def step_of(folder, step):
    return folder / f"step-{step:08d}" / "model"


# ---- measuring ----


def rl_options(prompts, samples):
    return ["--task", "addition", "--max-tokens", ANSWER, "--context", 1024, "--held-out", prompts, "--held-out-samples", samples]


def add_pass(work, name, prompts, samples, line):
    one, best = line["held_out_reward"], line.get("held_out_best")
    row = {"name": name, "prompts": prompts, "samples": samples, "pass@1": one}
    row.update({f"pass@{samples}": best} if best is not None else {})
    row["interval"], row["dlogp_max"] = interval(one, prompts), line.get("dlogp_max")  # samples of a prompt are no other draws
    work.found["passes"].append(row)
    work.say(f"{name}: pass@1 {one:.3f}" + (f", pass@{samples} {best:.3f}" if best is not None else ""))
    work.keep()
    return one


def begin_measure(work, name, model, prompts, samples):
    """Samples held-out sums: a run whose rewards are all zero changes nothing."""
    words = [*rl_options(prompts, samples), "--steps", 1, "--groups", 1, "--samples", 2, "--reward-control", "zero"]
    process = work.begin(f"measure-{name}", "rl", model, *words, "--out", work.folder / f"measured-{name}", "--log", work.folder / f"measure-{name}.log", "-q")
    process.measure = name, prompts, samples
    return process


def end_measure(work, process):
    name, prompts, samples = process.measure
    work.end(process)
    shutil.rmtree(work.folder / f"measured-{name}")
    return add_pass(work, name, prompts, samples, lines_of(work.folder / f"measure-{name}.log")[-1])


def begin_suite(work, name, model):
    words = ["--tasks", ROOT / "models/eval/tiny.jsonl", "--running", 64, "--kv-tokens", 65536, "--json", work.folder / f"suite-{name}.json", "-q"]
    words += ["--limit", work.args.limit] if work.args.limit else []
    process = work.begin(f"suite-{name}", "eval", model, *words)
    process.suite = name
    return process


def end_suite(work, process):
    name = process.suite
    work.end(process)
    report = json.loads((work.folder / f"suite-{name}.json").read_text())
    work.found["suites"][name] = {row["task"]: [row["right"], row["n"]] for row in report["tasks"]}
    work.say(f"suite of {name}: {report['all']['right']} of {report['all']['n']} right")
    work.keep()


def end_either(work, process):
    (end_suite if hasattr(process, "suite") else end_measure)(work, process)


# ---- the stages ----


def checkpoints(out):
    return [int(folder.name.split("-")[1]) for folder in sorted(out.glob("step-????????"))]


def train(work):
    """Trains until a checkpoint is good enough; each that is new when the last one has been measured is measured. Returns the shares
    of right answers, by step."""
    args = work.args
    data, out, log = work.folder / "examples.jsonl", work.folder / "sft", work.folder / "sft.log"
    write_examples(data, min(args.sft_steps * args.sft_batch, EXAMPLES), args.seed)
    words = ["--data", data, "--out", out, "--steps", args.sft_steps, "--save-every", args.sft_every, "--keep", KEPT, "--batch", args.sft_batch]
    words += ["--lr", args.sft_rate, "--warmup", 5, "--context", CONTEXT, "--seed", args.seed]
    words += ["--rows", CONTEXT] if args.backend == "cpu" else []
    process = work.begin("sft", "train", args.model, *words, "--log", log, "-q")
    shares, end = {}, work.left() - args.sft_seconds
    while process.poll() is None and work.left() > end and max(shares.values(), default=0.0) < 0.4:
        time.sleep(0.2)
        new = [step for step in checkpoints(out)[-1:] if step not in shares]
        if new:
            shares[new[0]] = end_measure(work, begin_measure(work, f"sft-{new[0]}", step_of(out, new[0]), args.choose, 4))
            work.say(f"hadal train: step {lines_of(log)[-1]['step']}, loss {lines_of(log)[-1]['loss']:.4f}")
    if process.poll() is None:
        process.terminate()  # ends after its step, with a checkpoint
    work.end(process)
    steps = lines_of(log)
    work.found["sft"] = {"losses": [line["loss"] for line in steps], "seconds": sum(line["seconds"] for line in steps), "shares": shares}
    work.say(f"hadal train: {len(steps)} steps in {work.found['sft']['seconds']:.0f} s, loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}")
    work.keep()
    return shares


def choose(work, shares):
    """The checkpoint whose share of right answers is nearest to 50 %: more steps, more right ones, so half of them are left out each time."""
    out = work.folder / "sft"
    left = checkpoints(out)
    while left:
        good = [step for step, share in shares.items() if 0.4 <= share <= 0.6]
        few = max((step for step, share in shares.items() if share < 0.5), default=0)
        many = min((step for step, share in shares.items() if share >= 0.5), default=1 << 30)
        left = [] if good else [step for step in left if few < step < many]
        if left:
            step = left[len(left) // 2]
            shares[step] = end_measure(work, begin_measure(work, f"sft-{step}", step_of(out, step), work.args.choose, 4))
    best = min((step for step in shares if step in checkpoints(out)), key=lambda step: (abs(shares[step] - 0.5), -step))
    work.found["sft"]["chosen"] = best
    work.say(f"step {best} goes on" + ("" if LOW <= shares[best] <= HIGH else f": none is between {LOW} and {HIGH}"))
    work.keep()
    return step_of(out, best)


class Learning:
    """A run of `hadal rl` and what its log has so far."""

    def __init__(self, work, model, rate):
        args, self.work, self.name = work.args, work, f"rl-{rate}"
        self.log, self.out, self.read_lines, self.best = work.folder / f"{self.name}.log", work.folder / self.name, 0, 0.0
        self.curve = work.found["rl"][rate] = {"rewards": [], "held_out": [], "dlogp_max": 0.0, "seconds": 0.0}
        words = [*rl_options(args.held_out, 1), "--algorithm", "dr-grpo", "--groups", args.rl_groups, "--samples", 8]
        words += ["--steps", args.rl_steps, "--eval-every", args.rl_every, "--lr", rate, "--kl", args.rl_kl, "--seed", args.seed]
        self.process = work.begin(self.name, "rl", model, *words, "--out", self.out, "--log", self.log, "-q")

    def read(self):
        lines = lines_of(self.log)
        for line in lines[self.read_lines :]:
            if line["step"]:
                self.curve["rewards"].append(line["reward"])
                self.curve["dlogp_max"] = max(self.curve["dlogp_max"], line["dlogp_max"])
                self.curve["seconds"] += sum(line[f"{part}_seconds"] for part in ("sample", "reward", "train", "update"))
            if "held_out_reward" in line:
                self.best = line["held_out_reward"]
                self.curve["held_out"].append([line["step"], self.best])
                add_pass(self.work, f"{self.name} step {line['step']}", self.work.args.held_out, 1, line)
            elif line["step"] % 5 == 0:
                self.work.say(f"{self.name}: step {line['step']}, reward {line['reward']:.3f}, |dlogp| {line['dlogp_max']}")
        if len(lines) > self.read_lines:
            self.work.keep()
        self.read_lines = len(lines)

    def end(self):
        """It ends after its step, with a checkpoint."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.work.end(self.process)
        self.read()


def reinforce(work, model):
    """Runs all rates until one reaches the goal, all end, or the time does. Returns the model of the best."""
    args = work.args
    work.found["rl"] = {}
    runs = [Learning(work, model, rate) for rate in args.rl_rates]
    beside = [begin_measure(work, "sft", model, args.held_out, args.samples), begin_suite(work, "sft", model)]
    while any(r.process.poll() is None for r in runs) and work.left() > RESERVE and max(r.best for r in runs) < args.goal:
        time.sleep(0.5)
        for r in runs:
            r.read()
        for process in [p for p in beside if p.poll() is not None]:
            beside.remove(process)
            end_either(work, process)
    for r in runs:
        r.end()
    for process in beside:
        end_either(work, process)
    best = max(runs, key=lambda r: r.best)
    work.found["best"] = best.name
    work.keep()
    return step_of(best.out, checkpoints(best.out)[-1])


def run(work):
    args = work.args
    suite = begin_suite(work, "base", args.model)
    end_measure(work, begin_measure(work, "base", args.model, args.held_out, args.samples))
    shares = train(work)
    end_suite(work, suite)
    model = reinforce(work, choose(work, shares))
    suite = begin_suite(work, "rl", model)
    end_measure(work, begin_measure(work, "rl", model, args.held_out, args.samples))
    end_suite(work, suite)


# ---- the report ----


def report(found):
    """Tables of what is known."""
    k = found["arguments"]["samples"]  # as text
    rows = []
    for p in found["passes"]:
        low, high = p["interval"]
        best = f"{p[f'pass@{k}']:.3f}" if f"pass@{k}" in p else ""
        rows.append([p["name"], f"{p['prompts']} x {p['samples']}", f"{p['pass@1']:.3f} ({low:.3f} to {high:.3f})", best])
    print(table(["model", "samples", "pass@1 (95 %)", f"pass@{k}"], rows))
    for name, curve in found.get("rl", {}).items():
        print(f"rl-{name}: {len(curve['rewards'])} steps, {curve['seconds']:.0f} s, largest |dlogp| {curve['dlogp_max']}")
    suites = found["suites"]
    names = [name for name in ("base", "sft", "rl") if name in suites]
    if not names:
        return
    rows, worst = [], []
    for task, (_, n) in suites[names[0]].items():
        shares = [100 * suites[name][task][0] / n for name in names]
        change = shares[-1] - shares[0]
        rows.append([task, n, *(f"{share:.1f}" for share in shares), f"{change:+.1f}"])
        worst += [task] if change < -LOSS else []
    print(table(["task", "n", *names, "change"], rows))
    print(f"tasks that lost more than {LOSS:.0f} points: {', '.join(worst) or 'none'}", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hadal", default=str(ROOT / "build/hadal"))
    p.add_argument("--model", default=str(ROOT / "models/tiny-v4"))
    p.add_argument("--backend", default="cpu")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--seconds", type=float, default=450, help="of all; the runs of reinforcement learning end before")
    p.add_argument("--held-out", type=int, default=500)
    p.add_argument("--samples", type=int, default=8)
    p.add_argument("--choose", type=int, default=100, help="held-out sums by which a checkpoint is chosen, 4 samples each")
    p.add_argument("--limit", type=int, default=0, help="cases of a task of the suite; 0: all")
    p.add_argument("--sft-steps", type=int, default=800, help="at most; it ends when 40 %% are right")
    p.add_argument("--sft-seconds", type=float, default=150)
    p.add_argument("--sft-every", type=int, default=5)
    p.add_argument("--sft-batch", type=int, default=64)
    p.add_argument("--sft-rate", default="1e-4")
    p.add_argument("--rl-steps", type=int, default=150)
    p.add_argument("--rl-every", type=int, default=20)
    p.add_argument("--rl-groups", type=int, default=32)
    p.add_argument("--rl-rates", nargs="+", default=["4e-5"])
    p.add_argument("--rl-kl", type=float, default=0.0, help="coefficient of the divergence from the model before")
    p.add_argument("--goal", type=float, default=0.94, help="pass@1 at which reinforcement learning ends")
    p.add_argument("--out", help="folder of data, logs and models; default: none is kept")
    p.add_argument("--json", help="default: sums.json in --out")
    args = p.parse_args()

    def stop(*_):
        raise Stopped("stopped by a signal")

    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(args.out or folder)
        folder.mkdir(parents=True, exist_ok=True)
        work, why = Work(args, folder), None
        try:
            run(work)
        except (Stopped, KeyboardInterrupt) as e:
            why = work.found["stopped"] = str(e) or "interrupted"
        work.keep()
        report(work.found)
        work.stop_all()
    sys.exit(why)


if __name__ == "__main__":
    main()
