"""hadal tokenize and detokenize against the `tokenizers` package, on the real tokenizer where
it is at hand and on small ones trained here."""
import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import tokenizers
from conftest import NO_SHARED
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
HADAL = os.environ.get("HADAL", str(ROOT / "build/hadal"))
SHARED = Path(os.environ.get("HADAL_SHARED", ROOT.parent / "shared"))
REAL = SHARED / "data/deepseek-v3-tokenizer"

V3_PATTERNS = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
CASED = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A
38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF
1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D
1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4
1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F
2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B A722-A76F
A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3
104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"""
V2_PATTERNS = [
    "[\r\n]",
    r"\s?[%s]+" % "".join("-".join(chr(int(c, 16)) for c in r.split("-")) for r in CASED.split()),
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    "[一-龥\u0800-一가-\ud7ff]+",
]

FRAGMENTS = [
    "a", "the", "The", " ", "  ", "\n", "\r\n", "\r", "\t", "\v", "\f", "1", "12345", "你好", "カタカナ",
    "ー々〆", "🙂", "👨‍👩‍👧‍👦", "🇩🇪", "👍🏽", "e\u0301", "a\u0308\u0323", "\u0300", "\u0085", "\u180e",
    "\u200b", "\u200d", "\ufeff", "\u00a0", "\u3000", "\u2028", "\u2029", "\u1680", "\u202e", "١٢٣",
    "²", "Ⅷ", "½", "𝟘", "שלום", "مرحبا", "Привет", "ǅ", "ß", "ſ", "K", "İ", "<", "<|", "｜", "▁", "don't",
    "'s", "'LL", "'re", "(", "...", "!!", "//", "_x", "€", "+", "\0", "\x01", "\x1b[2J", "\x7f", "\u0378",
    "\U000e0001", "\U0010ffff", "\ud7ff", "\ue000", "한국어", "ก็", "नमस्ते", ".a", "#a", "-1", "$x", "\\n",
    "def f(x):\n    return x\n", "</think>", "<think>", "#include <stdio.h>", "ĠĊ", "ﬁ", "\u1c89", "\U00011de3",
]


def run(command, directory, data, *flags):
    return subprocess.run([HADAL, command, str(directory), *flags], input=data,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)


def run_lines(command, directory, values, *flags):
    data = "".join(json.dumps(v) + "\n" for v in values).encode()
    out = run(command, directory, data, "--json-lines", *flags)
    assert out.returncode == 0, out.stderr.decode()
    return [json.loads(line) for line in out.stdout.decode().split("\n")[:-1]]


def generated_strings(seed, count, specials):
    rng = random.Random(seed)
    planes = [(0x20, 0x7F), (0, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000),
              (0x20000, 0x110000)]

    def one():
        kind, n = rng.random(), rng.choice([1, 2, 5, 20, 100])
        if kind < 0.5:
            return "".join(rng.choice(specials if specials and rng.random() < 0.08 else FRAGMENTS)
                           for _ in range(n))
        if kind < 0.7:
            return "".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(n))
        if kind < 0.8:
            return rng.choice(FRAGMENTS) * rng.choice([1, 2, 3, 63, 64, 65, 500])
        if kind < 0.9 or not specials:
            return "".join(rng.choice(" \n\r\t\u00a0a1.") for _ in range(n))
        return "".join(rng.choice(specials)[rng.randrange(3):rng.randrange(1, 30)] for _ in range(n))

    return ["", *FRAGMENTS, *(one() for _ in range(count))]


def train(pre_tokenizer, size, added=(), alphabet=True):
    tk = Tokenizer(models.BPE())
    tk.pre_tokenizer = pre_tokenizer
    tk.decoder = decoders.ByteLevel()
    initial = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet else []
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=initial, show_progress=False,
                                  special_tokens=["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"])
    rng = random.Random(size)
    tk.train_from_iterator(("".join(rng.choices(FRAGMENTS, k=40)) for _ in range(400)), trainer)
    tk.add_tokens(list(added))
    return tk


def splits(patterns, *more):
    return pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(p), "isolated") for p in patterns), *more,
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PLAIN_ADDED = [AddedToken("<｜User｜>", normalized=True), AddedToken("<think>", normalized=False),
               AddedToken("</think>", normalized=False), AddedToken("<think>x", normalized=False)]
RULED_ADDED = [AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True, normalized=False),
               AddedToken("<b>", lstrip=True, rstrip=True), AddedToken("word", single_word=True),
               AddedToken("ab", normalized=True), AddedToken("bc", normalized=False),
               AddedToken(" <s>", special=True)]


def behaviors():
    split = pre_tokenizers.Split
    return pre_tokenizers.Sequence([
        split(Regex(r"\s+"), "merged_with_next"), split("a", "merged_with_previous"),
        split(Regex(r"[\p{P}\p{S}]"), "contiguous"), split(Regex(r"\p{L}+"), "isolated", invert=True),
        split(Regex(r"[0-9]+?x|b{2,3}|(?i:'s|'ll)|(?<=\p{L})1"), "isolated"), split("\t", "removed"),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)])


TOYS = {
    "v3": lambda: train(splits(V3_PATTERNS), 600, PLAIN_ADDED),
    "v2": lambda: train(splits(V2_PATTERNS, pre_tokenizers.Digits(individual_digits=True)), 500,
                        PLAIN_ADDED),
    "300 entries": lambda: train(splits(V3_PATTERNS), 300, PLAIN_ADDED),
    "bare": lambda: train(pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True), 400),
    "no regex": lambda: train(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), 400),
    "rules": lambda: train(splits(V3_PATTERNS), 500, RULED_ADDED),
    "behaviors": lambda: train(behaviors(), 500, RULED_ADDED),
}


@pytest.fixture(scope="module", params=["real", *TOYS])
def pair(request, tmp_path_factory):
    """(directory, the reference, the reference without added tokens, spellings of those)"""
    if request.param == "real":
        if not (REAL / "tokenizer.json").exists():
            pytest.skip(NO_SHARED)
        directory = REAL
    else:
        directory = tmp_path_factory.mktemp("toy")
        TOYS[request.param]().save(str(directory / "tokenizer.json"))
    document = json.loads((directory / "tokenizer.json").read_text())
    full = Tokenizer.from_str(json.dumps(document))
    specials = [t["content"] for t in document["added_tokens"]]
    document["added_tokens"] = []
    return directory, full, Tokenizer.from_str(json.dumps(document)), specials


def test_ids_are_those_of_the_reference(pair):
    directory, full, plain, specials = pair
    spaced = [s + " " for s in specials[:40]] + [" " + s for s in specials[:40]] + ["word", "abc"]
    texts = generated_strings(7, 2500, specials[-60:] + spaced)
    for reference, flags in ((full, ["--special"]), (plain, [])):
        got = run_lines("tokenize", directory, texts, *flags)
        assert len(got) == len(texts)
        for text, ids in zip(texts, got):
            assert ids == reference.encode(text, add_special_tokens=False).ids, repr(text)


def test_plain_text_never_becomes_an_added_token(pair):
    directory, full, _, specials = pair
    added = {full.token_to_id(s) for s in specials}
    texts = specials + ["x" + "".join(specials[:50])]
    for ids in run_lines("tokenize", directory, texts):
        assert not added & set(ids)


def test_text_of_ids_is_that_of_the_reference(pair):
    directory, full, _, _ = pair
    rng = random.Random(11)
    size = full.get_vocab_size()
    lists = [[rng.randrange(size) for _ in range(rng.randrange(40))] for _ in range(2000)]
    lists += [[i] for i in range(min(size, 3000))]
    for flags, skip in (([], False), (["--skip-special"], True)):
        got = run_lines("detokenize", directory, lists, *flags)
        for ids, text in zip(lists, got):
            assert text == full.decode(ids, skip_special_tokens=skip), ids


def test_text_survives_the_round_trip(pair):  # K26
    directory, full, _, _ = pair
    document = json.loads(full.to_str())
    if "Removed" in json.dumps(document["pre_tokenizer"]):
        pytest.skip("this pre-tokenizer drops text on purpose: nothing comes back whole")
    if document["pre_tokenizer"].get("add_prefix_space"):
        pytest.skip("this pre-tokenizer adds a space: nothing comes back whole")
    texts = generated_strings(13, 1500, [])
    ids = run_lines("tokenize", directory, texts)
    assert run_lines("detokenize", directory, ids) == texts


def toy(tmp_path, change=None, config=None):
    tk = train(splits(V3_PATTERNS), 320, PLAIN_ADDED)
    document = json.loads(tk.to_str())
    if change:
        change(document)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return document


def test_whole_input_is_one_text(tmp_path):
    document = toy(tmp_path)
    text = "Hello 你好\n\nworld 🙂\n"
    out = run("tokenize", tmp_path, text.encode())
    assert out.returncode == 0 and out.stdout.count(b"\n") == 1
    ids = json.loads(out.stdout)
    assert ids == Tokenizer.from_str(json.dumps(document)).encode(text).ids
    assert run("detokenize", tmp_path, out.stdout).stdout == text.encode()
    lines = "\n".join(map(str, ids)).encode()
    assert run("detokenize", tmp_path, lines).stdout == text.encode()
    assert run("tokenize", tmp_path, b"").stdout == b"[]\n"
    assert run("detokenize", tmp_path, b"[]").stdout == b""
    assert run("detokenize", tmp_path, b"").stdout == b""


def test_bos_comes_once_and_only_when_asked(tmp_path):
    toy(tmp_path, config={"bos_token": {"content": "<｜begin▁of▁sentence｜>"}, "add_bos_token": True})
    assert json.loads(run("tokenize", tmp_path, b"!").stdout)[0] != 0
    assert json.loads(run("tokenize", tmp_path, b"!", "--bos").stdout)[0] == 0


def test_template_processing_names_the_bos(tmp_path):
    def change(d):
        d["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<｜end▁of▁sentence｜>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {}}
    toy(tmp_path, change)
    assert json.loads(run("tokenize", tmp_path, b"!").stdout)[0] != 1
    assert json.loads(run("tokenize", tmp_path, b"!", "--bos").stdout)[0] == 1


def test_merges_as_pairs_and_as_strings_are_the_same(tmp_path):  # K12
    text = "".join(FRAGMENTS).encode("utf-8", "ignore")
    toy(tmp_path)
    first = run("tokenize", tmp_path, text).stdout

    def change(d):
        merges = d["model"]["merges"]
        d["model"]["merges"] = [" ".join(m) if isinstance(m, list) else m.split(" ") for m in merges]
    toy(tmp_path, change)
    assert run("tokenize", tmp_path, text).stdout == first


def test_ignore_merges_takes_whole_pieces(tmp_path):
    def change(d):
        vocab = d["model"]["vocab"]
        vocab["Zebra"] = max(vocab.values()) + 100
        d["model"]["ignore_merges"] = True
        d["added_tokens"] = d["added_tokens"][:2]
    document = toy(tmp_path, change)
    reference = Tokenizer.from_str(json.dumps(document))
    for text in ("Zebra", "Zebras", "the Zebra"):
        ids = json.loads(run("tokenize", tmp_path, text.encode()).stdout)
        assert ids == reference.encode(text).ids
    assert run("detokenize", tmp_path, json.dumps([document["model"]["vocab"]["Zebra"]]).encode()
               ).stdout == b"Zebra"


def test_sparse_ids_are_kept(tmp_path):  # K04
    def change(d):
        d["added_tokens"][-1]["id"] = 5000
    toy(tmp_path, change)
    assert json.loads(run("tokenize", tmp_path, b"<think>x", "--special").stdout) == [5000]
    refused = run("detokenize", tmp_path, b"[4999]")
    assert refused.returncode == 2 and b"id 4999" in refused.stderr


def test_an_added_token_that_merging_could_make_stays_text(tmp_path):
    """The word is in the base vocabulary; plain text gives its parts instead."""
    document = toy(tmp_path)
    vocab = document["model"]["vocab"]
    merge = document["model"]["merges"][0]
    word = "".join(merge if isinstance(merge, list) else merge.split(" "))

    def change(d):
        d["added_tokens"].append({"id": vocab[word], "content": word, "single_word": False,
                                  "lstrip": False, "rstrip": False, "normalized": False,
                                  "special": False})
    toy(tmp_path, change)
    text = Tokenizer.from_str(json.dumps(document)).decode([vocab[word]])
    assert vocab[word] not in json.loads(run("tokenize", tmp_path, text.encode()).stdout)


@pytest.mark.parametrize("flags, data, words", [
    ([], b"ab\xff", ["byte 2", "0xff"]),
    ([], "x".encode() + b"\xed\xa0\x80", ["byte 1"]),
    (["--json-lines"], b'"a"\n"\\ud800"\n', ["line 2"]),
    (["--json-lines"], b'"a"\n"\\udc00\\ud800"\n', ["line 2"]),
    (["--json-lines"], b'["a"]\n', ["line 1"]),
    (["--json-lines"], b'"a"\n\n"b"\n', ["line 2"]),
    (["--bos"], b"a", ["beginning-of-sequence"]),
])
def test_bad_text_is_refused_with_its_place(tmp_path, flags, data, words):
    toy(tmp_path)
    out = run("tokenize", tmp_path, data, *flags)
    assert out.returncode == 2 and out.stderr.count(b"\n") == 1
    for word in words:
        assert word in out.stderr.decode()


@pytest.mark.parametrize("data", [b"[1,", b"[1 2]", b"[-1]", b"[1.5]", b"1,2", b"[99999999999999]",
                                  b"[1]x", b"[[1]]", b"x", b"[1]]", b"{}", b"[\"a\"]"])
def test_bad_ids_are_refused(tmp_path, data):
    toy(tmp_path)
    out = run("detokenize", tmp_path, data)
    assert out.returncode == 2 and out.stderr.startswith(b"error: standard input: ")


def test_files_beyond_reason_are_refused(tmp_path):  # K01
    path = tmp_path / "tokenizer.json"
    path.touch()
    os.truncate(path, 200 << 20)
    out = run("tokenize", tmp_path, b"a")
    assert out.returncode == 2 and b"larger than" in out.stderr
    for text in (b"", b"{", b"[]", b'{"model":{"vocab":{"\\ud800":0}}}', b"\xff", b"[" * 100000):
        path.write_bytes(text)
        out = run("tokenize", tmp_path, b"a")
        assert out.returncode == 2 and out.stderr.count(b"\n") == 1
        assert b"tokenizer.json" in out.stderr


def test_missing_files_are_named(tmp_path):  # K01
    out = run("tokenize", tmp_path, b"a")
    assert out.returncode == 2 and b"tokenizer.json" in out.stderr


@pytest.mark.parametrize("name, text", [("a", "a" * 300000), ("space", " " * 300000),
                                        ("space a", " " * 300000 + "a"), ("emoji", "🙂" * 75000),
                                        ("spaces, feeds", (" " * 999 + "\n") * 300),
                                        ("letters", "".join(random.Random(3).choices(
                                            "theaonirsTHE", k=100000))),
                                        ("few letters", "".join(random.Random(4).choices(
                                            "th", k=50000))),
                                        ("han", "".join(random.Random(5).choices(
                                            "的一是不了人我在有他这中大来上国", k=30000))),
                                        ("tabs", "\t" * 300000 + "."), ("marks", "\u0300" * 100000)])
def test_long_runs_equal_the_reference(pair, name, text):  # R10
    directory, _, plain, _ = pair
    if name in ("space a", "tabs", "spaces, feeds") and r"\\s+$" in plain.to_str():
        text = text[-3000:]  # the reference itself is quadratic here
    ids = json.loads(run("tokenize", directory, text.encode()).stdout)
    assert ids == plain.encode(text, add_special_tokens=False).ids


def test_K13_merges_that_feed_each_other(tmp_path):
    """A result is as long as its parts together, so no order of merges can go round in a circle."""
    def change(d):
        vocab, merges = d["model"]["vocab"], []
        words = ["a" * n for n in range(2, 10)] + ["ab", "ba", "aba", "bab", "abab", "baba"]
        for word in words:
            vocab.setdefault(word, max(vocab.values()) + 100)
        for word in reversed(words):
            merges += [[word[:i], word[i:]] for i in range(1, len(word)) if {word[:i], word[i:]} <= vocab.keys()]
        d["model"]["merges"] = merges

    document = toy(tmp_path, change)
    reference = Tokenizer.from_str(json.dumps(document))
    rng = random.Random(13)
    texts = ["a" * n for n in range(40)] + ["".join(rng.choices("ab", k=rng.randrange(60))) for _ in range(200)]
    for text, ids in zip(texts, run_lines("tokenize", tmp_path, texts)):
        assert ids == reference.encode(text).ids, text
    text = b"ab" * 200000
    assert run("detokenize", tmp_path, run("tokenize", tmp_path, text).stdout).stdout == text


def test_K16_the_longest_added_token_counts(tmp_path):
    """One is the beginning of another, and of a third; what goes on differently is the shorter one."""
    document = toy(tmp_path, lambda d: d["added_tokens"].append(
        {"id": d["added_tokens"][-1]["id"] + 1, "content": "<think>xy", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}))
    reference = Tokenizer.from_str(json.dumps(document))
    ids = {t["content"]: t["id"] for t in document["added_tokens"]}
    expected = {"<think>": ["<think>"], "<think>x": ["<think>x"], "<think>xy": ["<think>xy"],
                "<think><think>x": ["<think>", "<think>x"], "<think>xy<think>": ["<think>xy", "<think>"]}
    for text, names in expected.items():
        got = json.loads(run("tokenize", tmp_path, text.encode(), "--special").stdout)
        assert got == [ids[name] for name in names] == reference.encode(text).ids
    for text in ("<think>X", "<thin", "<think>xz", "<<think>xy>"):
        got = json.loads(run("tokenize", tmp_path, text.encode(), "--special").stdout)
        assert got == reference.encode(text).ids


SURROGATES = {
    "K25 high": "\\ud800", "K25 low": "\\udc00", "K25 the wrong way round": "\\udc00\\ud800",
    "K25 two high": "\\ud800\\ud800", "K25 before a letter": "\\ud83da", "K25 as bytes": "\xed\xa0\x80",
}


@pytest.mark.parametrize("place", ["vocab", "merges", "added"])
@pytest.mark.parametrize("row", SURROGATES)
def test_lone_surrogates(tmp_path, row, place):
    """In any string of the file, spelled or as bytes; a pair is a character."""
    toy(tmp_path)
    file = tmp_path / "tokenizer.json"
    document = json.loads(file.read_text())
    mark = "MARK"
    if place == "vocab":
        document["model"]["vocab"][mark] = 9999
    elif place == "merges":
        document["model"]["merges"].append([mark, mark])
    else:
        document["added_tokens"].append({"id": 9999, "content": mark})
    text = json.dumps(document)
    if place == "added":
        file.write_text(text.replace(mark, "\\ud83d\\ude00"))
        assert run("tokenize", tmp_path, "😀".encode(), "--special").stdout == b"[9999]\n"
    file.write_bytes(text.encode().replace(mark.encode(), SURROGATES[row].encode("latin-1")))
    out = run("tokenize", tmp_path, b"a")
    assert out.returncode == 2 and b"tokenizer.json: not valid JSON: line" in out.stderr


def test_the_reference_is_the_known_one():
    assert tuple(map(int, tokenizers.__version__.split(".")[:2])) >= (0, 20)
