#!/usr/bin/env python3
"""Writes the lists of operators in docs/forward.md: make_forward.py HADAL [--check].

A comment `<!-- stages CONFIG: TITLE, ... -->` stands before each list. The list is what `hadal
inspect --stages tests/configs/CONFIG.json` prints for the blocks with these titles: "moe" is the
first block of that title, "moe (2)" the second. With --check nothing is written; the exit code is 1
if the page and the program differ.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "forward.md"
LIST = re.compile(r"(<!-- stages (\w+): ([^>]+?) -->\n)```\n(?:(?!```).*\n)*```\n")


def blocks_of(hadal, config):
    """The printed blocks by title; a repeated title gets a number: "moe (2)"."""
    command = [hadal, "inspect", "--stages", str(ROOT / "tests" / "configs" / f"{config}.json")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    blocks = {}
    for block in text.strip().split("\n\n")[1:]:
        title = block.split("\n")[0].split(":")[0]
        number = sum(key.split(" (")[0] == title for key in blocks)
        blocks[title if number == 0 else f"{title} ({number + 1})"] = block
    return blocks


def generated(hadal, page):
    made = {}

    def fill(match):
        config = match.group(2)
        if config not in made:
            made[config] = blocks_of(hadal, config)
        wanted = [made[config][title] for title in match.group(3).split(", ")]
        return match.group(1) + "```\n" + "\n\n".join(wanted) + "\n```\n"

    return LIST.sub(fill, page)


def main():
    hadal, check = sys.argv[1], "--check" in sys.argv[2:]
    page = PAGE.read_text()
    new = generated(hadal, page)
    if check and new != page:
        print("docs/forward.md is not what the program prints: run scripts/make_forward.py")
        return 1
    if not check:
        PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
