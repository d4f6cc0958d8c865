"""Engine options: every command that opens an engine has them, and none ignores one."""

import json
import re

import pytest
from conftest import ROOT, run_hadal

TINY = ROOT / "models" / "tiny-v4"
TASK = {"task": "t", "prompt": "the", "max_tokens": 2, "checker": {"type": "contains", "expect": ""}}
LOG = {"path": "/v1/completions", "status": 200, "finish": "length", "seed": 1, "request_id": "r",
       "body": json.dumps({"prompt": "the", "max_tokens": 2, "temperature": 0})}  # fmt: skip
LOAD = ["--num-prompts", 2, "--input-len", 8, "--output-len", 4, "--warmup", 0, "-q"]
ENGINES = ["serve", "chat", "generate", "eval", "replay", "bench throughput", "bench latency"]
STEPS = ["logits", "bench ops", "bench latency --emulate-rank"]


@pytest.fixture
def run(tmp_path):
    """run(command, flags...): a short run of the command on the tiny model."""
    tasks, log, tokens = tmp_path / "tasks.jsonl", tmp_path / "log.jsonl", tmp_path / "tokens.json"
    tasks.write_text(json.dumps(TASK) + "\n")
    log.write_text(json.dumps(LOG) + "\n")
    tokens.write_text("[1, 2, 3]")
    rest = {
        "serve": [TINY, "--port", 0, "--no-sandbox"],
        "chat": [TINY, "-q", "--max-tokens", 2],
        "generate": [TINY, "-p", "the", "--max-tokens", 2, "-q"],
        "eval": [TINY, "--tasks", tasks, "-q"],
        "replay": [log, TINY],
        "bench throughput": [TINY, *LOAD],
        "bench latency": [TINY, *LOAD],
        "logits": [TINY, "--tokens", tokens, "--out", tmp_path / "out.npy", "-q"],
        "bench ops": [TINY, "--prompt", 2, "--context", 2, "--repeat", 1],
        "bench latency --emulate-rank": ["tp=1", "--dummy-weights", TINY, "--steps", 1, "--context", 8],
    }

    def start(command, *flags):
        return run_hadal(*command.split(), *rest[command], *flags, input="the\n")

    return start


@pytest.mark.parametrize("command", ENGINES)
@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--kv-tokens", 102400000000], 4, "102400000000 tokens; "),
        (["--snapshot-tokens", 102400000000000], 4, "no memory for"),
        (["--kv-host", 0.000001], 2, "kv_host_gb 1e-06 holds no page"),
        (["--kv-write", "through"], 2, "kv_write_through without kv_host"),
        (["--kv-write", "around"], 2, "--kv-write"),
        (["--hisparse", "some"], 2, "hisparse is 'some'; must be off, a number of rows up to"),
        (["--hisparse", 255], 2, "hisparse is 255; a position selects 256 entries"),
        (["--backend", "null", "--hisparse", 256], 2, "the null backend has no entries"),
        (["--step-tokens", 4], 2, "a step of 4 rows cannot hold"),
        (["--context", 8193], 2, "this model knows 8192 positions"),
        (["--null-step-us", 5], 2, "null_step_us is 5"),
        (["--backend", "null", "--precision", "fast"], 2, "precision fast has no meaning"),
        (["--backend", "null", "--cuda-path", "generic"], 2, "cuda_path generic is for backend cuda, not for null"),
        (["--backend", "cpu", "--cuda-path", "sm90"], 2, "cuda_path sm90 is for backend cuda, not for cpu"),
        (["--cuda-path", "sm80"], 2, "--cuda-path: 'sm80' is none of auto, generic, sm90"),
        (["--backend", "null", "--mla", "naive"], 2, "mla naive has no meaning"),
        (["--precision", "exact", "--no-batch-invariance"], 2, "no-batch-invariance is for"),
        (["--manifest", "/nowhere"], 2, "/nowhere"),
        (["--no-drafts", "--draft-tokens", 2], 2, "asks for drafts"),
        (["--drafter", "none", "--draft-tokens", 2], 2, "asks for drafts"),
        (["--drafter", "mtp", "--no-drafts"], 2, "both given"),
    ],
)
def test_every_option_reaches_the_engine(run, command, flags, code, said):
    result = run(command, *flags)
    assert result.returncode == code and said in result.stderr, result.stderr


@pytest.mark.parametrize("command", ["generate", "eval", "replay", "bench throughput", "bench latency"])
def test_so_many_run_side_by_side(run, command):
    result = run(command, "--max-running", 1234, "--step-tokens", 64)
    assert result.returncode == 2 and "cannot hold 1234 running requests" in result.stderr


def test_the_page_lists_every_option():
    page = (ROOT / "docs" / "engine.md").read_text().split("## Options")[1]
    common = set.intersection(*(set(re.findall(r"--[a-z-]+", run_hadal(*c.split(), "--help").stdout)) for c in ENGINES))
    missing = {name for name in common if f"`{name}`" not in page} - {"--config", "--help"}
    assert not missing


@pytest.mark.parametrize("command", ENGINES[1:])
def test_every_command_runs_with_a_small_cache(run, command):
    result = run(command, "--kv-tokens", 1024, "--chunk", 4, "--step-tokens", 256, "--snapshot-tokens", 256, "--threads", 1,
                 "--pin", "--no-graphs", "--draft-tokens", "auto")
    assert result.returncode == 0, result.stderr


def test_serve_shows_what_it_was_given(serve):
    flags = {"kv-tokens": 4096, "chunk": 32, "prompt-ms": 50, "step-tokens": 512, "queue": 7, "threads": 1, "max-running": 3, "context": 1024}
    server = serve(*(str(word) for name, value in flags.items() for word in ("--" + name, value)))
    info = server.get("/server_info").json
    assert {name: info[name.replace("-", "_")] for name in flags} == flags
    assert (info["precision"], info["token_history"], info["draft_tokens"]) == ("exact", "on", -1)
    assert info["cuda_path"] in (None, "generic", "sm90")


@pytest.mark.parametrize("command", STEPS)
def test_what_a_command_cannot_have_is_refused_with_a_reason(run, command):
    result = run(command, "--kv-tokens", 5)
    assert result.returncode == 2
    assert " takes no --kv-tokens: its KV pools hold just the sequences" in result.stderr


@pytest.mark.parametrize("command", STEPS)
def test_commands_without_an_engine_have_the_options_of_operators(run, command):
    result = run(command, "--threads", 1, "--pin", "--backend", "cpu", "--precision", "exact")
    assert result.returncode == 0, result.stderr
    result = run(command, "--backend", "null")
    assert result.returncode == 2 and "'null' is none of auto, cpu, cuda, ref" in result.stderr
    result = run(command, "--backend", "cpu", "--cuda-path", "generic")
    assert result.returncode == 2 and "cuda_path generic is for backend cuda" in result.stderr
    result = run(command, "--cuda-path", "hopper")
    assert result.returncode == 2 and "--cuda-path: 'hopper' is none of auto, generic, sm90" in result.stderr
    result = run(command, "--backend", "cpu", "--no-batch-invariance")
    assert result.returncode == 2 and "no-batch-invariance is for backend cuda" in result.stderr


def test_operators_alone_have_no_form_of_attention():
    result = run_hadal("bench", "ops", "--mla", "naive")
    assert result.returncode == 2 and "--mla is for the steps of a CONFIG" in result.stderr


def test_an_emulated_rank_attends_in_the_form_it_is_told(run):
    flags = ["--dummy-weights", ROOT / "models" / "tiny-v3", "--backend", "cpu", "--prompt", 64, "--context", 0, "--steps", 1]
    for form, operator in (("absorbed", " attention "), ("naive", " attention_naive ")):
        result = run_hadal("bench", "latency", "--emulate-rank", "tp=1", *flags, "--mla", form)
        assert result.returncode == 0 and operator in result.stdout, result.stderr


def test_logits_checks_a_manifest(run):
    result = run("logits", "--manifest", "/nowhere")
    assert result.returncode == 2 and "/nowhere" in result.stderr


def test_a_config_file_has_them_too(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"kv-tokens": 102400000000, "draft-tokens": "3", "backend": "cpu"}))
    result = run("eval", "--config", path)
    assert result.returncode == 4 and "102400000000 tokens; " in result.stderr
    path.write_text('{"draft-tokens": "8"}')
    assert "--draft-tokens: 8 is out of range" in run("eval", "--config", path).stderr
