"""Needles: facts at 20 depths of one prompt are found, as far as tiny-v4 has learned to recall, and with HiSparse, tiers and
ranks with the same text and log-probabilities. Beyond that its logits are those of the reference. --long: longer prompts."""

import concurrent.futures
import json
import os
import random
import sys

import numpy as np
import pytest
from conftest import BACKEND, ROOT, run_hadal
from serving import TINY, Server

sys.path[:0] = [str(ROOT / "tests" / "reference"), str(ROOT / "tools" / "train_tiny")]
import mtp  # noqa: E402
import v41  # noqa: E402
from recall import TOKENS_PER_FACT, keys  # noqa: E402

LONG = os.environ.get("HADAL_TEST_LONG")
DEPTHS = 20


def facts(tokens):
    """About as many tokens of lines, and the keys and values at 20 depths, the first and the last line among them."""
    draw = random.Random(tokens)
    names = keys(draw, tokens // TOKENS_PER_FACT)
    lines = [(name, str(draw.randrange(100, 1000))) for name in names]
    needles = [lines[i * (len(lines) - 1) // (DEPTHS - 1)] for i in range(DEPTHS)]
    return "Remember this:\n" + "\n".join(f"{k} = {v}" for k, v in lines), needles


def ask(server, text, name):
    body = {
        "messages": [{"role": "user", "content": f"{text}\n\n{name} = ?"}],
        "chat_template_kwargs": {"thinking": False},
        "temperature": 0,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 2,
    }
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.text
    choice = reply.json["choices"][0]
    return choice["message"]["content"], choice["logprobs"]


def answers(flags, text, needles):
    server = Server("--context", 4096, "--max-running", 8, *flags)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        first = ask(server, text, needles[0][0])
        rest = list(pool.map(lambda needle: ask(server, text, needle[0]), needles[1:]))
    server.close()
    return [first, *rest]


@pytest.mark.parametrize("tokens", [500, 1000, 2000, 3500] if LONG else [500])
def test_needles_at_all_depths(tokens, tmp_path):
    text, needles = facts(tokens)
    want = answers((), text, needles)
    assert [f"{k} = {v}" for k, v in needles] == [content for content, _ in want]
    tiers = ("--kv-tokens", 4096, "--kv-host", 0.1, "--kv-disk", f"{tmp_path}:0.2")
    ways = [(*tiers, "--hisparse", 300, "--cp", 2, "--draft-tokens", 3)]
    if LONG:
        ways += [("--hisparse", 256), tiers, ("--cp", 3, "--chunk", 100)]
    for flags in ways:
        assert answers(flags, text, needles) == want, flags


# ---- beyond what it has learned ----


def all_questions(tokens):
    """One sequence: the facts, then each question with its answer. Returns its tokens and the rows behind which answers begin."""
    text, needles = facts(tokens)
    parts = ["<｜begin▁of▁sentence｜><｜User｜>" + text]
    parts += [f"\n\n{k} = ?<｜Assistant｜></think>{k} = {v}<｜end▁of▁sentence｜><｜User｜>" for k, v in needles]
    lines = "\n".join(json.dumps(part) for part in parts)
    done = run_hadal("tokenize", TINY, "--special", "--json-lines", input=lines)
    assert done.returncode == 0, done.stderr
    ids = [json.loads(line) for line in done.stdout.splitlines()]
    ends = np.cumsum([len(part) for part in ids])
    return [t for part in ids for t in part], np.concatenate([np.arange(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)])


@pytest.mark.parametrize("tokens", [300, 9000] if LONG else [300])
def test_logits_are_those_of_the_reference(tokens, tmp_path):
    """Also behind more tokens than the model has learned and its config allows. A score that is nearly another one's may select
    another entry in float32: so a few rows may differ by more."""
    ids, rows = all_questions(tokens)
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (model / name).symlink_to(TINY / name)
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2 * len(ids)}))
    (tmp_path / "ids").write_text(json.dumps(ids))
    done = run_hadal("logits", model, "--tokens", tmp_path / "ids", "--out", tmp_path / "out.npy", "-q", "--backend", BACKEND)
    assert done.returncode == 0, done.stderr
    reference = mtp.V4(config, v41.read_tensors(TINY / "model.safetensors"))
    reference.piece = 256
    want, _ = reference.main(np.array(ids), rows)
    far = np.abs(np.load(tmp_path / "out.npy", mmap_mode="r")[rows] - want).max(-1)
    print(f"{len(ids)} tokens: {np.median(far):.1e} in the median of rows, {far.max():.1e} at most")
    assert np.quantile(far, 0.9) <= 1e-3
    assert far.max() <= 5e-2
