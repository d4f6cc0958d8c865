#!/usr/bin/env python3
"""Time to the first token of a prompt that is on a disk, in host memory, on the device, or to be
computed, as a Markdown table; or tokens per second, and per second of a core, of a load of conversations with tiers and without.

    bench/kv_tiers.py [MODEL_DIR] [--prompts 1024 4096 7168] [--repeat 5] [--kv-host 4] [--folder DIR]
    bench/kv_tiers.py [MODEL_DIR] --conversations 20 [--turns 4] [--words 400] [--repeat 3]

The server's KV pools hold one prompt, so that each one sends the one before it to host memory. From
the disk it comes after a restart, one token longer, as the next turn of a conversation is; its files lie in a folder that is made in DIR, and are as a rule
in the memory of the system's page cache. The model is models/tiny-v4 by default: its layers are
small, so a page costs little to compute.

With --conversations each sends all that was said and --words more in every turn, all of them in every round, so that the KV
pools, of --times less than what all have in the end, hold none of it when it is wanted again. The other load has prompts as long that nobody asked before."""

import argparse
import concurrent.futures
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from serving import Server  # noqa: E402

SPARE = 256  # positions of a context behind its prompt


def prompt(n, name):
    """n ids that begin like no prompt of another name."""
    return [300 + (name * 7919 + i * 31) % 97 for i in range(n - 1)] + [300 + name % 97]


def cached_tokens(server):
    """Prompt tokens found so far, by tier."""
    start = "hadal_kv_tier_cached_tokens_total"
    lines = [x for x in server.get("/metrics").text.splitlines() if x.startswith(start)]
    return {x.split('tier="')[1].split('"')[0]: float(x.split()[-1]) for x in lines}


def ask(server, ids):
    """Milliseconds of an answer of one token, and the share of the prompt that each tier had."""
    before = cached_tokens(server)
    begun = time.perf_counter()
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    reply = server.post("/generate", body, connection=server.connection(timeout=None))
    took = time.perf_counter() - begun
    assert reply.status == 200, reply.text
    after = cached_tokens(server)
    return 1e3 * took, {tier: (after[tier] - before[tier]) / len(ids) for tier in after}


def written(server):
    lines = [x for x in server.get("/metrics").text.splitlines() if x.startswith("hadal_kv_tier_pages") and 'tier="disk"' in x]
    return [float(x.split()[-1]) for x in lines]


def await_written(server):
    """Returns when no page was written for two seconds."""
    before, since = None, 0
    while before is None or time.perf_counter() - since < 2:
        now = written(server)
        if now != before:
            before, since = now, time.perf_counter()
        time.sleep(0.05)


def measure(a, n, folder):
    """Medians of computing, of the device, of host memory and of the disk, with the shares that were
    in the last two."""
    context = n + SPARE
    flags = ["--context", context, "--kv-tokens", context, "--max-running", 2, "--kv-host", a.kv_host, "--kv-disk", f"{folder}:{a.kv_disk}"]
    server = Server(*flags, model=a.model)
    ask(server, prompt(n, 0))
    computed, device, host, shares = [], [], [], []
    for i in range(1, a.repeat + 1):
        computed.append(ask(server, prompt(n, i))[0])
        device.append(ask(server, prompt(n, i))[0])
        took, share = ask(server, prompt(n, i - 1))
        host.append(took)
        shares.append(share["host"])
    await_written(server)
    server.close()
    server = Server(*flags, model=a.model)
    ask(server, prompt(n, a.repeat + 1))  # the first one of a process is slower
    disk, disk_shares = zip(*[ask(server, prompt(n, i) + [301]) for i in range(1, a.repeat + 1)])
    server.close()
    disk_share = statistics.median(x["disk"] for x in disk_shares)
    return [*[statistics.median(x) for x in (computed, device, host, disk, shares)], disk_share]


# ---- a load ----

ANSWER = 16
CLIENTS = 4


def processor(server):
    """Seconds of processor time of a server so far."""
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(t.read_text().split()[0]) for t in threads) / 1e9


def serve_load(server, prompts):
    """Prompt and answer tokens per second, and per second of a core."""
    sampling = {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True}

    def say(ids):
        body = {"input_ids": ids, "sampling_params": sampling}
        reply = server.post("/generate", body, connection=server.connection(timeout=None))
        assert reply.status == 200, reply.text

    begun, before = time.perf_counter(), processor(server)
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        for together in prompts:
            list(pool.map(say, together))
    tokens = sum(len(ids) + ANSWER for together in prompts for ids in together)
    return tokens / (time.perf_counter() - begun), tokens / (processor(server) - before)


def measure_load(a, folder):
    n, words = a.conversations, a.words
    context = a.turns * words + 1 + ANSWER
    common = ["--context", context, "--max-running", CLIENTS, "--no-drafts", "--kv-tokens", max(context, n * context // a.times)]
    grown = [[prompt(words * (t + 1) + 1, i) for i in range(n)] for t in range(a.turns)]
    fresh = [[prompt(words * (t + 1) + 1, n * (t + 1) + i) for i in range(n)] for t in range(a.turns)]
    tiers = ["--kv-host", a.kv_host, "--kv-disk"]
    rates = {}
    for turn in range(a.repeat):
        for name, flags in (("none", []), ("tiers", [*tiers, f"{folder}/{turn}:{a.kv_disk}"])):
            for load, prompts in (("conversations", grown), ("no reuse", fresh)):
                (Path(folder) / str(turn)).mkdir(exist_ok=True)
                server = Server(*common, *flags, model=a.model)
                serve_load(server, [[prompt(words, 5 * n + 1)]])
                rates.setdefault((load, name), []).append(serve_load(server, prompts))
                server.close()
                for path in (Path(folder) / str(turn)).iterdir():
                    path.unlink()
    return rates


def print_load(a):
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        rates = measure_load(a, folder)
    print(f"Tokens per second, medians of {a.repeat}, load average {os.getloadavg()[0]:.1f}:\n")
    print("| load | no tiers | tiers | ratio | no tiers, of a core | tiers, of a core | ratio |")
    print("|---|---|---|---|---|---|---|")
    for load in ("conversations", "no reuse"):
        cells = []
        for k in range(2):
            none, tiers = (statistics.median(x[k] for x in rates[load, name]) for name in ("none", "tiers"))
            cells += [f"{none:.0f}", f"{tiers:.0f}", f"{tiers / none:.2f}"]
        print(f"| {load} | {' | '.join(cells)} |")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("model", nargs="?", default=str(ROOT / "models" / "tiny-v4"))
    p.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 7168])
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--kv-host", type=float, default=4)
    p.add_argument("--kv-disk", type=float, default=8, help="gigabytes")
    p.add_argument("--folder", help="where files are made; default: the system's folder for such")
    p.add_argument("--conversations", type=int, default=0, help="measure a load of so many")
    p.add_argument("--turns", type=int, default=4)
    p.add_argument("--words", type=int, default=400)
    p.add_argument("--times", type=int, default=10, help="what conversations have in the end, over the KV pools")
    a = p.parse_args()
    if a.conversations:
        print_load(a)
        return
    longest = json.loads((Path(a.model) / "config.json").read_text())["max_position_embeddings"]
    print(f"Milliseconds to the first token, median of {a.repeat}, load average {os.getloadavg()[0]:.1f}:\n")
    print("| prompt | computed | on the device | from host memory | from the disk | share in host memory | on the disk | computed / host | computed / disk |")
    print("|---|---|---|---|---|---|---|---|---|")
    for n in a.prompts:
        if n + SPARE > longest:
            continue
        with tempfile.TemporaryDirectory(dir=a.folder) as folder:
            computed, device, host, disk, share, disk_share = measure(a, n, folder)
        shares = f"{share:.0%} | {disk_share:.0%} | {computed / host:.1f} | {computed / disk:.1f}"
        print(f"| {n:,} | {computed:.1f} | {device:.1f} | {host:.1f} | {disk:.1f} | {shares} |", flush=True)


main()
