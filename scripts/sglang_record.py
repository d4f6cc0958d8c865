#!/usr/bin/env python3
"""Turns expert records of SGLang (expert_distribution_recorder_*.pt) into JSON for `hadal eplb --load`.

    scripts/sglang_record.py FILE.pt... > counts.json

A record of counts has them as logical_count [steps, layers, experts]; its steps become passes. A
record of passes has physical counts by rank, which the last map turns into logical ones. Records of
several ranks are added pass by pass. The pickle in such a file is read by a table of the few names
that a tensor of whole numbers needs; any other name is refused, so nothing of the file is run.
"""

import io
import json
import pickle
import sys
import zipfile

import numpy

KINDS = {"LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1"}


class Storage:
    """Stands for a class of torch: only its name is used."""

    def __init__(self, kind):
        self.kind = kind


def tensor(storage, offset, size, stride, *_):
    """A copy of a tensor, all of whose elements lie in its storage."""
    if len(size) != len(stride) or offset < 0 or any(n < 0 for n in (*size, *stride)):
        raise ValueError("a tensor with impossible strides")
    last = offset + sum((n - 1) * by for n, by in zip(size, stride))
    if 0 not in size and last >= len(storage):
        raise ValueError("a tensor that is larger than its storage")
    if 0 in size:
        return numpy.zeros(size, storage.dtype)
    each = storage.itemsize
    return numpy.lib.stride_tricks.as_strided(storage[offset:], size, [by * each for by in stride]).copy()


class Reader(pickle.Unpickler):
    """Builds dicts, lists, numbers, strings and tensors."""

    def __init__(self, archive, folder):
        super().__init__(io.BytesIO(archive.read(folder + "data.pkl")))
        self.archive, self.folder = archive, folder

    def find_class(self, module, name):
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in KINDS:
            return Storage(KINDS[name])
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no record of counts needs")

    def persistent_load(self, pid):
        word, storage, key, _, n = pid
        if word != "storage" or not isinstance(storage, Storage) or not str(key).isalnum():
            raise pickle.UnpicklingError("a storage of an unknown kind")
        values = numpy.frombuffer(self.archive.read(f"{self.folder}data/{key}"), storage.kind)
        if len(values) < n:
            raise ValueError("a storage that is cut off")
        return values


def load(path):
    """The object in a file of torch.save()."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/data.pkl")] or [""]
        if not name:
            raise ValueError("no file of torch.save()")
        return Reader(archive, name[: -len("data.pkl")]).load()


def logical(physical, slot_expert):
    """[layers, experts] of [layers, slots]."""
    layers, slots = slot_expert.shape
    if physical.shape != slot_expert.shape or slot_expert.min() < 0:
        raise ValueError("counts and map of different shapes")
    out = numpy.zeros((layers, int(slot_expert.max()) + 1), numpy.int64)
    numpy.add.at(out, (numpy.arange(layers)[:, None], slot_expert), physical)
    return out


def add_record(passes, record):
    """Adds a record to passes {number: [layers, experts]}."""
    if "logical_count" in record:
        counts = record["logical_count"]
        new = dict(enumerate(counts if counts.ndim == 3 else counts[None]))
    else:
        new = {}
        for one in record["records"]:
            counts = logical(one["global_physical_count"], record["last_physical_to_logical_map"])
            new[one["forward_pass_id"]] = new.get(one["forward_pass_id"], 0) + counts
    for number, counts in new.items():
        passes[number] = passes.get(number, 0) + counts


def main(paths):
    passes = {}
    for path in paths:
        try:
            add_record(passes, load(path))
        except (KeyError, TypeError, ValueError, AttributeError, EOFError, IndexError, OSError, pickle.UnpicklingError, zipfile.BadZipFile) as e:
            sys.exit(f"{path}: {type(e).__name__}: {e}")
    json.dump({"logical_count": [passes[n].tolist() for n in sorted(passes)]}, sys.stdout)
    print()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    main(sys.argv[1:])
