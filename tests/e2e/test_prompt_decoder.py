"""--prompt-decoder replay: V4.1's last layers compute the last window of a prompt alone, as the vendor's servers do. The
logits are those of tests/reference/v41.py with windows that begin there; nothing else changes them."""

import concurrent.futures
import sys

import numpy as np
import pytest
from conftest import GOLDEN, ROOT, run_hadal
from serving import Server

sys.path.insert(0, str(ROOT / "tests" / "reference"))
import v41  # noqa: E402

SMALL = GOLDEN / "v41_small"
FLAGS = ("--backend", "cpu", "--context", 480, "--prompt-decoder", "replay")


def prompt_of(i):
    return [5 + k * (i % 3 + 2) % 80 for k in range(90)] + [8 + (k * k + i) % 70 for k in range(30 + 23 * i)]


def ask(server, tokens, n=12, seed=0):
    sampling = {"max_new_tokens": n, "temperature": 0.7 * (seed % 2), "sampling_seed": seed, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 5}
    reply = server.post("/generate", body)
    assert reply.status == 200, reply.text
    info = reply.json["meta_info"]
    return reply.json["output_ids"], info["output_token_logprobs"], info["output_top_logprobs"]


def test_logits_are_those_of_the_reference():
    model, _ = v41.open_case(SMALL)
    window, server, other = model.c["sliding_window"], Server(*FLAGS, model=SMALL), 0
    for n in (2, window - 1, window, window + 1, 40, 90):
        tokens = prompt_of(1)[:n]
        _, _, tops = ask(server, tokens, 1)
        logits = []
        for model.windows_from in (max(0, n - window), 0):
            row = model.main(np.array(tokens))[0][-1]
            logits.append(row - np.log(np.exp(row - row.max()).sum()) - row.max())
        for logprob, token, _ in tops[0]:
            assert abs(logprob - logits[0][token]) < 1e-3
            other += abs(logprob - logits[1][token]) > 1e-2
    assert other > 4
    server.close()


def conversations(server, ways):
    """Two turns of eight conversations: the second repeats the first's prompt and answer."""
    answers = []
    with concurrent.futures.ThreadPoolExecutor(ways) as pool:
        for turn in range(2):
            prompts = [prompt_of(i) + (answers[0][i][0] + [9, 8, 7] if turn else []) for i in range(8)]
            answers.append(list(pool.map(ask, [server] * 8, prompts, [40] * 8, range(8))))
    return answers


def test_memory_neighbours_and_drafts_change_nothing():
    alone = Server(*FLAGS, "--no-drafts", "--max-running", 1, "--kv-tokens", 512, model=SMALL)
    want = conversations(alone, 1)
    alone.close()
    for flags in (("--max-running", 8, "--kv-tokens", 4000), ("--max-running", 8, "--kv-tokens", 900, "--chunk", 9),
                  ("--max-running", 8, "--kv-tokens", 900, "--kv-host", 0.01), ("--max-running", 4, "--tp", 2)):  # fmt: skip
        server = Server(*FLAGS, *flags, model=SMALL)
        assert conversations(server, 8) == want, flags
        server.close()


@pytest.mark.parametrize(("flags", "why"), [
    (("--dp", 2), "attention groups"), (("--routed-experts",), "replay leaves positions out"),
])
def test_refusals(flags, why):
    done = run_hadal("serve", SMALL, "--port", 0, *FLAGS, *flags)
    assert done.returncode == 2 and why in done.stderr, done.stderr
