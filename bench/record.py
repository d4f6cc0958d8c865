#!/usr/bin/env python3
"""What recording experts costs a decode step: instructions of the step thread, counted by valgrind's callgrind, of
the same steps with and without a record. They are exact on a machine with other load, where times are not.

    bench/record.py [MODEL_DIR] [--batch 4] [--steps 16]

Two runs of a server each, of 8 steps and of --steps more; the difference is that of the steps alone.
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


def instructions(args, mode, steps, record):
    """Of the thread that has most, which is the one that computes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--threads", 1, "--no-drafts", "--no-sandbox", "--max-running", args.batch, "--context", 512]
        flags += ["--expert-record-dir", folder, "--expert-record", mode]
        counted = ["valgrind", "-q", "--tool=callgrind", "--separate-threads=yes", f"--callgrind-out-file={folder}/out"]
        command = [*counted, HADAL, "serve", args.model, "--port", port, *flags]
        process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if not any(line.startswith("ready") for line in process.stdout):
            sys.exit(f"{HADAL} serve did not start")
        if record:
            post(port, "/start_expert_distribution_record", {})
        sampling = {"n": args.batch, "max_new_tokens": steps, "sampling_seed": 3, "ignore_eos": True}
        post(port, "/generate", {"input_ids": [605, 14, 261], "sampling_params": sampling})
        process.terminate()
        process.communicate()
        totals = [re.search(r"^(?:totals|summary): (\d+)", p.read_text(), re.MULTILINE) for p in pathlib.Path(folder).glob("out-*")]
        return max(int(m[1]) for m in totals if m)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=ROOT / "models" / "tiny-v4")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()

    def of_steps(mode, record):
        few, more = (instructions(args, mode, n, record) for n in (FEWEST, FEWEST + args.steps))
        return (more - few) / args.steps

    off = of_steps("stat", False)
    print(f"{args.batch} sequences, instructions of a decode step: {off:.0f} without a record")
    for mode in ("stat", "per-pass", "per-token"):
        on = of_steps(mode, True)
        print(f"{mode}: {on:.0f}, {(on / off - 1) * 100:+.4f} %", flush=True)


if __name__ == "__main__":
    main()
