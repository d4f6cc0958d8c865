"""The official Anthropic client against hadal serve."""

import pytest
from serving import Server

anthropic = pytest.importorskip("anthropic")

SUM = [{"role": "user", "content": "What is 1 + 3?"}]
ASK = [{"role": "user", "content": "Compute 6221 + 11 with your tool."}]
TOOLS = [{"name": "calculator", "description": "Evaluate an arithmetic expression.", "input_schema": {"type": "object", "properties": {"expression": {"type": "string", "description": "The expression"}}, "required": ["expression"]}}]
GREEDY = {"extra_body": {"temperature": 0}}
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    s.close()


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0) as c:
        yield c


def ask(client, messages=SUM, max_tokens=100, **options):
    return client.messages.create(model="tiny", max_tokens=max_tokens, messages=messages, **GREEDY, **options)


def test_text(client):
    r = ask(client, system=[{"type": "text", "text": "You are a helpful assistant."}])
    assert [b.type for b in r.content] == ["text"] and r.content[0].text.endswith("4")
    assert r.stop_reason == "end_turn" and r.usage.output_tokens > 20
    again = ask(client, system=[{"type": "text", "text": "You are a helpful assistant."}])
    assert again.content[0].text == r.content[0].text


def test_stops(client):
    r = ask(client, stop_sequences=["ones"])
    assert (r.stop_reason, r.stop_sequence) == ("stop_sequence", "ones")
    short = client.messages.create(model="tiny", max_tokens=3, messages=SUM)
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 3


def test_more_than_the_context_leaves():
    """Clients name the most that the model they know can write; the answer ends with the context."""
    s = Server("--backend", "null", "--context", "256")
    try:
        with anthropic.Anthropic(base_url=f"http://127.0.0.1:{s.port}", api_key="none", max_retries=0) as c:
            for options in ({}, {"stop_sequences": ["never there"]}):
                r = c.messages.create(model="tiny", max_tokens=16000, messages=SUM, **options)
                assert r.stop_reason == "model_context_window_exceeded"
                assert r.usage.input_tokens + r.usage.cache_read_input_tokens + r.usage.output_tokens == 256
            with c.messages.stream(model="tiny", max_tokens=250, messages=SUM) as stream:
                assert stream.get_final_message().stop_reason == "model_context_window_exceeded"
            assert c.messages.create(model="tiny", max_tokens=20, messages=SUM).stop_reason == "max_tokens"
            with pytest.raises(anthropic.BadRequestError):
                c.messages.create(model="tiny", max_tokens=16000, messages=[{"role": "user", "content": "a long story " * 200}])
    finally:
        s.close()


def test_thinking_stream(client):
    with client.messages.stream(model="tiny", max_tokens=200, messages=SUM, thinking=THINKING, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        r = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert [b.type for b in r.content] == ["thinking", "text"]
    whole = ask(client, thinking=THINKING)
    assert whole.content[0].thinking == r.content[0].thinking and whole.content[1].text == r.content[1].text


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_loop(client, streamed):
    options = {"tools": TOOLS, "thinking": THINKING}
    if streamed:
        with client.messages.stream(model="tiny", max_tokens=200, messages=ASK, **GREEDY, **options) as stream:
            r = stream.get_final_message()
    else:
        r = ask(client, ASK, **options)
    call = r.content[-1]
    assert r.stop_reason == "tool_use" and call.input == {"expression": "6221 + 11"}
    turn = [{"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in r.content]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "6232"}]}]}]
    r2 = ask(client, ASK + turn, **options)
    assert r2.content[-1].type == "text" and r2.usage.cache_read_input_tokens >= 256


def test_tool_choice(client):
    story = [{"role": "user", "content": "Tell me a story."}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "calculator"}):
        r = ask(client, story, tools=TOOLS, tool_choice=choice)
        assert r.content[-1].type == "tool_use" and isinstance(r.content[-1].input["expression"], str)
    r = ask(client, ASK, max_tokens=20, tools=TOOLS, tool_choice={"type": "none"})
    assert all(b.type == "text" for b in r.content)


def test_count_tokens(client):
    n = client.messages.count_tokens(model="tiny", messages=SUM).input_tokens
    assert n == client.messages.create(model="tiny", max_tokens=1, messages=SUM).usage.input_tokens


def test_errors(client):
    with pytest.raises(anthropic.BadRequestError) as e:
        client.messages.create(model="tiny", max_tokens=0, messages=SUM)
    assert e.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError) as e:
        client.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}])
    assert "models read text" in e.value.body["error"]["message"]


def test_a_begun_answer_is_continued(client):
    whole = ask(client).content[0].text
    begun = whole.split(", write")[0]
    r = ask(client, [*SUM, {"role": "assistant", "content": begun}])
    assert begun + r.content[0].text == whole


@pytest.mark.parametrize("streamed", [False, True])
def test_the_clients_own_tool_loop(client, streamed):
    """It asks for a conversation kept here, is told that there is none, and sends all of it."""
    said = []

    @anthropic.beta_tool
    def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: The expression
        """
        said.append(expression)
        return "6232"

    runner = client.beta.messages.tool_runner(model="tiny", max_tokens=200, messages=ASK, tools=[calculator], thinking=THINKING, stream=streamed, **GREEDY)
    if streamed:
        for stream in runner:
            last = stream.get_final_message()
    else:
        *_, last = runner
    assert said == ["6221 + 11"] and last.stop_reason == "end_turn"
