"""hadal train and hadal rl on several ranks: the curve of one, equal bits in every run, a run that goes on
with other ranks, and ranks without work."""

import json
import shutil
import subprocess
import time

import pytest
from conftest import HADAL, as_root
from hosts import host, slurm  # fixtures
from test_train import MODEL, WORDS, digests, steps, train
from worlds import CLEAN, KEY, NO_DEVICE, TRANSPORTS, free_address, needs_ucx

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


@pytest.mark.parametrize("optimizer, n", [("adamw", 2), pytest.param("muon", 1, marks=pytest.mark.long)])
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
    assert "go together" in refused("train", MODEL, "--data", data, "--out", tmp_path / "out", "--rank", "1")
    other = ["--dp", "3", "--rank", "0", "--world", "2"]
    assert "--dp 3 in 2 processes" in refused("train", MODEL, "--data", data, "--out", tmp_path / "out", *other)
    assert not (tmp_path / "out").exists()


# ---- ranks that are processes ----


class Processes:
    """Ranks of one command; rank 0 starts last."""

    def __init__(self, n, *words, env=None, meet=None, wrap=lambda rank: []):
        at, env = meet or free_address(), {**CLEAN, **TRANSPORTS["shared memory"], **(env or {})}
        self.ranks = {}
        for rank in reversed(range(n)):
            command = [*wrap(rank), HADAL, *words, "--rank", rank, "--world", n, "--meet", at]
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            self.ranks[rank] = subprocess.Popen(list(map(str, command)), env=env, **pipes)

    def wait(self):
        """Exit status and standard error of each rank."""
        ends = {rank: (p.communicate()[1], p.returncode) for rank, p in self.ranks.items()}
        return {rank: (code, err) for rank, (err, code) in ends.items()}

    def kill(self):
        for p in self.ranks.values():
            if not p.stderr.closed:
                p.kill()
                p.communicate()


@pytest.fixture
def processes():
    started = []

    def start(*args, **how):
        started.append(Processes(*args, **how))
        return started[-1]

    yield start
    for world in started:
        world.kill()


def endless(data, out, log):
    return ["train", MODEL, "--data", data, "--out", out, "--log", log, "--batch", "4", "--steps", "100000", "-q"]


def await_steps(world, log, n):
    while not (log.exists() and log.read_text().count("\n") >= n):
        assert all(p.poll() is None for p in world.ranks.values())
        time.sleep(0.02)


@needs_ucx
@pytest.mark.parametrize("command", ["train", "rl"])
def test_processes_have_the_bits_of_threads(hadal, processes, data, tmp_path, command):
    args = CONTROLS if command == "rl" else ["--data", data, "--batch", "4", "--steps", "2", "--balance", "0.001", "-q"]
    words = [command, MODEL, *args, "--mtp-weight", "0.1", "--out"]
    done = hadal(*words, tmp_path / "threads", "--dp", "2")
    assert done.returncode == 0, done.stderr
    ends = processes(2, *words, tmp_path / "processes").wait()
    assert ends == {rank: (0, "") for rank in range(2)}
    assert digests(tmp_path / "processes" / "step-00000002") == digests(tmp_path / "threads" / "step-00000002")


@needs_ucx
@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_rank_ends_the_run_by_name(processes, data, tmp_path, lost):
    log = tmp_path / "log"
    world = processes(3, *endless(data, tmp_path / "out", log))
    await_steps(world, log, 2)
    world.ranks[lost].kill()
    ends = world.wait()
    for rank in {0, 1, 2} - {lost}:
        code, err = ends[rank]
        assert code > 0 and f"rank {lost} is lost" in err and err.count("\n") == 1, ends
    assert not (tmp_path / "out").exists()


@needs_ucx
def test_sigterm_to_all_ranks_saves_after_the_step(processes, data, tmp_path):
    log = tmp_path / "log"
    world = processes(2, *endless(data, tmp_path / "out", log))
    await_steps(world, log, 1)
    for p in world.ranks.values():
        p.terminate()
    assert world.wait() == {0: (0, ""), 1: (0, "")}
    assert [p.name for p in (tmp_path / "out").iterdir()] == [f"step-{len(steps(log)):08d}"]


@needs_ucx
def test_rank_0_says_why_the_others_end(processes, data, tmp_path):
    ends = processes(2, *endless(tmp_path / "none", tmp_path / "out", tmp_path / "log")).wait()
    assert "none: No such file" in ends[0][1] and ends[1][1].startswith("error: rank 0: ") and "No such file" in ends[1][1]
    assert ends[0][0] > 0 and ends[1][0] > 0


# ---- launchers and hosts ----


def short(data):
    return ["train", MODEL, "--data", data, "--batch", "4", "--steps", "2", "--threads", "1", "-q"]


@pytest.fixture
def threads(hadal, data, tmp_path):
    """The weights that two ranks in threads train."""
    done = hadal(*short(data), "--out", tmp_path / "threads", "--dp", "2")
    assert done.returncode == 0, done.stderr
    return digests(tmp_path / "threads" / "step-00000002")


def launched(launcher, env, words):
    done = subprocess.run([str(w) for w in [*launcher, HADAL, *words]], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_ucx
def test_mpirun_is_a_launcher(threads, data, tmp_path):
    if not shutil.which("mpirun"):
        pytest.skip("mpirun is not installed")
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    launched(launcher, CLEAN, [*short(data), "--out", tmp_path / "out", "--meet", free_address()])
    assert digests(tmp_path / "out" / "step-00000002") == threads


@needs_ucx
@as_root
def test_srun_is_a_launcher(slurm, threads, data, tmp_path):
    launched(["srun", "--overcommit", "-n", "2"], slurm, [*short(data), "--out", tmp_path / "out", "--meet", free_address()])
    assert digests(tmp_path / "out" / "step-00000002") == threads


@needs_ucx
@as_root
@pytest.mark.skipif("tcp" not in TRANSPORTS, reason=NO_DEVICE)
def test_two_hosts(host, processes, threads, data, tmp_path):
    name, net, veth = host
    inside = ["ip", "netns", "exec", name, "env", f"UCX_NET_DEVICES={veth[1]}"]
    env = {**KEY, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": veth[0]}
    words = [*short(data), "--out", tmp_path / "out"]
    world = processes(2, *words, env=env, meet=f"{net}.1:30178", wrap=lambda rank: inside if rank else [])
    assert world.wait() == {0: (0, ""), 1: (0, "")}
    assert digests(tmp_path / "out" / "step-00000002") == threads
