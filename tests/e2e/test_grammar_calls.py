"""Calls of tools held to their schemas, in every chat format, by random walks through the masks.

A random walk is the hardest model there is: it writes whatever is allowed. What it wrote is read by
the parser of replies, as in a server, and its arguments are judged by jsonschema.
"""

import json
import random
import re

import jsonschema
import pytest
from test_grammar import LIST, SCHEMAS, TREE, B, I, N, S, Z, drive, obj

FORMATS = {"v3": 1, "v31": 2, "v32": 3, "v4": 4}
TEXTS = {  # how one call of f with the argument a = "x" is written
    "v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "v32": '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "v4": '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
}  # fmt: skip
DSML = ("v32", "v4")
EVERY = pytest.mark.parametrize("format", FORMATS)
SPELLED = pytest.mark.parametrize("spelled", [False, True], ids=["tokens", "text"])

OBJECTS = [s for s in SCHEMAS if isinstance(s, dict) and (s.get("type") == "object" or "properties" in s)] + [
    TREE,
    {"$defs": {"p": obj(a=S, n=N)}, "$ref": "#/$defs/p"},
    {"anyOf": [obj(kind={"const": "x"}, v=I), obj(kind={"const": "y"}, v={"type": ["string", "null"]})]},
    {"$defs": {"p": {"type": "object", "properties": {"a": S}, "required": ["a"]}},
     "allOf": [{"$ref": "#/$defs/p"}, {"type": "object", "properties": {"b": I}, "required": ["b"]}]},
    obj(any={}, either={"anyOf": [S, I]}, both={"type": ["string", "number", "null"]}, list=LIST["$defs"]["l"] | {"anyOf": [Z, S]}),
    obj(word={"enum": ["a", "b c", 7, None]}, tag={"const": "</parameter>"}, date={"type": "string", "format": "date"},
        short={"type": "string", "minLength": 2, "maxLength": 5}, name={"type": "string", "pattern": "^[A-Z][a-z]*$"}),
    obj(deep=obj(er=obj(s=S, l={"type": "array", "items": {"enum": [1, 2]}}))),
    obj(maybe={"type": ["string", "null"]}, flag=B),
]  # fmt: skip


def tools(*schemas, strict=True):
    return [{"name": f"f{i}", "strict": strict, "parameters": s} for i, s in enumerate(schemas)]


def job(format, offered, **more):
    return {"kind": "calls", "format": FORMATS[format], "tools": json.dumps(offered), "most": 2, **more}


def check(offered, walk, at_most=2):
    schemas = {t["name"]: t.get("parameters", obj()) for t in offered if t.get("strict")}
    assert len(walk["calls"]) <= at_most
    for name, arguments, whole in walk["calls"]:
        assert whole, walk
        value = json.loads(arguments)
        assert isinstance(value, dict), walk
        if name in schemas:
            jsonschema.Draft202012Validator(schemas[name]).validate(value)


@EVERY
@SPELLED
def test_arguments_keep_to_their_schema(format, spelled):
    jobs, offers = [], []
    for i, schema in enumerate(OBJECTS):
        offers.append(tools(schema))
        jobs.append(job(format, offers[-1], walks=8, seed=i, spelled=spelled))
    for offered, answer in zip(offers, drive(jobs)):
        if format in DSML and "a call cannot spell" in answer.get("error", ""):
            continue  # a property with a quote in its name
        assert "error" not in answer, (offered, answer)
        assert answer["wrong"] == 0 and not answer["stuck"], (offered, answer)
        assert answer["walks"], (offered, answer)
        for walk in answer["walks"]:
            assert walk["calls"] and not walk["content"] and not walk["notes"], walk
            check(offered, walk)


@EVERY
def test_the_format_is_written_exactly(format):
    offered = [{"name": "f", "strict": True, "parameters": obj(a={"const": "x"})}, {"name": "g", "strict": True}]
    (answer,) = drive([job(format, offered, walks=60, seed=3, most=1)])
    written = {walk["text"] for walk in answer["walks"]}
    empty = TEXTS[format].replace('<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n', "")
    empty = empty.replace('{"a": "x"}', "{}").replace('name="f"', 'name="g"').replace("sep｜>f", "sep｜>g")
    empty = empty.replace("begin｜>f<", "begin｜>g<")
    compact = TEXTS[format].replace('"a": "x"', '"a":"x"')
    assert written == {TEXTS[format], compact, empty}


@EVERY
@SPELLED
def test_calls_or_a_form(format, spelled):
    """Either a call, or an answer in the form; never both, nor anything else."""
    offered = tools(obj(a=I), obj(b={"type": "string", "maxLength": 3}))
    forms = {"schema": json.dumps(obj(x=I)), "object": "", "regex": "[a-c]{2,4}"}
    jobs = [job(format, offered, walks=40, seed=5, spelled=spelled, **{"kind": kind, "text": text}) for kind, text in forms.items()]
    jobs.append(job(format, offered, walks=40, seed=5, spelled=spelled, kind="choice", choices=["yes", "no"]))
    for kind, answer in zip([*forms, "choice"], drive(jobs)):
        assert "error" not in answer and answer["wrong"] == 0 and not answer["stuck"], answer
        assert any(walk["calls"] for walk in answer["walks"]), kind
        assert any(not walk["calls"] for walk in answer["walks"]), kind
        for walk in answer["walks"]:
            check(offered, walk)
            assert bool(walk["calls"]) != bool(walk["content"]), walk
            if walk["calls"]:
                continue
            text = walk["content"]
            if kind == "choice":
                assert text in ("yes", "no")
            elif kind == "regex":
                assert re.fullmatch("[a-c]{2,4}", text)
            else:
                assert isinstance(json.loads(text), dict)
            if kind == "schema":
                jsonschema.validate(json.loads(text), obj(x=I))


@EVERY
@SPELLED
def test_held_tools_keep_to_their_schema_as_far_as_it_goes(format, spelled):
    """What strict would refuse is passed over, or leaves any object, without strict."""
    exact = obj(a=I, b={"enum": ["x", 2]})
    partly = {"a": {"type": "integer", "multipleOf": 3}, "s": {"type": "string", "format": "binary"}}
    for parameters, kept in [
        (exact, exact),
        ({**obj(**partly), "minProperties": 1}, obj(a=I, s=S)),
        (obj(a={"allOf": [{"type": "integer"}, {"minimum": 1}]}), {"type": "object"}),
        ({"type": "object", "properties": {"a": {"type": "float"}}}, {"type": "object"}),
    ]:
        offered = [{"name": "f0", "parameters": parameters}]
        (answer,) = drive([job(format, offered, walks=30, seed=1, hold=True, spelled=spelled)])
        assert "error" not in answer and answer["wrong"] == 0 and not answer["stuck"], (parameters, answer)
        for walk in answer["walks"]:
            if "a parameter is given twice" in walk["notes"]:
                continue
            for name, arguments, whole in walk["calls"]:
                assert name == "f0" and whole
                jsonschema.validate(json.loads(arguments), kept)


@EVERY
def test_tools_that_are_not_strict_get_any_object(format):
    offered = tools(obj(a=I), obj([], a=S, b=N), strict=False)
    (answer,) = drive([job(format, offered, walks=60, seed=2)])
    assert answer["wrong"] == 0 and not answer["stuck"] and answer["walks"], answer
    for walk in answer["walks"]:
        notes = [n for n in walk["notes"] if n != "a parameter is given twice"]
        assert not notes, walk
        if not walk["notes"]:
            check(offered, walk)


REFUSED = [
    ({"type": "string"}, "unsatisfiable"), ({"enum": [1, 2]}, "unsatisfiable"), (False, "unsatisfiable"),
    (obj(a={"not": {}}), "unsupported_schema"), (obj(a={"$ref": "#/$defs/x"}), "invalid_schema"),
    ({"$ref": "#"}, "schema_cycle"),
]  # fmt: skip


@EVERY
def test_refusals_name_the_tool(format):
    jobs = [job(format, [{"name": "fine", "strict": True}, {"name": "bad", "strict": True, "parameters": schema}])
            for schema, _ in REFUSED]  # fmt: skip
    for (schema, code), answer in zip(REFUSED, drive(jobs)):
        got = answer.get("error", "accepted")
        if format in DSML and schema == {"enum": [1, 2]}:
            code = "unsupported_schema"
        assert answer.get("code", "accepted") == code, (schema, got)
        assert "tool 'bad'" in got or code == "schema_cycle", got


def test_names_that_a_tag_cannot_hold():
    for name in ['a"b', "a<b", "a>b", "a\nb", "", "x" * 256]:
        for format in FORMATS:
            (answer,) = drive([job(format, tools(obj(**{name: I})), walks=4, seed=1)])
            assert ("error" in answer) == (format in DSML), (name, format, answer)
    (answer,) = drive([job("v4", tools(obj(**{f"p{i}": B for i in range(257)})))])
    assert answer["error"].startswith("schema_too_complex")


def test_many_tools():
    rng = random.Random(4)
    offered = tools(*[rng.choice(OBJECTS[-8:]) for _ in range(128)])
    jobs = [job(format, offered, walks=6, seed=1) for format in FORMATS]
    for answer in drive(jobs):
        assert "error" not in answer, answer
        assert answer["wrong"] == 0 and not answer["stuck"]
        for walk in answer["walks"]:
            check(offered, walk)
