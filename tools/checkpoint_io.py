"""checkpoint_io.py - safetensors checkpoints in plain Python and numpy, single or sharded.

A tensor is (dtype, shape, bytes) exactly as the file says, so that formats which numpy does
not know (BF16, F8_E4M3, F8_E8M0) pass through untouched.
"""
import json
import struct
from collections import namedtuple
from pathlib import Path

import numpy as np

Tensor = namedtuple("Tensor", "dtype shape data")  # data: 1-d uint8 array

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_file(path):
    """{name: Tensor} of one safetensors file, in the order of its header."""
    raw = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    area = np.frombuffer(raw, np.uint8)[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: Tensor(t["dtype"], tuple(t["shape"]), area[slice(*t["data_offsets"])])
        for name, t in header.items()
    }


def read_checkpoint(directory):
    """All tensors of a directory with model.safetensors or an index."""
    directory = Path(directory)
    index = directory / INDEX
    if not index.exists():
        return read_file(directory / SINGLE)
    names = json.loads(index.read_text())["weight_map"]
    tensors = {}
    for shard in sorted(set(names.values())):
        tensors.update(read_file(directory / shard))
    return tensors


def file_bytes(tensors, metadata=None):
    """The bytes of a safetensors file holding tensors in their order."""
    header, at = {"__metadata__": metadata or {"format": "pt"}}, 0
    for name, t in tensors.items():
        header[name] = {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "data_offsets": [at, at + len(t.data)],
        }
        at += len(t.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [struct.pack("<Q", len(text)), text]
    return b"".join(parts + [np.asarray(t.data).tobytes() for t in tensors.values()])


def write_checkpoint(directory, tensors, shards=1):
    """model.safetensors, or that many shards of similar size with their index."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        (directory / SINGLE).write_bytes(file_bytes(tensors))
        return
    total = sum(len(t.data) for t in tensors.values())
    parts, filled = [{} for _ in range(shards)], 0
    for name, t in tensors.items():
        parts[min(shards - 1, filled * shards // max(total, 1))][name] = t
        filled += len(t.data)
    weight_map = {}
    for i, part in enumerate(parts):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        (directory / shard).write_bytes(file_bytes(part))
        weight_map.update({name: shard for name in part})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))


def from_array(array):
    """A float32, float64, int64, int32, uint8 or int8 array as a tensor of its own type."""
    names = {"f4": "F32", "f8": "F64", "i8": "I64", "i4": "I32", "u1": "U8", "i1": "I8"}
    array = np.ascontiguousarray(array)
    dtype = names[array.dtype.str[1:]]
    return Tensor(dtype, np.shape(array), array.reshape(-1).view(np.uint8))


def bf16(array):
    """A float array rounded to BF16, nearest even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return Tensor("BF16", np.shape(array), bits.astype("<u2").reshape(-1).view(np.uint8))


def f16(array):
    half = np.ascontiguousarray(array, np.float16)
    return Tensor("F16", half.shape, half.reshape(-1).view(np.uint8))


def to_f32(tensor):
    """An unquantized float tensor as a float32 array."""
    data = np.ascontiguousarray(tensor.data)
    if tensor.dtype == "BF16":
        values = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    elif tensor.dtype in ("F32", "F16"):
        values = data.view("<f4" if tensor.dtype == "F32" else "<f2").astype(np.float32)
    else:
        raise ValueError(f"{tensor.dtype} is not a plain float type")
    return values.reshape(tensor.shape)
