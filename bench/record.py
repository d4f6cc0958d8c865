#!/usr/bin/env python3
"""What recording experts, and keeping choices for rollouts, costs a decode step: instructions of the step thread,
counted by valgrind's callgrind, with and without. They are exact on a machine with other load, where times are not.

    bench/record.py [MODEL_DIR] [--batch 4] [--steps 8]

A server for each way answers the same request with 2 output tokens and with --steps more; counts begin anew before
each, and the difference is that of the steps alone. Valgrind is slow: 25 million instructions of AVX2 a second, so a
step of a sequence of tiny-v4 takes a second, and the whole some minutes.
"""

import argparse
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
HADAL = os.environ.get("HADAL", str(ROOT / "build" / "hadal"))
FEWEST = 2

# name: flags of the server, and whether it records
WAYS = {
    "nothing": ([], False),
    "--expert-record stat": (["--expert-record", "stat"], True),
    "--expert-record per-pass": (["--expert-record", "per-pass"], True),
    "--expert-record per-token": (["--expert-record", "per-token"], True),
    "--routed-experts": (["--routed-experts"], False),
    "--routed-experts --indexer-topk": (["--routed-experts", "--indexer-topk"], False),
}


def post(port, path, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request).read()


class Counted:
    """A server under callgrind, and the instructions of its requests."""

    def __init__(self, args, flags, folder):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.args, self.folder, self.dumps = args, pathlib.Path(folder), 0
        flags = [*flags, "--threads", 1, "--no-drafts", "--no-sandbox", "--max-running", args.batch, "--context", 512, "--expert-record-dir", folder]
        counted = ["valgrind", "-q", "--tool=callgrind", "--separate-threads=yes", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        command = [*counted, HADAL, "serve", args.model, "--port", self.port, *flags]
        self.process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if not any(line.startswith("ready") for line in self.process.stdout):
            sys.exit(f"{HADAL} serve did not start")
        self.control("--instr=on")

    def control(self, *what):
        subprocess.run(["callgrind_control", *what, str(self.process.pid)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(self, steps):
        """Instructions of the thread that has most, which is the one that computes."""
        self.control("--zero")
        sampling = {"n": self.args.batch, "max_new_tokens": steps, "sampling_seed": 3, "ignore_eos": True}
        post(self.port, "/generate", {"input_ids": [605, 14, 261], "sampling_params": sampling})
        self.control("--dump")
        self.dumps += 1
        totals = [re.search(r"^(?:totals|summary): (\d+)", p.read_text(), re.MULTILINE) for p in self.folder.glob(f"out.{self.dumps}-*")]
        return max(int(m[1]) for m in totals if m)

    def step(self):
        self.ask(FEWEST)  # what is done once is done
        few, more = (self.ask(n) for n in (FEWEST, FEWEST + self.args.steps))
        return (more - few) / self.args.steps

    def close(self):
        self.process.terminate()
        self.process.communicate()


def measure(args, flags, record):
    with tempfile.TemporaryDirectory() as folder:
        server = Counted(args, flags, folder)
        try:
            if record:
                post(server.port, "/start_expert_distribution_record", {})
            return server.step()
        finally:
            server.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=ROOT / "models" / "tiny-v4")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    print(f"{args.batch} sequences, {args.steps} steps\n\n| recorded or kept | instructions of a decode step | to nothing |\n|---|---|---|")
    plain = None
    for name, (flags, record) in WAYS.items():
        step = measure(args, flags, record)
        plain = plain or step
        print(f"| {name} | {step:.0f} | {(step / plain - 1) * 100:+.3f} % |", flush=True)


if __name__ == "__main__":
    main()
