"""Controls of reinforcement learning: with true rewards they rise, shuffled they do not, with the sign flipped they fall, and
without advantages (test_train.py) no bit of a weight changes. The lists are fixed, so this proves the gradient, not that the
model sorts better (docs/training.md).

As a program, `tests/e2e/test_train_controls.py` runs all of it at full size: 24 lists, 20 steps, some minutes for each."""

import json
import pathlib
import subprocess
import sys
import tempfile

from conftest import HADAL, ROOT

MODEL = ROOT / "models" / "tiny-v3"
STEPS = 20
BOUNDS = {  # of the mean reward of the last five steps, less that of the first five
    "true": (0.1, 1),
    "shuffled": (-1, 0.03),
    "flipped": (-1, -0.3),
}


def run(folder, control, groups, steps, rate):
    log = pathlib.Path(folder) / f"{control}.log"
    command = [HADAL, "rl", MODEL, "--task", "sort", "--fixed-prompts", "--algorithm", "dr-grpo", "--groups", groups, "--samples", 8]
    command += ["--max-tokens", 40, "--context", 128, "--lr", rate, "--steps", steps, "--reward-control", control]
    command += ["--out", pathlib.Path(folder) / control, "--log", log, "-q"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == steps and all(line["dlogp_max"] == line["k3"] == 0 for line in lines)
    return [line["reward"] for line in lines]


def mean(x):
    return sum(x) / len(x)


def test_flipped_rewards_are_unlearned(tmp_path):
    """Four lists and a few steps, at a larger rate."""
    rewards = run(tmp_path, "flipped", groups=4, steps=6, rate=1e-4)
    assert mean(rewards[-2:]) <= mean(rewards[:2]) - 0.3, rewards


def main():
    bad = 0
    for control, (low, high) in BOUNDS.items():
        with tempfile.TemporaryDirectory() as folder:
            rewards = run(folder, control, groups=24, steps=STEPS, rate=4e-5)
        change = mean(rewards[-5:]) - mean(rewards[:5])
        verdict = "ok" if low <= change <= high else "FAILED"
        bad += verdict != "ok"
        print(f"{verdict}: {control}: {mean(rewards[:5]):.3f} to {mean(rewards[-5:]):.3f}, {change:+.3f}")
    return bad


if __name__ == "__main__":
    sys.exit(main())
