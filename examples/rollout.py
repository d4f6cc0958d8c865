#!/usr/bin/env python3
"""A trainer's side of rollouts, in one page: sample answers with their experts and indexer choices, replace the
weights by disk and by shared memory while they are written, then score every answer anew with the weights that
its spans name.

    hadal serve models/tiny-v4 --weights-dir /tmp --max-running 64 --routed-experts --indexer-topk
    python3 examples/rollout.py http://127.0.0.1:30000 models/tiny-v4

Needs numpy. The "training" scales every norm a little; that is enough for other answers.
"""

import base64
import concurrent.futures
import json
import pathlib
import shutil
import struct
import sys
import tempfile
import time
import urllib.request

import numpy as np

URL, MODEL = sys.argv[1], pathlib.Path(sys.argv[2])
N, TOKENS, TEMPERATURE = 64, 60, 0.9
CHOICES = {"return_routed_experts": True, "return_indexer_topk": True}


def call(path, body):
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))


def trained(data, factor):
    """The file with every norm multiplied: F32 stays F32, BF16 is cut to its upper half."""
    (n,) = struct.unpack("<Q", data[:8])
    out = bytearray(data)
    for name, t in json.loads(data[8 : 8 + n]).items():
        if not name.endswith("norm.weight") or t["dtype"] not in ("F32", "BF16"):
            continue
        first, last = (8 + n + offset for offset in t["data_offsets"])
        raw = np.frombuffer(data[first:last], "<u4" if t["dtype"] == "F32" else "<u2").astype(np.uint32)
        wide = (raw << (0 if t["dtype"] == "F32" else 16)).view(np.float32) * np.float32(factor)
        bits = wide.view(np.uint32)
        out[first:last] = bits.tobytes() if t["dtype"] == "F32" else (bits >> 16).astype("<u2").tobytes()
    return bytes(out)


def update(version, path=None, shared=None):
    body = {"weight_version": version, **({"model_path": str(path)} if path else {"shared_memory": shared})}
    assert call("/update_weights_from_" + ("disk" if path else "tensor"), body)["success"]


def checksum():
    return call("/weights_checker", {"action": "checksum"})["per_engine_checksum"]


def sample(seed):
    sampling = {"max_new_tokens": TOKENS, "temperature": TEMPERATURE, "ignore_eos": True, "sampling_seed": seed}
    body = {"input_ids": [605, 14, 261 + seed], "sampling_params": sampling, "return_logprob": True}
    return call("/generate", {**body, **CHOICES})


def choices(info, kind):
    """[tokens - 1, layers, top_k]; row t was computed to sample token t + 1."""
    return np.frombuffer(base64.b64decode(info[kind]), "<i4").reshape(info[kind + "_shape"])


def score(prompt, output):
    """Log-probabilities of an output, at the temperature that it was sampled at, and what comes with them."""
    sampling = {"max_new_tokens": 0, "temperature": TEMPERATURE}
    body = {"input_ids": prompt + output, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    info = call("/generate", {**body, **CHOICES})["meta_info"]
    return [p for p, *_ in info["input_token_logprobs"][len(prompt) :]], info


data = (MODEL / "model.safetensors").read_bytes()
folder, shm = pathlib.Path(tempfile.mkdtemp()), pathlib.Path("/dev/shm/hadal-rollout")
try:
    shutil.copytree(MODEL, folder / "step-1", ignore=lambda *_: ["model.safetensors", "eval"])
    (folder / "step-1" / "model.safetensors").write_bytes(trained(data, 1.02))
    shm.write_bytes(trained(data, 0.98))
    ways = {
        "step-0": lambda: update("step-0", path=MODEL),
        "step-1": lambda: update("step-1", path=folder / "step-1"),
        "step-2": lambda: update("step-2", shared=shm.name),
    }
    ways["step-0"]()
    hashes = {"step-0": checksum()}
    with concurrent.futures.ThreadPoolExecutor(N) as pool:
        asked = [pool.submit(sample, seed) for seed in range(N)]
        for version in ("step-1", "step-2"):
            time.sleep(1)  # some of the answers are written by now
            ways[version]()
            hashes[version] = checksum()
        answers = [a.result() for a in asked]
    for a in answers[:3]:
        print("spans:", *("{version} {start}-{end}".format(**s) for s in a["meta_info"]["weight_versions"]))
    for version, replace in ways.items():
        replace()
        differences, other = [], {"routed_experts": 0, "indexer_topk": 0}
        for seed, a in enumerate(answers):
            then = [p for p, *_ in a["meta_info"]["output_token_logprobs"]]
            now, info = score([605, 14, 261 + seed], a["output_ids"])
            for span in a["meta_info"]["weight_versions"]:
                if span["version"] == version:
                    part = slice(span["start"], span["end"])
                    differences += [abs(x - y) for x, y in zip(then[part], now[part])]
                    rows = slice(2 + span["start"], 2 + span["end"])
                    for kind in other:
                        other[kind] += int((choices(a["meta_info"], kind)[rows] != choices(info, kind)[rows]).sum())
        same = checksum() == hashes[version]
        print(f"{version}: {len(differences)} tokens, largest |log p| difference {max(differences, default=0)}, other experts {other['routed_experts']}, other keys {other['indexer_topk']}, hashes equal: {same}")
finally:
    shutil.rmtree(folder)
    shm.unlink(missing_ok=True)
