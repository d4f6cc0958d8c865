"""Every stream says what its unstreamed answer says, also where one event is larger than the buffer
that a stream has, which here is the smallest there is."""

import json

import pytest
from serving import Server, events_of, wait_until

STORY = "Once upon a time, near a forest, there lived a kind boy named Tom. " * 12
ASKED = [{"role": "user", "content": "What is 347 + 586?"}]
LONG = {"temperature": 0, "ignore_eos": True}
SCORES = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5, "return_text_in_logprobs": True}


@pytest.fixture(scope="module")
def server():
    s = Server("--stream-buffer-kb", "16")
    yield s
    assert s.stats()["hadal_http_slow_readers_total"] == 0
    s.close()


def events(server, path, body=None):
    """The documents of a stream that came to its end."""
    connection = server.connection()
    headers = {"Content-Type": "application/json"}
    connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers if body else {})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    found = [json.loads(e) for e in events_of(response) if e != b"[DONE]"]
    connection.close()
    return found


def both(server, path, body):
    reply = server.post(path, body)
    assert reply.status == 200, reply.text
    return events(server, path, {**body, "stream": True}), reply.json


def joined(items):
    """Deltas put together: texts and lists end to end, of the rest the last that says something."""
    whole = {}
    for item in items:
        for key, value in item.items():
            if isinstance(value, dict):
                whole[key] = joined([whole.get(key) or {}, value])
            elif isinstance(value, (str, list)) and key in ("text", "content", "reasoning_content", "tokens", "token_logprobs", "top_logprobs", "text_offset"):
                whole[key] = whole[key] + value if whole.get(key) else value
            elif value is not None or key not in whole:
                whole[key] = value
    return whole


def choices(stream, n, part):
    return [joined(c[part] for e in stream for c in e["choices"] if c["index"] == i and c.get(part)) for i in range(n)]


def test_chat(server):
    body = {"messages": ASKED, "max_tokens": 60, "n": 3, "logprobs": True, "top_logprobs": 20, "seed": 1, "ignore_eos": True}
    stream, whole = both(server, "/v1/chat/completions", body)
    messages = choices(stream, 3, "delta")
    for i, c in enumerate(whole["choices"]):
        for key in ("content", "reasoning_content"):
            assert (messages[i].get(key) or "") == (c["message"].get(key) or "")
        assert choices(stream, 3, "logprobs")[i]["content"] == c["logprobs"]["content"] and len(c["logprobs"]["content"]) == 60


def test_completions(server):
    body = {"prompt": [STORY, "There"], "max_tokens": 20, "echo": True, "logprobs": 5, **LONG}
    stream, whole = both(server, "/v1/completions", body)
    for i, c in enumerate(whole["choices"]):
        assert "".join(e["text"] for chunk in stream for e in chunk["choices"] if e["index"] == i) == c["text"]
        assert choices(stream, 2, "logprobs")[i]["tokens"] == c["logprobs"]["tokens"]
        assert choices(stream, 2, "logprobs")[i]["token_logprobs"] == c["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("batch", [False, True])
def test_generate(server, batch):
    """The scores of a prompt are one event, and a batch has several at once."""
    body = {"text": [STORY, STORY + STORY] if batch else STORY, "sampling_params": {**LONG, "max_new_tokens": 30}, **SCORES}
    stream, whole = both(server, "/generate", body)
    for i, answer in enumerate(whole if batch else [whole]):
        mine = [e for e in stream if e.get("index", 0) == i]
        assert mine[-1]["text"] == answer["text"] and mine[-1]["output_ids"] == answer["output_ids"]
        for key in ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs"):
            given = next(e["meta_info"][key] for e in reversed(mine) if e["meta_info"].get(key))
            assert given == answer["meta_info"][key]
        assert max(len(json.dumps(e)) for e in mine) > 16384


def test_messages(server):
    stream, whole = both(server, "/v1/messages", {"messages": ASKED, "max_tokens": 400, "temperature": 0})
    blocks = {}
    for e in stream:
        if e["type"] == "content_block_delta":
            d = e["delta"]
            blocks[e["index"]] = blocks.get(e["index"], "") + (d.get("text") or d.get("thinking") or "")
    assert list(blocks.values()) == [b.get("text") or b.get("thinking") for b in whole["content"]]


def said(response):
    return [[part["text"] for part in item["content"]] for item in response["output"]]


RESPONSE = {"input": "Tell me a story.", "max_output_tokens": 400, **LONG}


def test_responses(server):
    stream, whole = both(server, "/v1/responses", RESPONSE)
    assert stream[-1]["type"] == "response.incomplete" and said(stream[-1]["response"]) == said(whole)
    deltas = "".join(e["delta"] for e in stream if e["type"].endswith("text.delta"))
    assert deltas == "".join(text for item in said(whole) for text in item)


def test_response_in_the_background(server):
    """Its events are read while they come, again afterwards, and from in between."""
    live = events(server, "/v1/responses", {**RESPONSE, "background": True, "stream": True})
    path = f"/v1/responses/{live[0]['response']['id']}"
    wait_until(lambda: server.get(path).json["status"] != "in_progress", "it ends")
    again = events(server, path + "?stream=true")
    assert again == live and sum(len(json.dumps(e)) for e in live) > 16384
    assert events(server, path + "?stream=true&starting_after=9") == live[10:]
    assert said(live[-1]["response"]) == said(server.post("/v1/responses", RESPONSE).json)


def test_follower_of_a_response_that_runs(server):
    connection = server.connection()
    connection.request("POST", "/v1/responses", json.dumps({**RESPONSE, "max_output_tokens": 500, "background": True, "stream": True}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    first = json.loads(next(events_of(response)))
    path = f"/v1/responses/{first['response']['id']}?stream=true"
    reader = events_of(response)
    for _ in range(100):
        next(reader)
    late = events(server, path)  # begins with all that came so far
    assert late[101:] == [json.loads(e) for e in reader if e != b"[DONE]"]
    connection.close()


@pytest.mark.parametrize("name", ["+5", " 5", "5 ", "-1", "0x5", "5.0", "", "99999999999999999999", "9223372036854775807", "%2B5"])
def test_numbers_of_a_query(server, name):
    number = name.replace("+", "%2B").replace(" ", "%20") if "%" not in name else name
    made = server.post("/v1/responses", {"input": "a", "max_output_tokens": 1}).json["id"]
    for path in (f"/v1/responses/{made}/input_items?limit=", f"/v1/responses/{made}?stream=true&starting_after="):
        reply = server.get(path + number)
        assert reply.status == 400 and reply.json["error"]["code"] == "invalid_value", path + number
    timeout = server.post("/flush_cache?timeout=" + number)
    assert timeout.status == (200 if name == "5.0" else 400)
