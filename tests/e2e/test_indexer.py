"""The keys that indexers selected, as /generate returns them, against two other paths: hadal logits
computes the same sequences from their ids alone, and the NumPy programs choose by themselves."""

import base64
import concurrent.futures
import importlib
import json
import pathlib
import subprocess

import numpy as np
import pytest
from conftest import GOLDEN, HADAL
from make_model import V4, io, write_model
from serving import TINY, Server, wait_until
from test_rollout import go_on, pause
from test_routes import generate as generate_routes
from test_weight_updates import copy_model, perturbed, update
from toy_models import add_toy_tokenizer, make_toy_model

REFERENCE = pathlib.Path(__file__).parents[1] / "reference"
PROMPT = [5, 9, 60, 7, 100, 33, 8] * 6
TOP_K, RATIO = V4["index_topk"], 4
TRIVIAL = (TOP_K + 1) * RATIO - 1  # positions that see no more keys than are selected


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy_model("v4", tmp_path_factory.mktemp("indexer") / "model")


@pytest.fixture(scope="module")
def server(toy):
    s = Server("--indexer-topk", "--routed-experts", "--max-running", "8", "--context", "600", model=toy)
    yield s
    s.close()


def rows_of(info):
    rows = np.frombuffer(base64.b64decode(info["indexer_topk"]), {"uint16": "<u2", "int32": "<i4"}[info["indexer_topk_dtype"]])
    rows = rows.reshape(info["indexer_topk_shape"]).astype(int)
    return np.where(rows == 0xFFFF, -1, rows) if info["indexer_topk_dtype"] == "uint16" else rows


def generate(server, ids, n=40, status=200, **more):
    return generate_routes(server, ids, n, status, **{"return_routed_experts": False, "return_indexer_topk": True, **more})


def second_path(model, sequences, folder, *flags):
    tokens, out = folder / "tokens.json", folder / "logits.npy"
    tokens.write_text(json.dumps(sequences))
    subprocess.run([HADAL, "logits", model, "--tokens", tokens, "--out", out, "--indexer", "-q", *flags], check=True, timeout=120)
    rows = np.load(folder / "logits.indexer.npy").astype(int)
    return np.split(rows, np.cumsum([len(s) for s in sequences])[:-1])


def whole(ids, reply):
    return ids + reply["output_ids"], reply["meta_info"]


def check_rows(model, folder, answers, *flags):
    """answers: ids of the whole sequence, and the reply's meta_info"""
    for (ids, info), expected in zip(answers, second_path(model, [ids for ids, _ in answers], folder, *flags)):
        got, start = rows_of(info), info["indexer_topk_start"]
        assert got.shape[0] == len(ids) - 1 - start
        assert np.array_equal(got.reshape(len(got), -1), expected[start:-1])


# ---- against NumPy ----


def choices_by_numpy(program, case, tokens):
    """Per layer with an indexer its mask [tokens, keys], and per layer with a router its experts."""
    masks, experts = [], []
    model = program.open_case(case)[0]

    def record(name, of, into):
        inner = getattr(model, name)

        def call(*args):
            result = inner(*args)
            into.append(of(args, result))
            return result

        setattr(model, name, call)

    if case.name.startswith("v41"):
        record("choose", lambda args, result: model.selected, masks)
    elif case.name.startswith("v4"):
        record("entry_mask", lambda args, mask: mask if args[0] + "indexer.wq_b.weight" in model.w else None, masks)
    else:
        record("index_mask", lambda args, mask: mask, masks)
    record("route", lambda args, result: result[0], experts)
    model.main(np.array(tokens))
    return [m for m in masks if m is not None], experts


@pytest.mark.parametrize("case", ["v32_rope_mtp", "v4_small_mtp", "v4_wide_index", "v41_small"])
def test_the_second_path_equals_numpy(case, tmp_path, monkeypatch):
    case = GOLDEN / case
    monkeypatch.syspath_prepend(REFERENCE)
    program = importlib.import_module("v41" if case.name.startswith("v41") else "mtp")
    tokens = json.loads((case / "tokens.json").read_text())
    masks, experts = choices_by_numpy(program, case, tokens)
    rows = second_path(case, [tokens], tmp_path, "--routes", "--chunk", "13")[0].reshape(len(tokens), len(masks), -1)
    for layer, mask in enumerate(masks):
        for t in range(len(tokens)):
            keys = np.flatnonzero(mask[t])
            assert list(rows[t, layer]) == list(keys) + [-1] * (rows.shape[2] - len(keys)), (layer, t)
    routes = np.load(tmp_path / "logits.routes.npy").astype(int).reshape(len(tokens), -1, experts[0].shape[1])
    routed = [layer for layer in range(routes.shape[1]) if (routes[:, layer] >= 0).all()]
    assert len(routed) == len(experts)
    for layer, ids in zip(routed, experts):
        assert np.array_equal(routes[:, layer], ids)


# ---- against hadal logits ----


def test_neighbours_prefix_hits_drafts_and_chunks(server, toy, tmp_path):
    prompts = [PROMPT * 4 + [60 + i % 5] * (i % 7 + 1) for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda i: generate(server, prompts[i], 10 + i % 20, seed=i), range(64)))
    assert any(r["meta_info"]["cached_tokens"] > 0 for r in replies)
    assert any(r["meta_info"]["spec_accepted_tokens"] < r["meta_info"]["spec_draft_tokens"] for r in replies)
    check_rows(toy, tmp_path, [whole(p, r) for p, r in zip(prompts, replies)], "--chunk", "7", "--decode-from", "150")


@pytest.mark.parametrize("family", ["v32", "v4", "v4_dspark", "v41"])
def test_every_family_under_memory_pressure(tmp_path, family):
    model = tmp_path / "model"
    if family == "v41":
        model = GOLDEN / "v41_small"
    else:
        make_toy_model(family, model)
    s = Server("--indexer-topk", "--routed-experts", "--max-running", "6", "--context", "400", "--kv-tokens", "640", "--chunk", "16", model=model)
    vocab = json.loads((model / "config.json").read_text())
    vocab = vocab.get("text_config", vocab)["vocab_size"]
    prompts = [[t % vocab for t in PROMPT + [70 + i]] for i in range(6)]
    try:
        pause(s, "in_place")
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            running = [pool.submit(generate, s, prompts[i], 150, seed=i, return_routed_experts=True) for i in range(6)]
            wait_until(lambda: s.loads()["num_waiting_reqs"] == 6, "all wait")
            go_on(s)
            replies = [r.result() for r in running]
    finally:
        s.close()
    assert any(r["meta_info"]["num_retractions"] > 0 for r in replies)
    check_rows(model, tmp_path, [whole(p, r) for p, r in zip(prompts, replies)], "--routes")
    experts = np.load(tmp_path / "logits.routes.npy").astype(int)
    for p, r in zip(prompts, replies):
        own, experts = np.split(experts, [len(p) + 150])
        shown = np.frombuffer(base64.b64decode(r["meta_info"]["routed_experts"]), "<i4")
        assert np.array_equal(shown, own[:-1].reshape(-1))


def test_they_come_back_from_host_memory(toy, tmp_path):
    """Beside the experts of the same pages."""
    prompts = [[40 + i] + PROMPT * 12 for i in range(4)] * 2
    s = Server("--indexer-topk", "--routed-experts", "--context", 768, "--kv-tokens", 768, "--kv-host", 1, model=toy)
    replies = [generate(s, p, 8, seed=i, return_routed_experts=True) for i, p in enumerate(prompts)]
    s.close()
    assert all(r["meta_info"]["cached_tokens"] >= 256 for r in replies[4:])
    check_rows(toy, tmp_path, [whole(p, r) for p, r in zip(prompts, replies)], "--routes")
    experts = np.load(tmp_path / "logits.routes.npy").astype(int)[-len(prompts[-1]) - 8 : -1]
    shown = np.frombuffer(base64.b64decode(replies[-1]["meta_info"]["routed_experts"]), "<i4")
    assert np.array_equal(shown, experts.reshape(-1))


def test_start_turns_types_and_the_compact_form(server, toy, tmp_path):
    first = generate(server, PROMPT)
    ids = PROMPT + first["output_ids"] + [55, 66, 77]
    start = len(PROMPT) + len(first["output_ids"]) - 1
    second = generate(server, ids, seed=4, routed_experts_start_len=start)
    at_end = generate(server, ids, 1, routed_experts_start_len=len(ids))["meta_info"]
    assert at_end["indexer_topk"] == "" and at_end["indexer_topk_shape"][0] == 0
    check_rows(toy, tmp_path, [whole(PROMPT, first), whole(ids, second)])
    full = rows_of(first["meta_info"])
    assert first["meta_info"]["indexer_topk_shape"] == [len(PROMPT) + 39, 2, TOP_K]
    for more in ({}, {"indexer_topk_dtype": "uint16"}, {"indexer_topk_dtype": "int32"}):
        info = generate(server, PROMPT, indexer_topk_compact=True, **more)["meta_info"]
        assert info["indexer_topk_dtype"] == more.get("indexer_topk_dtype", "int32")
        assert info["indexer_topk_start"] == TRIVIAL and np.array_equal(rows_of(info), full[TRIVIAL:])
    # what it leaves out are the rows that are all keys
    for t, row in enumerate(full):
        n = (t + 1) // RATIO
        assert ((row == np.arange(TOP_K)) | (np.arange(TOP_K) >= n)).all() == (t < TRIVIAL)
        assert ((row == -1) == (np.arange(TOP_K) >= n)).all()
    later = generate(server, ids, seed=4, indexer_topk_compact=True, routed_experts_start_len=start)["meta_info"]
    assert later["indexer_topk_start"] == start and later["indexer_topk"] == second["meta_info"]["indexer_topk"]
    short = generate(server, PROMPT[:9], 3, indexer_topk_compact=True)["meta_info"]
    assert short["indexer_topk"] == "" and short["indexer_topk_start"] == 11


def test_prompts_alone_choices_and_streams(server, toy, tmp_path):
    alone = generate(server, PROMPT, 0)["meta_info"]
    two = generate(server, PROMPT, 12, sampling={"n": 2})
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9, "temperature": 0}, "return_indexer_topk": True, "stream": True}
    events = [json.loads(line[6:]) for line in server.post("/generate", body).text.splitlines() if line.startswith("data: {")]
    assert all("indexer_topk" not in e["meta_info"] for e in events[:-1])
    check_rows(toy, tmp_path, [(PROMPT, alone), *(whole(PROMPT, r) for r in two), whole(PROMPT, events[-1])])
    assert "indexer_topk" not in generate(server, PROMPT, 4, return_indexer_topk=False)["meta_info"]


def test_retraction_under_other_weights(tmp_path):
    """Rows of tokens already sampled stay those of the step that sampled them."""
    model = tmp_path / "model"
    write_model(model, dict(V4, vocab_size=320))
    add_toy_tokenizer(model)
    other = copy_model(model, tmp_path / "other", perturbed(io.read_checkpoint(model), 1))
    s = Server("--indexer-topk", "--weights-dir", tmp_path, model=model)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(generate, s, PROMPT * 2, 600)
            before = s.stats()["hadal_generation_tokens_total"]
            wait_until(lambda: s.stats()["hadal_generation_tokens_total"] > before + 20, "tokens come")
            pause(s, "retract")
            update(s, other, "step-1")
            go_on(s)
            reply = running.result()
    finally:
        s.close()
    ids, info = whole(PROMPT * 2, reply)
    (old, new) = info["weight_versions"]
    border = len(PROMPT) * 2 + old["end"] - 1  # the first row that the new weights sampled from
    rows = rows_of(info).reshape(len(ids) - 1, -1)
    first, then = (second_path(m, [ids], tmp_path)[0][:-1] for m in (model, other))
    assert np.array_equal(rows, np.concatenate([first[:border], then[border:]]))
    assert not np.array_equal(first[:border], then[:border])


def test_refusals(server):
    for body, field in [
        ({"indexer_topk_dtype": "uint8"}, "indexer_topk_dtype"),
        ({"indexer_topk_compact": 1}, "indexer_topk_compact"),
        ({"return_indexer_topk": "yes"}, "return_indexer_topk"),
        ({"routed_experts_start_len": -1}, "routed_experts_start_len"),
        ({"routed_experts_start_len": len(PROMPT) + 1}, "routed_experts_start_len"),
        ({"return_indexer_topk": False, "indexer_topk_compact": True}, "return_indexer_topk"),
        ({"return_indexer_topk": False, "indexer_topk_dtype": "int32"}, "return_indexer_topk"),
        ({"return_indexer_topk": False, "routed_experts_start_len": 2}, "return_routed_experts"),
        ({"routed_experts_dtype": "uint8"}, "return_routed_experts"),
    ]:
        reply = generate(server, PROMPT, status=400, **body)
        assert reply["error"]["param"] == field, reply


def test_servers_without_them(tmp_path):
    s = Server()
    try:
        assert "--indexer-topk" in generate(s, PROMPT, status=400)["error"]["message"]
    finally:
        s.close()
    dense = make_toy_model("v3", tmp_path / "v3")
    for model, flags in [(dense, []), (TINY, ["--tp", "2"]), (TINY, ["--backend", "null"])]:
        with pytest.raises(AssertionError):
            Server("--indexer-topk", *flags, model=model).close()
