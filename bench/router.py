#!/usr/bin/env python3
"""What the choice by prefix is worth: conversations of several turns, over servers that are chosen by the
router, in turn, and by a client who knows it all, as a Markdown table.

    bench/router.py [MODEL_DIR] [--servers 2] [--prefill 0] [--conversations 8] [--turns 6] [--rounds 3] [--cpu-time]

Each conversation is a thread that sends its turns one after the other, each with all that was said before. Every
server has one thread of the CPU, and no token history, so that texts are equal. `in turn` sends each request to the next server; `by conversation` all of one
conversation to one server, which is the most that a cache can hit. The three ways take turns, each with empty
caches; medians of the rounds. Reused is the share of prompt tokens that no server computed, by the servers' metrics: pages
that travel between two servers were computed once. --cpu-time: per second of all servers' processors, for a machine with
other work. With --prefill N so many prefill servers compute prompts for them: the router chooses
pairs, the other two ways name prefill servers as they choose servers.

Then the hot prefix: so many clients as --clients send requests that all begin alike, through the router; the longest
queue of a server over the mean of all, both averaged over the run."""

import argparse
import concurrent.futures
import itertools
import os
import statistics
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from serving import Server  # noqa: E402
from test_pd import Peer, role_flags  # noqa: E402
from test_router import Router, free_port, of  # noqa: E402

WORDS = "river hill stone bird cloud tree lamp road door fish".split()


def talk(number, turns, length, choose):
    """Returns prompt tokens and the texts of a conversation."""
    messages, prompt, said = [], 0, []
    for turn in range(turns):
        words = " ".join(WORDS[(number * 7 + turn * 3 + i * i) % len(WORDS)] for i in range(length))
        messages.append({"role": "user", "content": f"{number}.{turn}: {words}"})
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        reply = choose(number)(body)
        assert reply.status == 200, reply.text
        prompt += reply.json["usage"]["prompt_tokens"]
        messages.append(reply.json["choices"][0]["message"])
        said.append(messages[-1]["content"])
    return prompt, said


def computed(servers):
    """Prompt tokens that servers have computed so far; pages that came from another one count as cached."""
    figure = lambda s, name: next(float(line.rsplit(" ", 1)[1]) for line in s.get("/metrics").text.splitlines() if line.startswith(f"hadal_{name}{{"))
    return sum(figure(s, "prompt_tokens_total") - figure(s, "cached_tokens_total") for s in servers)


def processor_seconds(servers):
    """What all threads of the servers have used so far."""
    ticks = 0
    for s in servers:
        fields = Path(f"/proc/{s.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])  # utime, stime
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(args, servers, choose):
    for s in servers:
        assert s.post("/flush_cache").status == 200
    time.sleep(1)  # the router hears of it
    before = computed(servers)
    now = (lambda: processor_seconds(servers)) if args.cpu_time else time.perf_counter
    begun = now()
    with concurrent.futures.ThreadPoolExecutor(args.conversations) as pool:
        talks = list(pool.map(lambda i: talk(i, args.turns, args.words, choose), range(args.conversations)))
    seconds = now() - begun
    prompt = sum(t[0] for t in talks)
    return prompt / seconds, 1 - (computed(servers) - before) / prompt, [t[1] for t in talks]


def hot(args, servers, router):
    """Returns the longest mean queue over the mean of all."""
    prefix = "".join(f"{WORDS[i % len(WORDS)]} {i} " for i in range(2 * args.words))
    left, sums = threading.Event(), [0] * len(servers)

    def ask(number):
        for turn in range(args.turns):
            body = {"messages": [{"role": "user", "content": f"{prefix}{number}.{turn}"}], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            assert router.post("/v1/chat/completions", body).status == 200

    def look():
        while not left.wait(0.05):
            for i, s in enumerate(servers):
                load = s.loads()
                sums[i] += load["num_running_reqs"] + load["num_waiting_reqs"]

    looker = threading.Thread(target=look)
    looker.start()
    with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
        list(pool.map(ask, range(args.clients)))
    left.set()
    looker.join()
    return max(sums) / (sum(sums) / len(sums))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "models" / "tiny-v4"))
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--words", type=int, default=120, help="of a question")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=0, help="prefill servers")
    parser.add_argument("--cpu-time", action="store_true", help="per second of the servers' processors")
    parser.add_argument("--clients", type=int, default=16, help="of the hot prefix")
    args = parser.parse_args()
    flags = ("--threads", "1", "--max-running", "16", "--token-history", "off")
    prefill = []
    for _ in range(args.prefill):
        listen = f"127.0.0.1:{free_port()}"
        prefill.append(Peer(*flags, "--kv-host", "0.2", *role_flags("prefill", listen), model=args.model))
        prefill[-1].listen = listen
    if prefill:
        words = (*flags, "--kv-host", "0.2", *role_flags("decode", peers=prefill))
        servers = [Peer(*words, model=args.model).wait_paired(len(prefill)) for _ in range(args.servers)]
    else:
        servers = [Server(*flags, model=args.model) for _ in range(args.servers)]
    names = ["--decode", ",".join(map(of, servers))] + (["--prefill", ",".join(map(of, prefill))] if prefill else [])
    router = Router(*names).wait_up(len(servers) + len(prefill))
    turn = itertools.count()

    def straight(n):
        """Asks the nth server, and lets the nth prefill server compute the prompt."""
        headers = {"X-Hadal-Prefill": of(prefill[n % len(prefill)])} if prefill else {}
        return lambda body: servers[n % len(servers)].post("/v1/chat/completions", body, headers=headers)

    ways = {
        "router": lambda number: lambda body: router.post("/v1/chat/completions", body),
        "in turn": lambda number: straight(next(turn)),
        "by conversation": straight,
    }
    found, texts = {name: [] for name in ways}, None
    for _ in range(args.rounds):
        for name, choose in ways.items():
            *figures, said = measure(args, [*servers, *prefill], choose)
            assert texts in (None, said), "the texts differ"
            texts = said
            found[name].append(figures)
    queues = [hot(args, servers, router) for _ in range(args.rounds)]
    router.close()
    for s in [*servers, *prefill]:
        s.close()
    medians = {name: [statistics.median(f[i] for f in all_of) for i in (0, 1)] for name, all_of in found.items()}
    print("| servers are chosen | prompt tokens/s | × in turn | reused | × by conversation |\n|---|---|---|---|---|")
    for name, (speed, share) in medians.items():
        print(f"| {name} | {speed:,.0f} | {speed / medians['in turn'][0]:.2f} | {share:.3f} | {share / medians['by conversation'][1]:.2f} |")
    print(f"\nhot prefix: the longest queue is {statistics.median(queues):.2f} x the mean")


if __name__ == "__main__":
    main()
