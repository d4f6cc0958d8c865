"""New weights for a model on several ranks: all change between the same two steps, to what one rank has.
With HADAL_BACKEND=cuda ranks that are threads are on GPUs, or share one."""

import pytest
from conftest import BACKEND, LONG
from make_model import io  # finds tools/, too
from serving import TINY, Server, wait_until
from test_weight_senders import swap_under_load
from test_weight_updates import checksums, copy_model, perturbed, scores, send, started_from, update
from toy_models import make_toy_model
from worlds import needs_ucx

LAYOUTS = [("--ep", 2), ("--tp", 4), ("--tp", 2, "--ep", 2), ("--dp", 2, "--ep", 2), ("--tp", 2, "--dp", 2, "--ep", 4)]
SWAPS = 12 if LONG else 6


@pytest.fixture(scope="module")
def wanted(other):
    """Scores and checksums of one rank that started from each model."""
    return {path: started_from(path) for path in (TINY, other)}


def serve(folder, layout, **how):
    return Server("--weights-dir", folder, "--threads", 2, "--max-running", 16, "--context", 512, "--backend", BACKEND, *layout, **how)


def state(server):
    return scores(server), checksums(server)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: " ".join(map(str, x)))
def test_ranks_have_what_one_rank_has(folder, other, wanted, layout):
    server = serve(folder, layout)
    assert state(server) == wanted[TINY]
    update(server, other, "other")
    assert state(server) == wanted[other]
    assert server.get("/get_weight_version").json["weight_version"] == "other"
    send(server, {"norm.weight": io.read_checkpoint(TINY)["norm.weight"]}, shared=True)
    send(server, {"no.such.weight": io.read_checkpoint(TINY)["norm.weight"]}, status=400)
    assert scores(server) != wanted[other][0]
    update(server, TINY)
    assert state(server) == wanted[TINY]
    server.close()


@pytest.mark.parametrize("family", ["v2", "v3", "v32", pytest.param("v4", marks=pytest.mark.threads)])
def test_every_family(tmp_path, family):
    """Columns and converted vectors, of which ranks have copies, too."""
    model = make_toy_model(family, tmp_path / "model")
    another = copy_model(model, tmp_path / "another", perturbed(io.read_checkpoint(model), 2))
    ids = [5, 9, 60, 7, 100, 33, 8] * 4
    fresh = Server(model=another)
    want = scores(fresh, ids)
    fresh.close()
    server = serve(tmp_path, ("--tp", 2, "--ep", 2), model=model)
    before = scores(server, ids)
    update(server, another)
    assert before != scores(server, ids) == want
    server.close()


def moves(server):
    return server.stats()["hadal_expert_moves_total"]


def test_experts_that_move(folder, other, wanted, tmp_path):
    """Those that came from other ranks have the new values, too; later ones move with them."""
    server = serve(folder, ("--ep", 4, "--redundant", 8, "--rebalance", 8, "--weights-backup", tmp_path))

    def move():
        """Answers of many kinds, until experts have moved again."""
        before = moves(server)
        for i in range(100):
            body = {"input_ids": [[7 * i + j for _ in range(20)] for j in range(8)], "sampling_params": {"max_new_tokens": 12}}
            assert server.post("/generate", body).status == 200
            if moves(server) > before:
                return
        raise AssertionError("no expert has moved")

    move()
    assert state(server) == wanted[TINY]
    for model in (other, TINY, other):
        update(server, model)
        assert state(server) == wanted[model]
        move()
        assert state(server) == wanted[model]
    assert server.post("/release_memory_occupation", {}).status == 200
    assert server.post("/resume_memory_occupation", {}).status == 200
    assert state(server) == wanted[other]
    server.close()


@pytest.mark.parametrize("layout", [LAYOUTS[3], *(pytest.param(x, marks=pytest.mark.long) for x in (LAYOUTS[2], LAYOUTS[4]))], ids=lambda x: " ".join(map(str, x)))
def test_swaps_under_load(folder, other, layout):
    server = serve(folder, layout)
    swap_under_load(server, [TINY, other], SWAPS)
    server.close()


# ---- ranks in processes of their own ----

PROCESSES = {  # ranks and flags
    "experts": (2, ("--ep", 2)),
    "columns": (2, ("--tp", 2)),
    "two groups of two": (4, ("--dp", 2, "--tp", 2, "--ep", 4)),
}


@needs_ucx
@pytest.mark.parametrize("layout", PROCESSES)
def test_processes_have_what_one_rank_has(world, folder, other, wanted, layout):
    n, flags = PROCESSES[layout]
    w = world(n, *flags, "--weights-dir", folder)
    assert state(w.server) == wanted[TINY]
    update(w.server, other, "other")
    assert state(w.server) == wanted[other]
    send(w.server, {"norm.weight": io.read_checkpoint(TINY)["norm.weight"]}, shared=True)
    send(w.server, {"no.such.weight": io.read_checkpoint(TINY)["norm.weight"]}, status=400)
    assert scores(w.server) != wanted[other][0]
    update(w.server, TINY)
    assert state(w.server) == wanted[TINY]
    assert w.server.get("/health").text == "ok"
    assert all(code == 0 for _, code in w.close())


@needs_ucx
def test_a_rank_that_comes_back_gets_the_weights_in_use(world, folder, other, wanted):
    w = world(3, "--ep", 3, "--weights-dir", folder)
    update(w.server, other, "other")
    w.ranks[2].kill()
    w.ranks[2].wait()
    wait_until(lambda: w.server.get("/health").text.startswith("degraded"), "it is missed")
    assert state(w.server) == wanted[other]
    w.start(2)

    def works_again():
        assert scores(w.server) == wanted[other][0]
        return w.server.get("/health").text == "ok"

    wait_until(works_again, "no answer meanwhile has old weights")
    assert state(w.server) == wanted[other]
    assert all(code == 0 for _, code in w.close())


@needs_ucx
@pytest.mark.long
def test_swaps_between_processes_under_load(world, folder, other):
    w = world(2, "--dp", 2, "--ep", 2, "--weights-dir", folder)
    swap_under_load(w.server, [TINY, other], SWAPS)
    assert all(code == 0 for _, code in w.close())


@needs_ucx
def test_processes_keep_their_memory(world, folder):
    w = world(2, "--ep", 2, "--weights-dir", folder)
    reply = w.server.post("/release_memory_occupation", {})
    assert reply.status == 501 and "ranks in other processes keep their memory" in reply.text
