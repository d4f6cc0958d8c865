"""KV pages on a disk: a killed server comes back with its prefixes, one server per folder, and hadal kv."""

import json
import os
import shutil
import signal
import stat

import pytest
from conftest import run_hadal
from serving import TINY, Server, wait_until
from worlds import SMALL as OF_WORLDS
from worlds import needs_ucx

FILES = {"store", "full.heads", "full.pages", "window.heads", "window.pages"}
SMALL = ("--context", 1024, "--kv-tokens", 1024, "--max-running", 1, "--kv-host", 0.1)


def prompt(name):
    return f"Once, {name}, " + " ".join(str((i * 31 + len(name)) % 97) for i in range(120))


def ask(server, name):
    reply = server.post("/v1/completions", {"prompt": prompt(name), "max_tokens": 8, "temperature": 0})
    assert reply.status == 200, reply.text
    return reply.json["choices"][0]["text"], reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def tier(server, name, tier="disk", pool="entries"):
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(f"hadal_kv_tier_{name}{{") and f'tier="{tier}"' in line and (not pool or f'pool="{pool}"' in line):
            return float(line.split()[-1])
    raise KeyError(name)


def wait_until_written(server):
    """Of a prompt: two pages of entries, and the window behind the second, without which they are of no use."""
    wait_until(lambda: tier(server, "pages") >= 2 and tier(server, "pages", pool="window") >= 1, "the prefix is written")


def start(folder, *more, gb=0.2):
    return Server(*SMALL, "--kv-disk", f"{folder}:{gb}", *more)


def kill(server):
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()


def test_a_killed_server_comes_back_with_its_prefixes(tmp_path):
    server = start(tmp_path)
    text, cached = ask(server, "a fox")
    assert cached == 0
    wait_until_written(server)
    pages = tier(server, "pages")
    kill(server)
    assert {p.name for p in tmp_path.iterdir()} == FILES
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    server = start(tmp_path)
    assert tier(server, "pages") == pages
    again, cached = ask(server, "a fox")
    assert (again, cached > 0) == (text, True)
    assert tier(server, "cached_tokens_total", pool=None) == cached
    assert tier(server, "loaded_pages_total") == cached / server.stats()["hadal_page_size"]
    wait_until(lambda: server.post("/flush_cache").status == 200, "no request runs any more")
    assert ask(server, "a fox") == (text, 0)
    server.close()


def test_write_through_saves_requests_that_run(tmp_path):
    """Killed while it answers, the server finds the prompt on the disk; with write-back it does not."""
    body = {"prompt": prompt("a crow"), "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    for policy, found in [("through", True), ("back", False)]:
        folder = tmp_path / policy
        folder.mkdir()
        server = start(folder, "--kv-write", policy)
        c = server.connection()
        c.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
        reply = c.getresponse()
        assert reply.read(1)
        if found:
            wait_until_written(server)
        pages = tier(server, "pages")
        assert server.stats()["hadal_num_running_reqs"] == 1 and (pages > 0) == found
        kill(server)
        server = start(folder, "--kv-write", policy)
        text, cached = ask(server, "a crow")
        assert (cached > 0) == found
        assert ask(server, "a crow")[0] == text
        server.close()


def test_attention_groups_share_a_folder(tmp_path):
    """Requests go to one group after the other; each finds what the other wrote, also with another number of groups."""
    names = ["a fox", "a crow"]
    server = start(tmp_path, "--dp", 2)
    want = [ask(server, name) for name in names]
    assert [cached for _, cached in want] == [0, 0]
    wait_until(lambda: tier(server, "pages") >= 4 and tier(server, "pages", pool="window") >= 2, "both prefixes are written")
    pages = tier(server, "pages")
    kill(server)
    assert {p.name for p in tmp_path.iterdir()} == FILES
    for groups, order in [(2, [1, 0]), (1, [0, 1]), (3, [0, 1])]:
        server = start(tmp_path, *(("--dp", groups) if groups > 1 else ()))
        assert tier(server, "pages") == pages
        for i in order:
            again, cached = ask(server, names[i])
            assert (again, cached > 0) == (want[i][0], True)
        assert tier(server, "loaded_pages_total") == 4
        if groups > 1:
            wait_until(lambda: server.post("/flush_cache").status == 200, "no request runs any more")
            assert [ask(server, name)[1] for name in names] == [0, 0]
            wait_until(lambda: tier(server, "pages") == pages, "both are written again")
        server.close()
        assert server.log.count(b"kv_disk_failed") == 0


@needs_ucx
def test_groups_in_processes_have_stores_of_their_own(world, tmp_path):
    flags = ("--dp", 2, "--ep", 2, "--kv-host", 0.4, "--kv-disk", f"{tmp_path}:0.4")
    names = ["a fox", "a crow"]
    w = world(2, *flags)
    want = [ask(w.server, name) for name in names]
    wait_until(lambda: tier(w.server, "pages") >= 4 and tier(w.server, "pages", pool="window") >= 2, "both are written")
    w.kill()
    assert {p.name for p in tmp_path.iterdir()} == FILES | {f"1.{name}" for name in FILES}
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 0.4e9
    assert "attention group 1" in run_hadal("kv", "list", tmp_path).stdout
    w = world(2, *flags)
    assert [ask(w.server, name) for name in names] == [(text, cached) for (text, _), cached in zip(want, [256, 256])]
    w.kill()
    alone = Server(*OF_WORLDS, "--kv-host", 0.4, "--kv-disk", f"{tmp_path}:0.4")
    found = [ask(alone, name) for name in names]
    assert [text for text, _ in found] == [text for text, _ in want]
    assert sorted(cached for _, cached in found) == [0, 256]  # what group 0 wrote
    assert {p.name for p in tmp_path.iterdir()} == FILES
    alone.close()
    assert b"kv_disk_dropped" in alone.log


def test_a_changed_byte_is_a_miss_and_a_line_in_the_log(tmp_path):
    server = start(tmp_path)
    text, _ = ask(server, "a crow")
    wait_until_written(server)
    server.close()
    with open(tmp_path / "full.pages", "r+b") as f:
        f.seek(1000)
        byte = f.read(1)
        f.seek(1000)
        f.write(bytes([byte[0] ^ 1]))
    done = run_hadal("kv", "check", tmp_path)
    assert done.returncode == 1 and ", 1 wrong" in done.stdout
    server = start(tmp_path)
    assert ask(server, "a crow") == (text, 0)  # the first page is the one that is wrong
    assert 'hadal_kv_disk_failures_total{model_name="tiny-v4",reason="read"} 1' in server.get("/metrics").text
    server.close()
    assert server.log.count(b'kv_disk_failed call=read reason="wrong checksum"') == 1


def test_one_server_has_a_folder(tmp_path):
    server = start(tmp_path)
    done = run_hadal("serve", TINY, "--port", 0, *SMALL, "--kv-disk", f"{tmp_path}:0.2")
    assert done.returncode != 0 and "another process uses this store" in done.stderr
    done = run_hadal("kv", "drop", tmp_path)
    assert done.returncode != 0 and "another process uses this store" in done.stderr
    assert run_hadal("kv", "list", tmp_path).returncode == 0
    server.close()
    assert "5 files deleted" in run_hadal("kv", "drop", tmp_path).stdout
    assert not list(tmp_path.iterdir())


def test_pages_of_other_weights_are_refused(tmp_path):
    store, model = tmp_path / "store", tmp_path / "model"
    store.mkdir()
    shutil.copytree(TINY, model)
    server = Server(*SMALL, "--kv-disk", f"{store}:0.2", model=model)
    server.close()
    os.utime(model / "model.safetensors", (1, 1))
    done = run_hadal("serve", model, "--port", 0, *SMALL, "--kv-disk", f"{store}:0.2")
    assert done.returncode == 2 and "pages of another model or program" in done.stderr and "hadal kv drop" in done.stderr
    assert run_hadal("kv", "drop", store).returncode == 0
    Server(*SMALL, "--kv-disk", f"{store}:0.2", model=model).close()


def test_list_and_check_say_what_is_there(tmp_path):
    server = start(tmp_path)
    ask(server, "a hare")
    wait_until_written(server)
    entries, windows = int(tier(server, "pages")), int(tier(server, "pages", pool="window"))
    server.close()
    listed = run_hadal("kv", "list", tmp_path).stdout
    assert listed.startswith("hadal ") and "128 tokens in a page" in listed
    assert f"entries: {entries} page" in listed and f"windows: {windows} page" in listed
    checked = run_hadal("kv", "check", tmp_path)
    assert checked.returncode == 0 and checked.stdout.count(", 0 wrong") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["burn", "."], "'burn' is not list, check or drop"),
        (["list", "/nowhere"], "/nowhere: No such file or directory"),
        (["drop", "/dev/null"], "/dev/null: Not a directory"),
        (["list"], "DIR"),
    ],
)
def test_kv_refuses(words, said):
    done = run_hadal("kv", *words)
    assert done.returncode == 2 and said in done.stderr


def test_a_folder_that_is_no_store_is_refused(tmp_path):
    done = run_hadal("kv", "check", tmp_path)
    assert done.returncode == 2 and "store: No such file" in done.stderr
    (tmp_path / "store").write_bytes(b"a letter to a friend" * 50)
    (tmp_path / "store").chmod(0o600)
    done = run_hadal("serve", TINY, "--port", 0, *SMALL, "--kv-disk", f"{tmp_path}:0.2")
    assert done.returncode == 2 and "not a store of KV pages" in done.stderr
    assert (tmp_path / "store").read_bytes().startswith(b"a letter")
