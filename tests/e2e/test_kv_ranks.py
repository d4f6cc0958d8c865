"""Conversations that grow past every budget of the device, on ranks with HiSparse, host memory and a disk: killed in
the middle and started again, the server answers as one that has memory for all. --long: 32 agents with V4's model."""

import concurrent.futures
import os
import signal
import time

import pytest
from serving import TINY, Server
from toy_models import make_toy_model
from worlds import SMALL, needs_ucx

LONG = os.environ.get("HADAL_TEST_LONG")
TURNS = 4
TIERS = ("--kv-host", 1, "--cp", 2)


def more_words(agent, turn, n):
    return [8 + (k * k * (agent + 2) + 5 * turn) % 70 for k in range(n)]


def say(server, agent, turn, prompt):
    sampling = {"max_new_tokens": 12, "temperature": 0.7 * (agent % 2), "sampling_seed": agent, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    reply = server.post("/generate", body)
    assert reply.status == 200, reply.text
    info = reply.json["meta_info"]
    answer = reply.json["output_ids"], info["output_token_logprobs"], info["output_top_logprobs"]
    return answer, info["cached_tokens"]


class Agents:
    """Each sends all that was said, and more, in every turn."""

    def __init__(self, n, words):
        self.words = words
        self.said = [[5 + k % 60 for k in range(words)] for _ in range(n)]

    def turn(self, server, turn):
        def one(agent):
            self.said[agent] += more_words(agent, turn, self.words)
            answer, cached = say(server, agent, turn, self.said[agent])
            self.said[agent] += answer[0]
            return answer, cached

        with concurrent.futures.ThreadPoolExecutor(len(self.said)) as pool:
            answers, cached = zip(*pool.map(one, range(len(self.said))))
        return list(answers), sum(cached)


def figure(server, name, tier, pool):
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(f"hadal_kv_tier_{name}{{") and f'tier="{tier}"' in line and f'pool="{pool}"' in line:
            return float(line.split()[-1])
    raise KeyError(name)


def wait_until_quiet(server):
    """Until the disk has pages, and gets no more of them."""
    before, same = -1, 0
    while same < 20:
        now = figure(server, "pages", "disk", "entries") + figure(server, "pages", "disk", "window")
        same = same + 1 if now == before and now else 0
        before = now
        time.sleep(0.01)


CASES = [("v4", 6, 200, 6)]
if LONG:
    CASES.append(("tiny", 32, 500, 512))


@pytest.mark.parametrize(("family", "n", "words", "rows"), CASES)
def test_killed_in_the_middle(family, n, words, rows, tmp_path):
    model = TINY if family == "tiny" else make_toy_model(family, tmp_path / "model")
    context = TURNS * (words + 12) + words + 12
    common = ("--context", context, "--max-running", 4, "--queue", n)
    roomy = Server(*common, "--kv-tokens", 2 * n * context, model=model)
    agents = Agents(n, words)
    want = [agents.turn(roomy, t)[0] for t in range(TURNS)]
    roomy.close()

    disk = tmp_path / "disk"
    disk.mkdir()
    flags = (*common, "--kv-tokens", 2 * context, "--hisparse", rows, *TIERS, "--kv-disk", f"{disk}:4")
    agents = Agents(n, words)
    server = Server(*flags, model=model)
    for t in range(TURNS // 2):
        assert agents.turn(server, t)[0] == want[t]
    wait_until_quiet(server)
    server.process.send_signal(signal.SIGKILL)
    server.wait()
    server = Server(*flags, "--draft-tokens", 3, model=model)
    for t in range(TURNS // 2, TURNS):
        answers, cached = agents.turn(server, t)
        assert answers == want[t]
        assert cached > 0
    assert figure(server, "loaded_pages_total", "disk", "entries") > 0
    server.close()


@needs_ucx
def test_a_lost_process_leaves_the_disk_right(world, tmp_path):
    """The ranks that are left begin anew with other host memory; the disk keeps what it had."""
    folder = tmp_path / "disk"
    folder.mkdir()
    flags = ("--ep", 2, "--kv-host", 1, "--kv-disk", f"{folder}:1")
    roomy = Server(*SMALL)
    want = [Agents(4, 150).turn(roomy, t)[0] for t in range(2)]
    roomy.close()
    w = world(2, *flags)
    assert Agents(4, 150).turn(w.server, 0)[0] == want[0]
    wait_until_quiet(w.server)
    w.ranks[1].kill()
    w.ranks[1].wait()
    for turn in range(2):
        assert Agents(4, 150).turn(w.server, turn)[0] == want[turn]
    wait_until_quiet(w.server)
    assert figure(w.server, "loaded_pages_total", "disk", "entries") > 0
    w.kill()
    alone = Server(*SMALL, "--kv-host", 1, "--kv-disk", f"{folder}:1")
    answers, cached = Agents(4, 150).turn(alone, 1)
    assert answers == want[1] and cached > 0
    alone.close()
