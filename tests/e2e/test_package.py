"""What is given away: completions, manual pages, an installation, a Debian package, sources."""

import os
import re
import shutil
import subprocess
import tarfile

import pytest
from conftest import HADAL, ROOT, run_hadal

BUILD = os.path.dirname(HADAL)
COMMANDS = re.findall(r"^  ([a-z]+) ", run_hadal("--help").stdout, re.M)
pytestmark = pytest.mark.slow


def needs(program):
    return pytest.mark.skipif(not shutil.which(program), reason=f"{program} is not installed")


def run(*words, **options):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make(*words):
    cuda = ["CUDA=1"] if "options    cuda" in run_hadal("version").stdout else []
    return run("make", "-s", "-C", ROOT, f"BUILD={os.path.relpath(BUILD, ROOT)}", "WERROR=", *cuda, *words)


def options_of(*command):
    return set(re.findall(r"^  (?:-\w, |    )--([a-z0-9-]+)", run_hadal(*command, "--help").stdout, re.M))


# ---- completions ----


@pytest.mark.parametrize(("shell", "check"), [("bash", "-n"), pytest.param("zsh", "-n", marks=needs("zsh")), pytest.param("fish", "--no-execute", marks=needs("fish"))])
def test_completions_are_scripts_of_their_shell(tmp_path, shell, check):
    script = tmp_path / "script"
    script.write_text(run_hadal("completions", shell).stdout)
    assert "serve" in script.read_text()
    run(shell, check, script)


def bash_completes(tmp_path, *words):
    script = tmp_path / "script"
    script.write_text(run_hadal("completions", "bash").stdout)
    line = " ".join(f"'{w}'" for w in words)
    return set(run("bash", "-c", f". {script}; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _hadal; printf '%s\\n' \"${{COMPREPLY[@]}}\"", cwd=tmp_path).split())


def test_bash_completes(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert bash_completes(tmp_path, "hadal", "") == {*COMMANDS, "--help", "--version"}
    assert bash_completes(tmp_path, "hadal", "se") == {"serve"}
    assert bash_completes(tmp_path, "hadal", "serve", "--backend", "") == {"auto", "cpu", "cuda", "ref", "null"}
    assert bash_completes(tmp_path, "hadal", "serve", "--backend", "=", "cu") == {"cuda"}
    assert bash_completes(tmp_path, "hadal", "serve", "--port", "") == set()
    assert bash_completes(tmp_path, "hadal", "serve", "--trace-dir", "") == {"folder"}
    assert bash_completes(tmp_path, "hadal", "serve", "--api-key-file", "fi") == {"file"}
    assert bash_completes(tmp_path, "hadal", "serve", "") == {"folder", "file", "script"}
    assert bash_completes(tmp_path, "hadal", "bench", "") == {"throughput", "latency", "ops", "comm", "update", "serve", "train"}
    for command in COMMANDS:
        if command != "bench":
            assert {w for w in bash_completes(tmp_path, "hadal", command, "--") if w != "-h"} == {f"--{o}" for o in options_of(command)}, command
    for kind in ("throughput", "ops", "serve"):
        assert bash_completes(tmp_path, "hadal", "bench", kind, "--") == {f"--{o}" for o in options_of("bench", kind)}
    assert "--emulate-rank" in bash_completes(tmp_path, "hadal", "bench", "latency", "--e")


@needs("fish")
def test_fish_completes(tmp_path):
    script = tmp_path / "script"
    script.write_text(run_hadal("completions", "fish").stdout)

    def completes(line):
        said = run("fish", "--no-config", "-c", f"source {script}; complete -C '{line}'", cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)})
        return {offer.split("\t")[0] for offer in said.splitlines()}

    assert completes("hadal ") == set(COMMANDS)
    assert completes("hadal serve --backend ") == {"auto", "cpu", "cuda", "ref", "null"}
    assert completes("hadal bench ") == {"throughput", "latency", "ops", "comm", "update", "serve", "train"}
    assert {f"--{o}" for o in options_of("serve")} <= completes("hadal serve --")
    assert "--emulate-rank" in completes("hadal bench latency --emu")


@needs("zsh")
def test_zsh_reads_every_table(tmp_path):
    """Its completion runs in its editor only; what it would be told is looked at here."""
    script = tmp_path / "_hadal"
    script.write_text(run_hadal("completions", "zsh").stdout)
    shim = "compdef() { :; }; _describe() { print -l ${(P)2}; }; _files() { :; }; _values() { print -l $@[2,-1]; }; _arguments() { print -l -- $@; }"

    def told(*words):
        line = " ".join(f"'{w}'" for w in words)
        return run("zsh", "-f", "-c", f"{shim}; . {script}; words=({line}); CURRENT=${{#words}}; _hadal")

    assert {line.split(":")[0] for line in told("hadal", "").splitlines()} == set(COMMANDS)
    assert told("hadal", "bench", "").split() == ["throughput", "latency", "ops", "comm", "serve"]
    for command in (["serve"], ["bench", "throughput"], ["generate"]):
        said = told("hadal", *command, "--")
        assert set(re.findall(r"^(?:\(.*\))?(?:--)([a-z-]+)=?\[", said, re.M)) == options_of(*command), command
    assert "--emulate-rank=[" in told("hadal", "bench", "latency", "--") and "--num-prompts=[" in told("hadal", "bench", "latency", "--")
    assert "--backend=[" in told("hadal", "serve", "--") and ":NAME:(auto cpu cuda ref null)" in told("hadal", "serve", "--")


def test_refused_words(refused):
    assert "'csh'" in refused("completions", "csh")
    assert "'nothing'" in refused("manual", "nothing")


# ---- manual pages ----


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_manual_pages_are_clean(tmp_path, command):
    text = run_hadal("manual", *([command] if command else [])).stdout
    page = tmp_path / "page.1"
    page.write_text(text)
    plain = text.replace("\\-", "-")
    if command is None:
        assert all(f"hadal-{c}" in plain for c in COMMANDS)
    elif command == "bench":
        kinds = re.search(r"needs (.*), not", run_hadal("bench", "nothing").stderr).group(1)
        for kind in re.findall(r"\w+", kinds.replace(" or ", " ")):
            assert f".SH BENCH {kind.upper()}\n" in plain
            assert all(f"--{o}\\fR" in plain for o in options_of("bench", kind))
    else:
        assert all(f"--{o}\\fR" in plain for o in options_of(command))
    if shutil.which("man") and shutil.which("groff"):
        said = subprocess.run(["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", page], capture_output=True, text=True, env={**os.environ, "MANWIDTH": "80", "LC_ALL": "C.UTF-8"})
        assert said.returncode == 0 and said.stderr == ""
    if shutil.which("mandoc"):
        said = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", page], capture_output=True, text=True).stdout
        assert [line for line in said.splitlines() if "missing date" not in line] == []


# ---- installing ----


def files_in(root):
    return {os.path.relpath(os.path.join(folder, name), root) for folder, _, names in os.walk(root) for name in names}


def answers(root, prefix):
    return run(root / prefix / "bin/hadal", "generate", root / prefix / "share/hadal/models/tiny-v4", "-p", "What is 347 + 586?", "-q")


def test_install_and_uninstall(tmp_path):
    make("install", f"DESTDIR={tmp_path}", "prefix=/opt/hadal")
    assert "933" in answers(tmp_path, "opt/hadal")
    assert {f"opt/hadal/share/man/man1/hadal-{c}.1" for c in COMMANDS} <= files_in(tmp_path)
    unit = (tmp_path / "opt/hadal/lib/systemd/system/hadal.service").read_text()
    assert "@bindir@" not in unit and "ExecStart=/opt/hadal/bin/hadal serve" in unit and "=/opt/hadal/etc/default/hadal" in unit
    settings = tmp_path / "opt/hadal/etc/default/hadal"
    settings.write_text("HADAL_MODEL=/mine\n")
    make("install", f"DESTDIR={tmp_path}", "prefix=/opt/hadal")
    assert settings.read_text() == "HADAL_MODEL=/mine\n", "what was set stays"
    make("uninstall", f"DESTDIR={tmp_path}", "prefix=/opt/hadal")
    assert files_in(tmp_path) == {"opt/hadal/etc/default/hadal"}


@pytest.fixture(scope="module")
def package():
    if not shutil.which("dpkg-deb") or not shutil.which("objdump"):
        pytest.skip("dpkg and objdump make a package; they are not installed")
    return make("deb").split("'")[-2]


def test_package_in_a_clean_folder(package, tmp_path):
    """Installed by dpkg, asked, and removed: then nothing is left."""
    package = os.path.join(ROOT, package)
    assert re.search(r"libc6 \(>= [0-9.]+\).*libmicrohttpd\d+\w* \(>= ", run("dpkg-deb", "-f", package, "Depends"))
    database = tmp_path / "var/lib/dpkg"
    for folder in ("info", "updates", "triggers"):
        (database / folder).mkdir(parents=True)
    (database / "status").touch()
    dpkg = ["dpkg", f"--root={tmp_path}", "--force-not-root", "--force-depends"]
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    run(*dpkg, "-i", package, env=env)
    assert "933" in answers(tmp_path, "usr")
    assert run(*dpkg, "-V", "hadal", env=env) == ""
    assert (tmp_path / "etc/default/hadal").stat().st_mode & 0o777 == 0o640
    run(*dpkg, "-P", "hadal", env=env)
    assert {f for f in files_in(tmp_path) if not f.startswith("var/")} == set()


@needs("systemd-analyze")
def test_unit_is_one_and_hardened(tmp_path):
    make("install", f"prefix={tmp_path}")
    unit = tmp_path / "lib/systemd/system/hadal.service"
    said = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert [line for line in said.stderr.splitlines() if unit.name in line and "/bin/kill" not in line] == []
    said = subprocess.run(["systemd-analyze", "security", "--offline=yes", "--threshold=20", unit], capture_output=True, text=True)
    assert said.returncode == 0, said.stdout[-400:]


@pytest.mark.parametrize(
    ("release", "setting", "gpus", "built"),
    [("13.0", None, None, "build"), ("13.0", "nvcc", None, "build-cuda"), ("13.0", None, "9.0 9.0", "build-cuda"), ("13.0", None, "7.5 12.0 8.9", "build-cuda"), ("12.4", None, None, "build"), ("13.0", "", "9.0", "build"), (None, None, None, "build")],
)
def test_run_builds_for_the_gpu_where_it_can(tmp_path, release, setting, gpus, built):
    """With a compiler, a make and a setup that only say that they were called."""
    shutil.copy(ROOT / "run", tmp_path / "run")
    tools = {"make": f'[ "$1" = -q ] && exit 1; echo "make $@"; mkdir -p {built}; printf \'#!/bin/sh\\necho "$0 $@"\\n\' >{built}/hadal; chmod +x {built}/hadal', "scripts/setup": 'echo "setup $1"'}
    if release:
        tools["nvcc"] = f'echo "Cuda compilation tools, release {release}, V{release}.1"'
    if gpus:
        tools["nvidia-smi"] = f'[ "$1" = --query-gpu=compute_cap ] && printf "%s\\n" {gpus}'
    for name, text in tools.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **({} if setting is None else {"CUDA": setting})}
    if not release:
        env["CUDA"] = "/nowhere/nvcc"
    if setting:
        env["CUDA"] = f"{tmp_path}/nvcc"
    done = subprocess.run([tmp_path / "run", "version", "x y"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/{built}/hadal version x y\n"
    flags = f" CUDA=1 BUILD=build-cuda NVCC={tmp_path}/nvcc" if built == "build-cuda" else ""
    if built == "build-cuda" and gpus:
        flags += " CUDA_ARCHS=" + {"9.0 9.0": "90a", "7.5 12.0 8.9": "120 89"}[gpus]
    assert re.search(rf"^make -s -j\d+ WERROR= all{flags}$", done.stderr, re.M) and "setup run" in done.stderr


def test_sources(tmp_path):
    if not shutil.which("git") or subprocess.run(["git", "-C", ROOT, "rev-parse"], capture_output=True).returncode:
        pytest.skip("git packs the sources; it is not installed, or they are in no repository")
    make("dist")
    version = run_hadal("version").stdout.split()[1]
    with tarfile.open(os.path.join(BUILD, f"hadal-{version}.tar.gz")) as tar:
        names = tar.getnames()
        tar.extractall(tmp_path)
    assert {name.split("/")[0] for name in names} == {f"hadal-{version}"}
    run("make", "-n", "-C", tmp_path / f"hadal-{version}", "all")
