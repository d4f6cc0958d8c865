"""The clients of trainers, as PyPI has them, in whole cycles: they sample, score, and change the weights.

    .venv/bin/pip install --no-deps --target .venv/trainers -r tests/requirements-trainers.txt
"""

import base64
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from make_model import io
from serving import TINY, Server
from test_routes import second_path
from test_weight_updates import IDS, flat, pickled, started_from, storage, torch_tensor

CLIENT = pathlib.Path(__file__).with_name("trainer_client.py")
PACKAGES = pathlib.Path(os.environ.get("HADAL_TRAINERS", ROOT / ".venv" / "trainers"))

@pytest.fixture(scope="module")
def server(folder):
    s = Server("--weights-dir", folder, "--routed-experts", "--max-running", 8)
    yield s
    s.close()


def run(trainer, job):
    if not (PACKAGES / trainer).is_dir():
        pytest.skip(f"{trainer} is not installed: tests/requirements-trainers.txt says how")
    env = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    result = subprocess.run([sys.executable, CLIENT, trainer], input=json.dumps(job), capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def rescored(server, ids, answer):
    """Raw log-probabilities of the answer, as this server gives them."""
    body = {"input_ids": ids + answer, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0, "logprob_mode": "raw"}
    return [x[0] for x in server.post("/generate", body).json["meta_info"]["input_token_logprobs"]][-len(answer) :]


def test_areal(server, other, tmp_path):
    """Pause, update by disk, continue; answers with experts; scores; memory between rollouts."""
    folders = [str(TINY), str(other), str(TINY)]
    out = run("areal", {"url": f"http://127.0.0.1:{server.port}", "ids": IDS, "folders": folders})
    assert len(out) == 4
    for answer, model in zip(out, [TINY, other, TINY, TINY]):
        assert answer["stop"] == "length" and len(answer["tokens"]) == len(answer["logprobs"]) == 24
        (experts,) = second_path(model, [IDS + answer["tokens"]], tmp_path)
        assert np.array_equal(answer["routes"], experts[:-1])
        if model == TINY:
            assert answer["scores"] == rescored(server, IDS, answer["tokens"])
        else:
            fresh = Server(model=model)
            assert answer["scores"] == rescored(fresh, IDS, answer["tokens"])
            fresh.close()


def test_verl(server, other):
    """Pickles of tensors that share a storage by name, from the adapter and the asynchronous one."""
    names = ["norm.weight", "layers.1.attn.wq_a.weight", "layers.1.attn.wq_a.scale"]

    def message(model, name):
        tensors = {n: io.read_checkpoint(model)[n] for n in names}
        at, data = flat(tensors)
        size = {"F32": 4, "BF16": 2}
        items = [(n, torch_tensor(t.dtype, t.shape, name, len(data), at[n] // size.get(t.dtype, 1))) for n, t in tensors.items()]
        return [base64.b64encode(pickled(items)).decode()], data

    shm = [f"/torch_verl_{i}_{os.getpid()}" for i in range(2)]
    new, new_data = message(other, shm[0])
    old, old_data = message(TINY, shm[1])
    before = server.stats()["hadal_weight_updates_total"]
    with storage(new_data, shm[0]), storage(old_data, shm[1]):
        out = run("verl", {"port": server.port, "ids": IDS, "new": new, "old": old})
    assert out["update"]["success"] and out["async"]["success"]
    assert server.stats()["hadal_weight_updates_total"] == before + 2
    assert out["before"] == out["again"] == started_from(TINY)[0][1] != out["after"]
