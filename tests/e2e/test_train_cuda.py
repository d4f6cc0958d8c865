"""Training on a GPU: its losses are the CPU's, runs repeat and go on to the same bits, and sampler and trainer agree."""

import pytest
from conftest import ROOT
from test_cuda import has_gpu, on_gpu
from test_train import answers_from_the_start, data, digests, steps, tensors  # noqa: F401
from toy_models import make_toy_model

MODELS = [ROOT / "models" / "tiny-v3", ROOT / "models" / "tiny-v4"]


@pytest.fixture
def train(hadal, data, tmp_path):  # noqa: F811
    def run(model, name, *args, count=3):
        log = tmp_path / f"{name}.jsonl"
        done = hadal("train", model, "--data", data, "--out", tmp_path / name, "--batch", 4, "--lr", 5e-4, "--steps", count, "--log", log, "-q", *args)
        assert done.returncode == 0, done.stderr
        return steps(log), digests(tmp_path / name / f"step-{count:08}")

    return run


@on_gpu
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_losses_are_those_of_the_cpu(train, model):
    for args in ([], ["--mtp-weight", 0.3, "--freeze", "none"], ["--optimizer", "muon", "--balance", 0.001, "--freeze", "none"]):
        name = "".join(map(str, args[:2]))
        own, _ = train(model, f"cpu{name}", *args)
        there, first = train(model, f"cuda{name}", *args, "--backend", "cuda")
        for a, b in zip(own, there):
            assert b["loss"] == pytest.approx(a["loss"], rel=2e-3) and b["gradient_norm"] == pytest.approx(a["gradient_norm"], rel=2e-2)
        assert there[0]["loss"] == pytest.approx(own[0]["loss"], rel=1e-5)
        again, second = train(model, f"again{name}", *args, "--backend", "cuda", "--rows", 64, "--context", 65)
        assert first[:2] == second[:2] and [x["loss"] for x in again] == [x["loss"] for x in there]


@on_gpu
@pytest.mark.parametrize("family", ["v32", "v4"])
def test_indexers_are_those_of_the_cpu(train, tmp_path, family):
    """Their loss and what they become, in any micro-batch; nothing else of the model is changed by it."""
    model = make_toy_model(family, tmp_path / "toy", index_topk=8)
    frozen = ["--freeze", "embedding,head,attention,compressors,hyper-connections,dense,router,experts,shared,norms"]
    args = ["--indexer-loss", 0.5, *frozen]
    own, _ = train(model, "cpu", *args)
    there, first = train(model, "cuda", *args, "--backend", "cuda")
    for a, b in zip(own, there):
        assert b["indexer_loss"] == pytest.approx(a["indexer_loss"], rel=1e-3) and b["gradient_norm"] == pytest.approx(a["gradient_norm"], rel=2e-3)
    again, second = train(model, "again", *args, "--backend", "cuda", "--rows", 64, "--context", 65)
    assert first[:2] == second[:2] and [x["indexer_loss"] for x in again] == [x["indexer_loss"] for x in there]
    names = [{n for n, t in tensors(tmp_path / run / "step-00000003/model/model.safetensors").items() if t != tensors(model / "model.safetensors")[n]} for run in ("cpu", "cuda")]
    assert names[0] == names[1] and names[0] and all("index" in name for name in names[0])


@on_gpu
def test_a_run_goes_on_to_the_same_bits(train):
    model = MODELS[0]
    _, whole = train(model, "whole", "--backend", "cuda", count=4)
    train(model, "parts", "--backend", "cuda", count=2)
    _, parts = train(model, "parts", "--backend", "cuda", "--resume", count=4)
    assert parts == whole


@on_gpu
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_sampler_and_trainer_agree(hadal, tmp_path, model):
    for name, args in {"drafts": ["--mtp-weight", "0.1"], "plain": ["--no-drafts", "--kl", "0.01"]}.items():
        log = tmp_path / f"{name}.jsonl"
        command = ["rl", model, "--task", "sort", "--out", tmp_path / name, "--groups", 4, "--samples", 4, "--steps", 3, "--lr", 1e-4, "--context", 256]
        done = hadal(*command, "--backend", "cuda", "--log", log, "-q", *args)
        assert done.returncode == 0, done.stderr
        assert [line["dlogp_max"] for line in steps(log)] == [0, 0, 0]
    answers_from_the_start(tmp_path / "plain" / "step-00000003" / "model", "--backend", "cuda")


@pytest.mark.skipif(has_gpu, reason="for machines without a GPU")
def test_without_a_gpu_it_says_so(hadal, data, tmp_path):  # noqa: F811
    for command in (["train", MODELS[0], "--data", data], ["rl", MODELS[0], "--task", "sort"]):
        done = hadal(*command, "--out", tmp_path / "out", "--backend", "cuda")
        assert done.returncode != 0 and ("no CUDA in this build" in done.stderr or "no GPU" in done.stderr), done.stderr
        auto = hadal(*command, "--out", tmp_path / f"auto-{command[0]}", "--backend", "auto", "--steps", 1, *(["--groups", 1, "--samples", 2, "--context", 200] if command[0] == "rl" else ["--batch", 2]))
        assert auto.returncode == 0, auto.stderr
