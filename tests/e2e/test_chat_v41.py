"""V4.1's conversations and replies against golden prompts and against the vendor's package."""

import json
import pathlib
import random
import subprocess

import pytest

import chat_cases
import serving
from conftest import BACKEND, GOLDEN as ALL_GOLDEN, HADAL, LONG
from test_generate import drive
from test_render import render, run

SMALL = ALL_GOLDEN / "v41_small"
DRIVER = pathlib.Path(HADAL).parent / "drive_reply"
V41 = 5  # HD_REPLY_V41

THINKS = "<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: %d (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
HIGH, PLAIN = THINKS % 75, "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
THINK, NO_THINK = "<｜Assistant｜><think>", "<｜Assistant｜></think>"
NAMES = ["get_weather", "search", "open-url"]


def says(role, content, **more):
    return {"role": role, "content": content, **more}


def user(text):
    return says("user", text)


def system(text):
    return says("system", text)


def answer(text, reasoning=None, **more):
    return says("assistant", text, **({"reasoning_content": reasoning} if reasoning else {}), **more)


HELLO = user("Hello")
GOLDEN = {
    "no system message": ([HELLO], "on", HIGH + "<｜User｜>Hello" + THINK),
    "a system message": ([system("Be exact."), HELLO], "on", HIGH + "Be exact.<｜User｜>Hello" + THINK),
    "not thinking": ([system("Be exact."), HELLO], "off", PLAIN + "<｜System｜>Be exact.<｜User｜>Hello" + NO_THINK),
    "nothing at the front": ([HELLO], "off", PLAIN + "<｜User｜>Hello" + NO_THINK),
    "two systems": ([system("A"), system("B"), user("c")], "on", HIGH + "A<｜System｜>B<｜User｜>c" + THINK),
    "reasoning of old answers": ([user("a"), answer("b", "R"), user("c")], "on",
                                 HIGH + "<｜User｜>a" + NO_THINK + "b" + EOS + "<｜User｜>c" + THINK),
    "a system message later": ([user("a"), answer("b", "R"), system("S"), user("c")], "on",
                               HIGH + "<｜User｜>a" + NO_THINK + "b" + EOS + "<｜System｜>S<｜User｜>c" + THINK),
    "a system message asks": ([user("a"), answer("b", "R"), system("S")], "on",
                              HIGH + "<｜User｜>a" + NO_THINK + "b" + EOS + "<｜System｜>S" + THINK),
    "a continued answer": ([user("a"), user("b"), answer("pre", prefix=True)], "on",
                           HIGH + "<｜User｜>a\n\nb" + THINK + "</think>pre"),
    "a reminder before": ([says("latest_reminder", "2026"), HELLO], "on",
                          HIGH + "<｜latest_reminder｜>2026<｜User｜>Hello" + THINK),
    "a reminder after": ([HELLO, says("latest_reminder", "2026")], "on",
                         HIGH + "<｜User｜>Hello<｜latest_reminder｜>2026" + THINK),
    "every answer is opened": ([answer("x"), answer("y")], "off", PLAIN + (NO_THINK + "%s" + EOS) % "x" + (NO_THINK + "%s" + EOS) % "y" + NO_THINK),
    "an empty system message": ([user("a"), system(""), user("b")], "on", HIGH + "<｜User｜>a\n\nb" + THINK),
    "a developer is a system": ([says("developer", "A"), says("developer", "B"), user("c")], "on",
                                HIGH + "A<｜System｜>B<｜User｜>c" + THINK),
    "parts": ([says("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], "off",
              PLAIN + "<｜User｜>a\n\nb" + NO_THINK),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_prompts_are_the_golden_ones(name):
    messages, thinking, want = GOLDEN[name]
    assert render(messages, "--encoding", "v4.1", "--thinking", thinking) == want


@pytest.mark.parametrize("effort, number", [("none", 75), ("low", 50), ("high", 75), ("max", 100), ("1", 1), ("63", 63), ("100", 100)])
def test_effort_is_a_number(effort, number):
    want = THINKS % number + "<｜User｜>Hello" + THINK
    assert render([HELLO], "--encoding", "v4.1", "--effort", effort) == want
    assert render([HELLO], "--encoding", "v4.1", "--effort", effort, "--thinking", "off") == PLAIN + "<｜User｜>Hello" + NO_THINK


@pytest.mark.parametrize("encoding, effort, message", [
    ("v4.1", "0", "1 to 100"), ("v4.1", "101", "1 to 100"), ("v4.1", "much", "much"), ("v4", "50", "no numbers"),
])
def test_other_efforts_are_refused(encoding, effort, message):
    p = run([HELLO], "--encoding", encoding, "--effort", effort)
    assert p.returncode == 2 and message in p.stderr.decode()


@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_images_are_refused_by_name(role):
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    p = run([HELLO, says(role, [part])], "--encoding", "v4.1")
    assert p.returncode == 2 and "messages[1].content[0].type: 'image_url'" in p.stderr.decode()


def test_a_folder_of_v41_thinks(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v41"}')
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text('[{"content": "｜DSML｜"}, {"content": "<｜System｜>"}]')
    for d in (tmp_path, tmp_path / "t"):
        assert render([HELLO], directory=d) == HIGH + "<｜User｜>Hello" + THINK


# --- the engine ---

several_ranks = pytest.mark.skipif(BACKEND != "cpu", reason="a GPU for each of several ranks")


@pytest.mark.threads
def test_answers_do_not_depend_on_how_they_are_computed():
    """Side by side, chunks, drafts, prefix hits and retractions: the driver demands all of them."""
    drive(SMALL, "64")


@several_ranks
def test_ranks_change_no_text(hadal):
    def text(*ranks):
        p = hadal("generate", SMALL, "-p", "the cat sat on the mat", "--max-tokens", 24, "--temperature", 1, "--seed", 5,
                  "--json", "--backend", BACKEND, *ranks)
        assert p.returncode == 0, p.stderr
        got = json.loads(p.stdout)
        assert got["drafted"] > 0 and got["reasoning_tokens"] > 0
        return got["text"]

    alone = text()
    for ranks in (("--tp", 2), ("--ep", 2), ("--tp", 2, "--ep", 2), ("--dp", 2, "--ep", 2)):
        assert text(*ranks) == alone, ranks


@pytest.mark.parametrize(
    "ranks", [(), pytest.param(("--tp", 2, "--ep", 2), marks=several_ranks)], ids=["alone", "ranks"]
)
def test_a_served_conversation_goes_on(serve, ranks):
    """The second turn finds the pages of the first."""
    server = serve("--backend", BACKEND, *ranks, model=SMALL)
    messages = [system("the cat sat on the mat. " * 8), user("the cat")]
    body = {"messages": messages, "max_tokens": 70, "temperature": 0, "thinking": {"type": "disabled"}, "logit_bias": {"1": -100}}
    first = server.post("/v1/chat/completions", body).json
    messages += [first["choices"][0]["message"], user("sat")]
    second = server.post("/v1/chat/completions", body).json
    assert first["usage"]["prompt_tokens"] > 128
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    refused = server.post("/v1/chat/completions", {"messages": [says("user", image)]})
    assert refused.status == 400 and "image_url" in refused.text


# --- the vendor's package ---


def arguments(r):
    """Of an object without what the package reads unlike Python: repeated names, numbers beyond a
    double or 64 bits; or of something else."""
    if r.random() < 0.1:
        return r.choice(["", "not json", "[1, 2]", '{"a": 1', '"s"', json.dumps('{"a": 1}'), "3", "null"])
    v = {r.choice(chat_cases.KEYS) + str(i): plain(chat_cases.value(r)) for i in range(r.randint(0, 4))}
    return json.dumps(v, ensure_ascii=r.random() < 0.5, indent=r.choice([None, 2]))


def plain(v):
    if isinstance(v, list):
        return [plain(x) for x in v]
    if isinstance(v, dict):
        return {k: plain(x) for k, x in v.items()}
    return 7 if isinstance(v, int) and abs(v) > 2**53 else v


def tool_rounds(r, messages):
    calls = [{"id": "call_%d_%d" % (len(messages), i), "type": "function",
              "function": {"name": r.choice(NAMES), "arguments": arguments(r)}} for i in range(r.randint(1, 3))]
    messages.append(answer(r.choice([None, chat_cases.text(r)]), r.choice([None, chat_cases.some_text(r)]), tool_calls=calls))
    for c in r.sample(calls, len(calls)):
        messages.append(says("tool", chat_cases.text(r), tool_call_id=c["id"]))


def conversation(r):
    messages = []
    for _ in range(r.randint(1, 6)):
        kind = r.random()
        if kind < 0.2:
            messages.append(system(chat_cases.text(r)))
        elif kind < 0.55:
            messages.append(user(chat_cases.text(r)))
        elif kind < 0.75:
            messages.append(answer(chat_cases.text(r), r.choice([None, chat_cases.some_text(r)])))
        elif kind < 0.82 and all(m["role"] != "latest_reminder" for m in messages):  # of two in a row the package drops one
            messages.append(says("latest_reminder", chat_cases.some_text(r)))
        else:
            tool_rounds(r, messages)
    if r.random() < 0.1:
        messages.append(answer(chat_cases.some_text(r), r.choice([None, "R"]), prefix=True))
    return messages


def offered(r):
    return [{"type": "function", "function": {"name": name, "description": chat_cases.text(r), "parameters": {
        "type": "object", "properties": {k: {"type": "string", "description": chat_cases.text(r)} for k in "ab"}}}}
        for name in r.sample(NAMES, r.randint(1, 3))]


def test_conversations_are_the_packages():
    package = pytest.importorskip("deepseek_recipe")
    encoding, options = package.DeepseekV41Encoding(), package.ConversionOptions()
    seen = 0
    for seed in range(2600 if LONG else 390):
        r = random.Random("v4.1 %d" % seed)
        thinking, effort = r.random() < 0.7, r.choice(["low", "high", "max"])
        document = {"messages": conversation(r)}
        if r.random() < 0.4:
            document["tools"] = offered(r)
        switch = {"type": "enabled" if thinking else "disabled"}
        try:
            request = package.ChatCompletionRequest({"model": "DeepSeek-V4.1-Flash", "thinking": switch,
                                                     "reasoning_effort": effort, **document})
            want = encoding.render_conversation(request.convert(options).conversation).prompt
        except (ValueError, package.ConversionError):
            continue
        got = render(document, "--encoding", "v4.1", "--thinking", "on" if thinking else "off", "--effort", effort)
        assert got == want, seed
        seen += 1
    assert seen >= (2000 if LONG else 300)


# ---- replies ----


def prose(r):
    """Without tags, which a reply means that spells them, and without the blanks that a block of calls takes with it."""
    return chat_cases.some_text(r).replace("<", "(").strip()


def an_object(r):
    """With names of one word, since the package cuts others at the blank, and values without tags."""
    v = {f"key{i}": plain(chat_cases.value(r)) for i in range(r.randint(0, 4))}
    return json.dumps(v, ensure_ascii=r.random() < 0.5).replace("<", "(")


def random_reply(r):
    """An answer with or without reasoning, content and calls, of tools that were offered."""
    tools = offered(r)
    names = [t["function"]["name"] for t in tools]
    calls = [{"id": f"call_{i}", "type": "function", "function": {"name": r.choice(names), "arguments": an_object(r)}} for i in range(r.randint(0, 3))]
    said = prose(r) if not calls or r.random() < 0.5 else ""
    return tools, answer(said, prose(r) if r.random() < 0.8 else None, **({"tool_calls": calls} if calls else {}))


def written(package, encoding, tools, thinking, *more):
    """The prompt and the settings of its reply."""
    document = {"model": "DeepSeek-V4.1-Flash", "thinking": {"type": "enabled" if thinking else "disabled"}, "tools": tools, "messages": [HELLO, *more]}
    request = package.ChatCompletionRequest(document).convert(package.ConversionOptions())
    return encoding.render_conversation(request.conversation).prompt, request


def the_packages_reading(package, request, text):
    stream = package.StreamProcessor(package.ChatCompletionRequest.chunk_generator(request, "id", "model"), request.parsing_options)
    response = package.ChatCompletionResponse("id", "model", 0, 0, 0)
    chunks = [package.InferenceChunk.ready(), package.InferenceChunk.text(text, 1), package.InferenceChunk.finish(package.InferenceFinishReason.Stop)]
    for made in [*(stream.push(c) for c in chunks), stream.finish()]:
        for chunk in made:
            response.accumulate(chunk)
    message = json.loads(response.to_json())["choices"][0]["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return message.get("reasoning_content") or "", message.get("content") or "", calls


def read(calls):
    return [(name, json.loads(text)) for name, text in calls]


def test_replies_are_read_as_the_package_reads_them():
    """Replies as V4.1 writes them, in slices of any size; arguments as JSON."""
    package = pytest.importorskip("deepseek_recipe")
    encoding, seen = package.DeepseekV41Encoding(), 0
    with subprocess.Popen([DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parser:
        for seed in range(2600):
            r = random.Random("reply %d" % seed)
            thinking, (tools, message) = r.random() < 0.7, random_reply(r)
            try:
                opener, request = written(package, encoding, tools, thinking)
                results = [says("tool", "r", tool_call_id=c["id"]) for c in message.get("tool_calls", [])]
                whole, _ = written(package, encoding, tools, thinking, message, *results)
            except (ValueError, package.ConversionError):
                continue
            assert whole.startswith(opener)
            text = whole[len(opener) : whole.rindex(EOS)]  # behind it the next answer is opened
            line = {"format": V41, "reasoning": thinking, "off": not thinking, "tools": tools, "text": text, "slices": [r.randint(0, 9) for _ in range(40)]}
            parser.stdin.write(json.dumps(line) + "\n")
            parser.stdin.flush()
            got = json.loads(parser.stdout.readline())
            assert "error" not in got, (seed, got)
            reasoning, content, calls = the_packages_reading(package, request, text)
            assert got["notes"] == [], (seed, got)
            assert (got["reasoning"], got["content"]) == (reasoning, content), (seed, text)
            assert read((c["name"], c["arguments"]) for c in got["calls"]) == read(calls), (seed, text)
            seen += 1
    assert seen >= 2000


@pytest.fixture(scope="module")
def small():
    server = serving.Server("--max-running", 2, model=SMALL)
    yield server
    server.close()


@pytest.mark.parametrize("fields, number", [
    ({"reasoning_effort": 37}, 37), ({"reasoning_effort": 100}, 100), ({"reasoning": {"effort": 1}}, 1),
    ({"chat_template_kwargs": {"reasoning_effort": 62}}, 62), ({"reasoning_effort": "low"}, 50), ({}, 75),
])  # fmt: skip
def test_the_server_takes_a_number(small, fields, number):
    ask = {"messages": [HELLO], "max_tokens": 1, "temperature": 0, "return_token_ids": True, **fields}
    reply = small.post("/v1/chat/completions", ask)
    assert reply.status == 200, reply.text
    text = small.post("/detokenize", {"tokens": reply.json["prompt_token_ids"], "skip_special_tokens": False})
    assert f"Reasoning Effort: {number} (range" in text.json["text"], text.text


@pytest.mark.parametrize("effort", [0, 101, -1, 2.5, "37", "much", True, [50]])
def test_the_server_refuses_other_efforts(small, effort):
    reply = small.post("/v1/chat/completions", {"messages": [HELLO], "max_tokens": 1, "reasoning_effort": effort})
    assert reply.status == 400 and "reasoning_effort" in reply.json["error"]["message"], reply.text
