#!/usr/bin/env python3
"""Expert balancing beside a model.

    bench/eplb.py                      times the published algorithm in plain Python (the port of the tests) on the case of bench_eplb
    bench/eplb.py topics [--folder DIR] [--passes 960] [--clients 16]

topics: a server of tiny-v4 answers questions of one kind after the other (those of bench/rebalance.py) and records which
experts its rows choose, a file for each kind in DIR, where files of an earlier run are taken instead. `hadal simulate` then
switches between them: what plans bring that are made anew, repaired, or made for a split of each batch. Writes the part of
docs/eplb.md on topics, and its plot. HADAL names the program (default build/hadal)."""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(ROOT / "scripts")]
from plots import plot, table  # noqa: E402
from rebalance import TOPICS, answer, questions  # noqa: E402
from serving import Server  # noqa: E402
from test_eplb import published  # noqa: E402

HADAL = os.environ.get("HADAL", str(ROOT / "build" / "hadal"))
PAGE, PLOT = ROOT / "docs" / "eplb.md", ROOT / "docs" / "eplb" / "topics.svg"
BEGIN, END = "<!-- made by bench/eplb.py topics -->\n", "<!-- end of topics -->\n"
RANKS, SLOTS, BATCH, WINDOW, TURN = 4, 24, 8, 8, 40  # TURN: steps of a topic
PLANS = {"published": "made anew", "hadal": "repaired", "flow": "made anew, each batch split"}


def time_in_python():
    layers, experts, slots, ranks = 58, 256, 288, 32
    dice = random.Random(20261124)
    loads = [[round(1e4 * dice.lognormvariate(0, 1)) for _ in range(experts)] for _ in range(layers)]
    begin = time.process_time()
    for layer in loads:
        published(layer, slots, 1, 1, ranks)
    print(f"published in Python, {layers} layers: {(time.process_time() - begin) * 1e3:.0f} ms")


# ---- records ----


def steps_of(server):
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("hadal_steps_total"))


def record(folder, passes, clients):
    """{topic: file} of at least so many passes each."""
    server = Server("--max-running", clients, "--no-drafts", "--expert-record-dir", folder, "--expert-record", "per-pass")
    files = {}
    for topic, asked in questions(clients).items():
        ended = threading.Event()

        def ask(first, asked=asked, ended=ended):
            for i in range(1 << 20):
                if ended.is_set():
                    return
                answer(server, asked[(first + i) % len(asked)])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(clients)]
        for t in threads:
            t.start()
        begun, known = steps_of(server), set(folder.glob("*.eplb"))
        server.post("/start_expert_distribution_record")
        while steps_of(server) < begun + passes + 50:
            time.sleep(0.2)
        server.post("/dump_expert_distribution_record")
        ended.set()
        for t in threads:
            t.join()
        (made,) = set(folder.glob("*.eplb")) - known
        files[topic] = made.rename(folder / f"{topic}.eplb")
    server.close()
    return files


# ---- figures ----


def simulate(files, plans, every):
    command = [HADAL, "simulate", "--record", ",".join(map(str, files)), "--switch", TURN * BATCH, "--batch", BATCH, "--window", WINDOW, "--ranks", RANKS,
               "--slots", SLOTS, "--plan", ",".join(plans), "--every", every, "--json"]  # fmt: skip
    return {r["plan"]: r for r in json.loads(subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE).stdout)}


def near_switches(r):
    """Mean balancedness of the steps soon after a switch, and of the others. Judged steps begin behind the first window."""
    soon, later = [], []
    for i, s in enumerate(r["steps"], WINDOW):
        (soon if i >= TURN and i % TURN < WINDOW else later).append(s["balancedness"])
    return sum(soon) / len(soon), sum(later) / len(later)


def figures(files):
    files = [files[topic] for topic in TOPICS]
    none = simulate(files, ["none"], 0)["none"]
    rows = []
    for every in (2, 4, 8, 20, 0):
        got = simulate(files, PLANS, every)
        cells = ["{:.3f}, {:.3f}".format(*near_switches(got[p])) for p in PLANS]
        layers = len(none["layers"])
        rows.append([every or "never", *cells, *(f"{got[p]['moves'] / max(1, got[p]['plans'] - 1) / layers:.1f}" for p in PLANS)])
    got = {**{"none": none}, **simulate(files, PLANS, 4)}
    lines = {p: [s["balancedness"] for s in r["steps"]] for p, r in got.items()}
    steps = len(lines["none"])
    switches = f"The topic changes every {TURN} steps; plans every 4 steps"
    svg = plot(switches, "step", "balancedness", list(range(WINDOW, WINDOW + steps)), lines, low=0.5)
    head = ["plan every", *(f"{p} ({how})" for p, how in PLANS.items()), "moves per plan and layer: published", "hadal", "flow"]
    mean = "{:.3f} soon after a switch, {:.3f} later".format(*near_switches(none))
    text = f"""### When the topic changes

Traffic of tiny-v4 ({time.strftime('%Y-%m-%d')}, `bench/eplb.py topics`): {", ".join(TOPICS)} in turn, {TURN} steps of {BATCH} passes each, {steps + WINDOW} steps. {RANKS} ranks,
{SLOTS} slots for 16 experts, plans from {WINDOW} steps. Balancedness in the {WINDOW} steps after a switch, and in all others. Without plans it is {mean};
the bound is {got['flow']['bound']:.3f}.

{table(head, rows)}
![balancedness while topics change](eplb/topics.svg)
"""
    return text, svg


def topics(args):
    with tempfile.TemporaryDirectory() as own:
        folder = pathlib.Path(args.folder or own)
        files = {t: folder / f"{t}.eplb" for t in TOPICS}
        if not all(f.exists() for f in files.values()):
            files = record(folder, args.passes, args.clients)
        text, svg = figures(files)
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(BEGIN) + len(BEGIN)] + text + page[page.index(END) :])
    PLOT.write_text(svg)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", nargs="?", choices=["topics"])
    p.add_argument("--folder", help="of records")
    p.add_argument("--passes", type=int, default=960, help="of each topic")
    p.add_argument("--clients", type=int, default=16)
    a = p.parse_args()
    topics(a) if a.what else time_in_python()


main()
