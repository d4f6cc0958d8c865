"""hadal eval: the shipped model on its own tasks, and what a task file may not hold."""

import json

import pytest
from conftest import ROOT

MODEL = ROOT / "models" / "tiny-v4"


def task(checker, **fields):
    line = {"task": "t", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "thinking": True,
            "max_tokens": 200, "checker": checker}  # fmt: skip
    return json.dumps({**line, **fields})


def run(hadal, tmp_path, lines, *args):
    tasks, report = tmp_path / "tasks.jsonl", tmp_path / "report.json"
    tasks.write_text("\n".join(lines) + "\n")
    done = hadal("eval", MODEL, "--tasks", tasks, "--json", report, "-q", *args)
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text())


def test_the_model_knows_what_it_was_taught(hadal, tmp_path):
    report = tmp_path / "report.json"
    args = ["--suite", "tiny", "--task", "addition_3", "--limit", "20", "--draft-tokens", "3", "-q"]
    done = hadal("eval", MODEL, *args, "--json", report)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(report.read_text())["tasks"]
    assert row["n"] == 20 and row["right"] >= 19 and row["finished"] == 20
    assert row["low"] < row["rate"] <= row["high"] <= 1 and row["accepted"] > row["drafted"] / 2
    assert "addition_3" in done.stdout and "all" in done.stdout


@pytest.mark.parametrize(
    ("checker", "right"),
    [
        ({"type": "final_number", "expect": "5"}, 1),
        ({"type": "final_number", "expect": "15"}, 0),
        ({"type": "contains", "expect": "2 + 3"}, 1),
        ({"type": "exact", "expect": "2 + 3 = 5"}, 1),
        ({"type": "exact", "expect": "5"}, 0),
        ({"type": "regex", "expect": "= 5$"}, 1),
        ({"type": "tool_call", "expect": [{"name": "add", "arguments": {}}]}, 0),
    ],
)
def test_checkers(hadal, tmp_path, checker, right):
    report = run(hadal, tmp_path, [task(checker)])
    assert (report["all"]["n"], report["all"]["right"]) == (1, right)


def test_tools_are_called(hadal, tmp_path):
    lines = (MODEL / "eval" / "tiny.jsonl").read_text().splitlines()
    lines = [line for line in lines if json.loads(line)["task"] == "tools"][:6]
    report = run(hadal, tmp_path, lines, "--running", "3")
    assert report["all"]["finished"] == 6 and report["all"]["right"] >= 4


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "not valid JSON"),
        ("{}", "task must be a string"),
        (task({"type": "vibes", "expect": "x"}), "checker.type"),
        (task({"type": "exact", "expect": 5}), "checker.expect"),
        (task({"type": "exact", "expect": "x"}, prompt="y"), "either messages"),
        (task({"type": "exact", "expect": "x"}, messages=[{"role": "robot"}]), "role"),
        (task({"type": "exact", "expect": "x"}, max_tokens=99999999), "exceed the context"),
        (task({"type": "regex", "expect": "("}), "bad pattern"),
    ],
)
def test_refused_lines_are_named(refused, tmp_path, line, part):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(line + "\n")
    assert part in refused("eval", MODEL, "--tasks", tasks, "-q")


def test_refused_commands(refused):
    assert "--suite NAME or --tasks FILE" in refused("eval", MODEL)
    assert "nothing.jsonl" in refused("eval", MODEL, "--suite", "nothing")
