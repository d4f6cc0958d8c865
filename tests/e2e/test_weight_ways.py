"""Every way that new weights come, for the small cases of every family and for tiny-v3: afterwards a server has
the answers and the checksums of one that started from them. And what is refused beyond
test_weight_updates.py."""

import base64
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import time

import numpy as np
import pytest
from conftest import GOLDEN, ROOT
from make_model import io  # finds tools/, too
import quantize_case as q
from serving import TINY, Listening, Server, wait_until
from test_weight_delta import difference
from test_weight_delta import send as send_delta
from test_weight_updates import BUCKET, Called, checksums, copy_model, flat, of, perturbed, pickled, post_pickle, scores, send, started_from, stem, storage, torch_tensor, update
from toy_models import VOCAB, add_toy_tokenizer, make_toy_model

CASES = {p.parent.name: p.parent for p in sorted(GOLDEN.glob("*/config.json"))} | {"tiny-v3": ROOT / "models" / "tiny-v3"}
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4}


def config_of(model):
    config = json.loads((model / "config.json").read_text())
    return config.get("text_config", config)


def prompt_of(model):
    return [t % config_of(model)["vocab_size"] for t in (5, 9, 60, 7, 100, 33, 8) * 4]


def with_tokenizer(case, out):
    """A copy; a case without tokenizer gets one, and repeats rows of its vocabulary until bytes have room."""
    tensors = io.read_checkpoint(case)
    if (case / "tokenizer.json").exists():
        return copy_model(case, out, tensors)
    config = json.loads((case / "config.json").read_text())
    for n, t in list(tensors.items()):
        if "shared_experts" in n and not config.get("n_shared_experts", 1):
            del tensors[n]  # nothing reads it: below
        elif re.search(r"emb|head\.weight|tid2eid|markov_w", n) and t.shape[0] == config["vocab_size"]:
            rows = np.array(t.data).reshape(t.shape[0], -1)
            tensors[n] = io.Tensor(t.dtype, (VOCAB, t.shape[1]), rows[np.arange(VOCAB) % len(rows)].reshape(-1))
    out.mkdir()
    (out / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB}))
    io.write_checkpoint(out, tensors)
    add_toy_tokenizer(out)
    return out


def changed_tensors(old, new):
    """Those that differ, each with its scales."""
    stems = {stem(n) for n in new if not np.array_equal(old[n].data, new[n].data)}
    return {n: t for n, t in new.items() if stem(n).removesuffix(".weight_scale_inv").removesuffix("_scale_inv") in stems or stem(n) in stems}


def bucket_of(tensors, shm):
    at, data = flat(tensors)
    parts = []
    for n, t in tensors.items():
        state = {"name": n, "shape": Called(of("torch", "Size"), tuple(t.shape)), "dtype": of("torch", TORCH[t.dtype])}
        state.update(start_idx=at[n], end_idx=at[n] + len(t.data), numel=int(np.prod(t.shape)))
        parts.append(Called(of(BUCKET, "FlattenedTensorMetadata"), state=state))
    return {"flattened_tensor": torch_tensor("I8", [len(data)], shm, len(data)), "metadata": parts}, data


TORCH = {"F32": "float32", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I8": "int8"}


def by_pickle(server, old, new):
    tensors, shm = changed_tensors(old, new), f"/torch_ways_{os.getpid()}"
    at, data = flat(tensors)
    items = [(n, torch_tensor(t.dtype, t.shape, shm, len(data), at[n] // SIZES.get(t.dtype, 1))) for n, t in tensors.items()]
    with storage(data, shm):
        reply = post_pickle(server, pickled(items))
    assert reply.status == 200, reply.text


def by_bucket(server, old, new):
    shm = f"/torch_ways_{os.getpid()}"
    bucket, data = bucket_of(changed_tensors(old, new), shm)
    with storage(data, shm):
        reply = post_pickle(server, pickled(bucket), load_format="flattened_bucket")
    assert reply.status == 200, reply.text


WAYS = {
    "safetensors": lambda server, old, new: send(server, new, shared=True),
    "pickle": by_pickle,
    "flattened bucket": by_bucket,
    "delta": lambda server, old, new: send_delta(server, difference(old, new), base=server.get("/get_weight_version").json["weight_version"]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_every_way_of_every_case(case, tmp_path):
    model = with_tokenizer(CASES[case], tmp_path / "model")
    ids, old = prompt_of(model), io.read_checkpoint(model)
    new = perturbed(old, 4)
    another = copy_model(model, tmp_path / "another", new)
    fresh = Server("--weights-dir", tmp_path, model=another)
    wanted = scores(fresh, ids), checksums(fresh)
    fresh.close()
    server = Server("--weights-dir", tmp_path, model=model)
    before = scores(server, ids), checksums(server)
    assert before[0] != wanted[0]
    update(server, another, "disk")
    assert (scores(server, ids), checksums(server)) == wanted
    for name, way in WAYS.items():
        update(server, model)
        way(server, old, new)
        assert (scores(server, ids), checksums(server)) == wanted, name
    update(server, model)
    assert (scores(server, ids), checksums(server)) == before
    server.close()


def without_signed_zeros(tensors):
    """FP4's zero has no sign where exporters write it."""
    for n, t in tensors.items():
        if t.dtype == "I8":
            codes = q.unpack(np.array(t.data).reshape(t.shape))
            tensors[n] = io.Tensor(t.dtype, t.shape, q.pack(np.where(codes == 8, 0, codes)).view(np.uint8).reshape(-1))
    return tensors


@pytest.mark.parametrize("kind", ["v3 fp8", "v4 fp8", "v4 fp4"])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_plain_tensors_are_the_exported_checkpoint(tmp_path, kind, dtype):
    """What a trainer sends before its export is what a server has that started from the export."""
    family, how = kind.split()
    made = make_toy_model(family, tmp_path / "made")
    plain = {n: io.bf16(io.to_f32(t)) if dtype == "BF16" and t.dtype == "F32" and len(t.shape) == 2 else t for n, t in io.read_checkpoint(made).items()}
    stored, exported = (without_signed_zeros(q.quantize(p, how, family == "v4", 16)[0]) for p in (perturbed(plain, 1), plain))
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    (made / "config.json").write_text(json.dumps(config))
    model, another = copy_model(made, tmp_path / "model", stored), copy_model(made, tmp_path / "another", exported)
    fresh = Server("--weights-dir", tmp_path, model=another)
    wanted = scores(fresh, prompt_of(model)), checksums(fresh)
    fresh.close()
    server = Server("--weights-dir", tmp_path, model=model)
    send(server, plain, shared=True)
    assert (scores(server, prompt_of(model)), checksums(server)) == wanted
    server.close()


def test_what_nothing_reads(tmp_path):
    """A tensor that the model's own files have and nothing reads may come again, and is not taken."""
    model = with_tokenizer(CASES["v3_unusual"], tmp_path / "model")
    tensors, extra = io.read_checkpoint(model), "model.layers.1.mlp.shared_experts.down_proj.weight"
    tensors[extra] = io.read_checkpoint(CASES["v3_unusual"])[extra]
    more = copy_model(model, tmp_path / "more", tensors)
    for own, status in ((model, 400), (more, 200)):
        server = Server("--weights-dir", tmp_path, model=own)
        before = scores(server, prompt_of(model)), checksums(server)
        reply = update(server, more, status=status)
        assert status == 200 or extra in reply["message"]
        assert (scores(server, prompt_of(model)), checksums(server)) == before
        server.close()


# ---- what is refused ----


@pytest.fixture(scope="module")
def server(folder):
    s = Server("--weights-dir", folder, "--max-running", "4")
    yield s
    s.close()


NORM, MATRIX, SCALE = "norm.weight", "layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.scale"


def doubled(name):
    """A file whose header names one tensor twice."""
    t = io.read_checkpoint(TINY)[name]
    entry = json.dumps({"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [0, len(t.data)]})
    header = f'{{"{name}": {entry}, "{name}": {entry}}}'.encode()
    return len(header).to_bytes(8, "little") + header + np.asarray(t.data).tobytes()


def bad_formats():
    stored = io.read_checkpoint(TINY)
    norm, matrix, scale = stored[NORM], stored[MATRIX], stored[SCALE]
    n = norm.shape[0]
    codes = np.array(matrix.data)
    nan = codes.copy()
    nan[-1] = 0x7F
    rows = io.Tensor(scale.dtype, (scale.shape[0] * scale.shape[1], 1), np.array(scale.data))
    return {
        "integers for numbers": ({NORM: io.Tensor("I32", (n,), np.zeros(4 * n, np.uint8))}, NORM),
        "truth values": ({NORM: io.Tensor("BOOL", (n,), np.zeros(n, np.uint8))}, NORM),
        "another FP8": ({MATRIX: io.Tensor("F8_E5M2", matrix.shape, codes), SCALE: scale}, MATRIX),
        "bytes without a type": ({MATRIX: io.Tensor("U8", matrix.shape, codes), SCALE: scale}, MATRIX),
        "transposed": ({MATRIX: io.Tensor(matrix.dtype, matrix.shape[::-1], codes), SCALE: scale}, MATRIX),
        "flat": ({MATRIX: io.Tensor(matrix.dtype, (len(codes),), codes), SCALE: scale}, MATRIX),
        "more dimensions": ({NORM: io.Tensor(norm.dtype, (1, n), np.array(norm.data))}, NORM),
        "a scale of another shape": ({MATRIX: matrix, SCALE: rows}, SCALE),
        "a scale that is infinite": ({MATRIX: matrix, SCALE: io.from_array(np.full(scale.shape, np.inf, np.float32))}, SCALE),
        "a scale between powers of two": ({MATRIX: matrix, SCALE: io.from_array(np.full(scale.shape, 0.3, np.float32))}, SCALE),
        "a negative scale": ({MATRIX: matrix, SCALE: io.from_array(np.full(scale.shape, -1, np.float32))}, SCALE),
        "NaN in the last code": ({MATRIX: io.Tensor(matrix.dtype, matrix.shape, nan), SCALE: scale}, MATRIX),
    }


@pytest.mark.parametrize("case", list(bad_formats()))
def test_bad_formats(server, case):
    tensors, named = bad_formats()[case]
    before = scores(server), checksums(server)
    assert named in send(server, tensors, status=400)["message"]
    assert (scores(server), checksums(server)) == before


def test_a_tensor_that_comes_twice(server):
    before = checksums(server)
    reply = server.post("/update_weights_from_tensor", {"safetensors": base64.b64encode(doubled(NORM)).decode()})
    assert reply.status == 400 and NORM in reply.json["message"] and "duplicate" in reply.json["message"]
    data = np.asarray(io.read_checkpoint(TINY)[NORM].data).tobytes()
    with storage(data) as shm:
        t = io.read_checkpoint(TINY)[NORM]
        pair = (NORM, torch_tensor(t.dtype, t.shape, shm, len(data)))
        reply = post_pickle(server, pickled([pair, pair]))
    assert reply.status == 400 and NORM in reply.json["message"], reply.text
    assert checksums(server) == before


def test_a_folder_while_parts_are_collected(server):
    assert server.post("/begin_weight_update", {}).status == 200
    assert "in parts" in update(server, TINY, status=409)["message"]
    assert server.post("/abort_weight_update", {}).status == 200
    update(server, TINY)


class Starting(Listening):
    """A server that nobody has waited for."""

    def __init__(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]

    def first_reply(self, path, body=None):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return self.post(path, body) if body else self.get(path)
            time.sleep(0.001)


def test_while_it_starts(folder):
    """503, and the update is none of the server that comes up. Some servers are too fast to be met."""
    for _ in range(50):
        early = Starting()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            started = pool.submit(Server, "--weights-dir", folder, port=early.port)
            reply = early.first_reply("/update_weights_from_disk", {"model_path": str(TINY), "weight_version": "early"})
            server = started.result()
        version = server.get("/get_weight_version").json["weight_version"]
        server.close()
        if reply.status == 503:
            break
    assert reply.code == "starting" and version == "default" and "Retry-After" in reply.headers


def test_while_it_drains(folder, other):
    """503, and the answer on its way keeps the weights that it began with."""
    server = Server("--weights-dir", folder)
    body = {"input_ids": [605, 14, 261], "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/generate", body)
        wait_until(lambda: server.loads()["num_running_reqs"] == 1, "it runs")
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health").text == "draining", "it drains")
        for path, more in (("disk", {"model_path": str(other)}), ("tensor", {"shared_memory": "none"})):
            reply = server.post(f"/update_weights_from_{path}", {"weight_version": "late", **more})
            assert (reply.status, reply.code) == (503, "draining") and "Retry-After" in reply.headers
        spans = answer.result().json["meta_info"]["weight_versions"]
    assert spans == [{"version": "default", "start": 0, "end": 1000}]
    server.close()
