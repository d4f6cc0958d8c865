"""POST /kv/save and /kv/restore: the pages of a conversation under a name, also after a restart; damaged, cut and
foreign files are refused, and every page is exact or a miss."""

import os
import shutil
import signal
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import run_hadal
from serving import TINY, Server, wait_until
from test_kv_ranks import wait_until_quiet
from toy_models import make_toy_model

SMALL = ("--context", 1024, "--kv-tokens", 1024, "--max-running", 2, "--kv-host", 0.2)
IDS = [5 + (k * k) % 300 for k in range(600)]


def start(folder, *more, gb=1, **options):
    return Server(*SMALL, "--kv-save", f"{folder}:{gb}", *more, **options)


def restart(server, folder, *more, **options):
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    return start(folder, *more, **options)


def generate(server, ids, **more):
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 12, "temperature": 0.7, "sampling_seed": 4, "ignore_eos": True},
            "return_logprob": True, "top_logprobs_num": 2, **more}  # fmt: skip
    reply = server.post("/generate", body)
    assert reply.status == 200, reply.text
    info = reply.json["meta_info"]
    return (reply.json["output_ids"], info["output_token_logprobs"], info["output_top_logprobs"]), info["cached_tokens"]


def save(server, name, **body):
    return server.post("/kv/save", {"name": name, **body})


def restore(server, name, **body):
    return server.post("/kv/restore", {"name": name, **body})


@pytest.mark.parametrize("flags", [(), ("--cp", 2, "--hisparse", 512), ("--kv-disk",), ("--dp", 3)], ids=["alone", "ranks", "disk", "groups"])
def test_saved_pages_are_a_hit_after_a_restart(flags, tmp_path):
    if flags == ("--kv-disk",):
        (tmp_path / "tier").mkdir()
        flags = ("--kv-disk", f"{tmp_path}/tier:0.2")
    folder = tmp_path / "saved"
    folder.mkdir()
    server = start(folder, *flags)
    assert save(server, "story", input_ids=IDS).code == "not_cached"
    first, cached = generate(server, IDS)
    assert cached == 0
    saved = save(server, "story", input_ids=IDS + first[0])
    assert saved.status == 200, saved.text
    page = int(server.stats()["hadal_page_size"])
    tokens = saved.json["tokens"]
    assert tokens == len(IDS) // page * page and saved.json["not_cached_tokens"] == len(IDS) + 12 - tokens
    assert saved.json["pages"] == tokens // page and saved.json["window_pages"] >= 1
    path = folder / "story.kv"
    assert {p.name for p in folder.iterdir()} == {"story.kv", ".lock"}
    assert path.stat().st_size == saved.json["bytes"] and stat.S_IMODE(path.stat().st_mode) == 0o600
    longer = IDS + first[0] + IDS[:40]
    second, cached = generate(server, longer)
    assert cached >= tokens

    server = restart(server, folder, *flags, "--no-drafts" if not flags else "--draft-tokens", *(() if not flags else (3,)))
    if not flags:  # drafts are of the pages' kind
        assert restore(server, "story").code == "bad_file"
        server = restart(server, folder)
    listed = server.get("/kv/saved").json
    assert [(e["name"], e["bytes"]) for e in listed["saved"]] == [("story", saved.json["bytes"])]
    assert listed["bytes"] == saved.json["bytes"] and listed["limit_bytes"] == 10**9
    server.post("/flush_cache")
    back = restore(server, "story", return_input_ids=True)
    assert back.status == 200, back.text
    assert back.json["tokens"] == tokens and back.json["input_ids"] == IDS[:tokens]
    assert generate(server, longer) == (second, tokens)
    assert generate(server, IDS)[0] == first
    assert server.post("/kv/delete", {"name": "story"}).status == 200
    assert restore(server, "story").code == "not_saved" and not path.exists()
    server.close()


def test_pages_of_the_disk_are_saved(tmp_path):
    """After a restart only the disk has them."""
    tier, folder = tmp_path / "tier", tmp_path / "saved"
    tier.mkdir()
    folder.mkdir()
    flags = ("--kv-disk", f"{tier}:0.2")
    server = start(folder, *flags)
    want, _ = generate(server, IDS)
    page = int(server.stats()["hadal_page_size"])
    tokens = len(IDS) // page * page
    in_memory = save(server, "a", input_ids=IDS).json
    wait_until_quiet(server)
    server = restart(server, folder, *flags)
    on_disk = save(server, "b", input_ids=IDS).json
    assert (on_disk["tokens"], on_disk["bytes"]) == (tokens, in_memory["bytes"])
    server = restart(server, folder)
    assert restore(server, "b").json["tokens"] == tokens
    assert generate(server, IDS) == (want, tokens)
    server.close()


def test_a_chat_and_its_salts(tmp_path):
    """A prefix belongs to whom it was saved from: another salt misses it, until it is restored for that one."""
    server = start(tmp_path)
    messages = [{"role": "user", "content": "Tell me of " + " ".join(str(k * 7 % 91) for k in range(200))}]

    def chat(**more):
        reply = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0, **more}).json
        return reply["choices"][0]["message"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    text, _ = chat(cache_salt="a")
    assert save(server, "talk", messages=messages).code == "not_cached"
    assert save(server, "talk", messages=messages, cache_salt="a").status == 200
    server = restart(server, tmp_path)
    tokens = restore(server, "talk", cache_salt="b").json["tokens"]
    assert chat(cache_salt="a") == (text, 0)
    assert chat(cache_salt="b") == (text, tokens)
    server.close()


def test_keys(tmp_path):
    """An admin saves for a key, whose digest it knows."""
    import hashlib

    folder, user, admin = tmp_path / "saved", "a-key-of-some-user", "a-key-of-an-admin"
    folder.mkdir()
    server = start(folder, env={"HADAL_API_KEY": user, "HADAL_ADMIN_KEY": admin})
    by = {"headers": {"Authorization": f"Bearer {user}"}}
    as_admin = {"headers": {"Authorization": f"Bearer {admin}"}}
    digest = hashlib.sha256(user.encode()).hexdigest()
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2}}
    assert server.post("/generate", body, **by).status == 200
    for path in ("/kv/save", "/kv/restore", "/kv/delete"):
        assert server.post(path, {"name": "x", "input_ids": IDS}, **by).status == 403
    assert server.get("/kv/saved", **by).status == 403
    assert server.post("/kv/save", {"name": "x", "input_ids": IDS}, **as_admin).code == "not_cached"
    assert server.post("/kv/save", {"name": "x", "input_ids": IDS, "api_key_sha256": "12"}, **as_admin).code == "invalid_value"
    assert server.post("/kv/save", {"name": "x", "input_ids": IDS, "api_key_sha256": digest}, **as_admin).status == 200
    server.post("/flush_cache", **as_admin)
    restored = server.post("/kv/restore", {"name": "x", "api_key_sha256": digest}, **as_admin)
    cached = server.post("/generate", body, **by).json["meta_info"]["cached_tokens"]
    assert cached == restored.json["tokens"] > 0
    server.close()


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy_model("v4", tmp_path_factory.mktemp("kv_save") / "model")


TOY_IDS = [5 + k * k % 80 for k in range(300)]


def test_wrong_files_are_refused(toy, tmp_path):
    server = start(tmp_path, model=toy)
    want, _ = generate(server, TOY_IDS)
    tokens = save(server, "good", input_ids=TOY_IDS).json["tokens"]
    good = (tmp_path / "good.kv").read_bytes()

    def refused(data):
        (tmp_path / "wrong.kv").write_bytes(data)
        server.post("/flush_cache")
        reply = restore(server, "wrong")
        assert (reply.status, reply.code) == (422, "bad_file"), reply.text
        return reply

    places = [*range(0, 480, 37), *range(480, len(good), max(1, len(good) // 40)), len(good) - 1]
    for at in places:
        refused(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
    for n in (0, 1, 7, 100, 479, 480, 481, 2000, len(good) // 2, len(good) - 1):
        refused(good[:n])
    refused(good + b"x")
    refused(b"a letter to a friend" * 100)
    assert generate(server, TOY_IDS)[0] == want  # pages before a damaged one are right
    server.post("/flush_cache")
    assert restore(server, "good").json["tokens"] == tokens
    assert generate(server, TOY_IDS) == (want, tokens)
    server.close()


def test_pages_of_other_weights_are_refused(toy, tmp_path):
    model, folder = tmp_path / "model", tmp_path / "saved"
    folder.mkdir()
    shutil.copytree(toy, model)
    flags = ("--weights-dir", tmp_path)
    server = start(folder, *flags, model=model)
    generate(server, TOY_IDS)
    assert save(server, "before", input_ids=TOY_IDS).status == 200
    assert server.post("/update_weights_from_disk", {"model_path": str(model), "weight_version": "one"}).status == 200
    assert restore(server, "before").code == "other_weights"
    assert save(server, "after", input_ids=TOY_IDS).code == "not_cached"
    generate(server, TOY_IDS)
    assert save(server, "after", input_ids=TOY_IDS).status == 200
    assert restore(server, "after").status == 200
    server.close()
    server = start(folder, *flags, model=model)
    assert restore(server, "before").status == 200
    assert restore(server, "after").code == "other_weights"
    server.close()
    os.utime(model / "model.safetensors", (1, 1))
    server = start(folder, model=model)
    reply = restore(server, "before")
    assert reply.code == "bad_file" and "another model or program" in reply.text
    server.close()


def test_the_quota_is_kept(toy, tmp_path):
    server = start(tmp_path, model=toy)
    generate(server, TOY_IDS)
    bytes_of_one = save(server, "a", input_ids=TOY_IDS).json["bytes"]
    server.close()
    server = start(tmp_path, gb=1.5 * bytes_of_one / 1e9, model=toy)
    generate(server, TOY_IDS)
    refused = save(server, "b", input_ids=TOY_IDS)
    assert (refused.status, refused.code) == (507, "no_room")
    assert {p.name for p in tmp_path.iterdir()} == {"a.kv", ".lock"}
    server.post("/kv/delete", {"name": "a"})
    assert save(server, "b", input_ids=TOY_IDS).status == 200
    server.close()


def test_many_at_once_and_a_kill(toy, tmp_path):
    """Saves beside requests; a kill leaves whole files, and halves are deleted at the next start."""
    server = start(tmp_path, model=toy)
    want, _ = generate(server, TOY_IDS)
    with ThreadPoolExecutor(8) as pool:
        saves = [pool.submit(save, server, f"s{i % 4}", input_ids=TOY_IDS) for i in range(6)]
        asked = [pool.submit(generate, server, TOY_IDS[:i] + TOY_IDS) for i in range(4)]
        assert all(s.result().status == 200 for s in saves)
        [a.result() for a in asked]
    assert {e["name"] for e in server.get("/kv/saved").json["saved"]} == {"s0", "s1", "s2", "s3"}
    with ThreadPoolExecutor(4) as pool:
        for i in range(4):
            pool.submit(lambda i=i: save(server, f"k{i}", input_ids=TOY_IDS))
        wait_until(lambda: any(p.name.startswith((".half", "k")) for p in tmp_path.iterdir()), "a save has begun")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    (tmp_path / ".half-7").write_bytes(b"x")
    server = start(tmp_path, model=toy)
    names = [e["name"] for e in server.get("/kv/saved").json["saved"]]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".half")]
    for name in names:
        server.post("/flush_cache")
        tokens = restore(server, name).json["tokens"]
        assert generate(server, TOY_IDS) == (want, tokens)
    server.close()


def test_names(toy, tmp_path):
    server = start(tmp_path, model=toy)
    for name in ["", ".", "..", ".x", "a/b", "../a", "a b", "ä"]:
        reply = save(server, name, input_ids=TOY_IDS)
        assert (reply.status, reply.code) == (400, "invalid_value"), reply.text
    assert save(server, "x" * 101, input_ids=TOY_IDS).code == "string_above_max_length"
    assert server.post("/kv/save", {"input_ids": TOY_IDS}).code == "missing_required_parameter"
    assert save(server, "x").code == "missing_required_parameter"
    assert save(server, "x", input_ids=TOY_IDS, prompt="x").code == "missing_required_parameter"
    assert restore(server, "never").code == "not_saved"
    assert {p.name for p in tmp_path.iterdir()} == {".lock"}
    server.close()


def test_options(toy, tmp_path):
    server = Server("--context", 512, model=toy)
    assert save(server, "x", input_ids=TOY_IDS).status == 501
    assert server.get("/kv/saved").json == {"saved": [], "bytes": 0, "limit_bytes": 0}
    server.close()
    for flags, said in [
        (("--kv-save", f"{tmp_path}:1"), "--kv-host"),
        (("--kv-save", str(tmp_path), "--kv-host", 1), "--kv-save is '"),
        (("--kv-save", "/nowhere:1", "--kv-host", 1), "/nowhere: No such file"),
    ]:
        done = run_hadal("serve", TINY, "--port", 0, "--context", 512, *flags)
        assert done.returncode != 0 and said in done.stderr, done.stderr
