"""Experts stay in the model's files, or in host memory: the answers are those of resident experts,
whatever memory they are staged in; bad files and options are refused by name."""

import errno
import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import BACKEND, ROOT, run_hadal
from serving import TINY, Server, events_of, wait_until
from test_metrics import stream
from test_rebalance import figure
from test_ranks import body_of
from test_weight_senders import SANITIZED

TINY_V41 = ROOT / "models" / "tiny-v41"
CLIENTS = 16 if SANITIZED else 64
FLAGS = ("--threads", 2, "--max-running", 24, "--context", 512)
TIGHT = ("--threads", 2, "--max-running", 12, "--context", 512, "--kv-tokens", 1024, "--chunk", 16)
ONE, TWO, THREE, HALF = "0.000062", "0.000124", "0.0002", "0.004"  # gigabytes; one expert of tiny-v4 takes 61440 bytes


def answers(server):
    def ask(i):
        reply = server.post("/v1/completions", {**body_of(i), "max_tokens": 12})
        assert reply.status == 200, reply.text
        return reply.json["choices"][0]["text"]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, range(CLIENTS)))


@pytest.fixture(scope="module")
def want():
    """What a server says that has all experts, and room for every request."""
    server = Server(*FLAGS)
    try:
        return answers(server)
    finally:
        server.close()


@pytest.fixture
def model(tmp_path):
    """A copy of tiny-v4 that a test may spoil."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("eval", "golden", "*.png"))
    return folder


@pytest.mark.parametrize("memory", [ONE, *(pytest.param(m, marks=pytest.mark.long) for m in (THREE, HALF)), "auto"])
def test_crowds_get_the_answers_of_resident_experts(serve, want, memory):
    server = serve(*FLAGS, "--experts-disk", memory)
    for _ in range(2):  # the second time with a prefix cache
        assert answers(server) == want
    assert figure(server, "experts_used_total") > 1000
    assert 0 < figure(server, "experts_fetched_total") <= figure(server, "experts_used_total")
    assert figure(server, "expert_fetches_failed_total") == 0
    if memory == "auto":
        assert figure(server, "expert_slots") == figure(server, "experts_elsewhere")
        assert figure(server, "experts_fetched_total") <= figure(server, "experts_elsewhere")


@pytest.mark.threads
def test_retracted_requests_and_chunks(serve, want):
    assert answers(serve(*TIGHT, "--experts-disk", THREE)) == want


@pytest.mark.parametrize("memory", [TWO, HALF])
def test_crowds_get_the_answers_with_experts_in_host_memory(serve, want, memory):
    server = serve(*TIGHT, "--experts-host", memory)
    assert answers(server) == want
    shown = live_stats(server)["experts_elsewhere"]
    assert shown["source"] == "host" and shown["elsewhere"] == 7 * 16
    assert "others are copied from host memory" in server.said
    assert shown["slots"] == (2 if memory == TWO else 67)  # and three sets of three, for long prompts
    assert 0 <= shown["staged"] < shown["used"] and shown["fetch_bytes"] > 0


@pytest.mark.parametrize("compute", [pytest.param("auto", marks=pytest.mark.long), "host"])
def test_crowds_get_the_answers_of_a_host_that_computes(serve, want, compute):
    """A CPU backend's host has its bits, so it does not matter which experts it computes."""
    server = serve(*TIGHT, "--experts-host", HALF, "--experts-host-compute", compute)
    for _ in range(2):
        assert answers(server) == want
    used, staged, fetched, sent = (figure(server, f"experts_{k}_total") for k in ("used", "staged", "fetched", "on_host"))
    assert used == staged + fetched + sent and figure(server, "expert_rows_on_host_total") >= sent
    shown = live_stats(server)["experts_elsewhere"]
    assert shown["sent"] == sent
    if compute == "host":
        assert sent > 500 and fetched > 0  # prompts are streamed
    if sent:
        assert figure(server, "expert_host_seconds_total") > 0
        assert figure(server, "expert_split_seconds_total") > 0 < figure(server, "expert_split_predicted_seconds_total")


def test_a_host_that_cannot_compute_says_so(serve):
    flags = ("--threads", 1, "--context", 512, "--experts-host", TWO)
    want = ask(serve(*flags)).json["choices"][0]["text"]
    server = serve(*flags, "--experts-host-compute", "host")
    assert ask(server).json["choices"][0]["text"] == want
    server.close()
    assert b"experts are computed on the device alone (experts_host_compute)" in server.log


def test_layers_without_room_in_host_memory_are_on_the_device(serve, want):
    """Host memory for two of the layers' experts: the others' need it on the device."""
    server = serve(*TIGHT, "--experts-host", "0.0055", "--host-memory", "0.002")
    assert answers(server) == want
    shown = live_stats(server)["experts_elsewhere"]
    assert shown["elsewhere"] == 2 * 16 and 16 < shown["slots"] < 32
    assert 0 < shown["staged"] < shown["used"] and shown["fetch_bytes"] > 0
    server.close()
    assert b"those of the last 5 of 7 layers are on the device" in server.log


def test_what_was_used_stays_on_the_device(serve):
    """An answer that is asked for again finds more of its experts than a first one; with room for all, every one."""
    body = {"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    for memory in (HALF, "1"):
        server = serve("--threads", 1, "--context", 512, "--experts-host", memory)
        shares, fetched = [], []
        for _ in range(2):
            used, staged, was = (figure(server, f"experts_{k}_total") for k in ("used", "staged", "fetched"))
            assert server.post("/v1/completions", body).status == 200
            used, staged = figure(server, "experts_used_total") - used, figure(server, "experts_staged_total") - staged
            fetched.append(figure(server, "experts_fetched_total") - was)
            assert used - staged == fetched[-1] and used > 1000
            shares.append(staged / used)
        assert shares[1] >= shares[0] > 0.5
        assert (fetched[1] == 0) == (memory == "1")
        assert figure(server, "expert_fetch_bytes_total") % figure(server, "experts_fetched_total") == 0


def test_a_drafter_has_fewer_experts_than_the_model():
    """tiny-v41: 12 in a layer, and 6 in one of the drafter's, so that a rank of two may have none of these."""

    def said(*flags):
        command = ["generate", TINY_V41, "-p", "What is 347 + 586?", "--max-tokens", 24, "--draft-tokens", 3, "--json", "-q"]
        done = run_hadal(*command, "--threads", 2, "--backend", BACKEND, *flags)
        assert done.returncode == 0, done.stderr
        reply = json.loads(done.stdout)
        return reply["text"], reply["drafted"], reply["accepted"]

    want = said()
    assert want[1] > 0
    host = [("--experts-host", memory) for memory in ("0.001", "0.003", "1")]
    for flags in (*host, ("--dwdp", 2), ("--dwdp", 3, "--redundant", 2), ("--ep", 2), ("--dp", 2, "--ep", 2, "--redundant", 2)):
        assert said(*flags) == want, flags


def live_stats(server):
    with stream(server, "GET", "/engine/live") as view:
        return json.loads(next(events_of(view)))["stats"]


def test_the_live_view_shows_what_is_on_disk(serve):
    server = serve("--threads", 1, "--experts-disk", THREE)
    assert ask(server).status == 200
    disk = live_stats(server)["experts_elsewhere"]
    assert disk["source"] == "file"
    assert disk["slots"] == 3 < disk["elsewhere"] and disk["slot_bytes"] == 3 * 61440
    assert 0 <= disk["staged"] < disk["used"] and disk["fetch_bytes"] > 0 == disk["failed"]
    assert 0 < disk["right"] <= disk["predicted"] < disk["used"] and "others are read from disk" in server.said
    assert "experts_elsewhere" not in live_stats(serve("--threads", 1))


def test_the_next_layer_is_predicted(serve):
    """By its router: chance would be right less than once in three times."""
    server = serve("--threads", 1, "--experts-disk", THREE)
    assert server.post("/v1/completions", {**PROMPT, "max_tokens": 80, "ignore_eos": True}).status == 200
    predicted = figure(server, "experts_predicted_total")
    assert predicted > 500 and figure(server, "experts_predicted_right_total") > 0.75 * predicted


PROMPT = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}


def ask(server):
    return server.post("/v1/completions", PROMPT)


def test_a_file_that_was_cut_short_is_named(serve, model):
    server = serve(model=model, *("--threads", 1, "--experts-disk", THREE))
    want = ask(server).json["choices"][0]["text"]
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    os.truncate(weights, len(content) // 2)
    for _ in range(3):
        reply = ask(server)
        assert reply.status == 500 and "model.safetensors" in reply.text, reply.text
    assert server.get("/health").status == 200
    assert figure(server, "expert_fetches_failed_total") > 0
    assert want


def test_a_file_that_changes_is_named(serve, model):
    server = serve(model=model, *("--threads", 1, "--experts-disk", THREE))
    assert ask(server).status == 200
    with open(model / "model.safetensors", "r+b") as f:
        f.seek(-1000, os.SEEK_END)
        f.write(b"\0" * 100)
    reply = ask(server)
    assert reply.status == 500 and "was changed since it was opened" in reply.text


# While the file $BROKEN is there, the disk of the weights is broken: reads behind their first page fail.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

static int is_broken(off_t at, size_t n) {
    const char *file = getenv("BROKEN");
    errno = EIO;
    return file && n >= 4096 && at > 0 && access(file, F_OK) == 0;
}

ssize_t pread(int fd, void *to, size_t n, off_t at) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread");
    return is_broken(at, n) ? -1 : real(fd, to, n, at);
}

ssize_t __pread_chk(int fd, void *to, size_t n, off_t at, size_t room) {
    static ssize_t (*real)(int, void *, size_t, off_t, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "__pread_chk");
    return is_broken(at, n) ? -1 : real(fd, to, n, at, room);
}
"""


@pytest.fixture
def breakable(tmp_path):
    """Flags of a server, and a file that breaks its disk as long as it is there."""
    (tmp_path / "shim.c").write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(tmp_path / "shim.so"), "BROKEN": str(tmp_path / "broken")}, tmp_path / "broken"


def test_a_disk_that_breaks_and_works_again(serve, model, breakable):
    """EIO is the error of the requests that needed the bytes, plain and streamed, and no answer is wrong."""
    env, broken = breakable
    server = serve("--threads", 1, "--experts-disk", THREE, model=model, env=env)
    want = ask(server)
    with stream(server, "POST", "/v1/completions", {**PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}) as reply:
        told = events_of(reply)
        next(told)
        broken.touch()
        last = [event for event in told if event != b"[DONE]"][-1]
        assert "model.safetensors" in json.loads(last)["error"]["message"]
    for _ in range(3):
        reply = ask(server)
        assert reply.status == 500 and "model.safetensors" in reply.text and os.strerror(errno.EIO) in reply.text, reply.text
    assert figure(server, "expert_fetches_failed_total") > 0
    broken.unlink()
    assert ask(server).json["choices"] == want.json["choices"]


def test_a_file_that_is_replaced_is_no_matter(serve, model):
    server = serve(model=model, *("--threads", 1, "--experts-disk", THREE))
    want = ask(server).json["choices"][0]["text"]
    (model / "new").write_bytes(b"not a model")
    os.replace(model / "new", model / "model.safetensors")
    assert ask(server).json["choices"][0]["text"] == want


@pytest.mark.parametrize(
    "flags, why",
    [
        (("--experts-disk", "much"), "must be off, auto or a number of gigabytes above 0"),
        (("--experts-disk", "-1"), "must be off, auto or a number of gigabytes above 0"),
        (("--experts-disk", "nan"), "must be off, auto or a number of gigabytes above 0"),
        (("--experts-disk", "0.00001"), "one expert of this model takes 61440 bytes"),
        (("--experts-disk", "1", "--tp", 2), "several ranks hold parts of them"),
        (("--experts-disk", "1", "--ep", 2), "several ranks hold parts of them"),
        (("--experts-disk", "1", "--backend", "null"), "the null backend has none"),
        (("--experts-host", "much"), "experts_host is 'much'; must be off, auto or"),
        (("--experts-host-compute", "auto"), "experts_host_compute is 'auto', and experts are not in host memory"),
        (("--experts-host", "1", "--experts-host-compute", "cpu"), "'cpu' is none of device, auto, host"),
        (("--experts-host", "0.0001"), "at least 2 are fetched at once here"),
        (("--experts-host", "0.004", "--host-memory", "0.001"), "6 layers that host memory does not hold have 96"),
        (("--device-memory", "1", "--backend", "cpu"), "no memory of its own to limit"),
        (("--experts-host", "1", "--dwdp", 2), "in host memory here: several ranks hold parts"),
        (("--experts-host", "1", "--experts-disk", "1"), "on disk or in host memory, not in both"),
    ],
)
def test_what_cannot_be_is_refused(refused, flags, why):
    assert why in refused("generate", TINY, "-p", "hi", *flags)
