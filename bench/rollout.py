#!/usr/bin/env python3
"""What rollouts cost: tokens per second of 64 prompts with 8 samples each over HTTP, plain, with
log-probabilities, and with the choices of layers, too; and what keeping the choices costs when nobody asks.

    bench/rollout.py [MODEL_DIR] [--rounds 3] [--prompts 64] [--samples 8] [--tokens 64] [--threads N]

Servers run side by side, one of each kind, and take turns in every round, so that all of them meet
the same neighbours on a shared machine. Prints a table: medians, and the ratio to the plain server.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
HADAL = os.environ.get("HADAL", str(ROOT / "build" / "hadal"))
ROUTES, KEYS = {"return_routed_experts": True, "routed_experts_dtype": "uint8"}, {"return_indexer_topk": True, "indexer_topk_compact": True}
LOGPROBS = {"return_logprob": True}

# name: flags of the server, and what requests ask for
KINDS = {
    "plain": ([], {}),
    "log-probabilities": ([], LOGPROBS),
    "experts kept": (["--routed-experts"], {}),
    "experts asked for": (["--routed-experts"], {**LOGPROBS, **ROUTES}),
    "keys kept, too": (["--routed-experts", "--indexer-topk"], {}),
    "keys asked for, too": (["--routed-experts", "--indexer-topk"], {**LOGPROBS, **ROUTES, **KEYS}),
}


class Server:
    def __init__(self, model, flags, args):
        command = [HADAL, "serve", model, "--port", 0, "--max-running", args.prompts, "--threads", args.threads, "--context", 1024, *flags]
        self.process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in self.process.stdout:
            if line.startswith("hadal "):
                self.port = int(line.rsplit(":", 1)[1].split()[0])
            if line.startswith("ready"):
                return
        sys.exit(f"{HADAL} serve did not start")

    def close(self):
        self.process.terminate()
        self.process.wait()


def ask(port, seed, args, wanted):
    sampling = {"max_new_tokens": args.tokens, "temperature": 1.0, "ignore_eos": True, "sampling_seed": seed, "n": args.samples}
    body = {"input_ids": [605 + (seed * 7 + i) % 400 for i in range(24)], "sampling_params": sampling, **wanted}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    text = connection.getresponse().read()
    return text.count(b'"completion_tokens":'), len(text)


def measure(server, args, wanted, round_):
    """Output tokens per second, and bytes of replies per token."""
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(args.prompts) as pool:
        replies = list(pool.map(lambda i: ask(server.port, round_ * args.prompts + i, args, wanted), range(args.prompts)))
    tokens = sum(n for n, _ in replies) * args.tokens
    return tokens / (time.monotonic() - start), sum(n for _, n in replies) / tokens


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=ROOT / "models" / "tiny-v4")
    for name, default in (("rounds", 3), ("prompts", 64), ("samples", 8), ("tokens", 64), ("threads", os.cpu_count())):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    servers = {}
    try:
        for flags, _ in KINDS.values():
            servers.setdefault(tuple(flags), None)
        for flags in servers:
            servers[flags] = Server(args.model, flags, args)
        rates, sizes = {k: [] for k in KINDS}, {}
        for round_ in range(-1, args.rounds):  # the first one warms up
            for kind, (flags, wanted) in KINDS.items():
                rate, sizes[kind] = measure(servers[tuple(flags)], args, wanted, round_ + 1)
                if round_ >= 0:
                    rates[kind].append(rate)
    finally:
        for server in servers.values():
            if server:
                server.close()
    plain = statistics.median(rates["plain"])
    print(f"{args.prompts} prompts x {args.samples} samples x {args.tokens} tokens, {args.rounds} rounds, {args.threads} threads")
    print("| | tokens/s | to plain | spread | bytes per token |\n|---|---|---|---|---|")
    for kind, values in rates.items():
        middle = statistics.median(values)
        print(f"| {kind} | {middle:.0f} | {middle / plain:.3f} | {(max(values) - min(values)) / middle:.3f} | {sizes[kind]:.0f} |")


if __name__ == "__main__":
    main()
