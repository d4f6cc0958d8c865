"""hadal eplb: maps against an independent port of the published algorithm, forms of files, refusals.

The port is written from the description of the algorithm; build/drive_eplb plans many small cases
in one process.
"""

import json
import pathlib
import random
import subprocess

import pytest

from conftest import HADAL, run_hadal

DRIVER = pathlib.Path(HADAL).parent / "drive_eplb"

# ---- the published algorithm ----


def pack(values, bins):
    """Bin and order of arrival of each value: heaviest first into the lightest bin with room."""
    capacity = len(values) // bins
    if capacity == 1:
        return [(i, 0) for i in range(len(values))]
    sums, filled, where = [0.0] * bins, [0] * bins, [None] * len(values)
    for i in sorted(range(len(values)), key=lambda i: (-values[i], i)):
        b = min((b for b in range(bins) if filled[b] < capacity), key=lambda b: (sums[b], b))
        where[i] = (b, filled[b])
        sums[b] += values[i]
        filled[b] += 1
    return where


def published(loads, slots, groups, nodes, ranks):
    """The map [slots] and the slots of each expert in the order in which copies were made."""
    if groups % nodes:
        groups = nodes = 1
    size, each = len(loads) // groups, groups // nodes
    sums = []
    for g in range(groups):
        total = 0.0
        for w in loads[g * size : (g + 1) * size]:
            total += w
        sums.append(total)
    experts = [None] * len(loads)
    for g, (node, place) in enumerate(pack(sums, nodes)):
        for i in range(size):
            experts[(node * each + place) * size + i] = g * size + i
    slot_expert, expert_slots = [None] * slots, [[] for _ in loads]
    n, m, width = len(loads) // nodes, slots // nodes, slots // ranks
    for node in range(nodes):
        mine = experts[node * n : (node + 1) * n]
        owner, copies = list(range(n)), [1] * n
        while len(owner) < m:
            hottest = max(range(n), key=lambda i: (loads[mine[i]] / copies[i], -i))
            owner.append(hottest)
            copies[hottest] += 1
        where = pack([loads[mine[o]] / copies[o] for o in owner], ranks // nodes)
        for o, (rank, place) in zip(owner, where):
            slot = node * m + rank * width + place
            slot_expert[slot] = mine[o]
            expert_slots[mine[o]].append(slot)
    return slot_expert, expert_slots


def random_case(dice):
    nodes = dice.choice([1, 1, 2, 3, 4])
    groups = dice.choice([1, nodes, 2 * nodes, 4, 3])
    ranks = nodes * dice.choice([1, 2, 3, 4])
    experts = groups * nodes * dice.randint(1, 6) if groups % nodes else groups * dice.randint(1, 8)
    width = max(1, -(-experts // ranks) + dice.choice([0, 0, 1, 2]))
    kind = dice.randrange(4)
    loads = [
        [lambda: dice.randint(0, 6), lambda: dice.randint(0, 10**6), lambda: 10 ** dice.randint(0, 9), lambda: dice.lognormvariate(5, 1)][kind]()
        for _ in range(experts)
    ]
    return loads, width * ranks, groups, nodes, ranks


def drive(cases, algorithm):
    lines = [f"{algorithm} {len(w)} {p} {g} {n} {r} " + " ".join(repr(x) for x in w) for w, p, g, n, r in cases]
    out = subprocess.run([DRIVER], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    return out.splitlines()


def test_published_equals_the_port_on_random_cases():
    dice = random.Random(20261124)
    cases = [random_case(dice) for _ in range(10_000)]
    answers = drive(cases, "published")
    assert len(answers) == len(cases)
    for case, answer in zip(cases, answers):
        slots, experts = published(*case)
        assert [int(x) for x in answer.split()] == slots + sum(experts, []), case


VECTORS = [
    ([10] * 4, 4, 1, 1, 2, [0, 2, 1, 3]),
    ([80, 10, 7, 3], 6, 1, 1, 2, [0, 0, 3, 0, 1, 2]),
    ([90, 11, 7, 5], 6, 1, 1, 3, [0, 1, 0, 2, 0, 3]),
    ([9, 8, 7, 6, 5, 4], 6, 1, 1, 3, [0, 5, 1, 4, 2, 3]),
    ([7, 6, 5, 4, 3, 2], 6, 1, 1, 2, [0, 3, 4, 1, 2, 5]),
    ([50, 40, 5, 4, 30, 20, 3, 2], 8, 4, 2, 4, [0, 7, 1, 6, 4, 3, 5, 2]),
    ([100, 1, 2, 3, 4, 5, 6, 7], 12, 4, 2, 4, [0, 0, 1, 0, 3, 2, 5, 7, 6, 4, 7, 6]),
    ([100, 1, 2, 3, 4, 5, 6, 7], 12, 1, 1, 4, [0, 0, 1, 0, 7, 2, 0, 6, 3, 0, 5, 4]),
    ([64, 16, 12, 8], 8, 1, 1, 8, [0, 1, 2, 3, 0, 0, 0, 0]),
    ([12, 3, 9, 6, 21, 15], 8, 3, 2, 4, [0, 1, 4, 5, 4, 3, 2, 5]),
    ([31, 5, 22, 14, 8, 40, 17, 11], 12, 4, 2, 4, [6, 5, 4, 5, 5, 7, 0, 3, 1, 0, 2, 2]),
    ([40, 30, 20, 10, 8, 6], 8, 1, 1, 4, [0, 3, 2, 4, 0, 5, 1, 1]),
    ([30, 40, 20, 10, 8, 6], 8, 1, 1, 4, [1, 3, 2, 4, 1, 5, 0, 0]),
    ([31, 5, 22, 14, 8, 40, 17, 11], 12, 1, 1, 4, [6, 2, 2, 0, 5, 4, 0, 5, 1, 3, 5, 7]),
    ([31, 5, 22, 20, 8, 40, 11, 11], 12, 1, 1, 4, [5, 7, 4, 5, 2, 1, 0, 2, 3, 0, 6, 3]),
]
COPIES = {  # of vectors: the slots of each expert in the order of their making
    1: [[0, 3, 1], [4], [5], [2]],
    6: [[0, 3, 1], [2], [5], [4], [9], [6], [11, 8], [10, 7]],
    7: [[0, 3, 6, 9, 1], [2], [5], [8], [11], [10], [7], [4]],
    9: [[0], [1], [6], [5], [2, 4], [7, 3]],
    10: [[6, 9], [8], [10, 11], [7], [2], [3, 4, 1], [0], [5]],
}


def test_published_vectors():
    answers = drive([v[:5] for v in VECTORS], "published")
    for i, (vector, answer) in enumerate(zip(VECTORS, answers)):
        got = [int(x) for x in answer.split()]
        assert got[: vector[1]] == vector[5], vector
        if i in COPIES:
            assert got[vector[1] :] == sum(COPIES[i], []), vector


README_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
README_MAP = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
SIZES = ["--slots", 16, "--ranks", 8]
PUBLISHED = [*SIZES, "--nodes", 2, "--groups", 4, "--algo", "published"]


def plan(loads, *args):
    done = run_hadal("eplb", "--load", "-", *args, input=json.dumps(loads))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_published_example():
    out = plan(README_LOADS, *PUBLISHED)
    assert list(out) == ["physical_to_logical_map", "logical_to_all_physical_map", "expert_count", "balancedness", "bound"]
    assert out["physical_to_logical_map"] == README_MAP
    assert out["expert_count"] == [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]]
    assert out["logical_to_all_physical_map"][0] == [
        [12, -1], [15, 13], [11, -1], [6, -1], [7, 5], [0, 2], [1, -1], [3, -1], [4, -1], [9, -1], [8, 10], [14, -1]]  # fmt: skip
    assert all(0 < b <= limit <= 1 for b, limit in zip(out["balancedness"], out["bound"]))


def test_loads_in_the_form_of_sglang():
    assert plan({"logical_count": README_LOADS}, *PUBLISHED) == plan(README_LOADS, *PUBLISHED)
    halves = [[[w // 2 for w in row] for row in README_LOADS], [[w - w // 2 for w in row] for row in README_LOADS]]
    assert plan({"logical_count": halves}, *PUBLISHED) == plan(README_LOADS, *PUBLISHED)


def test_deviations_count_against_an_expert():
    steady_and_bursts = [[[10, 0, 6, 6]], [[10, 20, 6, 6]]]
    assert plan(steady_and_bursts, "--slots", 5, "--ranks", 5)["expert_count"] == [[2, 1, 1, 1]]
    assert plan(steady_and_bursts, "--slots", 5, "--ranks", 5, "--z", 2)["expert_count"] == [[1, 2, 1, 1]]


@pytest.mark.parametrize("form", ["json", "sglang", "tensorrt-llm"])
def test_forms_of_maps_are_read_again(form, tmp_path):
    old = tmp_path / "old"
    old.write_text(run_hadal("eplb", "--load", "-", *SIZES, "--format", form, input=json.dumps(README_LOADS)).stdout)
    again = run_hadal("eplb", "--load", "-", *SIZES, "--previous", old, "--target", 0.5, input=json.dumps(README_LOADS))
    assert json.loads(again.stdout)["physical_to_logical_map"] == plan(README_LOADS, *SIZES)["physical_to_logical_map"]
    assert again.stderr == "0 experts move; 2 of 2 layers reach the target\n"
    if form == "sglang":
        assert list(json.loads(old.read_text())) == ["physical_to_logical_map"]


def test_a_map_of_tensorrt_with_lists_over_lines(tmp_path):
    old = tmp_path / "old.yaml"
    old.write_text("num_slots: 4\n# by hand\ninitial_global_assignments:\n  0:\n  - 0\n  - 1\n  - 2\n  - 3\n  1: [3, 2,\n    1, 0]\nlayer_updates_per_iter: 2\n")
    args = ["--slots", 4, "--ranks", 2, "--previous", old]
    assert plan([[1] * 4] * 2, *args)["physical_to_logical_map"] == [[0, 1, 2, 3], [3, 2, 1, 0]]


def test_repair_keeps_to_its_budget(tmp_path):
    old = tmp_path / "old.json"
    dice = random.Random(7)
    loads = [[dice.lognormvariate(5, 1) for _ in range(64)] for _ in range(3)]
    old.write_text(json.dumps(plan(loads, "--slots", 72, "--ranks", 8)))
    moved = [[w * dice.lognormvariate(0, 0.5) for w in row] for row in loads]
    results = []
    for budget in [0, 3 * 4 * 100, "unlimited"]:
        done = run_hadal("eplb", "--load", "-", "--slots", 72, "--ranks", 8, "--previous", old, "--budget", budget, "--expert-bytes", 100, input=json.dumps(moved))
        results.append((int(done.stderr.split()[0]), min(json.loads(done.stdout)["balancedness"])))
    assert results[0][0] == 0 and results[1][0] <= 12 < results[2][0]
    assert results[0][1] <= results[1][1] < results[2][1]


def test_ranks_that_are_gone_and_unequal_ones():
    out = plan([[5, 4, 3, 2, 1]], "--slots", 12, "--ranks", 5, "--gone", "1,3")
    first = [0, 3, 6, 8, 10, 12]
    ranks = [out["physical_to_logical_map"][0][a:b] for a, b in zip(first, first[1:])]
    assert ranks[1] == [-1] * 3 and ranks[3] == [-1] * 2
    assert {0, 1, 2, 3, 4} == {e for r in ranks for e in r} - {-1}
    out = plan([[5, 4, 3, 2, 1]], "--slots", 6, "--ranks", 3, "--rank-slots", "1,2,3")
    assert out["balancedness"] <= out["bound"]


def test_decode_uses_no_copies():
    done = run_hadal("eplb", "--load", "-", *SIZES, "--phase", "decode", "--step-rows", 100, input=json.dumps(README_LOADS))
    assert json.loads(done.stdout)["expert_count"] == [[1] * 12] * 2
    assert done.stderr == "decode: copies would be read again; none are used\n"


REFUSALS = [
    ("[[1, 2, NaN]]", [], "not valid JSON"),
    ("[[1, -2, 3]]", [], "expert 1 in layer 0 is not a number from 0 to 2^63"),
    ("[[1, 1e30, 3]]", [], "expert 1 in layer 0 is not a number"),
    ("[[99999999999999999999]]", [], "too big integer"),
    ("[[1, 2], [3]]", [], "entry 1 is not a list of 2"),
    ("[[1, 2], 3]", [], "entry 1 is not a list"),
    ("[[[1, 2]], [[1]]]", [], "a pass of [1][1] among [1][2]"),
    ("[]", [], "an empty list"),
    ('{"counts": []}', [], 'neither [layers][experts] nor "logical_count"'),
    (json.dumps([[1] * 17]), [], "16 slots cannot hold 17 experts"),
    (json.dumps([[1] * 16]), ["--gone", "0"], "14 slots cannot hold 16 experts"),
    (json.dumps([[1] * 12]), ["--gone", "8"], "--gone takes at most 8 numbers below 8"),
    (json.dumps([[1] * 12]), ["--rank-slots", "2,2"], "--rank-slots has 2 numbers for 8 ranks"),
    (json.dumps([[1] * 12]), ["--rank-slots", "2,2,2,2,2,2,2,9"], "do not add up to 16"),
    (json.dumps([[1] * 12]), ["--nodes", "3"], "8 ranks cannot be divided among 3 nodes"),
    (json.dumps([[1] * 12]), ["--groups", "5"], "12 experts cannot be divided into 5 groups"),
    (json.dumps([[1] * 12]), ["--phase", "prefill"], "needs the number of rows of a step"),
    (json.dumps([[1] * 12]), ["--budget", "5"], "--budget needs --previous FILE and --expert-bytes N"),
    (json.dumps([[1] * 12]), ["--algo", "published", "--gone", "0"], "needs equal numbers of slots"),
]  # fmt: skip


@pytest.mark.parametrize("loads,args,why", REFUSALS)
def test_refusals_name_the_fault(refused, loads, args, why):
    assert why in refused("eplb", "--load", "-", *SIZES, *args, input=loads)


@pytest.mark.parametrize(
    "text,why",
    [
        ("[[0, 1, 2]]", "has 1 layers of 3 slots; this plan has 1 of 4"),
        ("[[0, 1, 2, 3.5]]", "slot 3 of layer 0 holds no expert's number"),
        ("[[0, 1, 2, 4]]", "the previous map has expert 4"),
        ("x: 1\n", "not valid JSON"),
        ("num_slots: 4\ninitial_global_assignments:\n  1: [0, 1, 2, 3]\n", "layer 1 stands where layer 0 is expected"),
        ("num_slots: 4\ninitial_global_assignments:\n  0: [0, 1, x]\n", "layer 0 of the assignments is not"),
        ("num_slots: 4\ninitial_global_assignments:\n", "an empty list"),
    ],
)
def test_bad_maps_are_refused(refused, tmp_path, text, why):
    old = tmp_path / "old"
    old.write_text(text)
    assert why in refused("eplb", "--load", "-", "--slots", 4, "--ranks", 2, "--previous", old, input="[[1, 2, 3, 4]]")


def test_needs_its_options(refused):
    assert "needs --load FILE, --slots N and --ranks N" in refused("eplb")
