"""Memory that goes back to the system between rollouts: /release_memory_occupation and
/resume_memory_occupation."""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import subprocess

import pytest
from conftest import HADAL, run_hadal
from serving import TINY, Server, wait_until
from test_rollout import go_on, pause
from test_weight_updates import checksums, copy_model, io, perturbed, scores, send, started_from, update

WAITS = {"input_ids": [605, 14, 261], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


@pytest.fixture
def server():
    s = Server("--weights-dir", TINY, "--routed-experts", "--max-running", "4")
    yield s
    s.close()


def call(server, what, tags=None, status=200):
    reply = server.post(f"/{what}_memory_occupation", {} if tags is None else {"tags": tags})
    assert reply.status == status, reply.text
    assert reply.json["success"] == (status == 200)
    return reply


def resident(server):
    with open(f"/proc/{server.process.pid}/status") as f:
        return int(re.search(r"VmRSS:\s+(\d+) kB", f.read())[1]) * 1024


def refused(server, code):
    for path, body in (("/generate", WAITS), ("/v1/completions", {"prompt": "Once", "max_tokens": 1})):
        reply = server.post(path, body)
        assert (reply.status, reply.code) == (503, code) and "Retry-After" in reply.headers, reply.text
    assert server.get("/health").status == 200
    assert server.get("/health_generate").status == 503


def test_weights_go_and_come_with_an_update(server):
    before = scores(server), checksums(server)
    full = resident(server)
    call(server, "release", ["weights"])
    released = server.stats()["hadal_released_bytes"]
    size = (TINY / "model.safetensors").stat().st_size
    assert released > 0.9 * size
    if "asan" not in HADAL and "tsan" not in HADAL:
        assert resident(server) < full - 0.8 * size
    refused(server, "weights_released")
    call(server, "release", ["weights"])
    assert server.stats()["hadal_released_bytes"] == released
    reply = server.post("/update_weights_from_disk", {"model_path": str(TINY)})
    assert (reply.status, reply.code) == (503, "weights_released")
    call(server, "resume", ["weights"])
    refused(server, "weights_released")
    for path in ("/weights_checker", "/get_weights_by_name?name=norm.weight"):
        reply = server.get(path)
        assert (reply.status, reply.code) == (503, "weights_released")
    assert server.stats()["hadal_weights_lost"] > 0
    update(server, TINY, selector="target")
    refused(server, "weights_released")
    update(server, TINY, selector="draft")
    assert server.stats()["hadal_weights_lost"] == server.stats()["hadal_released_bytes"] == 0
    assert (scores(server), checksums(server)) == before


def test_kv_cache_goes_and_comes(server):
    before = scores(server, [5, 6, 7] * 500)
    full = resident(server)
    call(server, "release", ["kv_cache", "cuda_graph"])
    assert resident(server) < full and server.stats()["hadal_released_bytes"] > 0
    refused(server, "memory_released")
    call(server, "resume")
    body = {"input_ids": [5, 6, 7] * 500, "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/generate", body).json["meta_info"]["cached_tokens"] == 0
    assert scores(server, [5, 6, 7] * 500) == before


def test_what_waits_goes_on_afterwards(server):
    """A colocated trainer: pause, release, train, resume, update, continue."""
    alone = server.post("/generate", WAITS).json["output_ids"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        pause(server, "retract")
        answers = [pool.submit(server.post, "/generate", WAITS) for _ in range(4)]
        wait_until(lambda: server.loads()["num_waiting_reqs"] == 4, "they wait")
        call(server, "release")
        call(server, "resume", ["weights"])
        update(server, TINY)
        call(server, "resume", ["kv_cache"])
        go_on(server)
        assert [a.result().json["output_ids"] for a in answers] == [alone] * 4


def test_what_waits_ends_with_the_server(server):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pause(server, "retract")
        answer = pool.submit(server.post, "/generate", WAITS)
        wait_until(lambda: server.loads()["num_waiting_reqs"] == 1, "it waits")
        call(server, "release")
        server.process.terminate()
        assert answer.result().json["meta_info"]["finish_reason"]["message"] == "Abort before prefill"
    wait_until(lambda: server.process.poll() is not None, "it ends")


def test_what_runs_is_not_pulled_away(server):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        long = {**WAITS, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
        answer = pool.submit(server.post, "/generate", long)
        wait_until(lambda: server.loads()["num_running_reqs"] == 1, "it runs")
        pause(server, "in_place")
        reply = call(server, "release", status=400)
        assert "1 requests run" in reply.json["message"]
        server.post("/abort_request", {"abort_all": True})
        go_on(server)
        assert answer.result().json["meta_info"]["finish_reason"]["type"] == "abort"


def test_refusals(server):
    for tags, said in ((["weight"], "tags[0]"), (["weights", 3], "tags[1]"), ("weights", "tags"), ({"a": 1}, "tags")):
        for what in ("release", "resume"):
            assert said in call(server, what, tags, status=400).json["message"]
    call(server, "resume")  # of what was not released
    server.post("/begin_weight_update", {})
    call(server, "release", status=409)
    server.post("/end_weight_update", {})
    assert server.post("/generate", WAITS).status == 200


def test_many_cycles(server, tmp_path):
    """100 times released and updated, 1,000 times paused: nothing leaks, nothing changes."""
    before = scores(server)
    call(server, "release")
    empty = resident(server)
    for i in range(100):
        call(server, "release")
        call(server, "resume")
        if i % 10 == 0:
            update(server, TINY)
    for i in range(1000):
        server.post("/pause_generation", {"mode": ("abort", "retract", "in_place")[i % 3]})
        server.post("/continue_generation", {})
    update(server, TINY)
    assert scores(server) == before
    call(server, "release")
    if "asan" not in HADAL and "tsan" not in HADAL:
        assert resident(server) < empty + (8 << 20)


def test_new_weights_after_a_release(server, tmp_path):
    other = perturbed(io.read_checkpoint(TINY), 7)
    call(server, "release", ["weights"])
    call(server, "resume", ["weights"])
    send(server, other, shared=True)
    model = copy_model(TINY, tmp_path / "other", other)
    fresh = Server("--weights-dir", model, model=model)
    try:
        assert scores(server) == scores(fresh) and checksums(server) == checksums(fresh)
    finally:
        fresh.close()


# ---- several ranks ----

LAYOUTS = [("--tp", 2, "--ep", 2), ("--dp", 2, "--ep", 2, "--hisparse", 256), ("--tp", 2, "--dp", 2, "--ep", 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: " ".join(map(str, x)))
def test_ranks_give_back_together(layout, tmp_path):
    """All of them, their own copies too; with a backup all of it comes back."""
    s = Server("--weights-dir", TINY, "--weights-backup", tmp_path, "--threads", 2, "--max-running", 16, "--context", 512, *layout)
    before, full = (scores(s), checksums(s)), resident(s)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        long = {**WAITS, "sampling_params": {"max_new_tokens": 500, "temperature": 0, "ignore_eos": True}}
        answers = [pool.submit(s.post, "/generate", long) for _ in range(4)]
        wait_until(lambda: s.loads()["num_running_reqs"] == 4, "they run, in every group")
        pause(s, "in_place")
        assert "4 requests run" in call(s, "release", status=400).json["message"]
        pause(s, "retract")
        for _ in range(5):
            call(s, "release")
            assert s.stats()["hadal_released_bytes"] > 0.9 * (TINY / "model.safetensors").stat().st_size
            if "asan" not in HADAL and "tsan" not in HADAL:
                assert resident(s) < full
            refused(s, "memory_released")
            call(s, "resume", ["kv_cache"])
            refused(s, "weights_released")
            call(s, "resume")
        go_on(s)
        assert len({tuple(a.result().json["output_ids"]) for a in answers}) == 1
    assert (scores(s), checksums(s)) == before
    s.close()


def test_ranks_take_new_weights_after_a_release(tmp_path):
    other = copy_model(TINY, tmp_path / "other", perturbed(io.read_checkpoint(TINY), 5))
    fresh = Server(model=other)
    want = scores(fresh)
    fresh.close()
    s = Server("--weights-dir", tmp_path, "--threads", 2, *LAYOUTS[0])
    call(s, "release")
    call(s, "resume")
    refused(s, "weights_released")
    update(s, other)
    assert scores(s) == want
    s.close()


# ---- with a backup ----


@pytest.fixture
def kept(tmp_path):
    s = Server("--weights-dir", TINY, "--weights-backup", tmp_path, "--max-running", "4")
    yield s
    s.close()


def size_of_backup(server, folder):
    """Of the one file without a name that the server has open there."""
    sizes = []
    for file in pathlib.Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that has been closed meanwhile
            if os.readlink(file).startswith(str(folder)):
                sizes.append(file.stat().st_size)
    (size,) = sizes
    return size


def test_weights_come_back_from_the_backup(kept, tmp_path):
    """Bit for bit, also those of an update, again and again; the file has no name and keeps no space."""
    before = scores(kept), checksums(kept)
    for i in range(3):
        if i == 1:
            send(kept, {"norm.weight": perturbed(io.read_checkpoint(TINY), 3)["norm.weight"]})
            send(kept, {f"layers.{n}.ffn_norm.weight": perturbed(io.read_checkpoint(TINY), n)[f"layers.{n}.ffn_norm.weight"] for n in range(2)})
            before = scores(kept), checksums(kept)
        call(kept, "release")
        call(kept, "release", ["weights"])
        refused(kept, "memory_released")
        assert os.listdir(tmp_path) == [] and size_of_backup(kept, tmp_path) > 10**6
        assert call(kept, "resume").json["message"] == "Resumed."
        assert (scores(kept), checksums(kept)) == before
        assert kept.stats()["hadal_weights_lost"] == kept.stats()["hadal_released_bytes"] == 0
        assert size_of_backup(kept, tmp_path) == 0


def test_a_backup_that_cannot_be_written_releases_nothing(tmp_path):
    """The limit on the size of files says what a full disk says."""
    script = 'ulimit -f 1024; trap "" XFSZ; exec "$@"'
    s = Server("--weights-dir", TINY, "--weights-backup", tmp_path, launcher=["bash", "-c", script, "bash"])
    before = scores(s), checksums(s)
    reply = call(s, "release", ["weights"], status=503)
    assert reply.code == "backup_failed"
    assert "could not be written: File too large" in reply.json["message"]
    assert (scores(s), checksums(s)) == before and s.stats()["hadal_released_bytes"] == 0
    s.close()


def test_a_backup_needs_a_folder_and_updates(tmp_path):
    for flags, why in ((["--weights-dir", TINY, "--weights-backup", tmp_path / "none"], "No such file"), (["--weights-backup", tmp_path], "cannot be replaced")):
        with pytest.raises(AssertionError, match=why):
            Server(*flags)


# ---- a GPU ----


def gpu_bytes():
    """Used on the GPU that the server takes: the first of CUDA_VISIBLE_DEVICES."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    done = subprocess.run(["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True)
    return int(done.stdout.split()[0]) << 20


@pytest.mark.skipif("\ngpu 0" not in run_hadal("version").stdout, reason="needs a GPU and a build with CUDA (make CUDA=1)")
def test_memory_of_a_gpu(tmp_path):
    """It really goes back, and comes again at its address, by graphs that were recorded before: from the host's copy, also after an update."""
    tensors = perturbed(io.read_checkpoint(TINY), 3)
    folder = copy_model(TINY, tmp_path / "other", tensors)
    s = Server("--weights-dir", tmp_path, "--kv-tokens", 400000)
    try:
        before, used = scores(s), gpu_bytes()
        for cycle in range(20):
            assert s.post("/release_memory_occupation", {}).status == 200
            if cycle == 0:
                released = s.stats()["hadal_released_bytes"]
                assert released > 100 << 20 and used - gpu_bytes() > 0.9 * released
            reply = s.post("/generate", {"text": "1 + 1 =", "sampling_params": {"max_new_tokens": 2}})
            assert (reply.status, reply.code) == (503, "memory_released")
            assert s.post("/update_weights_from_disk", {"model_path": str(folder)}).status == 503
            assert s.post("/resume_memory_occupation", {"tags": ["weights"]}).status == 200
            assert s.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).status == 200
            assert scores(s) == before
        assert abs(gpu_bytes() - used) < 64 << 20
        assert s.post("/update_weights_from_disk", {"model_path": str(folder)}).status == 200
        after = scores(s)
        assert after != before
        for tags in (["weights"], ["kv_cache"], ["weights", "kv_cache"]):
            assert s.post("/release_memory_occupation", {"tags": tags}).status == 200
            assert s.post("/resume_memory_occupation", {"tags": tags}).status == 200
            assert scores(s) == after
        assert (after, checksums(s)) == started_from(folder)
    finally:
        s.close()
