"""/metrics, /v1/loads and /engine/live: read by Prometheus' own parser, and while steps take long."""

import concurrent.futures
import contextlib
import json
import re

import pytest
from serving import Server, events_of, wait_until

prometheus = pytest.importorskip("prometheus_client.parser")

ODD_NAME = 'a "b" \\c ü 模型'
CHAT = {"messages": [{"role": "user", "content": "What is 1 + 3?"}], "max_tokens": 8}
# What the boards of the two projects ask for.
SGLANG = {"num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage", "gen_throughput", "cache_hit_rate", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket", "prompt_tokens_total", "generation_tokens_total", "num_requests_total", "spec_accept_length"}
VLLM = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "e2e_request_latency_seconds_bucket", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "request_success_total", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_inference_time_seconds_count", "request_time_per_output_token_seconds_bucket", "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"}


@pytest.fixture(scope="module")
def server():
    s = Server("--model-name", ODD_NAME, "--metrics-compat", "both")
    yield s
    s.close()


@pytest.fixture(scope="module")
def slow():
    """Every step takes as long as no scrape ever should."""
    s = Server("--backend", "null", "--null-step-us", "2000000")
    yield s
    s.close()


@contextlib.contextmanager
def stream(server, method, path, body=None):
    """A stream that is left at the end, with the connection it came on."""
    c = server.connection()
    c.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"} if body else {})
    response = c.getresponse()
    yield response
    response.close()
    c.close()


ENDLESS = ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1000, "stream": True})


def families(server):
    return list(prometheus.text_string_to_metric_families(server.get("/metrics").text))


def samples(server):
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families(server) for s in f.samples}


def test_a_parser_reads_it(server):
    server.post("/v1/chat/completions", CHAT)
    names = set()
    for family in families(server):
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family.name
        assert family.name not in names, f"{family.name} twice"
        names.add(family.name)
        for sample in family.samples:
            assert sample.labels.get("model_name") in ((None,) if family.name.startswith("process_") else (ODD_NAME,))
            assert family.type != "counter" or sample.name.endswith("_total")
    assert len(names) > 100


# What `promtool check metrics` says of a name: base units, spelled out and last; types by their suffix alone.
NO_BASE_UNITS = {"bits", "bit", "kilobytes", "megabytes", "gigabytes", "kb", "mb", "gb", "tb", "b", "ms", "us", "ns", "s", "sec", "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "h", "d", "m", "percent", "celsius", "grams"}
BASE_UNITS = {"seconds", "bytes"}


def faults_of(family):
    words = family.name.removesuffix("_total").split("_")
    reserved = {"counter", "gauge", "histogram", "summary", "bucket", "count", "sum", "total", "created", "info"}
    if family.name.endswith("_total") and family.type == "counter":
        words.append("total")  # the parser has taken one off
    yield from (f"{w} is no base unit" for w in words if w in NO_BASE_UNITS)
    yield from (f"ends in {w}" for w in words[-1:] if w in reserved)
    yield from (f"names its type {w}" for w in words if w == family.type)
    yield from (f"{w} is not last" for w in words[:-1] if w in BASE_UNITS)
    if not re.fullmatch("[a-z][a-z0-9_]*", family.name):
        yield "has more than small letters, digits and underscores"
    for label in {name for sample in family.samples for name in sample.labels}:
        if not re.fullmatch("[a-z][a-z0-9_]*", label):
            yield f"label {label}"


def test_our_names_follow_the_rules(server):
    """Those under other makers' prefixes are theirs."""
    ours = [f for f in families(server) if ":" not in f.name]
    assert len(ours) > 60
    assert {f.name: list(faults_of(f)) for f in ours if list(faults_of(f))} == {}


def test_boards_find_their_names(server):
    server.post("/v1/chat/completions", CHAT)
    names = {name for name, _ in samples(server)}
    assert {f"sglang:{n}" for n in SGLANG} | {f"vllm:{n}" for n in VLLM} <= names


def test_histograms_agree_with_themselves(server):
    server.post("/v1/chat/completions", CHAT)
    n = 0
    for family in families(server):
        if family.type != "histogram":
            continue
        buckets = [(float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets) and [v for _, v in buckets] == sorted(v for _, v in buckets), family.name
        (count,) = (s.value for s in family.samples if s.name.endswith("_count"))
        assert buckets[-1] == (float("inf"), count)
        n += 1
    assert n > 20


@pytest.mark.threads
def test_counters_never_fall(server):
    """Also not while requests come and go, and not what a histogram is made of."""
    counters = {f.name for f in families(server) if f.type in ("counter", "histogram")}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        work = [pool.submit(server.post, "/v1/chat/completions", {**CHAT, "seed": i}) for i in range(12)]
        before = {}
        while not all(w.done() for w in work):
            after = samples(server)
            for (name, labels), value in after.items():
                base = name.removesuffix("_total").removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
                assert base not in counters or value >= before.get((name, labels), 0), name
            before = after
    assert before


def test_a_first_token_counts_before_the_answer_ends(slow):
    def first():
        return samples(slow)["hadal_time_to_first_token_seconds_count", (("model_name", "tiny-v4"),)]

    before = first()
    with stream(slow, *ENDLESS) as response:
        response.readline()
        assert first() == before + 1
    wait_until(lambda: slow.loads()["num_running_reqs"] == 0, "the request is freed")


def test_looking_does_not_wait_for_a_step(slow):
    """A step takes two seconds; several looks fit into one of them, on a loaded machine not into each."""

    def looks_in_this_step():
        steps = slow.stats()["hadal_steps_total"]
        looked = 0
        while slow.stats()["hadal_steps_total"] == steps:
            for path in ("/v1/loads", "/server_info", "/model_info", "/health"):
                assert slow.get(path).status == 200
            looked += 1
        return looked

    with stream(slow, *ENDLESS) as response:
        response.readline()
        assert any(looks_in_this_step() > 3 for _ in range(30))
        with stream(slow, "GET", "/engine/live") as view:
            events = events_of(view)
            in_a_row, last = 0, None
            for _ in range(100):
                steps = json.loads(next(events))["stats"]["steps"]
                in_a_row = in_a_row + 1 if steps == last else 1
                last = steps
                if in_a_row > 2:
                    break
            assert in_a_row > 2


def test_the_live_view_covers_what_came_lately(server):
    server.post("/v1/chat/completions", CHAT)
    with stream(server, "GET", "/engine/live") as view:
        now = json.loads(next(events_of(view)))
    for times in (now["ttft_ms"], now["itl_ms"]):
        assert 0 < times["p50"] <= times["p95"]


def test_the_history_goes_back_a_minute_and_continues_in_the_live_view(server):
    server.post("/v1/chat/completions", CHAT)
    with stream(server, "GET", "/engine/live") as view:
        now = json.loads(next(events_of(view)))
        wait_until(lambda: server.get("/engine/history").json["t"][-1] >= now["t"], "the sample is kept")
        past = server.get("/engine/history").json
    assert len({len(column) for column in past.values()}) == 1
    assert past["t"] == sorted(past["t"]) and 0 < len(past["t"]) <= 240
    at = past["t"].index(now["t"])  # the same sample
    assert past["prompt_tokens"][at] == now["stats"]["prompt_tokens"]
    assert past["ttft_p50_ms"][at] == pytest.approx(now["ttft_ms"]["p50"]) and past["itl_p95_ms"][at] == pytest.approx(now["itl_ms"]["p95"])
    assert past["tokens_s"][at] == pytest.approx(now["rates"]["tokens_s"])


def test_tiers_add_up():
    """Texts that come back when others have taken their pages are found in host memory."""
    server = Server("--context", 768, "--kv-tokens", 768, "--kv-host", 1, "--max-running", 1)
    for _ in range(2):
        for first in "abcdef":
            server.post("/v1/completions", {"prompt": first + " word" * 500, "max_tokens": 2})
    seen = {}
    for (name, labels), value in samples(server).items():
        labels = dict(labels)
        seen[name, labels.get("tier"), labels.get("pool")] = value
    server.close()

    def of(name, tier="host", pool=None):
        return seen[f"hadal_kv_tier_{name}", tier, pool]

    for pool in ("entries", "window"):
        assert of("pages", "host", pool) > 0
        assert of("saved_pages_total", "host", pool) >= of("pages", "host", pool)
        for tier in ("device", "host"):
            assert (of("bytes", tier, pool) > 0) == (of("pages", tier, pool) > 0)
    assert of("loaded_pages_total", "host", "entries") > 0
    assert 0 < of("cached_tokens_total") == of("loaded_pages_total", "host", "entries") * seen["hadal_page_size", None, None]
    assert of("cached_tokens_total") + of("cached_tokens_total", "device") == seen["hadal_cached_tokens_total", None, None]
    assert of("hit_rate") == of("cached_tokens_total") / seen["hadal_prompt_tokens_total", None, None]


# ---- /engine/requests ----


def standing(server, name, key="a" * 20):
    return server.get(f"/engine/requests?request_id={name}", headers={"Authorization": f"Bearer {key}"}).json["requests"]


def test_a_request_that_waits_knows_how_many_are_before_it(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a" * 20 + "\n" + "b" * 20 + "\n")
    keys.chmod(0o600)
    server = serve("--max-running", "1", "--backend", "null", "--null-step-us", "100000", "--api-key-file", keys)
    names = [f"mine-{n}" for n in range(3)]
    method, path, body = ENDLESS
    living = []
    for name in names:
        living.append(server.connection())
        headers = {"X-Request-Id": name, "Authorization": f"Bearer {'a' * 20}", "Content-Type": "application/json"}
        living[-1].request(method, path, json.dumps({**body, "ignore_eos": True}), headers)
        wait_until(lambda name=name: standing(server, name), "the engine has it")
    wait_until(lambda: [standing(server, name)[0]["phase"] != "waiting" for name in names] == [True, False, False], "the first runs")
    assert [standing(server, name)[0]["ahead"] for name in names] == [0, 0, 1]
    assert len({standing(server, name)[0]["id"] for name in names}) == 3
    assert standing(server, names[1], key="b" * 20) == []  # another key's
    assert standing(server, "mine") == []
    for connection in living:
        connection.close()
    wait_until(lambda: not any(standing(server, name) for name in names), "they are gone")
    refused = server.get("/engine/requests", headers={"Authorization": f"Bearer {'a' * 20}"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "request_id")


# ---- /v1/loads ----


def test_loads_in_sections(server):
    load = server.loads()
    assert {"memory", "speculative", "queues", "num_used_tokens", "token_usage"} <= load.keys()
    assert load["memory"]["token_capacity"] == load["max_total_num_tokens"] >= load["num_total_tokens"]
    some = server.get("/v1/loads?include=core,spec&dp_rank=0").json["loads"][0]
    assert "speculative" in some and "memory" not in some and "num_running_reqs" in some
    assert server.get("/v1/loads?include=lora").json["loads"] == [{"dp_rank": 0}]
    for query in ("include=zzz", "include=core,", "dp_rank=1", "format=xml", "include=,"):
        assert server.get("/v1/loads?" + query).status == (200 if query == "include=core," else 400), query


def test_loads_as_prometheus(server):
    reply = server.get("/v1/loads?format=prometheus")
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = {s.name: s for f in prometheus.text_string_to_metric_families(reply.text) for s in f.samples}
    load = server.loads()
    assert found["sglang_max_total_num_tokens"].value == load["max_total_num_tokens"]
    assert found["sglang_spec_accept_length"].labels == {"dp_rank": "0"} and "sglang_queues_waiting" in found
    assert all(type(value) is dict or name == "dp_rank" or f"sglang_{name}" in found for name, value in load.items())


def test_load_by_its_old_name(server):
    assert server.get("/get_load").json[0].keys() == {"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens", "num_pending_tokens", "ts_tic"}
