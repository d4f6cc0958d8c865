"""Fixtures of other hosts: a network namespace, and a Slurm cluster."""

import contextlib
import os
import shutil
import socket
import subprocess

import pytest
from serving import wait_until
from worlds import CLEAN, free_address


def ip(*words):
    return subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)


@pytest.fixture
def host():
    """The name of a network namespace that is another host: 10.77.N.2, and this one 10.77.N.1."""
    if not shutil.which("ip"):
        pytest.skip("iproute2 is not installed")
    name, net = f"hadal{os.getpid()}", f"10.77.{os.getpid() % 250}"
    veth = name[-12:] + "a", name[-12:] + "b"
    made = [ip("netns", "add", name), ip("link", "add", veth[0], "type", "veth", "peer", veth[1], "netns", name)]
    if any(m.returncode for m in made):
        ip("netns", "del", name)
        pytest.skip(f"no network namespaces here: {made[0].stderr or made[1].stderr}".strip())
    ip("addr", "add", f"{net}.1/24", "dev", veth[0])
    ip("link", "set", veth[0], "up")
    ip("-n", name, "addr", "add", f"{net}.2/24", "dev", veth[1])
    ip("-n", name, "link", "set", veth[1], "up")
    ip("-n", name, "link", "set", "lo", "up")
    yield name, net, veth
    ip("link", "del", veth[0])
    ip("netns", "del", name)


SSHD = """
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/own.pub
StrictModes no
UsePAM no
PidFile none
PermitRootLogin prohibit-password
"""

SSH = """
Host b
  HostName {address}
  IdentityFile {folder}/own
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking accept-new
"""


def lan_of_its_own(namespace, name, address):
    """An interface that other hosts do not reach, as those of containers are."""
    inside = ["-n", namespace] if namespace else []
    ip(*inside, "link", "add", name + "a", "type", "veth", "peer", name + "b")
    ip(*inside, "addr", "add", address, "dev", name + "a")
    for end in "ab":
        ip(*inside, "link", "set", name + end, "up")


@pytest.fixture
def ssh_host(host, tmp_path):
    """Another host, `b`, with an ssh server: the environment in which ssh reaches it, and this host's address. Both have
    an interface more, of one address, by which they do not reach each other."""
    if not all(map(shutil.which, ("sshd", "ssh", "ssh-keygen", "unshare"))):
        pytest.skip("openssh-server is not installed")
    name, net, _ = host
    for key in ("own", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / key], check=True)
    (tmp_path / "sshd.conf").write_text(SSHD.format(folder=tmp_path, address=f"{net}.2"))
    (tmp_path / "ssh.conf").write_text(SSH.format(folder=tmp_path, address=f"{net}.2"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/ssh.conf "$@"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    os.makedirs("/run/sshd", exist_ok=True)
    lan = f"hl{os.getpid()}"[-12:]
    lan_of_its_own(None, lan, "10.78.1.1/24")
    lan_of_its_own(name, lan, "10.78.1.1/24")
    start = f"hostname b && exec {shutil.which('sshd')} -D -e -f {tmp_path}/sshd.conf"
    server = subprocess.Popen(["ip", "netns", "exec", name, "unshare", "--uts", "--ipc", "sh", "-c", start], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    env = {**CLEAN, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    try:
        wait_until(lambda: subprocess.run(["ssh", "b", "true"], env=env, capture_output=True).returncode == 0, "ssh reaches the host")
        yield env, f"{net}.1"
    finally:
        server.terminate()
        server.wait()
        ip("link", "del", lan + "a")


@pytest.fixture
def slurm(tmp_path):
    """A cluster of this host alone, of Debian's slurmctld, slurmd and slurm-client."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "srun"))):
        pytest.skip("slurm is not installed")
    if not os.path.isdir("/sys/fs/cgroup"):
        pytest.skip("slurmd does not start without /sys/fs/cgroup")
    host, conf = socket.gethostname().split(".")[0], tmp_path / "slurm.conf"
    ports = [free_address().rsplit(":", 1)[1] for _ in range(2)]
    conf.write_text(f"""
        ClusterName=test
        SlurmctldHost={host}(127.0.0.1)
        SlurmctldPort={ports[0]}
        SlurmdPort={ports[1]}
        AuthType=auth/none
        CredType=cred/none
        SlurmUser=root
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        MpiDefault=none
        SelectType=select/linear
        JobAcctGatherType=jobacct_gather/none
        StateSaveLocation={tmp_path}
        SlurmdSpoolDir={tmp_path}/spool
        SlurmctldPidFile={tmp_path}/slurmctld.pid
        SlurmdPidFile={tmp_path}/slurmd.pid
        NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
        PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
    """)
    daemons = [["slurmctld", "-D", "-i", "-f", conf], ["slurmd", "-D", "-f", conf]]
    with contextlib.ExitStack() as stack:
        for words in daemons:
            p = subprocess.Popen([str(w) for w in words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(p.wait)
            stack.callback(p.terminate)
        env = {**CLEAN, "SLURM_CONF": str(conf)}
        wait_until(lambda: "idle" in subprocess.run(["sinfo", "-h", "-o", "%t"], env=env, capture_output=True, text=True).stdout, "the node is idle")
        yield env
