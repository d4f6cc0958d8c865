"""The forward pass of all families, through the program, in every way a sequence can be cut.

Each case folder holds a model, tokens and the logits that belong to them (tests/golden/README.md;
the shared cases have the same layout). Chunks, decode steps, threads and neighbors in the batch
must not change one bit.
"""

import json

import make_model
import numpy as np
import pytest
from conftest import BACKEND, GOLDEN, NO_SHARED, ROOT, SHARED, run_hadal

TOLERANCE = 1e-3
ONE_PIECE = 1 << 20  # the largest --chunk

golden = sorted(p for p in GOLDEN.glob("*") if (p / "expect.npy").exists())
# Of the shared cases those whose family hadal has.
FAMILIES = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41"}
shared_cases = sorted(
    p for p in SHARED.glob("cases/*")
    if (p / "expect.npy").exists() and json.loads((p / "config.json").read_text())["model_type"] in FAMILIES
)  # fmt: skip
with_mtp = [p for p in golden + shared_cases if (p / "expect_mtp.npy").exists()]
small = GOLDEN / "v4_small_mtp"

pytestmark = pytest.mark.skipif(
    "\n  logits " not in run_hadal("--help").stdout, reason="this build has no hadal logits"
)


def named(paths, *marks):
    return [pytest.param(p, id=p.name, marks=marks) for p in paths]


# The golden cases alone where a test is repeated under the sanitizers.
each_case = pytest.mark.parametrize(
    "case", named(golden) + named(shared_cases, pytest.mark.slow)
)


@pytest.fixture
def logits(tmp_path):
    """logits(case, tokens=None, **options): the .npy bytes' array; --mtp gives the pair."""

    def run(case, tokens=None, **options):
        path = case / "tokens.json"
        if tokens is not None:
            path = tmp_path / "tokens.json"
            path.write_text(json.dumps(tokens))
        out = tmp_path / "out.npy"
        flags = []
        options.setdefault("backend", BACKEND)
        for name, value in options.items():
            flags += ["--" + name.replace("_", "-")] + ([] if value is True else [value])
        result = run_hadal("logits", case, "--tokens", path, "--out", out, "--quiet", *flags)
        assert result.returncode == 0, result.stderr
        assert result.stdout == "" and result.stderr == ""
        array = np.load(out)
        assert array.dtype == np.float32 and array.flags["C_CONTIGUOUS"]
        return (array, np.load(tmp_path / "out.mtp.npy")) if "mtp" in options else array

    return run


def read(case):
    return json.loads((case / "tokens.json").read_text()), np.load(case / "expect.npy")


def same_bits(a, b):
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same_bits(a, b, what):
    rows = np.nonzero((a.view(np.uint32) != b.view(np.uint32)).any(-1))[0] if len(a) == len(b) else []
    assert same_bits(a, b), f"{what}: {len(rows)} rows differ, first {rows[:3]}"


def test_there_are_cases_of_every_family():
    families = {json.loads((c / "config.json").read_text())["model_type"] for c in golden}
    assert families == FAMILIES


def test_shared_cases_are_there():
    if not shared_cases:
        pytest.skip(NO_SHARED)


@each_case
@pytest.mark.parametrize("backend", ["ref", BACKEND])
def test_whole_run_equals_the_reference(logits, case, backend):
    tokens, expect = read(case)
    ours = logits(case, backend=backend)
    assert ours.shape == expect.shape
    assert np.abs(ours - expect).max() <= TOLERANCE


@each_case
def test_chunks_do_not_change_a_bit(logits, case):
    whole = logits(case, chunk=ONE_PIECE)
    for chunk in (1, 7, 64, 128, 129):
        assert_same_bits(logits(case, chunk=chunk), whole, f"chunk {chunk}")


@each_case
@pytest.mark.slow
def test_decoding_does_not_change_a_bit(logits, case):
    whole = logits(case)
    n = len(whole)
    for start in (0, 1, 5, 63, n // 2, n - 1, n):
        assert_same_bits(logits(case, decode_from=start), whole, f"decode from {start}")
    assert_same_bits(logits(case, decode_from=n // 3, chunk=13), whole, "chunks, then decode")


@each_case
@pytest.mark.threads
def test_threads_do_not_change_a_bit(logits, case):
    one = logits(case, threads=1)
    for threads in (2, 3):
        assert_same_bits(logits(case, threads=threads), one, f"{threads} threads")
        assert_same_bits(logits(case, threads=threads, chunk=50), one, f"{threads}, chunked")


@each_case
def test_neighbors_do_not_change_a_bit(logits, case):
    tokens, _ = read(case)
    lists = [tokens, tokens[::-1][:77], tokens[10:50] + tokens[:3]]
    solo = [logits(case, tokens=t) for t in lists]
    assert_same_bits(logits(case, tokens=[lists[0]]), solo[0], "a list of one list")
    assert_same_bits(logits(case, tokens=lists[:2]), np.concatenate(solo[:2]), "two")
    together = np.concatenate(solo)
    for options in ({}, {"chunk": 9}, {"decode_from": 20}, {"threads": 3}, {"micro_batches": 2}):
        assert_same_bits(logits(case, tokens=lists, **options), together, f"three, {options}")


@pytest.mark.slow
def test_more_sequences_than_one_step_holds(logits):
    tokens, _ = read(small)
    lists = [tokens[i : i + 3 + i % 5] for i in range(70)]
    solo = {}
    for t in lists:
        solo.setdefault(tuple(t), logits(small, tokens=t))
    expect = np.concatenate([solo[tuple(t)] for t in lists])
    assert_same_bits(logits(small, tokens=lists), expect, "seventy sequences")


@each_case
@pytest.mark.slow
def test_prefixes_do_not_see_what_follows(logits, case):
    tokens, _ = read(case)
    whole = logits(case)
    for n in (1, 2, 65):
        assert_same_bits(logits(case, tokens=tokens[:n]), whole[:n], f"first {n}")


@pytest.mark.parametrize("case", named(with_mtp))
def test_drafts_equal_the_reference(logits, case):
    expect = np.load(case / "expect_mtp.npy")
    for backend in ("ref", BACKEND):
        main, drafts = logits(case, mtp=True, backend=backend)
        assert drafts.shape == expect.shape
        assert np.abs(drafts - expect).max() <= TOLERANCE
    assert_same_bits(main, logits(case), "main logits beside drafts")


@pytest.mark.parametrize("case", named(with_mtp))
def test_drafts_do_not_change_a_bit(logits, case):
    tokens, _ = read(case)
    _, whole = logits(case, mtp=True)
    for options in ({"chunk": 1}, {"chunk": 7}, {"chunk": 64}, {"decode_from": 3},
                    {"decode_from": 0}, {"threads": 1}, {"threads": 3}):  # fmt: skip
        assert_same_bits(logits(case, mtp=True, **options)[1], whole, str(options))
    other = tokens[::-1][:40]
    _, alone = logits(case, tokens=other, mtp=True)
    _, together = logits(case, tokens=[other, tokens], mtp=True, chunk=11)
    assert_same_bits(together, np.concatenate([alone, whole]), "two sequences")


# ---- DSpark: blocks ----

dspark_cases = [p for p in golden + shared_cases if (p / "drafts.json").exists()]


def blocks_of(logits, tmp_path, case, **options):
    """Main logits, those of drafts, and confidences."""
    main, drafts = logits(case, mtp=True, **options)
    return main, drafts, np.load(tmp_path / "out.confidence.npy")


def test_there_are_dspark_cases_of_both_families():
    assert {"v4_dspark", "v41_small"} <= {case.name for case in dspark_cases}


@pytest.mark.parametrize("case", named(dspark_cases))
def test_blocks_equal_the_reference(logits, tmp_path, case):
    tokens, _ = read(case)
    want = json.loads((case / "drafts.json").read_text())
    for backend in ("ref", BACKEND):
        main, drafts, confidence = blocks_of(logits, tmp_path, case, backend=backend)
        assert drafts.shape == (*main.shape[:1], want["block_size"], main.shape[1])
        assert confidence.shape == drafts.shape[:2]
        following, seen = [*tokens[1:], int(main[-1].argmax())], 0
        for block in want["cases"]:
            at = block["position"]
            if block["token"] != following[at]:
                continue  # it follows the greedy choice
            assert drafts[at].argmax(-1).tolist() == block["drafts"], at
            assert np.abs(drafts[at].max(-1) - block["logit"]).max() <= TOLERANCE
            assert np.abs(confidence[at] - block["confidence"]).max() <= TOLERANCE
            seen += 1
        assert seen >= 1
    assert_same_bits(main, logits(case), "main logits beside drafts")


@pytest.mark.parametrize("case", named(dspark_cases))
def test_ways_of_blocks_do_not_change_a_bit(logits, tmp_path, case):
    tokens, _ = read(case)
    _, whole, certain = blocks_of(logits, tmp_path, case)
    for options in ({"threads": 1}, {"threads": 3}, {"decode_from": 3}, {"chunk": 1}):
        _, again, confidence = blocks_of(logits, tmp_path, case, **options)
        assert_same_bits(again.reshape(len(again), -1), whole.reshape(len(whole), -1), str(options))
        assert_same_bits(confidence, certain, str(options))
    other = tokens[::-1][:40]
    _, alone, _ = blocks_of(logits, tmp_path, case, tokens=other)
    together = np.concatenate([alone, whole, alone[:7]])
    for micro in (1, 2):
        _, both, _ = blocks_of(logits, tmp_path, case, tokens=[other, tokens, other[:7]], micro_batches=micro)
        assert_same_bits(both.reshape(len(both), -1)[:-1], together.reshape(len(together), -1)[:-1], "sequences")


def test_a_drafter_of_its_own_folder(logits, tmp_path):
    model = ROOT / "models" / "tiny-v4"
    main, own = logits(model, tokens=[5, 9, 5, 80], mtp=True)
    again, drafts, _ = blocks_of(logits, tmp_path, model, tokens=[5, 9, 5, 80], drafter="dspark")
    assert own.ndim == 2 and drafts.ndim == 3
    assert_same_bits(again, main, "main logits")


def test_window_of_one_token(logits, tmp_path):
    """A query that sees itself alone; without compressors nothing older is kept either."""
    config = dict(make_model.V4, sliding_window=1, compress_ratios=[0] * 6)
    model = make_model.write_model(tmp_path / "model", config)
    tokens = [5, 9, 5, 80, 5]
    whole = logits(model, tokens=tokens)
    assert np.abs(whole[[0, 2]] - whole[[2, 4]]).max() < 1e-5  # the same token elsewhere
    for options in ({"chunk": 1}, {"decode_from": 1}, {"mtp": True}):
        again = logits(model, tokens=tokens, **options)
        assert_same_bits(again[0] if "mtp" in options else again, whole, str(options))


# ---- what is refused ----


@pytest.fixture
def refuse(tmp_path, refused):
    """refuse(text, *flags): the line for a tokens file that holds text."""

    def run(text, *flags, model=small):
        path = tmp_path / "bad.json"
        path.write_text(text)
        out = tmp_path / "refused.npy"
        line = refused("logits", model, "--tokens", path, "--out", out, *flags)
        assert not out.exists()
        return line

    return run


@pytest.mark.parametrize(
    "text",
    ["[]", "[[]]", "[1, []]", "[[1], []]", "[[1], 2]", "{}", "3", '"1"', "null", "", "[1,", "[1] 2",
     "[1.0]", '["1"]', "[true]", "[null]", "[[[1]]]", "[1e3]"],
)  # fmt: skip
def test_bad_token_files(refuse, text):
    assert "bad.json" in refuse(text)


def test_token_out_of_range(refuse):
    vocab = json.loads((small / "config.json").read_text())["vocab_size"]
    assert str(vocab - 1) in refuse(f"[0, {vocab}]")
    assert "token 1" in refuse("[0, -1]")
    refuse("[99999999999]")
    refuse("[99999999999999999999999]")


def test_longer_than_the_context(refuse):
    limit = json.loads((small / "config.json").read_text())["max_position_embeddings"]
    line = refuse(json.dumps([1] * (limit + 1)))
    assert str(limit) in line and str(limit + 1) in line


def test_files_that_cannot_be(refused, tmp_path):
    tokens, out = small / "tokens.json", tmp_path / "x.npy"
    assert "--tokens" in refused("logits", small, "--out", out)
    assert "--out" in refused("logits", small, "--tokens", tokens)
    assert "none.json" in refused("logits", small, "--tokens", tmp_path / "none.json", "--out", out)
    assert str(tmp_path / "nowhere") in refused(
        "logits", tmp_path / "nowhere", "--tokens", tokens, "--out", out
    )
    refused("logits", small, "--tokens", tmp_path, "--out", out)


def test_output_that_cannot_be_written(tmp_path):
    tokens = small / "tokens.json"
    for out in (tmp_path / "no" / "x.npy", tmp_path, "/dev/full"):
        result = run_hadal("logits", small, "--tokens", tokens, "--out", out, "--quiet")
        assert result.returncode in (2, 4)
        assert result.stderr.count("\n") == 1 and str(out) in result.stderr


def test_mtp_needs_a_drafter(refuse):
    assert "MTP layer or DSpark stages" in refuse("[1]", "--mtp", model=GOLDEN / "v4_odd")
    assert "one token a step" in refuse("[1]", "--mtp", "--chunk", "2", model=GOLDEN / "v41_small")
    assert "that of" in refuse("[1]", "--mtp", "--drafter", "mtp", model=GOLDEN / "v41_small")
    assert "that of" in refuse("[1]", "--mtp", "--drafter", "none")
    assert "without --mtp" in refuse("[1]", "--drafter", "mtp")
