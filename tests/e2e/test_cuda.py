"""The shipped model on a GPU against the CPU; and what is said where there is no GPU."""

import concurrent.futures
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, run_hadal

MODEL = ROOT / "models" / "tiny-v4"
NEAR_TIE = 1e-3  # of logits that two backends may order differently
N_PROMPTS, N_TOKENS = 50, 64

version = run_hadal("version").stdout
has_gpu, has_cuda = re.search("\ngpu 0 .*cuda path", version), "options    cuda" in version
on_gpu = pytest.mark.skipif(not has_gpu, reason="needs a GPU and a build with CUDA for it (make CUDA=1)")
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


WAYS = {
    "greedy": [],
    "drafts": ["--draft-tokens", 3],
    "auto": ["--draft-tokens", "auto"],
    "sampled": ["--temperature", 0.8, "--top-p", 0.95, "--seed", 5, "--draft-tokens", 2],
    "raw": ["--raw", "--draft-tokens", 2],
    "several": ["--n", 4, "--temperature", 0.7, "--seed", 6, "--draft-tokens", 1],
}


@on_gpu
@pytest.mark.parametrize("way", WAYS)
def test_graphs_change_nothing(way):
    """Long enough to cross pages of the cache, and steps that nobody reads."""
    texts = []
    for flags in ([], ["--no-graphs"]):
        done = run_hadal("generate", MODEL, "-p", prompts[3], "--max-tokens", 300, "--json", "--backend", "cuda", *map(str, WAYS[way]), *flags)
        assert done.returncode == 0, done.stderr
        texts.append([json.loads(line)["text"] for line in done.stdout.splitlines()])
    assert texts[0] == texts[1]


CLIENTS = 64
asked = [p for p in prompts if len(p) < 1000]  # characters; the longest documents fill a context alone


def ask(server, i):
    """Some greedy, some drawn, some with penalties or alternatives, some under a form."""
    body = {"messages": [{"role": "user", "content": asked[i % len(asked)]}], "max_tokens": 16 + 7 * (i % 12), "temperature": 0, "seed": i}
    if i % 4 == 1:
        body["temperature"] = 0.7
    if i % 4 == 2:
        body["frequency_penalty"] = 0.5
    if i % 8 == 3:
        body["logprobs"], body["top_logprobs"] = True, 3
    if i % 16 == 7:
        body["response_format"] = {"type": "json_object"}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.text
    choice = reply.json["choices"][0]
    return choice["message"], choice["finish_reason"], choice.get("logprobs")


@on_gpu
def test_many_clients_change_nothing(serve):
    """64 at a time through 24 places, with a cache too small for all of them, so that they come,
    go, pad a step and are sent back; then one by one, every operator queued on its own."""
    crowded = serve("--backend", "cuda", "--max-running", 24, "--context", 512, "--kv-tokens", 512)
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(lambda i: ask(crowded, i), range(CLIENTS)))
    alone = serve("--backend", "cuda", "--no-graphs")
    for i in range(CLIENTS):
        assert ask(alone, i) == together[i], i


@on_gpu
def test_many_clients_are_answered_like_on_the_cpu(serve, tmp_path):
    server, cpu = serve("--backend", "cuda", "--max-running", 64), serve("--max-running", 64)
    assert re.search(r"sandbox +.*, seccomp", server.said), server.said
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda i: ask(server, 4 * i), range(CLIENTS)))
        wanted = list(pool.map(lambda i: ask(cpu, 4 * i), range(CLIENTS)))
    for i, (got, want) in enumerate(zip(answers, wanted)):
        if got != want:
            prompt = asked[4 * i % len(asked)]
            gap = first_difference(prompt, want[0]["content"], tmp_path)
            assert gap < NEAR_TIE, (prompt, got, want)


@on_gpu
@pytest.mark.parametrize("precision", ["exact", "fast", "official"])
def test_a_host_that_computes_rows_of_experts(serve, precision):
    """In captured steps. Its sums are in another order, so some texts may differ (docs/numerics.md)."""
    flags = ("--backend", "cuda", "--precision", precision, "--max-running", 16, "--context", 512, "--experts-host", "0.004")

    def replies(server):
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(lambda i: ask(server, 4 * i), range(CLIENTS)))  # greedy ones

    want = replies(serve(*flags))
    server = serve(*flags, "--experts-host-compute", "host")
    have = replies(server)
    assert sum(h == w for h, w in zip(have, want)) > 0.9 * CLIENTS
    stats = server.stats()
    assert stats["hadal_experts_on_host_total"] > 500 and stats["hadal_expert_host_seconds_total"] > 0
    assert stats["hadal_expert_split_seconds_total"] > 0 and stats["hadal_gpu_graph_steps_total"] > 0


@on_gpu
def test_experts_of_every_position(serve, tmp_path):
    """Written by the router inside graphs, and by itself; then from the tokens alone."""
    from test_routes import PROMPT, check_rows, generate as native, whole

    for flags in ([], ["--no-graphs"]):
        server = serve("--backend", "cuda", "--routed-experts", "--max-running", 24, *flags)
        prompts = [PROMPT * 11 + [400 + i] for i in range(CLIENTS)]
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            replies = list(pool.map(lambda i: native(server, prompts[i], 30 + i, seed=i), range(CLIENTS)))
        check_rows(MODEL, tmp_path, [whole(p, r) for p, r in zip(prompts, replies)], "--backend", "cuda")


@on_gpu
def test_memory_of_a_gpu_is_not_released(serve):
    server = serve("--backend", "cuda", "--weights-dir", MODEL)
    for tag in ("weights", "kv_cache"):
        reply = server.post("/release_memory_occupation", {"tags": [tag]})
        assert reply.status == 501 and "given back" in reply.json["message"], reply.text
    assert ask(server, 0)[1] in ("length", "stop")


@on_gpu
def test_what_a_gpu_refuses_is_an_error(tmp_path):
    """Keys wider than the kernels have room for: said in words by every request, never computed."""
    import make_model
    from toy_models import VOCAB, add_toy_tokenizer

    make_model.write_model(tmp_path, dict(make_model.V3, vocab_size=VOCAB, kv_lora_rank=640))
    add_toy_tokenizer(tmp_path)
    words = ["generate", tmp_path, "-p", "the cat", "--max-tokens", 2]
    assert run_hadal(*words, "--backend", "cpu").returncode == 0
    for flags in ([], ["--no-graphs"]):
        done = run_hadal(*words, "--backend", "cuda", *flags)
        assert done.returncode != 0 and "keys this wide" in done.stderr, done.stderr


@on_gpu
def test_logits_are_near_those_of_the_cpu(tmp_path):
    tokens = [i * 37 % 500 for i in range(300)]
    cpu, cuda = logits(tokens, "cpu", tmp_path), logits(tokens, "cuda", tmp_path)
    assert np.abs(cpu - cuda).max() <= NEAR_TIE


HOLD = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
free, total, device, context, memory = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0 and cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
held = free.value - (int(sys.argv[1]) << 20)
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(held)) == 0
print(held, flush=True)
sys.stdin.read()
"""


UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def figures(line):
    """(needed, free) bytes"""
    found = re.search(r"no memory for ([\d.]+) (\w+)[,;].*? ([\d.]+) (\w+) (?:are )?free", line)
    assert found, line
    needed, unit, free, free_unit = found.groups()
    return float(needed) * UNITS[unit], float(free) * UNITS[free_unit]


@on_gpu
def test_L20_memory_that_another_process_holds(refused):
    """What is free is said, and what would be needed; nothing is left behind for the next one."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, "3000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    line = refused("serve", MODEL, "--port", "0", "--backend", "cuda", "--kv-tokens", 4_000_000, code=4)
    needed, free = figures(line)
    assert 4e9 < needed and free < needed  # other tests may have given some back meanwhile
    holder.communicate()
    assert run_hadal("generate", MODEL, "-p", "x", "--max-tokens", 2, "--backend", "cuda").returncode == 0


@on_gpu
def test_F42_weights_beyond_the_memory(refused, tmp_path):
    """Files full of holes: the sizes of V2 in BF16, 472 GB. Said before a byte is copied."""
    from test_inspect import CONFIG_FILES, released_layout, write_sparse

    config = json.loads((CONFIG_FILES / "v2.json").read_text())
    config.pop("quantization_config", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokens.json").write_text("[1, 2, 3]")
    try:
        write_sparse(tmp_path, released_layout(config), 55)
        line = refused("logits", tmp_path, "--tokens", tmp_path / "tokens.json", "--out", tmp_path / "out.npy", "-q", "--backend", "cuda", code=4)
    except OSError as e:
        pytest.skip(f"no sparse files of this size here: {e}")
    finally:
        for shard in tmp_path.glob("*.safetensors"):
            shard.unlink()
    needed, free = figures(line)
    assert line.startswith("error: weights: ") and needed > 400e9 > free


@on_gpu
@pytest.mark.parametrize("shown", ["", "99", "-1", "none"])
def test_L18_no_device_is_shown(refused, shown):
    line = refused("generate", MODEL, "-p", "x", "--backend", "cuda", code=5, env={**os.environ, "CUDA_VISIBLE_DEVICES": shown})
    assert "no CUDA device: " in line


@pytest.mark.skipif(has_gpu, reason="there is a GPU")
@pytest.mark.parametrize("command", [["generate", MODEL, "-p", "x"], ["eval", MODEL, "--suite", "tiny"]])
def test_L19_without_a_gpu_it_says_so(refused, command):
    """The driver's reason where the build has CUDA; else that it has none, which is another flag's fault."""
    line = refused(*command, "--backend", "cuda", code=5 if has_cuda else 2)
    assert "no CUDA device: " in line if has_cuda else "no CUDA in this build" in line


def test_what_computes_is_said(serve):
    """By default a GPU where one can be used. The start names what is used, and why no GPU is."""
    said = {flag: [line.split(None, 2) for line in serve(*flag.split()).said.splitlines()] for flag in ("", "--backend cpu", "--backend null")}
    engines = {flag: next(line[1] for line in lines if line[:1] == ["engine"]).rstrip(";") for flag, lines in said.items()}
    assert engines == {"": "cuda" if has_gpu else "cpu", "--backend cpu": "cpu", "--backend null": "null"}
    reasons = {flag: [line[2] for line in lines if line[:2] == ["no", "GPU"]] for flag, lines in said.items()}
    assert reasons["--backend cpu"] == reasons["--backend null"] == []
    if has_gpu:
        assert reasons[""] == []
    else:
        assert ("no CUDA device: " if has_cuda else "no CUDA in this build; make CUDA=1") in reasons[""][0]
    done = run_hadal("bench", "throughput", MODEL, "--num-prompts", 1, "--input-len", 4, "--output-len", 2, "--json", "-q")
    assert json.loads(done.stdout)["backend"] == engines[""], done.stderr


@on_gpu
@pytest.mark.parametrize("config, layout, drafts", [("tiny_v4", "tp=2", 3), ("tiny_v3", "ep=4", 0)])
def test_a_rank_of_a_layout_is_measured(config, layout, drafts):
    """The same calls as on the CPU, over weights made on the device, and steps that are one graph."""
    path = ROOT / "tests" / "configs" / f"{config}.json"
    args = ["bench", "latency", "--dummy-weights", path, "--emulate-rank", layout, "--drafts", drafts, "--batch", 4,
            "--context", 300, "--steps", 4, "--json", "--backend"]
    reports = {}
    for backend in "cpu", "cuda":
        done = run_hadal(*args, backend)
        assert done.returncode == 0, done.stderr
        reports[backend] = json.loads(done.stdout)
    calls = {b: [(op["part"], op["op"], op["calls"]) for op in r["ops"]] for b, r in reports.items()}
    assert calls["cuda"] == calls["cpu"]
    cuda = reports["cuda"]
    assert 0 < cuda["device_step_seconds"] < 2 * cuda["operator_seconds"]
    assert cuda["gap_seconds"] < cuda["step_seconds"]
