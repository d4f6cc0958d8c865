"""One model on ranks in processes of their own answers as in one process; refusals."""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess

import pytest
from conftest import HADAL, as_root, run_hadal
from hosts import host, ip, slurm  # fixtures
from serving import TINY, Server, wait_until
from test_ranks import answers, check_pause_and_abort, check_rank_figures, group_metric
from worlds import CLEAN, KEY, NO_DEVICE, SMALL, TRANSPORTS, UCX_MEMORY, end_mpirun, free_address, needs_ucx

pytestmark = needs_ucx


@pytest.fixture(scope="module")
def alone():
    server = Server(*SMALL)
    want = answers(server)
    server.close()
    return want


# ---- answers ----


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("degree,n", [("--ep", 2), ("--ep", 4), ("--cp", 2), *([("--cp", 3), ("--cp", 4)] if os.environ.get("HADAL_TEST_LONG") else [])])
def test_answers_are_those_of_one_process(world, alone, degree, n, transport):
    w = world(n, degree, n, env=TRANSPORTS[transport])
    assert w.server.get("/server_info").json["parallel"]["ranks"] == n
    assert answers(w.server) == alone
    assert w.server.get("/health").text == "ok"
    assert all(code == 0 for _, code in w.close())
    assert b"rank_memory_not_shared" not in w.server.log or transport != "shared memory"


def test_without_shared_memory_ucx_carries_messages(world, alone):
    """Rank 1 names transports of UCX, so no rank shares memory."""
    w = world(2, "--ep", 2, wrap=lambda rank: ["env", *(f"{k}={v}" for k, v in UCX_MEMORY.items())])
    assert answers(w.server) == alone
    ends = w.close()
    assert b'rank_memory_not_shared why="rank 1 is not of this host, or shares no memory"' in w.server.log
    assert all(code == 0 for _, code in ends)


GROUPS = {"two groups": ("--dp", 2, "--ep", 2), "with followers": ("--dp", 2, "--tp", 2, "--ep", 4)}


@pytest.mark.parametrize("groups", GROUPS)
def test_micro_batches_in_processes(world, alone, groups):
    n = 4 if "--tp" in GROUPS[groups] else 2
    w = world(n, *GROUPS[groups], "--overlap", 2)
    assert w.server.get("/server_info").json["parallel"]["overlap"] == 2
    assert answers(w.server) == alone
    figures = w.server.stats()
    assert 0 < figures["hadal_micro_batch_steps_total"] <= figures["hadal_steps_total"]
    assert all(code == 0 for _, code in w.close())


def segments():
    """Bytes that are in memory of the segments of ranks (comm/shm.h), which are larger than any of UCX's, by process."""
    lines = pathlib.Path("/proc/sysvipc/shm").read_text().splitlines()
    rows = [dict(zip(lines[0].split(), map(int, line.split()))) for line in lines[1:]]
    return {row["cpid"]: row["rss"] for row in rows if row["size"] > 1 << 34}


@pytest.mark.parametrize("layout", ["tp=2", "ep=2", *(pytest.param(x, marks=pytest.mark.long) for x in ("dp=2,ep=2", "tp=2,dp=2,ep=4"))])
def test_shared_memory_is_as_planned(world, tmp_path, layout):
    """Prompts fill steps. The plan has as many rows for the experts of others as may be, of which tiny-v4 sends most."""
    sizes = dict((k, int(v)) for k, v in (part.split("=") for part in layout.split(",")))
    flags = [w for k, v in sizes.items() for w in (f"--{k}", v)]
    n, groups = max(sizes.get("tp", 1) * sizes.get("dp", 1), sizes.get("ep", 1)), sizes.get("dp", 1)
    more = ("--dispatch-dtype", "fp8") if layout == "ep=2" else ()
    (tmp_path / "cpu.json").write_text(json.dumps({"like": "cpu", "node": n}))
    plan = ("plan", TINY, "--gpus", n, "--layout", layout, "--users", 4 * groups, "--prompt", 900, "--output", 100, "--chunk", 512, *more, "--json")
    planned = [json.loads(run_hadal(*plan, "--gpu", gpu).stdout)["layouts"][0]["bytes"] for gpu in (tmp_path / "cpu.json", "cpu")]
    assert planned[1]["host_messages"] == 0  # that row has a host for each rank
    assert planned[1]["free"] - planned[0]["free"] == pytest.approx(planned[0]["host_messages"], abs=1000)
    base = ("--threads", 1, "--max-running", 4, "--context", 1000, "--chunk", 512, "--no-drafts", "--backend", "cpu")
    w = world(n, *flags, *more, base=base)
    body = lambda i: {"input_ids": [3 + (7 * i + 5 * k) % 500 for k in range(880)], "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(r.status == 200 for r in pool.map(lambda i: w.server.post("/generate", body(i)), range(8)))
    taken = segments()
    preflight = 2 * (n - 1) << 20
    parts = [(taken[p.pid] - preflight) / (planned[0]["host_messages"] - preflight) for p in w.ranks]
    w.close()
    assert 0.5 < max(parts) <= 1, parts  # without what the first messages take


def named_ranks(log):
    """What the lines of a log name, in place of a rank: the words before their events."""
    return {m[1] for m in re.finditer(r"^\S+Z (?:info|warn|error) (\S+ \S+) ", log, re.M)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_travel_as_fp8(world, transport):
    """Processes answer as threads do."""
    fp8 = ("--dp", 2, "--ep", 2, "--dispatch-dtype", "fp8")
    threads = Server(*SMALL, *fp8)
    want = answers(threads)
    threads.close()
    w = world(2, *fp8, env=TRANSPORTS[transport])
    assert answers(w.server) == want
    assert all(code == 0 for _, code in w.close())


def test_every_pair_has_exchanged_bytes(world):
    w = world(3, "--ep", 3)
    others = w.close()
    logs = [w.server.log.decode(), *(text for text, _ in others)]
    assert [named_ranks(log) for log in logs] == [{f"rank {i}@{socket.gethostname()}"} for i in range(3)]
    seen = re.findall(r'rank_rate between="rank (\d) on \S+ and rank (\d) on \S+" mb_per_s=([\d.e+]+)', w.server.log.decode())
    assert [s[:2] for s in seen] == [("0", "1"), ("0", "2"), ("1", "2")]
    assert all(float(rate) > 0.1 for _, _, rate in seen)
    found = re.findall(r'rank_found rank="rank (\d) on \S+" free_gb=(\S+) clock_ms=(\S+) within_ms=', logs[0])
    assert [rank for rank, _, _ in found] == ["0", "1", "2"]
    assert all(float(free) > 0.01 and abs(float(ms)) < 1000 for _, free, ms in found)
    assert "rank_clock_differs" not in logs[0]


FAST_CLOCK = """
#include <time.h>
#include <sys/syscall.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    const long failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += 90;
    return (int)failed;
}
"""


def test_a_clock_that_differs_is_named(world, tmp_path):
    shim = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, "-x", "c", "-"], input=FAST_CLOCK, text=True, check=True)
    w = world(2, "--ep", 2, wrap=lambda rank: ["env", f"LD_PRELOAD={shim}"])
    w.close()
    assert re.search(r'warn rank 0@\S+ rank_clock_differs why="rank 1 on \S+: its clock is (89\.\d|90\.\d) s ahead of rank 0\'s \(set both by NTP\)"', w.server.log.decode())


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_attention_groups_in_processes(world, alone, groups, transport):
    n = 4 if "--tp" in GROUPS[groups] else 2
    w = world(n, *GROUPS[groups], env=TRANSPORTS[transport])
    assert w.server.get("/server_info").json["parallel"]["dp"] == 2
    assert answers(w.server) == alone
    finished = group_metric(w.server, "generation_tokens_total")
    assert min(finished) > 0
    if n == 4:
        check_rank_figures(w.server)
    assert all(code == 0 for _, code in w.close())


@pytest.mark.parametrize("transport", ["shared memory", *(pytest.param(t, marks=pytest.mark.long) for t in TRANSPORTS if t != "shared memory")])
def test_four_parts_of_heads_in_processes(world, alone, transport):
    w = world(4, "--tp", 4, env=TRANSPORTS[transport])
    assert w.server.get("/server_info").json["parallel"]["heads"] == 4
    assert answers(w.server) == alone
    assert all(code == 0 for _, code in w.close())


def test_processes_choose_one_layout(world, alone):
    w = world(2, "--layout", "auto")
    assert w.server.get("/server_info").json["parallel"]["dp"] == 2
    assert answers(w.server) == alone


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"], "additionalProperties": False}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 40}
# what the scheduler and the sampler of a group learn of a request, and return
FEATURES = {
    "alternatives": ("/v1/completions", {"prompt": "The cat", "max_tokens": 8, "logprobs": 3}),
    "of the prompt": ("/v1/completions", {"prompt": "The cat sat on the mat", "max_tokens": 4, "logprobs": 2, "echo": True}),
    "choices": ("/v1/completions", {"prompt": "One day", "max_tokens": 12, "n": 3, "temperature": 0.9, "seed": 5}),
    "drafts": ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 30, "draft_tokens": 3}),
    "penalties": ("/v1/completions", {"prompt": "One day", "max_tokens": 20, "repetition_penalty": 1.4, "logit_bias": {"300": 3}, "presence_penalty": 0.5}),
    "stops": ("/v1/completions", {"prompt": "One day", "max_tokens": 40, "stop": ["."], "min_tokens": 3}),
    "a schema": ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    "a pattern": ("/v1/chat/completions", {**CHAT, "regex": "[a-c]{3}d?"}),
    "a choice": ("/v1/chat/completions", {**CHAT, "guided_choice": ["red", "blue"]}),
    "a call": ("/v1/chat/completions", {**CHAT, "max_tokens": 80, "tools": [TOOL], "tool_choice": "required"}),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": [TOOL]}),
}  # fmt: skip


def replies(server):
    def of(path, body):
        reply = server.post(path, {"temperature": 0, **body})
        assert reply.status == 200, reply.text
        choices = reply.json["choices"]
        for c in choices:
            for call in c.get("message", {}).get("tool_calls") or []:
                del call["id"]
        return choices

    return {name: of(*request) for name, request in FEATURES.items()}


def test_every_feature_in_another_process(world):
    server = Server(*SMALL)
    want = replies(server)
    server.close()
    w = world(2, "--dp", 2, "--ep", 2)
    for _ in range(2):  # each in both groups
        assert replies(w.server) == want
        w.server.post("/v1/completions", {"prompt": "The next in turn", "max_tokens": 1})
        assert w.server.post("/flush_cache", {}).status == 200
    assert min(group_metric(w.server, "generation_tokens_total")) > 100


def test_pause_and_abort_in_another_process(world):
    check_pause_and_abort(world(2, "--dp", 2, "--ep", 2).server)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_experts_move_between_processes(world, alone, transport, groups):
    split = "flow" if groups == 1 else "local"
    w = world(3, "--dp", groups, "--ep", 3, "--redundant", 8, "--rebalance", 4, "--expert-split", split, env=TRANSPORTS[transport])
    assert answers(w.server) == alone
    figures = dict(line.rsplit(" ", 1) for line in w.server.get("/metrics").text.splitlines() if line[:1] != "#")
    moved = sum(float(v) for k, v in figures.items() if k.split("{")[0] == "hadal_expert_moves_total")
    assert moved > 0
    assert all(code == 0 for _, code in w.close())


@pytest.mark.parametrize("layout", [("--ep", 4), ("--tp", 2, "--ep", 2)])
def test_mpirun_is_a_launcher(alone, layout):
    """Four processes with --tp 2 are two attention groups."""
    if not shutil.which("mpirun"):
        pytest.skip("mpirun is not installed")
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    server = Server(*SMALL, *layout, "--meet", free_address(), launcher=launcher, env=CLEAN)
    assert answers(server) == alone
    assert server.get("/server_info").json["parallel"]["ranks"] == 4
    assert end_mpirun(server) == 4


@as_root
def test_srun_is_a_launcher(slurm, alone):
    launcher = ["srun", "--overcommit", "-n", "4"]
    server = Server(*SMALL, "--dp", 2, "--tp", 2, "--ep", 4, "--meet", free_address(), launcher=launcher, env=slurm)
    assert server.get("/server_info").json["parallel"]["ranks"] == 4
    assert answers(server) == alone
    # a SIGTERM to srun itself would kill the ranks
    subprocess.run(["scancel", "--signal", "TERM", "--user", "root"], env=slurm, check=True)
    assert server.wait() == 0, server.log.decode()


# ---- two hosts ----


@as_root
def test_a_rank_does_not_meet_itself(host):
    # where only one port is left, a connection to that port starts from it
    narrow = "echo 30176 30177 > /proc/sys/net/ipv4/ip_local_port_range && exec \"$@\""
    words = ["serve", TINY, *SMALL, "--ep", 2, "--rank", 1, "--world", 2, "--meet", "127.0.0.1:30176", "--start-seconds", 1]
    inside = ["ip", "netns", "exec", host[0], "sh", "-c", narrow, "sh", HADAL, *words]
    got = subprocess.run([str(w) for w in inside], env=CLEAN, capture_output=True, text=True)
    assert "rank 1 cannot reach rank 0 at 127.0.0.1:30176: Connection refused" in got.stderr


@as_root
@pytest.mark.skipif("tcp" not in TRANSPORTS, reason=NO_DEVICE)
def test_two_hosts_and_a_cut_cable(world, host, alone):
    name, net, veth = host
    wrap = lambda rank: ["ip", "netns", "exec", name, "env", f"UCX_NET_DEVICES={veth[1]}"]
    env = {**KEY, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": veth[0]}
    w = world(2, "--ep", 2, env=env, meet=f"{net}.1:30177", wrap=wrap)
    assert answers(w.server) == alone
    ip("link", "set", veth[0], "down")
    lost = "degraded: rank 1 is lost: it was silent for 1000 ms"
    wait_until(lambda: w.server.get("/health").text == lost, "rank 0 goes on without rank 1")
    assert answers(w.server) == alone
    ip("link", "set", veth[0], "up")
    wait_until(lambda: w.server.get("/health").text == "ok", "rank 1 comes again by itself")
    assert answers(w.server) == alone
    assert all(code == 0 for _, code in w.close())


def test_a_foreign_interface_needs_a_key():
    said = run_hadal("serve", TINY, *SMALL, "--ep", 2, "--rank", 1, "--world", 2, "--meet", "10.1.2.3:70", env=CLEAN)
    assert said.returncode == 2 and "need a shared secret" in said.stderr


# ---- refusals ----


@pytest.fixture
def other_model(tmp_path):
    shutil.copytree(TINY, tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(config.read_text() + "\n")
    return tmp_path / "m"


def test_ranks_that_differ_are_refused_by_name(other_model):
    meet = free_address()

    def stranger(*flags, model=TINY, rank=1, env=CLEAN):
        return run_hadal("serve", model, *SMALL, "--meet", meet, "--rank", rank, "--world", 2, *flags, env=env)

    first = subprocess.Popen([str(w) for w in [HADAL, "serve", TINY, *SMALL, "--ep", 2, "--meet", meet, "--rank", 0, "--world", 2, "--port", 0]],
                             env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        for said, run in {
            "rank 1 has another model than rank 0": stranger("--ep", 2, model=other_model),
            "rank 1 has another layout than rank 0": stranger("--tp", 2),
            "rank 1 has another set of options than rank 0": stranger("--ep", 2, "--overlap", 2),
            "a message was not made with the key of this world": stranger("--ep", 2, env={**CLEAN, **KEY}),
            "error: rank 0 cannot listen at": stranger("--ep", 2, "--port", 0, rank=0),
        }.items():
            assert run.returncode != 0 and said in run.stderr
    finally:
        first.kill()
        first.communicate()


@pytest.mark.skipif("tcp" not in TRANSPORTS, reason=NO_DEVICE)
def test_a_pair_that_cannot_connect_is_named():
    flags = [*SMALL, "--ep", 2, "--meet", free_address(), "--world", 2]
    words = [str(w) for w in [HADAL, "serve", TINY, *flags, "--port", 0]]
    ranks = [subprocess.Popen([*words, "--rank", str(r)], env={**CLEAN, "UCX_TLS": tls}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for r, tls in enumerate(["sysv,self", "tcp,self"])]
    said = [p.communicate()[1] for p in ranks]
    assert all(p.returncode for p in ranks)
    host = os.uname().nodename[:31]
    for r in (0, 1):
        line = f"rank {r} on {host}: UCX says 'Destination is unreachable' (set UCX_NET_DEVICES or UCX_TLS alike) of rank {1 - r} on {host}"
        assert line in said[0] or line in said[1]
        assert any(f"rank {k} on {host}: UCX says" in said[r] for k in (0, 1)), said[r]


def test_a_second_rank_of_the_same_number_is_refused():
    meet = free_address()
    flags = [*SMALL, "--ep", 4, "--meet", meet, "--world", 4]
    words = [str(w) for w in [HADAL, "serve", TINY, *flags, "--port", 0]]
    ranks = [subprocess.Popen([*words, "--rank", str(r)], env=CLEAN, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for r in (0, 1, 1)]
    try:
        twins = ranks[1:]
        twin = wait_until(lambda: next((p for p in twins if p.poll() is not None), None), "one of the two is refused")
        assert "rank 0 refuses: rank 1 is there already" in twin.communicate()[1]
    finally:
        for p in ranks:
            p.kill()
            p.communicate() if p.returncode is None else p.wait()


def test_a_rank_that_never_comes_is_named():
    said = run_hadal("serve", TINY, *SMALL, "--ep", 2, "--port", 0, "--rank", 0, "--world", 2, "--meet", free_address(), "--start-seconds", 1, env=CLEAN)
    assert said.returncode == 5 and "rank 1 did not come" in said.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rank", 1], "--rank and --world go together"),
        (["--rank", 2, "--world", 2], "ranks are 0 to 1"),
        (["--rank", 0, "--world", 3, "--ep", 2], "3 processes for tp 1 and ep 2"),
        (["--meet", "127.0.0.1:1"], "--meet is for ranks in processes"),
        (["--rank", 0, "--world", 2, "--ep", 2, "--meet", "127.0.0.1:0"], 'HOST:PORT, not at "127.0.0.1:0"'),
        (["--rank", 1, "--world", 2, "--ep", 2, "--meet", "127.0.0.1:99999"], 'HOST:PORT, not at "127.0.0.1:99999"'),
    ],
)
def test_flags_that_make_no_sense(flags, said):
    run = run_hadal("serve", TINY, "--backend", "cpu", "--port", 0, "--no-sandbox", *flags, env=CLEAN)
    assert run.returncode == 2 and said in run.stderr
