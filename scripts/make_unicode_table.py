#!/usr/bin/env python3
"""Writes src/tokenizer/unicode_table.c: the general category of every code point.

The categories are asked from the regular expressions of the `tokenizers` package, because
equality with that package is what the table is for; its Unicode version becomes ours.

    python3 scripts/make_unicode_table.py > src/tokenizer/unicode_table.c
"""
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

CATEGORIES = ("Cn Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po "
              "Sm Sc Sk So Zs Zl Zp Cc Cf Co").split()
PER_LINE = 8


def members(category):
    keep = Split(Regex(r"\p{%s}" % category), "removed", invert=True)
    found = set()
    for base in range(0, 0x110000, 4096):
        block = "".join(chr(c) for c in range(base, base + 4096) if not 0xD800 <= c < 0xE000)
        for piece, _ in keep.pre_tokenize_str(block):
            found.update(map(ord, piece))
    return found


def main():
    category = [0] * 0x110000  # surrogates are no characters: Cn
    for index, name in enumerate(CATEGORIES):
        if index:
            for c in members(name):
                category[c] = index
    starts = [c for c in range(0x110000) if c == 0 or category[c] != category[c - 1]]
    words = ["0x%07x," % (c << 5 | category[c]) for c in starts]
    print("/* unicode_table.c - the general category of every code point, as ranges.\n"
          " *\n"
          " * Written by scripts/make_unicode_table.py. Each word is first << 5 | category; a range\n"
          " * ends where the next begins, the last at 0x110000. */\n"
          '#include "tokenizer/unicode.h"\n\n'
          "/* clang-format off */\n"
          "const uint32_t text_unicode_ranges[] = {")
    for i in range(0, len(words), PER_LINE):
        print("    " + " ".join(words[i:i + PER_LINE]))
    print("};\n/* clang-format on */\n\n"
          "const int32_t text_unicode_n_ranges = (int32_t)HD_LEN(text_unicode_ranges);")


main()
