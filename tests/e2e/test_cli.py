"""The command line itself: help, suggestions, config files, numbers, exit codes."""

import json
import subprocess

import pytest
from conftest import HADAL, run_hadal


def commands():
    """The names in `hadal --help`."""
    listing = run_hadal("--help").stdout.split("commands:\n")[1].split("\n\n")[0]
    return [line.split()[0] for line in listing.splitlines()]


def has(command):
    return command in commands()


needs_logits = pytest.mark.skipif(not has("logits"), reason="this build has no hadal logits")


@pytest.mark.parametrize("argument", ["help", "--help", "-h"])
def test_help_lists_the_commands(hadal, argument):
    result = hadal(argument)
    assert result.returncode == 0 and result.stderr == ""
    assert "usage: hadal COMMAND" in result.stdout and "version" in commands()


def test_no_command_shows_usage_and_fails(hadal):
    result = hadal()
    assert result.returncode == 2
    assert result.stdout == "" and "usage: hadal COMMAND" in result.stderr


@pytest.mark.parametrize("command", commands())
def test_every_command_explains_itself(hadal, command):
    result = hadal(command, "--help")
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith(f"usage: hadal {command}")
    assert "--config FILE" in result.stdout and "--help" in result.stdout
    assert all(len(line) <= 125 for line in result.stdout.splitlines())
    assert hadal(command, "-h").stdout == result.stdout


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(hadal, arguments):
    result = hadal(*arguments)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[0] == "hadal" and lines[0].split()[1][0].isdigit()
    assert [line.split()[0] for line in lines[1:5]] == ["compiler", "options", "libraries", "processor"]
    assert any(line.startswith("precision  exact     cpu: float32") for line in lines)


def test_unknown_command_is_named_with_a_suggestion(refused):
    assert refused("verison") == "error: unknown command 'verison'; did you mean version?"
    assert refused("qqqqqqqqqqqq") == "error: unknown command 'qqqqqqqqqqqq'; see hadal --help"
    assert "did you mean --help?" in refused("--hlep")
    refused("")
    refused("--")


def test_terminal_control_characters_are_escaped(refused):
    assert refused("a\x1b[2J\nb") == "error: unknown command 'a\\x1b[2J\\x0ab'; see hadal --help"


@pytest.mark.parametrize("word", ["--hlep", "--helpp", "--hel"])
def test_misspelt_help_is_suggested(refused, word):  # L01
    assert refused("version", word) == f"error: unknown option {word}; did you mean --help?"


def test_unknown_flags_and_arguments_are_refused(refused):  # L01
    assert "did you mean --config?" in refused("version", "--confg", "x")
    assert "see hadal version --help" in refused("version", "--zzzzzzzzzzzz")
    assert "-x" in refused("version", "-x")
    assert "unexpected argument 'extra'" in refused("version", "extra")
    assert "unexpected argument '--help'" in refused("version", "--", "--help")


def test_help_wins_over_mistakes(hadal):
    assert hadal("version", "--nonsense", "--help").returncode == 0


def test_config_needs_a_value(refused):  # L02
    assert refused("version", "--config") == "error: --config needs a value: FILE"


@needs_logits
class TestOptions:
    """The option kinds, on the command that has all of them."""

    def test_flag_without_value_and_flag_twice(self, refused):  # L02
        assert refused("logits", "m", "--tokens") == "error: --tokens needs a value: FILE"
        assert "given twice, as '1' and '2'" in refused(
            "logits", "m", "--chunk", "1", "--chunk=2"
        )

    @pytest.mark.parametrize(
        "text", ["abc", "12x", "", "0x10", " 5", "1e3", "+5", "--5", "1.0", "５"]
    )
    def test_not_a_whole_number(self, refused, text):  # L03
        line = refused("logits", "m", f"--chunk={text}")
        assert line == f"error: --chunk: '{text}' is not a whole number"

    @pytest.mark.parametrize("text", ["99999999999999999999", "-1", "-99999999999999999999"])
    def test_number_out_of_range(self, refused, text):  # L04
        assert f"--chunk: {text} is out of range 0.." in refused("logits", "m", "--chunk", text)

    def test_choice(self, refused):
        line = refused("logits", "m", "--backend", "cpus")
        assert "'cpus' is none of auto, cpu, cuda, ref" in line and "did you mean cpu?" in line

    def test_flag_takes_no_value(self, refused):
        assert refused("logits", "m", "--mtp=yes") == "error: --mtp takes no value"

    def test_missing_positional(self, refused):
        assert "needs MODEL_DIR" in refused("logits", "--chunk", "1")


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return path

    return write


class TestConfigFile:
    def test_empty_object_changes_nothing(self, hadal, config):
        assert hadal("version", "--config", config("{}")).returncode == 0

    def test_unknown_key_has_line_and_column(self, refused, config):  # L12
        path = config('{\n  "hlep": true\n}')
        line = refused("version", "--config", path)
        assert line.startswith(f"error: {path}: line 2 column 3: unknown option hlep")

    @pytest.mark.parametrize("key", ["config", "help", ""])
    def test_keys_that_are_no_options(self, refused, config, key):
        assert "unknown option" in refused("version", "--config", config({key: "x"}))

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "3", '"x"', '{"a": 1, "a": 2}', '{"a": 1} x', "{'a': 1}"]
    )
    def test_documents_that_are_no_object(self, refused, config, text):
        path = config(text)
        assert refused("version", "--config", path).startswith(f"error: {path}: ")

    def test_files_that_are_no_files(self, refused, tmp_path):
        assert str(tmp_path) in refused("version", "--config", tmp_path, code=2)
        assert "missing.json" in refused("version", "--config", tmp_path / "missing.json")
        refused("version", "--config", "/dev/zero")

    def test_too_large(self, refused, config):
        assert "config.json" in refused("version", "--config", config(" " * (1 << 20) + "{}"))

    @needs_logits
    @pytest.mark.parametrize(
        "key, value, wanted",
        [
            ("chunk", "7", "a whole number"),
            ("chunk", 7.0, "a whole number"),
            ("chunk", None, "a whole number"),
            ("mtp", 1, "true or false"),
            ("tokens", 5, "a string"),
            ("backend", ["cpu"], "a string"),
        ],
    )
    def test_wrong_type_has_line_and_column(self, refused, config, key, value, wanted):  # L12
        path = config('{"quiet": true,\n\n   "%s": %s}' % (key, json.dumps(value)))
        line = refused("logits", "m", "--config", path)
        assert line == f"error: {path}: line 3 column 4: '{key}' must be {wanted}"

    @needs_logits
    def test_values_are_checked_like_flags(self, refused, config):
        assert "out of range" in refused("logits", "m", "--config", config({"chunk": -1}))
        assert "none of auto, cpu, cuda, ref" in refused("logits", "m", "--config", config({"backend": "x"}))

    @needs_logits
    def test_flags_win(self, refused, config):
        path = config({"chunk": -1, "tokens": "a.json", "out": "b.npy"})
        line = refused("logits", "missing-model", "--chunk", "1", "--config", path)
        assert "missing-model" in line


class TestOutput:
    def test_closed_stdout_is_an_error(self):
        result = subprocess.run(
            ["sh", "-c", 'exec "$0" version >&-', HADAL], capture_output=True, text=True
        )
        assert result.returncode in (0, 4)  # /dev/null takes its place, or the write fails

    def test_full_disk_is_an_error(self, hadal):
        with open("/dev/full", "w") as full:
            result = hadal("version", stdout=full)
        assert result.returncode == 4
        assert result.stderr == "error: cannot write to standard output\n"

    def test_closed_pipe_is_an_error_not_a_signal(self):
        reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
        reader.wait()
        result = run_hadal("version", stdout=reader.stdin)
        assert result.returncode == 4
        assert result.stderr == "error: cannot write to standard output\n"

    def test_closed_descriptors_do_not_crash(self):
        for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
            result = subprocess.run(["sh", "-c", f'exec "$0" version {closed}', HADAL],
                                    capture_output=True)  # fmt: skip
            assert result.returncode in (0, 4)
