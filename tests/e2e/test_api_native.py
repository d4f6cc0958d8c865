"""SGLang's interface and what needs no client library: tokens in and out, batches, aborts, salts."""

import json
import threading

import pytest
from serving import Server, events_of, wait_until

GREEDY = {"temperature": 0}
STORY = "Once upon a time, near a forest, there lived a kind boy named Tom. " * 8


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    s.close()


def generate(server, **body):
    reply = server.post("/generate", body)
    assert reply.status == 200, reply.text
    return reply.json


def tokens_of(server, text):
    return server.post("/tokenize", {"prompt": text}).json["tokens"]


def test_tokens_round_trip(server):
    text = "Tom said: „Grüße, 世界!“ \U0001f600"
    ids = tokens_of(server, text)
    reply = server.post("/detokenize", {"tokens": [ids, ids[:0]]}).json
    assert reply["text"] == reply["prompt"] == reply["content"] == [text, ""]


def test_token_in_token_out(server):
    ids = tokens_of(server, "Once upon a time")
    r = generate(server, input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 8}, return_logprob=True, logprob_start_len=0, return_text_in_logprobs=True, return_prompt_token_ids=True)
    meta = r["meta_info"]
    assert [t[1] for t in meta["output_token_logprobs"]] == r["output_ids"] and len(r["output_ids"]) == 8
    assert "".join(t[2] for t in meta["output_token_logprobs"]) == r["text"]
    assert [t[1] for t in meta["input_token_logprobs"]] == ids == meta["prompt_token_ids"]
    assert meta["input_token_logprobs"][0][0] is None
    # What was sampled scores the same when it is read as a prompt.
    again = generate(server, input_ids=ids + r["output_ids"], sampling_params={**GREEDY, "max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    scored = [t[0] for t in again["meta_info"]["input_token_logprobs"]]
    assert scored[1:] == [t[0] for t in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
    assert again["output_ids"] == [] and again["meta_info"]["completion_tokens"] == 0


def test_batch(server):
    params = [{**GREEDY, "max_new_tokens": n} for n in (2, 5)]
    many = generate(server, text=["Once upon a", "There"], sampling_params=params, rid=["first", "second"])
    assert [a["meta_info"]["id"] for a in many] == ["first", "second"]
    assert [a["meta_info"]["finish_reason"] for a in many] == [{"type": "length", "length": n} for n in (2, 5)]
    alone = generate(server, text="There", sampling_params=params[1])
    assert alone["text"] == many[1]["text"] and alone["output_ids"] == many[1]["output_ids"]


@pytest.mark.threads
def test_stream_is_cumulative(server):
    body = {"text": ["Once upon a", "There"], "sampling_params": {**GREEDY, "max_new_tokens": 6}, "stream": True}
    connection = server.connection()
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    texts, last = {}, None
    for data in events_of(connection.getresponse()):
        if data == b"[DONE]":
            break
        last = json.loads(data)
        before = texts.get(last["index"], "")
        assert last["text"].startswith(before)
        texts[last["index"]] = last["text"]
    connection.close()
    whole = generate(server, **{**body, "stream": False})
    assert [texts[0], texts[1]] == [a["text"] for a in whole]


def test_abort_gives_what_there_is(server):
    answers = []
    body = {"text": "Once upon a", "sampling_params": {**GREEDY, "max_new_tokens": 8000, "ignore_eos": True}, "rid": "to-abort"}
    asking = threading.Thread(target=lambda: answers.append(generate(server, **body)))
    asking.start()
    wait_until(lambda: server.loads()["num_running_reqs"] == 1, "it runs")
    assert server.post("/abort_request", {"rid": "to-abort"}).status == 200
    asking.join()
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answers[0]["output_ids"]) == answers[0]["meta_info"]["completion_tokens"]


def test_salts_keep_prefixes_apart(server):
    def cached(**extra):
        body = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 1, **extra}
        return server.post("/v1/chat/completions", body).json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 64
    assert cached(cache_salt="b") == 0 and cached() == 0
    assert cached(cache_salt="a", extra_key="x") == 0


@pytest.mark.threads
def test_neighbors_do_not_matter(server):
    def ask(seed, out):
        body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 20, "temperature": 1, "seed": seed}
        out[seed] = server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]

    alone, together = {}, {}
    for seed in range(4):
        ask(seed, alone)
    threads = [threading.Thread(target=ask, args=(seed, together)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert alone == together


def test_without_a_seed_answers_differ(server):
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 30, "temperature": 1}
    answers = {server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"] for _ in range(6)}
    assert len(answers) > 1
