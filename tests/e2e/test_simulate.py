"""hadal simulate: tables and JSON of plans over traffic, from a record and generated; refusals."""

import json
import struct
import subprocess

import numpy as np
import pytest
from conftest import HADAL, ROOT, run_hadal


def simulate(*args):
    done = run_hadal("simulate", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_record(path, passes, mode=1):
    """A record of single passes of one layer, [passes][experts]."""
    n = len(passes[0])
    data = struct.pack("<8s10IQ", b"EPLBREC1", 1, mode, 1, n, 1, n, 1, 1, 0, 0, len(passes))
    data += struct.pack(f"<{n}H", *range(n))
    for i, counts in enumerate(passes):
        data += struct.pack("<QII", i, sum(counts), 1)
        data += struct.pack(f"<{n}{'I' if mode else 'Q'}", *counts) * (1 if mode else 2)
    path.write_bytes(data)


def test_a_record(tmp_path):
    """What two more slots bring to a hot expert; the plan is made from the first half."""
    file = tmp_path / "r.eplb"
    write_record(file, [[60, 20, 10, 10]] * 8)
    got = {(r["slots"], r["plan"]): r for r in json.loads(simulate("--record", file, "--ranks", 2, "--slots", "4,6", "--window", 4, "--json"))}
    assert len(got) == 8
    assert got[4, "none"]["balancedness"] == pytest.approx(50 / 80)
    assert got[4, "hadal"]["balancedness"] == pytest.approx(50 / 70)
    assert got[4, "hadal"]["bound"] == pytest.approx(50 / 60)
    assert got[6, "hadal"]["balancedness"] == got[6, "flow"]["balancedness"] == 1
    assert len(got[6, "flow"]["steps"]) == 4 and len(got[6, "flow"]["layers"]) == 1
    lines = simulate("--record", file, "--ranks", 2, "--slots", "4,6", "--window", 4).splitlines()
    assert [line.split()[:3] for line in lines[-8:]][:4] == [["4", "none", "even"], ["4", "published", "even"], ["4", "hadal", "even"], ["4", "flow", "flow"]]


def test_a_plan_of_the_past_is_judged_by_later_steps(tmp_path):
    file = tmp_path / "r.eplb"
    write_record(file, [[80, 10, 5, 5]] * 4 + [[5, 5, 10, 80]] * 4)
    (r,) = json.loads(simulate("--record", file, "--ranks", 2, "--slots", 6, "--window", 4, "--plan", "hadal", "--json"))
    assert r["balancedness"] < 0.7  # the copies are those of yesterday's hot expert
    (again,) = json.loads(simulate("--record", file, "--ranks", 2, "--slots", 6, "--window", 2, "--every", 2, "--plan", "hadal", "--json"))
    assert again["steps"][-1]["balancedness"] > 0.9 and again["moves"] > 0


def test_records_of_topics_take_turns(tmp_path):
    """Two passes of each record in turn, as if one had been recorded so; the last pass of the longer one has no turn."""
    a, b, both = (tmp_path / f"{name}.eplb" for name in ("a", "b", "both"))
    one, other = [[80, 10, 5, 5], [70, 20, 5, 5], [60, 20, 10, 10], [50, 30, 10, 10]], [[5, 5, 10, 80], [5, 5, 20, 70], [10, 10, 20, 60], [10, 10, 30, 50], [1, 1, 1, 1]]
    for file, passes in (a, one), (b, other), (both, one[:2] + other[:2] + one[2:] + other[2:4]):
        write_record(file, passes)
    flags = ("--ranks", 2, "--slots", 6, "--window", 1, "--every", 1, "--plan", "none,published,hadal", "--json")
    turns, joined = (json.loads(simulate("--record", record, *flags, *more)) for record, more in ((f"{a},{b}", ("--switch", 2)), (both, ())))
    measured = {"planner_ms", "split_us"}
    assert [{k: v for k, v in r.items() if k not in measured} for r in turns] == [{k: v for k, v in r.items() if k not in measured} for r in joined]
    assert len(turns[0]["steps"]) == 7
    switches = [r["steps"][i]["balancedness"] for r in turns[1:] for i in (1, 3, 5)]
    assert max(switches) < 0.75 < turns[2]["steps"][2]["balancedness"]


@pytest.mark.slow
def test_ten_million_choices(tmp_path):
    """A record is read as it is needed: 20 MB of it fit into a process that may have 16."""
    layers, experts, k, tokens, per_pass = 4, 64, 6, 420_000, 1024
    row = np.dtype([("pass", "<u8"), ("n", "<u4"), ("phase", "<u4"), ("token", "<u4"), ("position", "<u4"), ("experts", "u1", (layers, k))])
    rows = np.zeros(tokens, row)
    rows["pass"], rows["n"], rows["phase"] = np.arange(tokens) // per_pass, 1, 1
    some = np.random.default_rng(1).integers(0, 20, (997, layers, 1))
    rows["experts"] = np.resize((some + 3 * np.arange(k)) % experts, rows["experts"].shape)
    file = tmp_path / "r.eplb"
    with open(file, "wb") as f:
        f.write(struct.pack("<8s10IQ", b"EPLBREC1", 1, 2, layers, experts, k, experts, 8, 1, 0, 0, tokens))
        f.write(np.tile(np.arange(experts, dtype="<u2"), layers).tobytes() + rows.tobytes())
    command = ["bash", "-c", 'ulimit -d 16384; exec "$@"', "bash", HADAL, "simulate", "--record", file, "--ranks", "8", "--slots", "72", "--every", "16", "--json"]
    got = {r["plan"]: r for r in json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)}
    assert got["none"]["balancedness"] < got["hadal"]["balancedness"] <= got["hadal"]["bound"]
    assert len(got["hadal"]["steps"]) > 300 and got["hadal"]["plans"] > 20


def test_fabric(tmp_path):
    fabric = tmp_path / "fabric.json"
    fabric.write_text(json.dumps({"layer_us": 1000, "row_us": 0, "expert_us": 0, "row_bytes": 0}))
    (r,) = json.loads(simulate("--generate", "zipf:1,experts:16,top-k:2,layers:3,passes:4", "--ranks", 4, "--window", 2, "--plan", "none", "--fabric", fabric, "--json"))
    assert r["step_us"] == pytest.approx(3000) and len(r["layers"]) == 3
    same = [simulate("--generate", "zipf:1,experts:16,top-k:2,seed:7,passes:4", "--ranks", 4, "--window", 2, "--json") for _ in range(2)]
    strip = [[{k: v for k, v in r.items() if k not in ("planner_ms", "split_us")} for r in json.loads(text)] for text in same]
    assert strip[0] == strip[1]


BAD = {
    "no traffic": (["--ranks", "4"], "needs --record FILE or --generate SPEC"),
    "both": (["--ranks", "4", "--record", "x", "--generate", "zipf:1"], "needs --record FILE or --generate SPEC"),
    "no ranks": (["--generate", "zipf:1"], "and --ranks N"),
    "a word": (["--ranks", "4", "--generate", "zipf"], "not zipf"),
    "an unknown number": (["--ranks", "4", "--generate", "zipf:1,speed:3"], "not speed:3"),
    "no number": (["--ranks", "4", "--generate", "zipf:nan"], "not zipf:nan"),
    "half a token": (["--ranks", "4", "--generate", "tokens:0.5"], "not tokens:0.5"),
    "no passes": (["--ranks", "4", "--generate", "passes:0"], "0 passes"),
    "too few steps": (["--ranks", "4", "--generate", "zipf:1,passes:5", "--window", "5"], "a window of 5 steps needs more"),
    "few slots": (["--ranks", "4", "--generate", "zipf:1", "--slots", "100"], "100 slots on 4 ranks for 256 experts"),
    "a plan": (["--ranks", "4", "--generate", "zipf:1", "--plan", "best"], "not best"),
    "slots": (["--ranks", "4", "--generate", "zipf:1", "--slots", "256x"], "not 256x"),
    "no file": (["--ranks", "4", "--record", "/no/such"], "cannot read /no/such"),
    "no record": (["--ranks", "4", "--record", str(ROOT / "README.md")], "is no expert record"),
    "a divisor": (["--ranks", "3", "--generate", "zipf:1,passes:30"], "the published algorithm needs equal"),
}


@pytest.mark.parametrize("row", BAD)
def test_refusals(row):
    args, why = BAD[row]
    done = run_hadal("simulate", *args)
    assert done.returncode != 0 and why in done.stderr and done.stdout.count("\n") <= 6, done.stderr


def test_counts_have_no_passes(tmp_path):
    write_record(tmp_path / "r.eplb", [[1, 2, 3, 4]], mode=0)
    assert "has no single passes" in run_hadal("simulate", "--record", tmp_path / "r.eplb", "--ranks", 2).stderr
    (tmp_path / "f.json").write_text('{"link_gb_s": 0}')
    assert "link_gb_s is no number" in run_hadal("simulate", "--generate", "zipf:1", "--ranks", 2, "--fabric", tmp_path / "f.json").stderr


def test_topics_that_do_not_fit(refused, tmp_path):
    a, b = tmp_path / "a.eplb", tmp_path / "b.eplb"
    write_record(a, [[1, 2, 3, 4]] * 8)
    write_record(b, [[1, 2, 3, 4, 5]] * 8)
    assert "record 2 has 1 layers and 1 of 5 experts" in refused("simulate", "--record", f"{a},{b}", "--switch", 2, "--ranks", 2)
    assert "record 1 has 8 passes, fewer than 9 of one turn" in refused("simulate", "--record", f"{a},{a}", "--switch", 9, "--ranks", 2)
    assert "--switch is for records" in refused("simulate", "--generate", "zipf:1", "--switch", 9, "--ranks", 2)
    assert "--record takes 1 to 15 words" in refused("simulate", "--record", ",", "--switch", 9, "--ranks", 2)


def test_dwdp_is_as_published():
    """TensorRT-LLM's blog 19: 1319.9 us of a layer with expert parallelism, 1131.6 with DWDP."""
    got = {r["order"]: r for r in json.loads(simulate("--dwdp", "layers:2000", "--json"))}
    assert list(got) == ["same", "staggered", "sliced", "together"]
    assert got["together"]["dwdp_us"] / got["together"]["ep_us"] == pytest.approx(1131.6 / 1319.9, rel=0.01)
    assert got["sliced"]["copy_us"] > 1.1 * got["together"]["copy_us"]
    lines = simulate("--dwdp", "fetch:2000,ranks:8").splitlines()
    assert lines[0].startswith("assumed: 8 ranks, 58 layers") and len(lines) == 8


@pytest.mark.parametrize(
    "flags, why",
    [
        (("--dwdp", "ranks:1"), "ranks is 1; must be 2 to 72"),
        (("--dwdp", "speed:1"), "--dwdp takes NAME:NUMBER with commas between them, not speed:1"),
        (("--dwdp", "", "--ranks", 2), "--dwdp needs no traffic and has ranks of its own"),
    ],
)
def test_dwdp_refusals(refused, flags, why):
    assert why in refused("simulate", *flags)
