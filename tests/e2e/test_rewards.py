"""Rewards of a command and of a server: the curve of the built-in checker to the bit, and failures that
are retried, dropped or named, never guessed."""

import contextlib
import http.server
import json
import sys
import threading
import time

import pytest
from test_train import MODEL, digests, steps

# As the built-in checker of sort. Argument 1 says what goes wrong, 2 is a file that counts the starts.
SCORER = """
import json, os, sys, time
fault, starts = sys.argv[1], int(open(sys.argv[2]).read() or 0) + 1
open(sys.argv[2], "w").write(str(starts))
assert all(int(fd) < 4 for fd in os.listdir("/proc/self/fd")), "files are open"
for number, line in enumerate(sys.stdin):
    q = json.loads(line)
    right = [float(a["finished"] and a["text"].strip() == q["checker"]["expect"]) for a in q["answers"]]
    if fault == "dies once" and starts == 1 and number == 1:
        sys.exit(3)
    if fault == "says why":
        sys.exit("no key for the judge")
    if fault == "hangs":
        time.sleep(1000)
    if fault == "floods":
        os.write(1, b"x" * (3 << 20))
    if fault == "short":
        right.pop()
    if fault == "nan":
        right[0] = float("nan")
    print(json.dumps({"id": q["id"], "rewards": right}), flush=True)
"""


def score(q):
    return [float(a["finished"] and a["text"].strip() == q["checker"]["expect"]) for a in q["answers"]]


@contextlib.contextmanager
def judge(answer):
    """A server; answer(number of the request, question) returns a status and a body."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            q = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(q.get("id"))
            status, body = answer(len(asked), q)
            with contextlib.suppress(OSError):  # the client may have left
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def good(_, q):
    return 200, json.dumps({"id": q["id"], "rewards": score(q)}).encode()


@pytest.fixture
def command(tmp_path):
    script, starts = tmp_path / "scorer.py", tmp_path / "starts"
    script.write_text(SCORER)

    def line(fault):
        starts.write_text("")
        return f"{sys.executable} '{script}' '{fault}' \"{starts}\""

    line.starts = starts
    return line


@pytest.fixture
def rl(hadal, tmp_path):
    def run(out, *args, code=0, size=(3, 4, 40)):
        log = tmp_path / f"{out}.log"
        groups, samples, tokens = map(str, size)
        done = hadal(
            "rl", MODEL, "--task", "sort", "--out", tmp_path / out, "--log", log, "--groups", groups, "--samples", samples,
            "--max-tokens", tokens, "--context", "128", "--lr", "1e-4", "--seed", "3", "-q", *args,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return steps(log) if code == 0 else done.stderr

    return run


def curve(lines):
    return [[line[k] for k in ("reward", "loss", "gradient_norm", "optimizer_steps", "unscored_groups")] for line in lines]


def test_the_same_curve_whoever_scores(rl, command, tmp_path):
    """Also with a command that dies in the middle, and a server that refuses first."""

    def moody(number, q):
        return (503, b"busy") if number == 2 else (200, b"{") if number == 3 else good(number, q)

    own = rl("own", "--steps", "2")
    assert any(line["gradient_norm"] > 0 for line in own)
    other = rl("command", "--steps", "2", "--reward-command", command("dies once"))
    assert command.starts.read_text() == "2"
    with judge(moody) as (url, asked):
        third = rl("url", "--steps", "2", "--reward-url", url)
        assert sorted(set(asked)) == list(range(6)) and len(asked) == 8
    assert curve(own) == curve(other) == curve(third)
    whole = digests(tmp_path / "own" / "step-00000002")[:2]
    assert whole == digests(tmp_path / "command" / "step-00000002")[:2] == digests(tmp_path / "url" / "step-00000002")[:2]


SMALL = (2, 2, 2)
FAULTS = {
    "says why": "the command ended; it wrote: no key for the judge",
    "hangs": "no reply in time",
    "floods": "a reply without an end",
    "short": "1 rewards for 2 answers",
    "nan": "reply",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_command_that_fails_stops_the_run(rl, command, tmp_path, fault):
    args = ["--steps", "1", "--reward-retries", "1", "--reward-timeout", "0.3" if fault == "hangs" else "60"]
    why = rl("out", *args, "--reward-command", command(fault), code=4, size=SMALL)
    assert "rewards of prompt 0, after 2 tries: " in why and FAULTS[fault] in why
    assert command.starts.read_text() == "2" and not (tmp_path / "out").exists()


def test_prompts_without_rewards_are_dropped_and_counted(rl, command):
    drop = ["--steps", "1", "--reward-retries", "0", "--reward-failures", "drop"]
    line = rl("command", *drop, "--reward-command", command("short"), size=SMALL)[0]
    assert line["unscored_groups"] == 2 and line["equal_groups"] == line["optimizer_steps"] == line["reward"] == 0

    def one_of_two(number, q):
        return good(number, q) if q["id"] == 1 else (200, b'{"id": 0, "rewards": [1e9, 0]}')

    with judge(one_of_two) as (url, _):
        line = rl("url", *drop, "--reward-url", url, size=SMALL)[0]
    assert line["unscored_groups"] == 1 and line["equal_groups"] == 1


def test_a_server_that_hangs_or_floods_stops_the_run(rl):
    def hang(number, q):
        time.sleep(3)
        return good(number, q)

    args = ["--steps", "1", "--reward-retries", "1"]
    with judge(hang) as (url, asked):
        assert "tries: " in rl("out", *args, "--reward-timeout", "0.2", "--reward-url", url, code=4, size=SMALL)
        assert 3 <= len(asked) <= 4
    with judge(lambda *_: (200, b" " * (3 << 20))) as (url, _):
        assert "a reply over 1048576 bytes" in rl("out", *args, "--reward-url", url, code=4, size=SMALL)


def test_bad_options_of_rewards_are_refused(refused, tmp_path):
    def why(*args):
        return refused("rl", MODEL, "--task", "sort", "--out", tmp_path / "out", *args)

    assert "give one of --reward-command" in why("--reward-command", "x", "--reward-url", "http://x")
    assert "nowhere" in why("--reward-command", "/nowhere 1")
    assert "is empty" in why("--reward-command", "  ")
    assert "must begin with http" in why("--reward-url", "ftp://x")
    assert "--reward-failures" in why("--reward-failures", "guess")
