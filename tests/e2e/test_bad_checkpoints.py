"""Checkpoints that break a rule: one line naming file, tensor and reason, exit code 2.

The rows are those of the table of malformed files that other engines were seen to crash on;
each name starts with its row.
"""
import hashlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import make_model
import numpy as np
import pytest
import quantize_case
from conftest import HADAL, ROOT
from make_model import CONFIGS, io

CONFIG = CONFIGS["v2"]
NORM = "model.norm.weight"  # F32-sized things are easier to bend than matrices


def raw_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    claim = len(text) if length is None else length
    return struct.pack("<Q", claim) + text + data


def entry(dtype="U8", shape=(1,), span=(0, 1)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


def one(**what):
    return raw_file({"a": entry(**what)}, bytes(8))


def text_entry(shape="[1]", span="[0,1]", dtype='"U8"'):
    text = f'{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{span}}}}}'
    return raw_file(text.encode(), bytes(1))


def pair(first, second, n):
    return raw_file({"a": entry("U8", [first[1] - first[0]], first),
                     "b": entry("U8", [second[1] - second[0]], second)}, bytes(n))


FILES = {
    "F01_empty": (b"", "file too short"),
    "F01_seven_bytes": (bytes(7), "file too short"),
    "F01_eight_bytes": (bytes(8), "header empty"),
    "F02_header_of_nothing": (raw_file(b"{}", length=0), "header empty"),
    "F02_header_of_one": (raw_file(b"{}", length=1), "header empty"),
    "F03_header_too_long": (raw_file(b"{}", length=100_000_001), "header over 100000000"),
    "F04_header_past_end": (raw_file(b"{}", length=3), "header past end"),
    "F05_wrap_1": (raw_file(b"{}", length=2**64 - 1), "header past end"),
    "F05_wrap_8": (raw_file(b"{}", length=2**64 - 8), "header past end"),
    "F05_wrap_half": (raw_file(b"{}", length=2**63), "header past end"),
    "F06_array": (raw_file(b"[]"), "header not an object"),
    "F06_space": (raw_file(b" {}"), "header not an object"),
    "F07_not_utf8": (raw_file(b'{"\xff":1}'), "header not JSON"),
    "F07_not_json": (raw_file(b"{nothing}"), "header not JSON"),
    "F07_cut": (raw_file(b'{"a":{"dtype"'), "header not JSON"),
    "F08_nesting": (raw_file(b'{"a":' + b"[" * (33 << 20)), "header nesting"),
    "F09_twice": (raw_file(b'{"a":1,"a":2}'), "duplicate tensor"),
    "F10_number": (raw_file({"a": 1}), "tensor a: bad entry"),
    "F10_no_dtype": (raw_file({"a": {"shape": [], "data_offsets": [0, 0]}}), "bad entry"),
    "F10_no_shape": (raw_file({"a": {"dtype": "U8", "data_offsets": [0, 0]}}), "bad entry"),
    "F10_no_offsets": (raw_file({"a": {"dtype": "U8", "shape": [0]}}), "bad offsets"),
    "F11_one_offset": (text_entry(span="[0]"), "tensor a: bad offsets"),
    "F11_three_offsets": (text_entry(span="[0,1,1]"), "bad offsets"),
    "F11_strings": (text_entry(span='["0","1"]'), "bad offsets"),
    "F11_floats": (text_entry(span="[0.0,1.0]"), "bad offsets"),
    "F11_negative": (text_entry(span="[-1,0]"), "bad offsets"),
    "F12_backwards": (text_entry(span="[1,0]"), "bad offsets"),
    "F13_past_end": (text_entry("[2]", "[0,2]"), "data past end"),
    "F14_huge": (text_entry(span="[18446744073709551615,18446744073709551615]"), "data past end"),
    "F14_wrap": (text_entry(span="[18446744073709551608,18446744073709551609]"), "data past end"),
    "F14_signed": (text_entry(span="[9223372036854775806,9223372036854775807]"), "data past end"),
    "F15_overlap": (pair((0, 4), (3, 6), 6), "overlap"),
    "F15_same_place": (pair((0, 4), (0, 4), 4), "overlap"),
    "F16_hole": (pair((0, 2), (3, 4), 4), "hole"),
    "F16_hole_in_front": (text_entry(span="[1,2]"), "data past end"),
    "F17_trailing": (raw_file({"a": entry()}, bytes(2)), "trailing data"),
    "F18_short_span": (one(dtype="F32", shape=[3], span=[0, 8]), "tensor a: span mismatch"),
    "F18_long_span": (one(dtype="U8", shape=[7], span=[0, 8]), "span mismatch"),
    "F19_2_32": (one(shape=[2**32, 2**32]), "shape overflow"),
    "F19_2_62": (one(dtype="F32", shape=[2**62, 4]), "shape overflow"),
    "F19_2_63": (one(shape=[2**63, 2]), "shape overflow"),
    "F20_negative": (text_entry("[-1]"), "bad shape"),
    "F20_float": (text_entry("[1.5]"), "bad shape"),
    "F20_2_64": (text_entry("[18446744073709551616]"), "shape overflow"),
    "F21_rank_9": (text_entry("[1,1,1,1,1,1,1,1,1]"), "rank 9"),
    "F22_unknown": (text_entry(dtype='"F99"'), 'unknown dtype "F99"'),
    "F22_lower_case": (text_entry(dtype='"bf16"'), "unknown dtype"),
    "F22_number": (text_entry(dtype="7"), "bad entry: dtype"),
    "F22_empty": (text_entry(dtype='""'), "unknown dtype"),
    "F24_half_a_byte": (one(dtype="F4", shape=[3], span=[0, 2]), "misaligned"),
    "F26_metadata_number": (raw_file({"__metadata__": 3}), "bad metadata"),
    "F26_metadata_values": (raw_file({"__metadata__": {"a": 3}}), "bad metadata"),
    "F27_too_many": (raw_file(b'{"":{}' + b',"":{}' * 1_000_002 + b"}"), "too many tensors"),
    "F28_long_name": (raw_file({"n" * (1 << 20): entry()}, bytes(1)), "bad name"),
    "F28_nul": (raw_file(b'{"a\\u0000b":{}}'), "bad name"),
    "F28_line_feed": (raw_file({"a\nb": entry()}, bytes(1)), "bad name"),
    "F28_escape": (raw_file({"\x1b[2J": entry()}, bytes(1)), "bad name"),
}


@pytest.mark.parametrize("row", FILES)
def test_file(refused, tmp_path, row):
    content, reason = FILES[row]
    make_model.write_model(tmp_path, CONFIG, {})
    (tmp_path / io.SINGLE).write_bytes(content)
    line = refused("inspect", tmp_path)
    assert line.startswith(f"error: {tmp_path / io.SINGLE}: ") and reason in line
    assert line.isprintable() and len(line) < 700


def test_metadata_of_50_MiB_is_fine(hadal, tmp_path):
    make_model.write_model(tmp_path, CONFIG)
    content = io.file_bytes(make_model.tensors(CONFIG), {"a": "x" * (50 << 20)})
    (tmp_path / io.SINGLE).write_bytes(content)
    assert hadal("inspect", tmp_path).returncode == 0


# ---- tensors that do not fit the model ----------------------------------------------------


def bent(tmp_path, name, tensor, config=CONFIG):
    made = make_model.tensors(config)
    assert name in made
    made[name] = tensor
    return make_model.write_model(tmp_path, config, made)


def complaint(hadal, directory):
    """The error line of a checkpoint that is described all the same."""
    result = hadal("inspect", directory)
    assert result.returncode == 2 and result.stdout.startswith(str(directory))
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


HIDDEN = CONFIG["hidden_size"]
EMBED = "model.embed_tokens.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"

MISFITS = {
    "F21_scalar": (NORM, io.Tensor("F32", (), np.zeros(4, np.uint8)), "shape mismatch: shape []"),
    "F21_empty": (NORM, io.Tensor("F32", (0,), np.zeros(0, np.uint8)), "shape mismatch"),
    "F23_f64": (NORM, io.from_array(np.zeros(HIDDEN)), "dtype mismatch: F64"),
    "F23_fp8_norm": (NORM, io.Tensor("F8_E4M3", (HIDDEN,), np.zeros(HIDDEN, np.uint8)),
                     "dtype mismatch: F8_E4M3"),
    "F23_integers": (DOWN, io.from_array(np.zeros((48, 80), np.int64)), "dtype mismatch: I64"),
    "F32_transposed": (DOWN, io.bf16(np.zeros((80, 48))), "shape mismatch: shape [80, 48]"),
    "F32_vocabulary": (EMBED, io.bf16(np.zeros((95, HIDDEN))), "shape mismatch: shape [95, 48]"),
    "F33_no_scale": (DOWN, io.Tensor("F8_E4M3", (48, 80), np.zeros(3840, np.uint8)), "bad scale"),
    "F33_no_fp4_scale": (DOWN, io.Tensor("I8", (48, 40), np.zeros(1920, np.uint8)), "bad scale"),
}


@pytest.mark.parametrize("row", MISFITS)
def test_misfit(hadal, tmp_path, row):
    name, tensor, reason = MISFITS[row]
    line = complaint(hadal, bent(tmp_path, name, tensor))
    assert line.startswith(f"error: {tmp_path / io.SINGLE}: tensor {name}: ") and reason in line


def test_F25_unaligned_data_are_read(hadal, tmp_path):
    made = {"odd": io.from_array(np.zeros(1, np.uint8))} | make_model.tensors(CONFIGS["v4"])
    make_model.write_model(tmp_path, CONFIGS["v4"], made)
    assert hadal("inspect", tmp_path).returncode == 0


def quantized(tmp_path, wanted, name="v3"):
    source = make_model.write_model(tmp_path / "plain", CONFIGS[name])
    quantize_case.convert(source, tmp_path / "quantized", wanted, block=16)
    return tmp_path / "quantized"


BAD_SCALES = {"zero": 0.0, "negative": -1.0, "NaN": float("nan"), "infinite": float("inf")}


@pytest.mark.parametrize("fault", BAD_SCALES)
def test_F33_scale_value(hadal, tmp_path, fault):
    directory, name = quantized(tmp_path, "fp8"), DOWN + "_scale_inv"
    made = io.read_checkpoint(directory)
    scales = io.to_f32(made[name]).copy()
    scales[2, 3] = BAD_SCALES[fault]
    made[name] = io.from_array(scales)
    io.write_checkpoint(directory, made)
    line = complaint(hadal, directory)
    assert f"tensor {name}: bad scale: [2, 3] is {fault}" in line
    assert hadal("inspect", "--quick", directory).returncode == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("form", [io.bf16, lambda a: io.from_array(a.astype(np.float32))])
def test_F34_a_weight_that_is_no_number(hadal, tmp_path, bad, form):
    values = np.ones((48, 80))
    values[31, 7] = bad
    directory = bent(tmp_path, DOWN, form(values))
    assert hadal("inspect", directory).returncode == 0  # it asks for a pass over all the bytes
    result = hadal("inspect", "--values", directory)
    assert result.returncode == 2
    assert f"tensor {DOWN}: bad value: [31, 7] is NaN or infinite" in result.stderr


def test_F34_an_fp8_weight_that_is_no_number(hadal, tmp_path):
    directory = quantized(tmp_path, "fp8")
    made = io.read_checkpoint(directory)
    codes = made[DOWN].data.copy()
    codes.reshape(48, 80)[5, 79] = 0xFF
    made[DOWN] = made[DOWN]._replace(data=codes)
    io.write_checkpoint(directory, made)
    result = hadal("inspect", "--values", directory)
    assert result.returncode == 2 and "bad value: [5, 79]" in result.stderr


def test_F41_a_file_that_shrinks_while_it_is_read(tmp_path):
    """The first text shows that the weights are mapped; then the file loses its data."""
    model = shutil.copytree(ROOT / "models" / "tiny-v4", tmp_path / "model")
    program = subprocess.Popen(
        [HADAL, "generate", model, "-p", "Tell me a story."],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert program.stdout.read(1)
    os.truncate(model / "model.safetensors", 200_000)
    _, stderr = program.communicate()
    assert program.returncode == 4
    assert stderr.splitlines()[-1] == b"error: a mapped file was cut short or cannot be read any more"


def test_F33_e8m0_nan(hadal, tmp_path):
    directory, name = quantized(tmp_path, "fp4", "v4"), "layers.1.ffn.experts.2.w1.scale"
    made = io.read_checkpoint(directory)
    codes = made[name].data.copy()
    codes[5] = 255
    made[name] = made[name]._replace(data=codes)
    io.write_checkpoint(directory, made)
    assert f"tensor {name}: bad scale: [2, 1] is NaN" in complaint(hadal, directory)


def test_F33_scale_shape(hadal, tmp_path):
    directory, name = quantized(tmp_path, "fp8"), DOWN + "_scale_inv"
    made = io.read_checkpoint(directory)
    made[name] = io.from_array(np.ones((3, 4), np.float32))
    io.write_checkpoint(directory, made)
    assert f"tensor {name}: bad scale: shape [3, 4]" in complaint(hadal, directory)


def test_F33_global_scale(hadal, tmp_path):
    directory = quantized(tmp_path, "nvfp4")
    name = "model.layers.0.mlp.up_proj.weight_scale_2"
    made = io.read_checkpoint(directory)
    made[name] = io.from_array(np.float32(0))
    io.write_checkpoint(directory, made)
    assert f"tensor {name}: bad scale" in complaint(hadal, directory)


def test_hash_table_out_of_range(hadal, tmp_path):
    name = "layers.0.ffn.gate.tid2eid"
    table = np.zeros((96, 2), np.int64)
    table[7, 1] = 6
    line = complaint(hadal, bent(tmp_path, name, io.from_array(table), CONFIGS["v4"]))
    assert f"tensor {name}: bad expert: [7, 1] is 6, must be below 6" in line


def test_F29_cut_anywhere(hadal, tmp_path):
    """A download that broke off, in the length, in the header and in the data."""
    make_model.write_model(tmp_path, CONFIG)
    whole = (tmp_path / io.SINGLE).read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for n in (0, 5, 8, 100, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        (tmp_path / io.SINGLE).write_bytes(whole[:n])
        result = hadal("inspect", tmp_path)
        assert result.returncode == 2 and result.stdout == ""
        assert n < 9 or "past end" in result.stderr
        assert len(result.stderr.splitlines()) == 1


# ---- the index and its shards --------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path):
    """(directory, index document) of a whole model in three shards."""
    make_model.write_model(tmp_path, CONFIG, shards=3)
    return tmp_path, json.loads((tmp_path / io.INDEX).read_text())


def store(directory, index):
    text = index if isinstance(index, str) else json.dumps(index)
    (directory / io.INDEX).write_text(text)


def shard(i):
    return f"model-{i:05d}-of-00003.safetensors"


@pytest.mark.parametrize("text, reason", [
    ("", "not valid JSON"),
    ("{", "not valid JSON"),
    ("[]", "must hold a JSON object"),
    ("{}", "weight_map"),
    ('{"weight_map":[]}', "weight_map"),
    ('{"weight_map":{}}', "weight_map"),
    ('{"weight_map":{"a":"x","a":"y"}}', "duplicate"),
    ('{"weight_map":' + "[" * 5000, "not valid JSON"),
])
def test_index_document(refused, sharded, text, reason):
    store(sharded[0], text)
    line = refused("inspect", sharded[0])
    assert str(sharded[0] / io.INDEX) in line and reason in line


def test_F35_missing_shard(refused, sharded):
    (sharded[0] / shard(2)).unlink()
    line = refused("inspect", sharded[0])
    assert "missing shard" in line and shard(2) in line and io.INDEX in line


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "a\\b", "", ".", "..", ".hidden",
                                  "a\nb", "\x1b[2J", "x" * 256, 7, None, ["a"]])
def test_F36_shard_name(refused, sharded, name):
    directory, index = sharded
    index["weight_map"][NORM] = name
    store(directory, index)
    line = refused("inspect", directory)
    assert f"tensor {NORM}: bad shard name" in line and line.isprintable()


def test_F36_nul(refused, sharded):
    directory, index = sharded
    store(directory, json.dumps(index).replace(shard(1), "a\\u0000b"))
    assert "not valid JSON" in refused("inspect", directory)


def test_F37_wrong_shard(refused, sharded):
    directory, index = sharded
    right = index["weight_map"][NORM]
    index["weight_map"][NORM] = next(shard(i) for i in (1, 2, 3) if shard(i) != right)
    store(directory, index)
    assert f"tensor {NORM}: not in shard" in refused("inspect", directory)
    index["weight_map"][NORM] = right
    index["weight_map"]["never.seen"] = right
    store(directory, index)
    assert "tensor never.seen: not in shard" in refused("inspect", directory)


def test_F37_in_two_shards(refused, sharded):
    directory, index = sharded
    other = next(shard(i) for i in (1, 2, 3) if shard(i) != index["weight_map"][NORM])
    tensors = io.read_file(directory / other)
    tensors[NORM] = io.bf16(np.zeros(HIDDEN))
    (directory / other).write_bytes(io.file_bytes(tensors))
    assert f"tensor {NORM}: duplicate tensor" in refused("inspect", directory)


def test_F38_total_size_is_a_notice(hadal, sharded):
    directory, index = sharded
    for total in (1, 1e9, "many", None):
        index["metadata"]["total_size"] = total
        store(directory, index)
        assert hadal("inspect", directory).returncode == 0


@pytest.mark.parametrize("kind", ["directory", "fifo", "device", "dangling"])
@pytest.mark.parametrize("indexed", [True, False])
def test_F39_no_regular_file(refused, tmp_path, kind, indexed):
    make_model.write_model(tmp_path, CONFIG, shards=3 if indexed else 1)
    path = tmp_path / (shard(2) if indexed else io.SINGLE)
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    line = refused("inspect", tmp_path)
    if kind != "dangling":
        assert f"{path}: not a regular file" in line


def test_links_to_files_are_followed(hadal, tmp_path):
    """Caches of model hubs are made of links."""
    make_model.write_model(tmp_path / "blobs", CONFIG, shards=2)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert hadal("inspect", tmp_path / "snapshot").returncode == 0


def test_F40_unreadable_shard():
    """Run as somebody who may not read: root may read everything."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        directory = make_model.write_model(Path(place) / "model", CONFIG, shards=3)
        (directory / shard(1)).chmod(0)
        as_nobody = {"user": 65534, "group": 65534, "extra_groups": []}
        result = subprocess.run(
            [shutil.copy(HADAL, place), "inspect", directory], capture_output=True, text=True,
            check=False, **as_nobody if os.geteuid() == 0 else {})
        assert result.returncode == 4
        assert result.stderr == f"error: {directory / shard(1)}: Permission denied\n"


# ---- what the config says and the files do not ------------------------------------------------


def servable(tmp_path, family, drop=(), add=None, **changes):
    """A whole small model with a tokenizer, without and with some tensors."""
    from toy_models import VOCAB, add_toy_tokenizer

    config = dict(CONFIGS[family], vocab_size=VOCAB, **changes)
    made = {name: t for name, t in make_model.tensors(config).items() if not any(part in name for part in drop)}
    make_model.write_model(tmp_path, config, made | (add or {}))
    add_toy_tokenizer(tmp_path)
    return tmp_path


def test_F30_nothing_runs_without_its_tensors(refused, tmp_path):
    """The first ten by name, layer and expert, and how many more."""
    directory = servable(tmp_path, "v3", drop=("layers.1.mlp.experts.",))
    line = refused("generate", directory, "-p", "the")
    assert "missing tensor model.layers.1.mlp.experts.0.gate_proj.weight" in line and line.endswith(" more")
    assert line in refused("serve", directory, "--port", "0", "--no-sandbox")


def test_F31_unknown_tensors_are_told(serve, refused, tmp_path):
    """The server says how many there are; inspect --strict makes it a refusal."""
    extra = {f"extra.{i}": io.from_array(np.zeros((2, 2))) for i in range(3)}
    directory = servable(tmp_path, "v2", add=extra)
    s = serve(model=directory)
    s.close()
    assert b"3 tensors are unknown to this model, the first is extra.0" in s.log
    result = subprocess.run([HADAL, "inspect", "--strict", directory], capture_output=True, text=True)
    assert result.returncode == 2 and "tensor extra.0: unknown to this model (3 such)" in result.stderr


def test_C24_a_head_beside_tied_embeddings(hadal, tmp_path):
    """The file's own head counts, whatever the config says; the embedding serves where there is none."""
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[1, 2, 3, 5, 8, 13]")
    seen = {}
    head = io.bf16(np.random.default_rng(9).standard_normal((96, HIDDEN)))
    for name, tied, own in (("own", False, True), ("both", True, True), ("tied", True, False)):
        made = make_model.tensors(CONFIG)
        del made["lm_head.weight"]
        make_model.write_model(tmp_path / name, dict(CONFIG, tie_word_embeddings=tied), made | ({"lm_head.weight": head} if own else {}))
        assert hadal("logits", tmp_path / name, "--tokens", tokens, "--out", tmp_path / "out.npy", "-q").returncode == 0
        seen[name] = np.load(tmp_path / "out.npy")
    assert (seen["own"] == seen["both"]).all() and (seen["own"] != seen["tied"]).any()


def test_C25_drafts_that_the_files_do_not_hold(serve, hadal, refused, tmp_path):
    """Declared and absent: told, and left out; asked for by number: refused."""
    directory = servable(tmp_path, "v3", drop=("layers.3.",))
    s = serve(model=directory)
    s.close()
    assert b"the config declares 1 drafter layer, the files hold 0: nothing drafts" in s.log
    ask = ["generate", directory, "-p", "the", "--max-tokens", "2", "-q"]
    assert hadal(*ask, "--draft-tokens", "auto").returncode == 0
    assert "has no drafter" in refused(*ask, "--draft-tokens", "2")
    assert "has no drafter" in refused("serve", directory, "--port", "0", "--no-sandbox", "--draft-tokens", "2")
    whole = servable(tmp_path / "whole", "v3")
    assert hadal("generate", whole, "-p", "the", "--max-tokens", "2", "-q", "--draft-tokens", "2").returncode == 0


def test_C10_columns_that_pack_in_no_pairs(hadal, tmp_path):
    """Cut blocks are fine (V3's own key projection has 4.5 of them); half a byte is not."""
    directory = quantized(tmp_path, "fp4", "v4")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(dict(config, moe_intermediate_size=35)))
    line = complaint(hadal, directory)
    assert "do not fill whole bytes" in line or "shape mismatch" in line


def test_K24_a_tokenizer_of_another_model(refused, tmp_path):
    """With more ids than the model has rows, or without the tokens that its conversations are made of."""
    directory = servable(tmp_path, "v3")
    file = directory / "tokenizer.json"
    document = json.loads(file.read_text())
    rows = json.loads((directory / "config.json").read_text())["vocab_size"]
    larger = dict(document, added_tokens=[*document["added_tokens"], {"id": rows + 7, "content": "<far>"}])
    file.write_text(json.dumps(larger))
    line = refused("generate", directory, "-p", "the")
    assert f"ids up to {rows + 7}, the model {rows} rows" in line
    for speaker in ("<｜User｜>", "<｜Assistant｜>"):
        file.write_text(json.dumps(document).replace(json.dumps(speaker), '"<nobody>"'))
        for command in (["generate", directory, "-p", "the"], ["serve", directory, "--port", "0", "--no-sandbox"]):
            line = refused(*command)
            assert f"its tokenizer has no token {speaker}" in line and "v3" in line


# ---- a manifest of digests -----------------------------------------------------------------------


def digests(directory):
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(directory)}\n" for p in files)


@pytest.fixture
def manifest(tmp_path):
    """(model, its manifest, the manifest's text)"""
    model = servable(tmp_path / "model", "v2")
    (model / "encoding").mkdir()
    (model / "encoding" / "encoding_other.py").write_text("pass\n")
    path = model / "SHA256SUMS"
    path.write_text(digests(model))
    return model, path, path.read_text()


def test_F43_digests_that_agree(hadal, serve, manifest):
    model, path, text = manifest
    for words in (["inspect", model], ["generate", model, "-p", "the", "--max-tokens", "2", "-q"]):
        for form in (text, text.replace("  ", " *"), text.replace("  ", "  ./"), text.upper().split("  ")[0] + text[64:], "\n" + text, text.rstrip("\n")):
            path.write_text(form)
            assert hadal(*words, "--manifest", path).returncode == 0
    path.write_text(text)
    assert serve("--manifest", path, model=model).get("/health").text == "ok"


def one_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "F43 weights": (lambda m, p, t: one_bit(m / io.SINGLE), "digest mismatch"),
    "F43 config": (lambda m, p, t: (m / "config.json").write_text((m / "config.json").read_text() + " "), "config.json: digest mismatch"),
    "F43 tokenizer": (lambda m, p, t: (m / "tokenizer.json").write_text("{}"), "tokenizer.json: digest mismatch"),
    "F43 missing file": (lambda m, p, t: (m / "tokenizer_config.json").unlink(), "tokenizer_config.json: No such file"),
    "F43 empty file": (lambda m, p, t: (m / "tokenizer_config.json").write_text(""), "tokenizer_config.json: digest mismatch"),
    "F43 more weights": (lambda m, p, t: (m / "x.safetensors").write_bytes(b""), "does not list x.safetensors"),
    "F43 a template": (lambda m, p, t: (m / "chat_template.jinja").write_text(""), "does not list chat_template.jinja"),
    "F43 a script": (lambda m, p, t: (m / "encoding" / "encoding_dsv4.py").write_text(""), "does not list encoding/encoding_dsv4.py"),
    "F43 a link": (lambda m, p, t: (m / "y.json").symlink_to("nowhere"), "does not list y.json"),
    "F43 another digest": (lambda m, p, t: p.write_text(("0" if t[0] != "0" else "1") + t[1:]), "digest mismatch"),
    "F43 no manifest": (lambda m, p, t: p.unlink(), "SHA256SUMS: No such file"),
    "F43 empty manifest": (lambda m, p, t: p.write_text("\n\n"), "names no file"),
    "F43 short digest": (lambda m, p, t: p.write_text(t[1:]), "line 1: must be 64"),
    "F43 other words": (lambda m, p, t: p.write_text(t + "hello\n"), "must be 64 hexadecimal digits"),
    "F43 no name": (lambda m, p, t: p.write_text("0" * 64 + "  \n"), "line 1: must be 64"),
    "F43 leading up": (lambda m, p, t: p.write_text("0" * 64 + "  ../config.json\n"), "line 1: must be 64"),
    "F43 from the root": (lambda m, p, t: p.write_text("0" * 64 + "  /etc/passwd\n"), "line 1: must be 64"),
    "F43 around a corner": (lambda m, p, t: p.write_text("0" * 64 + "  a/../b\n"), "line 1: must be 64"),
    "F43 twice": (lambda m, p, t: p.write_text(t + t), "is there twice"),
    "F43 no UTF-8": (lambda m, p, t: p.write_bytes(b"0" * 64 + b"  \xff\n"), "no UTF-8"),
    "F43 NUL": (lambda m, p, t: p.write_bytes(b"\0" + t.encode()), "holds a NUL"),
    "F43 too long": (lambda m, p, t: p.write_text("\n" * (9 << 20)), "larger than"),
    "F43 a folder": (lambda m, p, t: (p.unlink(), p.mkdir()), "not a regular file"),
}


@pytest.mark.parametrize("row", DAMAGE)
def test_manifest(refused, manifest, row):
    model, path, text = manifest
    bend, reason = DAMAGE[row]
    bend(model, path, text)
    for words in (["inspect", model], ["generate", model, "-p", "the", "-q"]):
        line = refused(*words, "--manifest", path)
        assert reason in line and line.isprintable()


def test_F41_truncated_shard(refused, sharded):
    path = sharded[0] / shard(3)
    os.truncate(path, path.stat().st_size - 1)
    line = refused("inspect", sharded[0])
    assert line.startswith(f"error: {path}: ") and "data past end" in line


def test_shards_without_an_index(refused, sharded):
    (sharded[0] / io.INDEX).unlink()
    line = refused("inspect", sharded[0])
    assert io.INDEX in line and "need that index" in line


def test_random_damage_never_crashes(hadal, tmp_path):
    """Single bytes of the header changed at random: accepted or refused, never worse."""
    rng = np.random.default_rng(7)
    make_model.write_model(tmp_path, CONFIG)
    whole = bytearray((tmp_path / io.SINGLE).read_bytes())
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.integers(header)] = rng.integers(256)
        (tmp_path / io.SINGLE).write_bytes(damaged)
        result = hadal("inspect", tmp_path, text=False)
        assert result.returncode in (0, 2)
        assert result.returncode == 0 or len(result.stderr.splitlines()) == 1
