"""SIGKILL while a checkpoint is written, at any of its steps: every name is a whole checkpoint, and the run goes on to the bits
of an undisturbed one. ./test tries the first and last of each kind, ./test --long all."""

import json
import signal
import subprocess

import pytest
from conftest import HADAL, LONG
from test_train import MODEL, digests

# Counts what changes the disk, logs it to EVENTS, and kills the process at number KILL_AT, a write in its middle.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int count;

static int now(const char *what) {
    static int log = -1;
    static ssize_t (*put)(int, const void *, size_t);
    const char *at = getenv("KILL_AT"), *to = getenv("EVENTS");
    if (!put) put = dlsym(RTLD_NEXT, "write");
    if (log < 0 && to) log = open(to, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (log >= 0) put(log, what, strlen(what));
    return at && atoi(at) == count++;
}

#define WRAP(type, name, params, args)                                   \
    type name params {                                                   \
        static type (*real) params;                                      \
        if (!real) real = dlsym(RTLD_NEXT, #name);                       \
        if (now(#name "\n")) kill(getpid(), SIGKILL);                    \
        return real args;                                                \
    }
WRAP(int, fsync, (int fd), (fd))
WRAP(int, mkdir, (const char *p, mode_t m), (p, m))
WRAP(int, rename, (const char *a, const char *b), (a, b))
WRAP(int, unlink, (const char *p), (p))
WRAP(int, rmdir, (const char *p), (p))

ssize_t write(int fd, const void *data, size_t n) {
    static ssize_t (*real)(int, const void *, size_t);
    struct stat s;
    if (!real) real = dlsym(RTLD_NEXT, "write");
    if (fstat(fd, &s) == 0 && S_ISREG(s.st_mode) && now("write\n")) {
        real(fd, data, n / 2);
        kill(getpid(), SIGKILL);
    }
    return real(fd, data, n);
}
"""


@pytest.mark.slow
def test_killed_at_every_kind_of_write(hadal, tmp_path):
    config = json.loads((MODEL / "config.json").read_text())
    small = {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}
    (tmp_path / "small.json").write_text(json.dumps(config | small))
    (tmp_path / "data.jsonl").write_text('{"tokens": [5, 6, 7, 8]}\n{"tokens": [9, 10, 11]}\n')
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, tmp_path / "shim.c", "-ldl"], check=True)

    def train(out, *more, **env):
        args = ["train", MODEL, "--init", tmp_path / "small.json", "--data", tmp_path / "data.jsonl", "--out", tmp_path / out]
        args += ["--steps", "3", "--save-every", "1", "--keep", "1", "--batch", "2", "--rows", "16", "-q", *more]
        variables = {"LD_PRELOAD": str(shim), **{k: str(v) for k, v in env.items()}} if env else {}
        command = ["env", *(f"{k}={v}" for k, v in variables.items()), HADAL, *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True)

    done = train("whole", EVENTS=tmp_path / "events")
    assert done.returncode == 0, done.stderr
    whole = digests(tmp_path / "whole" / "step-00000003")
    events = (tmp_path / "events").read_text().split()
    assert {"write", "fsync", "mkdir", "rename", "unlink", "rmdir"} <= set(events)
    first = events.index("rename") + 1  # then there is a checkpoint
    kinds = {}
    for number, what in enumerate(events[first:], first):
        kinds.setdefault(what, []).append(number)
    some = sorted({at[i] for at in kinds.values() for i in (0, -1)} | {first - 1})
    for point in range(first - 1, len(events)) if LONG else some:
        out = f"killed-{point}"
        assert train(out, KILL_AT=point).returncode == -signal.SIGKILL, events[point]
        names = sorted(p.name for p in (tmp_path / out).iterdir() if p.name.startswith("step-") and p.name[5:].isdigit())
        assert bool(names) == (point >= first), (point, names)
        done = train(out, *(["--resume"] if names else []))
        assert done.returncode == 0, (events[point], done.stderr)
        assert digests(tmp_path / out / "step-00000003") == whole, events[point]
