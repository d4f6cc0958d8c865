"""New weights under a running server: an updated server is one started from the other checkpoint, and
a refused update changes nothing."""

import base64
import concurrent.futures
import contextlib
import json
import os
import pickle
import shutil
import struct
import sys
import types
from unittest import mock

import numpy as np
import pytest
from make_model import io  # finds tools/, too
import quantize_case as q
from serving import TINY, Server, wait_until
from toy_models import make_toy_model

IDS = [605, 14, 261, 1129, 1597, 88, 40, 7, 300, 41, 9, 12] * 3
SMALL = f"/hadal-small-{os.getpid()}"  # builds are tested side by side
SCALES = (".scale", ".weight_scale_inv")


def perturbed(tensors, seed):
    """Another model of the same shapes and formats: numbers are permuted, or have other signs."""
    random = np.random.default_rng(seed)
    out = {}
    for name, t in tensors.items():
        data = np.array(t.data)
        if t.dtype in ("F8_E4M3", "I8", "U8"):
            data = random.permutation(data.reshape(-1)).reshape(data.shape)
        elif t.dtype in ("F32", "BF16", "F16") and not name.endswith(SCALES):
            raw = data.reshape(-1).view({"F32": "<u4", "BF16": "<u2", "F16": "<u2"}[t.dtype])
            data = random.permutation(raw).view(np.uint8).reshape(data.shape)
        out[name] = io.Tensor(t.dtype, t.shape, data)
    return out


def copy_model(model, out, tensors):
    shutil.copytree(model, out, symlinks=True, ignore=lambda *_: ["model.safetensors"])
    io.write_checkpoint(out, tensors)
    return out


@pytest.fixture(scope="module")
def server(folder, other):
    s = Server("--weights-dir", folder, "--max-running", "8")
    yield s
    s.close()


@pytest.fixture(autouse=True)
def back(request):
    """Every test finds the weights of the model's own folder."""
    yield
    if "server" in request.fixturenames:
        update(request.getfixturevalue("server"), TINY, "default")


def update(server, path, version=None, status=200, **more):
    reply = server.post("/update_weights_from_disk", {"model_path": str(path), "weight_version": version, **more})
    assert reply.status == status, reply.text
    assert reply.json["success"] == (status == 200)
    return reply.json


def send(server, tensors, status=200, shared=False, tmp_name=f"/hadal-test-{os.getpid()}", **more):
    data = io.file_bytes(tensors)
    if shared:
        with open("/dev/shm" + tmp_name, "wb") as f:
            f.write(data)
        more["shared_memory"] = tmp_name
    else:
        more["safetensors"] = base64.b64encode(data).decode()
    try:
        reply = server.post("/update_weights_from_tensor", more)
    finally:
        if shared:
            os.unlink("/dev/shm" + tmp_name)
    assert reply.status == status, reply.text
    assert reply.json["success"] == (status == 200)
    return reply.json


def checksums(server):
    reply = server.post("/weights_checker", {"action": "checksum"})
    assert reply.status == 200, reply.text
    return reply.json["ranks"][0]["checksums"]


def scores(server, ids=IDS, n=24):
    """Log-probabilities of a prompt and of what follows, as written: bit for bit."""
    sampling = {"max_new_tokens": n, "temperature": 0.7, "sampling_seed": 3, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    info = server.post("/generate", body).json["meta_info"]
    return info["input_token_logprobs"], info["output_token_logprobs"]


def started_from(model):
    s = Server("--weights-dir", model, model=model)
    try:
        return scores(s), checksums(s)
    finally:
        s.close()


# ---- an updated server is one started from that checkpoint ----


def test_from_disk(server, other):
    before = scores(server), checksums(server)
    reply = update(server, other, "step-1", flush_cache=False)
    assert reply["message"] == "Succeeded to update model weights."
    assert (scores(server), checksums(server)) == started_from(other)
    info = server.get("/model_info").json
    assert (info["model_path"], info["weight_version"]) == (str(other), "step-1")
    assert server.get("/get_weight_version").json == {"weight_version": "step-1"}
    update(server, TINY, "step-2", flush_cache=False)
    assert (scores(server), checksums(server)) == before


@pytest.mark.parametrize("kind", ["v2", "v3", "v32", "v4", "v3 fp8", "v4 fp4", "v3 nvfp4"])
def test_every_family(tmp_path, kind):
    family, *quantized = kind.split()
    model = make_toy_model(family, tmp_path / "model")
    if quantized:
        plain, is_v4 = io.read_checkpoint(model), family == "v4"
        io.write_checkpoint(model, q.quantize(plain, quantized[0], is_v4, 16)[0])
        config = json.loads((model / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
        if quantized[0] == "nvfp4":
            config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        (model / "config.json").write_text(json.dumps(config))
    tensors = perturbed(io.read_checkpoint(model), 2)
    another = copy_model(model, tmp_path / "another", tensors)
    ids = [5, 9, 60, 7, 100, 33, 8] * 4
    fresh = Server(model=another)
    wanted = scores(fresh, ids)
    fresh.close()
    s = Server("--weights-dir", tmp_path, model=model)
    before = scores(s, ids), checksums(s)
    assert before[0] != wanted
    update(s, another)
    assert scores(s, ids) == wanted
    update(s, model)
    assert (scores(s, ids), checksums(s)) == before
    send(s, tensors, shared=True)
    assert scores(s, ids) == wanted
    s.close()


def test_one_tensor_alone_and_in_parts(server, other):
    """Parts wait for the end: until then every answer is the old model's."""
    tensors = io.read_checkpoint(other)
    before = scores(server), checksums(server)
    name = "layers.0.attn.wq_a.weight"
    send(server, {n: tensors[n] for n in (name, name.replace(".weight", ".scale"))})
    after = checksums(server)
    assert {n for n in after if after[n] != before[1][n]} == {name}
    update(server, TINY)
    assert server.post("/begin_weight_update", {"selector": "all"}).status == 200
    assert server.post("/begin_weight_update", {}).status == 400
    names = list(tensors)
    for i in range(3):  # a scale travels with its tensor
        part = {n: tensors[n] for n in names if sum(stem(n).encode()) % 3 == i}
        send(server, part, shared=True, weight_version=f"part-{i}")
        assert (scores(server), checksums(server)) == before
    assert server.post("/end_weight_update", {}).status == 200
    assert (scores(server), checksums(server)) == started_from(other)
    assert server.get("/get_weight_version").json["weight_version"] == "part-2"
    assert server.post("/end_weight_update", {}).status == 400


def stem(name):
    return name.removesuffix(".weight").removesuffix(".scale")


def test_a_refused_part_refuses_the_whole(server, other):
    tensors = io.read_checkpoint(other)
    before = checksums(server)
    assert server.post("/begin_weight_update").status == 200
    send(server, {"norm.weight": tensors["norm.weight"]})
    send(server, {"no.such.weight": tensors["norm.weight"]}, status=400)
    assert "nothing was changed" in server.post("/end_weight_update", {}).json["message"]
    assert checksums(server) == before


def test_selector(server, other):
    before = checksums(server)
    update(server, other, selector="draft")
    changed = {n for n, h in checksums(server).items() if h != before[n]}
    assert changed and all(n.startswith("mtp.") for n in changed)
    update(server, TINY)
    update(server, other, disable_draft_model=True)
    changed = {n for n, h in checksums(server).items() if h != before[n]}
    assert changed and not any(n.startswith("mtp.") for n in changed)


# ---- pickles, as PyTorch's multiprocessing writes them ----


class Named:
    """A class or function of a module that is not here: its name is all that a pickle has of it."""

    def __init__(self, module, name):
        self.__module__, self.__qualname__, self.__name__ = module, name, name

    def __reduce__(self):
        return self.__name__

    def __call__(self, *_):
        raise AssertionError("only pickled")


class Called:
    def __init__(self, name, *args, state=None):
        self.parts = (name, args) if state is None else (name, args, state)

    def __reduce__(self):
        return self.parts


REDUCTIONS, BUCKET = "torch.multiprocessing.reductions", "sglang.srt.weight_sync.tensor_bucket"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I8": "int8", "F64": "float64"}


def global_names(*names):
    """Modules in sys.modules with these names, for as long as they are pickled."""
    made = {}
    for module, name in names:
        for end in [i for i, c in enumerate(module + ".") if c == "."]:
            made.setdefault(module[:end], types.ModuleType(module[:end]))
        setattr(made[module], name, Named(module, name))
    return made


def pickled(value, protocol=4):
    with mock.patch.dict(sys.modules, MODULES):
        return pickle.dumps(value, protocol)


MODULES = global_names(
    *[("torch", n) for n in ("Size", "Tensor", "UntypedStorage", *DTYPES.values())],
    *[(REDUCTIONS, f"rebuild_{n}") for n in ("tensor", "typed_storage", "storage_filename", "storage_fd", "cuda_tensor")],
    (BUCKET, "FlattenedTensorMetadata"),
)


def of(module, name):
    return getattr(MODULES[module], name)


def torch_tensor(dtype, shape, shm, storage_bytes, offset=0, stride=None):
    """What ForkingPickler writes for a tensor whose storage has a name."""
    if stride is None:
        stride = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    untyped = Called(of(REDUCTIONS, "rebuild_storage_filename"), of("torch", "UntypedStorage"), b"/manager", shm.encode(), storage_bytes)
    storage = Called(of(REDUCTIONS, "rebuild_typed_storage"), untyped, of("torch", DTYPES[dtype]))
    where = (offset, Called(of("torch", "Size"), tuple(shape)), tuple(stride), False)
    return Called(of(REDUCTIONS, "rebuild_tensor"), of("torch", "Tensor"), storage, where)


@contextlib.contextmanager
def storage(data, name=f"/torch_hadal_{os.getpid()}"):
    """A storage as PyTorch lays it out: a count of users, then the bytes."""
    with open("/dev/shm" + name, "wb") as f:
        f.write(bytes(64) + data)
    yield name
    os.unlink("/dev/shm" + name)


def post_pickle(server, data, **more):
    return server.post("/update_weights_from_tensor", {"serialized_named_tensors": [base64.b64encode(data).decode()], **more})


def flat(tensors):
    at, data = {}, b""
    for name, t in tensors.items():
        at[name] = len(data)
        data += np.asarray(t.data).tobytes()
    return at, data


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_pickled_tensors(server, other, protocol):
    names = ["norm.weight", "layers.1.attn.wq_a.weight", "layers.1.attn.wq_a.scale", "layers.0.ffn.experts.0.w1.weight", "layers.0.ffn.experts.0.w1.scale"]
    tensors = {n: io.read_checkpoint(other)[n] for n in names}
    at, data = flat(tensors)
    before = checksums(server)
    with storage(data) as shm:
        if protocol % 2:  # the two forms that trainers use
            item = lambda n, t: (n, torch_tensor(t.dtype, t.shape, shm, len(data), at[n] // {"F32": 4, "BF16": 2}.get(t.dtype, 1)))  # noqa: E731
            reply = post_pickle(server, pickled([item(n, t) for n, t in tensors.items()], protocol))
        else:
            parts = []
            for n, t in tensors.items():
                state = {"name": n, "shape": Called(of("torch", "Size"), tuple(t.shape)), "dtype": of("torch", DTYPES[t.dtype])}
                state.update(start_idx=at[n], end_idx=at[n] + len(t.data), numel=int(np.prod(t.shape)))
                parts.append(Called(of(BUCKET, "FlattenedTensorMetadata"), state=state))
            whole = torch_tensor("I8", [len(data)], shm, len(data))
            reply = post_pickle(server, pickled({"flattened_tensor": whole, "metadata": parts}, protocol), load_format="flattened_bucket")
    assert reply.status == 200, reply.text
    now = checksums(server)
    assert {n for n in now if now[n] != before[n]} == set(names) - {n for n in names if n.endswith(".scale")}
    got = server.post("/get_weights_by_name", {"name": "norm.weight", "truncate_size": 10**5}).json
    assert np.float32(got).tolist() == io.to_f32(tensors["norm.weight"]).tolist()


def bad_pickles(shm, size):
    norm = torch_tensor("F32", [4], shm, size)
    good = pickled([("norm.weight", norm)])
    deep = b"\x80\x04" + b")" + b"\x85" * 10**6 + b"."
    return {
        "os.system": (pickle.dumps([("norm.weight", Called(os.system, "touch /tmp/hadal-was-here"))]), "system"),
        "eval": (pickle.dumps(Called(eval, "1")), "list"),
        "a million tuples": (deep, "list"),
        "2^62 bytes": (b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.", "ends early"),
        "a memo far away": (b"\x80\x04Kar\xff\xff\xff\x7f.", "memo"),
        "unknown instruction": (b"\x80\x04i.", "0x69"),
        "persistent id": (b"\x80\x02X\x01\x00\x00\x00aQ.", "0x51"),
        "empty stack": (b"\x80\x04.", "stack is empty"),
        "cut": (good[: len(good) // 2], "ends early"),
        "followed": (good + b"x", "after its end"),
        "nothing": (b"", "no base64"),
        "a number": (pickle.dumps(7), "list"),
        "no pair": (pickle.dumps([("norm.weight",)]), "list"),
        "past the storage": (pickled([("norm.weight", torch_tensor("F32", [4], shm, 8))]), "past the end"),
        "another offset": (pickled([("norm.weight", torch_tensor("F32", [4], shm, size, offset=2**61))]), "norm.weight"),
        "too large a storage": (pickled([("norm.weight", torch_tensor("F32", [4], shm, 2**40))]), "too small"),
        "huge shape": (pickled([("norm.weight", torch_tensor("F32", [2**40, 2**40], shm, size))]), "overflow"),
        "strides": (pickled([("norm.weight", torch_tensor("F32", [2, 2], shm, size, stride=(1, 2**40)))]), "past the end"),
        "far strides": (pickled([("norm.weight", torch_tensor("F32", [2, 2], shm, size, stride=(2**61, 2**61)))]), "farther"),
        "few strides": (pickled([("norm.weight", torch_tensor("F32", [2, 2], shm, size, stride=(2,)))]), "bad strides"),
        "repeated": (pickled([("norm.weight", torch_tensor("F32", [2, 2**50], shm, size, stride=(0, 0)))]), "larger than its storage"),
        "no such storage": (pickled([("norm.weight", torch_tensor("F32", [4], "/torch_none", size))]), "/torch_none"),
        "a path": (pickled([("norm.weight", torch_tensor("F32", [4], "/../../etc/passwd", size))]), "no name of shared memory"),
        "a descriptor": (pickled([("norm.weight", Called(of(REDUCTIONS, "rebuild_tensor"), 0, Called(of(REDUCTIONS, "rebuild_typed_storage"), Called(of(REDUCTIONS, "rebuild_storage_fd"), 1, 2, 3), of("torch", "float32")), (0, Called(of("torch", "Size"), (4,)), (1,), False)))]), "file_system"),
        "CUDA": (pickled([("norm.weight", Called(of(REDUCTIONS, "rebuild_cuda_tensor"), 1, 2))]), "rebuild_cuda_tensor"),
        "F64": (pickled([("norm.weight", torch_tensor("F64", [4], shm, size))]), "norm.weight"),
    }  # fmt: skip


@pytest.mark.parametrize("case", list(bad_pickles("/x", 64)))
def test_bad_pickles(server, case):
    before = checksums(server)
    with storage(bytes(64)) as shm:
        data, named = bad_pickles(shm, 64)[case]
        reply = post_pickle(server, data)
    assert reply.status == 400 and named in reply.json["message"], reply.text
    assert checksums(server) == before and not os.path.exists("/tmp/hadal-was-here")


# ---- rounding ----


def power_of_two_up(x):
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)


def exported(w, kind):
    """(codes, scales) as tools/train_tiny/quantize.py rounds a matrix."""
    rows, cols, largest = (128, 128, 448) if kind == "fp8" else (1, 32, 6)
    s = power_of_two_up(np.maximum(q.block_max(w, rows, cols), np.float32(1e-12)) / np.float32(largest))
    x = w / q.spread(s, w.shape, rows, cols)
    if kind == "fp8":
        return q.e4m3_encode(x), s
    code = q.e2m1_encode(x)
    return q.pack(np.where(code == 8, 0, code)), s


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_plain_tensors_are_rounded_as_the_export_does(server, dtype):
    """A zero block and a block of one tiny number included."""
    cases = {"layers.1.attn.wq_b.weight": "fp8", "layers.1.ffn.experts.3.w2.weight": "fp4"}
    stored = io.read_checkpoint(TINY)
    for name, kind in cases.items():
        shape = list(stored[name].shape)
        shape[1] *= 1 + (kind == "fp4")
        w = np.random.default_rng(5).normal(0, 0.02, shape).astype(np.float32)
        w[:128, :128] = 0
        w[130, 40] = 1e-20
        w[131, 32:64] = np.float32(6 * 2.0**-7)
        t = io.bf16(w) if dtype == "BF16" else io.from_array(w)
        w = io.to_f32(t)
        send(server, {name: t}, shared=True)
        codes, s = exported(w, kind)
        got = np.array(server.post("/get_weights_by_name", {"name": name, "truncate_size": 4096}).json)
        scale = np.array(server.post("/get_weights_by_name", {"name": stem(name) + ".scale", "truncate_size": 4096}).json)
        assert (scale.astype(np.float32) == s).all()
        assert (got == (q.E4M3[codes] if kind == "fp8" else codes.view(np.int8))).all()


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_nvfp4_is_rounded_by_the_global_scale_that_it_has(tmp_path, dtype):
    """The export of the same numbers has the same bytes; of larger ones, the old global scale."""
    model = make_toy_model("v3", tmp_path / "model")
    plain = {n: io.bf16(io.to_f32(t)) if dtype == "BF16" else t for n, t in io.read_checkpoint(model).items()}
    stored = q.quantize({n: io.from_array(io.to_f32(t)) for n, t in plain.items()}, "nvfp4", False, 16)[0]
    io.write_checkpoint(model, stored)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}))
    names = [n for n in plain if f"{n}_scale_2" in stored]
    assert len(names) > 10
    s = Server("--weights-dir", tmp_path, model=model)
    before = checksums(s)
    name = names[0]
    w = io.to_f32(plain[name])
    w[1, :16], w[2, 16:32] = 0, -1e-9
    send(s, {name: io.from_array(w / 2)}, shared=True)
    whole = np.array(io.to_f32(stored[f"{name}_scale_2"])).reshape(())
    scale = q.e4m3_encode(np.where((amax := q.block_max(w / 2, 1, 16)) > 0, amax / (np.float32(6) * whole), 1))
    with np.errstate(divide="ignore"):
        codes = q.pack(q.e2m1_encode(w / 2 / q.spread(np.maximum(q.E4M3[scale], 1e-30) * whole, w.shape, 1, 16)))
    read = lambda n: np.array(s.post("/get_weights_by_name", {"name": n, "truncate_size": 4096}).json)  # noqa: E731
    assert (read(f"{name}_scale") == q.E4M3[scale]).all() and (read(name) == codes).all()
    assert checksums(s) != before
    largest = np.abs(io.to_f32(plain[name])).max()
    w[0, 0] = 3 * largest
    reply = send(s, {name: io.from_array(w)}, 400, shared=True)
    assert name in reply["message"] and "too large" in reply["message"]
    send(s, {n: plain[n] for n in names}, shared=True)
    assert checksums(s) == before
    s.close()


def test_rounding_what_was_rounded_changes_nothing(server):
    """Dequantized, sent as F32 and rounded again: the same hashes, unless a block's largest code
    was rounded below half of the range, which the export of the dequantized model would change, too."""
    tensors = io.read_checkpoint(TINY)
    before = checksums(server)
    plain = {}
    for name, t in tensors.items():
        scale = tensors.get(stem(name) + ".scale")
        if name.endswith(".weight") and scale is not None and t.dtype == "F8_E4M3":
            s = q.e8m0_decode(np.array(scale.data).reshape(scale.shape))
            w = q.E4M3[np.array(t.data).reshape(t.shape)] * q.spread(s, t.shape, 128, 128)
            if (exported(w, "fp8")[1] == s).all():
                plain[name] = io.from_array(w)
    assert len(plain) > 20
    send(server, plain, shared=True)
    assert checksums(server) == before


# ---- versions ----


def test_spans_and_recomputation(server, other):
    """Updates under running requests: every token belongs to the version its span names. A server of
    that version gives the same log-probabilities, bit for bit, as KV is computed anew."""
    sampling = {"max_new_tokens": 160, "temperature": 0.9, "ignore_eos": True}
    folders = {"a": TINY, "b": other}
    update(server, TINY, "a")

    def ask(seed):
        body = {"input_ids": IDS[: 4 + seed], "sampling_params": {**sampling, "sampling_seed": seed}, "return_logprob": True}
        return server.post("/generate", body).json

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, seed) for seed in range(4)]
        tokens = lambda: server.stats()["hadal_generation_tokens_total"]  # noqa: E731
        for version in ("b", "a", "b"):
            start = tokens()
            wait_until(lambda: tokens() > start + 60 or all(a.done() for a in asked), "tokens come")  # noqa: B023
            update(server, folders[version], version)
        answers = [a.result() for a in asked]
    spans = [a["meta_info"]["weight_versions"] for a in answers]
    assert max(len(s) for s in spans) > 1
    for s, a in zip(spans, answers):
        assert s[0]["start"] == 0 and s[-1]["end"] == 160 and s[-1]["version"] == a["meta_info"]["weight_version"]
        assert all(x["end"] == y["start"] and x["version"] != y["version"] for x, y in zip(s, s[1:]))
    checked = 0
    for version, path in folders.items():
        update(server, path, version)
        for seed, (s, a) in enumerate(zip(spans, answers)):
            prompt, output = IDS[: 4 + seed], a["output_ids"]
            body = {
                "input_ids": prompt + output,
                "sampling_params": {"max_new_tokens": 0, "temperature": 0.9},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            again = server.post("/generate", body).json["meta_info"]["input_token_logprobs"][len(prompt) :]
            for span in s:
                if span["version"] == version:
                    part = slice(span["start"], span["end"])
                    assert a["meta_info"]["output_token_logprobs"][part] == again[part]
                    checked += span["end"] - span["start"]
    assert checked == 4 * 160


def test_nothing_old_is_matched(server, other):
    body = {"input_ids": IDS * 20, "sampling_params": {"max_new_tokens": 1}}
    cached = lambda: server.post("/generate", body).json["meta_info"]["cached_tokens"]  # noqa: E731
    cached()
    assert cached() > 0
    update(server, other, flush_cache=False)
    assert cached() == 0 and cached() > 0


def test_the_version_alone(server):
    reply = server.post("/update_weight_version", {"new_version": "named", "abort_all_requests": False})
    assert reply.json == {"success": True, "message": "Weight version updated.", "new_version": "named"}
    assert server.get("/model_info").json["weight_version"] == "named"
    assert scores(server)
    for bad in ("", "v" * 10240, 7):
        assert server.post("/update_weight_version", {"new_version": bad}).status == 400
        update(server, TINY, bad, status=400)
    assert server.get("/get_weight_version").json["weight_version"] == "named"


def test_the_cycle_of_a_trainer(server, other):
    """What miles and slime call, in this order."""
    assert server.get("/health_generate").status == 200
    cycle = [
        ("/pause_generation", {"mode": "retract"}),
        ("/flush_cache", None),
        ("/begin_weight_update", {}),
        ("tensors", None),
        ("/end_weight_update", {"weight_version": "7", "flush_cache": True}),
        ("/continue_generation", {}),
    ]
    for path, body in cycle:
        if path == "tensors":
            send(server, io.read_checkpoint(other), shared=True)
        else:
            reply = server.post(path, body)
            assert reply.status == 200, (path, reply.text)
    assert server.get("/get_weight_version").json["weight_version"] == "7"
    figures = server.stats()
    assert figures["hadal_weight_updates_total"] > 0 and figures["hadal_weight_update_seconds_total"] > 0


# ---- the checker ----


def test_checker(server):
    check = lambda action, **more: server.post("/weights_checker", {"action": action, **more})  # noqa: E731
    before = checksums(server)
    assert check("snapshot").status == 200 and check("compare").status == 200
    reply = check("reset_tensors", skip_tensor_list=["layers.0.", "norm.weight"])
    assert reply.status == 200, reply.text
    after = checksums(server)
    changed = {n for n in before if after[n] != before[n]}
    assert "layers.1.attn.wq_a.weight" in changed and not any(n.startswith("layers.0.") for n in changed)
    reply = check("compare")
    assert reply.status == 400 and "differ from the snapshot" in reply.json["message"]
    update(server, TINY)
    assert check("compare").status == 200 and checksums(server) == before
    for body in ({"action": "sum"}, {"action": 3}, {"action": "reset_tensors", "skip_tensor_list": "x"}):
        assert server.post("/weights_checker", body).status == 400
    assert server.get("/weights_checker").json["ranks"][0]["checksums"] == before


def test_values_by_name(server):
    name = "layers.0.attn.q_norm.weight"
    t = io.read_checkpoint(TINY)[name]
    reply = server.get(f"/get_weights_by_name?name={name}")
    assert np.float32(reply.json).tolist() == io.to_f32(t)[:100].tolist()
    assert server.post("/get_weights_by_name", {"name": "no.such"}).status == 400
    assert server.post("/get_weights_by_name", {"name": name, "truncate_size": 0}).status == 400


# ---- bad input ----


def bad_tensors():
    stored = io.read_checkpoint(TINY)
    norm, matrix, scale = "norm.weight", "layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.scale"
    f32 = lambda a: io.from_array(np.float32(a))  # noqa: E731
    wide = io.to_f32(stored[norm])
    nan = wide.copy()
    nan[3] = np.nan
    inf = wide.copy()
    inf[0] = np.inf
    zeros = io.Tensor("F8_E8M0", stored[scale].shape, np.full_like(np.array(stored[scale].data), 255))
    return {
        "unknown": ({"no.such.weight": stored[norm]}, "no.such.weight"),
        "misshapen": ({norm: f32(wide[:-1])}, norm),
        "NaN": ({norm: f32(nan)}, norm),
        "infinite": ({norm: f32(inf)}, norm),
        "NaN to be rounded": ({matrix: f32(np.full(stored[matrix].shape, np.nan))}, matrix),
        "F64": ({norm: io.Tensor("F64", wide.shape, np.float64(wide).view(np.uint8))}, norm),
        "no scale": ({matrix: stored[matrix]}, matrix),
        "scale alone": ({scale: stored[scale]}, scale),
        "NaN scale": ({matrix: stored[matrix], scale: zeros}, scale),
        "twice": ({"head.weight": stored["head.weight"], "lm_head.weight": stored["head.weight"]}, "lm_head.weight"),
        "a table out of range": ({"layers.0.ffn.gate.tid2eid": tables(stored)}, "tid2eid"),
    }


def tables(stored):
    t = next(t for n, t in stored.items() if "tid2eid" in n)
    data = np.array(t.data).copy().reshape(-1).view("<i8" if t.dtype == "I64" else "<i4")
    data[5] = 10**6
    return io.Tensor(t.dtype, t.shape, data.view(np.uint8))


@pytest.mark.parametrize("case", list(bad_tensors()))
def test_bad_tensors(server, case):
    tensors, named = bad_tensors()[case]
    before = scores(server), checksums(server)
    good = io.read_checkpoint(TINY)
    for company in ({}, {"layers.1.attn_norm.weight": io.from_array(io.to_f32(good["layers.1.attn_norm.weight"]) * 2)}):
        reply = send(server, {**company, **tensors}, status=400, shared=True)
        assert named in reply["message"]
    assert (scores(server), checksums(server)) == before


def test_bad_folders(server, folder, other, tmp_path):
    before = checksums(server)
    tensors = io.read_checkpoint(TINY)
    short = copy_model(TINY, folder / "short", {n: t for n, t in tensors.items() if n != "norm.weight"})
    cut = copy_model(TINY, folder / "cut", tensors)
    os.truncate(cut / "model.safetensors", 1_000_000)
    family = make_toy_model("v3", folder / "family")
    sizes = copy_model(TINY, folder / "sizes", tensors)
    config = json.loads((sizes / "config.json").read_text())
    (sizes / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    words = copy_model(TINY, folder / "words", tensors)
    (words / "tokenizer.json").write_text((words / "tokenizer.json").read_text() + " ")
    outside = copy_model(TINY, tmp_path / "outside", tensors)
    (folder / "link").symlink_to(outside)
    rows = {
        short: "norm.weight", cut: "model.safetensors", family: "model_type", sizes: "rms_norm_eps",
        words: "tokenizer", outside: "--weights-dir", folder / "link": "--weights-dir", folder / "none": "none",
        folder: "config.json", "/etc": "--weights-dir",
    }  # fmt: skip
    for path, named in rows.items():
        assert named in update(server, path, status=400)["message"], path
    assert checksums(server) == before and scores(server)


BAD_BODIES = [
    ("/update_weights_from_disk", {}),
    ("/update_weights_from_disk", {"model_path": 5}),
    ("/update_weights_from_disk", {"model_path": str(TINY), "load_format": "pt"}),
    ("/update_weights_from_disk", {"model_path": str(TINY), "keep_pause": "yes"}),
    ("/update_weights_from_disk", {"model_path": str(TINY), "selector": "half"}),
    ("/update_weights_from_tensor", {}),
    ("/update_weights_from_tensor", {"safetensors": "AAA"}),
    ("/update_weights_from_tensor", {"safetensors": "!!!!"}),
    ("/update_weights_from_tensor", {"safetensors": ""}),
    ("/update_weights_from_tensor", {"safetensors": "AAAA", "shared_memory": "/x"}),
    ("/update_weights_from_tensor", {"shared_memory": "/hadal-none"}),
    ("/update_weights_from_tensor", {"shared_memory": "../etc/passwd"}),
    ("/update_weights_from_tensor", {"shared_memory": ""}),
    ("/update_weights_from_tensor", {"safetensors": "AAAA", "load_format": "pickle"}),
    ("/begin_weight_update", {"selector": 1}),
    ("/update_weight_version", {}),
]


@pytest.mark.parametrize("path, body", BAD_BODIES)
def test_bad_bodies(server, path, body):
    before = checksums(server)
    reply = server.post(path, body)
    assert reply.status == 400 and not reply.json["success"] and reply.json["message"]
    assert checksums(server) == before


def test_shared_memory_that_is_too_small_or_another_users(server):
    for data in (b"", b"1234567", struct.pack("<Q", 2**62) + b"{}"):
        with open(f"/dev/shm{SMALL}", "wb") as f:
            f.write(data)
        assert server.post("/update_weights_from_tensor", {"shared_memory": SMALL}).status == 400
    if os.geteuid() == 0:
        os.chown(f"/dev/shm{SMALL}", 12345, 12345)
        reply = server.post("/update_weights_from_tensor", {"shared_memory": SMALL})
        assert reply.status == 400 and "another user" in reply.json["message"]
    os.unlink(f"/dev/shm{SMALL}")


def test_two_at_once(server, other):
    """One of them has the weights; the other is told so."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda i: server.post("/update_weights_from_disk", {"model_path": str([TINY, other][i % 2])}), range(12)))
    assert {r.status for r in replies} <= {200, 409} and any(r.status == 200 for r in replies)


# ---- the file ----


def test_rewriting_the_file_does_not_reach_the_model(tmp_path):
    model = copy_model(TINY, tmp_path / "model", io.read_checkpoint(TINY))
    s = Server("--weights-dir", tmp_path, model=model)
    before = scores(s), checksums(s)
    with open(model / "model.safetensors", "r+b") as f:
        f.seek(1_000_000)
        f.write(os.urandom(8_000_000))
    s.post("/flush_cache")
    assert (scores(s), checksums(s)) == before
    os.truncate(model / "model.safetensors", 0)
    s.post("/flush_cache")
    assert (scores(s), checksums(s)) == before
    s.close()


def test_without_the_option_weights_are_fixed():
    s = Server()
    for path in ("/update_weights_from_disk", "/update_weights_from_tensor", "/begin_weight_update", "/weights_checker"):
        reply = s.post(path, {"model_path": str(TINY)})
        assert reply.status == 501 and "--weights-dir" in reply.text
    assert s.get("/get_weight_version").json == {"weight_version": "default"}
    reply = s.post("/init_weights_update_group", {})
    assert reply.status == 501 and "NCCL" in reply.text
    s.close()


def test_what_has_no_weights_to_replace():
    for flags, why in ((["--backend", "null"], "null"), (["--tp", "4", "--ep", "2", "--rebalance", "auto"], "experts are cut")):
        with pytest.raises(AssertionError, match=why):
            Server("--weights-dir", str(TINY), *flags)


