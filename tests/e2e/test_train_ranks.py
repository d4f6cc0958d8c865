"""hadal train and hadal rl on several ranks: the curve of one, equal bits in every run, a run that goes on
with other ranks, and ranks without work."""

import json
import shutil

import pytest
from conftest import ROOT
from test_train import MODEL, WORDS, digests, steps, train

CONTROLS = ["--task", "sort", "--steps", "2", "--lr", "4e-5", "--context", "256", "--groups", "3", "--samples", "4", "-q"]


@pytest.fixture
def data(tmp_path):
    """Of unequal lengths."""
    lines = [{"prompt": f"Say {w}.", "completion": f"{w} " * (1 + 3 * i)} for i, w in enumerate(WORDS)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def same_curve(log, one, names):
    assert len(log) == len(one)
    for a, b in zip(log, one):
        for name in names:
            assert a[name] == pytest.approx(b[name], rel=1e-3), name


@pytest.mark.parametrize("optimizer, n", [("adamw", 2), ("muon", 1)])
def test_ranks_have_the_curve_of_one_and_equal_bits_in_every_run(hadal, data, tmp_path, optimizer, n):
    args = ["--steps", n, "--balance", "0.001", "--optimizer", optimizer, "-q"]
    if optimizer == "muon":
        args += ["--freeze", "experts,shared,dense"]
    curves, bits = {}, {}
    for name, ranks, threads in [("one", 1, 2), ("two", 2, 2), ("again", 2, 3), ("idle", 6, 2)]:
        out, log = tmp_path / name, tmp_path / f"{name}.log"
        train(hadal, data, out, *args, "--dp", ranks, "--threads", threads, "--log", log)
        curves[name], bits[name] = steps(log), digests(out / f"step-0000000{n}")
    for name in ["two", "idle"]:
        same_curve(curves[name], curves["one"], ["loss", "gradient_norm", "tokens", "rate"])
        assert curves[name][0]["loss"] == curves["one"][0]["loss"]  # no bit of it depends on ranks
        assert bits[name][1] != bits["one"][1]  # another order of sums: not one rank alone
    assert bits["two"] == bits["again"]


def test_a_run_goes_on_with_any_ranks(hadal, data, tmp_path):
    """To the same bits with as many as before, else to their curve."""
    args = ["--mtp-weight", "0.3", "--schedule", "cosine", "-q"]
    train(hadal, data, tmp_path / "start", *args, "--steps", "2", "--dp", "2", "--save-every", "1", "--log", tmp_path / "whole")
    shutil.rmtree(tmp_path / "start" / "step-00000002")
    for ranks in [1, 2, 3]:
        out, log = tmp_path / f"{ranks}", tmp_path / f"{ranks}.log"
        shutil.copytree(tmp_path / "start", out)
        train(hadal, data, out, *args, "--steps", "2", "--dp", ranks, "--resume", "--log", log)
        line, whole = steps(log)[-1], steps(tmp_path / "whole")[-1]
        same_curve([line], [whole], ["loss", "mtp_loss", "gradient_norm"])
        assert line["loss"] == whole["loss"]
        assert (line["gradient_norm"] == whole["gradient_norm"]) == (ranks == 2)


def test_rl_has_the_curve_of_one_rank(hadal, tmp_path):
    curves = []
    for name, ranks in [("one", 1), ("two", 2), ("again", 2)]:
        log = tmp_path / f"{name}.log"
        args = [*CONTROLS, "--dp", ranks, "--kl", "0.01", "--mtp-weight", "0.1"]
        done = hadal("rl", MODEL, "--out", tmp_path / name, *args, "--log", log)
        assert done.returncode == 0, done.stderr
        curves.append(steps(log))
    one, two, again = curves
    assert all(line["dlogp_max"] == 0 for curve in curves for line in curve)
    for name in ["reward", "loss", "entropy", "length", "equal_groups", "tokens"]:
        assert two[0][name] == one[0][name], name
    assert [line["reward"] for line in two] == [line["reward"] for line in one]
    same_curve(two, one, ["gradient_norm", "entropy", "length"])
    assert [line["gradient_norm"] for line in two] == [line["gradient_norm"] for line in again]
    assert digests(tmp_path / "two" / "step-00000002") == digests(tmp_path / "again" / "step-00000002")


def test_bad_numbers_of_ranks_are_refused(refused, data, tmp_path):
    for bad in ["0", "65", "two"]:
        assert "--dp" in refused("train", MODEL, "--data", data, "--out", tmp_path / "out", "--dp", bad)
    assert not (tmp_path / "out").exists()
