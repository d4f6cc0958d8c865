"""The experts that routers chose, as /generate returns them, against a second path: hadal logits
computes the same sequences from their ids alone."""

import base64
import concurrent.futures
import json
import subprocess

import numpy as np
import pytest
from conftest import HADAL
from make_model import io
from serving import TINY, Server, wait_until
from test_rollout import go_on, pause
from test_weight_updates import copy_model, perturbed, update
from toy_models import make_toy_model

PROMPT = [605, 14, 261, 1129, 1597, 88, 40, 7, 300, 41, 9, 12]


@pytest.fixture(scope="module")
def server():
    s = Server("--routed-experts", "--max-running", "8")
    yield s
    s.close()


def rows_of(info):
    dtype = {"uint8": "u1", "uint16": "<u2", "int32": "<i4"}[info["routed_experts_dtype"]]
    rows = np.frombuffer(base64.b64decode(info["routed_experts"]), dtype)
    return rows.reshape(info["routed_experts_shape"])


def generate(server, ids, n=40, status=200, seed=3, sampling=None, **more):
    sampling = {"max_new_tokens": n, "temperature": 0.8, "sampling_seed": seed, "ignore_eos": True, **(sampling or {})}
    reply = server.post("/generate", {"input_ids": ids, "sampling_params": sampling, "return_routed_experts": True, **more})
    assert reply.status == status, reply.text
    return reply.json


def second_path(model, sequences, tmp_path, *flags):
    tokens, out = tmp_path / "tokens.json", tmp_path / "logits.npy"
    tokens.write_text(json.dumps(sequences))
    command = [HADAL, "logits", model, "--tokens", tokens, "--out", out, "--routes", "-q", *flags]
    subprocess.run(command, check=True, timeout=120)
    rows = np.load(tmp_path / "logits.routes.npy").astype(int)
    return np.split(rows, np.cumsum([len(s) for s in sequences])[:-1])


def check_rows(model, tmp_path, answers, *flags):
    """answers: ids of the whole sequence, from which position on, and the reply's meta_info"""
    rows = second_path(model, [ids for ids, _, _ in answers], tmp_path, *flags)
    for (ids, start, info), expected in zip(answers, rows):
        got = rows_of(info)
        assert got.shape[0] == len(ids) - 1 - start
        assert np.array_equal(got.reshape(got.shape[0], -1), expected[start:-1])


def whole(ids, reply):
    return ids + reply["output_ids"], 0, reply["meta_info"]


def test_neighbours_prefix_hits_drafts_and_chunks(server, tmp_path):
    """64 answers side by side, with drafts and shared prefixes; elsewhere in chunks and one by one."""
    prompts = [PROMPT * 11 + [400 + i % 5] * (i % 7 + 1) for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda i: generate(server, prompts[i], 10 + i % 20, seed=i), range(64)))
    assert any(r["meta_info"]["cached_tokens"] > 0 for r in replies)
    assert any(r["meta_info"]["spec_accepted_tokens"] > 0 for r in replies)
    assert any(r["meta_info"]["spec_accepted_tokens"] < r["meta_info"]["spec_draft_tokens"] for r in replies)
    answers = [whole(p, r) for p, r in zip(prompts, replies)]
    check_rows(TINY, tmp_path, answers[::5], "--chunk", "7", "--decode-from", "140")


def test_routes_come_back_from_host_memory(tmp_path):
    """Each prompt returns when the others have taken its pages; its routes lie beside those in host memory."""
    prompts = [[400 + i] + PROMPT * 50 for i in range(4)] * 2
    server = Server("--routed-experts", "--context", 768, "--kv-tokens", 768, "--kv-host", 1)
    replies = [generate(server, p, 8, seed=i) for i, p in enumerate(prompts)]
    server.close()
    assert all(r["meta_info"]["cached_tokens"] >= 512 for r in replies[4:])
    check_rows(TINY, tmp_path, [whole(p, r) for p, r in zip(prompts, replies)])


def test_hash_layers_are_the_table(server):
    """The first layers of V4 take experts from a table of the checkpoint."""
    tables = [io.read_checkpoint(TINY)[f"layers.{i}.ffn.gate.tid2eid"] for i in range(2)]
    reply = generate(server, PROMPT)
    ids, _, info = whole(PROMPT, reply)
    for layer, t in enumerate(tables):
        table = np.array(t.data).reshape(-1).view("<i8").reshape(t.shape)
        assert np.array_equal(rows_of(info)[:, layer], table[ids[:-1]])


def test_start_and_turns(server, tmp_path):
    first = generate(server, PROMPT)
    ids = PROMPT + first["output_ids"] + [55, 66, 77]
    start = len(PROMPT) + len(first["output_ids"]) - 1
    second = generate(server, ids, seed=4, routed_experts_start_len=start)
    at_end = generate(server, ids, seed=4, routed_experts_start_len=len(ids))
    assert second["output_ids"] == at_end["output_ids"]
    rows = second_path(TINY, [ids + second["output_ids"]], tmp_path)[0][:-1]
    both = np.concatenate([rows_of(first["meta_info"]), rows_of(second["meta_info"])])
    assert np.array_equal(both.reshape(len(both), -1), rows)
    assert np.array_equal(rows_of(at_end["meta_info"]).reshape(-1, rows.shape[1]), rows[len(ids) :])


def test_prompts_alone_choices_types_and_streams(server, tmp_path):
    alone = generate(server, PROMPT, 0)["meta_info"]
    check_rows(TINY, tmp_path, [(PROMPT, 0, alone)])
    assert generate(server, PROMPT, 0, routed_experts_start_len=len(PROMPT))["meta_info"]["routed_experts"] == ""
    two = generate(server, PROMPT, 12, sampling={"n": 2})
    check_rows(TINY, tmp_path, [whole(PROMPT, r) for r in two])
    plain = rows_of(generate(server, PROMPT)["meta_info"])
    for dtype in ("uint8", "uint16", "int32"):
        info = generate(server, PROMPT, routed_experts_dtype=dtype)["meta_info"]
        assert info["routed_experts_dtype"] == dtype and np.array_equal(rows_of(info), plain)
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9, "temperature": 0}, "return_routed_experts": True, "stream": True}
    text = server.post("/generate", body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert all("routed_experts" not in e["meta_info"] for e in events[:-1])
    check_rows(TINY, tmp_path, [whole(PROMPT, events[-1])])


def test_stops_and_aborts(server, tmp_path):
    free = generate(server, PROMPT, 30)
    stop = free["output_ids"][7]
    stopped = generate(server, PROMPT, 30, sampling={"stop_token_ids": [stop]})
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"
    words = [generate(server, PROMPT, 30, seed=s, sampling={"stop": ["e"]}) for s in range(4)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, server, PROMPT, 5000)
        wait_until(lambda: server.loads()["num_running_reqs"] == 1, "it runs")
        before = server.stats()["hadal_generation_tokens_total"]
        wait_until(lambda: server.stats()["hadal_generation_tokens_total"] > before + 20, "tokens come")
        server.post("/abort_request", {"abort_all": True})
        aborted = running.result()
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort" and aborted["output_ids"]
    check_rows(TINY, tmp_path, [whole(PROMPT, r) for r in [stopped, aborted, *words]])


@pytest.mark.parametrize("family", ["v2", "v3", "v32", "v4", "v4_dspark"])
def test_every_family_under_memory_pressure(tmp_path, family):
    """Dense layers have -1; retractions and drafts change nothing."""
    model = make_toy_model(family, tmp_path / "model")
    s = Server("--routed-experts", "--max-running", "6", "--context", "400", "--kv-tokens", "640", "--chunk", "16", model=model)
    prompts = [[5, 9, 60, 7, 100, 33, 8] * 6 + [70 + i] for i in range(6)]
    try:
        pause(s, "in_place")
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            running = [pool.submit(generate, s, prompts[i], 150, seed=i) for i in range(6)]
            wait_until(lambda: s.loads()["num_waiting_reqs"] == 6, "all wait")
            go_on(s)
            replies = [r.result() for r in running]
    finally:
        s.close()
    assert any(r["meta_info"]["num_retractions"] > 0 for r in replies)
    check_rows(model, tmp_path, [whole(p, r) for p, r in zip(prompts, replies)])
    config = json.loads((model / "config.json").read_text())
    dense = config.get("first_k_dense_replace", 0)
    assert (rows_of(replies[0]["meta_info"])[:, :dense] == -1).all() and (rows_of(replies[0]["meta_info"])[:, dense:] >= 0).all()


def test_retraction_under_other_weights(tmp_path):
    """Rows of tokens already sampled stay those of the step that sampled them."""
    other = copy_model(TINY, tmp_path / "other", perturbed(io.read_checkpoint(TINY), 1))
    s = Server("--routed-experts", "--weights-dir", tmp_path)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(generate, s, PROMPT, 3000)
            before = s.stats()["hadal_generation_tokens_total"]
            wait_until(lambda: s.stats()["hadal_generation_tokens_total"] > before + 40, "tokens come")
            pause(s, "retract")
            update(s, other, "step-1")
            go_on(s)
            before = s.stats()["hadal_generation_tokens_total"]
            wait_until(lambda: s.stats()["hadal_generation_tokens_total"] > before + 40, "more tokens come")
            s.post("/abort_request", {"abort_all": True})
            reply = running.result()
    finally:
        s.close()
    ids, _, info = whole(PROMPT, reply)
    (old, new) = info["weight_versions"]
    assert (old["version"], new["version"]) == ("default", "step-1")
    border = len(PROMPT) + old["end"] - 1  # the first row that the new weights sampled from
    rows = rows_of(info).reshape(len(ids) - 1, -1)
    assert np.array_equal(rows[:border], second_path(TINY, [ids], tmp_path)[0][:border])
    expected = second_path(other, [ids], tmp_path)[0]
    assert np.array_equal(rows[border:], expected[border:-1])
    assert not np.array_equal(rows[:border], expected[:border])


def test_refusals(server):
    for body, field in [
        ({"routed_experts_start_len": -1}, "routed_experts_start_len"),
        ({"routed_experts_start_len": len(PROMPT) + 1}, "routed_experts_start_len"),
        ({"routed_experts_start_len": "1"}, "routed_experts_start_len"),
        ({"routed_experts_dtype": "float"}, "routed_experts_dtype"),
        ({"return_routed_experts": False, "routed_experts_start_len": 3}, "return_routed_experts"),
        ({"return_routed_experts": 1}, "return_routed_experts"),
    ]:
        reply = generate(server, PROMPT, status=400, **body)
        assert reply["error"]["param"] == field, reply
    assert "routed_experts" not in generate(server, PROMPT, 4, return_routed_experts=False)["meta_info"]


def test_a_server_without_routes():
    s = Server()
    try:
        reply = generate(s, PROMPT, status=400)
        assert "--routed-experts" in reply["error"]["message"]
    finally:
        s.close()
    for flags in (["--tp", "2"], ["--backend", "null"]):
        with pytest.raises(AssertionError):
            Server("--routed-experts", *flags).close()
