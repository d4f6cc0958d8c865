"""Senders of weights that die, stall, repeat themselves or come too late: the old weights serve on until
a whole update came, and nothing stays behind. And many updates under load."""

import base64
import concurrent.futures
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from conftest import HADAL, LONG
from make_model import io
from serving import TINY, Server, wait_until
from test_memory_occupation import resident
from test_weight_updates import IDS, checksums, scores, send, stem, update

N = 3  # parts
SENDER = pathlib.Path(__file__).with_name("weight_sender.py")
SANITIZED = "asan" in HADAL or "tsan" in HADAL


@pytest.fixture(scope="module")
def server(folder, other):
    s = Server("--weights-dir", folder, "--max-running", "8")
    yield s
    s.close()


@pytest.fixture(scope="module")
def hashes(server, other):
    """Checksums of both models, by version."""
    old = checksums(server)
    update(server, other)
    new = checksums(server)
    update(server, TINY, "old")
    return {"old": old, "sent": new}


@pytest.fixture(scope="module")
def parts(other):
    """The other model in shared memory, a scale beside its tensor."""
    tensors, name = io.read_checkpoint(other), f"/hadal-sender-{os.getpid()}"
    files = [pathlib.Path(f"/dev/shm{name}-{i}") for i in range(N)]
    for i, file in enumerate(files):
        file.write_bytes(io.file_bytes({n: t for n, t in tensors.items() if sum(stem(n).encode()) % N == i}))
    yield name
    for file in files:
        file.unlink()


def run_sender(server, parts, step=-1, how="after"):
    return subprocess.run([sys.executable, SENDER, str(server.port), parts, str(N), str(step), how], stderr=subprocess.PIPE, text=True)


def begun(server):
    return server.stats()["hadal_weight_update_begun"]


def begin(server):
    reply = server.post("/begin_weight_update", {})
    assert reply.status == 200, reply.text
    return reply.json["update"]


def post_part(server, parts, i, status=200, **more):
    reply = server.post("/update_weights_from_tensor", {"shared_memory": f"{parts}-{i}", **more})
    assert reply.status == status, reply.text
    return reply.json["message"]


def abort(server, **more):
    reply = server.post("/abort_weight_update", more)
    assert reply.status == 200 and begun(server) == 0, reply.text
    return reply.json["message"]


@pytest.mark.parametrize("how", ["half", "after"])
@pytest.mark.parametrize("step", range(N + 5))
def test_sender_dies(server, parts, hashes, step, how):
    """At every message: whole or not at all, and the next sender gets through."""
    update(server, TINY, "old")
    assert run_sender(server, parts, step, how).returncode == -signal.SIGKILL
    applied = step > 3 + N or (step == 3 + N and how == "after")
    collects = 2 + (how == "half") <= step < 3 + N + (how == "half")
    wait_until(lambda: checksums(server) == hashes["sent" if applied else "old"], "the weights are whole")
    assert begun(server) == collects
    assert server.get("/get_weight_version").json["weight_version"] == ("sent" if applied else "old")
    assert ("Dropped" if collects else "No update") in abort(server)
    again = run_sender(server, parts)
    assert again.returncode == 0, again.stderr
    assert checksums(server) == hashes["sent"] and len(scores(server)[1]) == 24


def test_sender_stalls(server, parts, hashes):
    """Half a message holds nothing up; its rest comes too late."""
    update(server, TINY, "old")
    number = begin(server)
    body = json.dumps({"shared_memory": f"{parts}-0", "update": number}).encode()
    with server.socket() as s:
        head = f"POST /update_weights_from_tensor HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        s.sendall(head.encode() + body[:10])
        assert len(scores(server)[1]) == 24
        abort(server, update=number)
        assert run_sender(server, parts).returncode == 0
        s.sendall(body[10:])
        assert b" 409 " in s.recv(4096)
    assert checksums(server) == hashes["sent"]


def test_late_and_foreign_parts(server, parts, hashes):
    """A part that names its update is never an update of its own."""
    update(server, TINY, "old")
    number = begin(server)
    post_part(server, parts, 0, update=number)
    assert "not the one" in post_part(server, parts, 1, 409, update=number + 1)
    assert server.post("/end_weight_update", {"update": number + 1}).status == 409
    assert server.post("/abort_weight_update", {"update": number - 1}).status == 409
    abort(server)
    post_part(server, parts, 1, 409, update=number)
    assert server.post("/end_weight_update", {"update": number}).status == 409
    assert begin(server) == number + 1
    abort(server)
    assert checksums(server) == hashes["old"]


def test_parts_in_any_order_and_twice(server, parts, hashes):
    update(server, TINY, "old")
    begin(server)
    for i in (2, 0, 2, 1):
        post_part(server, parts, i)
    reply = server.post("/end_weight_update", {"parts": N})
    assert reply.status == 400 and "came twice" in reply.json["message"]
    assert checksums(server) == hashes["old"]
    begin(server)
    for i in (2, 0, 2, 1):
        post_part(server, parts, i)
    assert server.post("/end_weight_update", {"parts": 4}).status == 200
    assert checksums(server) == hashes["sent"]


@pytest.mark.parametrize("sent", [[], [0], [0, 1]])
def test_lost_parts(server, parts, hashes, sent):
    update(server, TINY, "old")
    begin(server)
    for i in sent:
        post_part(server, parts, i)
    reply = server.post("/end_weight_update", {"parts": N, "weight_version": "never"})
    assert reply.status == 400 and "nothing was changed" in reply.json["message"]
    assert server.get("/get_weight_version").json["weight_version"] == "old"
    assert checksums(server) == hashes["old"] and begun(server) == 0


def test_digest(server, other, hashes):
    """Bytes that changed on their way are refused, before anything of them is read."""
    update(server, TINY, "old")
    norm = {"norm.weight": io.read_checkpoint(other)["norm.weight"]}
    data = io.file_bytes(norm)
    digest = hashlib.sha256(data).hexdigest()
    bad = bytearray(data)
    bad[-1] ^= 1
    for shared in (False, True):
        assert "sha256" in send(server, norm, status=400, shared=shared, sha256=hashlib.sha256(bad).hexdigest())["message"]
    for wrong in ("", "x" * 64, digest.upper(), 7):
        assert "sha256" in send(server, norm, status=400, sha256=wrong)["message"]
    body = {"serialized_named_tensors": [base64.b64encode(b"x").decode()], "sha256": digest}
    assert "pickle" in server.post("/update_weights_from_tensor", body).json["message"]
    assert checksums(server) == hashes["old"]
    send(server, norm, sha256=digest)
    assert checksums(server)["norm.weight"] == hashes["sent"]["norm.weight"]


def test_repeated_parts_cost_no_memory(server, parts):
    begin(server)
    for i in range(N):
        post_part(server, parts, i)
    before = resident(server)
    for _ in range(20):
        for i in range(N):
            post_part(server, parts, i)
    if not SANITIZED:
        assert resident(server) < before + (TINY / "model.safetensors").stat().st_size // 2
    abort(server)


@pytest.mark.parametrize("body", [{"update": "1"}, {"update": -1}, {"update": 1.5}, {"parts": "3"}, {"parts": -3}])
def test_bad_numbers(server, body):
    (field,) = body
    begin(server)
    reply = server.post("/end_weight_update", body)
    assert reply.status == 400 and field in reply.json["message"]
    assert begun(server) == 1
    abort(server)


# ---- many updates under load ----

CLIENTS, SWAPS, TOKENS, TEMPERATURE = 32, 200 if LONG else 30, 24, 0.9


def ask(server, seed):
    sampling = {"max_new_tokens": TOKENS, "temperature": TEMPERATURE, "sampling_seed": seed, "ignore_eos": True}
    prompt = IDS[: 4 + seed % 16]
    reply = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
    assert reply.status == 200, reply.text
    return prompt, reply.json


def rescored(server, prompt, output):
    sampling = {"max_new_tokens": 0, "temperature": TEMPERATURE}
    body = {"input_ids": prompt + output, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    return server.post("/generate", body).json["meta_info"]["input_token_logprobs"][len(prompt) :]


def differing(server, answers, belongs):
    """(tokens compared, tokens that differ) of the spans that belong to the weights in use."""
    compared = differ = 0
    for prompt, a in answers:
        spans = [s for s in a["meta_info"]["weight_versions"] if belongs(s["version"])]
        again = rescored(server, prompt, a["output_ids"]) if spans else []
        for s in spans:
            part = slice(s["start"], s["end"])
            then = a["meta_info"]["output_token_logprobs"][part]
            compared += len(then)
            differ += sum(x != y for x, y in zip(then, again[part]))
    return compared, differ


def swap_under_load(server, folders, swaps):
    """Every token belongs to the version that its span names, nothing is lost, memory is flat."""
    answers, sizes, over = [], [], False

    def client(first):
        mine = []
        while not over or not mine:
            mine.append(ask(server, first + CLIENTS * len(mine)))
        return mine

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(client, i) for i in range(CLIENTS)]
        for swap in range(swaps):
            mode = ("retract", "abort", None)[swap % 3]
            if mode == "retract":
                assert server.post("/pause_generation", {"mode": mode}).status == 200
            update(server, folders[swap % 2], f"{swap % 2}-{swap}", abort_all_requests=mode == "abort")
            if mode == "retract":
                assert server.post("/continue_generation", {}).status == 200
            sizes.append(resident(server))
        over = True
        for a in asked:
            answers += a.result()
    assert len(answers) >= CLIENTS and server.stats()["hadal_weight_updates_total"] == swaps
    for _, a in answers:
        spans, info = a["meta_info"]["weight_versions"], a["meta_info"]
        assert info["completion_tokens"] == len(a["output_ids"]) == (spans[-1]["end"] if spans else 0)
        assert info["completion_tokens"] == TOKENS or info["finish_reason"]["type"] == "abort"
    compared = 0
    for i, path in enumerate(folders):
        update(server, path, f"{i}-last")
        n, differ = differing(server, answers, lambda v: v[0] == str(i) or (i == 0 and v == "default"))  # noqa: B023
        assert differ == 0
        compared += n
    assert compared == sum(len(a["output_ids"]) for _, a in answers) > 0
    if not SANITIZED:
        assert max(sizes[swaps // 2 :]) < max(sizes[: swaps // 2]) + (8 << 20), sizes
    wait_until(lambda: server.post("/flush_cache").status == 200, "no page is held")


def test_swaps_under_load(folder, other):
    server = Server("--weights-dir", folder, "--max-running", "16")
    swap_under_load(server, [TINY, other], SWAPS)
    server.close()


# ---- versions on other endpoints ----


@pytest.mark.parametrize("path, body", [("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell a story."}]}), ("/v1/completions", {"prompt": "Once upon a time"})])
def test_versions_of_openai_replies(server, other, path, body):
    """As /generate has them, for each choice; in a stream in the last chunk of a choice."""
    update(server, TINY, "first")
    reply = server.post(path, {**body, "n": 2, "max_tokens": 5, "ignore_eos": True}).json
    assert reply["metadata"] == {"weight_version": "first"}
    assert [c["weight_versions"] for c in reply["choices"]] == [[{"version": "first", "start": 0, "end": 5}]] * 2
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, path, {**body, "max_tokens": 300, "ignore_eos": True, "stream": True})
        start = server.stats()["hadal_generation_tokens_total"]
        wait_until(lambda: server.stats()["hadal_generation_tokens_total"] > start + 20, "tokens come")
        update(server, other, "second")
        lines = asked.result().text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    (last,) = [c for c in chunks if "metadata" in c]
    (choice,) = last["choices"]
    spans = choice["weight_versions"]
    assert last["metadata"]["weight_version"] == "second" and choice["finish_reason"] == "length"
    assert [s["version"] for s in spans] == ["first", "second"]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == 300
