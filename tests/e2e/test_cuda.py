"""The shipped model on a GPU against the CPU; and what is said where there is no GPU."""

import json

import numpy as np
import pytest
from conftest import ROOT, run_hadal

MODEL = ROOT / "models" / "tiny-v4"
NEAR_TIE = 1e-3  # of logits that two backends may order differently
N_PROMPTS, N_TOKENS = 50, 64

has_gpu = "\ngpu 0" in run_hadal("version").stdout
on_gpu = pytest.mark.skipif(not has_gpu, reason="no GPU, or a build without CUDA")
tasks = [json.loads(line) for line in (MODEL / "eval" / "tiny.jsonl").read_text().splitlines()]
prompts = [t["messages"][-1]["content"] for t in tasks[:: len(tasks) // N_PROMPTS]][:N_PROMPTS]


def generate(prompt, backend):
    done = run_hadal("generate", MODEL, "-p", prompt, "--max-tokens", N_TOKENS, "--json", "--backend", backend)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["text"]


def logits(tokens, backend, folder):
    path, out = folder / "tokens.json", folder / f"{backend}.npy"
    path.write_text(json.dumps(tokens))
    done = run_hadal("logits", MODEL, "--tokens", path, "--out", out, "-q", "--backend", backend)
    assert done.returncode == 0, done.stderr
    return np.load(out)


def first_difference(prompt, text, folder):
    """The gap between the CPU's two best logits where the GPU prefers another token."""
    messages = folder / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": prompt}]))
    rendered = run_hadal("render", MODEL, "--messages", messages).stdout
    tokens = json.loads(run_hadal("tokenize", MODEL, "--special", input=rendered + text).stdout)
    cpu, cuda = logits(tokens, "cpu", folder), logits(tokens, "cuda", folder)
    rows = np.nonzero(cpu.argmax(-1) != cuda.argmax(-1))[0]
    assert len(rows), "another text, but the same choices on the same tokens"
    best = np.sort(cpu[rows[0]])
    return best[-1] - best[-2]


@on_gpu
@pytest.mark.parametrize("prompt", prompts)
def test_greedy_text_is_that_of_the_cpu(tmp_path, prompt):
    cpu, cuda = generate(prompt, "cpu"), generate(prompt, "cuda")
    if cuda != cpu:
        gap = first_difference(prompt, cpu, tmp_path)
        print(f"{prompt!r}: another text, the gap is {gap:.2g}")
        assert gap < NEAR_TIE, (cpu, cuda)


@on_gpu
def test_logits_are_near_those_of_the_cpu(tmp_path):
    tokens = [i * 37 % 500 for i in range(300)]
    cpu, cuda = logits(tokens, "cpu", tmp_path), logits(tokens, "cuda", tmp_path)
    assert np.abs(cpu - cuda).max() <= NEAR_TIE


@pytest.mark.skipif(has_gpu, reason="there is a GPU")
@pytest.mark.parametrize("command", [["generate", MODEL, "-p", "x"], ["eval", MODEL, "--suite", "tiny"]])
def test_without_a_gpu_it_says_so(refused, command):
    line = refused(*command, "--backend", "cuda")
    assert "no CUDA" in line
