"""hadal serve as the rollout engine of a trainer: pauses, flushes, aborts, log-probabilities."""

import concurrent.futures
import contextlib
import itertools
import math
import re
import threading

import pytest
from serving import Server, wait_until

MODES = ["abort", "retract", "in_place"]
PAUSED = {"status": "ok", "message": "Generation paused successfully."}
CONTINUED = {"status": "ok", "message": "Generation continued successfully."}


@pytest.fixture(scope="module")
def tiny():
    server = Server("--max-running", "4")
    yield server
    server.close()


@pytest.fixture(scope="module")
def null():
    server = Server("--backend", "null")
    yield server
    server.close()


def body(tokens=3000, **more):
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.8, "sampling_seed": 5}
    return {"text": "Once upon a time", "sampling_params": sampling, "return_logprob": True, **more}


def pause(server, mode):
    reply = server.post("/pause_generation", {"mode": mode})
    assert (reply.status, reply.json) == (200, PAUSED)


def go_on(server):
    reply = server.post("/continue_generation", {})
    assert (reply.status, reply.json) == (200, CONTINUED)


@contextlib.contextmanager
def asked(server, *bodies):
    """Requests on their way; they end when the test does."""
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        try:
            yield [pool.submit(server.post, "/generate", b) for b in bodies]
        finally:
            server.post("/abort_request", {"abort_all": True})
            server.post("/continue_generation", {})


def generated(server):
    return server.stats()["hadal_generation_tokens_total"]


def wait_for_tokens(server, running):
    before = generated(server)
    wait_until(lambda: server.loads()["num_running_reqs"] == running, "they run")
    wait_until(lambda: generated(server) > before + 4 * running, "tokens come")


# ---- pause and flush ----


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_flush_during_a_pause_that_holds_no_pages(tiny, mode):
    """What trainers do: pause, flush until 200, update, continue."""
    with asked(tiny, body(), body()) as answers:
        wait_for_tokens(tiny, 2)
        pause(tiny, mode)
        assert tiny.loads()["num_running_reqs"] == 0
        late = body(3)
        with asked(tiny, late) as arrived:
            wait_until(lambda: tiny.loads()["num_waiting_reqs"] == 1 + 2 * (mode == "retract"), "an arrival waits")
            reply = tiny.get("/flush_cache")
            assert reply.status == 200, reply.text
            assert tiny.loads()["num_used_tokens"] == 0
            go_on(tiny)
            assert len(arrived[0].result().json["output_ids"]) == 3
        if mode == "abort":
            ends = [a.result().json["meta_info"]["finish_reason"] for a in answers]
            assert [e["type"] for e in ends] == ["abort", "abort"]


def test_a_pause_that_nobody_ends_is_seen(tiny):
    """In /health and in a metric, growing; it never becomes "stalled", whoever waits."""
    with asked(tiny, body(50), body(50)):
        pause(tiny, "retract")
        wait_until(lambda: tiny.stats()["hadal_paused_seconds"] > 1, "time passes")
        reply = tiny.get("/health")
        assert reply.status == 200 and re.fullmatch(r"ok, paused for [1-9]\d* s", reply.text)
        pause(tiny, "retract")  # the same pause
        assert tiny.stats()["hadal_paused_seconds"] > 1 and tiny.stats()["hadal_paused"] == 1
        go_on(tiny)
    assert tiny.get("/health").text == "ok" and tiny.stats()["hadal_paused_seconds"] == 0


def test_flush_in_place_counts_who_holds_pages(tiny):
    with asked(tiny, body(), body()):
        wait_for_tokens(tiny, 2)
        assert tiny.get("/flush_cache").status == 400
        pause(tiny, "in_place")
        with asked(tiny, body(3)):
            wait_until(lambda: tiny.loads()["num_waiting_reqs"] == 1, "an arrival waits")
            reply = tiny.get("/flush_cache")
            assert reply.status == 400 and "2 requests run, 1 wait" in reply.text, reply.text
            pause(tiny, "retract")
            assert tiny.get("/flush_cache").status == 200


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_computed_after_a_pause_was_answered(tiny, mode):
    with asked(tiny, body(), body()):
        wait_for_tokens(tiny, 2)
        pause(tiny, mode)
        before = tiny.loads()["paused"], generated(tiny)
        assert before[0] is True
        wait_until(lambda: tiny.get("/health").status == 200, "a pause is no fault")
        assert generated(tiny) == before[1]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pauses_change_no_bit(tiny, mode):
    whole = tiny.post("/generate", body(300)).json
    with asked(tiny, body(300)) as answers:
        for _ in range(5):
            pause(tiny, mode)
            tiny.get("/flush_cache")
            go_on(tiny)
        again = answers[0].result().json
    assert again["output_ids"] == whole["output_ids"]
    assert again["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]


def test_a_thousand_cycles(null):
    """Requests come all the time; each ends whole or aborted."""
    over, ends = threading.Event(), []

    def ask():
        while not over.is_set():
            meta = null.post("/generate", body(40, return_logprob=False)).json["meta_info"]
            ends.append((meta["finish_reason"]["type"], meta["completion_tokens"] == 40))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        client = pool.submit(ask)
        try:
            for i in range(1000):
                mode = MODES[i % 3]
                pause(null, mode)
                if i % 50 < 3:
                    holders = null.loads()["num_running_reqs"]
                    assert null.get("/flush_cache").status == (400 if holders else 200)
                    assert mode == "in_place" or not holders
                go_on(null)
        finally:
            over.set()
            null.post("/continue_generation", {})
        client.result()
    assert set(ends) <= {("length", True), ("abort", False)} and ("length", True) in ends
    wait_until(lambda: null.stats()["hadal_living_answers"] == 0, "nothing is left")
    assert null.get("/flush_cache").status == 200
    assert null.loads()["num_used_tokens"] == 0


# ---- abort ----


def test_an_aborted_request_has_what_was_written(tiny):
    with asked(tiny, body()) as answers:
        wait_for_tokens(tiny, 1)
        pause(tiny, "abort")
        reply = answers[0].result().json
        meta = reply["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        assert len(reply["output_ids"]) == meta["completion_tokens"] > 4 and reply["text"]
        assert [t[1] for t in meta["output_token_logprobs"]] == reply["output_ids"]
        go_on(tiny)
        whole = tiny.post("/generate", body(meta["completion_tokens"])).json
    assert whole["output_ids"] == reply["output_ids"]
    assert whole["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]


@pytest.mark.parametrize("end", [lambda s: pause(s, "abort"), lambda s: s.post("/abort_request", {"abort_all": True})])
def test_a_request_that_never_ran_says_so(tiny, end):
    pause(tiny, "in_place")
    with asked(tiny, body()) as answers:
        wait_until(lambda: tiny.loads()["num_waiting_reqs"] == 1, "it waits")
        end(tiny)
        reply = answers[0].result()
    assert reply.status == 200
    assert reply.json["meta_info"]["finish_reason"]["message"] == "Abort before prefill"
    assert reply.json["output_ids"] == [] and reply.json["text"] == ""
    assert reply.json["meta_info"]["output_token_logprobs"] == []


# ---- log-probabilities ----


def scores(server, ids, start, sampling, **more):
    """The log-probabilities of ids[start:] as a prompt."""
    asking = {"input_ids": ids, "sampling_params": {**sampling, "max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": start}
    return [t[0] for t in server.post("/generate", {**asking, **more}).json["meta_info"]["input_token_logprobs"]]


SETTINGS = [{"temperature": 0.8}, {"temperature": 1.7, "top_k": 5}, {"temperature": 0.6, "top_p": 0.7, "min_p": 0.02}, {"temperature": 0}, {}]


@pytest.mark.parametrize("mode", [None, "raw", "tempered", "sampled"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rescoring_differs_by_exactly_zero(tiny, mode, setting):
    more = {"logprob_mode": mode} if mode else {}
    sampling = {**setting, "ignore_eos": True, "sampling_seed": 11}
    prompt = tiny.post("/tokenize", {"prompt": "Once upon a time"}).json["tokens"]
    said = tiny.post("/generate", {"input_ids": prompt, "sampling_params": {**sampling, "max_new_tokens": 60}, "return_logprob": True, **more}).json
    sampled = [t[0] for t in said["meta_info"]["output_token_logprobs"]]
    assert scores(tiny, prompt + said["output_ids"], len(prompt), sampling, **more) == sampled


def test_modes_against_all_alternatives(tiny):
    """Modes differ as their definitions say, computed from the raw log-probabilities."""
    sampling = {"temperature": 2.0, "top_k": 3, "top_p": 1, "max_new_tokens": 1, "sampling_seed": 4}
    top = {}
    for mode in ("raw", "tempered", "sampled"):
        asking = {"text": "Once", "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 5, "logprob_mode": mode}
        top[mode] = {t[1]: t[0] for t in tiny.post("/generate", asking).json["meta_info"]["output_top_logprobs"][0]}
    assert len(top["raw"]) == len(top["tempered"]) == 5
    assert list(top["sampled"]) == list(top["raw"])[:3]
    assert sum(math.exp(x) for x in top["sampled"].values()) == pytest.approx(1, abs=1e-5)
    first, *others = top["raw"]
    for mode in ("tempered", "sampled"):
        for other in (i for i in others if i in top[mode]):
            gap = (top["raw"][first] - top["raw"][other]) / 2
            assert top[mode][first] - top[mode][other] == pytest.approx(gap, abs=1e-4)


def test_the_default_is_after_temperature_and_only_here(tiny):
    asking = {"text": "Once", "sampling_params": {"temperature": 0.5, "max_new_tokens": 4, "sampling_seed": 4}, "return_logprob": True}
    given = {m: tiny.post("/generate", {**asking, **({"logprob_mode": m} if m else {})}).json["meta_info"]["output_token_logprobs"] for m in (None, "raw", "tempered")}
    assert given[None] == given["tempered"] != given["raw"]
    other = tiny.post("/v1/completions", {"prompt": "Once", "temperature": 0.5, "max_tokens": 4, "seed": 4, "logprobs": 1}).json["choices"][0]
    assert other["logprobs"]["token_logprobs"] == [t[0] for t in given["raw"]]


@pytest.mark.parametrize("mode", ["", "Raw", "processed", 1])
def test_an_unknown_mode_is_refused(tiny, mode):
    reply = tiny.post("/generate", body(3, logprob_mode=mode))
    assert reply.status == 400 and "logprob_mode" in reply.text


# ---- what could be drawn ----


def mask_request(server, status=200, sampling=None, **more):
    sampling = {"max_new_tokens": 24, "temperature": 1.2, "sampling_seed": 5, "ignore_eos": True, "top_k": 12, **(sampling or {})}
    reply = server.post("/generate", {"text": "Once upon a time", "sampling_params": sampling, "return_sampling_mask": True, **more})
    assert reply.status == status, reply.text
    return reply.json


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.7}, {"top_k": 20, "min_p": 0.05}, {"top_k": 1}, {"top_k": 7, "top_p": 0.9, "frequency_penalty": 0.5}])
def test_the_mask_holds_what_could_be_drawn(tiny, sampling):
    """Rebuilt from the tempered probabilities of all listed tokens: they are kept from the best on."""
    info = mask_request(tiny, sampling=sampling, return_logprob=True, logprob_mode="sampled", top_logprobs_num=3)["meta_info"]
    masks, drawn = info["output_token_sampling_mask"], info["output_token_sampling_logprobs"]
    assert len(masks) == len(drawn) == 24
    assert [t[0] for t in info["output_token_logprobs"]] == drawn
    body = {"max_new_tokens": 24, "temperature": 1.2, "sampling_seed": 5, "ignore_eos": True, "top_k": 12, **sampling}
    other = tiny.post("/generate", {"text": "Once upon a time", "sampling_params": body, "return_logprob": True, "top_logprobs_num": 20}).json
    assert other["output_ids"] == [t[1] for t in info["output_token_logprobs"]]
    for mask, logprob, token, tops, three in zip(masks, drawn, other["output_ids"], other["meta_info"]["output_top_logprobs"], info["output_top_logprobs"]):
        assert token in mask and 1 <= len(mask) <= body["top_k"]
        best = [t[1] for t in tops]
        assert mask == best[: len(mask)] and [t[1] for t in three] == mask[:3]
        weights = {t[1]: math.exp(t[0]) for t in tops}
        total = sum(weights[t] for t in mask)
        assert abs(logprob - math.log(weights[token] / total)) < 1e-4
        if "top_p" in sampling:
            of_k = sum(weights[t] for t in best[: body["top_k"]])
            assert total / of_k >= sampling["top_p"] - 1e-5 and (total - weights[mask[-1]]) / of_k < sampling["top_p"] + 1e-5
        if "min_p" in sampling:
            assert all(weights[t] >= 0.05 * weights[best[0]] * (1 - 1e-5) for t in mask)


def test_masks_of_greedy_answers_and_refusals(tiny):
    info = mask_request(tiny, sampling={"temperature": 0, "top_k": -1})
    assert info["meta_info"]["output_token_sampling_mask"] == [[t] for t in info["output_ids"]]
    assert set(info["meta_info"]["output_token_sampling_logprobs"]) == {0.0}
    for sampling in ({"top_k": -1}, {"top_k": 21}):
        assert mask_request(tiny, 400, sampling)["error"]["param"] == "sampling_params.top_k"
    assert mask_request(tiny, 400, return_logprob=True)["error"]["param"] == "logprob_mode"
    plain = tiny.post("/generate", {"text": "Once", "sampling_params": {"max_new_tokens": 2}}).json
    assert "output_token_sampling_mask" not in plain["meta_info"]


def test_a_server_may_give_more_alternatives(serve):
    """--max-logprobs: masks of hundreds of ids, the best first, whose probabilities are all that could be drawn; of all endpoints."""
    server = serve("--max-logprobs", 512, "--tp", 2)
    hot = {"temperature": 2, "top_k": 512, "top_p": 0.97}
    info = mask_request(server, sampling=hot, return_logprob=True, logprob_mode="sampled", top_logprobs_num=512)["meta_info"]
    masks = info["output_token_sampling_mask"]
    assert max(map(len, masks)) > 100
    for mask, tops, drawn in zip(masks, info["output_top_logprobs"], info["output_token_logprobs"]):
        assert [t[1] for t in tops] == mask and len(set(mask)) == len(mask) and drawn[1] in mask
        assert abs(sum(math.exp(t[0]) for t in tops) - 1) < 1e-4
        assert all(a[0] >= b[0] for a, b in itertools.pairwise(tops))
    assert mask_request(server, 400, {"top_k": 513})["error"]["param"] == "sampling_params.top_k"
    reply = server.post("/v1/completions", {"prompt": "Once upon", "max_tokens": 3, "logprobs": 300, "echo": True}).json
    assert [len(t) > 290 for t in reply["choices"][0]["logprobs"]["top_logprobs"][-3:]] == [True] * 3
    messages = [{"role": "user", "content": "hi"}]
    asked = {"messages": messages, "max_tokens": 2, "logprobs": True, "top_logprobs": 400}
    content = server.post("/v1/chat/completions", asked).json["choices"][0]["logprobs"]["content"]
    assert [len(t["top_logprobs"]) for t in content] == [400, 400]
    assert server.post("/v1/chat/completions", asked | {"top_logprobs": 513}).status == 400
