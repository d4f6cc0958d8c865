#!/usr/bin/env python3
"""How long until the first token: a random checkpoint of 8 GB (V2-Lite's shape in FP8 with
fewer layers), its files in the page cache, and whole runs of hadal generate.

    bench/start.py [--hadal build/hadal] [--backend cpu] [--layers 14] [--folder /tmp] [--runs 5] [--cold]

With --cold the page cache forgets the file before each run. Needs the space; the checkpoint is deleted at the end. Beside the clock it prints
processor time, which other programs on the machine do not lengthen."""

import argparse
import array
import json
import math
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from model_shapes import shapes  # noqa: E402

BLOCK = 128
CHUNK, NORMAL = 1 << 26, 1 << 20


def entries(config):
    """Name, dtype, shape and bytes of every stored array, scales behind their matrices."""
    for name, (shape, kind) in shapes(config).items():
        is_fp8 = kind == "matrix" and not name.startswith(("lm_head", "model.embed")) and ".gate.w" not in name
        if not is_fp8:
            wide = kind.endswith("f32")
            yield name, "F32" if wide else "BF16", shape, math.prod(shape) * (4 if wide else 2)
            continue
        yield name, "F8_E4M3", shape, math.prod(shape)
        blocks = [-(-n // BLOCK) for n in shape]
        yield name + "_scale_inv", "F32", blocks, math.prod(blocks) * 4


def repeated(piece, at, n):
    """n bytes of an endless repetition, from byte `at` on."""
    at %= len(piece)
    return (piece * -(-(at + n) // len(piece)))[at : at + n]


def pieces():
    """Bytes of each type, which arrays repeat: FP8 without NaN and large numbers, standard deviation 0.02, 0.01."""
    source = random.Random(1)
    normal = array.array("f", (source.gauss(0, 0.02) for _ in range(NORMAL))).tobytes()
    bf16 = bytearray(2 * NORMAL)
    bf16[0::2], bf16[1::2] = normal[2::4], normal[3::4]
    fp8 = source.randbytes(CHUNK).translate(bytes(byte & 0xBF for byte in range(256)))
    return {"F8_E4M3": fp8, "BF16": bytes(bf16), "F32": array.array("f", [0.01] * 1024).tobytes()}


def write(folder, config):
    header, at = {}, 0
    for name, dtype, shape, n in entries(config):
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    of = pieces()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, _, n in entries(config):
            f.write(repeated(of[dtype], header[name]["data_offsets"][0] // 64 * 64, n))
    (folder / "config.json").write_text(json.dumps(config))
    for name in "tokenizer.json", "tokenizer_config.json":
        shutil.copy(ROOT / "models" / "tiny-v4" / name, folder)
    return at


def make(folder, layers):
    """A random checkpoint; returns its bytes."""
    config = json.loads((ROOT / "bench" / "peers" / "configs" / "v2-lite-q.json").read_text())
    config.update(num_hidden_layers=layers, vocab_size=8192)
    config["quantization_config"].pop("moe_quant_algo")
    return write(folder, config)


def run(command, forget):
    if forget:
        with open(forget, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--hadal", default=str(ROOT / "build" / "hadal"))
    p.add_argument("--backend", default="cpu")
    p.add_argument("--layers", type=int, default=14)
    p.add_argument("--folder", default=None)
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--cold", action="store_true")
    a = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the folder is deleted then too
    with tempfile.TemporaryDirectory(dir=a.folder) as name:
        folder = Path(name)
        size = make(folder, a.layers)
        os.sync()
        command = [a.hadal, "generate", str(folder), "--raw", "-p", "once upon a time there was", "-q", "--backend", a.backend]
        forget = folder / "model.safetensors" if a.cold else None
        runs = [run([*command, "--max-tokens", "1"], forget) for _ in range(a.runs + 1)][1:]
    wall, user, kernel = (statistics.median(r[i] for r in runs) for i in range(3))
    print(f"{size / 1e9:.2f} GB, start of the process to its first token and end, median of {a.runs}:")
    print(f"{wall:.2f} s by the clock; {user:.2f} s of processor time in the program, {kernel:.2f} s in the kernel")


if __name__ == "__main__":
    main()
