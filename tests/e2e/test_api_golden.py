"""One exchange per endpoint, whole and streamed, byte for byte as it was once looked at; and the
description of the interface held against them.

Greedy, without drafts and without scores, so that every machine gives the same. Ids, times and
durations are replaced. To write the files anew: python tests/e2e/test_api_golden.py"""

import json
import pathlib
import re
import sys

import pytest
from conftest import GOLDEN
from serving import Server

FOLDER = GOLDEN / "api"
SUM = [{"role": "user", "content": "What is 1 + 3?"}]
ASK = [{"role": "user", "content": "Compute 6221 + 11 with your tool."}]
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string", "description": "The expression"}}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Evaluate an arithmetic expression."}
TOOLS = [{"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}]
PLAIN = {"temperature": 0, "draft_tokens": 0, "rid": "golden"}
THINK = {"chat_template_kwargs": {"thinking": True}}

# name: (path, body, schema of the reply or of each event)
EXCHANGES = {
    "chat": ("/v1/chat/completions", {"messages": SUM, **PLAIN, **THINK}, "ChatCompletion"),
    "chat_stream": ("/v1/chat/completions", {"messages": SUM, "stream": True, "stream_options": {"include_usage": True}, **PLAIN}, "ChatCompletionChunk"),
    "chat_tools": ("/v1/chat/completions", {"messages": ASK, "tools": TOOLS, "n": 2, **PLAIN}, "ChatCompletion"),
    "chat_tools_stream": ("/v1/chat/completions", {"messages": ASK, "tools": TOOLS, "stream": True, **PLAIN, **THINK}, "ChatCompletionChunk"),
    "completions": ("/v1/completions", {"prompt": ["Once upon a", "There"], "max_tokens": 6, "echo": True, **PLAIN}, "Completion"),
    "completions_stream": ("/v1/completions", {"prompt": "Once upon a", "max_tokens": 4, "stream": True, "stop": [","], **PLAIN}, "Completion"),
    "generate": ("/generate", {"input_ids": [894, 915, 261], "sampling_params": {"max_new_tokens": 5, "temperature": 0}, "draft_tokens": 0, "rid": "golden"}, "GenerateAnswers"),
    "generate_stream": ("/generate", {"text": ["Once upon a"], "sampling_params": {"max_new_tokens": 3, "temperature": 0}, "stream": True, "draft_tokens": 0, "rid": "golden"}, "GenerateAnswer"),
    "messages": ("/v1/messages", {"messages": ASK, "max_tokens": 100, "tools": [{**FUNCTION, "input_schema": SCHEMA}], "thinking": {"type": "enabled", "budget_tokens": 1024}, **PLAIN}, "Message"),
    "messages_stream": ("/v1/messages", {"messages": ASK, "max_tokens": 100, "tools": [{**FUNCTION, "input_schema": SCHEMA}], "thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": True, **PLAIN}, "MessageEvent"),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": SUM}, "TokenCount"),
    "responses": ("/v1/responses", {"input": SUM, "instructions": "Be brief.", "metadata": {"a": "b"}, **PLAIN}, "Response"),
    "responses_stream": ("/v1/responses", {"input": ASK, "tools": [{"type": "function", **FUNCTION, "parameters": SCHEMA}], "reasoning": {"effort": "high"}, "stream": True, **PLAIN}, "ResponseEvent"),
    "tokenize": ("/tokenize", {"messages": SUM, "return_token_strs": True}, "Tokens"),
    "detokenize": ("/detokenize", {"tokens": [894, 915, 261]}, "DecodedTokens"),
    "apply_template": ("/apply-template", {"messages": ASK, "tools": TOOLS, **THINK}, "Prompt"),
    "parse_function_call": ("/parse_function_call", {"text": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="calculator">\n<｜DSML｜parameter name="expression" string="true">1 + 1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', "tools": TOOLS}, "ParsedCalls"),
    "separate_reasoning": ("/separate_reasoning", {"text": "a</think>b"}, "SeparatedReasoning"),
    "error": ("/v1/chat/completions", {"messages": SUM, "temperature": 3}, "Error"),
    "anthropic_error": ("/v1/messages", {"messages": [], "max_tokens": 5}, "AnthropicError"),
}


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    s.close()


@pytest.fixture(scope="module")
def description(server):
    return server.get("/openapi.json").json


def normal(text):
    """Random ids become numbers in their order; times and durations vanish."""
    seen = {}

    def number(match):
        return seen.setdefault(match.group(0), f"{match.group(1)}{len(seen)}")

    text = re.sub(r"\b((?:rs|msg|fc|call|toolu)_)[0-9a-f]{16}\b", number, text)
    text = re.sub(r'"(created(?:_at)?)":\d+', r'"\1":0', text)
    return re.sub(r'"e2e_latency":[0-9.e-]+', '"e2e_latency":0.0', text)


def exchange(server, name):
    path, body, _ = EXCHANGES[name]
    return normal(server.post(path, body).text)


def documents(text):
    """The JSON of a reply, or of each event of a stream."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"] if lines else [json.loads(text)]


# The first answer to a prompt leaves a prefix behind; every exchange meets the same cache.
@pytest.mark.parametrize("name", EXCHANGES)
def test_exchange(server, name):
    server.post("/flush_cache")
    assert exchange(server, name) == (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", EXCHANGES)
def test_description_fits(description, name):
    jsonschema = pytest.importorskip("jsonschema")
    path, body, schema = EXCHANGES[name]
    components = {"components": description["components"]}

    def check(document, schema):
        jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{schema}", **components}).validate(document)

    operation = description["paths"][path]["post"]
    wanted = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/")[-1]
    if not name.endswith("error"):
        check(body, wanted)
        kind = "text/event-stream" if body.get("stream") else "application/json"
        assert operation["responses"]["200"]["content"][kind]["schema"]["$ref"].endswith("/" + schema)
    for document in documents((FOLDER / f"{name}.txt").read_text()):
        check(document, schema)


def test_description_is_openapi(description):
    """Every schema is one, every reference leads somewhere, every route answers."""
    jsonschema = pytest.importorskip("jsonschema")
    schemas = description["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description)):
        assert reference in schemas
    assert description["openapi"].startswith("3.1")


def parameters(schemas):
    for name, schema in schemas.items():
        if name.endswith(("Request", "Params", "Options", "Outputs", "Kwargs", "Config")) or name in ("Thinking", "Reasoning"):
            yield name, schema["properties"]


def test_every_parameter_is_documented(description):
    text = (pathlib.Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for family, properties in parameters(description["components"]["schemas"]):
        for name in properties:
            assert f"`{name}`" in text, f"{name} of {family}"
    text += (pathlib.Path(__file__).parents[2] / "docs" / "server.md").read_text()
    for path in description["paths"]:
        assert f"`{path}`" in text, path


def test_page_offers_what_is_accepted(server, description):
    properties = description["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    inputs = re.findall(r'<input name="(\w+)" type="number" min="([^"]+)"(?: max="([^"]+)")?', server.get("/").text)
    assert {"temperature", "top_p", "max_tokens", "seed"} <= {name for name, _, _ in inputs}
    for name, low, high in inputs:
        assert float(low) >= properties[name].get("minimum", float("-inf")), name
        assert float(high or 0) <= properties[name].get("maximum", float("inf")), name


def test_every_refusal_refuses(server, description):
    """What the description calls refused is refused by name, and nothing else is."""
    bodies = {"ChatCompletionRequest": ("/v1/chat/completions", {"messages": SUM, "max_tokens": 1}), "CompletionRequest": ("/v1/completions", {"prompt": "a", "max_tokens": 1}), "GenerateRequest": ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}), "MessagesRequest": ("/v1/messages", {"messages": SUM, "max_tokens": 1}), "ResponseRequest": ("/v1/responses", {"input": "a", "max_output_tokens": 1})}
    n_refused = 0
    for family, (path, body) in bodies.items():
        for name, schema in description["components"]["schemas"][family]["properties"].items():
            if not schema["description"].startswith(("Refused: ", "Without effect: ")):
                continue
            reply = server.post(path, {**body, name: "x"})
            refused = schema["description"].startswith("Refused")
            assert reply.status == (400 if refused else 200), (name, reply.text)
            assert not refused or name in reply.json["error"]["message"]
            n_refused += refused
    assert n_refused > 100


if __name__ == "__main__":
    running = Server()
    FOLDER.mkdir(exist_ok=True)
    for each in sys.argv[1:] or EXCHANGES:
        running.post("/flush_cache")
        (FOLDER / f"{each}.txt").write_text(exchange(running, each))
    running.close()
