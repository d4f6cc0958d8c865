"""Responses that are kept, go on in the background, are followed, listed, cancelled, forgotten."""

import itertools
import json
import select

import pytest
from serving import Server, events_of, wait_until

openai = pytest.importorskip("openai")

SUM = {"model": "m", "input": "What is 1 + 3?", "temperature": 0}
ENDLESS = {"model": "m", "input": "a", "max_output_tokens": 8000, "background": True, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    s = Server("--log-requests", tmp_path_factory.mktemp("log") / "log.jsonl")
    yield s
    s.close()


@pytest.fixture(scope="module")
def responses(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as c:
        yield c.responses


def finished(responses, given):
    done = ("completed", "incomplete", "failed", "cancelled")
    return wait_until(lambda: (r := responses.retrieve(given.id)).status in done and r, "the response ends")


def test_thinking_as_templates_of_others_say_it(responses):
    r = responses.create(**SUM, extra_body={"chat_template_kwargs": {"thinking": True}})
    assert [item.type for item in r.output] == ["reasoning", "message"]


@pytest.mark.threads
def test_in_the_background(responses):
    given = responses.create(background=True, **SUM)
    assert given.status == "queued" and given.background and not given.output
    r = finished(responses, given)
    whole = responses.create(**SUM)
    assert r.status == "completed" and r.output_text == whole.output_text
    assert (r.usage.input_tokens, r.usage.output_tokens) == (whole.usage.input_tokens, whole.usage.output_tokens)
    assert responses.create(model="m", input="And 2 more?", previous_response_id=r.id, max_output_tokens=2).usage.input_tokens > 40


@pytest.mark.threads
def test_a_stream_is_left_and_followed(responses):
    stream = responses.create(background=True, stream=True, **SUM)
    seen = [event for event, _ in zip(stream, range(6), strict=False)]
    stream.close()
    rid, last = seen[0].response.id, seen[-1].sequence_number
    rest = list(responses.retrieve(rid, stream=True, starting_after=last))
    assert [e.sequence_number for e in rest] == list(range(last + 1, last + 1 + len(rest)))
    assert rest[-1].type == "response.completed"
    again = list(responses.retrieve(rid, stream=True))
    assert again[-1].response.output_text == responses.create(**SUM).output_text
    order = [[k for k, _ in itertools.groupby(e.type for e in s)] for s in (again, responses.create(stream=True, **SUM))]
    assert order[0] == order[1]


def test_cancelled(server, responses):
    given = responses.create(**ENDLESS)
    assert responses.cancel(given.id).status == "cancelled"
    r = finished(responses, given)
    assert r.status == "cancelled" and responses.cancel(given.id).status == "cancelled"
    wait_until(lambda: server.loads()["num_running_reqs"] == 0, "it is freed")
    with pytest.raises(openai.BadRequestError):
        responses.cancel(responses.create(model="m", input="a", max_output_tokens=1).id)
    with pytest.raises(openai.BadRequestError):
        responses.retrieve(responses.create(model="m", input="a", max_output_tokens=1).id, stream=True)
    running = responses.create(**ENDLESS)
    with pytest.raises(openai.BadRequestError, match="streamed again"):
        responses.retrieve(running.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="not ended"):
        responses.create(model="m", input="a", previous_response_id=running.id)
    responses.cancel(running.id)


@pytest.mark.parametrize("background", [False, True])
def test_forgotten(server, responses, background):
    r = responses.create(**(ENDLESS if background else SUM))
    responses.delete(r.id)
    wait_until(lambda: server.loads()["num_running_reqs"] == 0, "it is freed")
    for ask in (responses.retrieve, responses.delete, responses.cancel, responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(r.id)
    for path in (f"{r.id}/zzz", "x/cancel/y", "z" * 300):
        assert server.get(f"/v1/responses/{path}").status == 404
    assert server.request("PUT", f"/v1/responses/{r.id}").headers["Allow"] == "GET POST DELETE"


def test_what_it_answered(responses):
    first = responses.create(**SUM)
    items = [{"role": "user", "content": "b"}, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]}]
    r = responses.create(model="m", input=items, previous_response_id=first.id, max_output_tokens=2)
    texts = [i.content[0].text for i in responses.input_items.list(r.id, order="asc")]
    assert texts == ["What is 1 + 3?", first.output_text, "b", "c"]
    page = responses.input_items.list(r.id, limit=3)
    assert [i.content[0].text for i in page.data] == ["c", "b", first.output_text] and page.has_more
    assert [i.content[0].text for i in page] == texts[::-1]  # all pages


def test_queries_are_checked(server, responses):
    r = responses.create(model="m", input="a", max_output_tokens=1)
    for query in ("order=up", "limit=0", "limit=101", "limit=x"):
        assert server.get(f"/v1/responses/{r.id}/input_items?{query}").status == 400
    assert server.get(f"/v1/responses/{r.id}?stream=true&starting_after=x").status == 400


@pytest.mark.parametrize("after", [2**63 - 1, 2**63, 10**40])
def test_events_out_of_range_are_refused_or_none(server, responses, after):
    r = responses.create(model="m", input="a", max_output_tokens=1, background=True, stream=True)
    rid = next(e.response.id for e in r if e.type == "response.completed" or e.type == "response.incomplete")
    reply = server.get(f"/v1/responses/{rid}?stream=true&starting_after={after}")
    assert (reply.status, reply.text) == (200, "") or reply.status == 400


def test_numbers_of_any_size_come_back(server):
    """In what is echoed, in what is kept, and in what goes on from there."""
    body = '{"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "1", "x": %s}], %s "max_output_tokens": 1, "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": %s}}}}]}'
    send = lambda text: server.post("/v1/responses", text, headers={"Content-Type": "application/json"})  # noqa: E731
    for number in ("123456789012345678901234567890", "-1e999"):
        first = send(body % (number, "", number))
        assert first.status == 200 and f'"maximum":{number}' in first.text
        kept = server.get(f"/v1/responses/{first.json['id']}/input_items?order=asc")
        assert kept.status == 200 and f'"x":{number}' in kept.text
        again = send(body % (number, f'"previous_response_id": "{first.json["id"]}",', number))
        assert again.status == 200 and again.json["usage"]["input_tokens"] > first.json["usage"]["input_tokens"]


def test_the_log_has_both_halves(server, responses):
    """The answer came first, the figures when it was over."""
    given = responses.create(background=True, **SUM)
    finished(responses, given)
    path = server.get("/server_info").json["log_requests"]

    def line():
        with open(path) as log:
            return next((e for e in map(json.loads, log) if given.id.endswith(e["request_id"])), None)

    entry = wait_until(line, "its line is written")
    assert json.loads(entry["answer"])["status"] == "queued" and entry["output_tokens"] > 20


def take_room(s, held):
    """A connection whose body does not end and leaves 8 KiB. It is tried again where a reply of /metrics had the room."""
    n = (1 << 20) - (8 << 10)
    head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    for other in iter(s.socket, None):
        refused = lambda: select.select([other], [], [], 0)[0]  # noqa: E731, B023
        other.sendall(head % (n + 1) + b" " * n)
        wait_until(lambda: held() == n or refused(), "the room is taken")  # noqa: B023
        if not refused():
            return other
        other.close()


@pytest.mark.parametrize("room", [True, False])
def test_events_share_the_room_of_unread_replies(room):
    """With room they are followed again from the first on; without, the response goes on and is kept."""
    s = Server("--backend", "null", "--max-bodies-mb", 1, "--max-body-mb", 1, "--body-seconds", 3600)
    held = lambda: s.stats()["hadal_http_held_body_bytes"]  # noqa: E731
    body = {"input": "a", "background": True, "stream": True, "ignore_eos": True, "max_output_tokens": 2000}
    c = s.connection()
    with s.socket() if room else take_room(s, held):
        c.request("POST", "/v1/responses", json.dumps(body), {"Content-Type": "application/json"})
        events = list(events_of(c.getresponse()))
        response = json.loads(events[-1])["response"]
        assert response["usage"]["output_tokens"] == 2000 and sum(map(len, events)) > 16 << 10
        path = f"/v1/responses/{response['id']}"
        again = s.get(path + "?stream=true")
        assert again.status in ((200,) if room else (400, 503)), again.text  # 503: it runs still
        if room:
            assert [line[6:].encode() for line in again.text.splitlines() if line.startswith("data: ")] == events
        assert s.get(path).json == response
    c.close()
    wait_until(lambda: held() == 0, "all room is free")
    s.close()


def test_the_drain_waits():
    """A follower gets all events of what runs when the server is told to end."""
    slow = ("--backend", "null", "--null-step-us", "20000")
    body = {"input": "a", "background": True, "stream": True, "ignore_eos": True}
    s = Server(*slow)
    c = s.connection()
    c.request("POST", "/v1/responses", json.dumps({**body, "max_output_tokens": 20}), {"Content-Type": "application/json"})
    events = events_of(c.getresponse())
    rid = json.loads(next(events))["response"]["id"]
    follower = s.connection()
    follower.request("GET", f"/v1/responses/{rid}?stream=true")
    followed = events_of(follower.getresponse())
    c.close()
    next(followed)
    s.close()
    assert json.loads(list(followed)[-1])["type"] == "response.incomplete"
    s = Server(*slow, "--drain-seconds", "0")
    s.post("/v1/responses", {**body, "stream": False, "max_output_tokens": 4000})
    s.close()
