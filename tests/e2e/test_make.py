"""The Makefile: what is built depends on its flags, not only on its files. Nothing is compiled but
one small object; of everything else the plan is looked at."""

import os
import pathlib
import re
import subprocess

import pytest
from conftest import ROOT

STATUS = "src/base/status"


def make(build, *words):
    """What make says, without the variables of a make that may have started the tests."""
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "BUILD", "OPT", "CC", "CUDA")}
    run = subprocess.run(["make", f"BUILD={build}", *words], cwd=ROOT, env=clean, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def steps(said):
    return re.findall(r'^(?:echo ")?((?:CC|NVCC|LINK) [^"\n]*)', said, re.M)


@pytest.fixture
def compiled(tmp_path):
    """compiled(flags...): whether they had the object compiled."""
    return lambda *flags: steps(make(tmp_path, *flags, f"{tmp_path}/{STATUS}.o")) == [f"CC   {STATUS}.c"]


@pytest.mark.parametrize("flag", ["CUDA=1", "OPT=-O1 -fPIE", "CC=cc", "KERNEL_OPT=-O2"])
def test_an_object_depends_on_its_flags(compiled, flag):
    assert compiled() and not compiled()
    assert compiled(flag) and not compiled(flag)
    assert compiled() and not compiled("WERROR=")


def test_a_folder_of_its_own_is_compiled_anew(compiled, tmp_path):
    assert compiled()
    other = tmp_path / "other"
    assert steps(make(other, f"{other}/{STATUS}.o")) == [f"CC   {STATUS}.c"]


def test_a_program_depends_on_the_flags_of_its_objects_and_its_own(tmp_path):
    """The plan over objects that are there, as empty files: first as they were made, then for a GPU."""
    program = f"{tmp_path}/hadal"

    def plan(*flags):
        return steps(make(tmp_path, "-n", *flags, program))

    everything = plan()
    assert everything[-1] == f"LINK {program}" and len(everything) > 100
    for name in [*(line.split()[1].replace(".c", ".o") for line in everything[:-1]), "hadal"]:
        path = tmp_path / pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    packed = {p: f"{tmp_path}/web/{p.name}.gz" for p in (ROOT / "src/server/web").iterdir()}
    make(tmp_path, *packed.values())
    (tmp_path / "src/server/page.o").touch()
    os.utime(program)
    assert plan() == []
    assert plan("LDOPT=-pie") == [f"LINK {program}"]
    assert set(plan("CUDA=1")) > set(everything)
    assert plan() == everything
