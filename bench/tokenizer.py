#!/usr/bin/env python3
"""Encoding speed of hadal and of the `tokenizers` package, one thread each, in one run.

    make build/bench_tokenizer && python3 bench/tokenizer.py [TOKENIZER_DIR] [--mb 10]

Times are processor time, which a busy machine disturbs least. Prints the median of several
runs, the ratio, and the time for one megabyte of a single
repeated character, where quadratic algorithms show. The mixed text is cut into documents of
about 10 kB, each encoded by a call of its own on both sides: that is the peer's best case (one
call for all of it runs at half its speed). Both sides must give the same number of tokens.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
import tokenizers  # noqa: E402  (after the setting)

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("HADAL_SHARED", ROOT.parent / "shared"))
DOCUMENT = 8000  # characters
DRIVER = os.environ.get("BENCH_TOKENIZER", str(ROOT / "build/bench_tokenizer"))


def words(rng, letters, count, lengths):
    return ["".join(rng.choices(letters, k=rng.choice(lengths))) for _ in range(count)]


def mixed_text(megabytes, vocabulary, seed):
    """Prose of Zipf-distributed words, code, CJK, Cyrillic, numbers and emoji, by seed."""
    rng = random.Random(seed)
    latin = [w for w in vocabulary if w.isascii() and w.isalpha() and len(w) > 1][:20000]
    latin += words(rng, "etaoinshrdlu", 20000, [5, 6, 7, 8, 9, 11])
    han = [w for w in vocabulary if w and all("\u4e00" <= c <= "\u9fa5" for c in w)][:20000]
    han = han or list("你好世界")
    cyrillic = words(rng, "оеаинтсрвлкмдпу", 5000, [3, 5, 7, 9])
    weights = [1 / (i + 10) for i in range(len(latin))]
    parts, size = [], 0
    while size < megabytes * 1000000:
        kind = rng.random()
        if kind < 0.55:
            line = " ".join(rng.choices(latin, weights, k=12)).capitalize() + ". "
        elif kind < 0.75:
            a, b = rng.choices(latin, weights, k=2)
            line = f"    for ({a}_{rng.randrange(99)} = 0; {b} < {rng.randrange(9999)}; i++) {{\n"
            line += f"\t\treturn self.{a}[{b!r}] != None;  // {a} {b}\n    }}\n"
        elif kind < 0.9:
            line = "".join(rng.choices(han, k=12)) + "，" + "".join(rng.choices(han, k=8)) + "。\n"
        elif kind < 0.95:
            line = " ".join(rng.choices(cyrillic, k=8)) + "\n\n"
        else:
            line = f"{rng.random():.6f}, {rng.randrange(10**9)} {chr(0x1F600 + rng.randrange(60))}\n"
        parts.append(line)
        size += len(line.encode())
    return "".join(parts)


def time_ours(directory, documents, repeats):
    with tempfile.NamedTemporaryFile(suffix=".txt") as f:
        f.write("\0".join(documents).encode())
        f.flush()
        out = subprocess.run([DRIVER, str(directory), f.name, str(repeats)], check=True,
                             capture_output=True, text=True).stdout.split()
    return int(out[0]), statistics.median(map(float, out[1:]))


def time_peer(peer, documents, repeats):
    seconds, n = [], 0
    for _ in range(repeats):
        start = time.process_time()
        n = sum(len(peer.encode(d, add_special_tokens=False).ids) for d in documents)
        seconds.append(time.process_time() - start)
    return n, statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", default=SHARED / "data/deepseek-v3-tokenizer")
    parser.add_argument("--mb", type=float, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    document = json.loads((Path(args.directory) / "tokenizer.json").read_text())
    document["added_tokens"] = []
    peer = tokenizers.Tokenizer.from_str(json.dumps(document))
    vocabulary = list(document["model"]["vocab"])
    han = [peer.decode([i]) for i in range(0, len(vocabulary), 3)]
    text = mixed_text(args.mb, vocabulary + han, args.seed)
    mixed = [text[i:i + DOCUMENT] for i in range(0, len(text), DOCUMENT)]
    cases = [("mixed", mixed, args.repeats), ("mixed, one text", [text], 1),
             ("1 MB of 'a'", ["a" * 1000000], 1), ("8 MB of 'a'", ["a" * 8000000], 1),
             ("1 MB of spaces", [" " * 1000000], 1),
             ("1 MB of spaces, x", [" " * 999999 + "x"], 1),
             ("1 MB of one emoji", ["🙂" * 250000], 1)]
    print(f"tokenizers {tokenizers.__version__}, one thread each, "
          f"median of {args.repeats}, seed {args.seed}")
    print(f"{'case':18} {'MB':>6} {'tokens':>9} {'ours MB/s':>10} {'peer MB/s':>10} {'ratio':>6}")
    for name, documents, repeats in cases:
        size = sum(len(d.encode()) for d in documents) / 1e6
        n_ours, ours = time_ours(args.directory, documents, repeats)
        n_peer, theirs = time_peer(peer, documents, repeats)
        if n_ours != n_peer:
            raise SystemExit(f"{name}: {n_ours} tokens, the peer has {n_peer}")
        print(f"{name:18} {size:6.1f} {n_ours:9} {size / ours:10.2f} {size / theirs:10.2f} "
              f"{theirs / ours:6.1f}")


main()
