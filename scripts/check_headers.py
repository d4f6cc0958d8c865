#!/usr/bin/env python3
"""Checks that headers compile alone and in any company.

    make headers        # scripts/check_headers.py CC CFLAGS...

A door is a header that other folders may include: include/*.h, and each of src that is not private
(_internal.h). Every door compiles as the first line of a file, and all of them together, in
alphabetical order and backwards, so that each pair meets in both orders. Doors with C linkage
(HD_BEGIN_C, or extern "C" of their own) do the same as C++.
"""
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMPILERS = ("g++", "clang++")  # whichever is there
CXXFLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-Isrc", "-Iinclude"]
LINKAGE = ("HD_BEGIN_C", 'extern "C"')


def doors():
    for top in ("include", "src"):
        for path in sorted((ROOT / top).rglob("*.h")):
            if not path.stem.endswith("_internal"):
                yield str(path.relative_to(ROOT / top)), path.read_text(encoding="utf-8")


def failure(command, language, headers):
    """What the compiler says of a file that includes these headers; None if nothing."""
    text = "".join(f'#include "{h}"\n' for h in headers)
    text += "extern int not_empty;\n"  # some headers contain macros only
    done = subprocess.run([*command, "-fsyntax-only", "-x", language, "-"], cwd=ROOT, input=text,
                          capture_output=True, text=True)  # fmt: skip
    return f"{language}: {', '.join(headers[:2])} ...\n{done.stderr}" if done.returncode else None


def main():
    cc = sys.argv[1:]
    if not cc:
        sys.exit(__doc__.strip())
    texts = dict(doors())
    names = list(texts)
    both = [n for n in names if any(word in texts[n] for word in LINKAGE)]
    cxx = [found for found in map(shutil.which, COMPILERS) if found][:1]
    groups = [(cc, "c", names)] + [([*cxx, *CXXFLAGS], "c++", both)] * len(cxx)
    runs = []
    for command, language, group in groups:
        runs += [(command, language, [n]) for n in group]
        runs += [(command, language, group[::order]) for order in (1, -1)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [f for f in pool.map(lambda run: failure(*run), runs) if f]
    for text in failures:
        print(text)
    as_cxx = f"{len(both)} of them also as C++" if cxx else "no C++ compiler"
    print(f"headers: {len(names)} doors, {as_cxx}, {len(failures)} findings")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
