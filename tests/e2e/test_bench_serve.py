"""hadal bench serve: what it sends depends on its options alone, what it says is what the server saw,
and every way in which an answer can fail has a name."""

import html.parser
import json
import math
import os
import re
import signal
import subprocess

import pytest
from conftest import HADAL
from openai_mock import Mock, count_words
from serving import wait_until

IDS = ["--endpoint", "completions", "--token-ids", 4096, "--model", "tiny-v4", "--warmup", 0]


@pytest.fixture
def mock():
    started = []

    def start(*answers, **options):
        started.append(Mock(*answers, **options))
        return started[-1]

    yield start
    for m in started:
        m.close()


@pytest.fixture
def load(hadal, tmp_path):
    """load(url, options...): the document of --json; .stdout of the last run is in load.said."""

    def run(url, *args, code=0, **options):
        path = tmp_path / "load.json"
        result = hadal("bench", "serve", url, "--json", path, "-q", *args, **options)
        assert result.returncode == code, result.stderr
        run.said, run.warned = result.stdout, result.stderr
        return json.loads(path.read_text())

    return run


def level_of(document):
    assert len(document["levels"]) == 1
    return document["levels"][0]


def errors_of(level):
    return {e["name"]: e["count"] for e in level["errors"]}


# ---- figures ----


def test_figures_are_what_the_server_counted(serve, load):
    server = serve("--backend", "null")
    before = server.stats()
    level = level_of(load(f"http://127.0.0.1:{server.port}", *IDS, "--num-prompts", 20, "--concurrency", 4, "--input-len", "30-90",
                          "--output-len", "5-20", "--ignore-eos", "--details"))
    after = server.stats()
    for ours, theirs in ("completed", "num_requests"), ("total_input_tokens", "prompt_tokens"), ("total_output_tokens", "generation_tokens"), \
            ("cached_tokens", "cached_tokens"):
        name = f"hadal_{theirs}_total"
        assert level[ours] == after[name] - before[name], ours
    requests = level["requests"]
    assert len(requests) == level["completed"] == 20 and level["failed"] == level["unfinished"] == 0
    for key in "input_tokens", "output_tokens":
        assert sum(r[key] for r in requests) == level[f"total_{key}"]
    assert all(30 <= r["input_tokens"] <= 90 and 5 <= r["output_tokens"] <= 20 for r in requests)
    assert len({r["input_tokens"] for r in requests}) > 5
    assert level["output_throughput"] == pytest.approx(level["total_output_tokens"] / level["duration"])
    assert level["total_throughput"] == pytest.approx(level["input_throughput"] + level["output_throughput"])
    assert level["concurrency"] == pytest.approx(sum(r["e2e_ms"] for r in requests) / 1000 / level["duration"])
    assert level["concurrency"] <= 4
    assert level["mean_ttft_ms"] == pytest.approx(sum(r["ttft_ms"] for r in requests) / 20)
    for name in "ttft", "itl", "tpot", "e2e_latency":
        curve = level[f"{name}_percentiles_ms"]
        assert len(curve) == 101 and curve == sorted(curve)
        for word, place in ("median", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100):
            assert level[f"{word}_{name}_ms"] == pytest.approx(curve[place])


def test_times_of_a_request_add_up(mock, load):
    """Five events of a token each: E2E is TTFT and four ITL, or four TPOT; nothing comes for 50 ms."""
    level = level_of(load(mock("slow", tokens=5).url, *IDS, "--num-prompts", 6, "--concurrency", 2, "--details"))
    requests = level["requests"]
    assert all(50 <= r["ttft_ms"] <= r["e2e_ms"] for r in requests)
    later = sum(r["e2e_ms"] - r["ttft_ms"] for r in requests)
    assert [24 * level["mean_itl_ms"], 24 * level["mean_tpot_ms"]] == pytest.approx([later, later])
    assert level["duration"] * 1000 >= max(r["sent_ms"] + r["e2e_ms"] for r in requests)


def test_lengths_of_text_are_tokens(serve, load):
    server = serve("--backend", "null")
    for endpoint in "chat", "completions":
        level = level_of(load(f"http://127.0.0.1:{server.port}/v1/", "--endpoint", endpoint, "--num-prompts", 8, "--input-len", 300, "--output-len", 4))
        assert level["total_input_tokens"] == pytest.approx(8 * 300, rel=0.1)


def test_prefixes_are_shared_by_group(serve, load):
    server = serve("--backend", "null", "--no-drafts")
    args = [*IDS, "--num-prompts", 8, "--concurrency", 1, "--input-len", 512, "--output-len", 2, "--prefix-groups", 2]
    assert level_of(load(f"http://127.0.0.1:{server.port}", *args))["cached_tokens"] == 0
    shared = level_of(load(f"http://127.0.0.1:{server.port}", *args, "--prefix-len", 384, "--seed", 1))
    assert shared["cached_tokens"] == (8 - 2) * 384


def test_levels_of_a_sweep_share_no_prompt(serve, load):
    server = serve("--backend", "null")
    document = load(f"http://127.0.0.1:{server.port}", *IDS, "--concurrency", "1,2,4", "--num-prompts", 6, "--input-len", 400, "--output-len", 2)
    assert [level["max_concurrency"] for level in document["levels"]] == [1, 2, 4]
    assert all(level["completed"] == 6 and level["cached_tokens"] == 0 for level in document["levels"])
    assert [line.split()[0] for line in load.said.splitlines()[-3:]] == ["1", "2", "4"]


def test_a_server_without_usage(mock, load):
    m = mock("good", "pieces", usage=False, tokens=7)
    level = level_of(load(m.url, *IDS, "--num-prompts", 4))
    assert (level["completed"], level["answers_without_usage"], level["total_output_tokens"]) == (4, 4, 28)
    assert level["total_input_tokens"] == 0 and level["cached_tokens"] == -1
    assert "Answers counted by events:               4" in load.said


def test_objectives(mock, load):
    m = mock("slow")
    args = [*IDS, "--num-prompts", 6, "--goodput"]
    level = level_of(load(m.url, *args, "ttft:600000,tpot:600000,e2e:600000"))
    assert level["goodput_share"] == 1 and level["request_goodput"] == pytest.approx(level["request_throughput"])
    assert level_of(load(m.url, *args, "ttft:49"))["goodput_share"] == 0


# ---- what is sent ----


def sent(m):
    bodies = sorted(json.dumps(b, sort_keys=True) for b in m.bodies)
    m.bodies.clear()
    return bodies


@pytest.mark.parametrize("endpoint", [["--endpoint", "chat"], ["--endpoint", "completions"], IDS])
def test_the_seed_decides_what_is_sent(mock, load, endpoint):
    m = mock()
    args = [*endpoint, "--num-prompts", 9, "--input-len", "20-60", "--output-len", "3-9", "--warmup", 0]
    runs = []
    for seed in 5, 5, 6:
        load(m.url, *args, "--seed", seed)
        runs.append(sent(m))
    assert runs[0] == runs[1] and not set(runs[0]) & set(runs[2])
    bodies = [json.loads(b) for b in runs[0]]
    assert len({b["max_tokens"] for b in bodies}) > 1 and all(3 <= b["max_tokens"] <= 9 for b in bodies)
    assert all(20 <= count_words(b) <= 60 for b in bodies)
    assert all(b["stream"] and b["stream_options"] == {"include_usage": True} and b["temperature"] == 0 for b in bodies)
    assert not any("ignore_eos" in b for b in bodies)


def test_conversations_grow_by_the_answers(mock, load):
    m = mock(tokens=2)
    level = level_of(load(m.url, "--turns", 3, "--num-prompts", 2, "--concurrency", 2, "--input-len", 30, "--turn-len", 10, "--warmup", 0))
    assert level["completed"] == 6 and len(m.bodies) == 6
    longest = [b["messages"] for b in m.bodies if len(b["messages"]) == 5]
    assert len(longest) == 2
    for messages in longest:
        assert [x["role"] for x in messages] == ["user", "assistant"] * 2 + ["user"]
        assert [x["content"] for x in messages if x["role"] == "assistant"] == [" token0 token1"] * 2
        assert [len(x["content"].split()) for x in messages if x["role"] == "user"] == [27, 10, 10]
        for n in 1, 3:
            assert any(b["messages"] == messages[:n] for b in m.bodies)


def test_completions_grow_too(mock, load):
    m = mock(tokens=2)
    load(m.url, "--endpoint", "completions", "--turns", 2, "--num-prompts", 1, "--input-len", 6, "--turn-len", 3, "--warmup", 0)
    first, second = (b["prompt"] for b in m.bodies)
    assert second.startswith(first + " token0 token1 ") and len(second.split()) == 6 + 2 + 3


def test_never_more_at_once_than_allowed(mock, load):
    m = mock("slow")
    load(m.url, *IDS, "--num-prompts", 30, "--concurrency", 3)
    assert m.most <= 3 and len(m.bodies) == 30


def test_arrivals_follow_the_rate(mock, load):
    m = mock()
    level = level_of(load(m.url, *IDS, "--num-prompts", 40, "--rate", 200, "--details", "--seed", 9))
    times = [r["sent_ms"] for r in level["requests"]]
    assert times == sorted(times) and times[-1] > 0.5 * 40 / 200 * 1000
    gaps = [b - a for a, b in zip(times, times[1:])]
    assert max(gaps) > 2 * sum(gaps) / len(gaps)  # not evenly: drawn
    assert "P99 sent late by (ms):" in load.said


def test_nothing_is_sent_after_the_duration(mock, load):
    m = mock()
    level = level_of(load(m.url, *IDS, "--duration", 0.4, "--concurrency", 2, "--turns", 1, "--details"))
    assert level["completed"] == len(m.bodies) > 0
    times = sorted(r["sent_ms"] for r in level["requests"])
    # A request that was due in time may leave later on a busy machine, one on each connection.
    assert all(t <= 400 for t in times[:-2]) and level["unfinished"] == 0


def test_extra_members_and_the_way_to_ignore_eos(mock, load):
    m = mock()
    document = load(m.url, "--ignore-eos", "--extra-body", '{"top_k": 1, "temperature": 0.5}', "--num-prompts", 2)
    assert document["options"]["ignore_eos"] is True
    assert all(b["ignore_eos"] is True and b["top_k"] == 1 and b["temperature"] == 0.5 for b in m.bodies + m.probes)
    strict = mock(refuse=["ignore_eos"])
    path = load(strict.url, "--ignore-eos", "--num-prompts", 2)
    assert path["options"]["ignore_eos"] is False and level_of(path)["completed"] == 2
    assert not any("ignore_eos" in b for b in strict.bodies)


def test_a_refused_parameter_is_said(mock, hadal):
    m = mock(refuse=["ignore_eos"])
    result = hadal("bench", "serve", m.url, "--ignore-eos", "--num-prompts", 1)
    assert result.returncode == 0 and "unknown parameter ignore_eos" in result.stderr


def test_the_key_is_sent_and_never_shown(mock, load, tmp_path):
    m = mock()
    page = tmp_path / "page.html"
    for name in "HADAL_API_KEY", "OPENAI_API_KEY":
        env = {k: v for k, v in os.environ.items() if not k.endswith("API_KEY")} | {name: "secret-of-" + name}
        document = load(m.url, "--num-prompts", 1, "--report", page, env=env)
        assert {h["Authorization"] for h in m.headers} == {"Bearer secret-of-" + name}
        assert "secret" not in json.dumps(document) + load.said + page.read_text()
        m.headers.clear()
    load(m.url, "--num-prompts", 1, env={**env, "OPENAI_API_KEY": ""})
    assert {h["Authorization"] for h in m.headers} == {None}


# ---- failures ----


def test_failures_have_names(mock, load):
    kinds = ["busy", "cut", "unended", "failing", "garbage", "vanishing", "busy", "good"]
    m = mock(*kinds)
    level = level_of(load(m.url, *IDS, "--num-prompts", len(kinds), "--concurrency", 1, "--details"))
    assert errors_of(level) == {"HTTP 429 too_many": 2, "stream cut": 2, "error in the stream": 2,
                                "Server returned nothing (no headers, no data)": 1}
    assert level["completed"] == 1 and level["failed"] == 7 and len(m.bodies) == 8  # no retries
    assert {e["name"]: e["message"] for e in level["errors"]}["HTTP 429 too_many"] == "try later"
    assert sum(r["error"] is not None for r in level["requests"]) == 7
    assert level["total_output_tokens"] == m.tokens
    assert re.search(r"^HTTP 429 too_many +2  try later$", load.said, re.M)


def test_what_a_server_says_is_cut_and_plain(mock, load):
    """Between characters, and without what a terminal would obey."""
    m = mock("odd")
    m.model = "a\x1b[2Jb"
    args = [a for a in IDS if a not in ("--model", "tiny-v4")]
    (error,) = level_of(load(m.url, *args, "--num-prompts", 2))["errors"]
    assert error == {"name": "HTTP 400  " + "ü" * 31, "count": 2, "message": " [31m" + "é" * 97}
    assert "\x1b" not in load.said and "Model:                                   a [2Jb" in load.said


def test_a_request_times_out(mock, load):
    m = mock("silent", "good")
    level = level_of(load(m.url, *IDS, "--num-prompts", 3, "--concurrency", 1, "--timeout", 2))
    assert errors_of(level) == {"timeout": 1} and level["completed"] == 2


def test_a_conversation_ends_with_its_failure(mock, load):
    m = mock("good", "busy", "good")
    level = level_of(load(m.url, "--turns", 3, "--num-prompts", 2, "--concurrency", 1, "--warmup", 0))
    assert level["completed"] == 1 + 3 and level["failed"] == 1


def test_a_server_that_is_gone_ends_the_run(mock, load):
    m = mock("busy")
    level = level_of(load(m.url, *IDS, "--num-prompts", 3000, "--concurrency", 4))
    assert level["gave_up"] and 1000 <= level["failed"] < 1100
    assert "last thousand" in load.warned


def test_an_interrupt_prints_what_was_measured(mock, tmp_path):
    m = mock("good", "good", "good", "silent")
    path = tmp_path / "load.json"
    words = [HADAL, "bench", "serve", m.url, *IDS, "--num-prompts", 50, "--concurrency", 1, "--json", path]
    p = subprocess.Popen([str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(m.bodies) == 4, "the request that hangs")
    p.send_signal(signal.SIGINT)
    said = p.communicate()[0].decode()
    assert p.returncode == 128 + signal.SIGINT
    assert "Successful requests:                     3" in said and "Unfinished requests:                     1" in said
    assert level_of(json.loads(path.read_text()))["completed"] == 3


# ---- reports ----


class Page(html.parser.HTMLParser):
    """Every tag is closed in order, nothing is fetched, nothing runs."""

    ALONE = {"meta", "br", "line", "path", "rect", "circle"}

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        assert tag not in ("script", "link", "img", "iframe")
        for name, value in attributes:
            assert name not in ("src", "href") and not name.startswith("on") and value is not None
            assert not re.search(r"\b(nan|inf)\b", value), value
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.ALONE:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_needs_nothing_else(mock, load, tmp_path):
    m = mock()
    m.model = '<b>a&b</b>"'
    page = tmp_path / "page.html"
    load(m.url, "--concurrency", "1,2", "--num-prompts", 4, "--report", page)
    text = page.read_text()
    seen = Page(text)
    assert seen.seen.count("svg") == 6 and m.model in "".join(seen.words)
    assert "url(" not in text and "@import" not in text
    for words in "TTFT, ms", "ITL, ms", "output throughput, tokens per second", "1 at once", "2 at once":
        assert words in "".join(seen.words)


def test_a_page_without_good_requests(mock, load, tmp_path):
    page = tmp_path / "page.html"
    load(mock("busy").url, *IDS, "--num-prompts", 2, "--report", page)
    assert "HTTP 429 too_many" in "".join(Page(page.read_text()).words)


@pytest.fixture
def two(mock, hadal, tmp_path):
    for name, kind in ("a", "good"), ("b", "slow"):
        result = hadal("bench", "serve", mock(kind).url, *IDS, "--num-prompts", 4, "--concurrency", "1,2", "-q",
                       "--json", tmp_path / f"{name}.json")
        assert result.returncode == 0, result.stderr
    return tmp_path / "a.json", tmp_path / "b.json"


def test_two_results_side_by_side(two, hadal, tmp_path):
    a, b = (json.loads(path.read_text())["levels"] for path in two)
    page = tmp_path / "both.html"
    result = hadal("bench", "serve", "--compare", *two, "--report", page)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    ratios = [line.split() for line in lines if line.startswith("TTFT median")]
    assert len(ratios) == 2
    for x, y, words in zip(a, b, ratios):
        assert math.isclose(float(words[5]), y["median_ttft_ms"] / x["median_ttft_ms"], rel_tol=1e-3, abs_tol=6e-4)
    seen = Page(page.read_text())
    assert {"A, 1 at once", "B, 2 at once", "B / A"} <= set(seen.words)


@pytest.mark.parametrize("text, words", [("{}", "no result"), ("[1]", "no result"), ('{"levels": [3]}', "no result"), ("{", "line 1"),
                                         ('{"levels": [{"max_concurrency": 77}]}', "no level in common")])
def test_files_that_are_no_results(two, hadal, tmp_path, text, words):
    other = tmp_path / "other.json"
    other.write_text(text)
    result = hadal("bench", "serve", "--compare", two[0], other)
    assert result.returncode == 2 and words in result.stderr


def test_a_result_with_odd_members(two, hadal, tmp_path):
    other, page = tmp_path / "other.json", tmp_path / "page.html"
    other.write_text(json.dumps({"url": 3, "options": {"x": [1], "y": "<i>"}, "levels": [
        {"max_concurrency": 1, "median_ttft_ms": "<", "ttft_percentiles_ms": [1, 2], "errors": [4]}, {"itl_percentiles_ms": ["x"] * 101}]}))
    result = hadal("bench", "serve", "--compare", other, two[0], "--report", page)
    assert result.returncode == 0, result.stderr
    Page(page.read_text())


# ---- refusals ----


@pytest.mark.parametrize("args, words", [
    ([], "needs URL"),
    (["ftp://host"], "no address"),
    (["nowhere"], "no address"),
    (["http://user:pw@127.0.0.1:1"], "no user name"),
    (["http://127.0.0.1:1/?a=b"], "no query"),
    (["http://127.0.0.1:1", "--concurrency", "1,,2"], "--concurrency"),
    (["http://127.0.0.1:1", "--concurrency", "2.5"], "whole number"),
    (["http://127.0.0.1:1", "--concurrency", "1,2", "--rate", "1,2"], "either"),
    (["http://127.0.0.1:1", "--rate", "-1"], "--rate"),
    (["http://127.0.0.1:1", "--input-len", "9-3"], "--input-len"),
    (["http://127.0.0.1:1", "--output-len", "0"], "--output-len"),
    (["http://127.0.0.1:1", "--prefix-len", "512"], "shared prefix"),
    (["http://127.0.0.1:1", "--goodput", "ttft:x"], "--goodput"),
    (["http://127.0.0.1:1", "--goodput", "speed:3"], "--goodput"),
    (["http://127.0.0.1:1", "--extra-body", "[]"], "--extra-body"),
    (["http://127.0.0.1:1", "--extra-body", "{"], "--extra-body"),
    (["http://127.0.0.1:1", "--token-ids", "9"], "--endpoint completions"),
    (["http://127.0.0.1:1", "--duration", "1", "--concurrency", "0"], "--duration needs a bound"),
    (["--compare", "nowhere.json", "nowhere.json"], "nowhere.json"),
])
def test_refusals(refused, args, words):
    assert words in refused("bench", "serve", *args)


def test_servers_that_cannot_be_asked(refused, mock):
    assert "connect" in refused("bench", "serve", "http://127.0.0.1:1", code=4).lower()
    m = mock(refuse=["model"])
    assert "unknown_parameter: unknown parameter model" in refused("bench", "serve", m.url, code=4)
    assert "every request of the warm-up failed: HTTP 429" in refused("bench", "serve", mock("busy").url, *IDS[:-2], code=4)
