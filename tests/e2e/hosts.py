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
