"""Another hadal server as the sampler of `hadal rl`: it gets the weights of every step, so the curve is that of the built-in
sampler to the bit; its routes may be replayed; and a server that fails is named."""

import contextlib
import json

import pytest
from conftest import ROOT
from serving import Server
from test_rewards import judge
from test_train import MODEL, digests, steps
from toy_models import make_toy_model

SAME = ("reward", "loss", "gradient_norm", "entropy", "tokens", "dlogp_max", "optimizer_steps")


@pytest.fixture
def rl(hadal, tmp_path):
    def run(out, *args, code=0, model=MODEL):
        log = tmp_path / f"{out}.log"
        done = hadal(
            "rl", model, "--task", "sort", "--out", tmp_path / out, "--log", log, "--groups", "3", "--samples", "4",
            "--max-tokens", "40", "--context", "128", "--lr", "1e-4", "--seed", "3", "-q", *args,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return steps(log) if code == 0 else done.stderr

    return run


def test_a_server_samples_the_same(rl, tmp_path):
    """And with its routes replayed, which are the trainer's own."""
    own = rl("own", "--steps", "2")
    assert any(line["gradient_norm"] > 0 for line in own)
    with contextlib.closing(Server("--weights-dir", tmp_path, "--routed-experts", model=MODEL)) as server:
        remote = ["--rollout", f"http://127.0.0.1:{server.port}", "--rollout-dir", tmp_path, "--steps", "2"]
        for name, args in {"plain": [], "replayed": ["--replay", "routes"]}.items():
            lines = rl(name, *remote, *args)
            assert [[line[k] for k in SAME] for line in lines] == [[line[k] for k in SAME] for line in own]
            assert digests(tmp_path / name / "step-00000002")[:2] == digests(tmp_path / "own" / "step-00000002")[:2]
            assert ("replay_difference" in lines[0]) == bool(args)
        assert all(line["replay_difference"] == 0 for line in lines)
        version = server.get("/get_weight_version").json["weight_version"]
        assert version == f"step-{own[0]['optimizer_steps']}"  # sampled with before the last step


def test_selections_of_indexers_are_replayed(rl, hadal, tmp_path):
    """A model whose indexer selects 4 keys of prompts of 24 and more: its own ones change nothing."""
    model = make_toy_model("v4", tmp_path / "toy", index_topk=4)
    first = ["--steps", "2"]
    own = rl("own", *first, model=model)
    with contextlib.closing(Server("--weights-dir", tmp_path, "--indexer-topk", "--routed-experts", model=model)) as server:
        remote = ["--rollout", f"http://127.0.0.1:{server.port}", "--rollout-dir", tmp_path]
        for replay in ("indexer", "routes,indexer"):
            lines = rl(replay.replace(",", "-"), *first, *remote, "--replay", replay, model=model)
            assert [[line[k] for k in SAME] for line in lines] == [[line[k] for k in SAME] for line in own]
            assert all(line["indexer_difference"] == 0 for line in lines)
            assert ("replay_difference" in lines[0]) == ("routes" in replay)
    with contextlib.closing(Server("--weights-dir", tmp_path, model=MODEL)) as server:
        said = rl("none", "--steps", "1", "--rollout", f"http://127.0.0.1:{server.port}", "--rollout-dir", tmp_path, "--replay", "indexer", code=2)
        assert "this model has no indexer" in said


def test_servers_that_fail_stop_the_run(refused, rl, tmp_path):
    args = ["--steps", "1", "--rollout-retries", "1", "--rollout-dir", tmp_path]

    def why(answer):
        with judge(answer) as (url, asked):
            said = rl("out", *args, "--rollout", url[: -len("/score")], code=5)
            assert not (tmp_path / "out").exists()
            return said, asked

    said, asked = why(lambda *_: (503, b"busy"))
    assert "--rollout: new weights, after 2 tries: HTTP 503: busy" in said and len(asked) == 2
    assert "no success: no room" in why(lambda *_: (200, b'{"success": false, "message": "no room"}'))[0]

    def lies(_, q):
        return 200, json.dumps({"success": True} if "model_path" in q else [{"meta_info": {}}] * 4).encode()

    assert "--rollout: samples, after 2 tries: a sample of no or too many tokens" in why(lies)[0]
    plain = ["rl", MODEL, "--task", "sort", "--out", tmp_path / "out"]
    assert "needs --rollout" in refused(*plain, "--replay", "routes")
    assert "needs --rollout-dir" in refused(*plain, "--rollout", "http://127.0.0.1:1")
    assert "must begin with http" in refused(*plain, "--rollout", "x", "--rollout-dir", tmp_path)
