"""Tools and a form of the answer in one request, on every endpoint that has both, and what holds
the calls: by the official clients where they have words for it."""

import json

import anthropic
import jsonschema
import openai
import pytest
from serving import Server

CALCULATOR = {"type": "object", "properties": {"expression": {"type": "string", "maxLength": 30}}, "required": ["expression"]}
REPORT = {"type": "object", "properties": {"good": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["good", "n"], "additionalProperties": False}
NAMED = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT}}
FUNCTION = {"name": "calculator", "description": "Evaluate an arithmetic expression.", "parameters": CALCULATOR}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALLS = "Compute 6221 + 11 with your tool."
TALKS = "Tell me a story."


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    s.close()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def is_report(text):
    jsonschema.validate(json.loads(text), REPORT)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("form", [NAMED, {"type": "json_object"}])
def test_chat_calls_or_answers_in_the_form(client, form, thinking):
    kept = {"model": "x", "tools": TOOLS, "response_format": form, "temperature": 0, "max_completion_tokens": 600,
            "extra_body": {"chat_template_kwargs": {"thinking": thinking}, "thinking_token_budget": 200}}  # fmt: skip
    choice = client.chat.completions.create(messages=[{"role": "user", "content": CALLS}], **kept).choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content, choice
    (call,) = choice.message.tool_calls
    assert call.function.name == "calculator" and "6221" in json.loads(call.function.arguments)["expression"]
    streamed = client.chat.completions.create(messages=[{"role": "user", "content": CALLS}], stream=True, **kept)
    deltas = [chunk.choices[0].delta for chunk in streamed if chunk.choices]
    said = [c.function for d in deltas for c in d.tool_calls or []]
    assert said[0].name == "calculator" and "".join(f.arguments or "" for f in said) == call.function.arguments
    kept["extra_body"]["logit_bias"] = {str(client_token(client, "{")): 100}
    choice = client.chat.completions.create(messages=[{"role": "user", "content": TALKS}], **{**kept, "max_completion_tokens": 260}).choices[0]
    assert not choice.message.tool_calls, choice
    if form is NAMED:
        assert choice.finish_reason == "stop"
        is_report(choice.message.content)
    else:
        assert choice.message.content.startswith("{")


def client_token(client, text):
    return client.post("/tokenize", body={"prompt": text, "add_special_tokens": False}, cast_to=object)["tokens"][0]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "calculator"}}])
def test_a_demanded_call_beside_a_form_is_the_call(client, choice):
    """It keeps to the schema of its tool, which is not strict."""
    for seed in range(3):
        reply = client.chat.completions.create(
            model="x", messages=[{"role": "user", "content": TALKS}], tools=TOOLS, tool_choice=choice, response_format=NAMED, temperature=1.5,
            seed=seed, max_completion_tokens=300, parallel_tool_calls=False, extra_body={"chat_template_kwargs": {"thinking": False}},
        )  # fmt: skip
        assert reply.choices[0].finish_reason == "tool_calls" and not reply.choices[0].message.content, reply
        (call,) = reply.choices[0].message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), CALCULATOR)


def test_responses(client):
    kept = {"model": "x", "tools": [{"type": "function", **FUNCTION, "strict": False}], "temperature": 0, "max_output_tokens": 600,
            "text": {"format": {"type": "json_schema", "name": "report", "schema": REPORT}}, "reasoning": {"effort": "none"}}  # fmt: skip
    (item,) = client.responses.create(input=CALLS, **kept).output
    assert item.type == "function_call" and item.name == "calculator", item
    jsonschema.validate(json.loads(item.arguments), CALCULATOR)
    response = client.responses.create(input=TALKS, extra_body={"logit_bias": {str(client_token(client, "{")): 100}}, **kept)
    assert response.status == "completed"
    is_report(response.output_text)
    (item,) = client.responses.create(input=TALKS, tool_choice="required", parallel_tool_calls=False, **kept).output
    assert item.type == "function_call", item


def test_messages(server):
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0)
    kept = {"model": "x", "max_tokens": 600, "tools": [{"name": "calculator", "description": FUNCTION["description"], "input_schema": CALCULATOR}],
            "extra_body": {"output_config": {"format": {"type": "json_schema", "schema": REPORT}}, "temperature": 0}}  # fmt: skip
    message = client.messages.create(messages=[{"role": "user", "content": CALLS}], **kept)
    assert message.stop_reason == "tool_use", message
    jsonschema.validate(message.content[0].input, CALCULATOR)
    message = client.messages.create(messages=[{"role": "user", "content": TALKS}], **kept)
    if message.stop_reason == "end_turn":
        is_report(message.content[0].text)
    else:
        assert message.stop_reason == "tool_use"
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = client.messages.create(messages=[{"role": "user", "content": TALKS}], tool_choice=choice, **kept)
    assert message.stop_reason == "tool_use" and [b.type for b in message.content] == ["tool_use"], message


def test_schemas_of_demanded_calls_may_say_anything(client):
    """Only strict refuses what masks cannot hold."""
    odd = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 5}, "f": {"type": "float"}}, "patternProperties": {"^x": {}}}
    tools = [{"type": "function", "function": {"name": "odd", "parameters": odd}}]
    kept = {"model": "x", "messages": [{"role": "user", "content": TALKS}], "tool_choice": "required", "max_completion_tokens": 40}
    assert client.chat.completions.create(tools=tools, **kept).choices
    tools[0]["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(tools=tools, **kept)
    assert refused.value.code == "unsupported_schema"


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_the_end_of_a_form_waits_for_the_minimum(client, temperature):
    """It is closed late where it can be longer, and ends where it cannot."""
    schema = {"type": "object", "properties": {"note": {"type": "string", "maxLength": 120}, "n": {"enum": [1, 2]}}, "required": ["note", "n"], "additionalProperties": False}
    kept = {"model": "x", "messages": [{"role": "user", "content": TALKS}], "temperature": temperature, "max_tokens": 300, "seed": 3}

    def ask(schema, least):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        reply = client.chat.completions.create(response_format=form, extra_body={"min_tokens": least, "chat_template_kwargs": {"thinking": False}}, **kept)
        jsonschema.validate(json.loads(reply.choices[0].message.content), schema)
        assert reply.choices[0].finish_reason == "stop"
        return reply.usage.completion_tokens

    assert ask(schema, 40) > 40
    assert ask(REPORT, 200) < 40
