"""The official OpenAI client against hadal serve: chat, completions, responses, errors."""

import json
import math

import pytest
from serving import Server, wait_until

openai = pytest.importorskip("openai")

SUM = [{"role": "user", "content": "What is 1 + 3?"}]
ANSWER = "1 + 3\nones: 1 + 3 = 4, write 4, carry 0\nSo 1 + 3 = 4"
CALCULATOR = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string", "description": "The expression"}}, "required": ["expression"]},
}
TOOLS = [{"type": "function", "function": CALCULATOR}]
ASK = [{"role": "user", "content": "Compute 6221 + 11 with your tool."}]
TOKENS = {"return_token_ids": True}
THINK = {"chat_template_kwargs": {"thinking": True}}


@pytest.fixture(scope="module")
def server():
    s = Server("--model-name", "tiny")
    yield s
    s.close()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as c:
        yield c


@pytest.fixture(scope="module")
def chat(client):
    def ask(messages=SUM, **options):
        options.setdefault("temperature", 0)
        return client.chat.completions.create(model="tiny", messages=messages, **options)

    return ask


def gather(stream):
    """A stream's text, reasoning, calls and ends, as a client would put them together."""
    got = {"content": {}, "reasoning": {}, "calls": {}, "ends": {}, "usage": None, "ids": set()}
    for chunk in stream:
        got["ids"].add(chunk.id)
        got["usage"] = chunk.usage or got["usage"]
        for choice in chunk.choices:
            i, delta = choice.index, choice.delta
            got["content"][i] = got["content"].get(i, "") + (delta.content or "")
            got["reasoning"][i] = got["reasoning"].get(i, "") + (getattr(delta, "reasoning_content", None) or "")
            for call in delta.tool_calls or []:
                made = got["calls"].setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                made["arguments"] += call.function.arguments
            if choice.finish_reason:
                got["ends"][i] = choice.finish_reason
    return got


def test_chat(chat):
    r = chat()
    assert r.choices[0].message.content == ANSWER
    assert r.choices[0].finish_reason == "stop"
    assert (r.usage.prompt_tokens, r.usage.completion_tokens) == (12, 34)
    assert r.usage.total_tokens == 46


@pytest.mark.threads
def test_stream_says_the_same(chat):
    got = gather(chat(stream=True, stream_options={"include_usage": True}, extra_body=THINK))
    r = chat(extra_body=THINK)
    message = r.choices[0].message
    assert got["content"] == {0: message.content} and got["reasoning"] == {0: message.reasoning_content}
    assert got["ends"] == {0: "stop"} and len(got["ids"]) == 1
    assert got["usage"].completion_tokens == r.usage.completion_tokens
    assert got["usage"].completion_tokens_details.reasoning_tokens > 20


def test_reasoning_switches(chat):
    assert chat(reasoning_effort="none").choices[0].message.reasoning_content is None
    assert chat(reasoning_effort="high").choices[0].message.reasoning_content
    assert chat(extra_body={"thinking": {"type": "enabled"}}).choices[0].message.reasoning_content
    whole = chat(extra_body={**THINK, "separate_reasoning": False}).choices[0].message
    assert whole.reasoning_content is None and "</think>" in whole.content
    short = chat(extra_body={**THINK, "thinking_token_budget": 5})
    assert short.usage.completion_tokens_details.reasoning_tokens <= 7


@pytest.mark.threads
def test_answers_share_a_prompt(chat):
    r = chat(n=3, temperature=1, seed=5, max_tokens=30, messages=[{"role": "user", "content": "Tell me a story."}])
    texts = [c.message.content for c in r.choices]
    assert [c.index for c in r.choices] == [0, 1, 2] and len(set(texts)) > 1
    one = chat(temperature=1, seed=6, max_tokens=30, messages=[{"role": "user", "content": "Tell me a story."}])
    assert one.choices[0].message.content == texts[1]
    got = gather(chat(n=3, temperature=1, seed=5, max_tokens=30, stream=True, messages=[{"role": "user", "content": "Tell me a story."}]))
    assert [got["content"][i] for i in range(3)] == texts


def test_logprobs(chat):
    r = chat(logprobs=True, top_logprobs=3)
    tokens = r.choices[0].logprobs.content
    assert "".join(t.token for t in tokens[:-1]) == ANSWER
    assert bytes(b for t in tokens[:-1] for b in t.bytes).decode() == ANSWER
    for t in tokens:
        assert len(t.top_logprobs) == 3
        assert t.logprob == t.top_logprobs[0].logprob <= 0  # greedy
        assert sum(math.exp(a.logprob) for a in t.top_logprobs) <= 1.0001
    pieces = [t for c in chat(logprobs=True, top_logprobs=3, stream=True) if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.token for t in pieces] == [t.token for t in tokens]


def test_stop(chat):
    r = chat(stop=["carry 0\nSo"])  # across tokens
    assert r.choices[0].message.content == ANSWER.split("carry 0\nSo")[0]
    assert r.choices[0].finish_reason == "stop" and r.choices[0].matched_stop == "carry 0\nSo"
    kept = chat(stop=["write"], extra_body={"no_stop_trim": True})
    assert kept.choices[0].message.content.endswith("write")
    got = gather(chat(stop=["carry 0\nSo"], stream=True))
    assert got["content"][0] == r.choices[0].message.content


def test_length_and_budget(chat):
    assert chat(max_tokens=3).choices[0].finish_reason == "length"
    assert chat(max_completion_tokens=3).usage.completion_tokens == 3
    assert chat(extra_body={"ignore_eos": True}, max_tokens=50).usage.completion_tokens == 50
    assert chat(extra_body={"min_tokens": 50}, max_tokens=50).usage.completion_tokens == 50


def test_tool_round_trip(chat):
    r = chat(ASK, tools=TOOLS, extra_body=THINK)
    message = r.choices[0].message
    assert r.choices[0].finish_reason == "tool_calls" and message.content is None
    call = message.tool_calls[0]
    assert call.function.name == "calculator"
    assert json.loads(call.function.arguments) == {"expression": "6221 + 11"}
    again = [*ASK, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "6232"}]
    r2 = chat(again, tools=TOOLS, extra_body=THINK)
    assert r2.choices[0].message.content
    # What the model wrote is rendered back to the same tokens: only what is new, and what does
    # not fill a page, is computed.
    known = r.usage.prompt_tokens + r.usage.completion_tokens - 1
    assert r2.usage.prompt_tokens_details.cached_tokens >= known - known % 64 - 64


def next_turn(chat, r, **change):
    """The turn that answers r's only call, which may be changed before it is sent back."""
    call = {"id": r.choices[0].message.tool_calls[0].id, **r.choices[0].message.tool_calls[0].function.to_dict(), **change}
    said = {"role": "assistant", "tool_calls": [{"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}]}
    return chat([*ASK, said, {"role": "tool", "tool_call_id": call["id"], "content": "1"}], tools=TOOLS, max_tokens=1, extra_body=TOKENS)


def test_calls_come_back_exactly(chat):
    """All tokens of prompt and answer begin the next prompt, and what fills pages is not computed
    again; a changed call is rendered."""
    r = chat(ASK, tools=TOOLS, extra_body=TOKENS)
    known = r.prompt_token_ids + r.choices[0].token_ids
    again = next_turn(chat, r)
    assert again.prompt_token_ids[: len(known)] == known
    assert again.usage.prompt_tokens_details.cached_tokens >= (len(known) - 1) // 64 * 64
    changed = next_turn(chat, r, arguments='{"expression": "1"}').prompt_token_ids
    assert changed[: len(r.prompt_token_ids)] == r.prompt_token_ids and changed[: len(known)] != known


def test_tool_stream(chat):
    got = gather(chat(ASK, tools=TOOLS, stream=True))
    assert got["ends"] == {0: "tool_calls"}
    assert got["calls"][0]["name"] == "calculator" and got["calls"][0]["id"].startswith("call_")
    assert json.loads(got["calls"][0]["arguments"]) == {"expression": "6221 + 11"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "calculator"}}])
def test_forced_call(chat, choice):
    r = chat([{"role": "user", "content": "Tell me a story."}], tools=TOOLS, tool_choice=choice, max_tokens=200)
    assert isinstance(json.loads(r.choices[0].message.tool_calls[0].function.arguments)["expression"], str)


def test_no_call(chat):
    r = chat(ASK, tools=TOOLS, tool_choice="none", max_tokens=40)
    assert r.choices[0].message.tool_calls is None


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 3, "maximum": 5}}, "required": ["a", "n"], "additionalProperties": False}


@pytest.mark.parametrize("extra", [{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, {"extra_body": {"guided_json": SCHEMA}}, {"extra_body": {"structured_outputs": {"json": SCHEMA}}}, {"extra_body": {"json_schema": json.dumps(SCHEMA)}}], ids=["response_format", "guided_json", "structured_outputs", "json_schema"])
def test_schema(chat, extra):
    jsonschema = pytest.importorskip("jsonschema")
    r = chat(**extra)
    jsonschema.validate(json.loads(r.choices[0].message.content), SCHEMA)


def test_other_forms(chat):
    assert chat(extra_body={"regex": "[a-c]{3}"}).choices[0].message.content.strip("abc") == ""
    assert chat(extra_body={"guided_choice": ["red", "blue"]}).choices[0].message.content in ("red", "blue")


def test_continued_message(chat):  # M19
    start = "1 + 3\nones: 1"
    r = chat([*SUM, {"role": "assistant", "content": start}], extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert start + r.choices[0].message.content == ANSWER


def test_token_ids(chat):
    r = chat(extra_body={"return_token_ids": True})
    assert len(r.prompt_token_ids) == r.usage.prompt_tokens
    assert len(r.choices[0].token_ids) == r.usage.completion_tokens
    only = chat(extra_body={"return_prompt_token_ids": True})
    assert only.prompt_token_ids == r.prompt_token_ids and not hasattr(only.choices[0], "token_ids")
    chunks = list(chat(stream=True, extra_body={"return_prompt_token_ids": True}))
    assert [c.prompt_token_ids for c in chunks if hasattr(c, "prompt_token_ids")] == [r.prompt_token_ids]


def test_completions(client):
    def complete(prompt, **options):
        options.setdefault("temperature", 0)
        return client.completions.create(model="tiny", prompt=prompt, **options)

    r = complete(["Once upon a", "There"], max_tokens=4, n=2, extra_body={"seed": 1})
    assert [c.index for c in r.choices] == [0, 1, 2, 3]
    assert r.choices[0].text == r.choices[1].text != r.choices[2].text
    assert complete("Once upon a").usage.completion_tokens == 16
    streamed = "".join(c.choices[0].text for c in complete("Once upon a", stream=True))
    assert streamed == complete("Once upon a").choices[0].text
    scored = complete("Once upon a", max_tokens=0, echo=True, logprobs=2)
    assert scored.choices[0].text == "Once upon a" and scored.usage.completion_tokens == 0
    marks = scored.choices[0].logprobs
    assert "".join(marks.tokens) == "Once upon a" and marks.token_logprobs[0] is None
    assert marks.text_offset == [0, 4, 9] and all(v < 0 for v in marks.token_logprobs[1:])


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 8192
    with pytest.raises(openai.NotFoundError) as e:
        client.models.retrieve("other")
    assert e.value.code == "model_not_found"


def test_errors(client, chat):
    with pytest.raises(openai.BadRequestError) as e:
        chat(temperature=3)
    assert (e.value.param, e.value.code, e.value.type) == ("temperature", "invalid_value", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as e:
        chat(max_tokens=10**6)
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as e:
        client.embeddings.create(model="tiny", input="x")
    assert e.value.code == "unsupported_endpoint"


def test_client_timeout_frees_the_request(server, client):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(model="tiny", messages=SUM, max_tokens=8000, extra_body={"ignore_eos": True})
    wait_until(lambda: server.loads()["num_running_reqs"] == 0, "the request is freed")


def test_left_stream_frees_the_request(server, chat):
    stream = chat(max_tokens=8000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_until(lambda: server.loads()["num_running_reqs"] == 0, "the request is freed")


def test_responses(client):
    def respond(input, **options):
        return client.responses.create(model="tiny", input=input, temperature=0, **options)

    r = respond(SUM[0]["content"])
    assert r.output_text == ANSWER and r.status == "completed"
    assert client.responses.retrieve(r.id).output_text == ANSWER
    r2 = respond("What is 2 + 2?", previous_response_id=r.id)
    assert r2.output_text.endswith("4") and r2.usage.input_tokens > r.usage.input_tokens + r.usage.output_tokens
    cut = respond(SUM, max_output_tokens=4)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(model="tiny", input=SUM, temperature=0, reasoning={"effort": "high"}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert [o.type for o in final.output] == ["reasoning", "message"]


def test_response_tools(client):
    tools = [{"type": "function", **CALCULATOR}]
    r = client.responses.create(model="tiny", input=ASK, tools=tools, temperature=0)
    call = r.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments) == {"expression": "6221 + 11"}
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "6232"}]
    r2 = client.responses.create(model="tiny", input=result, tools=tools, previous_response_id=r.id, temperature=0)
    assert r2.output_text and r2.usage.input_tokens_details.cached_tokens > 200
    named = client.responses.create(model="tiny", input="Tell me a story.", tools=tools, tool_choice={"type": "function", "name": "calculator"}, max_output_tokens=200, temperature=0)
    assert named.output[-1].name == "calculator"


def test_only_allowed_tools_are_offered(chat):
    other = {"type": "function", "function": {**CALCULATOR, "name": "other"}}
    few = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "calculator"}}]}}
    r = chat(ASK, tools=[other, *TOOLS], tool_choice=few, max_tokens=60, extra_body=THINK)
    alone = chat(ASK, tools=TOOLS, tool_choice="required", max_tokens=60, extra_body=THINK)
    assert r.usage.prompt_tokens == alone.usage.prompt_tokens
    assert r.choices[0].message.tool_calls[0].function == alone.choices[0].message.tool_calls[0].function


def test_helpers_of_the_client(client):
    """A pydantic model as the form, parsed at once and from a stream, in both interfaces."""
    pydantic = pytest.importorskip("pydantic")
    small = pydantic.Field(ge=0, le=99)
    Sum = pydantic.create_model("Sum", a=(int, small), b=(int, small))
    r = client.chat.completions.parse(model="tiny", messages=SUM, response_format=Sum)
    assert 0 <= r.choices[0].message.parsed.a <= 99
    with client.chat.completions.stream(model="tiny", messages=SUM, response_format=Sum) as stream:
        assert {"chunk", "content.delta", "content.done"} <= {event.type for event in stream}
        assert 0 <= stream.get_final_completion().choices[0].message.parsed.b <= 99
    assert 0 <= client.responses.parse(model="tiny", input="What is 1 + 3?", text_format=Sum).output_parsed.a <= 99
    with client.responses.stream(model="tiny", input="x", text_format=Sum) as stream:
        assert "response.completed" in {event.type for event in stream}
        assert 0 <= stream.get_final_response().output_parsed.b <= 99
