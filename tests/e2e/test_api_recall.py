"""Answers that clients send back: the next prompt begins with the tokens that the model wrote,
through every interface, however oddly it spelled them."""

import itertools
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


def odd_story(server, path, body, text_of):
    """A story longer than a page that the model spelled oddly, and the body that asked for it."""
    for seed in itertools.count(5):
        r = server.post(path, {**body, "seed": seed}).json
        n = r["usage"]["output_tokens"]
        if n > PAGE and is_odd(server, text_of(r), n):
            return r, {**body, "seed": seed}


def expect_found(prompt_tokens, answer_tokens, cached):
    known = prompt_tokens + answer_tokens
    assert cached >= (known - 1) // PAGE * PAGE, (known, cached)


@pytest.mark.parametrize("first_seed", [100, 200, 300])
def test_chat_completions(server, first_seed):
    for seed in itertools.count(first_seed):
        body = {"messages": [STORY], "max_tokens": 150, "return_token_ids": True, **NO_CONTROLS, **HOT, "seed": seed}
        r = server.post("/v1/chat/completions", body).json
        choice = r["choices"][0]
        if is_odd(server, choice["message"]["content"], len(choice["token_ids"])):
            break
    body["messages"] += [choice["message"], AND]
    again = server.post("/v1/chat/completions", {**body, "max_tokens": 1}).json
    known = r["prompt_token_ids"] + choice["token_ids"]
    assert again["prompt_token_ids"][: len(known)] == known
    expect_found(len(known), 0, again["usage"]["prompt_tokens_details"]["cached_tokens"])
    counted = server.post("/tokenize", {"messages": body["messages"]}).json["count"]
    assert counted == again["usage"]["prompt_tokens"]


def test_messages(server):
    body = {"messages": [STORY], "max_tokens": 150, **HOT}
    r, body = odd_story(server, "/v1/messages", body, lambda r: r["content"][0]["text"])
    n = r["usage"]["output_tokens"]
    body["messages"] += [{"role": "assistant", "content": r["content"]}, AND]
    again = server.post("/v1/messages", {**body, "max_tokens": 1}).json["usage"]
    expect_found(r["usage"]["input_tokens"], n - 1, again["cache_read_input_tokens"])


@pytest.mark.parametrize("stored", [False, True])
def test_responses(server, stored):
    body = {"input": [STORY], "max_output_tokens": 150, **HOT}
    r, body = odd_story(server, "/v1/responses", body, lambda r: r["output"][0]["content"][0]["text"])
    n = r["usage"]["output_tokens"]
    after = {"input": [AND], "previous_response_id": r["id"]} if stored else {"input": [STORY, *r["output"], AND]}
    again = server.post("/v1/responses", {**body, **after, "max_output_tokens": 16}).json["usage"]
    expect_found(r["usage"]["input_tokens"], n - 1, again["input_tokens_details"]["cached_tokens"])


# ---- whose token history it is, and none ----


SEEDS = itertools.count(100)  # conversations that nobody had before


def ask(server, who, messages, **more):
    body = {"messages": messages, "return_token_ids": True, **NO_CONTROLS, **HOT, **more, **who.get("body", {})}
    return server.post("/v1/chat/completions", body, headers=who.get("headers")).json


def odd_turn(server, who):
    """An answer whose text the tokenizer would not cut as the model did: the tokens so far, and the next messages."""
    while True:
        r = ask(server, who, [STORY], max_tokens=120, seed=next(SEEDS))
        message, tokens = r["choices"][0]["message"], r["choices"][0]["token_ids"]
        text = {"prompt": message["content"], "add_special_tokens": False}
        if server.post("/tokenize", text, headers=who.get("headers")).json["count"] != len(tokens):
            return r["prompt_token_ids"] + tokens, [STORY, message, AND]


def prompt_of(server, who, messages):
    return ask(server, who, messages, max_tokens=1)["prompt_token_ids"]


def keyed(key, **names):
    return {"headers": {"x-api-key": key}, "body": names}


WHO = [keyed("first-key-0123456789"), keyed("other-key-0123456789"), keyed("first-key-0123456789", cache_salt="a"), keyed("first-key-0123456789", extra_key="a")]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("first-key-0123456789\nother-key-0123456789\n")
    file.chmod(0o600)
    s = Server("--api-key-file", file)
    yield s
    s.close()


@pytest.mark.parametrize("first, then", [(0, 0), (0, 1), (0, 2), (2, 0), (2, 3), (3, 2), (3, 3)])
def test_token_history_is_nobody_elses(keys, first, then):
    was, messages = odd_turn(keys, WHO[first])
    assert (prompt_of(keys, WHO[then], messages)[: len(was)] == was) == (first == then)


def test_without_token_history_the_text_alone_counts(server, serve):
    off = serve("--token-history", "off")
    was, messages = odd_turn(off, {})
    before, after = prompt_of(server, {}, messages), prompt_of(off, {}, messages)
    assert after == before and after[: len(was)] != was
    assert off.get("/server_info").json["token_history"] == "off"


# Their FNV-1a values are the same: without a key anybody can compute such a pair.
MET = ["8yn0iYCKYHlIj4-BwPqk", "GReLUrM4wMqfg9yzV3KQ"]


@pytest.mark.parametrize("names", [("cache_salt", "cache_salt"), ("extra_key", "extra_key"), ("cache_salt", "extra_key")])
def test_no_names_meet(server, names):
    """What one name has cached is no other's: neither computed collisions nor one word in two places."""
    a, b = MET if names[0] == names[1] else MET[:1] * 2
    long = {"prompt": f"{names} The quick brown fox jumps over the lazy dog. " * 16, "max_tokens": 1}

    def cached(name, salt):
        return server.post("/v1/completions", {**long, name: salt}).json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(names[0], a) == 0 and cached(names[0], a) > 0
    assert cached(names[1], b) == 0
