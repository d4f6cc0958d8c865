"""hadal chat: a conversation through a pipe and on a terminal."""

import json
import os
import re
import signal

import pytest
from conftest import HADAL, ROOT
from terminal import Terminal

MODEL = ROOT / "models" / "tiny-v4"


@pytest.fixture
def chat(hadal, tmp_path):
    def run(text, *args):
        env = dict(os.environ, XDG_STATE_HOME=str(tmp_path))
        result = hadal("chat", MODEL, "-q", "--max-tokens", 120, *args, input=text, env=env)
        assert result.returncode == 0, result.stderr
        return result

    return run


def test_thinks_and_answers(chat):
    result = chat("What is 347 + 586?\n")
    assert "933" in result.stdout.split("\n\n")[-1]
    assert "\033" not in result.stdout


def test_a_conversation_goes_on_and_is_saved(chat, tmp_path):
    saved = tmp_path / "talk.json"
    chat(f"What is 2 + 2?\nWhat is 3 + 5?\n/save {saved}\n", "--thinking", "off", "--system", "Be brief.")
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert "4" in messages[2]["content"] and "8" in messages[4]["content"]


def test_an_answer_is_the_one_of_generate(chat, hadal, tmp_path):
    saved = tmp_path / "talk.json"
    options = ["--temperature", 1, "--seed", 3]
    chat(f"Tell me a story.\n/save {saved}\n", *options)
    answer = json.loads(saved.read_text())[-1]
    alone = hadal("generate", MODEL, "-p", "Tell me a story.", "--thinking", "on", "--max-tokens", 120, "--json", *options)
    assert [p["text"] for p in json.loads(alone.stdout)["parts"]] == [answer["reasoning_content"], answer["content"]]


def test_commands(chat, tmp_path):
    saved = tmp_path / "talk.json"
    result = chat("What is 2 + 2?\n/undo\n/undo\n/thinking maybe\n/thinking\n/temprature 1\n/temperature x\n"
                  f"/system Be brief.\n/thinking off\nWhat is 3 \\\n+ 5?\n/retry\n/save {saved}\n/help\n/quit\nnot read\n")
    for line in ("nothing was said yet", "/thinking is auto, on or off, not 'maybe'", "/thinking needs auto|on|off",
                 "unknown command /temprature; did you mean /temperature?", "not 'x'", "/retry"):
        assert line in result.stderr
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == "What is 3 \n+ 5?"


def test_a_file_may_be_said_and_a_bad_one_loses_nothing(chat, tmp_path):
    (tmp_path / "q.txt").write_text("What is 2 + 2?")
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    result = chat(f"/file {tmp_path}/none.txt\n/file {tmp_path}/nul.txt\n/thinking off\n/file {tmp_path}/q.txt\n")
    assert "none.txt" in result.stderr and "NUL byte at 1" in result.stderr
    assert "4" in result.stdout


def test_what_is_too_long_is_taken_back(chat, tmp_path):
    saved = tmp_path / "talk.json"
    result = chat("word " * 3000 + f"\nWhat is 2 + 2?\n/save {saved}\n", "--context", 600, "--thinking", "off")
    assert "prompt is too long: " in result.stderr and "> 599 maximum" in result.stderr
    assert len(json.loads(saved.read_text())) == 2


def test_an_answer_is_not_computed_again_however_oddly_it_is_spelled(hadal, tmp_path):
    env = dict(os.environ, XDG_STATE_HOME=str(tmp_path))
    hot = ["--temperature", 2, "--top-p", 0.98, "--seed", 10, "--max-tokens", 200, "--thinking", "off"]
    result = hadal("chat", MODEL, *hot, input="Tell me a story.\nAnd?\n", env=env)
    figures = re.findall(r"\[(\d+) tokens.* (\d+) of (\d+) prompt tokens cached", result.stderr)
    (said, _, asked), (_, cached, _) = [[int(n) for n in f] for f in figures]
    assert cached == (asked + said - 2) // 128 * 128 > 0, result.stderr


def start_chat(state, *args):
    return Terminal(HADAL, "chat", MODEL, *args, env={"XDG_STATE_HOME": str(state)})


def test_on_a_terminal(tmp_path):
    t = start_chat(tmp_path, "--max-tokens", 150)
    t.wait_for("> ")
    t.type("What is 347 + 586?\n")
    t.wait_for("\033[2m")  # thinking is dimmed
    t.wait_for("\033[0m")
    t.wait_for("cached")
    t.wait_for("> ")
    assert "933" in t.seen
    t.type("\x10\x01\x0bWhat is 2 + 2?\n")  # up, home, cut: lines are edited
    t.wait_for("cached")
    t.wait_for("> ")
    t.type("/quit\n")
    assert t.close() == 0
    assert "What\\0402\\040+" in (tmp_path / "hadal" / "history").read_text().replace("is\\040", "")


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path):
    t = start_chat(tmp_path, "--temperature", 1, "--max-tokens", 3000, "--thinking", "off")
    t.wait_for("> ")
    t.type("Tell me a story.\n")
    t.wait_for(" the ")
    os.kill(t.process.pid, signal.SIGINT)
    t.wait_for("stopped]")
    t.wait_for("> ")
    t.type("/quit\n")
    assert t.close() == 0


@pytest.mark.parametrize("moment", ["> ", "\033[2m", "cached", "interrupted"])
def test_ctrl_d_leaves_whenever_it_is_typed(tmp_path, moment):
    """At a prompt before the line is edited, while an answer is written, behind it: many times, as
    the terminal's own mode and the editor's take turns."""
    for _ in range(5):
        t = start_chat(tmp_path, "--max-tokens", 8)
        t.wait_for("> ")
        if moment == "interrupted":
            os.kill(t.process.pid, signal.SIGINT)
        elif moment != "> ":
            t.type("What is 2 + 2?\n")
            t.wait_for(moment)
        t.type("\x04")
        assert t.close() == 0
