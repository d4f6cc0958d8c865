"""hadal pull against a hub that cuts, corrupts, redirects, stalls and lies, and the names it leaves behind."""

import fcntl
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import threading

import hub as hubs
import pytest
from conftest import HADAL, ROOT, run_hadal
from hub import COMMIT, Hub
from serving import wait_until

TINY = ROOT / "models" / "tiny-v3"
WEIGHTS = "model.safetensors"
BYTES = bytes(range(256)) * 1200  # several reads, several writes
FILES = {"config.json": b'{"model_type": "deepseek_v2"}', WEIGHTS: BYTES, "tokenizer.json": b"{}", "README.md": b"# no"}
TOKEN = "hf_verysecrettoken"


class Puller:
    def __init__(self, home):
        self.home, self.cache = home, home / "hub"

    def environment(self, hub, **more):
        kept = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and not k.startswith("HF_")}
        return {**kept, "HF_HOME": str(self.home), "HF_ENDPOINT": hub.url, **more}

    def __call__(self, hub, *flags, name=None, env=None, **process):
        return run_hadal("pull", *flags, name or hub.repo, env=self.environment(hub, **(env or {})), **process)

    def folder(self, hub):
        return self.cache / ("models--" + hub.repo.replace("/", "--"))

    def snapshot(self, hub):
        return self.folder(hub) / "snapshots" / COMMIT

    def partial(self, hub, data):
        return self.folder(hub) / "blobs" / (hubs.sha256(data) + ".incomplete")


@pytest.fixture
def pull(tmp_path):
    return Puller(tmp_path / "home")


@pytest.fixture
def hub():
    started = []

    def start(files=FILES, **options):
        started.append(Hub(files, **options))
        return started[-1]

    yield start
    for h in started:
        h.close()


def complete(pull, hub, result, names=("config.json", "tokenizer.json", WEIGHTS)):
    """The folder is printed, holds these files with their bytes, and nothing half-made is beside them."""
    assert result.returncode == 0, result.stderr
    snapshot = pull.snapshot(hub)
    assert result.stdout == f"{snapshot}\n"
    found = {str(p.relative_to(snapshot)) for p in snapshot.rglob("*") if not p.is_dir()}
    assert found == set(names)
    for name in names:
        assert (snapshot / name).is_symlink()
        assert (snapshot / name).read_bytes() == hub.files[name]
    blobs = {p.name for p in (pull.folder(hub) / "blobs").iterdir()}
    assert blobs == {hubs.sha256(hub.files[n]) if n in hub.large else hubs.git_sha1(hub.files[n]) for n in names}
    assert (pull.folder(hub) / "refs" / "main").read_text() == COMMIT


def failed(pull, hub, result, code, *words):
    """One sentence says why; the model is not there under its name."""
    assert result.returncode == code, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: "), result.stderr
    for word in words:
        assert word in last, last
    assert result.stdout == ""
    assert not (pull.folder(hub) / "refs").exists() and not pull.snapshot(hub).exists()


# ---- what works ----


def test_pulls_what_a_model_needs(pull, hub):
    h = hub()
    complete(pull, h, pull(h))
    asked = len(h.asked)
    complete(pull, h, pull(h))  # nothing is missing: only the listing is read
    assert len(h.asked) == asked + 1


def test_all_pulls_folders_and_odd_names_too(pull, hub):
    names = {"a/b/c.txt": b"deep", "odd name %&?#+ü.json": b"[]", "empty.json": b"", "same.json": b"[]"}
    h = hub({**FILES, **names})
    complete(pull, h, pull(h, "--all"), h.files)


def test_from_nothing_to_an_answer(pull, hub):
    """The tiny model is pulled and then used by its name, by every command."""
    files = {p.name: p.read_bytes() for p in TINY.iterdir() if p.is_file()}
    h = hub(files, repo="deepseek-ai/tiny-v3")
    assert pull(h, "-q").returncode == 0
    env = pull.environment(h)
    name = h.repo
    text = run_hadal("generate", name, "-p", "What is 2 + 2?", "--max-tokens", "4", "-q", env=env)
    assert text.returncode == 0 and text.stdout == run_hadal("generate", TINY, "-p", "What is 2 + 2?", "--max-tokens", "4", "-q").stdout
    assert run_hadal("inspect", name + "@main", "--json", env=env).returncode == 0
    assert run_hadal("inspect", f"{name}@{COMMIT}", env=env).returncode == 0
    assert run_hadal("tokenize", name, env=env, input="hi").stdout == run_hadal("tokenize", TINY, input="hi").stdout


def test_a_pulled_model_is_served_from_the_sandbox(pull, hub, serve):
    files = {p.name: p.read_bytes() for p in TINY.iterdir() if p.is_file()}
    h = hub(files, repo="deepseek-ai/tiny-v3")
    assert pull(h, "-q").returncode == 0
    server = serve("--backend", "null", model="deepseek-ai/tiny-v3", env=pull.environment(h))
    assert server.get("/v1/models").json["data"][0]["id"] == "deepseek-ai/tiny-v3"


def test_listing_without_digests(pull, hub):
    """Older hubs: sizes and digests come with the headers of each file."""
    h = hub()
    h.changed = {name: {"size": None, "blobId": None, "lfs": None} for name in FILES}
    complete(pull, h, pull(h))
    assert ("HEAD", 0) in h.requests_of(WEIGHTS)


def test_revisions(pull, hub):
    h = hub()
    h.revision = "refs/pr/1"
    result = pull(h, name="org/model@refs/pr/1")
    assert result.returncode == 0, result.stderr
    assert (pull.folder(h) / "refs" / "refs" / "pr" / "1").read_text() == COMMIT
    assert run_hadal("tokenize", "org/model", env=pull.environment(h)).returncode == 2  # main is not there


def test_files_come_side_by_side(pull, hub):
    """Each answer waits for three others: one after the other would never end."""
    parts = {f"model-{i}.safetensors": bytes([i]) * 1000 for i in range(4)}
    h = hub({"config.json": b"{}", **parts})
    together = threading.Barrier(4, timeout=60)

    def wait(handler, data, first):
        together.wait()
        handler.send_file(data, first)

    h.faults = {name: [None, wait] for name in parts}
    complete(pull, h, pull(h), h.files)


# ---- what networks do ----

F = FILES[WEIGHTS]
TRANSIENT = {
    "cut at the start": [hubs.cut(0)],
    "cut in the middle": [hubs.cut(100000)],
    "cut again and again": [hubs.cut(n) for n in (1, 1000, 100000, 200000, len(F) - 1)],
    "stalled": [hubs.stall(100000)],
    "corrupted once": [hubs.corrupt],
    "no ranges": [hubs.cut(100000), hubs.without_ranges],
    "server errors": [hubs.answer(500), hubs.answer(502), hubs.answer(504)],
    "too many requests": [hubs.answer(429, Retry_After="1")],
    "range not satisfiable": [hubs.cut(100000), hubs.answer(416)],
    "redirected within": [hubs.redirect("/org/model/resolve/x/" + WEIGHTS)],
}


@pytest.mark.parametrize("row", TRANSIENT)
def test_what_passes(pull, hub, row):
    h = hub()
    h.faults[WEIGHTS] = list(TRANSIENT[row])
    complete(pull, h, pull(h, "--timeout", "1", "--jobs", "1"))
    assert not h.faults[WEIGHTS]


@pytest.mark.parametrize("where", ["", "config.json"])
def test_listing_and_small_files_are_tried_again_too(pull, hub, where):
    h = hub()
    h.faults[where] = [hubs.cut(3), hubs.answer(503)]
    complete(pull, h, pull(h))


def test_continues_where_it_was_cut(pull, hub):
    h = hub()
    h.faults[WEIGHTS] = [None, hubs.cut(100000)]  # the first answer is the redirect
    complete(pull, h, pull(h))
    assert [first for _, first in h.requests_of(WEIGHTS)] == [0, 0, 100000, 100000]


def test_continues_after_it_was_stopped(pull, hub):
    h = hub()
    h.faults[WEIGHTS] = [hubs.stall(200000)]
    process = subprocess.Popen([HADAL, "pull", h.repo], env=pull.environment(h), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    partial = pull.partial(h, F)
    wait_until(lambda: partial.exists() and partial.stat().st_size == 200000, "half of the file")
    process.kill()
    process.communicate()
    assert not pull.snapshot(h).exists()
    complete(pull, h, pull(h))
    assert h.requests_of(WEIGHTS)[-1] == ("GET", 200000)


def test_what_others_left_is_not_trusted(pull, hub):
    """A partial file with wrong bytes, one that is too long, and one that is whole."""
    h = hub()
    partial = pull.partial(h, F)
    partial.parent.mkdir(parents=True)
    for left in (b"x" * 1000, F + b"more", F, F[:-1] + b"x"):
        shutil.rmtree(partial.parent)
        partial.parent.mkdir()
        partial.write_bytes(left)
        complete(pull, h, pull(h))


def test_verify_repairs_a_damaged_file(pull, hub):
    h = hub()
    complete(pull, h, pull(h))
    blob = (pull.snapshot(h) / WEIGHTS).resolve()
    blob.write_bytes(b"x" + F[1:])
    assert pull(h).returncode == 0 and blob.read_bytes()[:1] == b"x"  # size alone
    result = pull(h, "--verify")
    complete(pull, h, result)
    assert "damaged on this disk" in result.stderr


def test_two_at_once_write_one_file_once(pull, hub):
    h = hub()
    h.faults[WEIGHTS] = [None, hubs.cut(100000)]
    both = [subprocess.Popen([HADAL, "pull", h.repo, "-q"], env=pull.environment(h), stdout=subprocess.PIPE) for _ in range(2)]
    assert [p.communicate()[0] for p in both] == [f"{pull.snapshot(h)}\n".encode()] * 2
    assert (pull.snapshot(h) / WEIGHTS).read_bytes() == F


def test_waits_for_another_program(pull, hub):
    """The lock has the name that the Python library gives it."""
    h = hub()
    lock = pull.cache / ".locks" / "models--org--model" / f"{hubs.sha256(F)}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen([HADAL, "pull", h.repo], env=pull.environment(h), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert "another program" in iter_until(process.stderr, "another program")
    complete(pull, h, subprocess.CompletedProcess([], process.wait(), process.stdout.read(), process.stderr.read()))


def iter_until(stream, word):
    for line in stream:
        if word in line:
            return line
    return ""


# ---- what does not pass ----

LIES = {
    "corrupted twice": ({WEIGHTS: [hubs.corrupt] * 2}, {}, 2, [WEIGHTS, hubs.sha256(F)]),
    "longer than listed": ({WEIGHTS: [hubs.longer]}, {}, 2, [WEIGHTS, str(len(F) + 4), str(len(F))]),
    "endless": ({WEIGHTS: [hubs.endless]}, {}, 2, [WEIGHTS, str(len(F))]),
    "shorter than listed": ({}, {WEIGHTS: {"lfs": {"sha256": hubs.sha256(F), "size": len(F) + 9}}}, 2, [WEIGHTS, str(len(F))]),
    "larger than any disk": ({}, {WEIGHTS: {"lfs": {"sha256": hubs.sha256(F), "size": 10**15}}}, 4, ["1000000.0 GB", "free"]),
    "negative size": ({}, {"config.json": {"size": -1}}, 2, ["config.json"]),
    "another range": ({WEIGHTS: [None, hubs.cut(1000), None, hubs.with_other_range]}, {}, 2, [WEIGHTS, "1000", "bytes 1-"]),
    "for ever busy": ({WEIGHTS: [hubs.answer(503)] * 9}, {}, 4, [WEIGHTS, "503", "3 attempts"]),
    "for ever cut": ({WEIGHTS: [hubs.cut(0)] * 9}, {}, 4, [WEIGHTS, "3 attempts"]),
    "come back tomorrow": ({WEIGHTS: [hubs.answer(429, Retry_After="20000")]}, {}, 4, ["429", "20000 s"]),
    "gone": ({WEIGHTS: [hubs.answer(404)]}, {}, 2, [WEIGHTS, "404"]),
    "redirects for ever": ({WEIGHTS: [hubs.redirect("/org/model/resolve/x/" + WEIGHTS)] * 99}, {}, 2, [WEIGHTS, "without end"]),
    "redirects to a file": ({WEIGHTS: [hubs.redirect("file:///etc/passwd")]}, {}, 2, [WEIGHTS, "no http address"]),
    "needs a token": ({"": [hubs.answer(401)]}, {}, 2, ["401", "HF_TOKEN"]),
    "needs terms": ({"": [hubs.answer(403, X_Error_Message="Access to model is restricted\x1b[31m")]}, {}, 2, ["403", "terms", "restricted\\x1b"]),
    "not there": ({"": [hubs.answer(404)]}, {}, 2, ["org/model", "404"]),
    "no JSON": ({"": [lambda handler, data, first: handler.reply(200, b"<html>")]}, {}, 2, ["not valid JSON"]),
    "no listing": ({"": [lambda handler, data, first: handler.reply(200, b'{"sha": "../../x"}')]}, {}, 2, ["commit"]),
    "odd digest": ({}, {"config.json": {"blobId": "../../../x"}}, 2, ["no digest"]),
}


@pytest.mark.parametrize("row", LIES)
def test_what_does_not_pass(pull, hub, row):
    faults, changed, code, words = LIES[row]
    h = hub()
    h.faults, h.changed = {name: list(f) for name, f in faults.items()}, changed
    failed(pull, h, pull(h, "--retries", "2", "--jobs", "1"), code, *words)


OUTSIDE = ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a//evil.json", "./evil.json", "..", "", "a\\evil.json", "evil\n.json", "evil\x1b[2J.json", "x" * 300 + ".json", "a/" * 600 + "evil.json"]


@pytest.mark.parametrize("name", OUTSIDE, ids=lambda n: repr(n[:12]))
def test_names_that_lead_outside_are_refused(pull, hub, name):
    h = hub({**FILES, name: b"evil"})
    result = pull(h, "--all")
    failed(pull, h, result, 2, "refused a file named")
    assert "\x1b" not in result.stderr
    assert len(h.asked) == 1  # nothing was asked for
    assert not list(pull.home.parent.rglob("*evil*"))


@pytest.mark.parametrize("name", ["model", "a/b/c", "a/..", "../b", "-a/b", "a--b/c", "a/b@", "a/b@../x", "a/b@/x", "a b/c", "a/" + "b" * 300])
def test_names_that_are_none(pull, hub, name):
    h = hub()
    result = pull(h, "--", name=name)
    assert result.returncode == 2 and "no model's name" in result.stderr or "no revision" in result.stderr
    assert not h.asked


NOTHING_TO_LOAD = {
    "GGUF": ({"model-Q4_K_M.gguf": b"GGUF", "README.md": b""}, "GGUF"),
    "no config": ({WEIGHTS: b"x"}, "config.json"),
    "no weights": ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "safetensors"),
}


@pytest.mark.parametrize("row", NOTHING_TO_LOAD)
def test_repositories_that_hold_no_model(pull, hub, row):
    files, word = NOTHING_TO_LOAD[row]
    h = hub(files)
    failed(pull, h, pull(h), 2, word)


# ---- the token ----


def test_the_token_stays_with_the_hub(pull, hub):
    h = hub()
    h.faults["config.json"] = [hubs.redirect(h.cdn + "/cdn/config.json")]
    result = pull(h, env={"HF_TOKEN": TOKEN})
    complete(pull, h, result)
    for _, path, _, authorization in h.asked:
        assert authorization == (None if path.startswith("/cdn/") else f"Bearer {TOKEN}"), path
    assert any(path.startswith("/cdn/") for _, path, _, _ in h.asked)
    assert TOKEN not in result.stdout + result.stderr


def test_the_token_of_a_login(pull, hub):
    h = hub()
    pull.home.mkdir()
    (pull.home / "token").write_text(TOKEN + "\n")
    complete(pull, h, pull(h))
    assert h.asked[0][3] == f"Bearer {TOKEN}"


def test_the_token_is_never_printed(pull, hub):
    h = hub()
    h.faults[""] = [hubs.answer(401, X_Error_Message=f"bad token {TOKEN}")]
    result = pull(h, env={"HF_TOKEN": TOKEN})
    failed(pull, h, result, 2, "401", "does not accept the token")
    assert TOKEN not in result.stderr


def test_a_host_that_does_not_get_the_token_says_so(pull, hub):
    h = hub()
    h.faults[WEIGHTS] = [None, hubs.answer(401)]  # the content network asks for one
    failed(pull, h, pull(h, env={"HF_TOKEN": TOKEN}), 2, "401", "is not sent the token")


def test_a_token_cannot_add_headers(pull, hub):
    h = hub()
    failed(pull, h, pull(h, env={"HF_TOKEN": "a\r\nX-Evil: 1"}), 2, "HF_TOKEN")
    assert not h.asked


# ---- TLS ----

needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")


@needs_openssl
def test_servers_are_verified(pull, hub, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=hub", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    h = hub(certificate=(certificate, key))
    failed(pull, h, pull(h), 4, "certificate")
    assert not h.asked
    complete(pull, h, pull(h, env={"SSL_CERT_FILE": str(certificate)}))
    plain = hub()
    h.faults[WEIGHTS] = [hubs.redirect(plain.cdn + "/cdn/" + WEIGHTS)]
    shutil.rmtree(pull.cache)
    failed(pull, h, pull(h, env={"SSL_CERT_FILE": str(certificate)}), 2, "from https to http")


# ---- the disk, the environment ----


def test_full_disk(pull, hub):
    """What was written stays, and the next call goes on from there."""
    h = hub()
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (150000, 150000))}
    failed(pull, h, pull(h, **limit), 4, "cannot write", "pull again")
    complete(pull, h, pull(h))
    assert h.requests_of(WEIGHTS)[-1] == ("GET", 150000)


def test_a_cache_that_cannot_be_written(pull, hub):
    h = hub()
    pull.home.mkdir()
    (pull.home / "hub").write_text("a file")
    result = pull(h)
    assert result.returncode == 4 and "cannot write" in result.stderr


def test_where_models_are_kept(pull, hub, tmp_path):
    h = hub()
    env = {"HF_HUB_CACHE": str(tmp_path / "other")}
    assert pull(h, env=env).stdout.startswith(str(tmp_path / "other" / "models--org--model"))
    env = {"HF_HOME": "", "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    assert pull(h, env=env).stdout.startswith(str(tmp_path / "xdg" / "huggingface" / "hub"))
    env = {"HF_HOME": "", "XDG_CACHE_HOME": "", "HOME": str(tmp_path / "me")}
    assert pull(h, env=env).stdout.startswith(str(tmp_path / "me" / ".cache" / "huggingface" / "hub"))
    assert "HOME is not set" in pull(h, env={"HF_HOME": "", "XDG_CACHE_HOME": "", "HOME": ""}).stderr


def test_refused_settings(pull, hub):
    h = hub()
    assert "HF_HUB_OFFLINE" in pull(h, env={"HF_HUB_OFFLINE": "1"}).stderr
    assert "HF_ENDPOINT" in pull(h, env={"HF_ENDPOINT": "ftp://127.0.0.1"}).stderr
    assert not h.asked


def test_progress_in_a_log(pull, hub):
    h = hub()
    h.faults[WEIGHTS] = [hubs.cut(100000)]
    lines = pull(h).stderr.splitlines()
    assert lines[0] == "3 files, 307.23 kB, of which 0 B are here"
    assert any("again in" in line and WEIGHTS in line for line in lines)
    assert lines[-1].startswith("pulling: done, 307.23 kB in ")
    assert pull(h, "-q").stderr == ""


def test_another_tool_reads_the_cache(pull, hub):
    """Where the Python library is installed: it finds what was pulled, offline."""
    pytest.importorskip("huggingface_hub")
    h = hub()
    assert pull(h).returncode == 0
    code = "import huggingface_hub as h; print(h.snapshot_download('org/model'))"
    env = {**pull.environment(h), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert pathlib.Path(found.stdout.strip()) == pull.snapshot(h), found.stderr


# ---- what is no checkpoint ----

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 1234567\n" % (b"a" * 64)


def copy_model(folder):
    shutil.copytree(TINY, folder)
    return folder


def wrong(tmp_path, kind):
    folder = tmp_path / "given"
    if kind == "a GGUF file":
        folder.write_bytes(b"GGUF\3\0\0\0")
    elif kind == "a safetensors file":
        folder = TINY / WEIGHTS
    elif kind == "a pointer":
        folder.write_bytes(POINTER)
    elif kind == "another file":
        folder.write_bytes(b"hello")
    elif kind == "a folder of GGUF":
        folder.mkdir()
        (folder / "model-Q4.gguf").write_bytes(b"GGUF")
    elif kind == "weights alone":
        folder.mkdir()
        shutil.copy(TINY / WEIGHTS, folder)
    elif kind == "an empty folder":
        folder.mkdir()
    elif kind == "a cache's folder":
        (folder / "snapshots").mkdir(parents=True)
        (folder / "blobs").mkdir()
    elif kind == "a name not pulled":
        folder = "deepseek-ai/nothing@v2"
    else:
        copy_model(folder)
        name = kind.removeprefix("pointer ")
        (folder / name).write_bytes(POINTER)
    return folder


NO_MODEL = {
    "a GGUF file": ["GGUF", "hadal pull"],
    "a safetensors file": ["one file of weights", "the folder"],
    "a pointer": ["Git LFS", "1234567 bytes", "git lfs pull"],
    "another file": ["is a file", "hadal pull"],
    "a folder of GGUF": ["GGUF", "hadal pull"],
    "weights alone": ["no config.json", "only weights"],
    "an empty folder": ["no config.json", "hadal pull"],
    "a cache's folder": ["Hugging Face cache", "ORG/NAME"],
    "a name not pulled": ["hadal pull deepseek-ai/nothing@v2", "cache"],
    "pointer config.json": ["config.json", "Git LFS", "1234567 bytes"],
    "pointer model.safetensors": [WEIGHTS, "Git LFS", "1234567 bytes"],
    "pointer tokenizer.json": ["tokenizer.json", "Git LFS", "1234567 bytes"],
}


@pytest.mark.parametrize("kind", NO_MODEL)
def test_what_is_no_checkpoint(refused, tmp_path, kind):
    given = wrong(tmp_path, kind)
    for command in (["generate", given, "-p", "hi"], ["chat", given], ["bench", "latency", given], ["serve", given, "--port", "0", "--no-sandbox"]):
        said = refused(*command, env={**os.environ, "HF_HOME": str(tmp_path)})
        for word in NO_MODEL[kind]:
            assert word in said, (command[0], said)


def test_text_commands_need_only_a_tokenizer(refused, tmp_path):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    assert run_hadal("tokenize", tmp_path, input="hi").returncode == 0
    (tmp_path / "tokenizer.json").write_bytes(POINTER)
    assert "Git LFS" in refused("tokenize", tmp_path)
    assert "tokenizer.json" in refused("render", TINY.parent, "--messages", "x")
    assert json.loads((TINY / "config.json").read_text())
