"""What the end-to-end tests share: the built program, and where test data lie.

HADAL names the program (default build/hadal), HADAL_BACKEND the backend under test where a test
does not say (default cpu; tests/gpu.sh sets cuda), HADAL_CUDA_PATH what kernels a GPU runs in tests that do
not say it (default: what it is), HADAL_PRECISION how it rounds in tests that do not say it (default exact), HADAL_SHARED the folder of shared cases and data
(default ../shared beside the repository); tests that need it skip where it is absent.
"""

import contextlib
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HADAL = os.environ.get("HADAL", str(ROOT / "build" / "hadal"))
BACKEND = os.environ.get("HADAL_BACKEND", "cpu")
CUDA_PATH = os.environ.get("HADAL_CUDA_PATH")
GPU_PRECISION = os.environ.get("HADAL_PRECISION", "exact")
SHARED = pathlib.Path(os.environ.get("HADAL_SHARED", ROOT.parent / "shared"))
NO_SHARED = "released vocabularies and larger cases are no part of this repository; HADAL_SHARED names a folder that has them"
GOLDEN = ROOT / "tests" / "golden"
LONG = os.environ.get("HADAL_TEST_LONG") == "1"  # ./test --long: whole matrices


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do this")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: run on the release build only")
    config.addinivalue_line("markers", "threads: run under the thread sanitizer too")
    config.addinivalue_line("markers", "long: run by ./test --long only")


def pytest_collection_modifyitems(items):
    for item in items:
        if not LONG and item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes long: ./test --long"))


HAVE_PRECISION = {"serve", "chat", "generate", "eval", "logits", "replay"}


def for_gpu(words):
    """A command of the backend cuda as most tests want it: with the precision and the kernels that the environment names."""
    words = [str(word) for word in words]
    if "cuda" not in words or words[words.index("cuda") - 1] != "--backend":
        return words
    if "--precision" not in words and HAVE_PRECISION & set(words[:2]):
        words = [*words, "--precision", GPU_PRECISION]
    return [*words, "--cuda-path", CUDA_PATH] if CUDA_PATH and "--cuda-path" not in words else words


def run_hadal(*args, text=True, **options):
    """Runs the program and returns what subprocess.run does. Input defaults to nothing."""
    options.setdefault("stdin", None if "input" in options else subprocess.DEVNULL)
    if options["stdin"] is None:
        del options["stdin"]
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    return subprocess.run([HADAL, *for_gpu(args)], text=text, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of one file of tests, for --weights-dir."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def other(folder):
    """tiny-v4 with other weights, in that folder."""
    from make_model import io
    from serving import TINY
    from test_weight_updates import copy_model, perturbed

    return copy_model(TINY, folder / "other", perturbed(io.read_checkpoint(TINY), 1))


@pytest.fixture
def hadal():
    return run_hadal


@pytest.fixture
def refused():
    """refused(args...): the one line of a command that must end with exit code 2."""

    def check(*args, code=2, **options):
        result = run_hadal(*args, **options)
        assert result.returncode == code, result.stderr
        lines = result.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
        assert result.stdout == ""
        return lines[0]

    return check


@pytest.fixture
def serve():
    """serve(flags...): a running server, drained at the end of the test."""
    from serving import Server

    started = []

    def start(*flags, **options):
        started.append(Server(*flags, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def world():
    """world(n, flags...): a server whose ranks are n processes, killed at the end of the test."""
    from worlds import World

    with contextlib.ExitStack() as stack:

        def start(*args, **options):
            made = World(*args, **options)
            stack.callback(made.kill)
            return made

        yield start


@pytest.fixture
def drive():
    """drive(limits...): the HTTP layer with handlers that do nothing."""
    from serving import Driver

    started = []

    def start(**options):
        started.append(Driver(**options))
        return started[-1]

    yield start
    for driver in started:
        driver.close()


@pytest.fixture
def shared():
    if not SHARED.is_dir():
        pytest.skip(NO_SHARED)
    return SHARED
