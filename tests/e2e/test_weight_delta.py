"""Deltas: only the elements that changed, for the version that they start from."""

import base64
import hashlib
import os
import pathlib

import numpy as np
import pytest
from make_model import io  # finds tools/, too
from serving import TINY, Server
from test_weight_updates import checksums, scores, started_from, stem, update

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
NAME = "layers.0.attn.wq_a"


@pytest.fixture(scope="module")
def server(folder):
    s = Server("--weights-dir", folder, "--max-running", "8")
    yield s
    s.close()


@pytest.fixture(autouse=True)
def back(server):
    yield
    update(server, TINY, "default")


def elements(t):
    return np.array(t.data).reshape(-1).view(np.uint8).reshape(-1, SIZES[t.dtype])


def part(indices, values, dtype, wide=True):
    at = np.asarray(indices, dtype="<i8" if wide else "<i4")
    return io.Tensor("I64" if wide else "I32", at.shape, at.view(np.uint8)), io.Tensor(dtype, at.shape, np.ascontiguousarray(values).reshape(-1))


def difference(old, new):
    delta = {}
    for i, (name, t) in enumerate(old.items()):
        a, b = elements(t), elements(new[name])
        at = np.flatnonzero((a != b).any(axis=1))
        if len(at):
            delta[f"{name}.indices"], delta[f"{name}.values"] = part(at, b[at], t.dtype, i % 2)
    return delta


def send(server, delta, base="default", status=200, **more):
    data, shared = io.file_bytes(delta), pathlib.Path(f"/dev/shm/hadal-delta-{os.getpid()}")
    body = {"sha256": hashlib.sha256(data).hexdigest(), "load_format": "delta", "base_version": base, **more}
    if len(data) < 1 << 20:
        body["safetensors"] = base64.b64encode(data).decode()
    else:
        body["shared_memory"] = shared.name
    shared.write_bytes(data)
    reply = server.post("/update_weights_from_tensor", {k: v for k, v in body.items() if v is not None})
    shared.unlink()
    assert reply.status == status, reply.text
    return reply.json["message"]


def test_a_delta_is_the_whole_update(server, other):
    old, new = io.read_checkpoint(TINY), io.read_checkpoint(other)
    before = scores(server), checksums(server)
    send(server, difference(old, new), weight_version="next")
    assert (scores(server), checksums(server)) == started_from(other)
    send(server, difference(new, old), base="next", weight_version="last")
    assert (scores(server), checksums(server)) == before


def test_one_element_of_one_tensor(server):
    old = io.read_checkpoint(TINY)[f"{NAME}.weight"]
    before = checksums(server)
    value = elements(old)[7:8] ^ 0x80  # the sign
    send(server, dict(zip((f"{NAME}.weight.indices", f"{NAME}.weight.values"), part([7], value, old.dtype))))
    after = checksums(server)
    assert {n for n in after if after[n] != before[n]} == {f"{NAME}.weight"}
    send(server, {}, weight_version="same")
    assert checksums(server) == after
    assert server.get("/get_weight_version").json["weight_version"] == "same"


def test_in_parts_and_with_ranks(folder, other):
    delta = difference(io.read_checkpoint(TINY), io.read_checkpoint(other))
    s = Server("--weights-dir", folder, "--threads", 2, "--tp", 2, "--ep", 2)
    assert s.post("/begin_weight_update", {}).status == 200
    for i in range(2):  # a scale travels with its tensor
        send(s, {n: t for n, t in delta.items() if sum(stem(n.rpartition(".")[0]).encode()) % 2 == i}, weight_version="next")
    assert s.get("/get_weight_version").json["weight_version"] == "default"
    assert s.post("/end_weight_update", {"parts": 2}).status == 200
    assert (scores(s), checksums(s)) == started_from(other)
    s.close()


def test_a_tensor_is_in_one_part(server):
    """A scale alone would bring the old tensor again."""
    old = io.read_checkpoint(TINY)
    before = checksums(server)
    assert server.post("/begin_weight_update", {}).status == 200
    for name, status in ((f"{NAME}.weight", 200), (f"{NAME}.scale", 400)):
        pair = part([0], elements(old[name])[:1], old[name].dtype)
        message = send(server, dict(zip((f"{name}.indices", f"{name}.values"), pair)), status=status)
    assert f"{NAME}" in message and "one part" in message
    assert "nothing was changed" in server.post("/end_weight_update", {}).json["message"]
    assert checksums(server) == before


def refused(size, dtype):
    n = f"{NAME}.weight"
    one, byte = np.zeros((1, SIZES[dtype]), np.uint8), np.zeros((1, 1), np.uint8)
    pair = lambda at, values, kind=dtype: dict(zip((f"{n}.indices", f"{n}.values"), part(at, values, kind)))  # noqa: E731
    bad_scale = dict(zip((f"{NAME}.scale.indices", f"{NAME}.scale.values"), part([0], np.full((1, 1), 255, np.uint8), "F8_E8M0")))
    return {
        "behind the last": (pair([size], one), "must be above -1 and below"),
        "below zero": (pair([-1], one), "must be above"),
        "twice": (pair([3, 3], np.repeat(one, 2, 0)), "must be above 3"),
        "out of order": (pair([3, 2], np.repeat(one, 2, 0)), "must be above 3"),
        "another type": (pair([3], byte, "U8"), "dtype mismatch"),
        "no values": ({f"{n}.indices": pair([3], one)[f"{n}.indices"]}, "come together"),
        "more values": ({**pair([3], one), f"{n}.values": pair([3, 4], np.repeat(one, 2, 0))[f"{n}.values"]}, "as many"),
        "indices of floats": ({**pair([3], one), f"{n}.indices": io.Tensor("F32", (1,), np.zeros(4, np.uint8))}, "I32 or I64"),
        "unknown": ({"no.such.indices": pair([3], one)[f"{n}.indices"]}, "no.such.indices"),
        "a whole tensor": ({n: pair([3], one)[f"{n}.values"]}, "unknown"),
        "a scale that is no number": (bad_scale, "scale"),
    }


def test_what_is_refused(server):
    t = io.read_checkpoint(TINY)[f"{NAME}.weight"]
    before = scores(server), checksums(server)
    for case, (delta, why) in refused(len(elements(t)), t.dtype).items():
        assert why in send(server, delta, status=400), case
    assert "needs base_version" in send(server, {}, base=None, status=400)
    assert "sha256" in send(server, {}, sha256=None, status=400)
    assert "another digest" in send(server, {}, sha256="0" * 64, status=400)
    assert "in use are default" in send(server, {}, base="older", status=400)
    assert (scores(server), checksums(server)) == before
