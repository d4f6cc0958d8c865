"""What a person sees: widths, wrapping, dimming and NO_COLOR on a terminal, and nothing of them in a pipe."""

import os
import re
import signal

import pytest
from conftest import HADAL, ROOT, run_hadal
from hub import Hub, cut
from terminal import Terminal, on_terminal

TINY = ROOT / "models" / "tiny-v4"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ASK = ["generate", TINY, "-p", "What is 347 + 586?", "--thinking", "on", "-q"]
COMMANDS = ["serve", "chat", "generate", "pull", "eval", "bench throughput", "bench latency", "bench ops", "bench update", "bench train", "inspect", "tokenize", "detokenize", "render", "logits", "eplb", "simulate", "record", "kv", "plan", "router", "train", "rl", "replay", "version"]


def widest(text):
    """Of what a terminal shows: a carriage return begins the line again."""
    return max(len(part) for line in ESCAPE.sub("", text).split("\n") for part in line.split("\r"))


def test_the_reader_loses_nothing_of_a_program_that_ends_at_once():
    for _ in range(20):
        terminal = Terminal("seq", 1, 20000)
        assert terminal.close() == 0
        assert terminal.seen.split() == [str(n) for n in range(1, 20001)]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns(command):
    words = [*command.split(), "--help"]
    text = run_hadal(*words).stdout
    assert widest(text) <= 80
    assert on_terminal(*words, columns=80) == text
    assert widest(on_terminal(*words, columns=60)) <= 60 or not command  # the table of commands is one line each
    assert run_hadal(*words).stdout.split() == on_terminal(*words, columns=60).split()


def test_every_command_is_looked_at():
    listing = run_hadal("--help").stdout.split("commands:\n")[1].split("\n\n")[0]
    assert {line.split()[0] for line in listing.splitlines()} == {c.split()[0] for c in COMMANDS}


@pytest.mark.parametrize("columns", [80, 60])
def test_inspect_keeps_to_the_width(columns):
    text = on_terminal("inspect", TINY, columns=columns)
    assert widest(text) <= columns
    piped = run_hadal("inspect", TINY).stdout
    words = [w for w in piped.split() if w != "formats"]
    assert [w for w in text.split() if w != "formats"] == words  # nothing is lost or cut
    assert "12.03 kB" in text  # numbers stay with their units


TABLES = {
    "steps": (["bench", "ops", TINY, "--prompt", 8, "--context", 8, "--repeat", 1],
              "  operator       shape                weights  calls        ms  share    GB/s  GFLOP/s  limit"),
    "operators": (["bench", "ops", "--backend", "cpu", "--only", "argmax", "--repeat", 1],
                  "case                         operator       shape                       rows         us"
                  "   limit us binds of limit    GB/s   TFLOP/s  spread"),
    "rank": (["bench", "latency", "--emulate-rank", "tp=1", "--dummy-weights", TINY, "--steps", 1, "--context", 8],
             "  part             operator       rows x outs x ins      weights  calls        us        MB       GF"
             "  limit us   ratio   lost ms  share"),
    "load": (["bench", "latency", TINY, "--num-prompts", 1, "--input-len", 8, "--output-len", 4, "-q"], "Mean TTFT (ms):"),
    "eval": (["eval", TINY, "--suite", "tiny", "--task", "addition_1", "--limit", 1, "-q"],
             "task                     n      right      95 % interval     finished   accepted"),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] if name == "operators" else []) for name in TABLES])
def test_tables_keep_to_the_width(name):
    """Words and figures of a row on lines of their own; in a pipe it is one line, and as wide as it is."""
    command, titles = TABLES[name]
    assert any(line.startswith(titles) for line in run_hadal(*command).stdout.splitlines())
    for columns in (80, 60):
        text = on_terminal(*command, columns=columns)
        assert widest(text) <= columns
        words = iter(text.split())
        assert all(word in words for word in titles.split())  # in this order


@pytest.mark.parametrize("columns", [80, 33, 20])
def test_answers_are_wrapped_by_words(columns):
    text = on_terminal(*ASK, columns=columns)
    assert widest(text) <= columns
    piped = run_hadal(*ASK).stdout
    assert ESCAPE.sub("", text).split() == piped.replace("</think>", "\n").split()


def test_a_pipe_gets_every_byte():
    assert "\x1b" not in run_hadal(*ASK).stdout and "</think>" in run_hadal(*ASK).stdout


def test_reasoning_is_dimmed_or_labelled():
    colored = on_terminal(*ASK)
    assert colored.startswith("\x1b[2m") and "\x1b[0m\n\n" in colored and "[reasoning]" not in colored
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        plain = on_terminal(*ASK, env=env)
        assert "\x1b" not in plain
        assert plain.startswith("[reasoning]\n") and "\n\n[answer]\n" in plain
    assert on_terminal(*ASK, env={"NO_COLOR": ""}) == colored  # empty: not set


SLOW = [HADAL, "generate", TINY, "-p", "x", "--thinking", "on", "-q", "--backend", "null", "--null-step-us", 20000]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_dimmed_terminal(number):
    terminal = Terminal(*SLOW)
    terminal.wait_for("\x1b[2m")
    terminal.process.send_signal(number)
    assert terminal.close() == -number
    assert terminal.seen.endswith("\x1b[0m")


def test_a_stopped_program_leaves_no_dimmed_prompt():
    terminal = Terminal(*SLOW)
    terminal.wait_for("\x1b[2m")
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.wait_for("\x1b[0m")
    terminal.process.send_signal(signal.SIGCONT)
    terminal.wait_for("\x1b[2m")
    terminal.process.terminate()
    assert terminal.close() == -signal.SIGTERM and terminal.seen.endswith("\x1b[0m")


def test_ctrl_c_in_dimmed_reasoning_ends_it(tmp_path):
    chat = Terminal(HADAL, "chat", TINY, "--backend", "null", "--null-step-us", 20000, env={"XDG_STATE_HOME": str(tmp_path)})
    chat.wait_for("> ")
    chat.type("x\n")
    chat.wait_for("\x1b[2m")
    chat.process.send_signal(signal.SIGINT)
    chat.wait_for("\x1b[0m")
    chat.wait_for("stopped]")
    chat.wait_for("> ")
    chat.type("x\n")
    chat.wait_for("\x1b[2m")
    chat.process.terminate()  # and the modes of line editing
    assert chat.close() == -signal.SIGTERM and chat.seen.endswith("\x1b[0m")


def test_a_signal_at_a_prompt_leaves_no_changed_terminal(tmp_path):
    chat = Terminal(HADAL, "chat", TINY, "--backend", "null", env={"XDG_STATE_HOME": str(tmp_path)})
    chat.wait_for("> ")
    chat.process.send_signal(signal.SIGHUP)
    assert chat.close() == -signal.SIGHUP


def test_chat_labels_reasoning_in_a_pipe(tmp_path):
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    text = run_hadal("chat", TINY, "-q", input="What is 2 + 2?\n", env=env).stdout
    assert text.startswith("[reasoning]\n") and "\n\n[answer]\n" in text
    text = run_hadal("chat", TINY, "-q", "--thinking", "off", input="What is 2 + 2?\n", env=env).stdout
    assert "[" not in text


@pytest.mark.parametrize("columns", [80, 40, 20])
def test_progress_keeps_to_the_width(tmp_path, columns):
    """A bar that is wider than the terminal would fill it line by line."""
    name = "a" * 60 + ".safetensors"
    hub = Hub({"config.json": b"{}", name: os.urandom(3_000_000)})
    hub.faults[name] = [None, cut(1_500_000)]
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "no_proxy": "127.0.0.1"}
    text = on_terminal("pull", hub.repo, columns=columns, env=env)
    hub.close()
    bars = [part for line in text.split("\n") for part in line.split("\r") if "%" in part]
    assert bars and all(len(ESCAPE.sub("", bar)) < columns for bar in bars)
    assert any("MB" in bar for bar in bars)


def test_generate_and_bench_draft_like_serve():
    told = run_hadal(*ASK[:-1]).stderr
    assert re.search(r"\d+ of \d+ drafts accepted", told), told
    assert run_hadal(*ASK, "--draft-tokens", "0").stdout == run_hadal(*ASK).stdout
    for kind in ("throughput", "latency"):
        text = run_hadal("bench", kind, TINY, "--num-prompts", 1, "--input-len", 8, "--output-len", 160, "-q").stdout
        assert "Draft 1 accepted (%)" in text
    no_layer = ROOT / "tests" / "golden" / "v3_moonlight"
    text = run_hadal("bench", "latency", "--dummy-weights", no_layer, "--num-prompts", 1, "--input-len", 8, "--output-len", 4, "-q")
    assert text.returncode == 0, text.stderr  # without an MTP layer there are none
