#!/usr/bin/env python3
"""What rollouts cost: tokens per second of 64 prompts with 8 samples each over HTTP, plain, with
log-probabilities, and with the choices of layers, too; and what keeping the choices costs when nobody asks.

    bench/rollout.py [MODEL_DIR] [--rounds 3] [--prompts 64] [--samples 8] [--tokens 64] [--threads N] [--kinds 4]

--kinds N leaves out the last ones, so that less memory and time is needed.

Servers run side by side, one of each kind, and take turns in every round, so that all of them meet
the same neighbours on a shared machine. Prints a table: medians, and the ratio to the plain server. Beside the
clock it prints the processor time that the server took for a token, which neighbours lengthen little; with
--threads 1 no thread spins meanwhile.
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

    def processor_seconds(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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
    """Output tokens per second, microseconds of the processor per token, and bytes of replies per token."""
    start, before = time.monotonic(), server.processor_seconds()
    with concurrent.futures.ThreadPoolExecutor(args.prompts) as pool:
        replies = list(pool.map(lambda i: ask(server.port, round_ * args.prompts + i, args, wanted), range(args.prompts)))
    tokens = sum(n for n, _ in replies) * args.tokens
    seconds, processor = time.monotonic() - start, server.processor_seconds() - before
    return tokens / seconds, processor / tokens * 1e6, sum(n for _, n in replies) / tokens


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=ROOT / "models" / "tiny-v4")
    for name, default in (("rounds", 3), ("prompts", 64), ("samples", 8), ("tokens", 64), ("threads", os.cpu_count()), ("kinds", len(KINDS))):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    kinds, servers = dict(list(KINDS.items())[: args.kinds]), {}
    try:
        for flags, _ in kinds.values():
            servers.setdefault(tuple(flags), None)
        for flags in servers:
            servers[flags] = Server(args.model, flags, args)
        rates, costs, sizes = {k: [] for k in kinds}, {k: [] for k in kinds}, {}
        for round_ in range(-1, args.rounds):  # the first one warms up
            for kind, (flags, wanted) in kinds.items():
                rate, cost, sizes[kind] = measure(servers[tuple(flags)], args, wanted, round_ + 1)
                print(f"round {round_ + 1}, {kind}: {rate:.0f} tokens/s, {cost:.0f} us of the processor per token", file=sys.stderr, flush=True)
                if round_ >= 0:
                    rates[kind].append(rate)
                    costs[kind].append(cost)
    finally:
        for server in servers.values():
            if server:
                server.close()
    plain = [statistics.median(of["plain"]) for of in (rates, costs)]
    print(f"{args.prompts} prompts x {args.samples} samples x {args.tokens} tokens, {args.rounds} rounds, {args.threads} threads")
    print("| | tokens/s | to plain | spread | us of the processor per token | to plain | spread | bytes per token |\n|---|---|---|---|---|---|---|---|")
    for kind, size in sizes.items():
        cells = []
        for values, of_plain in zip((rates[kind], costs[kind]), plain):
            middle = statistics.median(values)
            cells += [f"{middle:.0f}", f"{middle / of_plain:.3f}", f"{(max(values) - min(values)) / middle:.3f}"]
        print(f"| {kind} | {' | '.join(cells)} | {size:.0f} |")


if __name__ == "__main__":
    main()
