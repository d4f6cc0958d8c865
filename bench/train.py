#!/usr/bin/env python3
"""Training beside PyTorch: one batch of random tokens, `hadal bench train` and tools/train_tiny on the same weights.

    bench/train.py [MODEL_DIR ...] [--sequences 16] [--length 256] [--rounds 3] [--threads N] [--backend cuda] [--compile] [--cpu-time]
    bench/train.py --layers [--length 8192] [--rounds 3]

All take turns in every round. Prints for forward, backward, optimizer and a whole step the medians of tokens per second, the
ratio, and on a CPU our share of the float32 limit of this run; the losses, which are of the same numbers; and on a GPU the peaks
of memory. The peer computes in float32, its optimizer is torch.optim.AdamW; --compile adds one by torch.compile. --cpu-time: one
thread, by its processor time, for a machine with other work. Needs torch, safetensors and tokenizers.

--layers: one layer each of V2-Lite, V3 and V4-Flash on a GPU, with random weights, forward and back, on one sequence; and the share
of the products of matrices in what the tensor cores do with BF16 in the same run (attention does not count)."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
HADAL = os.environ.get("HADAL", str(ROOT / "build" / "hadal"))
PARTS = ("forward", "backward", "optimizer", "step")
sys.path.insert(0, str(ROOT / "tools" / "train_tiny"))


LAYERS = (("V2-Lite", "v2_lite", 1), ("V4-Flash", "v4_flash", 4), ("V3", "v3", 3))


class Peer:
    def __init__(self, model, tokens, args, compiled):
        import torch

        from export import load_model

        torch.set_num_threads(args.threads)
        self.torch = torch
        self.device = args.backend
        self.cpu_time = args.cpu_time
        self.ids = torch.tensor(tokens, device=self.device)
        self.model = load_model(str(model), self.ids.shape[1], self.device, torch.float32)
        self.weights = self.model.w
        self.model.index = False  # the indexer is not trained here
        trained = [w.requires_grad_() for k, w in self.weights.items() if w.is_floating_point() and "bias" not in k]
        self.optimizer = torch.optim.AdamW(trained, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        if compiled:
            self.loss = torch.compile(self.loss)
        for _ in range(3 if self.device == "cuda" else 1):  # warm-up; ours has its own
            self.step()

    def now(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return time.process_time() if self.cpu_time else time.monotonic()

    def loss(self):
        from torch.nn import functional

        x = self.model.trunk(self.ids, self.torch.zeros_like(self.ids))[0]
        logits = functional.linear(self.model.head_input(x), self.weights[self.model.head])
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), self.ids[:, 1:].flatten())

    def step(self):
        """Seconds of the parts, and the loss."""
        times = [self.now()]
        with self.torch.no_grad():
            self.loss()
        times.append(self.now())
        loss = self.loss()
        loss.backward()
        times.append(self.now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(self.now())
        forward, both, optimizer = (b - a for a, b in zip(times, times[1:]))
        return {"forward": forward, "backward": both - forward, "optimizer": optimizer, "step": both + optimizer}, loss.item()


def bench(*words):
    command = [HADAL, "bench", "train", *words, "--json"]
    return json.loads(subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout)


def ours(model, tokens, args):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(tokens, file)
        file.flush()
        words = [model, "--tokens", file.name, "--times", 1, "--threads", args.threads, "--backend", args.backend]
        return bench(*words, *(["--cpu-time"] if args.cpu_time else []))


def print_memory(own, peer):
    taken, planned = own["memory"] * 1e-6, own["planned_memory"] * 1e-6
    beside = f"; PyTorch {peer * 1e-6:.0f} MB, ratio {taken / peer * 1e6:.2f}" if peer else ""
    print(f"memory: {taken:.0f} MB, {taken / planned - 1:+.1%} of the planned {planned:.0f} MB{beside}")


def measure(model, args):
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    tokens = [[(i * 7919 + j * 104729 + i * j) % (vocab - 3) + 3 for j in range(args.length)] for i in range(args.sequences)]
    n = args.sequences * args.length
    peers = {"PyTorch": Peer(model, tokens, args, False)}
    peak = peers["PyTorch"].torch.cuda.max_memory_allocated() if args.backend == "cuda" else 0
    if args.compile:
        peers["compiled"] = Peer(model, tokens, args, True)
    here, there = [], {name: [] for name in peers}
    for _ in range(args.rounds):
        here.append(ours(model, tokens, args))
        for name, peer in peers.items():
            there[name].append(peer.step())
    losses = ", ".join(f"{name} {steps[0][1]:.5f}" for name, steps in there.items())
    print(f"\n{model.name}: {args.sequences} x {args.length} tokens, {args.rounds} rounds, {args.threads} threads; loss {here[0]['loss']:.5f}, {losses}")
    print("| part | hadal tokens/s |" + "".join(f" {name} tokens/s | ratio |" for name in peers) + " of the limit |")
    print("|---|---|" + "---|---|" * len(peers) + "---|")
    for part in PARTS:
        own = n / statistics.median(r[part]["seconds"] for r in here)
        others = [n / statistics.median(t[part] for t, _ in steps) for steps in there.values()]
        share = statistics.median(r[part]["of_limit"] for r in here)
        cells = "".join(f" {other:.0f} | {own / other:.2f} |" for other in others)
        print(f"| {part} | {own:.0f} |{cells} {f'{share:.3f} ' if share else ''}|", flush=True)
    print_memory(here[0], peak)


def tensor_peak():
    """Operations per second of a large BF16 product."""
    import torch

    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.monotonic()
        a @ b
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - start)
    return 2 * n**3 / statistics.median(seconds[2:])


def measure_layers(args):
    peak = tensor_peak()
    print(f"one layer, one sequence of {args.length} tokens, {args.rounds} times; BF16 products reach {peak * 1e-12:.0f} TFLOP/s")
    print("| layer | forward, ms | forward and back, ms | TFLOP/s | of the tensor cores' | memory, GB |\n|---|---|---|---|---|---|")
    for name, config, layer in LAYERS:
        words = ["--dummy-weights", ROOT / f"tests/configs/{config}.json", "--layer", layer, "--sequences", 1, "--length", args.length]
        r = bench(*words, "--times", args.rounds, "--backend", "cuda", "--threads", args.threads)
        both, rate = r["step"]["seconds"], 3 * r["flops_per_token"] * args.length / r["step"]["seconds"]
        print(f"| {name} | {r['forward']['seconds'] * 1e3:.0f} | {both * 1e3:.0f} | {rate * 1e-12:.1f} | {rate / peak:.3f} | {r['memory'] * 1e-9:.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", type=pathlib.Path, default=[ROOT / "models" / "tiny-v3", ROOT / "models" / "tiny-v4"])
    for name, default in (("sequences", 16), ("length", None), ("rounds", 3), ("threads", os.cpu_count())):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    args.length = args.length or (8192 if args.layers else 256)
    if args.layers:
        return measure_layers(args)
    if args.cpu_time:
        args.threads = 1
    for model in args.models:
        measure(model, args)


if __name__ == "__main__":
    main()
