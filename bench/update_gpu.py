#!/usr/bin/env python3
"""New weights from PyTorch to a server on the same GPU: by CUDA IPC handles, and by shared memory of the host, as a
Markdown table. Needs PyTorch and a GPU.

    bench/update_gpu.py [MODEL_DIR] [--rounds 3] [--parts 1] [--layers N]

--layers makes a random model of V2-Lite's shape in FP8 instead, of 0.55 GB per layer (bench/start.py). A round sends all
tensors of the model in so many parts; the weights are the same, so the server's checksums must be, too. *reply* is from
the first request to the last reply, *still* the time in which no step could run, by the server's metric; beside them
PyTorch's own copies of as many bytes within the GPU and to it, from pinned memory.
"""

import argparse
import base64
import io
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
import start  # noqa: E402

HADAL = os.environ.get("HADAL", str(ROOT / "build-cuda" / "hadal"))


class Server:
    def __init__(self, model):
        command = [HADAL, "serve", model, "--port", "0", "--backend", "cuda", "--weights-dir", model, "--context", "512"]
        self.process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if line.startswith("hadal "):
                self.port = int(line.rsplit(":", 1)[1].split()[0])
            if line.startswith("ready"):
                return
        sys.exit(f"{HADAL} serve did not start")

    def post(self, path, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))

    def still(self):
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics").read().decode()
        return float(re.search(r"^hadal_weight_update_seconds_total(?:{[^}]*})? (\S+)", text, re.MULTILINE)[1])


def pickled(tensors):
    out = io.BytesIO()
    ForkingPickler(out).dump(tensors)
    return base64.b64encode(out.getvalue()).decode()


def update(server, parts):
    """Seconds until the last reply, and those without steps."""
    still, begun = server.still(), time.perf_counter()
    server.post("/begin_weight_update", {})
    for part in parts:
        server.post("/update_weights_from_tensor", {"serialized_named_tensors": [pickled(part)]})
    server.post("/end_weight_update", {"parts": len(parts)})
    return time.perf_counter() - begun, server.still() - still


def copy_seconds(n, device):
    """Of n bytes, within the GPU or from pinned memory."""
    a = torch.empty(n, dtype=torch.uint8, device=device, pin_memory=device == "cpu")
    b = torch.empty(n, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        b.copy_(a, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times)


def with_scales(tensors):
    """Tensors in groups of a name: a matrix and its scale travel in one message."""
    groups = {}
    for name, t in tensors.items():
        groups.setdefault(re.sub(r"_scale_inv$|(?<=\.)scale$|(?<=\.)weight$", "", name).rstrip("."), []).append((name, t))
    return list(groups.values())


def measure(model, args):
    torch.multiprocessing.set_sharing_strategy("file_system")
    server = Server(model)
    before = server.post("/weights_checker", {"action": "checksum"})
    on_host = {}
    for file in sorted(pathlib.Path(model).glob("*.safetensors")):
        on_host.update(load_file(file))
    groups = with_scales(on_host)
    n = sum(t.numel() * t.element_size() for t in on_host.values())
    print(f"{len(on_host)} tensors, {n / 1e9:.2f} GB, {args.parts} parts, {args.rounds} rounds, {torch.cuda.get_device_name()}; medians in ms")
    print("| tensors | reply | still | still: speed of the copy |\n|---|---|---|---|")
    for name, device in (("on the GPU", "cuda"), ("in shared memory", "cpu")):
        sent = [[(k, t.to(device) if device == "cuda" else t.share_memory_()) for k, t in g] for g in groups]
        parts = [sum(sent[k :: args.parts], []) for k in range(args.parts)]
        rounds = [update(server, parts) for _ in range(args.rounds + 1)]  # the first one warms up
        reply, still = (statistics.median(r[i] for r in rounds[1:]) for i in (0, 1))
        print(f"| {name} | {reply * 1e3:.0f} | {still * 1e3:.1f} | {copy_seconds(n, device) / still:.2f} |", flush=True)
        del sent, parts
    assert server.post("/weights_checker", {"action": "checksum"}) == before, "other weights than before"
    server.process.terminate()
    server.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=ROOT / "models" / "tiny-v4")
    for name, default in (("rounds", 3), ("parts", 1), ("layers", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if not args.layers:
        measure(str(args.model), args)
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        start.make(pathlib.Path(folder), args.layers)
        measure(folder, args)


if __name__ == "__main__":
    main()
