"""The files of examples/pd: each is what its reader expects, every command in it is one that hadal takes, and
those that can run here do."""

import json
import os
import re
import signal
import subprocess
import urllib.request

import pytest
from conftest import HADAL
from serving import ROOT, TINY, free_port, wait_until
from test_package import needs

FILES = ROOT / "examples" / "pd"
DRAIN = 120  # seconds, by default
KEYS = {"HADAL_API_KEY": "k" * 16, "HADAL_PEER_KEY": "p" * 32}


def check_command(words, env):
    """With a model or a certificate that is not there a command fails by that: it knows all flags."""
    words = [str(w) for w in words]
    assert not [w for w in words if "$" in w], words
    here = {"--host": "127.0.0.1", "--port": "0", "--transfer-listen": f"127.0.0.1:{free_port()}"}
    words = [here.get(before, w) for before, w in zip(["", *words], words)]
    if words[0] == "serve":
        words[1] = "/nowhere"
    else:
        words += ["--tls-cert", "/nowhere", "--tls-key", "/nowhere"]
    done = subprocess.run([HADAL, *words], capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode != 0 and "/nowhere" in done.stderr, (words, done.stderr)


def test_commands_are_checked():
    with pytest.raises(AssertionError):
        check_command(["serve", "/model", "--role", "decode", "--no-such-flag"], KEYS)
    with pytest.raises(AssertionError):
        check_command(["router", "--port", "0", "--decode", "host"], KEYS)


def addresses(words):
    """Servers that a command names, with the flag."""
    lists = {f: v for f, v in zip(words, words[1:]) if f in ("--prefill", "--decode", "--prefill-peers")}
    return {f: [a.removeprefix("dns:") for a in v.split(",")] for f, v in lists.items()}


@needs("systemd-analyze")
def test_systemd(tmp_path):
    text = (FILES / "hadal-router.service").read_text()
    unit = tmp_path / "hadal-router.service"
    (tmp_path / "settings").touch()
    unit.write_text(text.replace("/usr/bin/hadal", HADAL).replace("/etc/default/hadal-router", str(tmp_path / "settings")))
    said = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert [line for line in said.stderr.splitlines() if unit.name in line and "/bin/kill" not in line] == []
    said = subprocess.run(["systemd-analyze", "security", "--offline=yes", "--threshold=20", unit], capture_output=True, text=True)
    assert said.returncode == 0, said.stdout[-400:]
    assert int(re.search(r"TimeoutStopSec=(\d+)", text)[1]) > DRAIN
    commands = [line.removeprefix("#   HADAL_OPTIONS=").split() for line in text.splitlines() if "HADAL_OPTIONS=--" in line]
    assert len(commands) == 3
    for words in commands[:2]:
        check_command(["serve", "/model", *words], KEYS)
    check_command(["router", *commands[2]], KEYS)
    assert addresses(commands[2])["--prefill"] == addresses(commands[1])["--prefill-peers"]


def test_compose():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
    assert set(services) == {"prefill", "decode", "router"}
    named = {}
    for name, service in services.items():
        check_command(service["command"], KEYS)
        named[name] = addresses(service["command"])
        assert int(service["stop_grace_period"].rstrip("s")) > DRAIN
        assert set(service["environment"]) <= set(KEYS)
    assert [p.split("=")[0] for p in named["decode"]["--prefill-peers"]] == named["router"]["--prefill"]
    hosts = {a.split(":")[0] for of in named.values() for l in of.values() for a in l}
    assert hosts <= set(services)
    probe = services["decode"]["healthcheck"]["test"]
    assert probe[:3] == ["CMD", "bash", "-c"]
    ask = probe[3].replace("$$", "$").replace("30000", str(free_port()))
    assert subprocess.run(["bash", "-c", ask], capture_output=True).returncode != 0  # nobody is there


def test_kubernetes():
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((FILES / "kubernetes.yaml").read_text()))
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    sets = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Deployment"}
    assert set(sets) == {"prefill", "decode", "router"} and services["decode"]["clusterIP"] == services["prefill"]["clusterIP"] == "None"
    named = {}
    for name, d in sets.items():
        spec = d["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        env = {e["name"] for e in container["env"]}
        check_command(container["args"], {k: v for k, v in KEYS.items() if k in env})
        named[name] = addresses(container["args"])
        assert spec["terminationGracePeriodSeconds"] > DRAIN
        assert d["spec"]["selector"]["matchLabels"] == d["spec"]["template"]["metadata"]["labels"]
        port = int(container["args"][container["args"].index("--port") + 1])
        assert {"containerPort": port} in container["ports"] and container["readinessProbe"]["httpGet"] == {"path": "/health", "port": port}
        assert "httpGet" not in container["livenessProbe"]  # or it would be killed while it drains
    for name, spec in services.items():
        assert any(spec["selector"] == d["spec"]["selector"]["matchLabels"] for d in sets.values()), name
    assert named["router"] == {"--prefill": ["prefill:30000"], "--decode": ["decode:30000"]}
    assert named["decode"]["--prefill-peers"] == ["prefill:30000=30200"]


@needs("shellcheck")
def test_slurm_script_is_clean():
    done = subprocess.run(["shellcheck", FILES / "slurm.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


FAKES = {
    "scontrol": 'printf "%s\\n" $3',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; echo $$ >>"$PIDS"; exec "$@"',
    "scancel": 'kill -TERM $(cat "$PIDS")',
    "hadal": 'exec "$PROGRAM" "$@"',
}


def test_slurm_job(tmp_path):
    """The nodes are addresses of this host; Slurm's programs only start and signal."""
    for name, text in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    ports = [free_port() for _ in range(3)]
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PIDS": str(tmp_path / "pids"),
        "PROGRAM": HADAL,
        "MODEL": str(TINY),
        "HADAL_API_KEY": KEYS["HADAL_API_KEY"],
        "SLURM_JOB_NODELIST": "127.0.0.2 127.0.0.3 127.0.0.4",
        "SLURM_JOB_ID": "7",
        "KV_HOST": "0.1",
        "OPTIONS": "--threads 1 --max-running 4",
        **dict(zip(("PORT", "TRANSFER_PORT", "ROUTER_PORT"), map(str, ports))),
    }
    job = subprocess.Popen([FILES / "slurm.sh"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def get(address, path, body=None):
        request = urllib.request.Request(f"http://{address}{path}", body and json.dumps(body).encode(), {"Authorization": f"Bearer {KEYS['HADAL_API_KEY']}", "Content-Type": "application/json"})
        try:
            return json.loads(urllib.request.urlopen(request).read())
        except OSError:
            return None

    router = f"127.0.0.2:{ports[2]}"
    up = lambda: sum(s["up"] for s in (get(router, "/router/servers") or {"servers": []})["servers"])
    try:
        wait_until(lambda: up() == 3, "all servers are up")
        for node in ("127.0.0.3", "127.0.0.4"):
            wait_until(lambda node=node: get(f"{node}:{ports[0]}", "/server_info")["peers"][0]["up"], "it is paired")
        assert get(router, "/v1/completions", {"prompt": "1, 2,", "max_tokens": 4})["usage"]["completion_tokens"] == 4
    finally:
        job.send_signal(signal.SIGTERM)
        said = job.communicate()[1]
    assert job.returncode == 0, said
    assert up() == 0


def test_slurm_job_without_decode_nodes(tmp_path):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho one\n")
    (tmp_path / "scontrol").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "m", "HADAL_API_KEY": "k" * 16, "SLURM_JOB_NODELIST": "one"}
    done = subprocess.run([FILES / "slurm.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "none is left" in done.stderr
