"""Expert records: of a server in every mode, read by an independent reader, hadal record, refusals."""

import concurrent.futures
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import types
import zipfile
from unittest import mock

import numpy
import pytest
from conftest import ROOT, run_hadal
from serving import TINY, Server, wait_until
from test_ranks import group_metric
from worlds import needs_ucx

HEAD = struct.Struct("<8s10IQ")
PHASES = ["prefill", "decode", "verify", "draft"]
CONFIG = json.loads((TINY / "config.json").read_text())
EXPERTS, TOP_K = CONFIG["n_routed_experts"], CONFIG["num_experts_per_tok"]
LAYERS = CONFIG["num_hidden_layers"] + CONFIG["num_nextn_predict_layers"]


@pytest.fixture(scope="module")
def plain():
    server = Server()
    yield server
    server.close()


def read(data, of_ranks=1):
    """The head and the rows: pass, tokens, phase, counts [layers][experts] by expert, token."""
    magic, version, mode, layers, experts, top_k, slots, ranks, nodes, n_mtp, _, n = HEAD.unpack_from(data)
    assert (magic, version, ranks, nodes) == (b"EPLBREC1", 1, of_ranks, 1)
    at = HEAD.size
    slot_expert = [struct.unpack_from(f"<{slots}H", data, at + 2 * slots * k) for k in range(layers)]
    at += 2 * slots * layers
    rows = []
    while at < len(data):
        number, tokens, phase = struct.unpack_from("<QII", data, at)
        at += 16
        counts, token = [[0] * experts for _ in range(layers)], None
        if mode == 2:
            token = struct.unpack_from("<ii", data, at)
            ids = data[at + 8 : at + 8 + layers * top_k]
            at += 8 + layers * top_k
            for k, e in enumerate(ids):
                if (phase == 3) == (k // top_k >= layers - n_mtp):
                    counts[k // top_k][e] += 1
        else:
            size, letter = (4, "I") if mode else (8, "Q")
            logical = None
            if mode == 0:
                logical = struct.unpack_from(f"<{layers * experts}Q", data, at)
                at += 8 * layers * experts
            physical = struct.unpack_from(f"<{layers * slots}{letter}", data, at)
            at += size * layers * slots
            for k, v in enumerate(physical):
                if v:
                    counts[k // slots][slot_expert[k // slots][k % slots]] += v
            assert logical is None or list(logical) == sum(counts, [])
        rows.append((number, tokens, PHASES[phase], counts, token))
    return {"mode": mode, "layers": layers, "experts": experts, "top_k": top_k, "n_mtp": n_mtp, "rows": n}, rows


def ask(s, n=24):
    reply = s.post("/v1/completions", {"prompt": "What is 347 + 586?", "max_tokens": n, "ignore_eos": True, "temperature": 0})
    return reply.json["usage"]


def record(s):
    """Usage of one request, and the bytes of its record."""
    folder = s.record_dir
    before = set(folder.iterdir())
    assert s.post("/start_expert_distribution_record").text == "Start recording the expert distribution.\n"
    usage = ask(s)
    assert s.get("/stop_expert_distribution_record").text == "Stop recording the expert distribution.\n"
    ask(s)  # not recorded
    reply = s.post("/dump_expert_distribution_record")
    assert (reply.status, reply.text) == (200, "Dump expert distribution record.\n")
    (file,) = set(folder.iterdir()) - before
    assert file.name.startswith("expert_distribution_recorder_") and file.suffix == ".eplb"
    return usage, file


@pytest.mark.parametrize("mode", ["stat", "per-pass", "per-token"])
def test_modes(serve, tmp_path, mode):
    s = serve("--expert-record-dir", tmp_path, "--expert-record", mode)
    s.record_dir = tmp_path
    usage, file = record(s)
    head, rows = read(file.read_bytes())
    assert (head["layers"], head["experts"], head["top_k"], head["n_mtp"]) == (LAYERS, EXPERTS, TOP_K, LAYERS - CONFIG["num_hidden_layers"])
    assert head["rows"] == len(rows) and head["mode"] == ["stat", "per-pass", "per-token"].index(mode)
    tokens = dict.fromkeys(PHASES, 0)
    for _, n, phase, counts, _ in rows:
        tokens[phase] += n
        for k, of_layer in enumerate(counts):
            drafts = k >= CONFIG["num_hidden_layers"]
            assert sum(of_layer) == (n * TOP_K if drafts == (phase == "draft") else 0), (phase, k)
    assert tokens["prefill"] == usage["prompt_tokens"]
    # the last token is not computed; rejected drafts are
    assert tokens["decode"] + tokens["verify"] >= usage["completion_tokens"] - 1
    assert tokens["draft"] >= tokens["prefill"] + tokens["decode"] + tokens["verify"]
    if mode == "per-token":
        prompt = [t for _, _, phase, _, t in rows if phase == "prefill"]
        assert [position for _, position in prompt] == list(range(len(prompt)))
    # the command reads the same
    out = run_hadal("record", file).stdout
    assert f"all: {len({r[0] for r in rows}) if mode != 'stat' else 1} pass" in out
    assert sum(line[:5].strip().isdigit() for line in out.splitlines()) == CONFIG["num_hidden_layers"]
    counts = json.loads(run_hadal("record", file, "--phase", "draft", "--json").stdout)["logical_count"]
    assert counts == [[sum(r[3][k][e] for r in rows if r[2] == "draft") for e in range(EXPERTS)] for k in range(LAYERS)]
    # a second record begins anew
    _, second = record(s)
    again = sum(n for _, n, phase, _, _ in read(second.read_bytes())[1] if phase == "prefill")
    assert 0 < again <= tokens["prefill"]


def prompts():
    return [[605 + (31 * i + j) % 300 for j in range(20 + i)] for i in range(8)]


def record_prompts(s, folder, ranks):
    """Rows of a record of eight prompts at once, the second one: it begins anew."""
    for _ in range(2):
        assert s.post("/flush_cache").status == 200
        s.post("/start_expert_distribution_record")
        bodies = [{"input_ids": ids, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}} for ids in prompts()]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert [r.status for r in pool.map(lambda b: s.post("/generate", b), bodies)] == [200] * 8
        s.post("/stop_expert_distribution_record")
        assert s.post("/dump_expert_distribution_record").status == 200
    files = sorted(folder.iterdir())
    assert len(files) == 2
    return read(files[1].read_bytes(), ranks)[1]


def sums(rows, phase):
    """Tokens, and the counts of all rows of a phase."""
    of = [row for row in rows if row[2] == phase]
    return sum(row[1] for row in of), numpy.sum([row[3] for row in of], axis=0).tolist()


def check_groups(rows, mode, want):
    assert sums(rows, "prefill") == want and want[0] == sum(len(ids) for ids in prompts())
    assert sums(rows, "decode")[0] >= 8 * 7
    passes = {row[0] for row in rows}
    if mode == "per-pass":  # groups have passes in common
        assert len(rows) == len({(row[0], row[2]) for row in rows}) and len(passes) < sums(rows, "decode")[0] / 2
    if mode == "per-token":
        assert sorted(t for _, _, phase, _, t in rows if phase == "prefill") == sorted((t, k) for ids in prompts() for k, t in enumerate(ids))


@pytest.fixture(scope="module")
def counts_of_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    s = Server("--expert-record-dir", folder, "--no-drafts")
    rows = record_prompts(s, folder, 1)
    s.close()
    return sums(rows, "prefill")


@pytest.mark.parametrize("mode", ["stat", "per-pass", "per-token"])
def test_records_are_those_of_all_attention_groups(serve, tmp_path, counts_of_one, mode):
    """As many rows of each expert as one rank has for the same questions, which both groups answer."""
    s = serve("--expert-record-dir", tmp_path, "--expert-record", mode, "--no-drafts", "--dp", 2, "--ep", 2)
    check_groups(record_prompts(s, tmp_path, 2), mode, counts_of_one)
    assert min(group_metric(s, "generation_tokens_total")) > 0


EP, DWDP = (2, "--dp", 2, "--ep", 2), (1, "--dwdp", 2)  # and the ranks of an expert record


@needs_ucx
@pytest.mark.parametrize("mode, layout", [("stat", EP), ("per-pass", EP), ("stat", DWDP)])
def test_records_of_groups_in_other_processes(world, tmp_path, counts_of_one, mode, layout):
    ranks, *flags = layout
    w = world(2, "--expert-record-dir", tmp_path, "--expert-record", mode, "--no-drafts", *flags)
    check_groups(record_prompts(w.server, tmp_path, ranks), mode, counts_of_one)
    w.server.post("/start_expert_distribution_record")
    w.ranks[1].kill()  # the record goes on with the rank that is left
    wait_until(lambda: w.server.get("/health").text.startswith("degraded"), "a rank is lost")
    ask(w.server)
    assert w.server.post("/dump_expert_distribution_record").status == 200
    rows = read(max(tmp_path.iterdir()).read_bytes(), ranks)[1]
    assert sums(rows, "decode")[0] >= 23


# and ranks of an expert record
DIVIDED = [(2, "--ep", 2), (4, "--tp", 2, "--ep", 4), (4, "--tp", 2, "--dp", 2, "--ep", 4), (2, "--tp", 4, "--ep", 2),
           (1, "--dp", 2), (2, "--ep", 2, "--overlap", 2)]  # fmt: skip


@pytest.mark.parametrize("mode", ["per-pass", "per-token"])
@pytest.mark.parametrize("layout", DIVIDED, ids=lambda v: " ".join(map(str, v[1:])))
def test_ranks_that_divide_rows_record_all_of_them(serve, tmp_path, counts_of_one, mode, layout):
    """Each routes a part of the rows of a step; the record is that of one rank."""
    ranks, *flags = layout
    s = serve("--expert-record-dir", tmp_path, "--expert-record", mode, "--no-drafts", *flags)
    check_groups(record_prompts(s, tmp_path, ranks), mode, counts_of_one)


@needs_ucx
def test_processes_that_divide_rows_record_all_of_them(world, tmp_path, counts_of_one):
    w = world(2, "--expert-record-dir", tmp_path, "--expert-record", "per-token", "--no-drafts", "--ep", 2)
    check_groups(record_prompts(w.server, tmp_path, 2), "per-token", counts_of_one)


def slot_counts(data):
    """Experts of the slots [layers][slots], and rows of each slot of a prefill pass, PER_PASS."""
    *_, layers, experts, top_k, slots, ranks, nodes, n_mtp, _, n = HEAD.unpack_from(data)
    maps = numpy.frombuffer(data, "<u2", layers * slots, HEAD.size).reshape(layers, slots)
    at = HEAD.size + 2 * slots * layers
    assert struct.unpack_from("<QII", data, at)[2] == PHASES.index("prefill")
    return maps, numpy.frombuffer(data, "<u4", layers * slots, at + 16).reshape(layers, slots)


@pytest.mark.parametrize("split", ["turns", "flow"])
def test_rows_count_at_the_copy_they_went_to(serve, tmp_path, split):
    """Of two ranks, each has half of the rows of a prompt; its row r goes to copy (rank + r) % 2, in turns."""
    files = []
    for mode in "per-token", "per-pass":
        folder = tmp_path / mode
        folder.mkdir()
        s = serve("--expert-record-dir", folder, "--expert-record", mode, "--no-drafts", "--ep", 2, "--redundant", 4, "--expert-split", split)
        s.record_dir = folder
        files.append(record(s)[1].read_bytes())
    tokens = [counts for number, _, phase, counts, _ in read(files[0], 2)[1] if phase == "prefill" and number == 0]
    maps, got = slot_counts(files[1])
    assert maps.shape[1] == EXPERTS + 4
    n, slots, both = len(tokens), numpy.zeros(got.shape, int), 0
    for i, counts in enumerate(tokens):
        turn = i if i < n // 2 else 1 + i - n // 2
        for layer in range(CONFIG["num_hidden_layers"]):
            for e in numpy.flatnonzero(counts[layer]):
                copies = numpy.flatnonzero(maps[layer] == e)
                slots[layer, copies[turn % len(copies)]] += counts[layer][e]
    for layer in range(CONFIG["num_hidden_layers"]):
        of_expert = [got[layer][maps[layer] == e].sum() for e in range(EXPERTS)]
        assert of_expert == numpy.sum([c[layer] for c in tokens], axis=0).tolist()
        of_ranks = got[layer].reshape(2, -1).sum(1)
        both += sum(min(got[layer][maps[layer] == e]) > 0 for e in range(4))
        if split == "flow":  # as even as any split could make them
            assert abs(int(of_ranks[0]) - int(of_ranks[1])) <= 1 or max(of_ranks) <= max(slots[layer].reshape(2, -1).sum(1))
    assert both > 0
    if split == "turns":
        assert (got == slots).all()


def test_drafts_of_ranks_that_divide_rows(serve, tmp_path):
    """The same choices of every token and draft as of one rank."""
    seen = []
    for flags in [], ["--ep", 2]:
        folder = tmp_path / str(len(seen))
        folder.mkdir()
        s = serve("--expert-record-dir", folder, "--expert-record", "per-token", "--draft-tokens", 2, *flags)
        s.record_dir = folder
        rows = read(record(s)[1].read_bytes(), 2 if flags else 1)[1]
        seen.append(sorted((phase, token, counts) for _, _, phase, counts, token in rows))
    assert seen[0] == seen[1] and {row[0] for row in seen[0]} >= {"prefill", "verify", "draft"}


def test_a_record_is_planned_from(serve, tmp_path):
    s = serve("--expert-record-dir", tmp_path)
    s.record_dir = tmp_path
    _, file = record(s)
    counts = tmp_path / "counts.json"
    counts.write_text(run_hadal("record", file, "--json").stdout)
    plan = json.loads(run_hadal("eplb", "--load", counts, "--slots", EXPERTS + 4, "--ranks", 4).stdout)
    assert len(plan["physical_to_logical_map"]) == LAYERS


def test_files_cut_at_every_byte(serve, tmp_path):
    s = serve("--expert-record-dir", tmp_path, "--expert-record", "per-token")
    s.record_dir = tmp_path
    data = record(s)[1].read_bytes()
    head, rows = read(data)
    size = 24 + LAYERS * TOP_K
    start = len(data) - size * len(rows)
    part = tmp_path / "part"
    for n in [0, 7, 8, 55, 56, start - 1, start, start + 1, start + size, len(data) - 1]:
        part.write_bytes(data[:n])
        done = run_hadal("record", part)
        if n < start:
            assert done.returncode == 2 and "part" in done.stderr, n
        else:
            assert done.returncode == 0 and "is cut off" in done.stderr, n
    part.write_bytes(data[:8] + b"\2" + data[9:])
    assert "of version 2" in run_hadal("record", part).stderr
    unended = data[:48] + b"\xff" * 8 + data[56:]  # as it is while it is written
    part.write_bytes(unended)
    done = run_hadal("record", part)
    assert done.stderr == "" and "verify" not in done.stdout


def test_refusals(plain, serve, tmp_path):
    for path in ("start", "stop", "dump"):
        reply = plain.post(f"/{path}_expert_distribution_record")
        assert reply.status == 400 and "--expert-record-dir" in reply.text
    s = serve("--expert-record-dir", tmp_path)
    reply = s.post("/dump_expert_distribution_record")
    assert reply.status == 400 and "start a record first" in reply.text
    s.post("/start_expert_distribution_record")
    s.post("/start_expert_distribution_record")  # in place of the first
    ask(s)
    assert s.post("/dump_expert_distribution_record").status == 200
    assert len(list(tmp_path.iterdir())) == 1


def test_text_is_the_same(serve, plain, tmp_path):
    s = serve("--expert-record-dir", tmp_path, "--expert-record", "per-token")
    body = {"prompt": "2 + 2 =", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    s.post("/start_expert_distribution_record")
    assert s.post("/v1/completions", body).json["choices"] == plain.post("/v1/completions", body).json["choices"]


# ---- SGLang's dumps ----


def save(path, data, arrays, module="torch._utils", name="_rebuild_tensor_v2"):
    """Writes what torch.save() would: arrays (by marker strings in data) as tensors."""
    torch, utils = types.ModuleType("torch"), types.ModuleType(module)
    kind = type("LongStorage", (), {"__module__": "torch"})
    rebuild = types.FunctionType((lambda *_: None).__code__, {}, name)
    rebuild.__module__, rebuild.__qualname__ = module, name
    torch.LongStorage = kind
    setattr(utils, name, rebuild)

    class Tensor:
        def __init__(self, key):
            self.key = key

        def __reduce__(self):
            a = arrays[self.key]
            steps = [n // 8 for n in a.strides]
            return rebuild, (Storage(self.key), 0, a.shape, tuple(steps), False, {})

    class Storage:
        def __init__(self, key):
            self.key = key

    class Writer(pickle.Pickler):
        def persistent_id(self, obj):
            return ("storage", kind, obj.key, "cpu", arrays[obj.key].size) if isinstance(obj, Storage) else None

    out = io.BytesIO()
    with mock.patch.dict(sys.modules, {"torch": torch, module: utils}):
        Writer(out, protocol=2).dump(data(Tensor))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", out.getvalue())
        for key, a in arrays.items():
            archive.writestr(f"archive/data/{key}", a.tobytes())


def convert(*files):
    return subprocess.run([sys.executable, ROOT / "scripts" / "sglang_record.py", *files], capture_output=True, text=True)


def test_dumps_of_sglang(tmp_path):
    counts = numpy.arange(24, dtype="<i8").reshape(2, 3, 4)
    save(tmp_path / "stat.pt", lambda T: {"rank": 0, "logical_count": T("0"), "average_utilization_rate_over_window": None}, {"0": counts})
    done = convert(tmp_path / "stat.pt")
    assert json.loads(done.stdout) == {"logical_count": counts.tolist()}
    slots = numpy.array([[0, 1, 2, 3, 0], [3, 2, 1, 0, 3]], dtype="<i8")
    physical = numpy.array([[5, 1, 0, 2, 7], [1, 0, 4, 0, 9]], dtype="<i8")
    arrays = {"0": physical, "1": slots}
    for rank in range(2):
        passes = [7, 9] if rank else [7]
        save(tmp_path / f"pass{rank}.pt", lambda T: {"records": [{"forward_pass_id": n, "rank": rank, "gatherer_key": "primary", "global_physical_count": T("0")} for n in passes], "last_physical_to_logical_map": T("1")}, arrays)
    once = numpy.array([[12, 1, 0, 2], [0, 4, 0, 10]])
    done = convert(tmp_path / "pass0.pt", tmp_path / "pass1.pt")
    assert json.loads(done.stdout)["logical_count"] == [(2 * once).tolist(), once.tolist()]
    (tmp_path / "counts.json").write_text(done.stdout)
    plan = run_hadal("eplb", "--load", tmp_path / "counts.json", "--slots", 5, "--ranks", 5)
    assert json.loads(plan.stdout)["expert_count"] == [[2, 1, 1, 1], [1, 1, 1, 2]]


def test_dumps_run_nothing(tmp_path):
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {ran}",)

    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"logical_count": Evil()}))
    done = convert(tmp_path / "evil.pt")
    assert done.returncode and "system, which no record of counts needs" in done.stderr and not ran.exists()
    one = numpy.zeros((2, 3, 4), dtype="<i8")
    save(tmp_path / "other.pt", lambda T: {"logical_count": T("0")}, {"0": one}, "numpy.testing", "measure")
    assert "numpy.testing.measure" in convert(tmp_path / "other.pt").stderr
    (tmp_path / "text.pt").write_text("no archive")
    assert "text.pt: BadZipFile" in convert(tmp_path / "text.pt").stderr
    with zipfile.ZipFile(tmp_path / "short.pt", "w") as out, zipfile.ZipFile(tmp_path / "other.pt") as archive:
        out.writestr("archive/data.pkl", archive.read("archive/data.pkl").replace(b"numpy.testing\nmeasure", b"torch._utils\n_rebuild_tensor_v2"))
        out.writestr("archive/data/0", b"\0" * 184)
    assert "cut off" in convert(tmp_path / "short.pt").stderr
