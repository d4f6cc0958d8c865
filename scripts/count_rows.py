#!/usr/bin/env python3
"""count_rows.py - how many rows of the lists of bad inputs and faults have a test.

    count_rows.py            the figures by group, and the rows without a test
    count_rows.py --check    exit 1 unless README.md gives the same figures and every row has a test or a reason

A test names its rows: a key of its table begins with one ("J04 deep", "F01_empty"), or a comment or
docstring does (# H12, FT11: why). Ranges are written C04 .. C08.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Group: (what it lists, its rows).
INPUTS = {
    "H": ("HTTP: framing, headers, routing", 42),
    "J": ("JSON and text", 22),
    "R": ("parameters of requests", 51),
    "M": ("chat messages", 22),
    "S": ("tools, schemas, patterns", 27),
    "E": ("other endpoints, the page", 14),
    "F": ("safetensors files and their index", 43),
    "C": ("config.json, generation_config.json", 28),
    "K": ("tokenizer files", 26),
    "L": ("command line, environment, host", 40),
    "X": ("messages between servers", 32),
}
FAULTS = {"clients": (1, 16), "load and memory": (17, 31), "threads, processes, the end": (32, 44), "prefill and decode apart": (45, 66), "host and time": (82, 88)}

# Rows without a test, and why. Most ask for what this program does not have.
REASONS = {
    "L21": "one GPU: there is no transport library",
    "L22": "one machine: there are no peers",
    "R07": "keys have no rights but the admin's",
    "R42": "keys have no rights but the admin's",
    "FT31": "one process; what starts it again is the host's (FT43 starts it again)",
    "FT38": "one process",
    "FT39": "one process",
    "FT40": "one process",
    "X01": "no list of addresses: servers prove a secret",
    "X03": "magic and version are checked like the MAC behind them",
    "X04": "no features to choose: the version is equal or refused",
    "X32": "no token is handed over: the receiver samples the first",
    "X25": "no message has an address or a key of memory",
    "X31": "no ticket: a prefill server is named from a list",
}

NAME = r"(?:[HJRMSEFCKLX][0-9]{2}|FT[0-9]{2})"
LIST = rf"{NAME}(?:(?:, | \.\. ){NAME})*"
MARKS = [
    re.compile(rf"""["']({NAME})[ _]"""),
    re.compile(rf"""def test_({NAME})_"""),
    re.compile(rf"""(?:#|/\*|\"\"\")\s*(?:[Rr]ows? )?({LIST})(?=[\s:"]|$)""", re.M),
]


def expand(text):
    rows = set()
    for part in text.split(", "):
        ends = part.split(" .. ")
        group = ends[0][:-2]
        rows |= {f"{group}{i:02d}" for i in range(int(ends[0][-2:]), int(ends[-1][-2:]) + 1)}
    return rows


def named_rows():
    rows = set()
    for path in sorted((ROOT / "tests").rglob("*")):
        if path.suffix in (".py", ".c", ".h"):
            for mark in MARKS:
                for found in mark.findall(path.read_text()):
                    rows |= expand(found)
    return rows


def report(title, rows, named):
    have = [r for r in rows if r in named]
    print(f"{len(have):4} of {len(rows):3}  {title}")
    return len(have)


def main():
    named = named_rows()
    known, n_inputs, n_faults = set(), 0, 0
    for group, (title, n) in INPUTS.items():
        rows = [f"{group}{i:02d}" for i in range(1, n + 1)]
        known |= set(rows)
        n_inputs += report(title, rows, named)
    for title, (first, last) in FAULTS.items():
        rows = [f"FT{i:02d}" for i in range(first, last + 1)]
        known |= set(rows)
        n_faults += report(f"faults: {title}", rows, named)
    all_inputs = sum(n for _, n in INPUTS.values())
    all_faults = sum(last - first + 1 for first, last in FAULTS.values())
    figure = f"{n_inputs} of {all_inputs} bad inputs and {n_faults} of {all_faults} faults"
    print(f"\n{figure}")
    print("without a test:")
    for row in sorted(known - named):
        print(f"  {row}: {REASONS.get(row, 'no reason is given')}")
    faults = {
        "without a test or a reason": known - named - set(REASONS),
        "with a test, and a reason to have none": named & set(REASONS),
        "in no list": named - known,
    }
    for what, rows in faults.items():
        if rows:
            print(f"{what}: {' '.join(sorted(rows))}")
    if any(faults.values()):
        return 1
    if "--check" in sys.argv[1:]:
        text = " ".join((ROOT / "README.md").read_text().split())
        if figure not in text:
            print("README.md does not give these figures")
            return 1
    return 0


sys.exit(main())
