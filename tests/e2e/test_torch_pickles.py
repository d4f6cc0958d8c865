"""Pickles that PyTorch itself writes, in a process of its own, of whatever version is installed."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
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
