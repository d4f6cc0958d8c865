"""hadal generate and the engine behind it: the same text however it is computed."""

import json
import os
import pathlib
import subprocess

import pytest
from conftest import BACKEND, HADAL, ROOT
from toy_models import FAMILIES, make_toy_model

EXAMPLE = pathlib.Path(HADAL).parent / "examples" / "side_by_side"
PROMPTS = [
    "the cat sat on the mat",
    "then",
    "the cat sat on the mat and then the other cat sat down in the house and the cat",
    "the cat sat on the mat and then the other cat",
    "a",
    "the cat sat on the house",
    "the cat sat on the mat",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = make_toy_model(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return get


@pytest.fixture
def generate(hadal):
    def run(model, *args, prompt="the cat sat on the mat", tokens=40):
        result = hadal("generate", model, "--raw", "-p", prompt, "--max-tokens", tokens, "--json", "--backend", BACKEND, *args)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run


WAYS = [
    ["--chunk", "1"],
    ["--chunk", "5"],
    ["--threads", "1"],
    ["--threads", "3"],
    ["--draft-tokens", "1"],
    ["--draft-tokens", "2"],
    ["--draft-tokens", "3", "--chunk", "4"],
    ["--draft-tokens", "7"],
]


@pytest.mark.threads
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [[], ["--temperature", "1", "--seed", "5"]], ids=["greedy", "sampled"])
def test_text_does_not_depend_on_how_it_is_computed(generate, model, family, sampling):
    whole = generate(model(family), *sampling)
    assert whole["output_tokens"] >= 1 and whole["finish"] in ("length", "stop")
    for way in WAYS:
        other = generate(model(family), *sampling, *way)
        assert other["text"] == whole["text"], way
        assert other["output_tokens"] == whole["output_tokens"], way


@pytest.mark.parametrize("family", ["v3", "v32", "v4"])
def test_drafts_are_proposed(generate, model, family):
    drafted = generate(model(family), "--draft-tokens", "3", tokens=30)
    assert drafted["drafted"] > 0 and 0 <= drafted["accepted"] <= drafted["drafted"]


def test_seed_and_temperature_matter(generate, model):
    case = model("v4")
    texts = {generate(case, "--temperature", "1.5", "--seed", s)["text"] for s in range(4)}
    assert len(texts) > 1
    assert generate(case, "--temperature", "1.5", "--top-k", "1")["text"] == generate(case)["text"]


def test_a_stop_string_ends_the_text_and_is_not_shown(generate, model):
    whole = generate(model("v4"), "--temperature", "1", "--seed", "3", tokens=60)
    stop = whole["text"][10:13]
    ended = generate(model("v4"), "--temperature", "1", "--seed", "3", "--stop", stop, tokens=60)
    assert ended["finish"] == "stop"
    assert ended["text"] == whole["text"][: whole["text"].index(stop)]


def test_chat_prompt_is_the_rendered_one(hadal, model, tmp_path):
    case = model("v4")
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": "the cat"}]))
    rendered = hadal("render", case, "--messages", messages).stdout
    chat = hadal("generate", case, "-p", "the cat", "--max-tokens", "20", "--json")
    # Raw text tokenizes special tokens too, but begins with one more BOS than the rendering has.
    ids = hadal("tokenize", case, "--special", input=rendered).stdout
    assert json.loads(chat.stdout)["prompt_tokens"] == len(json.loads(ids))


def test_plain_output_is_the_text_and_nothing_else(hadal, generate, model):
    case = model("v4")
    plain = hadal("generate", case, "--raw", "-p", "the cat", "--max-tokens", "12")
    assert plain.returncode == 0
    assert plain.stdout == generate(case, prompt="the cat", tokens=12)["text"]
    assert "prompt tokens" in plain.stderr


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "either --prompt TEXT or --file FILE"),
        (["-p", "x", "-f", "y"], "either --prompt TEXT or --file FILE"),
        (["-p", "x", "--max-tokens", "999999"], "exceed the context"),
        (["-p", "the cat " * 1200, "--raw"], "more than 2048 tokens"),
        (["-p", "x", "--temperature", "-1"], "out of range"),
        (["-p", "x", "--draft-tokens", "8"], "out of range"),
        (["-p", "x", "--thinking", "maybe"], "none of"),
        (["-p", "x", "--stop", ""], "stop[0]"),
    ],
)
def test_refusals(refused, model, args, part):
    assert part in refused("generate", model("v4"), *args)


def side_by_side(model, max_tokens, drafts, kv_tokens, prompts):
    if not EXAMPLE.exists():
        subprocess.run(
            ["make", "-s", f"BUILD={EXAMPLE.parent.parent}", EXAMPLE], cwd=ROOT, check=True, env=os.environ
        )
    result = subprocess.run(
        [EXAMPLE, model, str(max_tokens), str(drafts), str(kv_tokens), *prompts],
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_neighbors_and_pressure_change_nothing(model, family):
    """Many at once, with room for all; then with a cache that makes them take turns."""
    roomy, _ = side_by_side(model(family), 50, 0, 500, PROMPTS)
    tight, figures = side_by_side(model(family), 50, 0, 150, PROMPTS)
    drafted, _ = side_by_side(model(family), 50, 3, 150, PROMPTS)
    assert tight == roomy and drafted == roomy
    alone, _ = side_by_side(model(family), 50, 0, 500, PROMPTS[:1])
    assert roomy.startswith(alone)
    assert "steps" in figures
