"""hadal train and hadal rl: losses fall, runs go on where they stopped to the same bits, sampler and
trainer agree, and bad input is refused by name."""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import math
import os
import resource
import signal
import struct
import subprocess
import time

import pytest
from conftest import HADAL, ROOT
from serving import Server
from test_weight_ways import Starting
from toy_models import make_toy_model

MODEL = ROOT / "models" / "tiny-v3"
WORDS = ["zebra", "yak", "heron", "otter", "lynx", "viper"]


@pytest.fixture
def data(tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": f"Say {w}."}, {"role": "assistant", "content": f"{w} {w} {w}"}]}
        for w in WORDS
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def train(hadal, data, out, *args, code=0):
    done = hadal("train", MODEL, "--data", data, "--out", out, "--batch", "4", "--lr", "5e-4", *args)
    assert done.returncode == code, done.stderr
    return done


def digests(folder):
    files = ["model/model.safetensors", "state.safetensors", "state.json"]
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files]


def tensors(path):
    """Name to bytes."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    return {k: raw[8 + size + v["data_offsets"][0] : 8 + size + v["data_offsets"][1]] for k, v in header.items()}


def steps(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_the_loss_falls_and_the_model_is_served(hadal, data, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    train(hadal, data, out, "--steps", "8", "--log", log, "--held-out", data, "-q")
    lines = steps(log)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["loss"] < 0.2 * lines[0]["loss"] and lines[-1]["held_out_loss"] < 1
    assert all(line["gradient_norm"] > 0 and not line["skipped"] for line in lines)
    model = out / "step-00000008" / "model"
    assert tensors(model / "model.safetensors").keys() == tensors(MODEL / "model.safetensors").keys()
    said = hadal("generate", model, "-p", "Say heron.", "--thinking", "off", "-q", "--temperature", "0", "--max-tokens", "12")
    assert said.returncode == 0 and said.stdout.startswith("heron heron"), said.stderr + said.stdout


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(hadal, data, tmp_path, optimizer):
    """Also on other threads and micro-batches."""
    args = ["--optimizer", optimizer, "--schedule", "cosine", "--warmup", "1", "--steps", "3", "-q"]
    if optimizer == "muon":
        args += ["--freeze", "experts,shared,dense"]
    train(hadal, data, tmp_path / "whole", *args, "--threads", "1", "--rows", "200", "--context", "30")
    log, two = tmp_path / "log", tmp_path / "two"
    command = [HADAL, "train", MODEL, "--data", data, "--out", two, "--batch", "4", "--lr", "5e-4", *args]
    command += ["--threads", "2", "--rows", "29", "--save-every", "1", "--log", log]
    started = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    while not (log.exists() and log.read_text().count("\n") >= 1):
        assert started.poll() in (None, 0)
        time.sleep(0.02)
    started.send_signal(signal.SIGTERM)  # finishes its step and saves
    assert started.wait() == 0, started.stderr.read()
    started.stderr.close()
    if not (two / "step-00000003").exists():
        train(hadal, data, two, *args, "--resume", "--threads", "2", "--rows", "29", "--log", log)
    assert [line["step"] for line in steps(log)] == [1, 2, 3]
    assert digests(tmp_path / "whole" / "step-00000003") == digests(two / "step-00000003")


@pytest.mark.long
def test_twenty_steps_have_the_same_bits_on_any_threads(hadal, data, tmp_path):
    """Of examples, and of rewards."""
    for threads in ("1", "2"):
        train(hadal, data, tmp_path / f"train{threads}", "--steps", "20", "--threads", threads, "-q")
        learn(hadal, tmp_path / f"rl{threads}", "--steps", "20", "--threads", threads)
    for name in ("train", "rl"):
        one, two = (digests(tmp_path / f"{name}{threads}" / "step-00000020") for threads in ("1", "2"))
        assert one == two, name


def test_what_is_frozen_stays(hadal, data, tmp_path):
    train(hadal, data, tmp_path / "out", "--steps", "1", "--freeze", "experts,norms", "-q")
    before = tensors(MODEL / "model.safetensors")
    after = tensors(tmp_path / "out" / "step-00000001" / "model" / "model.safetensors")
    changed = {name for name in before if before[name] != after[name]}
    assert changed and not any(".experts." in name or "norm" in name for name in changed)


@contextlib.contextmanager
def open_locked(folder):
    """As a run has its folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield
    os.close(fd)


def test_three_gradients_that_are_no_numbers_end_the_run(hadal, data, tmp_path):
    """Each is skipped, counted, and changes nothing."""
    model, log = make_toy_model("v3", tmp_path / "toy"), tmp_path / "log"
    file = model / "model.safetensors"
    norm = tensors(file)["model.norm.weight"]
    assert file.read_bytes().count(norm) == 1
    file.write_bytes(file.read_bytes().replace(norm, b"\xc0\x7f" + norm[2:]))  # a NaN of BF16
    done = hadal("train", model, "--data", data, "--out", tmp_path / "out", "--steps", "5", "--batch", "2", "--log", log, "-q")
    assert done.returncode == 5 and "3 steps in a row with gradients that are no numbers" in done.stderr, done.stderr
    assert [(line["skipped"], line["loss"]) for line in steps(log)] == [(True, None)] * 3


def test_old_checkpoints_are_removed(hadal, data, tmp_path):
    train(hadal, data, tmp_path / "out", "--steps", "3", "--save-every", "1", "--keep", "2", "-q")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["step-00000002", "step-00000003"]


def test_bad_runs_are_refused(refused, hadal, data, tmp_path):
    out = tmp_path / "out"

    def why(*args, model=MODEL, command="train"):
        return refused(command, model, *args)

    assert "needs --data" in why("--out", out)
    assert "needs --out" in why("--data", data)
    assert "cannot freeze 'nose'" in why("--data", data, "--out", out, "--freeze", "nose")
    assert "--context 900 needs --rows" in why("--data", data, "--out", out, "--rows", "64", "--context", "900")
    assert "the context is 9" in why("--data", data, "--out", out, "--rows", "64", "--context", "9")
    assert "no checkpoint to resume" in why("--data", data, "--out", out, "--resume")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"tokens": [1, 2]}\nno JSON\n')
    assert "line 2" in why("--data", bad, "--out", out)
    assert "give one of --task NAME and --prompts FILE" in why("--out", out, command="rl")
    assert "--task juggle: unknown" in why("--out", out, "--task", "juggle", command="rl")
    assert "does not divide" in why("--out", out, "--task", "sort", "--updates", "5", command="rl")
    assert not out.exists()

    args = ["--data", data, "--out", out, "--batch", "1", "--steps", "1", "-q"]
    assert hadal("train", MODEL, *args).returncode == 0
    assert "has checkpoints; --resume" in why(*args)
    assert "another --lr" in why(*args, "--resume", "--lr", "1e-3")
    assert "another --freeze" in why(*args, "--resume", "--freeze", "norms")
    why_not = refused("train", ROOT / "models" / "tiny-v4", *args, "--resume")
    assert "a run of another model than" in why_not and "differs" in why_not
    with open_locked(out):
        assert "another run writes to this folder" in why(*args, "--resume")
    other = tmp_path / "other.jsonl"
    other.write_text('{"tokens": [1, 2]}\n')
    assert "other data" in why("--data", other, *args[2:], "--resume")


def test_a_damaged_checkpoint_is_refused(refused, hadal, data, tmp_path):
    out = tmp_path / "out"
    args = ["--data", data, "--out", out, "--batch", "1", "-q"]
    assert hadal("train", MODEL, *args, "--steps", "1").returncode == 0
    state = out / "step-00000001" / "state.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    assert "checksum" in refused("train", MODEL, *args, "--steps", "2", "--resume")
    state.write_bytes(whole[:-4096])
    assert "state.safetensors" in refused("train", MODEL, *args, "--steps", "2", "--resume")
    state.write_bytes(whole)
    (out / "step-00000001" / "state.json").write_text("{}")
    assert "not the state of a training run" in refused("train", MODEL, *args, "--steps", "2", "--resume")


def files_of_a_mebibyte():
    """No file of the program gets larger, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_a_full_disk_ends_the_run_by_name(hadal, data, tmp_path):
    """The checkpoint before stays, and the run goes on from it to the bits of an undisturbed one."""
    out, args = tmp_path / "out", ["train", MODEL, "--data", data, "--batch", "1", "-q"]
    assert hadal(*args, "--out", out, "--steps", "1").returncode == 0
    done = hadal(*args, "--out", out, "--steps", "2", "--resume", preexec_fn=files_of_a_mebibyte)
    assert done.returncode == 4 and "model.safetensors: File too large" in done.stderr, done.stderr
    assert [path.name for path in out.glob("step-*")] == ["step-00000001"]
    for folder, more in ((out, ["--resume"]), (tmp_path / "whole", [])):
        assert hadal(*args, "--out", folder, "--steps", "2", *more).returncode == 0
    assert digests(out / "step-00000002")[:2] == digests(tmp_path / "whole" / "step-00000002")[:2]


def learn(hadal, out, *args):
    args = ["--groups", "3", "--samples", "4", "--max-tokens", "40", "--context", "128", "--lr", "1e-4", "-q", *args]
    done = hadal("rl", MODEL, "--task", "sort", "--out", out, "--log", out.with_suffix(".log"), *args)
    assert done.returncode == 0, done.stderr
    return steps(out.with_suffix(".log"))


def answers_from_the_start(model, *flags):
    """A client that does not wait for /health: 503 says that the model is loaded, and nothing else is said until it answers."""
    body = {"messages": [{"role": "user", "content": "Sort: 5 3 9 1"}], "temperature": 0, "max_tokens": 40}
    early = Starting()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        started = pool.submit(Server, *flags, model=model, port=early.port)
        while (reply := early.first_reply("/v1/chat/completions", body)).status != 200:
            assert (reply.status, reply.code) == (503, "starting") and "Retry-After" in reply.headers, reply.text
        server = started.result()
    choices = [reply.json["choices"][0], server.post("/v1/chat/completions", body).json["choices"][0]]
    health = server.get("/health").text
    server.close()
    assert health == "ok" and choices[0] == choices[1] and choices[0]["message"]["content"]


def test_the_result_of_rl_is_served(hadal, tmp_path):
    learn(hadal, tmp_path / "out", "--steps", "2")
    model = tmp_path / "out" / "step-00000002" / "model"
    assert changed(model)
    answers_from_the_start(model)
    done = hadal("eval", model, "--tasks", MODEL / "eval" / "tiny.jsonl", "--limit", "2", "-q")
    assert done.returncode == 0, done.stderr


def test_sampler_and_trainer_agree_to_the_bit(hadal, tmp_path):
    """Before and after updates, at another temperature, with drafts; and a resumed run is the same."""
    args = ["--algorithm", "dr-grpo", "--temperature", "1.3", "--updates", "3"]
    lines = learn(hadal, tmp_path / "whole", *args, "--steps", "2", "--threads", "1")
    assert len(lines) == 2 and lines[0]["optimizer_steps"] > 0
    for line in lines:
        assert line["dlogp_mean"] == line["dlogp_max"] == line["k3"] == 0 and line["effective_samples"] == 1
        assert line["tokens"] > 100 and line["entropy"] > 0
    learn(hadal, tmp_path / "two", *args, "--steps", "1", "--threads", "2", "--rows", "127")
    again = learn(hadal, tmp_path / "two", *args, "--steps", "2", "--resume", "--no-drafts")
    same = ["reward", "loss", "entropy", "gradient_norm", "tokens"]
    assert [[line[k] for k in same] for line in again] == [[line[k] for k in same] for line in lines]
    assert digests(tmp_path / "two" / "step-00000002")[:2] == digests(tmp_path / "whole" / "step-00000002")[:2]


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_rounded_cache_is_that_of_the_sampler(hadal, refused, tmp_path, dtype):
    """The trainer reads the entries that the sampler read, also after an update; from float32 both differ."""
    out, args = tmp_path / "out", ["--temperature", "1.3", "--updates", "3"]
    rounded = learn(hadal, out, *args, "--steps", "2", "--kv-cache-dtype", dtype)
    exact = learn(hadal, tmp_path / "exact", *args, "--steps", "1")
    assert all(line["dlogp_max"] == 0 and line["optimizer_steps"] > 0 for line in rounded)
    assert rounded[0]["entropy"] != exact[0]["entropy"]
    why = refused("rl", MODEL, "--task", "sort", "--out", out, "--groups", "3", "--samples", "4", "--max-tokens", "40", "--context", "128", "--lr", "1e-4", *args, "--steps", "3", "--resume")
    assert "--kv-cache-dtype" in why
    assert "gradients of rounded entries are for a CPU" in refused("train", MODEL, "--data", out, "--out", tmp_path / "gpu", "--backend", "cuda", "--kv-cache-dtype", dtype)


def test_without_advantages_no_bit_changes(hadal, tmp_path):
    lines = learn(hadal, tmp_path / "out", "--steps", "1", "--reward-control", "zero", "--weight-decay", "0.1")
    assert lines[0]["equal_groups"] == 3 and lines[0]["optimizer_steps"] == 0
    after = tmp_path / "out" / "step-00000001" / "model" / "model.safetensors"
    assert tensors(after) == tensors(MODEL / "model.safetensors")


def test_prompts_of_a_file_and_held_out_ones(hadal, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    line = {"messages": [{"role": "user", "content": "Say heron."}], "thinking": False}
    line["checker"] = {"type": "regex", "expect": "e"}
    prompts.write_text(json.dumps(line) + "\n")
    out, log = tmp_path / "out", tmp_path / "log"
    args = ["--groups", "2", "--samples", "2", "--max-tokens", "30", "--context", "64", "--held-out", "2", "-q"]
    done = hadal("rl", MODEL, "--prompts", prompts, "--out", out, "--log", log, "--steps", "1", *args)
    assert done.returncode == 0, done.stderr
    assert 0 <= steps(log)[0]["held_out_reward"] <= 1
    args += ["--held-out-samples", "5", "--eval-every", "1"]
    done = hadal("rl", MODEL, "--prompts", prompts, "--out", tmp_path / "more", "--log", log, "--steps", "1", *args)
    assert done.returncode == 0, done.stderr
    lines = steps(log)
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:  # 10 answers to two prompts
        right, best = line["held_out_reward"] * 10, line["held_out_best"] * 2
        assert abs(right - round(right)) < 1e-9 and best in (0, 1, 2) and best <= right <= 5 * best


def test_more_samples_than_the_queue_takes(hadal, tmp_path):
    args = ["--task", "format", "--groups", "1", "--samples", "1", "--max-tokens", "1", "--context", "64", "--reward-control", "zero"]
    done = hadal("rl", MODEL, *args, "--steps", "1", "--held-out", "150", "--held-out-samples", "8", "--out", tmp_path / "out", "--log", tmp_path / "log", "-q")
    assert done.returncode == 0, done.stderr
    assert 0 <= steps(tmp_path / "log")[0]["held_out_reward"] <= 1


def test_a_model_from_random_weights(refused, hadal, data, tmp_path):
    """It begins at the loss of a uniform choice, learns, goes on to the same bits, and is served."""
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "vocab_size": config["vocab_size"]}
    path = tmp_path / "small.json"
    path.write_text(json.dumps(config))
    args = ["train", MODEL, "--init", path, "--data", data, "--lr", "3e-3", "--batch-tokens", "60", "--rows", "64", "-q"]
    log = tmp_path / "log"
    assert hadal(*args, "--out", tmp_path / "one", "--steps", "12", "--log", log).returncode == 0
    lines = steps(log)
    assert abs(lines[0]["loss"] - math.log(config["vocab_size"])) < 0.2 and lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert len({line["tokens"] for line in lines}) > 1  # as many examples as fit
    last = tmp_path / "one" / "step-00000012"
    assert hadal("inspect", last / "model", "--strict", "--values").returncode == 0
    assert hadal("generate", last / "model", "-p", "Say heron.", "-q", "--max-tokens", "4").returncode == 0

    assert hadal(*args, "--out", tmp_path / "two", "--steps", "6").returncode == 0
    assert hadal(*args, "--out", tmp_path / "two", "--steps", "12", "--resume").returncode == 0
    assert digests(last)[:2] == digests(tmp_path / "two" / "step-00000012")[:2]
    assert hadal(*args, "--out", tmp_path / "three", "--steps", "1", "--seed", "2").returncode == 0
    starts = [(tmp_path / name / "start" / "model.safetensors").read_bytes() for name in ("one", "two", "three")]
    assert starts[0] == starts[1] != starts[2]

    path.write_text("{}")
    assert "small.json" in refused(*args, "--out", tmp_path / "four")
    assert "longest example" in refused(*args[:2], "--data", data, "--batch-tokens", "8", "--out", tmp_path / "four")
    assert not (tmp_path / "four").exists()


def values(path, name):
    """A float32 or bfloat16 tensor."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + size])[name]
    data = raw[8 + size :][slice(*entry["data_offsets"])]
    if entry["dtype"] == "BF16":
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    return struct.unpack(f"<{len(data) // 4}f", data)


def changed(model):
    """Names of the tensors that differ from those of the model that training began with."""
    before, after = tensors(MODEL / "model.safetensors"), tensors(model / "model.safetensors")
    return {name for name in before if before[name] != after[name]}


MTP_LAYER = json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_the_mtp_layer_and_balanced_experts(hadal, data, tmp_path):
    """Its loss falls, too, and biases move by the rate alone; all of it goes on to the same bits."""
    args = ["--mtp-weight", "0.3", "--balance", "0.01", "-q"]
    log = tmp_path / "log"
    train(hadal, data, tmp_path / "whole", *args, "--steps", "6", "--log", log)
    lines = steps(log)
    assert lines[-1]["mtp_loss"] < 0.6 * lines[0]["mtp_loss"] and lines[-1]["loss"] < lines[0]["loss"]
    model = tmp_path / "whole" / "step-00000006" / "model"
    assert any(f".layers.{MTP_LAYER}.eh_proj" in name for name in changed(model))
    moved = [b - a for a, b in zip(values(MODEL / "model.safetensors", BIAS), values(model / "model.safetensors", BIAS))]
    assert any(moved) and all(abs(m / 0.01 - round(m / 0.01)) < 0.01 and abs(m) < 0.0601 for m in moved), moved

    train(hadal, data, tmp_path / "two", *args, "--steps", "3", "--threads", "1", "--rows", "40", "--context", "41")
    train(hadal, data, tmp_path / "two", *args, "--steps", "6", "--resume")
    assert digests(model.parent)[:2] == digests(tmp_path / "two" / "step-00000006")[:2]


def test_rl_near_a_reference_with_its_mtp_layer(refused, hadal, tmp_path):
    """The reference is where the run began; the MTP layer learns from samples and leaves the rest alone."""
    plain = learn(hadal, tmp_path / "plain", "--steps", "1", "--clip", "0")
    args = ["--kl", "0.5", "--kl-kind", "k2", "--mtp-weight", "0.1", "--clip", "0"]
    lines = learn(hadal, tmp_path / "out", "--steps", "2", *args)
    assert lines[0]["reference_kl"] == 0 < lines[1]["reference_kl"]
    assert all(line["dlogp_max"] == 0 for line in lines) and lines[0]["loss"] == plain[0]["loss"]
    learn(hadal, tmp_path / "one", "--steps", "1", *args)
    with_mtp, without = (changed(tmp_path / name / "step-00000001" / "model") for name in ("one", "plain"))
    own = {name for name in with_mtp if f".layers.{MTP_LAYER}." in name}
    assert own and with_mtp - own == without - own
    again = learn(hadal, tmp_path / "one", "--steps", "2", "--resume", *args)  # the same reference
    assert again[1]["reference_kl"] == lines[1]["reference_kl"]
    other = ROOT / "tests" / "golden" / "v3_small_mtp"
    why = refused("rl", MODEL, "--task", "sort", "--out", tmp_path / "x", "--context", "128", "--kl", "1", "--reference", other)
    assert "a vocabulary of" in why
