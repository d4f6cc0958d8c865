"""A DSpark drafter in a folder of the model's, beside its MTP layer: taken where it is asked for, refused by name."""

import json
import shutil

import make_model
import pytest
from conftest import BACKEND
from make_model import io
from toy_models import VOCAB, add_toy_tokenizer

MTP, DSPARK = (dict(c, vocab_size=VOCAB) for c in (make_model.V4, make_model.V4_DSPARK))


def stages(tensors):
    return {name: t for name, t in tensors.items() if name.startswith("mtp.")}


@pytest.fixture
def model(tmp_path):
    """A V4 model with an MTP layer, and stages that a seed of their own made."""
    folder = make_model.write_model(tmp_path / "model", MTP)
    add_toy_tokenizer(folder)
    make_model.write_model(folder / "dspark", DSPARK, stages(make_model.tensors(DSPARK, seed=1)))
    return folder


@pytest.fixture
def generate(hadal):
    def run(model, *args):
        result = hadal("generate", model, "--raw", "-p", "the cat sat", "--max-tokens", "40", "--temperature", "1", "--seed", "3", "--json", "--backend", BACKEND, *args)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run


def test_it_drafts_only_where_it_is_asked_for(generate, model, tmp_path):
    whole = make_model.write_model(tmp_path / "whole", DSPARK, {**make_model.tensors(MTP), **stages(make_model.tensors(DSPARK, seed=1))})
    add_toy_tokenizer(whole)
    plain = generate(model, "--drafter", "none")
    own = {asked: generate(model, "--drafter", asked, "--draft-tokens", "7") for asked in ("auto", "mtp", "dspark")}
    one_file = generate(whole, "--drafter", "dspark", "--draft-tokens", "7")
    assert {answer["text"] for answer in (plain, one_file, *own.values())} == {plain["text"]}
    counts = {asked: (answer["drafted"], answer["accepted"]) for asked, answer in own.items()}
    assert counts["auto"] == counts["mtp"] != counts["dspark"] == (one_file["drafted"], one_file["accepted"])


def edit(model, **keys):
    path = model / "dspark" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def rewrite(model, bend):
    tensors = stages(make_model.tensors(DSPARK, seed=1))
    bend(tensors)
    make_model.write_model(model / "dspark", DSPARK, tensors)


FAULTS = {
    "no folder": (lambda m: shutil.rmtree(m / "dspark"), "is 'mtp', and it has no folder dspark"),
    "another model's": (lambda m: edit(m, head_dim=64), "dspark/config.json: a drafter for another model: head_dim differs"),
    "other layers": (lambda m: edit(m, compress_ratios=[0, 0, 4, 128, 4, 0, 0]), "layer_types differs"),
    "no drafter": (lambda m: edit(m, **dict.fromkeys((k for k in DSPARK if k.startswith("dspark_")))), "no dspark_* key describes a drafter"),
    "a bad config": (lambda m: edit(m, dspark_block_size=99), "dspark_block_size"),
    "no weights": (lambda m: (m / "dspark" / io.SINGLE).unlink(), "dspark: holds no weights"),
    "no JSON": (lambda m: (m / "dspark" / "config.json").write_text("{"), "dspark/config.json"),
    "a stage is gone": (lambda m: rewrite(m, lambda t: t.pop("mtp.1.attn.wkv.weight")), "missing tensor mtp.1.attn.wkv.weight"),
    "a tensor of the model": (lambda m: rewrite(m, lambda t: t.update({"norm.weight": t["mtp.0.main_norm.weight"]})), "tensor norm.weight: the names of these files begin with mtp."),
    "another shape": (lambda m: rewrite(m, lambda t: t.update({"mtp.0.main_norm.weight": t["mtp.0.attn.q_norm.weight"]})), "mtp.0.main_norm.weight"),
    "cut short": (lambda m: (m / "dspark" / io.SINGLE).write_bytes((m / "dspark" / io.SINGLE).read_bytes()[:-1]), "dspark/model.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_folders_are_refused(hadal, generate, model, fault):
    bend, said = FAULTS[fault]
    bend(model)
    refused = hadal("generate", model, "--raw", "-p", "x", "--drafter", "dspark")
    assert refused.returncode == 2 and said in refused.stderr
    generate(model)  # nothing else reads it


def test_a_manifest_lists_it(hadal, model):
    (model / "SHA256SUMS").write_text("0" * 64 + "  config.json\n" + "".join(f"{'0' * 64}  {name}\n" for name in (io.SINGLE, "tokenizer.json", "tokenizer_config.json")))
    refused = hadal("inspect", model, "--manifest", model / "SHA256SUMS")
    assert refused.returncode == 2 and "does not list dspark/" in refused.stderr


def test_updates_bring_it_too(serve, model):
    s = serve("--drafter", "dspark", "--weights-dir", model, model=model)
    ask = {"model_path": str(model)}
    assert s.post("/update_weights_from_disk", ask).status == 200
    (model / "dspark" / io.SINGLE).unlink()
    reply = s.post("/update_weights_from_disk", ask)
    assert reply.status == 400 and "dspark: holds no weights" in reply.text
