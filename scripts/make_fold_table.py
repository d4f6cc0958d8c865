#!/usr/bin/env python3
"""Writes src/tokenizer/fold_table.c: what a character becomes when texts are compared loosely.

Compatibility decomposition (NFKD), without combining marks, in lower case character by
character. Hangul syllables, which decompose by a formula, and marks, which become nothing, are
left out.

    python3 scripts/make_fold_table.py > src/tokenizer/fold_table.c
"""
import unicodedata

PER_LINE = 12


def folded(char):
    kept = (c for c in unicodedata.normalize("NFKD", char) if unicodedata.category(c)[0] != "M")
    return "".join(c.lower() for c in kept)


def array(kind, name, words):
    print("const %s %s[] = {" % (kind, name))
    for i in range(0, len(words), PER_LINE):
        print("    " + " ".join("%d," % w for w in words[i:i + PER_LINE]))
    print("};\n")


def main():
    chars, ends, pool = [], [], []
    for c in range(0x110000):
        if 0xAC00 <= c <= 0xD7A3 or 0xD800 <= c < 0xE000 or unicodedata.category(chr(c))[0] == "M":
            continue
        text = folded(chr(c))
        if text != chr(c):
            chars.append(c)
            pool += map(ord, text)
            ends.append(len(pool))
    print("/* fold_table.c - the folded form of every character that has another one.\n"
          " *\n"
          " * Written by scripts/make_fold_table.py. The form of text_fold_chars[i] is the part of\n"
          " * text_fold_pool that ends at text_fold_ends[i] and begins where the one before ends. */\n"
          '#include "tokenizer/unicode.h"\n\n'
          "/* clang-format off */")
    array("uint32_t", "text_fold_chars", chars)
    array("uint16_t", "text_fold_ends", ends)
    array("uint32_t", "text_fold_pool", pool)
    print("/* clang-format on */\n\n"
          "const int32_t text_fold_n_chars = (int32_t)HD_LEN(text_fold_chars);")


main()
