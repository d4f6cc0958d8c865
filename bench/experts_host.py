#!/usr/bin/env python3
"""Experts in host memory beside the limit of a GPU's memory and its bus, for V4-Flash's shape with random
weights and fewer layers, as many as host memory holds (3.4 GB each).

    bench/experts_host.py [--hadal build/hadal] [--backend cuda] [--layers 8] [--room 0.43] [--users 1 16]
                          [--tokens 128] [--prompt 8192] [--memory-rate 4500] [--config FILE]
                          [--compute device auto host]

Room is the part of the experts that fits into device memory. Ours is the time of a whole run of `hadal bench`;
the limit is that of its steps: the bytes that the kernels of a step read from device memory, as `hadal plan`
counts them, at --memory-rate GB/s, and then what was fetched at the rate at which the driver copies pinned
memory to the device, measured before. Of a prompt the limit is the longer of its compute, measured with
all experts on the device, and the copies. One line of JSON each."""

import argparse
import ctypes
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def bus_rate(n=1 << 30, runs=5):
    """Bytes per second of copies from pinned memory, the best of some; None without a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    context, host, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()

    def call(name, *args):
        code = getattr(cuda, name)(*args)
        assert code == 0, f"{name} failed with {code}"

    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(n), 0)
    call("cuMemAlloc_v2", ctypes.byref(device), ctypes.c_size_t(n))
    best = 0
    for _ in range(runs):
        begun = time.perf_counter()
        call("cuMemcpyHtoD_v2", device, host, ctypes.c_size_t(n))
        best = max(best, n / (time.perf_counter() - begun))
    call("cuMemFree_v2", device)
    call("cuMemFreeHost", host)
    call("cuDevicePrimaryCtxRelease_v2", 0)
    return best


def shorten(path, layers, folder):
    """A config with its first layers, and without drafts."""
    config = json.loads(Path(path).read_text())
    config.update(num_hidden_layers=layers, num_nextn_predict_layers=0)
    config["compress_ratios"] = config["compress_ratios"][:layers]
    out = Path(folder) / "config.json"
    out.write_text(json.dumps(config))
    return out, config


def expert_bytes(config):
    """FP4 with a scale byte for 32."""
    return 3 * config["hidden_size"] * config["moe_intermediate_size"] * 17 // 32


def report(args, *command):
    done = subprocess.run([args.hadal, *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr}")
    return json.loads(done.stdout)


def plan(args, path, users, prompt):
    """One layout's steps on a GPU that has room for all."""
    flags = ("--gpu", "b200", "--users", users, "--prompt", prompt, "--output", args.tokens, "--chunk", prompt, "--json")
    return report(args, "plan", path, *flags)["layouts"][0]


def load(args, path, room, users, prompt, tokens, compute="device"):
    flags = ["--num-prompts", users, "--input-len", prompt, "--output-len", tokens, "--warmup", 1, "--json", "-q"]
    flags += ["--max-running", users, "--kv-tokens", users * 2 * max(512, prompt), "--chunk", prompt, "--draft-tokens", 0, "--experts-host", f"{room / 1e9:.6f}", "--experts-host-compute", compute]
    return report(args, "bench", "throughput", "--dummy-weights", path, "--backend", args.backend, *args.flags.split(), *flags)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hadal", default=str(ROOT / "build/hadal"))
    p.add_argument("--backend", default="cuda")
    p.add_argument("--config", default=str(ROOT / "tests/configs/v4_flash.json"))
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--room", type=float, default=0.43)
    p.add_argument("--users", type=int, nargs="*", default=[1, 16])
    p.add_argument("--compute", nargs="*", default=["device"], help="values of --experts-host-compute")
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--prompt", type=int, default=8192)
    p.add_argument("--memory-rate", type=float, default=4500.0)
    p.add_argument("--flags", default="--precision official", help="more options of hadal bench")
    args = p.parse_args()
    bus = bus_rate() or 55.4e9
    print(json.dumps({"layers": args.layers, "bus_gb_s": round(bus / 1e9, 1)}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path, config = shorten(args.config, args.layers, folder)
        room = args.room * args.layers * config["n_routed_experts"] * expert_bytes(config)
        for users, compute in itertools.product(args.users, args.compute):
            x = load(args, path, room, users, 16, args.tokens, compute)
            read = plan(args, path, users, 16)["decode"]["bytes"] * x["steps"] / (args.memory_rate * 1e9)
            fetched = x["experts"]["fetched_bytes"]
            line = {
                "users": users,
                "compute": compute,
                "ms_per_step": x["duration"] / x["steps"] * 1e3,
                "limit_ms": (read + fetched / bus) / x["steps"] * 1e3,
                "limit_over_ours": (read + fetched / bus) / x["duration"],
                "tokens_per_s": x["output_throughput"],
                "were_there": x["experts"]["staged"] / max(x["experts"]["used"], 1),
                "fetched_mb_per_token": fetched / 1e6 / x["total_output_tokens"],
                "steps": x["steps"],
                "graph_steps": x["graph_steps"],
            }
            if compute != "device":
                e = x["experts"]
                line["on_host"] = e["sent"] / max(e["used"], 1)
                line["host_us_per_expert"] = e["sent_ns"] / 1e3 / max(e["sent"], 1)
                line["predicted_over_taken"] = e["split_predicted_ns"] / max(e["split_ns"], 1)
            print(json.dumps(line), flush=True)
        if args.prompt:
            x = load(args, path, room, 1, args.prompt, 1)
            all_there = load(args, path, 1.4 * room / args.room, 1, args.prompt, 1)  # the compute alone
            assert all_there["experts"]["fetched"] <= all_there["experts"]["slots"], all_there
            kernels = all_there["duration"]
            copies = x["experts"]["fetched_bytes"] / bus
            line = {
                "prompt": args.prompt,
                "ms": x["duration"] * 1e3,
                "limit_ms": max(kernels, copies) * 1e3,
                "limit_over_ours": max(kernels, copies) / x["duration"],
                "copies_ms": copies * 1e3,
                "compute_ms": kernels * 1e3,
            }
            print(json.dumps(line), flush=True)


main()
