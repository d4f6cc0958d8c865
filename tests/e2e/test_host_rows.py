"""What the command line, the environment and the host do wrong: each row names what it is about.

Nothing here depends on the model; the shipped one serves, mostly over the null device.
"""

import contextlib
import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import subprocess

import pytest
from conftest import HADAL, ROOT, as_root, run_hadal
from serving import TINY, Server, wait_until

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ASK = ["generate", TINY, "-p", "hi", "--max-tokens", "3", "-q"]
SERVE = ["serve", TINY, "--port", "0"]
NULL = [*SERVE, "--backend", "null"]
CONFIGS = ROOT / "tests" / "configs"
NO_MTP = ROOT / "tests" / "golden" / "v3_moonlight"

instrumented = pytest.mark.skipif("asan" in HADAL or "tsan" in HADAL, reason="the sanitizer itself needs what is taken away")


def limited(what, n):
    return {"preexec_fn": lambda: resource.setrlimit(what, (n, n))}


# ---- refused with a sentence ----

LAYOUT = ["bench", "latency", "--dummy-weights", CONFIGS / "tiny_v32.json", "--emulate-rank"]

REFUSED = {
    "L05 nan": ([*ASK, "--temperature", "nan"], 2, "--temperature: 'nan' is not a number"),
    "L05 infinity": ([*ASK, "--top-p", "inf"], 2, "--top-p: 'inf' is not a number"),
    "L05 minus infinity": ([*ASK, "--min-p", "-Infinity"], 2, "--min-p: '-Infinity' is not a number"),
    "L05 1e999": ([*ASK, "--temperature", "1e999"], 2, "--temperature: 1e999 is out of range 0..100"),
    "L05 hexadecimal": ([*ASK, "--temperature", "0x1p3"], 2, "--temperature: '0x1p3' is not a number"),
    "L05 comma": ([*ASK, "--temperature", "0,5"], 2, "--temperature: '0,5' is not a number"),
    "L14 generate": ([*ASK, "--context", "8193"], 2, "a context of 8193 tokens; this model knows 8192 positions"),
    "L14 chat": (["chat", TINY, "--context", "8193"], 2, "8193"),
    "L14 serve": ([*NULL, "--context", "2147483647"], 2, "8192"),
    "L14 cache beyond memory": ([*SERVE, "--kv-tokens", "102400000000"], 4, "102400000000 tokens; "),
    "L14 cache beyond numbers": ([*SERVE, "--kv-tokens", "9223372036854775807"], 4, "no memory for"),
    "L14 side by side beyond memory": ([*SERVE, "--max-running", "4096", "--step-tokens", "1048576", "--kv-tokens", "100000000000"], 4, "no memory for"),
    "L15 more ranks than heads": ([*LAYOUT, "tp=64"], 2, "cannot be shared by tp 64"),
    "L15 heads that do not divide": ([*LAYOUT, "tp=5"], 2, "cannot be shared by tp 5"),
    "L15 experts that do not divide": ([*LAYOUT, "ep=17,redundant=2"], 2, "cannot be shared by ep 17"),
    "L15 ranks without end": ([*LAYOUT, "ep=99999999"], 2, "not tp=N, ep=N"),
    "L15 no such rank": ([*LAYOUT, "ep=2,rank=2"], 2, "there is no rank 2"),
    "L16 drafts and none": ([*NULL, "--draft-tokens", "2", "--no-drafts"], 2, "--no-drafts"),
    "L16 certificate without key": ([*NULL, "--tls-cert", "/etc/passwd"], 2, "--tls-key"),
    "L16 group without user": ([*NULL, "--group", "nogroup"], 2, "--user"),
    "L16 quotas without keys": ([*NULL, "--key-requests", "1"], 2, "--api-key-file"),
    "L16 precision of no device": ([*NULL, "--precision", "fast"], 2, "precision"),
    "L16 schema and pattern": ([*ASK, "--regex", "a", "--choice", "a|b"], 2, "one of --schema, --regex and --choice"),
    "L16 two sources of a prompt": ([*ASK, "--file", "/etc/passwd"], 2, "--file"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_refused(refused, row):
    words, code, reason = REFUSED[row]
    assert reason in refused(*words, code=code)


DRAFTS = {
    "L16 generate": ["generate", "-p", "the", "--max-tokens", "2", "--draft-tokens", "3"],
    "L16 chat": ["chat", "--draft-tokens", "1"],
    "L16 serve": ["serve", "--port", "0", "--no-sandbox", "--draft-tokens", "7"],
    "L16 eval": ["eval", "--tasks", "TASKS", "--draft-tokens", "1"],
}


@pytest.mark.parametrize("row", DRAFTS)
def test_drafts_without_a_layer_for_them(refused, tmp_path, row):
    """C25 too: asked for by number they are refused, never left out without a word."""
    import make_model
    from toy_models import VOCAB, add_toy_tokenizer

    make_model.write_model(tmp_path / "model", dict(make_model.V3, vocab_size=VOCAB, num_nextn_predict_layers=0))
    add_toy_tokenizer(tmp_path / "model")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"task": "a", "prompt": "the", "max_tokens": 2, "checker": {"type": "exact", "expect": "x"}}) + "\n")
    command, *flags = [str(tasks) if word == "TASKS" else word for word in DRAFTS[row]]
    line = refused(command, tmp_path / "model", *flags)
    assert "has no drafter" in line


KEYS = {
    "L17 short key": ({"HADAL_API_KEY": "short"}, "HADAL_API_KEY: a key has 5 characters"),
    "L17 empty key": ({"HADAL_API_KEY": ""}, "HADAL_API_KEY: a key has 0 characters"),
    "L17 long key": ({"HADAL_API_KEY": "k" * 513}, "HADAL_API_KEY: a key has 513 characters"),
    "L17 key with a space": ({"HADAL_API_KEY": "a key of two words or more"}, "HADAL_API_KEY: a key holds a character"),
    "L17 key with a line feed": ({"HADAL_API_KEY": "0123456789abcdef\n"}, "HADAL_API_KEY: a key holds a character"),
    "L17 admin key": ({"HADAL_ADMIN_KEY": "short"}, "HADAL_ADMIN_KEY: a key has 5 characters"),
    "L17 admin key of other letters": ({"HADAL_ADMIN_KEY": "schlüssel-0123456789"}, "HADAL_ADMIN_KEY: a key holds a character"),
}


@pytest.mark.parametrize("row", KEYS)
def test_environment(refused, row):
    values, reason = KEYS[row]
    assert reason in refused(*NULL, env={**os.environ, **values})


# ---- words of any length ----


@pytest.fixture
def deep():
    """A folder whose path is as long as a path may be for a file in it, with spaces and letters."""
    import tempfile

    with tempfile.TemporaryDirectory() as base:
        path, before = base, os.getcwd()
        os.chdir(base)
        with contextlib.chdir(base) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
            for name in [*["x" * 200] * 18, "a möd él"]:
                os.mkdir(name)
                os.chdir(name)
                path += "/" + name
            for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
                shutil.copy(TINY / file, file)
            yield path
        os.chdir(before)
        subprocess.run(["rm", "-rf", base], check=True)  # paths too long for the library


def test_L38_long_paths(hadal, refused, deep):
    """With 3,700 bytes they work; what is wrong is said at the end of the line, however long."""
    assert hadal("generate", deep, "-p", "hi", "--max-tokens", "3", "-q").stdout == hadal(*ASK).stdout
    os.truncate("model.safetensors", 200_000)
    line = refused("generate", deep, "-p", "hi")
    assert line.endswith("the file may be cut short") and "[...]" in line and len(line.encode()) < 620
    assert "No such file" in refused("inspect", deep + "/missing")


TOO_LONG = {"L38 path": "/" + "y/" * 3000, "L38 name": "z" * 300, "L38 with control characters": "\x1b[2J" * 1000}


@pytest.mark.parametrize("row", TOO_LONG)
def test_paths_that_cannot_be(refused, row):
    line = refused("inspect", TOO_LONG[row])
    assert "File name too long" in line and line.isprintable() and len(line) < 620


@pytest.mark.parametrize("name", ["L38 two words", "L38 naïve ☃", "-", "L38 'quoted\" $(x)"])
def test_odd_names(tmp_path, hadal, name):
    """As a model's folder, and in what the server says of itself."""
    model = tmp_path / name
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("golden", "eval", "*.png"))
    s = Server("--backend", "null", model=model)
    assert s.get("/v1/models").json["data"][0]["id"] == name
    s.close()
    assert hadal("inspect", "--quick", model).returncode == 0


def test_L40_crowded_environment_and_arguments(refused, hadal):
    crowd = {f"VARIABLE_{i}": "x" * 500 for i in range(1000)}
    assert hadal(*ASK, env={**os.environ, **crowd}).stdout == hadal(*ASK).stdout
    line = refused("version", *["y" * 100_000] * 18)
    assert len(line) < 620
    assert len(refused("generate", TINY, "-p", "hi", "--" + "z" * 100_000)) < 620


# ---- signals ----


@pytest.mark.threads
def test_L36_signals(serve):
    """Keys are read again; the state is said; a stray one and a terminal's are nothing."""
    s = serve("--backend", "null")
    for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGTTOU", "SIGTTIN", "SIGXFSZ"):
        s.signal(getattr(signal, name))
        assert s.post("/v1/chat/completions", HI).status == 200, name
    s.close()
    assert s.log.count(b" state ") == 1 and b"running=" in s.log and b"pages_free=" in s.log
    assert s.log.count(b"keys_reloaded") == 1


# ---- other countries ----


@pytest.fixture(scope="module")
def locales(tmp_path_factory):
    """Locales with a decimal comma and with other rules for i, where the tools to make them are."""
    folder = tmp_path_factory.mktemp("locales")
    for name in ("de_DE", "tr_TR"):
        made = shutil.which("localedef") and subprocess.run(["localedef", "-i", name, "-f", "UTF-8", folder / f"{name}.UTF-8"], capture_output=True)
        if not made or not (folder / f"{name}.UTF-8").is_dir():
            pytest.skip("no locales to be made here")
    return folder


@instrumented  # the library that reads LOCPATH forgets what it read
@pytest.mark.parametrize("name", ["C", "de_DE.UTF-8", "tr_TR.UTF-8", "no_SUCH.place", ""])
def test_L34_locale(hadal, locales, name):
    env = {**os.environ, "LC_ALL": name, "LANG": name, "LOCPATH": str(locales)}
    words = [*ASK, "--temperature", "0.75", "--seed", "3", "--json"]

    def text(**options):
        answer = json.loads(hadal(*words, **options).stdout)
        return answer["text"]

    assert text(env=env) == text()
    s = Server("--backend", "null", env=env)
    reply = s.request("POST", "/v1/chat/completions", body=json.dumps({**HI, "temperature": 0.5}), headers={"CONTENT-TYPE": "APPLICATION/JSON", "X-REQUEST-ID": "TITLE-I"})
    assert reply.status == 200 and reply.headers["x-request-id"] == "TITLE-I"
    assert all("," not in line.rsplit(" ", 1)[1] for line in s.get("/metrics").text.splitlines() if not line.startswith("#"))
    s.close()


# ---- what the host does not give ----


def test_L24_no_locked_memory(hadal):
    """None is asked for."""
    assert hadal(*ASK, **limited(resource.RLIMIT_MEMLOCK, 0)).stdout == hadal(*ASK).stdout


@instrumented
def test_little_address_space(hadal):
    """Whatever it is that does not fit, it is said; or all fits, and the answer is right."""
    right, codes = hadal(*ASK).stdout, set()
    for megabytes in (1, 60, 90, 120, 160, 220, 300, 400, 4000):
        done = hadal(*ASK, **limited(resource.RLIMIT_AS, megabytes << 20))
        codes.add(done.returncode)
        if done.returncode == 0:
            assert done.stdout == right
        elif done.returncode != 127 and done.returncode >= 0:  # else the loader gave up, before us
            assert done.returncode == 4 and "memory" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert {0, 4} <= codes


def test_L27_full_disk(hadal, tmp_path):
    """Output, reports and results that find no room are errors, not silence."""
    with open("/dev/full", "w") as full:
        done = hadal(*ASK, stdout=full)
    assert done.returncode == 4 and done.stderr == "error: cannot write to standard output\n"
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[5, 6, 7]")
    done = hadal("logits", TINY, "--tokens", tokens, "--out", "/dev/full", "-q")
    assert done.returncode == 4 and "/dev/full" in done.stderr
    done = hadal("logits", TINY, "--tokens", tokens, "--out", tmp_path / "out.npy", "-q", **limited(resource.RLIMIT_FSIZE, 100))
    assert done.returncode == 4 and "out.npy" in done.stderr


def test_L27_trace_that_does_not_fit(tmp_path):
    """What was written of it is removed, an alarm is given, the service goes on."""
    s = Server("--backend", "null", "--trace-dir", tmp_path, **limited(resource.RLIMIT_FSIZE, 64))
    assert s.post("/start_profile", {}).status == 200
    reply = s.post("/stop_profile", {})
    assert reply.status == 500 and str(tmp_path) in reply.json["error"]["message"]
    assert list(tmp_path.iterdir()) == []
    assert s.post("/start_profile", {"num_steps": 1}).status == 200

    def stopped():
        return s.post("/v1/chat/completions", HI).status == 200 and s.post("/start_profile", {}).status == 200

    wait_until(stopped, "it has stopped by itself")
    assert s.post("/stop_profile", {}).status == 500
    assert list(tmp_path.iterdir()) == []
    assert s.post("/v1/chat/completions", HI).status == 200
    s.close()
    assert s.log.count(b"profile_failed") == 1


def test_L25_full_log(serve):
    """Requests are answered, one alarm is given."""
    s = serve("--backend", "null", "--log-requests", "/dev/full")
    for _ in range(5):
        assert s.post("/v1/chat/completions", HI).status == 200
    s.close()
    assert s.log.count(b"request_log_failed") == 1


def test_L25_log_that_was_full_for_a_while(hadal, tmp_path):
    """What a full disk cut off costs its own line only, and replay reads the rest."""
    log = tmp_path / "log"
    s = Server("--log-requests", log)

    def ask(text, grow):
        size = log.stat().st_size
        resource.prlimit(s.process.pid, resource.RLIMIT_FSIZE, (size + grow, resource.RLIM_INFINITY) if grow else (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert s.post("/v1/completions", {"prompt": text, "max_tokens": 3}).status == 200

    ask("first", 0)
    wait_until(lambda: log.read_bytes().count(b"\n") == 1, "it is logged")
    ask("lost", 50)
    wait_until(lambda: b"lost" not in log.read_bytes() and not log.read_bytes().endswith(b"\n"), "a part of it is")
    ask("second", 0)
    s.close()
    lines = log.read_text().splitlines()
    assert [json.loads(lines[i])["body"].count(word) for i, word in ((0, "first"), (2, "second"))] == [1, 1] and len(lines) == 3
    assert s.log.count(b"request_log_failed") == 1 and s.log.count(b"request_log_goes_on") == 1
    log.write_text("\n".join([lines[0], "", lines[2]]) + "\n")
    assert hadal("replay", log, TINY).stdout.startswith("2 the same, 0 different")


NOWHERE = {
    "L25 log in a folder that is none": (["--log-requests", "/no/such/folder/log"], "/no/such/folder/log"),
    "L25 log that is a folder": (["--log-requests", "/tmp"], "/tmp"),
    "L26 dump in a folder that is none": (["--crash-dump", "/no/such/folder/dump"], "/no/such/folder/dump"),
    "L26 dump where nothing can be made": (["--crash-dump", "/proc/dump"], "/proc/dump"),
    "L26 traces where nothing can be made": (["--trace-dir", "/proc/self"], "--trace-dir /proc/self: "),
}


@pytest.mark.parametrize("row", NOWHERE)
def test_files_that_cannot_be_made(refused, row):
    """Who asks for a record must not lose it in silence: nothing starts."""
    flags, word = NOWHERE[row]
    assert word in refused(*NULL, *flags, code=4)


def test_L26_traces_that_cannot_be_made(serve, tmp_path):
    """A folder that was there at the start and then was not."""
    traces = tmp_path / "traces"
    traces.mkdir()
    s = serve("--backend", "null", "--trace-dir", traces)
    assert s.post("/start_profile", {}).status == 200
    traces.rmdir()
    reply = s.post("/stop_profile", {})
    assert reply.status == 500 and str(traces) in reply.json["error"]["message"]
    assert s.post("/v1/chat/completions", HI).status == 200


@pytest.mark.parametrize("home", ["/proc/nowhere", "relative", "", "/dev/null"])
def test_L26_home_that_cannot_be_written(home):
    """The history of a conversation is left out."""
    done = run_hadal("chat", TINY, "--max-tokens", "2", input="hi\n", env={**os.environ, "XDG_STATE_HOME": home, "HOME": home})
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("flag", ["--log-requests", "--crash-dump"])
def test_L25_records_into_a_pipe(refused, tmp_path, flag):
    """Without a reader nothing starts, and nothing waits; one that reads nothing costs lines."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert f"{pipe}: No such device" in refused(*NULL, flag, pipe, code=4)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    s = Server("--backend", "null", flag, pipe)
    for _ in range(40):
        assert s.post("/v1/completions", {"prompt": "word " * 2000, "max_tokens": 2}).status == 200
    s.close()
    os.close(reader)
    assert s.log.count(b"request_log_failed") == (flag == "--log-requests")


@contextlib.contextmanager
def two_logs(tmp_path):
    log = tmp_path / "log"
    both = [Server("--backend", "null", "--log-requests", log) for _ in range(2)]
    yield log, both
    for s in both:
        s.close()


def test_two_servers_with_one_log(tmp_path):
    """Their lines lie side by side, each whole."""
    with two_logs(tmp_path) as (log, both):
        for i in range(20):
            body = {"prompt": f"request {i} " + "word " * 300, "max_tokens": 20, "ignore_eos": True}
            assert both[i % 2].post("/v1/completions", body).status == 200
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 20 and {line["status"] for line in lines} == {200}


def test_L28_L29_nothing_is_left_anywhere(tmp_path):
    """L28, L29: no folder, socket or lock of its own is made: none can be stale or foreign."""
    places = {name: tmp_path / name for name in ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME")}
    for place in places.values():
        place.mkdir()
    work = tmp_path / "work"
    work.mkdir(mode=0o555)
    s = Server("--backend", "null", env={k: str(v) for k, v in places.items()}, cwd=work)
    assert s.post("/v1/chat/completions", HI).status == 200
    for fd in pathlib.Path(f"/proc/{s.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            assert str(tmp_path) not in os.readlink(fd)
    s.process.kill()
    s.wait()
    assert all(list(place.iterdir()) == [] for place in [*places.values(), work])


@as_root
@pytest.mark.parametrize("there", ["", "/sys/devices/system/cpu", "/sys/bus/cpu/devices/cpu0", "/sys/devices/system/node/node0"])
def test_L33_without_sys(there):
    """Nothing, or a part, of what names the processors: nobody complains, and as many are counted."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody have mounts of his own (unshare -m)")
    hide = f"mount -t tmpfs -o size=64k none /sys; mkdir -p '/sys/{there}'; exec"
    said = subprocess.run(["unshare", "-m", "sh", "-c", f"{hide} '{HADAL}' version"], capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == run_hadal("version").stdout


@as_root
@instrumented
def test_L33_without_proc_and_shared_memory(tmp_path):
    """Figures about the process are left out, the rest is as ever. FT87: no name is looked up."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody have mounts of his own (unshare -m)")
    hide = "mount -t tmpfs -o size=64k none /proc; mount -t tmpfs -o size=64k none /dev/shm; mount --bind /dev/null /etc/resolv.conf; mount --bind /dev/null /etc/hosts; exec"
    words = " ".join(f"'{w}'" for w in [HADAL, *map(str, NULL)])
    process = subprocess.Popen(["unshare", "-m", "sh", "-c", f"{hide} {words}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = process.stdout.readline().decode()
    assert first.startswith("hadal "), first + process.stderr.read().decode()
    port = int(first.rsplit(":", 1)[1].split()[0])
    s = Server.__new__(Server)
    s.port, s.process = port, process
    wait_until(lambda: s.get("/health").text == "ok", "it is ready")
    assert s.post("/v1/chat/completions", HI).status == 200
    assert "hadal_requests_total" in s.get("/metrics").text or s.get("/metrics").status == 200
    process.terminate()
    process.communicate()
    assert process.returncode == 0


# ---- names ----


def test_FT87_names_are_looked_up_at_the_start(refused, serve):
    """One that is not known ends the start; a server with an address needs no names."""
    assert "no.such.host.invalid" in refused(*NULL, "--host", "no.such.host.invalid", code=4)
    s = serve("--backend", "null", "--host", "localhost")
    assert s.post("/v1/chat/completions", HI).status == 200


# ---- model files ----


def test_FT88_files_that_fail_to_be_read(refused, tmp_path):
    """A read that fails names the file and the place; short reads are gone on with."""
    model = shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("golden", "eval"))
    for name in ("config.json", "tokenizer.json"):
        file, kept = model / name, (model / name).read_bytes()
        file.unlink()
        file.symlink_to("/proc/self/mem")  # a regular file whose first page cannot be read
        line = refused("generate", model, "-p", "hi", code=4)
        assert line == f"error: {file}: byte 0: Input/output error"
        file.unlink()
        file.write_bytes(kept)
    long = pathlib.Path("/proc/kallsyms")  # comes in pieces, and says that it has no bytes
    if long.exists():
        (model / "config.json").unlink()
        (model / "config.json").symlink_to(long)
        assert "config.json: " in refused("inspect", model)


ODD_FILES = {
    "fifo": lambda path: os.mkfifo(path),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "folder": lambda path: path.mkdir(),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "full": lambda path: path.symlink_to("/dev/full"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_model_files_that_are_none(hadal, tmp_path, name, kind):
    """Refused by name and never waited for; what may be absent may also be nothing."""
    os.chdir("/")
    model = shutil.copytree(TINY, tmp_path / "m", ignore=shutil.ignore_patterns("golden", "eval", "*.png"))
    (model / name).unlink(missing_ok=True)
    ODD_FILES[kind](model / name)
    done = hadal("generate", model, "-p", "hi", "--max-tokens", "2", "-q")
    absent = kind in ("loop", "dangling") and name not in ("config.json", "tokenizer.json")
    harmless = name == "generation_config.json"  # never a reason to refuse a model
    assert done.returncode == (0 if absent or harmless else 2), done.stderr
    assert done.returncode == 0 or (name in done.stderr and done.stderr.count("\n") == 1)


# ---- a peer that is not there any more ----

GET = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
CLIENT = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
s.sendall(sys.stdin.buffer.read())
s.setblocking(False)
print("sent", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them: (enter server's, enter client's, cut)."""
    holders = []
    for _ in range(2):
        holder = subprocess.Popen(["unshare", "-n", "sleep", "1000"], stderr=subprocess.DEVNULL)
        holders.append(holder)
    wait_until(lambda: all(os.path.exists(f"/proc/{h.pid}/ns/net") for h in holders), "they live")
    enter = [["nsenter", "-t", str(h.pid), "-n"] for h in holders]

    def run(n, *words):
        return subprocess.run([*enter[n], *words], capture_output=True).returncode == 0

    own = os.readlink("/proc/self/ns/net")
    ready = shutil.which("ip") and shutil.which("nsenter")
    if ready:
        wait_until(lambda: any(h.poll() is not None for h in holders) or all(os.readlink(f"/proc/{h.pid}/ns/net") != own for h in holders), "they are apart")
        ready = all(h.poll() is None for h in holders)
        ready = ready and run(0, "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", str(holders[1].pid))
        ready = ready and all(run(n, "ip", "addr", "add", f"10.0.0.{n + 1}/24", "dev", f"v{n}") and run(n, "ip", "link", "set", f"v{n}", "up") and run(n, "ip", "link", "set", "lo", "up") for n in (0, 1))
    if ready:
        yield enter[0], enter[1], lambda: run(1, "ip", "link", "set", "v1", "down")
    for holder in holders:
        holder.kill()
        holder.wait()
    if not ready:
        pytest.skip("this system lets nobody have a network of his own (unshare -n, ip link)")


@as_root
@pytest.mark.parametrize("stream", [True, False])
def test_FT13_peer_behind_a_cut_cable(two_hosts, stream):
    """No FIN and no RST will ever come: it is missed, and its place is free again."""
    of_server, of_client, cut = two_hosts
    words = [*of_server, HADAL, *NULL, "--host", "10.0.0.1", "--insecure-no-auth", "--no-sandbox", "--stall-seconds", "1", "--ping-seconds", "1", "--null-step-us", "200000"]
    server = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    port = int(server.stdout.readline().decode().rsplit(":", 1)[1].split()[0])

    def figure(name):
        said = subprocess.run([*of_server, "python3", "-c", GET, f"http://10.0.0.1:{port}/metrics"], capture_output=True, text=True).stdout
        return sum(float(line.rsplit(" ", 1)[1]) for line in said.splitlines() if line.startswith(name))

    wait_until(lambda: figure("hadal_http_connections") > 0, "it listens")
    body = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": stream})
    request = f"POST /v1/completions HTTP/1.1\r\nHost: 10.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    client = subprocess.Popen([*of_client, "python3", "-c", CLIENT, "10.0.0.1", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    client.stdin.write(request.encode())
    client.stdin.close()
    assert client.stdout.readline() == b"sent\n"
    wait_until(lambda: figure("hadal_living_answers") == 1, "it runs")
    assert cut()
    wait_until(lambda: figure("hadal_living_answers") == 0, "it is missed")
    server.terminate()
    client.kill()
    client.wait()
    server.communicate()
    assert server.returncode == 0
