"""Sends tensors to a server as trainers do: real PyTorch, run by whatever Python has it. Its standard
input is a JSON object: port, and what to send, each a list of named tensors by how they are made.

    {"port": 30000, "send": [{"tensors": [["norm.weight", "bf16", [256]]], "how": "views"}]}

Values are the bytes of a file, where each tensor begins at an offset. Every reply is a line.
"""

import base64
import io
import json
import sys
import urllib.error
import urllib.request

import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import ForkingPickler

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
    wide = torch.zeros(t.numel(), 2, dtype=t.dtype)
    wide[:, 0] = t.reshape(-1)
    return wide[:, 0].reshape(t.shape) if t.dim() == 1 else t


def post(port, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/update_weights_from_tensor", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def main():
    job = json.load(sys.stdin)
    torch.multiprocessing.set_sharing_strategy(job.get("strategy", "file_system"))
    with open(job["file"], "rb") as f:
        data = f.read()
    for part in job["send"]:
        tensors = [(name, tensor(data[at : at + n], dtype, shape)) for name, dtype, shape, at, n in part["tensors"]]
        tensors = shaped(tensors, part["how"])
        out = io.BytesIO()
        ForkingPickler(out).dump(tensors)
        status, reply = post(job["port"], {"serialized_named_tensors": [base64.b64encode(out.getvalue()).decode()]})
        print(json.dumps({"status": status, "message": reply["message"]}), flush=True)


main()
