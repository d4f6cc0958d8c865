"""--indexer-loss: the indexers of V3.2 and V4 come nearer to attention, and nothing else of the model changes."""

import json

import pytest
from conftest import ROOT
from test_plan import training_plan
from test_train import digests, steps, tensors
from toy_models import make_toy_model

ARGS = ["--batch", "3", "--context", "65", "--clip", "0", "-q"]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"tokens": [(7 * i + k * k) % 90 for k in range(20 + 9 * i)]}) + "\n" for i in range(5)))
    return path


def train(hadal, model, data, out, *args):
    log = out.parent / f"{out.name}.log"
    done = hadal("train", model, "--data", data, "--out", out, "--log", log, *ARGS, *args)
    assert done.returncode == 0, done.stderr
    return steps(log)


@pytest.mark.parametrize("family", ["v32", "v4"])
def test_indexers_learn(hadal, data, tmp_path, family):
    """Of the other tensors one step gives the same bits, with the loss and without; on any threads, in any micro-batches."""
    model = make_toy_model(family, tmp_path / "toy", index_topk=8)
    index = ["--indexer-loss", "0.5"]
    plain = train(hadal, model, data, tmp_path / "plain", "--steps", "1")
    lines = train(hadal, model, data, tmp_path / "one", "--steps", "1", *index)
    assert plain[0]["loss"] == lines[0]["loss"] and lines[0]["indexer_loss"] > 0 and "indexer_loss" not in plain[0]
    before, without, after = (tensors(path / "model.safetensors") for path in (model, tmp_path / "plain/step-00000001/model", tmp_path / "one/step-00000001/model"))
    moved = {name for name in after if after[name] != without[name]}
    assert moved and all("index" in name for name in moved) and all(without[name] == before[name] for name in moved)
    train(hadal, model, data, tmp_path / "two", "--steps", "1", *index, "--threads", "1", "--rows", "64", "--keep-activations", "0")
    assert digests(tmp_path / "two/step-00000001")[:2] == digests(tmp_path / "one/step-00000001")[:2]

    frozen = "embedding,head,attention,compressors,hyper-connections,dense,router,experts,shared,norms"
    lines = train(hadal, model, data, tmp_path / "many", "--steps", "30", "--batch-tokens", "400", *index, "--freeze", frozen, "--lr", "1e-2")
    assert lines[-1]["indexer_loss"] < 0.7 * lines[0]["indexer_loss"], [line["indexer_loss"] for line in lines]
    both = training_plan(model, "--rows", 64), training_plan(model, "--rows", 64, "--indexer")
    assert both[0]["trained"] < both[1]["trained"]


def test_sampler_and_trainer_agree(hadal, tmp_path):
    model, log = make_toy_model("v4", tmp_path / "toy", index_topk=4), tmp_path / "log"
    args = ["--task", "sort", "--groups", "2", "--samples", "3", "--max-tokens", "12", "--context", "128", "--steps", "2", "--entropy", "0.1"]
    done = hadal("rl", model, *args, "--out", tmp_path / "out", "--log", log, "--indexer-loss", "1", "-q")
    assert done.returncode == 0, done.stderr
    lines = steps(log)
    assert all(line["dlogp_max"] == 0 and line["indexer_loss"] > 0 and line["optimizer_steps"] for line in lines)


def test_refused(refused, data, tmp_path):
    args = ["--data", data, "--out", tmp_path / "out", *ARGS, "--indexer-loss", "1"]
    assert "--indexer-loss: this model has no indexer" in refused("train", ROOT / "models/tiny-v3", *args)
    assert "--indexer-loss 1: indexers are trained by one rank only" in refused("train", ROOT / "models/tiny-v4", *args, "--dp", "2")
    assert not (tmp_path / "out").exists()
