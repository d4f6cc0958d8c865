"""Strict tools of the three interfaces, on random models, which would write anything."""

import json

import jsonschema
import pytest
from serving import Server
from toy_models import make_toy_model

MARKERS = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
           "<｜tool▁sep｜>", "｜DSML｜"]  # fmt: skip
V31_TEMPLATE = "<｜User｜> <｜tool▁sep｜> is_only_sys"
MODELS = {  # family, chat template, whether markers are tokens
    "v3": ("v3", None, True), "v3-spelled": ("v3", None, False), "v31": ("v3", V31_TEMPLATE, True),
    "v32": ("v32", None, True), "v32-spelled": ("v32", None, False), "v4": ("v4", None, True),
}  # fmt: skip
PARAMETERS = {
    "type": "object", "additionalProperties": False, "required": ["mode", "level", "tag", "place"],
    "properties": {
        "mode": {"enum": ["fast", "slow", 3]}, "level": {"type": "integer", "minimum": -7, "maximum": 400},
        "tag": {"type": "string", "minLength": 1, "maxLength": 4}, "note": {"type": ["null", "boolean"]},
        "place": {"type": "object", "additionalProperties": False, "required": ["x"], "properties": {"x": {"type": "number", "minimum": 0, "maximum": 1}, "y": {"const": "<>"}}},
    },
}  # fmt: skip
FREE = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
SAID = [{"role": "user", "content": "the cat"}]
HOT = {"temperature": 1.5, "max_tokens": 500}


@pytest.fixture(scope="module", params=MODELS)
def server(request, tmp_path_factory):
    family, template, tokens = MODELS[request.param]
    out = tmp_path_factory.mktemp("models") / request.param
    model = make_toy_model(family, out, MARKERS if tokens else [], max_position_embeddings=4096)
    if template:
        (model / "chat_template.jinja").write_text(template)
    s = Server("--draft-tokens", "3", "--context", "4096", model=model)
    yield s
    s.close()


def judge(calls, most):
    """Calls: (name, arguments); how many were judged."""
    assert 1 <= len(calls) <= most, calls
    for name, arguments in calls:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        jsonschema.validate(value, {"set": PARAMETERS, "free": FREE}[name])


def offer(*names, **more):
    parameters = {"set": PARAMETERS, "free": FREE}
    return [{"type": "function", "function": {"name": n, "strict": True, "parameters": parameters[n], **more}} for n in names]


@pytest.mark.parametrize("choice", ["required", "set"])
def test_chat(server, choice):
    ended = 0
    wanted = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    for seed in range(2):
        body = {"messages": SAID, "tools": offer("set", "free"), "tool_choice": wanted, "n": 2, "seed": seed, "parallel_tool_calls": seed == 0, **HOT}
        reply = server.post("/v1/chat/completions", body)
        assert reply.status == 200, reply.text
        for c in reply.json["choices"]:
            if c["finish_reason"] == "length":
                continue
            assert c["finish_reason"] == "tool_calls" and not c["message"]["content"], c
            judge([(t["function"]["name"], t["function"]["arguments"]) for t in c["message"]["tool_calls"]],
                  1 if choice != "required" or seed else 128)  # fmt: skip
            ended += 1
    assert ended


def test_stream(server):
    body = {"messages": SAID, "tools": offer("free"), "tool_choice": "required", "parallel_tool_calls": False, "stream": True, **HOT}
    reply = server.post("/v1/chat/completions", body)
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in reply.text.split("\n") if line.startswith("data: {")]
    parts = [call["function"] for d in deltas for call in d.get("tool_calls", [])]
    judge([(parts[0]["name"], "".join(p.get("arguments", "") for p in parts))], 1)


def test_messages(server):
    tools = [{"name": "set", "input_schema": PARAMETERS, "strict": True}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    reply = server.post("/v1/messages", {"messages": SAID, "tools": tools, "tool_choice": choice, **HOT})
    assert reply.status == 200, reply.text
    if reply.json["stop_reason"] != "max_tokens":
        judge([(b["name"], b["input"]) for b in reply.json["content"] if b["type"] == "tool_use"], 1)


def test_responses(server):
    tools = [{"type": "function", "name": "set", "parameters": PARAMETERS, "strict": True}]
    body = {"input": "the cat", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5, "max_output_tokens": 500}
    reply = server.post("/v1/responses", body)
    assert reply.status == 200, reply.text
    if reply.json["status"] == "completed":
        judge([(o["name"], o["arguments"]) for o in reply.json["output"] if o["type"] == "function_call"], 1)


def test_the_model_decides(server):
    """Text that comes anyway; a call of a strict tool keeps to its schema if there is one."""
    for seed in range(4):
        body = {"messages": SAID, "tools": offer("free"), "seed": seed, "temperature": 1.5, "max_tokens": 60}
        reply = server.post("/v1/chat/completions", body)
        assert reply.status == 200, reply.text
        (choice,) = reply.json["choices"]
        calls = choice["message"].get("tool_calls") or []
        if calls and choice["finish_reason"] == "tool_calls":
            judge([(t["function"]["name"], t["function"]["arguments"]) for t in calls], 128)
        assert choice["message"]["content"] or calls


def test_refusals(server):
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    for body, code, part in [
        ({"tools": offer("free", parameters=bad)}, "unsupported_schema", "#/properties/a (tool 'free')"),
        ({"tools": offer("free", parameters={"type": "object", "properties": {"a": False}, "required": ["a"]})}, "unsatisfiable", "tool 'free'"),
        ({"tools": offer("free", strict="yes")}, None, "tools[0].function.strict: must be true or false"),
        ({"tools": offer("free"), "ignore_eos": True}, None, "no ignore_eos"),
    ]:  # fmt: skip
        reply = server.post("/v1/chat/completions", {"messages": SAID, "max_tokens": 4, **body})
        assert reply.status == 400 and part in reply.json["error"]["message"], reply.text
        if code:
            assert reply.json["error"]["code"] == code and reply.json["error"]["param"] == "tools", reply.text
