"""Answers that clients send back: the next prompt begins with the tokens that the model wrote,
through every interface, however oddly it spelled them."""

import json

import pytest
from serving import TINY, Server

PAGE = 128  # tokens of one page of V4
STORY = {"role": "user", "content": "Tell me a story."}
AND = {"role": "user", "content": "And then?"}
HOT = {"temperature": 2, "seed": 5}
CONTROLS = [t["id"] for t in json.loads((TINY / "tokenizer.json").read_text())["added_tokens"] if t["special"]]
NO_CONTROLS = {"logit_bias": {str(i): -100 for i in CONTROLS}}  # an answer with a hidden one is not kept


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    s.close()


def is_odd(server, text, n_tokens):
    return server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json["count"] != n_tokens


def expect_found(prompt_tokens, answer_tokens, cached):
    known = prompt_tokens + answer_tokens
    assert cached >= (known - 1) // PAGE * PAGE, (known, cached)


@pytest.mark.parametrize("seed", [3, 5, 8])
def test_chat_completions(server, seed):
    body = {"messages": [STORY], "max_tokens": 150, "return_token_ids": True, **NO_CONTROLS, **HOT, "seed": seed}
    r = server.post("/v1/chat/completions", body).json
    choice = r["choices"][0]
    assert is_odd(server, choice["message"]["content"], len(choice["token_ids"]))
    body["messages"] += [choice["message"], AND]
    again = server.post("/v1/chat/completions", {**body, "max_tokens": 1}).json
    known = r["prompt_token_ids"] + choice["token_ids"]
    assert again["prompt_token_ids"][: len(known)] == known
    expect_found(len(known), 0, again["usage"]["prompt_tokens_details"]["cached_tokens"])
    counted = server.post("/tokenize", {"messages": body["messages"]}).json["count"]
    assert counted == again["usage"]["prompt_tokens"]


def test_messages(server):
    body = {"messages": [STORY], "max_tokens": 150, **HOT}
    r = server.post("/v1/messages", body).json
    said = r["content"][0]["text"]
    n = r["usage"]["output_tokens"]
    assert n > PAGE and is_odd(server, said, n)
    body["messages"] += [{"role": "assistant", "content": r["content"]}, AND]
    again = server.post("/v1/messages", {**body, "max_tokens": 1}).json["usage"]
    expect_found(r["usage"]["input_tokens"], n - 1, again["cache_read_input_tokens"])


@pytest.mark.parametrize("stored", [False, True])
def test_responses(server, stored):
    body = {"input": [STORY], "max_output_tokens": 150, **HOT}
    r = server.post("/v1/responses", body).json
    n = r["usage"]["output_tokens"]
    assert n > PAGE and is_odd(server, r["output"][0]["content"][0]["text"], n)
    after = {"input": [AND], "previous_response_id": r["id"]} if stored else {"input": [STORY, *r["output"], AND]}
    again = server.post("/v1/responses", {**body, **after, "max_output_tokens": 16}).json["usage"]
    expect_found(r["usage"]["input_tokens"], n - 1, again["input_tokens_details"]["cached_tokens"])
