#!/usr/bin/env python3
"""Checks the rules of the house that a compiler cannot know.

Fails on: an include that goes up or sideways, another folder's private header, a file without
its opening paragraph, a banned call, a header of src or include over 250 lines, a folder of more
than 50 source files. Lists, without failing, files over 800 lines and functions over 80.
"""
import collections
import pathlib
import re
import sys

FLOORS = {
    "base": 0,
    "device": 1, "tokenizer": 1, "client": 1, "moe": 1,
    "ops": 2, "weights": 2, "chat": 2, "http": 2, "hub": 2,
    "comm": 3, "grammar": 3,
    "kv": 4,
    "model": 5,
    "runner": 6,
    "sched": 7,
    "engine": 8,
    "api": 9, "train": 9, "capacity": 9, "router": 9, "pd": 9,
    "server": 10,
    "cli": 11,
}  # fmt: skip

# Rooms inside a folder. The folder may include them all; each may include the folder's headers and
# those of the rooms listed before it.
ROOMS = {
    "model": ["backward"],
    "engine": ["remote"],
    "weights": ["config", "experts", "torch"],
    "ops": ["ref", "cpu", "cuda", "cuda_attention", "exchange", "split", "fetch", "backward", "profile"],
    "server": ["metrics"],
    "cli": ["terminal", "inspect", "bench", "planning", "training", "serving"],
}

BANNED = ["strcpy", "strcat", "sprintf", "vsprintf", "strtok", "gets", "alloca", "rand", "atoi"]
BANNED_BELOW_CLI = ["exit", "_exit", "printf", "vprintf", "puts", "putchar"]
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
MAX_HEADER_LINES = 250
MAX_FOLDER_FILES = 50
LONG_HEADERS = {"include/hadal.h"}  # the whole public API; generated tables would stand here too
SUFFIXES = {".c", ".h", ".cu", ".cuh"}

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
# What the scanner must not look into, and the only tokens that can hide it.
OPAQUE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def blank(match):
    """Keeps line numbers: only line feeds survive."""
    return "\n" * match.group(0).count("\n") or " "


def check_paragraph(path, text):
    name = re.escape(path.name)
    if not re.match(rf"/\* {name} - \S", text):
        yield 1, f"must open with the paragraph /* {path.name} - what it does ... */"


def check_header(shown, text):
    n = text.count("\n")
    if shown.suffix not in (".h", ".cuh") or shown.parts[0] not in ("src", "include"):
        return
    if n > MAX_HEADER_LINES and str(shown) not in LONG_HEADERS:
        yield 1, f"{n} lines; a header has at most {MAX_HEADER_LINES}"


PUBLIC = "hadal.h"  # include/hadal.h, which src/engine makes real
SHARED = "hadal_types.h"  # its data, for every folder


def may_enter(folder, room, other_room):
    """Whether a file of folder/room may include a header of folder/other_room."""
    if other_room in ("", room) or not room:
        return True
    rooms = ROOMS[folder]
    return rooms.index(other_room) < rooms.index(room)


def check_includes(path, folder, room, lines):
    for number, line in enumerate(lines, 1):
        found = INCLUDE.match(line)
        if not found:
            continue
        door = found.group(1)
        other, _, header = door.rpartition("/")
        other, _, other_room = other.partition("/")
        known = other in FLOORS and other_room in ["", *ROOMS.get(other, [])]
        if door.endswith(".c"):
            yield number, f'includes "{door}": no file includes a .c'
        elif door == SHARED:
            continue
        elif door == PUBLIC:
            if FLOORS[folder] < FLOORS["engine"]:
                yield number, f'includes "{door}": only the engine and its clients do'
        elif not known:
            yield number, f'includes "{door}": write the path from src/ (folder/header.h)'
        elif other != folder:
            if FLOORS[other] >= FLOORS[folder]:
                way = "sideways" if FLOORS[other] == FLOORS[folder] else "up"
                yield number, f'includes "{door}": {folder} may not look {way} to {other}'
            if header.endswith(("_internal.h", "_internal.cuh")):
                yield number, f'includes "{door}": private to {other}'
        elif not may_enter(folder, room, other_room):
            yield number, f'includes "{door}": {folder}/{room} may not look into {other_room}'
        if door.endswith(".cuh") and path.suffix not in (".cu", ".cuh"):
            yield number, f'includes "{door}": .cuh is for .cu files'


def check_calls(folder, code):
    words = BANNED + ([] if folder == "cli" else BANNED_BELOW_CLI)
    pattern = re.compile(rf"(?<![\w.>])({'|'.join(words)})\s*\(")
    for number, line in enumerate(code.split("\n"), 1):
        for call in pattern.findall(line):
            yield number, f"calls {call}()"


def long_functions(code):
    """Functions as the formatter leaves them: the body closes with } in the first column."""
    start = name = None
    opened = False
    for number, line in enumerate(code.split("\n"), 1):
        line = line.rstrip()
        signature = re.match(r"\w[^=]*?(\w+)\s*\(", line)
        if signature and not opened:
            start, name = number, signature.group(1)
        if line.startswith("}"):
            if opened and number - start + 1 > MAX_FUNCTION_LINES:
                yield start, f"{name}() has {number - start + 1} lines"
            start, opened = None, False
        elif start and not opened:
            opened = line.endswith("{")
            if line.endswith(";"):
                start = None  # only a declaration


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    failures, remarks, n_files = [], [], 0
    folders = collections.Counter()
    for path in sorted(p for top in ("src", "include", "tests", "bench")
                       for p in (root / top).rglob("*") if p.suffix in SUFFIXES):  # fmt: skip
        n_files += 1
        shown = path.relative_to(root)
        folders[shown.parent] += 1
        text = path.read_text(encoding="utf-8")
        code = OPAQUE.sub(blank, text)
        lines = text.split("\n")
        found = list(check_paragraph(path, text))
        if shown.parts[0] == "src":
            folder, *rooms = shown.parts[1:-1]
            room = "/".join(rooms)
            if folder not in FLOORS or room not in ["", *ROOMS.get(folder, [])]:
                found.append((1, "lies on no floor; FLOORS and ROOMS in this script list them"))
            else:
                found += check_includes(path, folder, room, lines)
                found += check_calls(folder, code)
        found += check_header(shown, text)
        failures += [f"{shown}:{number}: {what}" for number, what in found]
        if len(lines) - 1 > MAX_FILE_LINES:
            remarks.append(f"{shown}: {len(lines) - 1} lines")
        remarks += [f"{shown}:{number}: {what}" for number, what in long_functions(code)]
    failures += [f"{folder}: {n} source files; at most {MAX_FOLDER_FILES}"
                 for folder, n in folders.items() if n > MAX_FOLDER_FILES]  # fmt: skip
    for line in remarks:
        print(f"remark: {line}")
    for line in failures:
        print(line)
    print(f"floors: {n_files} files, {len(failures)} findings, {len(remarks)} remarks")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
