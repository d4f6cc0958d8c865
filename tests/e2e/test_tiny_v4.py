"""The shipped model: its logits are those of its training program, and it does what it learned."""

import json

import numpy as np
import pytest
from conftest import BACKEND, ROOT

MODEL = ROOT / "models" / "tiny-v4"
GOLDEN = MODEL / "golden"
CASES = json.loads((GOLDEN / "cases.json").read_text())


@pytest.fixture
def answer(hadal):
    def ask(prompt, *args):
        result = hadal("generate", MODEL, "-p", prompt, "--json", "--max-tokens", "400", "--backend", BACKEND, *args)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return ask


@pytest.mark.parametrize(("backend", "i"), [("ref", 0), *((BACKEND, i) for i in range(len(CASES)))])
def test_logits_are_those_of_the_training_program(hadal, tmp_path, backend, i):
    tokens, out = tmp_path / "tokens.json", tmp_path / "out.npy"
    tokens.write_text(json.dumps(CASES[i]["tokens"]))
    done = hadal("logits", MODEL, "--tokens", tokens, "--out", out, "--mtp", "-q", "--backend", backend)
    assert done.returncode == 0, done.stderr
    for name, ours in (("main", out), ("mtp", tmp_path / "out.mtp.npy")):
        expect = np.load(GOLDEN / f"{name}_{i}.npy")
        assert np.abs(np.load(ours)[CASES[i]["rows"]] - expect).max() <= 1e-3


@pytest.mark.parametrize(("a", "b"), [(347, 586), (999, 1), (12, 7), (805, 196)])
def test_it_thinks_and_adds(answer, a, b):
    said = answer(f"What is {a} + {b}?", "--thinking", "on")
    reasoning, shown = said["text"].split("</think>")
    assert f"= {a + b}" in reasoning and shown.endswith(f"= {a + b}")
    assert said["finish"] == "stop"


def test_drafts_are_nearly_always_right_here(answer):
    plain = answer("What is 347 + 586?", "--thinking", "on")
    drafted = answer("What is 347 + 586?", "--thinking", "on", "--draft-tokens", "3")
    assert drafted["text"] == plain["text"]
    assert drafted["accepted"] > drafted["drafted"] / 2


def test_a_sampled_story_repeats_by_seed(answer):
    story = [answer("Tell me a story.", "--temperature", "1", "--seed", seed)["text"] for seed in (1, 1, 2)]
    assert story[0] == story[1] != story[2]


def test_the_file_is_as_small_as_promised():
    assert (MODEL / "model.safetensors").stat().st_size <= 24_000_000
