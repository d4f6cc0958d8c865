"""Grammars against independent judges: jsonschema, Python's re, and a generator of documents.

The matcher and its masks are driven by build/drive_grammar (make drivers), which also compares
every mask with what advance() says of every token.
"""

import json
import os
import random
import re
import subprocess

import pytest

from conftest import HADAL, NO_SHARED, ROOT, SHARED

jsonschema = pytest.importorskip("jsonschema")

DRIVER = os.environ.get("HADAL_DRIVE_GRAMMAR", os.path.join(os.path.dirname(HADAL), "drive_grammar"))
TOKENIZER = SHARED / "data" / "deepseek-v3-tokenizer"


def drive(jobs, *args):
    if not os.path.exists(DRIVER):
        pytest.skip(f"no {DRIVER}: make drivers")
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    result = subprocess.run([DRIVER, *map(str, args)], input=lines, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)
    assert result.returncode == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.split("\n")[:-1]]
    assert len(answers) == len(jobs)
    return answers


def obj(required=None, **properties):
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names,
            "additionalProperties": False}


S, I, N, B, Z = ({"type": t} for t in ("string", "integer", "number", "boolean", "null"))
TREE = {"$defs": {"node": obj(value=I, children={"type": "array", "items": {"$ref": "#/$defs/node"}})},
        "$ref": "#/$defs/node"}
LIST = {"$defs": {"l": {"anyOf": [Z, obj(head=S, tail={"$ref": "#/$defs/l"})]}},
        "$ref": "#/$defs/l"}
EXPRESSION = {
    "$defs": {
        "e": {"anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/b"}]},
        "n": obj(kind={"const": "number"}, value=N),
        "b": obj(kind={"enum": ["add", "mul"]}, left={"$ref": "#/$defs/e"}, right={"$ref": "#/$defs/e"}),
    },
    "$ref": "#/$defs/e",
}

SCHEMAS = [
    True, {}, {"type": "object"}, {"type": "array"}, S, I, N, B, Z,
    {"type": ["string", "null"]}, {"type": ["integer", "boolean", "array"]},
    {"enum": ["red", "green", "blue"]}, {"enum": [1, 2.5, None, True, "x", [1, "a,b:{"], {"k": [{}]}]},
    {"const": {"a": [1, 2, {"b": "c: d, e"}]}}, {"const": "quote \" back \\ line \n bell \u0007"},
    {"type": "string", "enum": ["a", "b", 3]}, {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "maxLength": 300}, {"type": "string", "minLength": 3},
    {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]+$"}, {"type": "string", "pattern": "b+"},
    {"type": "string", "pattern": "^(?:é|ß|[α-ω])+$"}, {"type": "string", "pattern": "^a|b$"},
    {"type": "string", "pattern": "^[\"\\\\\\n]{1,3}$"}, {"type": "string", "pattern": "^.{3}$", "maxLength": 3},
    {"type": "string", "format": "date"}, {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"}, {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email"},
    {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "integer", "minimum": -17, "maximum": 345},
    {"type": "integer", "minimum": 1000}, {"type": "integer", "maximum": -3},
    {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8}, {"type": "integer", "minimum": -5},
    {"type": "number", "minimum": 0, "maximum": 1}, {"type": "number", "minimum": -1.25, "maximum": 2.5},
    {"type": "number", "exclusiveMinimum": 0}, {"type": "number", "exclusiveMaximum": 10.05, "minimum": 9.9},
    {"type": "array", "items": I}, {"type": "array", "items": S, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": B, "minItems": 4}, {"type": "array", "items": I, "maxItems": 0},
    {"type": "array", "prefixItems": [S, I], "items": False},
    {"type": "array", "prefixItems": [S, I], "items": B, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [S, B], "minItems": 1},
    {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": N}}},
    obj(), obj(a=S), obj(a=S, b=I, c=N), obj([], a=S, b=I, c=N), obj(["b"], a=S, b=I, c=N),
    obj(a=obj(b=obj(c=obj(d=B)))),
    {"type": "object", "properties": {"a": I}, "additionalProperties": S},
    {"type": "object", "properties": {"ab": I, "abc": S, "é\"\\": B}, "additionalProperties": True},
    {"type": "object", "additionalProperties": I},
    {"type": "object", "properties": {"a": I}, "required": ["a", "zz"], "additionalProperties": B},
    {"anyOf": [S, I, obj(a=I)]}, {"oneOf": [obj(k={"const": "x"}, v=I), obj(k={"const": "y"}, v=S)]},
    {"anyOf": [{"type": "string", "pattern": "^ab*$"}, {"type": "string", "maxLength": 3}]},
    {"allOf": [obj(a=S)]},
    {"$defs": {"p": {"type": "object", "properties": {"a": S}, "required": ["a"]}},
     "allOf": [{"$ref": "#/$defs/p"}, {"type": "object", "properties": {"b": I}, "required": ["b"]}]},
    TREE, LIST, EXPRESSION,
    {"$defs": {"a/b": I, "c%d": S}, "type": "array", "prefixItems": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c%25d"}],
     "items": False, "minItems": 2},
    {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
    obj(steps={"type": "array", "items": obj(explanation=S, output=S)}, final_answer=S),
    obj(name=S, email={"type": "string", "format": "email"}, age={"type": "integer", "minimum": 0, "maximum": 130},
        role={"enum": ["admin", "user"]}, tags={"type": "array", "items": S, "maxItems": 5},
        address={"anyOf": [Z, obj(street=S, zip={"type": "string", "pattern": "^[0-9]{5}$"})]}),
]  # fmt: skip


class Maker:
    """Documents of a schema, by rules of its own: nothing here knows the program."""

    ALPHABET = "abAZ09 _-:,{}[]\"\\/\n\téß€😀\u0001\u007f"

    def __init__(self, root, seed):
        self.root, self.random = root, random.Random(seed)

    def text(self, least=0, most=8):
        n = self.random.randint(least, max(least, most))
        return "".join(self.random.choice(self.ALPHABET) for _ in range(n))

    def any(self, depth):
        kind = self.random.randrange(7 if depth < 4 else 5)
        if kind == 5:
            return [self.any(depth + 1) for _ in range(self.random.randrange(3))]
        if kind == 6:
            return {self.text(): self.any(depth + 1) for _ in range(self.random.randrange(3))}
        return [None, True, self.random.randint(-999, 999), self.random.uniform(-5, 5), self.text()][kind]

    def resolve(self, ref):
        at = self.root
        for key in ref.split("/")[1:]:
            at = at[key.replace("%25", "%").replace("~1", "/").replace("~0", "~")]
        return at

    def number(self, s, integer):
        lo = s.get("minimum", s.get("exclusiveMinimum"))
        hi = s.get("maximum", s.get("exclusiveMaximum"))
        lo = lo if lo is not None else (hi if hi is not None else 0) - self.random.choice([1, 20, 5000])
        hi = hi if hi is not None else lo + self.random.choice([1, 20, 5000])
        while True:
            if integer:
                v = self.random.randint(int(lo), int(hi))
            else:
                v = self.random.choice([lo, hi, round(self.random.uniform(lo, hi), self.random.randrange(7))])
            if v == 0 and str(v).startswith("-"):
                continue
            if "e" not in repr(v) and jsonschema.Draft202012Validator(s).is_valid(v):
                return v

    def array(self, s, depth):
        prefix, items = s.get("prefixItems", []), s.get("items", True)
        least = s.get("minItems", 0)
        most = min(s.get("maxItems", least + 3), least + 3)
        if items is False:
            most = min(most, len(prefix))
        if depth > 6:
            most = least
        n = self.random.randint(least, most)
        return [self.make(prefix[i] if i < len(prefix) else items, depth + 1) for i in range(n)]

    def object(self, s, depth):
        made, properties = {}, s.get("properties", {})
        for key, value in properties.items():
            if key in s.get("required", []) or (depth < 6 and self.random.random() < 0.6):
                made[key] = self.make(value, depth + 1)
        others = s.get("additionalProperties", not properties)
        for key in s.get("required", []):
            if key not in properties:
                made[key] = self.make(others, depth + 1)
        if others is not False:
            for _ in range(self.random.randrange(3)):
                key = self.text().replace("\u0001", "") + "!"
                made[key] = self.make(others, depth + 1)
        return made

    def make(self, s, depth=0):
        if s is True or s == {}:
            return self.any(depth)
        if "$ref" in s:
            return self.make(self.resolve(s["$ref"]), depth)
        if "const" in s:
            return s["const"]
        if "enum" in s:
            return self.random.choice([v for v in s["enum"] if jsonschema.Draft202012Validator(s).is_valid(v)])
        for key in ("anyOf", "oneOf"):
            if key in s:
                return self.make(s[key][0] if depth > 6 else self.random.choice(s[key]), depth)
        if "allOf" in s:
            return {k: v for part in s["allOf"] for k, v in self.make(part, depth).items()}
        kind = s.get("type", "object")
        kind = self.random.choice(kind) if isinstance(kind, list) else kind
        if kind == "object":
            return self.object(s, depth)
        if kind == "array":
            return self.array(s, depth)
        if kind in ("integer", "number"):
            return self.number(s, kind == "integer") if set(s) != {"type"} else self.random.randint(-9999, 9999)
        if kind == "string" and ("pattern" in s or "format" in s):
            return self.patterned(s)
        if kind == "string":
            return self.text(s.get("minLength", 0), s.get("maxLength", s.get("minLength", 0) + 9))
        return None if kind == "null" else self.random.random() < 0.5

    SAMPLES = {
        "^[a-z]{2,5}-[0-9]+$": ["ab-1", "zzzzz-00123"],
        "b+": ["b", "abba", "\"b\"", "\nb"],
        "^(?:é|ß|[α-ω])+$": ["é", "ßαω"],
        "^a|b$": ["a", "b", "axyz", "xyzb"],
        "^[\"\\\\\\n]{1,3}$": ["\"", "\\\n\""],
        "^.{3}$": ["abc", "é€😀", "\"\\/"],
        "^[0-9]{5}$": ["12345", "00000"],
        "^ab*$": ["a", "abbbbbbb"],
        "date": ["2024-02-28", "1999-12-31", "2023-04-30"],
        "date-time": ["2024-01-02T03:04:05Z", "2024-01-02T23:59:59.123+01:30"],
        "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
        "ipv4": ["0.0.0.0", "255.255.255.255", "10.1.29.199"],
        "email": ["a@b.c", "first.last+tag@sub.example-site.org"],
    }  # fmt: skip

    def patterned(self, s):
        return self.random.choice(self.SAMPLES[s.get("pattern", s.get("format"))])


SEPARATORS = [(",", ":"), (", ", ": "), (",", ": "), (", ", ":")]


def documents(schema, seed, n):
    maker = Maker(schema, seed)
    made = [maker.make(schema) for _ in range(n)]
    validator = jsonschema.Draft202012Validator(schema)
    for document in made:
        validator.validate(document)
    return [json.dumps(d, ensure_ascii=False, separators=SEPARATORS[i % 4]) for i, d in enumerate(made)]


def job(schema, **more):
    return {"kind": "schema", "text": json.dumps(schema, ensure_ascii=False), **more}


def check_walks(schema, answer, least):
    assert "error" not in answer, (schema, answer)
    assert answer["wrong"] == 0 and not answer["stuck"], (schema, answer)
    assert len(answer["walks"]) >= least, (schema, answer)
    validator = jsonschema.Draft202012Validator(schema)
    for text in answer["walks"]:
        validator.validate(json.loads(text))


def test_walks_are_valid():
    answers = drive([job(s, walks=12, seed=i) for i, s in enumerate(SCHEMAS)])
    for schema, answer in zip(SCHEMAS, answers):
        check_walks(schema, answer, 3)


def test_walks_with_free_space_are_valid():
    answers = drive([job(s, walks=6, seed=i, space=8) for i, s in enumerate(SCHEMAS)])
    for schema, answer in zip(SCHEMAS, answers):
        check_walks(schema, answer, 2)


def test_valid_documents_are_accepted():
    texts = [documents(s, i, 80) for i, s in enumerate(SCHEMAS)]
    answers = drive([job(s, texts=t) for s, t in zip(SCHEMAS, texts)])
    for schema, made, answer in zip(SCHEMAS, texts, answers):
        refused = [t for t, fine in zip(made, answer["accepted"]) if not fine]
        assert not refused, (schema, refused[:5])


def test_indented_documents_are_accepted_where_space_is_free():
    texts = [[json.dumps(json.loads(t), ensure_ascii=False, indent=2) for t in documents(s, i, 20)]
             for i, s in enumerate(SCHEMAS)]  # fmt: skip
    answers = drive([job(s, texts=t, space=32) for s, t in zip(SCHEMAS, texts)])
    for schema, made, answer in zip(SCHEMAS, texts, answers):
        assert all(answer["accepted"]), (schema, made)


def mutate(text, rng):
    at = rng.randrange(len(text) + 1)
    what = rng.randrange(3)
    if what == 0:
        return text[:at] + text[at + 1 :]
    extra = rng.choice('0123456789-+.eE"\\{}[]:, abtruefalsn\n')
    return text[:at] + extra + text[at + (what == 1) :]


def is_valid(validator, text):
    def once(pairs):
        return dict(pairs)

    def refuse(name):
        raise ValueError(name)

    try:
        return validator.is_valid(json.loads(text, object_pairs_hook=once, parse_constant=refuse))
    except ValueError:
        return False


def test_invalid_texts_are_refused():
    rng = random.Random(7)
    texts = [[mutate(t, rng) for t in documents(s, i, 60) for _ in range(3)] for i, s in enumerate(SCHEMAS)]
    answers = drive([job(s, texts=t) for s, t in zip(SCHEMAS, texts)])
    n_refused = 0
    for schema, made, answer in zip(SCHEMAS, texts, answers):
        validator = jsonschema.Draft202012Validator(schema)
        for text, accepted in zip(made, answer["accepted"]):
            n_refused += not accepted
            assert not accepted or is_valid(validator, text), (schema, text)
    assert n_refused > 1000


def test_numbers_end():
    """A model that likes digits comes to an end; every number is a finite double."""
    long, longer = "1" + "0" * 19, "1" + "0" * 20
    cases = [
        (I, ["-" + long, "0"], ["-" + longer]),
        (N, [long + "." + "3" * 20 + "e-99", "1e99"], [longer, "1." + "0" * 21, "1e100"]),
        ({"type": "integer", "minimum": 5}, ["5", long], ["4", longer]),
        ({"type": "integer", "maximum": 5}, ["5", "-" + long], ["-" + longer]),
        ({"type": "integer", "minimum": 10**18}, [str(10**18), long], [str(10**18 - 1), longer]),
        ({"type": "number", "minimum": 0.25}, ["0.25" + "0" * 18, long + ".5"], ["0.25" + "0" * 19, "0.24"]),
        ({"type": "number", "exclusiveMinimum": 5}, ["5." + "0" * 19 + "1", "6"], ["5." + "0" * 20, "5"]),
        ({"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1}, ["-0." + "9" * 20, "0"], ["-1", "1.0"]),
    ]  # fmt: skip
    answers = drive([job(s, texts=yes + no, walks=30, seed=1) for s, yes, no in cases])
    for (schema, yes, no), answer in zip(cases, answers):
        assert answer["accepted"] == [True] * len(yes) + [False] * len(no), (schema, answer)
        assert len(answer["walks"]) == 30 and answer["unfinished"] == 0, (schema, answer)
        check_walks(schema, answer, 30)


def random_pattern(rng, depth=0):
    kind = rng.randrange(9 if depth < 3 else 4)
    if kind < 2:
        return rng.choice(["a", "b", "c", "é", "€", "😀", "\\n", "\\.", "-", "\\x61", "\\u00e9"])
    if kind == 2:
        return rng.choice(["[ab]", "[^a]", "[a-c]", "\\d", "\\w", ".", "\\S", "[é-€]", "[^\\d😀]", "\\s", "[\\w.-]", "\\W"])
    if kind == 3:
        return random_pattern(rng, depth + 1) + random_pattern(rng, depth + 1) if depth < 3 else "ab"
    if kind == 4:
        return "(" + random_pattern(rng, depth + 1) + "|" + random_pattern(rng, depth + 1) + ")"
    if kind == 5:
        return "(?:" + random_pattern(rng, depth + 1) + ")" + rng.choice(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?"])
    if kind == 6:
        return "(" + random_pattern(rng, depth + 1) + "|)" + rng.choice(["", "{2,3}", "+"])
    return random_pattern(rng, depth + 1) + random_pattern(rng, depth + 1)


def test_patterns_equal_python():
    rng = random.Random(5)
    patterns, texts = [], []
    while len(patterns) < 600:
        pattern = random_pattern(rng)
        if len(pattern) > 60:
            continue
        made = ["".join(rng.choice("aabbc1é€😀\n.-_ ") for _ in range(rng.randrange(7))) for _ in range(60)]
        patterns.append(pattern)
        texts.append(made)
    answers = drive([{"kind": "regex", "text": p, "texts": t, "walks": 1, "seed": i}
                     for i, (p, t) in enumerate(zip(patterns, texts))])  # fmt: skip
    n_true = 0
    for pattern, made, answer in zip(patterns, texts, answers):
        assert "error" not in answer, (pattern, answer)
        compiled = re.compile(pattern, re.ASCII)
        for text, accepted in zip(made, answer["accepted"]):
            n_true += accepted
            assert accepted == bool(compiled.fullmatch(text)), (pattern, text)
        assert answer["wrong"] == 0 and not answer["stuck"], (pattern, answer)
        for text in answer["walks"]:
            assert compiled.fullmatch(text), (pattern, text)
    assert n_true > 2000


def test_schema_patterns_search():
    patterns = ["ab", "^ab", "ab$", "^ab$", "^a|b$", "a.c", "^$", "", "(?:x|y)+z$"]
    rng = random.Random(3)
    texts = ["".join(rng.choice("abcxyz") for _ in range(rng.randrange(6))) for _ in range(200)] + [""]
    answers = drive([job({"type": "string", "pattern": p}, texts=[json.dumps(t) for t in texts]) for p in patterns])
    for pattern, answer in zip(patterns, answers):
        assert answer["accepted"] == [bool(re.search(pattern, t)) for t in texts], pattern


def test_choices():
    choices = ["yes", "no", "yes, sir", "é😀", "n", ""]
    texts = [*choices, "ye", "yes,", "noo", "é"]
    (answer,) = drive([{"kind": "choice", "choices": choices, "texts": texts, "walks": 40, "seed": 1}])
    assert answer["accepted"] == [t in choices for t in texts]
    assert answer["wrong"] == 0 and set(answer["walks"]) <= set(choices)


def test_counted_repetitions_beyond_unrolling():
    rng = random.Random(1)
    cases = [("[a-zé]{3,900}", "abé"), ("(?:ab|a){1,5000}", "ab"), ("(?:abc?d|x{2,3}){40,60000}y", "abcdxy"),
             ("\\w{900,}", "ab_"), ("(?:[0-9]{1,500},){2,1000}", "0,9"), ("(?:a{1,600}b){1,600}", "ab")]  # fmt: skip
    for pattern, letters in cases:
        texts = ["".join(rng.choice(letters) for _ in range(n)) for n in (0, 1, 2, 3, 5, 40, 899, 900, 901, 1500)]
        texts += ["ab" * 300, "abcd" * 40 + "y", "abd" * 39 + "y", "1," * 1000, "1," * 1001, "a" * 600 + "b", "a" * 601 + "b"]
        (answer,) = drive([{"kind": "regex", "text": pattern, "texts": texts, "walks": 1, "seed": 2}])
        assert answer["accepted"] == [bool(re.fullmatch(pattern, t, re.A)) for t in texts], pattern
        assert answer["wrong"] == 0 and answer["bytes"] < 100_000


def nested(n):
    schema = {"type": "string"}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = [
    ({"type": "stsring"}, "invalid_schema"), ({"type": ["string", 7]}, "invalid_schema"),
    ({"type": 5}, "invalid_schema"), ({"type": []}, "invalid_schema"),
    ({"type": "string", "pattern": "("}, "invalid_pattern"), ({"type": "string", "pattern": "[z-a]"}, "invalid_pattern"),
    ({"type": "string", "pattern": "(?<=a)b"}, "unsupported_pattern"), ({"type": "string", "pattern": "(a)\\1"}, "unsupported_pattern"),
    ({"type": "string", "pattern": "a" * 65536}, "invalid_pattern"),
    ({"type": "string", "pattern": "a{1,100000}"}, "schema_too_complex"),
    ({"type": "string", "pattern": "(a|b)*a(a|b){25}"}, "schema_too_complex"),
    ({"$ref": "#"}, "schema_cycle"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "schema_cycle"),
    ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"}, "schema_cycle"),
    (obj(a={"$ref": "#"}), "unsatisfiable"),
    ({"$ref": "http://example.org/x"}, "unsupported_schema"), ({"$ref": "file:///etc/x"}, "unsupported_schema"),
    ({"$ref": "#/$defs/none"}, "invalid_schema"), ({"$ref": "#/$defs/%zz"}, "invalid_schema"),
    ({"type": "array", "maxItems": 2**64 - 1}, "invalid_schema"), ({"type": "array", "maxItems": 2**31}, "schema_too_complex"),
    ({"type": "array", "minItems": 5, "maxItems": 4}, "invalid_schema"), ({"type": "array", "minItems": -1}, "invalid_schema"),
    ({"type": "array", "minItems": 1.5}, "invalid_schema"), ({"type": "string", "maxLength": 2**31}, "schema_too_complex"),
    (nested(33), "schema_too_deep"), (nested(900), "schema_too_deep"),
    ({"enum": []}, "invalid_schema"), ({"enum": [str(i) for i in range(10001)]}, "schema_too_complex"),
    ({"enum": [str(i) for i in range(1000000)]}, "schema_too_complex"),
    ({"not": {}}, "unsupported_schema"), ({"type": "string", "enum": [1, 2]}, "unsatisfiable"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "unsupported_schema"),
    ({"const": "x" * 1048576}, "schema_too_complex"), (False, "unsatisfiable"),
    ({"type": "object", "properties": 5}, "invalid_schema"), ({"type": "object", "required": [1]}, "invalid_schema"),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, "unsatisfiable"),
    ({"type": "string", "format": "regex"}, "unsupported_schema"), ({"type": "number", "multipleOf": 3}, "unsupported_schema"),
    ({"type": "object", "patternProperties": {}}, "unsupported_schema"), ({"type": "array", "uniqueItems": True}, "unsupported_schema"),
    ({"type": "string", "pattern": "^a*$", "maxLength": 3}, "unsupported_schema"), (7, "invalid_schema"),
    (obj([], **{f"p{i}": {} for i in range(5000)}), "schema_too_complex"),
    ({"$defs": {"a": {"type": "object", "required": [f"r{i}" for i in range(5000)]}}, "allOf": [{"$ref": "#/$defs/a"}] * 9000}, "schema_too_complex"),
    ({"type": "object", "required": [f"r{i}" for i in range(5000)]}, "schema_too_complex"),
    (obj(**{f"p{i}": {"type": "number", "minimum": i, "maximum": i + 0.123456789} for i in range(2000)}), "schema_too_complex"),
    ({"type": "string", "pattern": "|".join(["\\p{L}\\p{N}*\\p{P}"] * 200)}, "schema_too_complex"),
    ({"type": "string", "pattern": "^" + "\\p{L}" * 600 + "$"}, "schema_too_complex"),
    ({"allOf": [{"$ref": "#/$defs/d0"}, obj(a=S)], "$defs": {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % 9}"} for i in range(9)}}, "schema_cycle"),
]  # fmt: skip


def test_hostile_schemas_are_refused_by_name():  # S17, S22, FT34
    answers = drive([job(s) for s, _ in HOSTILE])
    for (schema, code), answer in zip(HOSTILE, answers):
        assert answer.get("code", "accepted") == code, (str(schema)[:200], answer)
        assert answer["error"].startswith(f"{code}: ")


def test_errors_name_the_place():
    schema = obj(a={"type": "array", "items": {"type": "stsring"}})
    (answer,) = drive([job(schema)])
    assert "#/properties/a/items" in answer["error"]


def test_large_but_honest_schemas():
    cases = [
        {"enum": [f"name {i}" for i in range(9000)]},
        {"anyOf": [obj(kind={"const": f"k{i}"}, v=I) for i in range(300)]},
        obj(**{f"p{i}": S for i in range(1000)}),
        obj([], **{f"p{i}": I for i in range(200)}),
        nested(30), nested(22),
        {"$defs": {f"d{i}": ({"$ref": f"#/$defs/d{i + 1}"} if i < 300 else obj(a=I)) for i in range(301)},
         "$ref": "#/$defs/d0"},
        obj(a=obj(b=obj(c=obj(d={"type": "string", "maxLength": 65536})))),
        {"type": "string", "pattern": "^(a+)+$"}, {"type": "string", "pattern": "(a|a)*b"},
        {"type": "array", "items": S, "maxItems": 65536},
    ]  # fmt: skip
    answers = drive([job(s, walks=2, seed=1) for s in cases])
    for schema, answer in zip(cases, answers):
        assert "error" not in answer, (str(schema)[:200], answer)
        assert answer["wrong"] == 0 and not answer["stuck"]
        assert answer["bytes"] <= 16 * 1024 * 1024
        for text in answer["walks"]:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_the_verdict_on_a_limit_does_not_depend_on_the_place():  # S14
    inner = {"type": "string", "maxLength": 65536}
    for n in range(5):
        (answer,) = drive([job(inner)])
        assert "error" not in answer
        inner = obj(a=inner)


def test_nesting_is_bounded_and_never_stuck():
    deep = "[" * 100 + "]" * 100
    (answer,) = drive([{"kind": "schema", "text": "{}", "texts": [deep, "[" * 2000 + "]" * 2000]}])
    assert answer["accepted"] == [True, False]


def test_real_vocabulary():
    if not (TOKENIZER / "tokenizer.json").exists():
        pytest.skip(NO_SHARED)
    picked = [s for i, s in enumerate(SCHEMAS) if i % 4 == 0] + [TREE, EXPRESSION]
    jobs = [job(s, walks=2, seed=i) for i, s in enumerate(picked)]
    jobs += [job(s, walks=1, seed=i, space=16) for i, s in enumerate(picked)]
    for schema, answer in zip(picked * 2, drive(jobs, TOKENIZER)):
        check_walks(schema, answer, 0)
