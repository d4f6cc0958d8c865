"""Train the tokenizer: byte-level BPE of 4,096 entries in the structure of the real V3/V4 tokenizer.json.

Ids as there: 0-2 begin, end, pad; 3-258 the bytes; then merges; added tokens last. Digits never
merge (the training text has no two digits side by side), so arithmetic sees single digits.
With --like FILE nothing is trained: the last two place-holders become the markers that V4.1 has there.
"""
import argparse
import json
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import corpus
from encoding import BOS, EOS, PAD, SYSTEM

VOCAB = 4096
PATTERNS = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]
# (token, special) in the order of the real V4 file
ADDED = [("<｜fim▁hole｜>", False), ("<｜fim▁begin｜>", False), ("<｜fim▁end｜>", False), ("<｜User｜>", False),
         ("<｜Assistant｜>", False), ("<|EOT|>", True), ("<｜tool▁calls▁begin｜>", False), ("<｜tool▁calls▁end｜>", False),
         ("<｜tool▁call▁begin｜>", False), ("<｜tool▁call▁end｜>", False), ("<｜tool▁outputs▁begin｜>", False),
         ("<｜tool▁outputs▁end｜>", False), ("<｜tool▁output▁begin｜>", False), ("<｜tool▁output▁end｜>", False),
         ("<｜tool▁sep｜>", False), ("<think>", False), ("</think>", False), ("｜DSML｜", False),
         ("<｜latest_reminder｜>", False), ("<｜action｜>", False), ("<｜query｜>", False), ("<｜authority｜>", False),
         ("<｜domain｜>", False), ("<｜title｜>", False), ("<｜read_url｜>", False)]

V41_MARKS = {404: SYSTEM, 403: "<｜deepseek_image｜>"}  # number of the place-holder -> marker, neither of them special


def renamed(path: str) -> dict:
    """The file of V4's tokenizer with V4.1's markers."""
    file = json.load(open(path))
    names = {f"<｜place▁holder▁no▁{i}｜>": mark for i, mark in V41_MARKS.items()}
    for token in file["added_tokens"]:
        if token["content"] in names:
            token.update(content=names.pop(token["content"]), special=False)
    if names:
        raise ValueError(f"{path} has no {sorted(names)}")
    return file


def build(n_documents: int) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.Sequence([])
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated", invert=False) for p in PATTERNS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.post_processor = processors.ByteLevel(add_prefix_space=True, trim_offsets=False, use_regex=True)
    tok.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - len(ADDED), special_tokens=[BOS, EOS, PAD], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(texts(n_documents), trainer)
    fill = VOCAB - len(ADDED) - tok.get_vocab_size()
    tok.add_special_tokens([AddedToken(f"<｜place▁holder▁no▁{i}｜>", normalized=False, special=True) for i in range(fill)])
    for text, special in ADDED:
        token = AddedToken(text, normalized=False, special=special)
        (tok.add_special_tokens if special else tok.add_tokens)([token])
    return tok


def texts(n: int):
    """Training text without markers and without neighboring digits."""
    marks = re.compile("|".join(re.escape(t) for t in [BOS, EOS] + [t for t, _ in ADDED]))
    for i in range(n):
        text = corpus.document(corpus.HELD_OUT * 2 + i, 400)[1]
        yield from marks.split(re.sub(r"(\d)\d+", r"\1", text))


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out", default="tokenizer.json")
    ap.add_argument("--documents", type=int, default=40000)
    ap.add_argument("--like", help="a tokenizer.json of V4, to make V4.1's")
    args = ap.parse_args()
    if args.like:
        with open(args.out, "w") as f:
            json.dump(renamed(args.like), f, ensure_ascii=False, indent=2)
        tok = Tokenizer.from_file(args.out)
    else:
        tok = build(args.documents)
        tok.save(args.out)
    print("entries", tok.get_vocab_size(), {t: tok.token_to_id(t) for t in (BOS, EOS, PAD, "!", "0", "<think>", "｜DSML｜")})


if __name__ == "__main__":
    main()
