"""Rows of bad input that need more than one request, or a server of their own."""

import itertools
import json
import random

import pytest
from serving import Server, wait_until
from test_api_refusals import ADD, CHAT, COMPLETE, HI, SPECIAL, form, nested


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    s.close()


def complete(server, **fields):
    return server.post(COMPLETE, {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields})


def text_of(reply):
    assert reply.status == 200, reply.text
    return reply.json["choices"][0]["text"]


def test_bytes_that_are_no_text(server):
    """J22: what is no UTF-8 becomes U+FFFD in the text, the ids stay as they are."""
    part = next(i for i in range(4096) if "\ufffd" in server.post("/detokenize", {"tokens": [i]}).text)
    for fields in ({}, {"stream": True}):
        reply = server.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, "logit_bias": {str(part): 100}, "temperature": 0}, **fields})
        assert reply.status == 200, reply.text
        last = json.loads(reply.text.split("data: ")[-2]) if fields else reply.json
        assert last["output_ids"] == [part] * 5 and set(last["text"]) == {"\ufffd"}


def test_FT21_prompt_beyond_the_context(server):
    """Refused before a step is made for it."""
    steps = server.stats()["hadal_steps_total"]

    def refused(prompt):
        reply = server.post(COMPLETE, {"prompt": prompt, "max_tokens": 2})
        assert reply.status == 400 and reply.code == "context_length_exceeded", reply.text

    refused([5] * 9000)
    refused("word " * 9000)
    assert server.stats()["hadal_steps_total"] == steps
    refused([[5], [5] * 9000])  # the first of the two may have begun; it is cancelled
    wait_until(lambda: server.stats()["hadal_living_answers"] == 0, "nothing runs")


def test_prompt_beyond_the_pool(serve):
    """R12, FT22: refused at once, or the pool is made for the context."""
    s = serve("--context", "512", "--kv-tokens", "512", "--max-running", "2")
    reply = s.post(COMPLETE, {"prompt": [5] * 500, "max_tokens": 2})
    assert reply.status in (200, 400), reply.text
    assert s.loads()["num_running_reqs"] + s.loads()["num_waiting_reqs"] == 0


def test_all_or_none_are_admitted(serve):
    """R18"""
    s = serve("--backend", "null", "--queue", "4", "--max-running", "1")
    s.post("/pause_generation", {"mode": "in_place"})
    reply = complete(s, n=8)
    assert reply.status == 429 and reply.headers["Retry-After"]
    assert s.stats()["hadal_living_answers"] == 0
    s.post("/continue_generation")
    assert complete(s, n=5).status == 200


def test_penalties_and_drafts(server, serve):
    """R25: what drafts propose changes no text, with any penalty."""
    plain = serve("--no-drafts")
    for fields in ({"frequency_penalty": 1.5}, {"presence_penalty": -2}, {"repetition_penalty": 1.7}, {"repetition_penalty": 0.1, "temperature": 1, "seed": 3}, {"logit_bias": {"70": 5}, "frequency_penalty": 2}):
        assert text_of(complete(server, **fields)) == text_of(complete(plain, **fields)), fields


def test_form_against_bias(server):
    """R29: every token that the form allows is held down; one of them still comes."""
    digits = {str(server.post("/tokenize", {"prompt": d, "add_special_tokens": False}).json["tokens"][-1]): -100 for d in "0123456789"}
    reply = server.post(CHAT, {"messages": HI, "regex": "[0-9]", "logit_bias": digits, "max_tokens": 5})
    assert reply.status == 200 and reply.json["choices"][0]["message"]["content"] in list("0123456789")


def test_stops_at_any_place(server):
    """R31: any part of a text stops it there, whatever tokens it lies in; nothing behind it is sent."""
    whole = text_of(complete(server))
    for start, n in itertools.product(range(1, len(whole) - 5, 7), (1, 4)):
        stop = whole[start : start + n]
        expected = whole[: whole.index(stop)]
        assert text_of(complete(server, stop=stop)) == expected
    stop = whole[9:12]
    streamed = server.post(COMPLETE, {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stop": stop, "stream": True}).text
    pieces = [json.loads(line[6:])["choices"] for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(c[0]["text"] for c in pieces if c) == whole[: whole.index(stop)]


@pytest.mark.parametrize("field", ["user", "metadata", "safety_identifier"])
def test_long_names_of_users(serve, field, tmp_path):
    """R40: refused, or kept out of the log."""
    log = tmp_path / "log"
    s = serve("--backend", "null", "--log-requests", log)
    value = "a\r\nforged=line\r\n" * 1000
    reply = s.post(CHAT, {"messages": HI, "max_tokens": 2, field: {"k": value} if field == "metadata" else value})
    assert reply.status in (200, 400)
    assert s.post(CHAT, {"messages": HI, "max_tokens": 2}).status == 200
    s.close()
    assert b"forged" not in s.log
    assert all(json.loads(line)["path"] == CHAT for line in log.read_text().splitlines())


PARAMETERS = {
    "max_tokens": [1, 100000, 0], "n": [1, 8, 9], "temperature": [0, 2, -1], "top_p": [0.01, 1, 0], "top_k": [-1, 5000, -2],
    "min_p": [0, 1, 2], "frequency_penalty": [-2, 2, 3], "presence_penalty": [-2, 2, 3], "repetition_penalty": [0.1, 10, 0],
    "logit_bias": [{}, {"5": 100}, {"x": 1}], "stop": [[], ["x"] * 16, [""]], "stop_token_ids": [[], [5] * 64, [-1]],
    "min_tokens": [0, 1, 100], "logprobs": [False, True, 7], "top_logprobs": [0, 20, 21], "seed": [0, 2**63 - 1, 2**63],
    "stream": [False, True, "x"], "stream_options": [{}, {"include_usage": True}, 5], "ignore_eos": [False, True, 3],
    "tools": [[], [ADD], [5]], "tool_choice": ["none", "required", 5], "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": 1}],
    "regex": ["a", "[ab]{2}", "("], "priority": [-100, 100, 101], "parallel_tool_calls": [False, True, 2],
    "reasoning_effort": ["low", "high", "x"], "cache_salt": ["", "s" * 128, "s" * 129], "continue_final_message": [False, True, 4],
}


def test_pairs_of_parameters(server):
    """R51: any two parameters, each at its least, its most, or wrong: an answer or a refusal by name."""
    pairs = [dict([a, b]) for (x, xs), (y, ys) in itertools.combinations(PARAMETERS.items(), 2) for a in [(x, v) for v in xs] for b in [(y, v) for v in ys]]
    chosen = random.Random(7).sample(pairs, 120)
    seen = set()
    for fields in chosen:
        reply = server.post(CHAT, {"messages": HI, "max_tokens": 2, **fields})
        assert reply.status in (200, 400), (fields, reply.text)
        assert reply.status == 200 or reply.json["error"]["message"], fields
        seen.add(reply.status)
    assert seen == {200, 400}
    wait_until(lambda: server.loads()["num_running_reqs"] == 0, "nothing is left")


def test_special_tokens_in_tools_stay_text(server):
    """M18"""
    control = set(server.post("/tokenize", {"prompt": "".join(SPECIAL), "parse_special": True}).json["tokens"])

    def n_control(text):
        tool = {"type": "function", "function": {"name": "add", "description": text, "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": text, "enum": [text]}}}}}
        reply = server.post("/tokenize", {"messages": HI, "tools": [tool]})
        assert reply.status == 200, reply.text
        return sum(t in control for t in reply.json["tokens"])

    assert n_control("".join(SPECIAL)) == n_control("clean")


def test_nested_arrays(server):
    """S17"""
    schema = {"type": "integer"}
    for _ in range(22):
        schema = {"type": "array", "items": schema}
    path, body = form(schema)
    assert server.post(path, body).status == 200


def test_thousands_of_schemas(server):
    """S26: what is kept of them is bounded."""

    def ask(i):
        path, body = form({"type": "object", "properties": {f"name{i}": {"enum": [f"a{i}", f"b{i}"]}}})
        assert server.post(path, {**body, "max_tokens": 1}).status == 200

    for i in range(10):
        ask(i)
    before = server.stats()["process_resident_memory_bytes"]
    for i in range(10, 60):
        ask(i)
    assert server.stats()["process_resident_memory_bytes"] - before < 16 << 20
