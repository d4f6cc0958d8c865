#!/usr/bin/env python3
"""Checks links between the pages: every relative link names a file, and its anchor a heading.

No page has marks that an unfinished merge left. Pages are README.md, ARCHITECTURE.md, CHANGELOG.md and every .md below docs, models and tools. An
anchor is made of a heading as GitHub makes it. The map of ARCHITECTURE.md, above its old names, names
files with their folders; they must exist.
"""
import pathlib
import re
import sys

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`([\w.*-]+/[\w/.*-]+\.(?:c|h|cu|cuh|py|md))`")
MERGE = re.compile(r"^(?:<{7}|>{7}) ", re.M)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.S | re.M)


def without_code(text):
    return CODE.sub(lambda m: "\n" * m.group(0).count("\n"), text)


def anchors(text):
    seen = {}
    for heading in re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M):
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        n = seen.get(name, 0)
        seen[name] = n + 1
        yield f"{name}-{n}" if n else name


def findings(root):
    pages = [root / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")]
    for folder in ("docs", "models", "tools"):
        pages += sorted((root / folder).rglob("*.md"))
    for page in pages:
        text = without_code(page.read_text())
        if MERGE.search(text):
            yield f"{page.relative_to(root)}: marks of a merge"
        for match in LINK.finditer(text):
            link = match.group(1)
            name, _, anchor = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            target = page.parent / name if name else page
            where = f"{page.relative_to(root)}:{text.count(chr(10), 0, match.start()) + 1}"
            if not target.exists():
                yield f"{where}: {link}: no such file"
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
                yield f"{where}: {link}: no such heading"


def missing_files(root):
    text = (root / "ARCHITECTURE.md").read_text().split("## Old and new names")[0]
    for name in FILE.findall(text):
        if not any(next(folder.glob(name), None) for folder in (root, root / "src")):
            yield f"ARCHITECTURE.md: {name}: no such file"


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    found = [*findings(root), *missing_files(root)]
    print("\n".join([*found, f"broken links: {len(found)}"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
