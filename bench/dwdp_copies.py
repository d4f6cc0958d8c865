#!/usr/bin/env python3
"""What DWDP would gain if a map put copies of the hottest experts on second ranks, and not those of the first.

    bench/dwdp_copies.py RECORD [--ranks 2] [--copies 4 7]

RECORD is a file of `hadal serve --expert-record per-pass`. A pass fetches, on every rank, the experts that its rows
choose and the rank lacks. Every pass counts once for each rank: all ranks have such rows. Prints fetches of one rank,
mean of all ranks: without copies, whatever the map; with copies of the first experts of each part, as `--redundant`
places them; and with copies of those that most passes choose."""

import argparse
import struct
from pathlib import Path

HEAD, ROW = 56, 16


def read(path):
    """[layers][experts] passes in which rows chose them."""
    data = Path(path).read_bytes()
    assert data[:8] == b"EPLBREC1"
    version, mode, layers, experts, _, slots = struct.unpack_from("<6i", data, 8)
    assert version == 1 and mode == 1 and slots == experts, "not per-pass, or experts have copies"
    used = [[0] * experts for _ in range(layers)]
    cells = layers * slots
    for at in range(HEAD + 2 * cells, len(data) - ROW - 4 * cells + 1, ROW + 4 * cells):
        rows = struct.unpack_from(f"<{cells}i", data, at + ROW)
        for i in range(cells):
            used[i // slots][i % slots] += rows[i] > 0
    return [layer for layer in used if any(layer)]


def part(n, i, parts):
    return n * i // parts, n * (i + 1) // parts


def held(experts, ranks, copies):
    """Places of each rank: its part, and as many of the next as it has copies (weights/parallel_config.c)."""
    out = []
    for r in range(ranks):
        first, end = part(experts, r, ranks)
        more = part(copies, ranks - 1 - r, ranks)
        out.append([i % experts for i in range(first, end + more[1] - more[0])])
    return out


def hottest_first(uses, ranks):
    """Uses by place, so that those with copies have most."""
    n = len(uses)
    parts = [part(n, r, ranks) for r in range(ranks)]
    turns = sorted((i - first, first, i) for first, end in parts for i in range(first, end))
    out = [0] * n
    for use, (_, _, place) in zip(sorted(uses, reverse=True), turns):
        out[place] = use
    return out


def fetches(layers, ranks, copies):
    """Of one rank, the mean of all."""
    lacks = [set(range(len(layers[0]))) - set(h) for h in held(len(layers[0]), ranks, copies)]
    return sum(layer[e] for layer in layers for rank in lacks for e in rank) / ranks


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("record")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--copies", type=int, nargs="+", default=[4, 7])
    a = p.parse_args()
    layers = read(a.record)
    hot = [hottest_first(layer, a.ranks) for layer in layers]
    print(f"without copies {fetches(layers, a.ranks, 0):.0f}, hottest first {fetches(hot, a.ranks, 0):.0f}")
    for copies in a.copies:
        first, best = fetches(layers, a.ranks, copies), fetches(hot, a.ranks, copies)
        print(f"{copies} copies: of the first {first:.0f}, of the hottest {best:.0f}: {1 - best / first:.1%} fewer")


if __name__ == "__main__":
    main()
