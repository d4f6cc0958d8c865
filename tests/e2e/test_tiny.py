"""The shipped models: their logits are those of their training program, and they do what they learned."""

import json

import jinja2
import numpy as np
import pytest
from conftest import BACKEND, ROOT

MODELS = {name: ROOT / "models" / name for name in ("tiny-v3", "tiny-v4", "tiny-v41")}
LARGEST = {"tiny-v3": 12_000_000, "tiny-v4": 33_000_000, "tiny-v41": 24_000_000}
GOLDEN = [(name, i) for name in MODELS for i in range(3)]


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


@pytest.fixture
def answer(hadal, model):
    def ask(prompt, *args):
        result = hadal("generate", model, "-p", prompt, "--json", "--max-tokens", "400", "--backend", BACKEND, *args)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return ask


@pytest.mark.parametrize(("backend", "name", "i"), [("ref", name, 0) for name in MODELS] + [(BACKEND, *case) for case in GOLDEN])
def test_logits_are_those_of_the_training_program(hadal, tmp_path, backend, name, i):
    golden = MODELS[name] / "golden"
    case = json.loads((golden / "cases.json").read_text())[i]
    tokens, out = tmp_path / "tokens.json", tmp_path / "out.npy"
    tokens.write_text(json.dumps(case["tokens"]))
    drafts = (golden / f"mtp_{i}.npy").exists()
    done = hadal("logits", MODELS[name], "--tokens", tokens, "--out", out, "-q", "--backend", backend, *["--mtp"] * drafts)
    assert done.returncode == 0, done.stderr
    for head, ours in (("main", out), ("mtp", tmp_path / "out.mtp.npy"))[: 1 + drafts]:
        expect = np.load(golden / f"{head}_{i}.npy")
        assert np.abs(np.load(ours)[case["rows"]] - expect).max() <= 1e-3


@pytest.mark.parametrize(("a", "b"), [(347, 586), (999, 1), (12, 7), (805, 196)])
def test_it_thinks_and_adds(answer, a, b):
    said = answer(f"What is {a} + {b}?", "--thinking", "on")
    reasoning, content = said["parts"]
    assert reasoning["kind"] == "reasoning" and f"= {a + b}" in reasoning["text"]
    assert content == {"kind": "content", "text": f"{a} + {b} = {a + b}"}
    assert said["text"] == reasoning["text"] + "</think>" + content["text"]
    assert said["finish"] == "stop" and 0 < said["reasoning_tokens"] < said["output_tokens"]


def test_drafts_are_nearly_always_right_here(answer, model):
    plain = answer("What is 347 + 586?", "--thinking", "on")
    drafted = answer("What is 347 + 586?", "--thinking", "on", "--draft-tokens", "3")
    assert drafted["text"] == plain["text"]
    assert drafted["accepted"] > drafted["drafted"] / 2


def test_a_sampled_story_repeats_by_seed(answer):
    story = [answer("Tell me a story.", "--temperature", "1", "--seed", seed)["text"] for seed in (1, 1, 2)]
    assert story[0] == story[1] != story[2]


def test_every_tensor_is_known_and_nothing_is_missing(hadal, model):
    assert hadal("inspect", model, "--strict").returncode == 0


def test_the_model_is_as_small_as_promised(model):
    files = [f for f in model.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= LARGEST[model.name]


CALL = {"id": "a", "type": "function", "function": {"name": "sum_list", "arguments": '{"numbers": [1, 2]}'}}
TOOL = {"name": "sum_list", "description": "Add numbers.", "parameters": {"type": "object", "properties": {"numbers": {"type": "array"}}}}
TALKS = {
    "question": [{"role": "user", "content": "What is 1 + 2?"}],
    "history": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And 1 + 2?"},
    ],
    "tools": [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": "Add 1 and 2."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": '{"sum": 3}'},
    ],
}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("talk", TALKS)
def test_the_template_of_tiny_v3_is_what_hadal_renders(hadal, tmp_path, talk, thinking):
    document = {"messages": TALKS[talk]}
    if talk == "tools":
        document["tools"] = [{"type": "function", "function": TOOL}]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(document))
    done = hadal("render", MODELS["tiny-v3"], "--messages", path, "--thinking", "on" if thinking else "off")
    assert done.returncode == 0, done.stderr
    config = json.loads((MODELS["tiny-v3"] / "tokenizer_config.json").read_text())
    env = jinja2.Environment()
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = env.from_string(config["chat_template"])
    want = template.render(**document, bos_token=config["bos_token"], add_generation_prompt=True, thinking=thinking)
    assert done.stdout == want
