#!/usr/bin/env python3
"""One long prompt on a server, as Markdown tables: its time and the peak of memory beside the plan; or, with
short requests meanwhile, how long these wait.

    bench/long_prompt.py [MODEL_DIR] [--tokens 65536] [--chunk 512] [--threads 1] [--every 5 [--prompt-ms 0 500]]

MODEL_DIR is a copy of models/tiny-v4 by default, whose config allows a million positions. A short request
comes --every so many seconds, 0: none. The plan is `hadal plan`'s; what the program has before the prompt is
left out of the peak."""

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
    words = [HADAL, "plan", model, "--gpu", "cpu", "--users", 1, "--prompt", a.tokens, "--output", 2 * WORDS, "--chunk", a.chunk]
    words += ["--layout", "tp=1", "--precision", "exact", "--json"]
    out = subprocess.run(list(map(str, words)), check=True, capture_output=True).stdout
    layout = json.loads(out)["layouts"][0]["bytes"]
    return layout["kv"] + layout["activations"]


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


def ask_long(server, ids):
    """Seconds until each part of the prompt was computed."""
    begun, progress = time.perf_counter(), []
    for t, e in stream(server, {"prompt": ids, "max_tokens": WORDS, "ignore_eos": True, "return_progress": True}):
        if "prompt_progress" in e:
            progress.append(t - begun)
            if len(progress) % 50 == 0:
                print(f"{progress[-1]:9.1f} s {e['prompt_progress']['processed']:9} tokens", file=sys.stderr)
    return progress


def measure_memory(a, model, start, random_ids):
    server = start("--max-running", 1)
    ask_short(server, random_ids)
    before = memory(server, "VmRSS")
    progress = ask_long(server, random_ids(a.tokens))
    used, plan = memory(server, "VmHWM") - before, planned(model, a)
    server.close()
    tenth = progress[-1] - progress[len(progress) * 9 // 10]
    print("| tokens | chunk | seconds | of the last tenth | events | planned MB | peak MB | peak / plan |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| {a.tokens:,} | {a.chunk} | {progress[-1]:.0f} | {tenth:.0f} | {len(progress)} | {plan / 1e6:.1f} | {used / 1e6:.1f} | {used / plan:.3f} |")


def measure_short(a, start, random_ids):
    print("| --prompt-ms | long prompt, s | short requests | first token, median s | gap, median ms | longest gap, ms |")
    print("|---|---|---|---|---|---|")
    for ms in a.prompt_ms:
        server = start("--max-running", 2, "--prompt-ms", ms)
        ask_short(server, random_ids)
        short, done = [], threading.Event()

        def ask_all(server=server, short=short, done=done):
            while not done.wait(a.every):
                short.append(ask_short(server, random_ids))

        thread = threading.Thread(target=ask_all)
        thread.start()
        took = ask_long(server, random_ids(a.tokens))[-1]
        done.set()
        thread.join()
        server.close()
        gaps = [1e3 * g for _, each in short for g in each]
        print(f"| {ms} | {took:.0f} | {len(short)} | {statistics.median(x for x, _ in short):.2f} | {statistics.median(gaps):.0f} | {max(gaps):.0f} |", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("model", nargs="?")
    p.add_argument("--tokens", type=int, default=65536)
    p.add_argument("--chunk", type=int, default=512)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--every", type=float, default=0)
    p.add_argument("--prompt-ms", type=int, nargs="+", default=[0])
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(a.model) if a.model else long_model(Path(folder))
        context = a.tokens + 2 * WORDS
        flags = ["--context", context, "--kv-tokens", context, "--chunk", a.chunk, "--threads", a.threads]
        draw = random.Random(27)
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]

        def random_ids(n):
            return [draw.randrange(300, vocab) for _ in range(n)]

        def start(*more):
            return Server(*flags, "--snapshot-tokens", 256, "--no-drafts", *more, model=model)

        if a.every:
            measure_short(a, start, random_ids)
        else:
            measure_memory(a, model, start, random_ids)


main()
