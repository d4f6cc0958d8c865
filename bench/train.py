#!/usr/bin/env python3
"""Training beside PyTorch: one batch of random tokens, `hadal bench train` and tools/train_tiny on the same weights.

    bench/train.py [MODEL_DIR ...] [--sequences 16] [--length 256] [--rounds 3] [--threads N] [--backend cuda] [--compile] [--cpu-time]

Both take turns in every round. Prints for forward, backward, optimizer and a whole step the medians of tokens per second of
both, the ratio, and on a CPU our share of the float32 limit of this run; and the losses of both, which are of the same numbers.
The peer computes in float32, its optimizer is torch.optim.AdamW; --compile: by torch.compile. --cpu-time: one thread, by
its processor time, for a machine with other work. Needs torch, safetensors and tokenizers.
"""

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


class Peer:
    def __init__(self, model, tokens, args):
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
        if args.compile:
            self.loss = torch.compile(self.loss)

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


def ours(model, tokens, args):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(tokens, file)
        file.flush()
        command = [HADAL, "bench", "train", model, "--tokens", file.name, "--times", 1, "--threads", args.threads, "--backend", args.backend, "--json"]
        command += ["--cpu-time"] if args.cpu_time else []
        return json.loads(subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout)


def measure(model, args):
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    tokens = [[(i * 7919 + j * 104729 + i * j) % (vocab - 3) + 3 for j in range(args.length)] for i in range(args.sequences)]
    n = args.sequences * args.length
    peer = Peer(model, tokens, args)
    for _ in range(3 if args.backend == "cuda" else 1):  # warm-up; ours has its own
        peer.step()
    here, there = [], []
    for _ in range(args.rounds):
        here.append(ours(model, tokens, args))
        there.append(peer.step())
    print(f"\n{model.name}: {args.sequences} x {args.length} tokens, {args.rounds} rounds, {args.threads} threads; loss {here[0]['loss']:.5f}, "
          f"peer {there[0][1]:.5f}")  # fmt: skip
    print("| part | hadal tokens/s | PyTorch tokens/s | ratio | of the limit |\n|---|---|---|---|---|")
    for part in PARTS:
        own = n / statistics.median(r[part]["seconds"] for r in here)
        other = n / statistics.median(t[part] for t, _ in there)
        share = statistics.median(r[part]["of_limit"] for r in here)
        print(f"| {part} | {own:.0f} | {other:.0f} | {own / other:.2f} | {share:.3f} |" if share else f"| {part} | {own:.0f} | {other:.0f} | {own / other:.2f} | |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", type=pathlib.Path, default=[ROOT / "models" / "tiny-v3", ROOT / "models" / "tiny-v4"])
    for name, default in (("sequences", 16), ("length", 256), ("rounds", 3), ("threads", os.cpu_count())):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1
    for model in args.models:
        measure(model, args)


if __name__ == "__main__":
    main()
