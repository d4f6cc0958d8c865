"""Pickles that PyTorch itself writes, in a process of its own, of whatever version is installed."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import run_hadal
from make_model import io
from serving import TINY, Server
from test_weight_updates import checksums, perturbed, scores, started_from, copy_model

SENDER = pathlib.Path(__file__).with_name("torch_sender.py")


def has_torch(python):
    try:
        return subprocess.run([python, "-c", "import torch.multiprocessing"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def python():
    for candidate in (sys.executable, "/usr/bin/python3"):
        if has_torch(candidate):
            return candidate
    pytest.skip("no Python has PyTorch (python3-torch)")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A checkpoint whose tensors any PyTorch has types for: FP8 and FP4 ones as BF16, made anew here."""
    tensors = perturbed(io.read_checkpoint(TINY), 3)
    plain = {n: t for n, t in tensors.items() if t.dtype in ("BF16", "F32", "I64")}
    folder = tmp_path_factory.mktemp("torch") / "other"
    whole = dict(io.read_checkpoint(TINY))
    whole.update({n: t for n, t in plain.items() if not n.endswith((".scale", ".weight_scale_inv"))})
    return copy_model(TINY, folder, whole), {n: whole[n] for n in plain if not n.endswith((".scale", ".weight_scale_inv"))}


def send(python, server, tensors, hows, path, **more):
    """Deals the tensors out to messages, each sent in another way."""
    at, data, parts = 0, b"", [{"tensors": [], "how": how} for how in hows]
    for i, (name, t) in enumerate(sorted(tensors.items())):
        raw = np.asarray(t.data).tobytes()
        parts[i % len(parts)]["tensors"].append([name, t.dtype, list(t.shape), at, len(raw)])
        data, at = data + raw, at + len(raw)
    (path / "data").write_bytes(data)
    job = {"port": server.port, "file": str(path / "data"), "send": parts, **more}
    result = subprocess.run([python, SENDER], input=json.dumps(job), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("how", ["alone", "shared", "strided", "parameters"])
def test_tensors_as_torch_sends_them(python, other, tmp_path, how):
    folder, tensors = other
    s = Server("--weights-dir", tmp_path)
    try:
        replies = send(python, s, tensors, [how], tmp_path)
        assert [r["status"] for r in replies] == [200], replies
        assert replies[0]["left"]["shm"] == 0, "the sender's shared memory stays behind"
        assert (scores(s), checksums(s)) == started_from(folder)
    finally:
        s.close()


def test_descriptors_are_refused_by_name(python, other, tmp_path):
    s = Server("--weights-dir", tmp_path)
    try:
        before = checksums(s)
        (reply,) = send(python, s, other[1], ["alone"], tmp_path, strategy="file_descriptor")
        assert reply["status"] == 400 and "file_system" in reply["message"] and "rebuild_storage_fd" in reply["message"]
        assert checksums(s) == before
    finally:
        s.close()


# ---- on a GPU: CUDA IPC ----

has_gpu = "\ngpu 0" in run_hadal("version").stdout
on_gpu = pytest.mark.skipif(not has_gpu, reason="needs a GPU and a build with CUDA (make CUDA=1)")
ON_GPU = {"device": "cuda"}


@on_gpu
@pytest.mark.parametrize("how", ["alone", "shared", "strided", "parameters", "uuid", "bucket", "late", "list"])
def test_tensors_on_the_gpu(python, other, tmp_path, how):
    """The server has the weights of one that starts from them; nothing of the sender's memory is held."""
    folder, tensors = other
    s = Server("--weights-dir", tmp_path)
    try:
        replies = send(python, s, tensors, [how], tmp_path, **ON_GPU)
        assert [r["status"] for r in replies] == [200], replies
        assert how == "list" or replies[0]["left"]["gpu"] == 0, replies
        assert (scores(s), checksums(s)) == started_from(folder)
    finally:
        s.close()


@on_gpu
def test_parts_are_what_was_sent(python, other, tmp_path):
    """The sender uses its memory again after each reply, before the update ends."""
    folder, tensors = other
    s = Server("--weights-dir", tmp_path)
    try:
        before = checksums(s)
        assert s.post("/begin_weight_update", {}).status == 200
        replies = send(python, s, tensors, ["alone", "bucket", "list"], tmp_path, spoil=True, **ON_GPU)
        assert [r["status"] for r in replies] == [200] * 3, replies
        assert checksums(s) == before
        assert s.post("/end_weight_update", {"parts": 3}).status == 200
        assert (scores(s), checksums(s)) == started_from(folder)
        assert s.post("/begin_weight_update", {}).status == 200
        send(python, s, tensors, ["alone"], tmp_path, **ON_GPU)  # the server goes down while it waits
    finally:
        s.close()


@on_gpu
def test_bad_memory_of_a_gpu(python, other, tmp_path):
    import base64

    s = Server("--weights-dir", tmp_path)
    try:
        before = checksums(s)
        norm = {"name": "norm.weight", "dtype": "F32", "shape": [4], "handle": base64.b64encode(bytes(64)).decode()}
        for fields, why in (({}, "opens nothing"), ({"handle": "AAAA"}, "bad handle"), ({"offset": -4}, "bad offset")):
            reply = s.post("/update_weights_from_tensor", {"cuda_ipc": [{**norm, **fields}]})
            assert reply.status == 400 and why in reply.text and "norm.weight" in reply.text, reply.text
        assert checksums(s) == before
        assert s.post("/generate", {"text": "1 + 1 =", "sampling_params": {"max_new_tokens": 2}}).status == 200
    finally:
        s.close()
