"""Streams that tell how much of the prompt is computed: every step once, beside others, with hits in the prefix
cache, several choices, and ranks in processes; the text is that of a stream that does not tell."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import events_of, wait_until
from test_metrics import stream

PROMPT = " ".join(f"{i} is a number." for i in range(60))
FLAGS = ("--threads", 2, "--context", 1024, "--chunk", 32, "--max-running", 4)
PATHS = ["/v1/chat/completions", "/v1/completions"]


def chunks(server, path, prompt=PROMPT, **more):
    body = {"stream": True, "max_tokens": 8, "temperature": 0, **more}
    body |= {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    with stream(server, "POST", path, body) as reply:
        return [json.loads(e) for e in events_of(reply) if e != b"[DONE]"]


def text_of(found, index=0):
    choices = [c for x in found for c in x["choices"] if c["index"] == index]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


def check(found, step=32):
    """Returns what was found in the cache, of progress that is whole and comes before the text."""
    told = [x for x in found if "prompt_progress" in x]
    assert found[: len(told)] == told and len(told) < len(found)
    steps = [x["prompt_progress"] for x in told]
    done = [s["processed"] for s in steps]
    assert done == sorted(set(done)) and done[-1] == steps[0]["total"]
    assert all(b - a <= step for a, b in zip([steps[0]["cache"], *done], done, strict=False))
    assert len({(s["total"], s["cache"]) for s in steps}) == 1
    assert [s["time_ms"] for s in steps] == sorted(s["time_ms"] for s in steps)
    assert all(len(x["choices"]) == 1 and x["choices"][0]["finish_reason"] is None for x in told)
    return steps[0]["cache"], len(steps)


@pytest.mark.parametrize("path", PATHS)
def test_every_step_is_told(serve, path):
    server = serve(*FLAGS)
    want = chunks(server, path)
    server.post("/flush_cache")
    found = chunks(server, path, return_progress=True)
    cached, n = check(found)
    assert cached == 0 and n > 8 and text_of(found) == text_of(want) != ""
    assert not any("prompt_progress" in x for x in want)
    cached, n = check(chunks(server, path, return_progress=True))  # its own prefix
    assert cached > 256 and n < 5
    cached, n = check(chunks(server, path, prompt="hi", return_progress=True))
    assert n == 1


def test_choices_have_one_prompt(serve):
    server = serve(*FLAGS)
    found = chunks(server, "/v1/completions", return_progress=True, n=3, temperature=1, seed=5)
    told = [x for x in found if "prompt_progress" in x]
    assert {x["choices"][0]["index"] for x in told} == {0} and len(told) > 8
    assert told[-1]["prompt_progress"]["processed"] == told[0]["prompt_progress"]["total"]
    assert text_of(found, 2) != ""


@pytest.mark.parametrize("ranks", [("--tp", 2), ("--dp", 2, "--ep", 2)])
def test_many_at_once_and_ranks(serve, ranks):
    server = serve(*FLAGS, "--kv-tokens", 2048, *ranks)

    def ask(i):
        found = chunks(server, PATHS[i % 2], prompt=f"{i}. " + PROMPT, return_progress=True, logprobs=i % 2 or True)
        assert check(found)[0] < 64
        return text_of(found)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(12)))


def test_a_budget_of_time_makes_smaller_steps(serve):
    """Beside another answer, in steps of fewer tokens, the same text; alone, in chunks as ever."""
    slow = serve(*FLAGS, "--prompt-ms", 1)
    plain = serve(*FLAGS)
    body = {"prompt": "Once upon a time", "max_tokens": 700, "ignore_eos": True, "stream": True}
    with stream(slow, "POST", PATHS[1], body) as other:
        other.readline()
        found = chunks(slow, PATHS[1], return_progress=True)
    want = chunks(plain, PATHS[1], return_progress=True)
    assert check(found)[1] > check(want)[1] and text_of(found) == text_of(want)
    wait_until(lambda: slow.loads()["num_running_reqs"] == 0, "the other has ended")
    assert check(chunks(slow, PATHS[1], prompt="Alone. " + PROMPT, return_progress=True))[1] <= check(want)[1] + 1


def test_it_is_for_streams(serve):
    server = serve(*FLAGS)
    for path, body in zip(PATHS, ({"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}), strict=True):
        reply = server.post(path, {**body, "return_progress": True})
        assert reply.status == 400 and "return_progress is for streams" in reply.text
