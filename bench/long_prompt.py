#!/usr/bin/env python3
"""One long prompt on a server, as a Markdown table: its time, peak memory beside the plan, and the answers
of short requests meanwhile.

    bench/long_prompt.py [MODEL_DIR] [--tokens 262144] [--chunk 512] [--threads 1] [--every 15]

MODEL_DIR is a copy of models/tiny-v4 by default, whose config allows a million positions. A short request
comes every so many seconds. The plan is `hadal plan`'s for the same numbers; what the program has before the
prompt is left out of both."""

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from conftest import HADAL  # noqa: E402
from serving import Server, events_of  # noqa: E402

WORDS = 64  # of a short prompt, and of its answer


def long_model(folder):
    """tiny-v4 for a million positions."""
    model = Path(shutil.copytree(ROOT / "models" / "tiny-v4", folder / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1048576}))
    return model


def memory(server, name):
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1])


def planned(model, a):
    """Bytes of KV pools and activations."""
    words = [HADAL, "plan", model, "--gpu", "cpu", "--users", 2, "--prompt", a.tokens, "--output", 2 * WORDS, "--chunk", a.chunk]
    words += ["--layout", "tp=1", "--precision", "exact", "--json"]
    out = subprocess.run(list(map(str, words)), check=True, capture_output=True).stdout
    return json.loads(out)["layouts"][0]["bytes"]


def stream(server, body):
    """Times of its events, and their JSON."""
    c = server.connection(timeout=None)
    c.request("POST", "/v1/completions", json.dumps({"stream": True, "temperature": 0, **body}), {"Content-Type": "application/json"})
    for event in events_of(c.getresponse()):
        if event != b"[DONE]":
            yield time.perf_counter(), json.loads(event)


def ask_short(server, random_ids):
    """Seconds to the first token, and the gaps between tokens."""
    begun = time.perf_counter()
    body = {"prompt": random_ids(WORDS), "max_tokens": WORDS, "ignore_eos": True}
    times = [t for t, e in stream(server, body) if e["choices"] and e["choices"][0]["text"]]
    return times[0] - begun, [b - a for a, b in zip(times, times[1:], strict=False)]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("model", nargs="?")
    p.add_argument("--tokens", type=int, default=262144)
    p.add_argument("--chunk", type=int, default=512)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--every", type=float, default=15)
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(a.model) if a.model else long_model(Path(folder))
        context = a.tokens + 2 * WORDS
        flags = ["--context", context, "--kv-tokens", context + 4 * WORDS, "--max-running", 2, "--chunk", a.chunk]
        server = Server(*flags, "--threads", a.threads, "--snapshot-tokens", 256, "--no-drafts", model=model)
        draw = random.Random(27)
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]

        def random_ids(n):
            return [draw.randrange(300, vocab) for _ in range(n)]

        ask_short(server, random_ids)
        alone = ask_short(server, random_ids)
        before, plan = memory(server, "VmRSS"), planned(model, a)
        short, done = [], threading.Event()

        def ask_all():
            while not done.wait(a.every):
                short.append(ask_short(server, random_ids))

        thread = threading.Thread(target=ask_all)
        thread.start()
        begun, progress = time.perf_counter(), []
        for t, e in stream(server, {"prompt": random_ids(a.tokens), "max_tokens": WORDS, "ignore_eos": True, "return_progress": True}):
            if "prompt_progress" in e:
                progress.append((t - begun, e["prompt_progress"]["processed"]))
                print(f"{t - begun:9.1f} s {progress[-1][1]:9} tokens", file=sys.stderr) if len(progress) % 20 == 0 else None
        done.set()
        thread.join()
        kv, activations = plan["kv"], plan["activations"]
        used = memory(server, "VmHWM") - before
        gaps = [g for _, each in short for g in each]
        print("| tokens | chunk | seconds | of the last tenth | events | planned MB | peak MB | peak / plan |")
        print("|---|---|---|---|---|---|---|---|")
        tenth = progress[-1][0] - progress[len(progress) * 9 // 10][0]
        print(f"| {a.tokens:,} | {a.chunk} | {progress[-1][0]:.0f} | {tenth:.0f} | {len(progress)} | {(kv + activations) / 1e6:.1f} | {used / 1e6:.1f} | {used / (kv + activations):.3f} |")
        print("\n| short requests | first token, median s | gap, median ms | longest gap, ms |")
        print("|---|---|---|---|")
        for name, n, each, g in [("alone", 1, [alone[0]], alone[1]), ("meanwhile", len(short), [x for x, _ in short], gaps)]:
            if g:
                print(f"| {name}: {n} | {statistics.median(each):.2f} | {1e3 * statistics.median(g):.0f} | {1e3 * max(g):.0f} |")
        server.close()


main()
