"""Sends tensors to a server as trainers do: real PyTorch, run by whatever Python has it. Its standard
input is a JSON object: port, and what to send, each a list of named tensors by how they are made.

    {"port": 30000, "send": [{"tensors": [["norm.weight", "bf16", [256]]], "how": "views"}], "device": "cuda"}

Values are the bytes of a file, where each tensor begins at an offset. Every reply is a line, with what
is left of the memory that was sent, when nothing here holds it any more.
"""

import base64
import gc
import io
import json
import os
import sys
import types
import urllib.error
import urllib.request
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32, "I8": torch.int8,
          "F8_E4M3": getattr(torch, "float8_e4m3fn", None), "F8_E8M0": getattr(torch, "float8_e8m0fnu", None)}  # fmt: skip


def tensor(data, dtype, shape):
    t = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return t.view(DTYPES[dtype]).reshape(shape)


def shaped(tensors, how):
    """alone: a storage each; shared: views of one storage; strided: views that skip and turn;
    parameters: as a module has them."""
    if how == "shared":
        parts = [t.reshape(-1).view(torch.uint8) for _, t in tensors]
        parts = [torch.nn.functional.pad(p, (0, -p.numel() % 8)) for p in parts]
        places = torch.cat(parts).split([p.numel() for p in parts])
        return [(name, p[: t.numel() * t.element_size()].view(t.dtype).reshape(t.shape)) for (name, t), p in zip(tensors, places)]
    if how == "strided":
        return [(name, turned(t)) for name, t in tensors]
    if how == "parameters":
        return [(name, torch.nn.Parameter(t, requires_grad=False)) for name, t in tensors]
    return tensors


def turned(t):
    if t.dim() == 2:
        return t.t().contiguous().t()
    wide = torch.zeros(t.numel(), 2, dtype=t.dtype, device=t.device)
    wide[:, 0] = t.reshape(-1)
    return wide[:, 0].reshape(t.shape) if t.dim() == 1 else t


def post(port, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/update_weights_from_tensor", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def late(tensors):
    """The same values, written by the GPU after two seconds of other work, for which nobody waits here."""
    empty = [(name, torch.zeros_like(t)) for name, t in tensors]
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * 10**9)
    for (_, to), (_, t) in zip(empty, tensors):
        to.copy_(t)
    return empty


def plain_list(tensors):
    """The form without pickles."""
    torch.cuda.synchronize()
    fields = []
    for name, t in tensors:
        _, handle, _, at, *_ = t.untyped_storage()._share_cuda_()
        offset = at + t.storage_offset() * t.element_size()
        dtype = next(k for k, v in DTYPES.items() if v == t.dtype)
        fields.append({"name": name, "dtype": dtype, "shape": list(t.shape), "handle": base64.b64encode(handle[-64:]).decode(), "offset": offset})
    return fields


class FlattenedTensorMetadata:
    """Pickled by the name that SGLang's has."""


def named_as_sglang():
    """Names of classes and functions in pickles as SGLang's senders write them."""
    for module, thing in (("sglang.srt.weight_sync.tensor_bucket", FlattenedTensorMetadata), ("sglang.srt.utils.patch_torch", rebuilt_by_uuid)):
        for end in [i for i, c in enumerate(module + ".") if c == "."]:
            sys.modules.setdefault(module[:end], types.ModuleType(module[:end]))
        name = "_rebuild_cuda_tensor_modified" if thing is rebuilt_by_uuid else thing.__name__
        thing.__module__, thing.__qualname__, thing.__name__ = module, name, name
        setattr(sys.modules[module], name, thing)


def rebuilt_by_uuid(*_):
    raise AssertionError("only its name is sent")


def bucket(tensors):
    flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for _, t in tensors])
    parts, at = [], 0
    for name, t in tensors:
        part = FlattenedTensorMetadata()
        n = t.numel() * t.element_size()
        part.__dict__.update(name=name, shape=t.shape, dtype=t.dtype, start_idx=at, end_idx=at + n, numel=t.numel())
        parts.append(part)
        at += n
    return {"flattened_tensor": flat, "metadata": parts}


def pickled(value):
    out = io.BytesIO()
    ForkingPickler(out).dump(value)
    return [base64.b64encode(out.getvalue()).decode()]


def message(tensors, how):
    """The body, and what must live until the reply."""
    if how == "list":
        return {"cuda_ipc": plain_list(tensors)}, tensors
    if how == "bucket":
        flat = bucket(tensors)
        return {"serialized_named_tensors": pickled(flat), "load_format": "flattened_bucket"}, flat
    tensors = late(tensors) if how == "late" else shaped(tensors, how)
    if how == "uuid":
        torch.multiprocessing.reductions.rebuild_cuda_tensor = rebuilt_by_uuid
    return {"serialized_named_tensors": pickled(tensors)}, tensors


def left():
    """Bytes on the GPU, and names of shared memory, that this process still has."""
    gc.collect()
    bytes_left = 0
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        bytes_left = torch.cuda.memory_allocated()
    counters = {"shm": len([n for n in os.listdir("/dev/shm") if n.startswith(f"torch_{os.getpid()}_")])}
    return {"gpu": bytes_left, **counters}


def send(job, data, part):
    tensors = [(name, tensor(data[at : at + n], dtype, shape).to(job.get("device", "cpu"))) for name, dtype, shape, at, n in part["tensors"]]
    body, held = message(tensors, part["how"])
    status, reply = post(job["port"], {**body, **job.get("fields", {})})
    if job.get("spoil"):
        for _, t in tensors:
            t.zero_()
    del held
    return status, reply["message"]


def main():
    job = json.load(sys.stdin)
    named_as_sglang()
    torch.multiprocessing.set_sharing_strategy(job.get("strategy", "file_system"))
    with open(job["file"], "rb") as f:
        data = f.read()
    for part in job["send"]:
        status, text = send(job, data, part)
        print(json.dumps({"status": status, "message": text, "left": left()}), flush=True)


main()
