"""Faults of the server's own while weights are replaced: memory that is missing, and its death."""

import itertools
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import sys
import threading

import pytest
from serving import TINY, Server
from test_weight_senders import SANITIZED
from test_weight_updates import checksums, scores, update


def address_space(server):
    with open(f"/proc/{server.process.pid}/status") as f:
        return int(re.search(r"VmSize:\s+(\d+) kB", f.read())[1]) * 1024


@pytest.mark.skipif(SANITIZED, reason="sanitizers reserve the address space")
@pytest.mark.parametrize("layout", [(), ("--tp", 2, "--ep", 2)], ids=["alone", "ranks"])
def test_no_memory_for_a_second_copy(folder, other, layout):
    """The update is refused and leaves nothing; with memory it succeeds."""
    server = Server("--weights-dir", folder, "--threads", 2, *layout)
    before = scores(server), checksums(server)
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_AS)
    for _ in range(3):
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (address_space(server) + (2 << 20), limits[1]))
        assert "memory" in update(server, other, "other", status=503)["message"]
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, limits)
        assert (scores(server), checksums(server)) == before
    assert server.get("/get_weight_version").json["weight_version"] == "default"
    update(server, other, "other")
    assert checksums(server) != before[1]
    update(server, TINY)
    assert (scores(server), checksums(server)) == before
    server.close()


@pytest.mark.parametrize("reply", [False, True], ids=["before the reply", "after the reply"])
def test_the_server_is_killed(folder, other, reply):
    """It never writes into a folder: it starts again from its own, and takes the update again."""
    files = {p: p.read_bytes() for d in (TINY, other) for p in d.iterdir() if p.is_file()}
    first = Server("--weights-dir", folder)
    before = scores(first), checksums(first)
    body = json.dumps({"model_path": str(other), "weight_version": "other"})
    with first.socket() as s:
        s.sendall(f"POST /update_weights_from_disk HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        if reply:
            assert b" 200 " in s.recv(4096, socket.MSG_PEEK)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    assert {p: p.read_bytes() for p in files} == files
    again = Server("--weights-dir", folder)
    assert (scores(again), checksums(again)) == before
    assert again.get("/get_weight_version").json["weight_version"] == "default"
    update(again, other, "other")
    assert checksums(again) != before[1]
    again.close()


# ---- the folder's disk ----

# Installs a filter by which pread64() of so many bytes fails with EIO, then runs the program.
FAILING_READS = """
import ctypes, os, struct, sys
size, program = int(sys.argv[1]), sys.argv[2:]
load, jump, back = 0x20, 0x15, 0x06
rows = [(load, 0, 0, 0), (jump, 0, 3, 17), (load, 0, 0, 32), (jump, 0, 1, size), (back, 0, 0, 0x00050005), (back, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("<HBBI", *r) for r in rows)
buffer = ctypes.create_string_buffer(code)
program_of = struct.pack("<HxxxxxxQ", len(rows), ctypes.addressof(buffer))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program_of, 0, 0) == 0
os.execv(program[0], program)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter knows x86_64's calls only")
def test_a_disk_that_cannot_be_read(folder, other):
    """The reply names the file; what was read until then changes nothing."""
    broken = shutil.copytree(other, folder / "broken", symlinks=True)
    file = broken / "model.safetensors"
    size = file.stat().st_size + 8
    with open(file, "r+b") as f:  # another size than any other file has
        n = int.from_bytes(f.read(8), "little")
        rest = f.read()
        f.seek(0)
        f.write((n + 8).to_bytes(8, "little") + rest[:n] + b" " * 8 + rest[n:])
    server = Server("--weights-dir", folder, launcher=[sys.executable, "-c", FAILING_READS, size])
    before = scores(server), checksums(server)
    for _ in range(3):
        message = update(server, broken, status=400)["message"]
        assert str(file) in message and "cannot read: Input/output error" in message
        assert (scores(server), checksums(server)) == before
    update(server, other)
    update(server, TINY)
    assert (scores(server), checksums(server)) == before
    server.close()
    fine = Server("--weights-dir", folder)
    update(fine, broken)
    fine.close()


def test_files_that_are_cut_while_they_are_read(folder, other):
    """Each update is whole or refused, by the name of the file."""
    cut = shutil.copytree(other, folder / "cut", symlinks=True)
    file = cut / "model.safetensors"
    data, stop = file.read_bytes(), threading.Event()

    def rewrite():
        for i in itertools.cycle(range(1, 8)):
            os.truncate(file, len(data) * i // 8)
            with open(file, "r+b") as f:
                f.write(data)
            if stop.wait(0.03):  # a file's time has ticks
                break

    server = Server("--weights-dir", folder)
    old = checksums(server)
    update(server, other)
    new = checksums(server)
    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        statuses = []
        for _ in range(40):
            update(server, TINY)
            reply = server.post("/update_weights_from_disk", {"model_path": str(cut)})
            statuses.append(reply.status)
            assert reply.status == 200 or (reply.status == 400 and file.name in reply.json["message"]), reply.text
            assert checksums(server) == (new if reply.status == 200 else old)
    finally:
        stop.set()
        writer.join()
    os.truncate(file, len(data) - 1)
    update(server, TINY)
    assert file.name in update(server, cut, status=400)["message"]
    assert checksums(server) == old
    assert scores(server)
    server.close()
