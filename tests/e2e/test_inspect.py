"""hadal inspect: whole checkpoints, incomplete ones, configs alone, and the real sizes."""
import json
import math
import pathlib
import os
import shutil
import struct
import subprocess
import sys

import make_model
import pytest
import quantize_case
from conftest import HADAL
from make_model import CONFIGS, io

CONFIG_FILES = make_model.Path(__file__).resolve().parents[1] / "configs"


def inspect(hadal, *args, code=0):
    result = hadal("inspect", "--json", *args)
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout)


def counted(tensors):
    """Elements without what nobody calls a parameter: router biases and hash tables."""
    skip = ("tid2eid", "gate.bias", "e_score_correction_bias")
    return sum(math.prod(t.shape) for name, t in tensors.items() if not name.endswith(skip))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_are_whole(hadal, tmp_path, name, shards):
    made = make_model.tensors(CONFIGS[name])
    make_model.write_model(tmp_path, CONFIGS[name], made, shards)
    seen = inspect(hadal, "--strict", tmp_path)
    assert seen["source"] == "checkpoint" and seen["files"] == shards
    assert seen["problem"] is None and seen["notices"] == []
    assert seen["missing"] == seen["unknown"] == seen["ignored"] == []
    assert seen["tensors"] == len(made)
    assert seen["model"]["mtp_layers"] == make_model.drafter_layers(CONFIGS[name])
    total = seen["weights"]["main"]["total"], seen["weights"]["mtp"]["total"]
    assert sum(t["bytes"] for t in total) == sum(len(t.data) for t in made.values())
    assert sum(t["bytes"] for t in total) == seen["tensor_bytes"]
    assert sum(t["parameters"] for t in total) == counted(made)
    experts = [n for n in made if ".experts." in n]
    elsewhere = sum(len(made[n].data) for n in experts)
    gates = {n.split(".experts.")[0] + n.split(".experts.")[1].split(".")[0] for n in experts}
    assert seen["elsewhere"] == {"experts": len(gates), "bytes": elsewhere, "rest_bytes": seen["tensor_bytes"] - elsewhere}
    for group in seen["weights"].values():
        for key in ("parameters", "active", "bytes"):
            parts = sum(part[key] for part in group["parts"].values())
            assert parts == group["total"][key]


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_shared_cases_are_whole(hadal, shared, case):
    directory = shared / "cases" / case
    seen = inspect(hadal, "--strict", directory)
    assert seen["family"] == case
    assert seen["problem"] is None and seen["missing"] == []
    assert seen["tensors"] == len(io.read_checkpoint(directory))


def test_both_spellings_say_the_same(hadal, tmp_path):
    for name in ("v2", "v3", "v32", "v4"):
        flat = inspect(hadal, make_model.write_model(tmp_path / name, CONFIGS[name]))
        other = f"{name}_nested"
        nested = inspect(hadal, make_model.write_model(tmp_path / other, CONFIGS[other]))
        assert flat == nested


def test_tensors_are_listed(hadal, tmp_path):
    made = make_model.tensors(CONFIGS["v4"])
    make_model.write_model(tmp_path, CONFIGS["v4"], made, shards=2)
    rows = {row["name"]: row for row in inspect(hadal, "--tensors", tmp_path)["tensor_list"]}
    assert set(rows) == set(made)
    for name, t in made.items():
        assert rows[name]["dtype"] == t.dtype and rows[name]["shape"] == list(t.shape)
        assert rows[name]["bytes"] == len(t.data)
    sample = rows["layers.2.ffn.experts.3.w2.weight"]
    assert (sample["role"], sample["layer"], sample["expert"]) == ("EXPERT_DOWN", 2, 3)
    assert rows["norm.weight"]["layer"] is None
    assert rows["mtp.0.norm.weight"]["layer"] == 5
    text = hadal("inspect", "--tensors", tmp_path).stdout
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "EXPERT_DOWN" in lines["layers.2.ffn.experts.3.w2.weight"]
    assert "-of-00002.safetensors" in lines["norm.weight"]


def test_text_is_aligned_and_plain(hadal, tmp_path):
    result = hadal("inspect", make_model.write_model(tmp_path, CONFIGS["v4"]))
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert any(line.split() == ["family", "deepseek_v4"] for line in lines)
    head = next(i for i, line in enumerate(lines) if line.startswith("weights"))
    rows = lines[head + 1 : lines.index("", head)]
    end = lines[head].index("bytes") + len("bytes")
    assert rows and all(row[end - 1].isdigit() and row[end] == " " for row in rows)
    assert "\x1b" not in result.stdout


# ---- what is not whole ------------------------------------------------------------------


def without(config, *drop):
    return {name: t for name, t in make_model.tensors(config).items()
            if not any(part in name for part in drop)}


def test_missing_tensors(hadal, tmp_path):
    made = without(CONFIGS["v3"], "layers.1.self_attn.o_proj")
    make_model.write_model(tmp_path, CONFIGS["v3"], made)
    result = hadal("inspect", tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        f"error: {tmp_path}: missing tensor model.layers.1.self_attn.o_proj.weight\n"
    )
    assert "missing: 1 tensor\n  model.layers.1.self_attn.o_proj.weight\n" in result.stdout
    assert "routed experts" in result.stdout


def test_many_missing_tensors_are_counted(hadal, tmp_path):
    made = without(CONFIGS["v3"], "layers.1.")
    gone = len(make_model.shapes(CONFIGS["v3"])) - len(made)
    make_model.write_model(tmp_path, CONFIGS["v3"], made)
    result = hadal("inspect", tmp_path)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    named = result.stderr.count("model.layers.1.")
    assert 5 <= named <= 10 and result.stderr.endswith(f" and {gone - named} more\n")
    assert f"missing: {gone} tensors" in result.stdout
    seen = inspect(hadal, tmp_path, code=2)
    assert len(seen["missing"]) == gone and "missing tensor" in seen["problem"]


def test_dspark_stages_come_whole_or_not_at_all(hadal, tmp_path):
    config = CONFIGS["v4_dspark"]
    make_model.write_model(tmp_path / "none", config, without(config, "mtp."))
    seen = inspect(hadal, tmp_path / "none")
    assert seen["model"]["drafter"] == "dspark"
    assert seen["model"]["mtp_declared"] == 2 and seen["model"]["mtp_layers"] == 0
    for part in ("mtp.0.", "mtp.1.", "mtp.0.main_proj", "mtp.1.markov_head.markov_w2"):
        make_model.write_model(tmp_path / part, config, without(config, part))
        result = hadal("inspect", tmp_path / part)
        assert result.returncode == 2 and part in result.stderr


@pytest.mark.parametrize("name, size", [("v4_flash_0731", 166878536440), ("v4_pro_0813", 892727580904)])
def test_dated_releases_have_their_published_totals(hadal, name, size):
    seen = inspect(hadal, pathlib.Path(__file__).parents[1] / "configs" / f"{name}.json")
    total = seen["weights"]["main"]["total"], seen["weights"]["mtp"]["total"]
    assert sum(t["bytes"] for t in total) == size
    assert seen["model"]["drafter"] == "dspark" and seen["model"]["mtp_layers"] == 3


def test_v41_has_its_published_totals(hadal):
    """Bytes by part and elements by type; the hub counts biases of routers, which are no parameters here."""
    seen = inspect(hadal, pathlib.Path(__file__).parents[1] / "configs" / "v4_1_flash.json")
    main, drafter = (seen["weights"][k] for k in ("main", "mtp"))
    totals = [main["total"], drafter["total"]]
    assert sum(t["bytes"] for t in totals) == 510_286_023_000
    assert totals[1]["bytes"] == 7_932_874_632
    parts = main["parts"]
    assert parts["routed experts"]["bytes"] == 288_777_830_400
    assert drafter["parts"]["routed experts"]["bytes"] == 7_219_445_760
    assert parts["embedding"]["bytes"] + parts["output head"]["bytes"] == 2_647_654_400
    assert parts["image tower (not run)"]["bytes"] == 970_536_960
    size = {"F4_E2M1": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4}  # files have bytes of two FP4 elements
    elements = {name: sum(t["formats"][name] for t in totals) // n for name, n in size.items()}
    assert elements == {"F4_E2M1": 278_585_671_680, "F8_E4M3": 204_015_223_296, "F8_E8M0": 23_563_015_184,
                        "BF16": 1_976_441_856, "F32": 42_307_282}  # fmt: skip
    hub = 763_205_315_794
    assert sum(elements.values()) + elements["F4_E2M1"] - elements["F8_E8M0"] == hub
    biases = 2 * (40 * 384 + 3 * 128)  # for text and for images
    assert sum(t["parameters"] for t in totals) == hub - biases
    assert seen["model"]["drafter"] == "dspark" and seen["model"]["mtp_layers"] == 3


@pytest.mark.parametrize("family, layer", [("v3", "layers.3."), ("v32", "layers.3."),
                                           ("v4", "mtp.0.")])
def test_mtp_layers(hadal, tmp_path, family, layer):
    config = CONFIGS[family]
    make_model.write_model(tmp_path / "none", config, without(config, layer))
    seen = inspect(hadal, tmp_path / "none")
    assert seen["model"]["mtp_declared"] == 1 and seen["model"]["mtp_layers"] == 0
    assert "the files hold 0" in hadal("inspect", tmp_path / "none").stdout
    make_model.write_model(tmp_path / "half", config, without(config, layer + "enorm"))
    result = hadal("inspect", tmp_path / "half")
    assert result.returncode == 2 and layer + "enorm" in result.stderr
    if family != "v4":
        made = make_model.tensors(config, mtp_copies=False)
        make_model.write_model(tmp_path / "no_copies", config, made)
        assert inspect(hadal, tmp_path / "no_copies")["model"]["mtp_layers"] == 1


def test_unknown_tensors(hadal, tmp_path):
    made = make_model.tensors(CONFIGS["v2"])
    made["model.layers.0.self_attn.rotary_emb.inv_freq"] = io.from_array(make_model.np.zeros(4))
    for i in range(12):
        made[f"extra.{i}"] = io.from_array(make_model.np.zeros((2, 2)))
    make_model.write_model(tmp_path, CONFIGS["v2"], made)
    seen = inspect(hadal, tmp_path)
    assert len(seen["unknown"]) == 12 and len(seen["ignored"]) == 1
    text = hadal("inspect", tmp_path).stdout
    assert "unknown: 12 tensors" in text and "extra.9\n  and 2 more" in text
    strict = hadal("inspect", "--strict", tmp_path)
    assert strict.returncode == 2
    assert strict.stderr == f"error: {tmp_path}: tensor extra.0: unknown to this model (12 such)\n"


def test_names_outside_ascii(hadal, tmp_path):
    """JSON stays JSON where a sentence cuts a letter in two, and in a path of odd bytes."""
    made = make_model.tensors(CONFIGS["v2"])
    made["x" + "\u00e9" * 300] = io.from_array(make_model.np.zeros(1))
    directory = tmp_path / os.fsdecode(b"caf\xe9")
    make_model.write_model(directory, CONFIGS["v2"], made)
    seen = inspect(hadal, "--strict", directory, code=2)
    assert seen["unknown"] == ["x" + "\u00e9" * 300] and "unknown to this model" in seen["problem"]


def test_index_notices(hadal, tmp_path):
    make_model.write_model(tmp_path, CONFIGS["v2"], shards=2)
    index = json.loads((tmp_path / io.INDEX).read_text())
    index["metadata"]["total_size"] += 1
    del index["weight_map"]["model.norm.weight"]
    (tmp_path / io.INDEX).write_text(json.dumps(index))
    seen = inspect(hadal, tmp_path)
    assert len(seen["notices"]) == 2 and seen["problem"] is None


# ---- configs alone ------------------------------------------------------------------------


def test_config_alone(hadal, tmp_path):
    path = CONFIG_FILES / "v4_flash.json"
    seen = inspect(hadal, path)
    assert seen["source"] == "config" and seen["files"] == 0
    assert seen["weights"]["main"]["total"]["parameters"] == 284332230231
    assert seen["weights"]["main"]["total"]["bytes"] == 156015698140
    assert "from the config alone" in hadal("inspect", path).stdout
    (tmp_path / "config.json").write_bytes(path.read_bytes())
    assert inspect(hadal, tmp_path) == seen
    rows = inspect(hadal, "--tensors", tmp_path)["tensor_list"]
    assert sum(row["bytes"] for row in rows) == 159609485896


def test_weights_beside_a_named_config_are_not_read(hadal, tmp_path):
    make_model.write_model(tmp_path, CONFIGS["v2"], {})
    assert inspect(hadal, tmp_path / "config.json")["source"] == "config"
    assert inspect(hadal, tmp_path, code=2)["source"] == "checkpoint"


def test_nothing_there(refused, tmp_path):
    assert "config.json" in refused("inspect", tmp_path)
    assert "nowhere" in refused("inspect", tmp_path / "nowhere")
    refused("inspect")


# ---- the released models, as sparse files of their real size ---------------------------------


def released_layout(config):
    """{name: (dtype, shape)} of the official files."""
    is_v4 = config["model_type"] == "deepseek_v4"
    quantized = "quantization_config" in config
    layout = {}
    for name, (shape, kind) in make_model.shapes(config).items():
        wanted = quantize_case.format_of(name, "fp4" if is_v4 else "fp8", is_v4)
        rows, cols = (*shape, 1)[:2]
        scale_name = name[: -len("weight")] + "scale" if is_v4 else name + "_scale_inv"
        if not quantized or wanted is None:
            dtype = "I64" if kind == "table" else "F32" if kind.endswith("f32") else "BF16"
            layout[name] = dtype, shape
        elif wanted == "fp4":
            layout[name] = "I8", (rows, cols // 2)
            layout[scale_name] = "F8_E8M0", (rows, cols // 32)
        else:
            layout[name] = "F8_E4M3", shape
            blocks = (-(-rows // 128), -(-cols // 128))
            layout[scale_name] = ("F8_E8M0" if is_v4 else "F32"), blocks
    return layout


SIZES = {"BF16": 2, "F32": 4, "I64": 8, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


def write_sparse(directory, layout, shards):
    """Headers alone are written; the data areas are holes."""
    names, weight_map = list(layout), {}
    for i in range(shards):
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        header, at = {}, 0
        for name in part:
            dtype, shape = layout[name]
            end = at + math.prod(shape) * SIZES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        weight_map.update(dict.fromkeys(part, file))
        with open(directory / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + at)
    (directory / io.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.slow
@pytest.mark.parametrize("name, shards, tensors, total", [
    ("v2_lite", 4, 5291, 31412968448),
    ("v3", 163, 91991, 688574839360),
    ("v4_flash", 46, 69187, 159609485896),
    ("v4_pro", 64, 145116, 864704792696),
])
def test_released_sizes(hadal, tmp_path, name, shards, tensors, total):
    config = json.loads((CONFIG_FILES / f"{name}.json").read_text())
    layout = released_layout(config)
    assert len(layout) == tensors
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        write_sparse(tmp_path, layout, shards)
    except OSError as e:
        pytest.skip(f"no sparse files of this size here: {e}")
    try:
        seen = inspect(hadal, "--quick", tmp_path)
    finally:
        shutil.rmtree(tmp_path)  # nothing that copies files should meet these
    assert seen["tensors"] == tensors and seen["tensor_bytes"] == total
    assert seen["missing"] == seen["unknown"] == []
    sums = [seen["weights"][group]["total"]["bytes"] for group in ("main", "mtp")]
    assert sum(sums) == total


# ---- the documented keys ------------------------------------------------------------------------


def keys_of(value):
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*map(keys_of, value.values()))


def test_every_key_is_documented(hadal, tmp_path):
    page = (CONFIG_FILES.parents[1] / "docs" / "checkpoints.md").read_text()
    seen = set()
    for name in ("v3", "v4"):
        directory = make_model.write_model(tmp_path / name, CONFIGS[name])
        document = inspect(hadal, "--tensors", directory)
        for group in document["weights"].values():  # keyed by names of parts and dtypes
            group["parts"] = list(group["parts"].values())
            for total in (*group["parts"], group["total"]):
                total["formats"] = []
        seen |= keys_of(document)
    undocumented = {key for key in seen - {"main", "mtp"} if f"`{key}`" not in page}
    assert undocumented - {"weights", "attention", "experts", "quantization"} == set()


# ---- the forward pass ---------------------------------------------------------------------------


def stages(hadal, name):
    return inspect(hadal, "--stages", CONFIG_FILES / f"{name}.json")


def test_the_page_of_forward_passes_is_what_the_program_prints():
    script = CONFIG_FILES.parents[1] / "scripts" / "make_forward.py"
    command = [sys.executable, str(script), HADAL, "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (script.parents[1] / "docs" / "forward.md").read_text()
    assert page.count("<!-- stages ") > 10 and "```\n```" not in page


@pytest.mark.parametrize("name", ["v2_lite", "v3", "v3_2_exp", "v4_flash", "v4_pro", "moonlight_16b_a3b"])
def test_stages_cover_every_layer_once(hadal, name):
    seen = stages(hadal, name)
    model = inspect(hadal, CONFIG_FILES / f"{name}.json")["model"]
    layers = sorted(layer for block in seen["blocks"] for layer in block["layers"])
    total = model["layers"] + model["mtp_layers"]
    assert seen["layers"] == model["layers"] and seen["mtp_layers"] == model["mtp_layers"]
    assert layers == sorted([*range(total), *range(total)])  # attention and feed-forward
    drafts = [block["block"] for block in seen["blocks"] if block["block"].startswith("draft")]
    assert drafts == (["draft start", "draft head"] if model["mtp_layers"] else [])


def test_stages_multiply_with_every_matrix(hadal):
    """Every matrix of a layer stands in the list of its layer, with the shape of the schema."""
    for name in ("v2_lite", "v3", "v3_2_exp", "v4_flash"):
        config = CONFIG_FILES / f"{name}.json"
        shapes = {}
        for block in stages(hadal, name)["blocks"]:
            for op in block["ops"]:
                for layer in block["layers"] if op.get("matrix") else []:
                    shapes[layer, op["matrix"]["role"]] = op["matrix"]["shape"]
        declared = inspect(hadal, "--tensors", config)["tensor_list"]
        small = ("NORM", "BIAS", "SCALE", "BASE", "FN", "APE", "HASH")
        missing = [
            tensor["name"]
            for tensor in declared
            if tensor["layer"] is not None
            and len(tensor["shape"]) == 2
            and not tensor["role"].endswith(small)
            and tensor["role"] not in ("EMBED", "HEAD")
            and not tensor["role"].startswith("MTP_")
            and shapes.get((tensor["layer"], tensor["role"])) != tensor["shape"]
        ]
        assert missing == [], name


def test_stages_take_shapes_through_the_pass(hadal):
    seen = stages(hadal, "v3")
    ops = [op for block in seen["blocks"] for op in block["ops"] if op["op"]]
    assert {op["op"] for op in ops} >= {"embed", "linear", "attention", "moe_topk", "grouped_gemm"}
    for op in ops:
        if op["op"] == "linear":
            rows, cols = op["matrix"]["shape"]
            assert op["inputs"][0]["shape"][1] == cols and op["outputs"][0]["shape"][1] == rows
    head = [block for block in seen["blocks"] if block["block"] == "step head"][0]
    assert head["ops"][-1]["outputs"][0]["shape"] == ["m", 129280]


def test_stages_refuse_options_that_read_files(hadal):
    for option in ("--tensors", "--strict", "--quick", "--values"):
        result = hadal("inspect", "--stages", option, CONFIG_FILES / "v3.json")
        assert result.returncode == 2 and "--stages reads the config alone" in result.stderr


def test_every_key_of_stages_is_documented(hadal):
    page = (CONFIG_FILES.parents[1] / "docs" / "forward.md").read_text()
    seen = stages(hadal, "v4_flash")
    for block in seen["blocks"]:
        for op in block["ops"]:
            op.pop("attributes", None)
    assert {key for key in keys_of(seen) if f"`{key}`" not in page} == set()
