"""One model on several ranks answers as on one."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, run_hadal

CLIENTS = 16
LAYOUTS = {
    ("--ep", 2): {"ranks": 2, "heads": 1, "ep": 2, "etp": 1, "dense_tp": 1, "head_tp": 2},
    ("--tp", 2): {"ranks": 2, "heads": 2, "ep": 2, "etp": 1, "dense_tp": 1, "head_tp": 2},
}


def body_of(i):
    return {
        "prompt": f"Story {i}. Once upon a time there was a {['cat', 'dog', 'boy', 'girl'][i % 4]}",
        "max_tokens": 24,
        "temperature": 0.7 if i % 2 else 0,
        "seed": i,
    }


def answers(server):
    def ask(i):
        reply = server.post("/v1/completions", body_of(i))
        assert reply.status == 200, reply.text
        choice = reply.json["choices"][0]
        return choice["text"], choice["finish_reason"]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, range(CLIENTS)))


@pytest.mark.threads
def test_sixteen_clients_get_the_same_answers(serve):
    flags = ("--threads", 2, "--max-running", CLIENTS)
    alone = serve(*flags)
    assert alone.get("/server_info").json["parallel"]["ranks"] == 1
    want = answers(alone)
    assert len(set(want)) > CLIENTS / 2
    for layout, parallel in LAYOUTS.items():
        server = serve(*flags, *layout)
        assert server.get("/server_info").json["parallel"] == parallel
        assert answers(server) == want


def test_what_cannot_be_divided_is_refused():
    said = run_hadal("generate", ROOT / "models" / "tiny-v4", "-p", "the", "--backend", "cpu", "--ep", 3)
    assert said.returncode != 0 and "16 experts cannot be shared by ep 3" in said.stderr
