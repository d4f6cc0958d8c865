"""What clients meet first: addresses without /v1, endpoints that are not there, bodies without a
type, a server that is their tokenizer, and contexts that are too small."""

import json
import shutil

import anthropic
import openai
import pytest
from serving import TINY, Server

SAID = [{"role": "user", "content": "What is 12 + 7?"}]


@pytest.fixture(scope="module")
def server():
    s = Server("--context", "512")
    yield s
    s.close()


@pytest.mark.parametrize("path, body", [
    ("/chat/completions", {"messages": SAID, "max_tokens": 2}), ("/completions", {"prompt": "x", "max_tokens": 2}),
    ("/messages", {"messages": SAID, "max_tokens": 2}), ("/messages/count_tokens", {"messages": SAID}),
    ("/responses", {"input": "x", "max_output_tokens": 2}), ("/responses/input_tokens", {"input": "x"}),
])  # fmt: skip
def test_addresses_without_v1(server, path, body):
    reply = server.post(path, {**body, "temperature": 0})
    assert reply.status == 200, reply.text
    assert reply.json.keys() == server.post("/v1" + path, {**body, "temperature": 0}).json.keys()


def test_clients_without_v1(server):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0)
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    response = client.responses.create(model="x", input="x", max_output_tokens=2)
    assert client.responses.retrieve(response.id).id == response.id
    assert server.get("/nothing").status == 404 and server.get("/v1/v1/models").status == 404
    assert server.request("DELETE", "/chat/completions").status == 405


def test_what_is_not_there_is_not_asked_for_twice(server):
    """Official clients try again after 408, 409, 429 and from 500 on."""
    seen = []
    hooks = {"response": [lambda r: seen.append(r.status_code)]}
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=3, http_client=openai.DefaultHttpxClient(event_hooks=hooks))
    maker = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=3, http_client=anthropic.DefaultHttpxClient(event_hooks=hooks))
    calls = [
        lambda: client.embeddings.create(model="x", input="x"), lambda: client.moderations.create(input="x"), lambda: client.files.list(),
        lambda: client.batches.list(), lambda: client.images.generate(prompt="x"), lambda: client.fine_tuning.jobs.list(), lambda: client.vector_stores.list(),
        lambda: client.audio.speech.create(model="x", voice="x", input="x"), lambda: client.conversations.create(), lambda: client.chat.completions.list(),
        lambda: maker.messages.batches.list(), lambda: maker.beta.files.list(),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((openai.NotFoundError, anthropic.NotFoundError)):
            call()
    assert seen == [404] * len(calls), seen
    assert server.post("/v1/embeddings", {}).code == "unsupported_endpoint" and server.post("/embeddings", {}).code == "unsupported_endpoint"
    assert server.get("/v1/messages/batches").json["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_bodies_that_say_nothing_of_their_type(server, kind):
    """As people send them with curl."""
    headers = {"Content-Type": kind} if kind else {}
    body = json.dumps({"messages": SAID, "max_tokens": 2})
    assert server.post("/v1/chat/completions", body, headers=headers).status == 200
    own = {**headers, "Origin": f"http://127.0.0.1:{server.port}"}
    assert server.post("/v1/chat/completions", body, headers=own).status == 415
    assert server.post("/v1/chat/completions", "a=b", headers=headers).code == "invalid_json"


def test_a_server_as_a_tokenizer(server):
    """What lm-eval's remote tokenizer asks for, and how it finds ids."""
    info = server.get("/tokenizer_info").json
    assert info["bos_token"] == "<｜begin▁of▁sentence｜>" and info["eos_token"] == "<｜end▁of▁sentence｜>" and info["chat_template"] is None

    def encode(text):
        return server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json["tokens"]

    assert [encode(info[f"{name}_token"]) for name in ("bos", "eos")] == [[0], [1]]
    ids = encode("Once upon a time")
    assert server.post("/detokenize", {"tokens": ids}).json["prompt"] == "Once upon a time"
    assert server.get("/v1/tokenizer_info").status == 404


@pytest.mark.parametrize("path, body, came, fit", [
    ("/v1/completions", {"prompt": [5] * 900}, 900, 511), ("/v1/completions", {"prompt": "the cat " * 3000}, None, 512),
    ("/v1/completions", {"prompt": [5] * 500, "max_tokens": 50}, 500, 12), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the cat " * 900}]}, None, 511),
    ("/v1/responses", {"input": "the cat " * 900}, None, 511), ("/generate", {"input_ids": [5] * 512}, 512, 511),
    ("/v1/messages", {"messages": [{"role": "user", "content": "the cat " * 900}], "max_tokens": 9}, None, 511),
])  # fmt: skip
def test_contexts_say_what_came_and_what_fits(server, path, body, came, fit):
    reply = server.post(path, body)
    assert reply.status == 400, reply.text
    message = reply.json["error"]["message"]
    if came is None:
        text = body.get("prompt") or body.get("input") or body["messages"][0]["content"]
        came = len(server.post("/tokenize", {"prompt": text[:2000], "add_special_tokens": False}).json["tokens"])
        number = int(message.split("prompt is too long: ")[1].split()[0])
        assert number >= came * len(text) // 2000 * 0.9, message
    else:
        assert f"{came} tokens" in message or f"{came} prompt tokens" in message, message
    assert f"{fit} maximum" in message or f"{fit} output tokens fit" in message, message
    assert "maximum context length" in message and "512" in message, message


def test_a_gap_is_filled_in(server):
    """By the official client; the prompt is what DeepSeek's models were trained on."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    begin, hole, end = (server.post("/tokenize", {"prompt": f"<｜fim▁{m}｜>", "add_special_tokens": False}).json["tokens"][0] for m in ("begin", "hole", "end"))

    def ids(text, start=False):
        return server.post("/tokenize", {"prompt": text, "add_special_tokens": start, "parse_special": False}).json["tokens"]

    start = ids("a", True)[: len(ids("a", True)) - len(ids("a"))]
    for before, behind in [("Once upon a", " time."), ("", " time."), ("a<｜fim▁hole｜>", "\n}")]:
        plain = [*start, begin, *ids(before), hole, *ids(behind), end]
        kept = {"model": "x", "max_tokens": 6, "temperature": 0, "extra_body": {"return_token_ids": True}}
        got = client.completions.create(prompt=before, suffix=behind, **kept).choices[0]
        assert got.model_extra["prompt_token_ids"] == plain
        assert client.completions.create(prompt=plain, **kept).choices[0].text == got.text
    several = client.completions.create(model="x", prompt=["a", "b"], suffix="c", max_tokens=2)
    assert len(several.choices) == 2
    assert client.completions.create(model="x", prompt="a", suffix="", max_tokens=2, extra_body={"return_token_ids": True}).choices[0].model_extra["prompt_token_ids"] == ids("a", True)


def test_a_model_without_markers_fills_in_nothing(serve, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY, model, symlinks=True)
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text().replace("fim▁hole", "not▁here"))
    reply = serve(model=model).post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert reply.status == 400 and reply.code == "unsupported_parameter" and reply.json["error"]["param"] == "suffix", reply.text
