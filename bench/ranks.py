#!/usr/bin/env python3
"""Figures of ranks on CPUs in one run, each beside a peer or a limit, as a Markdown table.

    bench/ranks.py [--only ROW,...] [--rounds 3] [--folder DIR]

| row | compares |
|---|---|
| sum | a sum of 16 KiB between 2 processes over shared memory with Open MPI's, if mpicc and mpirun are installed |
| gather | a gather of 1 MiB over shared memory with a copy of memory |
| tcp, tcp-shared | over TCP the rate of 1 MiB and the time of 64 bytes with a plain socket; with two processes on one core |
| processes | 2 processes of one thread with one process of two threads: --tp 2 and --dp 2 --ep 2, decode and prefill, tiny-v4 |
| v3 | the same of a slice of V3's shape with random weights (1.6 GB, written to --folder, where that of an earlier run is taken) |
| host | host work of a step: 4 ranks in a process with one; of --dp 4 with a limit |
| kill | a rank of 4 processes is killed: until the other groups go on |

Times are the least of the rounds, in which both sides alternate, because other programs only add to them; of kills the longest counts.
The last column is how much of the machine's cores other programs had meanwhile: a row with much is disturbed. Nothing but Python's standard
library, the program (HADAL) and models/ is needed. --only names rows."""

import argparse
import datetime
import http.client
import json
import os
import pathlib
import platform
import resource
import shutil
import subprocess
import tempfile
import threading
import time

import random_v3
from served import CLEAN, HADAL, ROOT, RUNNING, Served, hadal

CORES = sorted(os.sched_getaffinity(0))
TINY = ROOT / "models" / "tiny-v4"


def seconds_of(pid):
    """Of processor time."""
    numbers = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return sum(map(int, numbers[11:13])) / os.sysconf("SC_CLK_TCK")


class Table:
    """Prints rows as they come."""

    def __init__(self):
        print("| figure | hadal | beside it | ratio | goal | | others had |\n" + "|" + " --- |" * 7, flush=True)
        self.begin()

    def begin(self):
        self.before = self.look()

    @staticmethod
    def look():
        """Seconds: of the clock; of all cores at work; of this script, its processes that have ended, and those that run."""
        n = list(map(int, open("/proc/stat").readline().split()[1:9]))
        busy = (sum(n) - n[3] - n[4]) / os.sysconf("SC_CLK_TCK")
        own = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
        running = sum(map(seconds_of, RUNNING))
        return time.monotonic(), busy, running + sum(u.ru_utime + u.ru_stime for u in own)

    def others(self):
        clock, busy, own = (b - a for a, b in zip(self.before, self.look()))
        return f"{max(0, busy - own) / (clock * os.cpu_count()):.0%}" if busy else "unknown"

    def row(self, figure, here, beside, ratio, goal, unit):
        """goal: the sign and the number, as ('<=', 2)."""
        met = ratio <= goal[1] if goal[0] == "<=" else ratio >= goal[1]
        show = lambda x: x if isinstance(x, str) else f"{x:.4g} {unit}"
        self.put(figure, show(here), show(beside), f"{ratio:.2f}", f"{goal[0]} {goal[1]}", "met" if met else "missed")

    def put(self, *cells):
        print("| " + " | ".join(cells) + f" | {self.others()} |", flush=True)

    def skipped(self, figure, why):
        self.put(figure, "", "", "", "", f"not measured: {why}")


# ---- exchanges ----


def on_cores(n):
    return {"preexec_fn": lambda: os.sched_setaffinity(0, CORES[:n])}


def comm(transport, **process):
    """{(transport, operation, bytes): us} of two ranks, and of what is measured beside them."""
    found = hadal("bench", "comm", "--ranks", 2, "--transport", transport, "--rounds", 2000, env=CLEAN, **process)
    return {(r["transport"], r["operation"], r["bytes"]): r["us"] for r in found}


def least(many):
    return {key: min(m[key] for m in many) for key in many[0]}


def open_mpi(folder):
    """A command of mpi_comm on two processes over shared memory, or why there is none."""
    if not shutil.which("mpicc") or not shutil.which("mpirun"):
        return None, "no mpicc and mpirun (Debian's libopenmpi-dev)"
    program = pathlib.Path(folder) / "mpi_comm"
    made = subprocess.run(["mpicc", "-O2", ROOT / "bench" / "peers" / "mpi_comm.c", "-o", program], capture_output=True, text=True)
    if made.returncode:
        return None, "mpicc says " + next((line for line in made.stderr.splitlines() if "error" in line), "nothing")
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return ["mpirun", *as_root, "--oversubscribe", "--mca", "btl", "self,vader", "-n", "2", program, "2000"], None


def sums(table, args):
    with tempfile.TemporaryDirectory() as folder:
        command, why = open_mpi(folder)
        here, there = [], []
        for _ in range(args.rounds):
            here.append(comm("shared-memory")["shared memory", "all_reduce", 16384])
            if command:
                lines = [line.split() for line in subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=CLEAN).stdout.splitlines()]
                there.append(next(float(x[-2]) for x in lines if x[-4:-2] == ["all_reduce", "16384"]))
    figure = "sum of 16 KiB, 2 processes, shared memory; Open MPI"
    if command:
        table.row(figure, min(here), min(there), min(here) / min(there), ("<=", 1.0), "us")
    else:
        table.put(figure, f"{min(here):.4g} us", "", "", "<= 1.0", f"not compared: {why}")


def gather(table, args):
    us = least([comm("shared-memory") for _ in range(args.rounds)])
    rate = lambda *of: 1e-3 * of[2] / us[of]
    here, copy = rate("shared memory", "all_gather", 1 << 20), rate("one thread", "memcpy", 1 << 20)
    table.row("gather of 1 MiB, 2 processes, shared memory; memcpy of one thread", here, copy, here / copy, (">=", 0.7), "GB/s")


def tcp(table, args, cores=2, where=""):
    us = least([comm("tcp", **on_cores(cores)) for _ in range(args.rounds)])
    rate = lambda operation: 1e-3 * (1 << 20) / us["tcp", operation, 1 << 20]
    here, socket = rate("all_gather"), rate("socket")
    table.row(f"gather of 1 MiB, TCP{where}; a plain socket", here, socket, here / socket, (">=", 0.5), "GB/s")
    here, socket = (us["tcp", operation, 64] for operation in ("all_gather", "socket"))
    table.row(f"gather of 64 bytes, TCP{where}; half a round trip of a plain socket", here, socket, here / socket, ("<=", 2.0), "us")


def tcp_shared(table, args):
    tcp(table, args, 1, ", both processes on one core")


# ---- steps ----


def in_steps(table, args, name, model, decode, prefill):
    """decode, prefill: options of the loads."""
    common = ["--no-drafts", "--max-running", 8, "--context", 1024]
    layouts = {"--tp 2": (["--tp", 2], 0.85, 0.9), "--dp 2 --ep 2": (["--dp", 2, "--ep", 2], 0.9, 0.9)}
    with Served(model, *common, "--threads", 2) as one:
        for layout, (options, *goals) in layouts.items():
            with Served(model, *common, "--threads", 1, *options, world=2) as two:
                for what, load, goal in (("decode", decode, goals[0]), ("prefill", prefill, goals[1])):
                    figure = "output_throughput" if what == "decode" else "input_throughput"
                    seeds = range(1000 * len(layout), 1000 * len(layout) + args.rounds + 1)  # no prompt is cached
                    pairs = [[server.load(*load, "--seed", seed)[figure] for server in (two, one)] for seed in seeds]
                    here, there = (max(x) for x in zip(*pairs[1:]))  # the first time some is slow
                    table.row(f"{name}, {what}, {layout}: 2 processes of a thread; one of 2 threads", here, there, here / there, (">=", goal), "tok/s")


def processes(table, args):
    decode = ["--concurrency", 8, "--num-prompts", 8, "--input-len", 16, "--output-len", 96]
    # as many at once that no attention group is without a prompt while another computes one
    in_steps(table, args, "tiny-v4", TINY, decode, ["--concurrency", 8, "--num-prompts", 16, "--input-len", 256, "--output-len", 1])


def v3(table, args):
    with tempfile.TemporaryDirectory() as own:
        folder = pathlib.Path(args.folder or own)
        if not (folder / "config.json").exists():
            random_v3.write(folder)
        table.begin()
        decode = ["--concurrency", 2, "--num-prompts", 2, "--input-len", 4, "--output-len", 12]
        in_steps(table, args, "V3-shaped slice", folder, decode, ["--concurrency", 2, "--num-prompts", 2, "--input-len", 64, "--output-len", 1])


def host_us(options):
    """Of a step of 8 sequences, as the engine counts it: scheduler, pages, events."""
    m = hadal("bench", "throughput", TINY, "--no-drafts", "-q", "--max-running", 8, "--num-prompts", 16, "--input-len", 16, "--output-len", 96, *options)
    return m["host_us_per_step"]


def host(table, args):
    """With 4 ranks of one group the leader sends the step's rows to the others, too: that takes as long as a broadcast of 4 KiB."""
    each = {"one": [], "--tp 4": ["--tp", 4], "--dp 4 --ep 4": ["--dp", 4, "--ep", 4]}
    ways = {way: ["--threads", 4 if options else 1, *options] for way, options in each.items()}  # one for each rank
    us = least([{way: host_us(options) for way, options in ways.items()} for _ in range(args.rounds)])
    found = [hadal("bench", "comm", "--ranks", 4, "--transport", "threads", "--rounds", 500) for _ in range(args.rounds)]
    us["--tp 4"] += min(r["us"] for run in found for r in run if (r["transport"], r["operation"], r["bytes"]) == ("threads", "broadcast", 4096))
    for way in list(ways)[1:]:
        more = us[way] - us["one"]
        table.row(f"host work of a step, {way} in a process: more than the {us['one']:.1f} us of one rank; limit", more, 15.0, more / 15, ("<=", 1.0), "us")


# ---- loss ----


class Stream(threading.Thread):
    """An answer, and when its pieces came."""

    def __init__(self, port, tokens):
        super().__init__()
        self.port, self.tokens, self.times = port, tokens, []
        self.start()

    def run(self):
        c = http.client.HTTPConnection("127.0.0.1", self.port)
        body = {"prompt": [1 + id(self) % 1000, 2, 3], "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in c.getresponse():
            if line.startswith(b"data: {"):
                self.times.append(time.monotonic())
        c.close()


def seconds_after(streams, killed):
    """From the kill to the first piece behind the longest gap: of each stream. Pieces that were under way come before it."""
    def of(times):
        after = [t for t in times if t > killed]
        gaps = [(b - a, b) for a, b in zip([killed, *after], after)]
        return max(gaps)[1] - killed

    return [of(s.times) for s in streams]


def kill_once():
    with Served(TINY, "--threads", 1, "--no-drafts", "--max-running", 16, "--context", 2048, "--dp", 4, "--ep", 4, world=4) as server:
        streams = [Stream(server.port, 400) for _ in range(8)]
        while not all(len(s.times) > 20 for s in streams):
            time.sleep(0.01)
        killed = time.monotonic()
        server.ranks[3].kill()
        for s in streams:
            s.join()
        if any(s.times[-1] < killed for s in streams):
            raise RuntimeError("an answer had ended before the kill")
        return seconds_after(streams, killed)


def kill(table, args):
    all = [kill_once() for _ in range(args.rounds)]
    first, last = max(map(min, all)), max(map(max, all))
    table.row("kill of a rank of 4 processes (--dp 4 --ep 4) to the next token of another answer; limit", first, 2.0, first / 2, ("<=", 1.0), "s")
    table.row("to the next token of every answer, those of the lost group too; limit", last, 2.0, last / 2, ("<=", 1.0), "s")


ROWS = {"sum": sums, "gather": gather, "tcp": tcp, "tcp-shared": tcp_shared, "processes": processes, "v3": v3, "host": host, "kill": kill}


def processor():
    names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default=",".join(ROWS))
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--folder", help="of the slice of V3's shape")
    a = p.parse_args()
    unknown = [r for r in a.only.split(",") if r not in ROWS]
    if unknown:
        p.error(f"no row {unknown[0]}: {', '.join(ROWS)}")
    load = lambda: "{:.1f}, {:.1f}, {:.1f}".format(*os.getloadavg())
    print(f"{datetime.date.today()}, {processor()}, {len(CORES)} cores, nice {os.nice(0)}, load averages {load()} before; {a.rounds} rounds; "
          f"{subprocess.run([HADAL, 'version'], capture_output=True, text=True).stdout.splitlines()[0]}\n")  # fmt: skip
    table = Table()
    for name in a.only.split(","):
        table.begin()
        try:
            ROWS[name](table, a)
        except (RuntimeError, OSError, subprocess.SubprocessError) as why:
            table.skipped(name, str(why).replace("\n", " "))
    print(f"\nLoad averages {load()} behind.")


main()
