#!/usr/bin/env python3
"""What recording experts costs a decode step: instructions of the step thread, counted by valgrind's callgrind, of
the same steps with and without a record. They are exact on a machine with other load, where times are not.

    bench/record.py [MODEL_DIR] [--batch 4] [--steps 16]

A server for each way of recording answers the same request again and again, with 8 output tokens and with --steps
more, first without a record. Counts begin anew before each; the difference is that of the steps alone. A server's
start takes most of the time: half a minute under valgrind.
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
FEWEST = 8


def post(port, path, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request).read()


class Counted:
    """A server under callgrind, and the instructions of its requests."""

    def __init__(self, args, mode, folder):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.args, self.folder, self.dumps = args, pathlib.Path(folder), 0
        flags = ["--threads", 1, "--no-drafts", "--no-sandbox", "--max-running", args.batch, "--context", 512]
        flags += ["--expert-record-dir", folder, "--expert-record", mode]
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=ROOT / "models" / "tiny-v4")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()

    print(f"{args.batch} sequences, instructions of a decode step")
    for mode in ("stat", "per-pass", "per-token"):
        with tempfile.TemporaryDirectory() as folder:
            server = Counted(args, mode, folder)
            off = server.step()
            post(server.port, "/start_expert_distribution_record", {})
            on = server.step()
            server.close()
        print(f"{mode}: {off:.0f} without a record, {on:.0f} with one, {(on / off - 1) * 100:+.4f} %", flush=True)


if __name__ == "__main__":
    main()
