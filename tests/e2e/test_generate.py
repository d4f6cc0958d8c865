"""hadal generate and the engine behind it: the same text however it is computed."""

import json
import pathlib
import re
import subprocess

import numpy as np
import pytest
from conftest import BACKEND, HADAL, ROOT
from toy_models import FAMILIES, add_toy_tokenizer, make_toy_model

TINY = ROOT / "models" / "tiny-v4"
EXAMPLE = pathlib.Path(HADAL).parent / "examples" / "side_by_side"
OTHER_DRAFTERS = ("v3", "v4_dspark")
PROMPTS = [
    "the cat sat on the mat",
    "then",
    "the cat sat on the mat and then the other cat sat down in the house and the cat",
    "the cat sat on the mat and then the other cat",
    "a",
    "the cat sat on the house",
    "the cat sat on the mat",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = make_toy_model(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return get


@pytest.fixture
def generate(hadal):
    def run(model, *args, prompt="the cat sat on the mat", tokens=40):
        result = hadal("generate", model, "--raw", "-p", prompt, "--max-tokens", tokens, "--json", "--backend", BACKEND, *args)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run


def depths(family, *wanted):
    """Of drafts, without those that a family without an MTP layer refuses."""
    return [k for k in wanted if family != "v2" or k in (0, "auto")]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_does_not_depend_on_how_it_is_computed(generate, model, family):
    whole = generate(model(family), "--temperature", "1", "--seed", "5")
    assert whole["output_tokens"] >= 1 and whole["finish"] in ("length", "stop")
    for way in (["--chunk", "5", "--threads", "3"], *(["--draft-tokens", k] for k in depths(family, "3", "auto"))):
        other = generate(model(family), "--temperature", "1", "--seed", "5", *way)
        assert other["text"] == whole["text"], way
        assert other["output_tokens"] == whole["output_tokens"], way


@pytest.fixture
def shared_model(shared, tmp_path):
    """A shared case, which has no tokenizer, with the toy one of the same size."""

    def get(name):
        out = tmp_path / name
        out.mkdir()
        for file in "config.json", "model.safetensors":
            (out / file).symlink_to(shared / "cases" / name / file)
        add_toy_tokenizer(out)
        return out

    return get


def drive(case, *crowd):
    driver = pathlib.Path(HADAL).parent / "drive_answers"
    if not driver.exists():
        pytest.skip(f"no {driver}: make drivers")
    result = subprocess.run([driver, case, *crowd], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["cached"] > 0 and seen["retracted"] > 0
    return seen


@pytest.mark.parametrize("family", [*(pytest.param(f, marks=[pytest.mark.threads] if f in OTHER_DRAFTERS else []) for f in FAMILIES), "tiny-v4"])
def test_answers_do_not_depend_on_how_they_are_computed_in_short(model, family):
    """The same under the sanitizers too: 3 of 6 requests, 5 of 16 tokens, 6 of 9 ways; 64 side by
    side and 64 under pressure. Of the shipped model 8. The thread sanitizer sees the families with
    other drafters; what else differs between them has no threads of its own."""
    drive(TINY, "8") if family == "tiny-v4" else drive(model(family), "64")


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in ("tiny-v4", *(f"deepseek_{name}" for name in FAMILIES if "dspark" not in name)))])
def test_answers_do_not_depend_on_how_they_are_computed(hadal, request, model, family, tmp_path):
    """Side by side, chunks, threads, drafts, caches, pressure, several answers: one program does all."""
    if family in FAMILIES:
        case = model(family)
    else:
        case = TINY if family == "tiny-v4" else request.getfixturevalue("shared_model")(family)
    seen = drive(case)
    if family == "tiny-v4":
        assert seen["accepted"] > 100
    tokens, out = tmp_path / "tokens.json", tmp_path / "out.npy"
    tokens.write_text(json.dumps(seen["prompt"]))
    assert hadal("logits", case, "--tokens", tokens, "--out", out, "-q").returncode == 0
    logits = np.load(out).astype(np.float64)[:-1]
    known = logits[np.arange(len(logits)), seen["prompt"][1:]] - np.log(np.exp(logits).sum(1))
    assert np.abs(known - seen["scores"]).max() < 1e-5


def test_several_answers(hadal, generate, model):
    case = model("v4")
    args = ["--raw", "-p", "the cat", "--max-tokens", "12", "--temperature", "1", "--seed", "7"]
    lone = [generate(case, "--temperature", "1", "--seed", s, prompt="the cat", tokens=12)["text"] for s in (7, 8)]
    args += ["--backend", BACKEND]
    lines = hadal("generate", case, *args, "--n", "2", "--json").stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == lone
    assert hadal("generate", case, *args, "--n", "2", "-q").stdout == "\n\n".join(lone)


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_hold_on_any_model(generate, model, family, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99},
                                  "ok": {"type": "boolean"}}, "required": ["n", "ok"], "additionalProperties": False}))  # fmt: skip
    for seed, depth in enumerate(depths(family, 0, 3, 7, "auto")):
        sampling = ["--temperature", "1.5", "--seed", seed, "--draft-tokens", depth]
        said = json.loads(generate(model(family), "--schema", schema, *sampling, tokens=80)["text"])
        assert set(said) == {"n", "ok"} and 0 <= said["n"] <= 99 and isinstance(said["ok"], bool)
        assert generate(model(family), "--choice", "yes|no", *sampling)["text"] in ("yes", "no")
        assert re.fullmatch("[a-c]{2,6}!", generate(model(family), "--regex", "[a-c]{2,6}!", *sampling)["text"])


@pytest.mark.parametrize(
    ("family", "asked", "said"),
    [("v4", "dspark", "is 'mtp'"), ("v4_dspark", "mtp", "is 'dspark'"), ("v2", "mtp", "is 'none'"),
     ("v4", "eagle", "eagle")],
)  # fmt: skip
def test_another_drafter_is_refused(hadal, model, family, asked, said):
    result = hadal("generate", model(family), "-p", "x", "--raw", "--drafter", asked)
    assert result.returncode == 2 and asked in result.stderr and said in result.stderr


@pytest.mark.parametrize(("family", "own"), [("v4", "mtp"), ("v4_dspark", "dspark"), ("v2", "none")])
def test_the_drafter_changes_no_text(generate, model, family, own):
    plain = generate(model(family), "--drafter", "none", "--temperature", "1")
    assert plain["drafted"] == 0
    for asked in ("auto", own):
        same = generate(model(family), "--drafter", asked, "--temperature", "1")
        assert same["text"] == plain["text"] and (same["drafted"] > 0) == (own != "none")


@pytest.mark.parametrize("family", ["v3", "v32", "v4", "v4_dspark"])
def test_drafts_are_proposed(generate, model, family):
    drafted = generate(model(family), "--draft-tokens", "3", tokens=30)
    assert drafted["drafted"] > 0 and 0 <= drafted["accepted"] <= drafted["drafted"]


def test_seed_and_temperature_matter(generate, model):
    case = model("v4")
    texts = {generate(case, "--temperature", "1.5", "--seed", s)["text"] for s in range(4)}
    assert len(texts) > 1
    assert generate(case, "--temperature", "1.5", "--top-k", "1")["text"] == generate(case)["text"]


def test_a_stop_string_ends_the_text_and_is_not_shown(generate, model):
    whole = generate(model("v4"), "--temperature", "1", "--seed", "3", tokens=60)
    stop = whole["text"][10:13]
    ended = generate(model("v4"), "--temperature", "1", "--seed", "3", "--stop", stop, tokens=60)
    assert ended["finish"] == "stop"
    assert ended["text"] == whole["text"][: whole["text"].index(stop)]


def test_chat_prompt_is_the_rendered_one(hadal, model, tmp_path):
    case = model("v4")
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": "the cat"}]))
    rendered = hadal("render", case, "--messages", messages).stdout
    chat = hadal("generate", case, "-p", "the cat", "--max-tokens", "20", "--json")
    # Raw text tokenizes special tokens too, but begins with one more BOS than the rendering has.
    ids = hadal("tokenize", case, "--special", input=rendered).stdout
    assert json.loads(chat.stdout)["prompt_tokens"] == len(json.loads(ids))


def test_plain_output_is_the_text_and_nothing_else(hadal, generate, model):
    case = model("v4")
    plain = hadal("generate", case, "--raw", "-p", "the cat", "--max-tokens", "12")
    assert plain.returncode == 0
    assert plain.stdout == generate(case, prompt="the cat", tokens=12)["text"]
    assert "prompt tokens" in plain.stderr


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "either --prompt TEXT or --file FILE"),
        (["-p", "x", "-f", "y"], "either --prompt TEXT or --file FILE"),
        (["-p", "x", "--max-tokens", "999999"], "exceed the context"),
        (["-p", "the cat " * 1200, "--raw"], "tokens > 2047 maximum"),
        (["-p", "x", "--temperature", "-1"], "out of range"),
        (["-p", "x", "--draft-tokens", "8"], "out of range"),
        (["-p", "x", "--thinking", "maybe"], "none of"),
        (["-p", "x", "--stop", ""], "stop[0]"),
        (["-p", "x", "--regex", "("], "invalid_pattern"),
        (["-p", "x", "--regex", "a", "--choice", "a"], "one of --schema, --regex and --choice"),
        (["-p", "x", "--schema", "/nowhere"], "/nowhere"),
    ],
)
def test_refusals(refused, model, args, part):
    assert part in refused("generate", model("v4"), *args)


def side_by_side(model, max_tokens, drafts, kv_tokens, prompts, status=0):
    result = subprocess.run(
        [EXAMPLE, model, str(max_tokens), str(drafts), str(kv_tokens), *prompts],
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == status, result.stderr
    return result.stdout, result.stderr.decode()


@pytest.mark.slow  # the example is built without sanitizers
def test_the_example_names_what_was_refused():
    answers, said = side_by_side(TINY, 8, 0, 128, ["Once", "word " * 400, "Two"], status=1)
    first, second, third, end = answers.split(b"\n")
    assert first and not second and third and not end
    assert said.startswith("error: prompt 2 is refused: prompt is too long: ") and said.count("error") == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_neighbors_and_pressure_change_nothing(model, family):  # FT23
    """Many at once, with room for all; then with a cache that makes them take turns."""
    roomy, _ = side_by_side(model(family), 50, 0, 500, PROMPTS)
    tight, figures = side_by_side(model(family), 50, 0, 150, PROMPTS)
    drafted, _ = side_by_side(model(family), 50, depths(family, 3, 0)[0], 150, PROMPTS)
    assert tight == roomy and drafted == roomy
    alone, _ = side_by_side(model(family), 50, 0, 500, PROMPTS[:1])
    assert roomy.startswith(alone)
    assert "steps" in figures
