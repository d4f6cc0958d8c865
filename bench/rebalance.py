#!/usr/bin/env python3
"""How soon experts are in balance again after the topic of the load switches, as Markdown tables.

    bench/rebalance.py [MODEL_DIR] [--ep 4] [--redundant 8] [--period 60] [--periods 4] [--clients 16]
                       [--backend cuda]

A server with --rebalance auto answers questions of one kind after the other, taken from
models/eval/tiny.jsonl. Every answer must be that of a server of one rank, byte for byte. The
server says after each of its looks how balanced the ranks' rows were, what no places of experts
would exceed, and what the places at its start would have given for the same rows. Then the same
load goes to a server whose experts stay, for the times between tokens. --check fails if a period
ends more than 0.03 below the bound, or less than 0.1 above the places at the start."""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from serving import Server, events_of  # noqa: E402

TOPICS = {
    "stories": ("story",),
    "sums": ("addition_4", "product_2"),
    "tools": ("tool_strings", "tool_sums"),
    "lists": ("sort", "reverse"),
}
NEAR, ABOVE = 0.03, 0.1


def questions(each):
    """Bodies of requests, `each` of a topic."""
    cases = [json.loads(line) for line in (ROOT / "models" / "eval" / "tiny.jsonl").open()]
    found = {}
    for topic, tasks in TOPICS.items():
        of = [c for t in tasks for c in [c for c in cases if c["task"] == t][: each // len(tasks)]]
        found[topic] = [
            {"messages": c["messages"], "max_tokens": c["max_tokens"], "temperature": 0, "stream": True,
             "chat_template_kwargs": {"thinking": c["thinking"]}, **({"tools": c["tools"]} if "tools" in c else {})}
            for c in of]  # fmt: skip
    return found


def answer(server, body, gaps=None):
    """The deltas of an answer, joined by member; adds the times between events to gaps."""
    c = server.connection()
    c.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = c.getresponse()
    assert reply.status == 200, reply.read()
    parts, last = {}, None
    for event in events_of(reply):
        now = time.perf_counter()
        if gaps is not None and last:
            gaps.append(now - last)
        last = now
        if event == b"[DONE]":
            break
        for choice in json.loads(event)["choices"]:
            pieces = list(choice["delta"].items())
            for call in choice["delta"].pop("tool_calls", []):  # ids are drawn anew for every answer
                pieces += [(f"{call['index']} {k}", v) for k, v in call["function"].items()]
            for name, value in pieces:
                if isinstance(value, str):
                    parts[name] = parts.get(name, "") + value
    c.close()
    return parts


class Load:
    """Clients that ask questions of the current topic until they are stopped."""

    def __init__(self, server, asked, wanted, clients):
        self.server, self.asked, self.wanted = server, asked, wanted
        self.topic, self.next, self.answers, self.different = next(iter(asked)), 0, 0, []
        self.ended, self.gaps, self.lock = False, [], threading.Lock()
        self.failed = []
        self.threads = [threading.Thread(target=self.ask) for _ in range(clients)]
        for t in self.threads:
            t.start()

    def ask(self):
        gaps = []
        try:
            while not self.ended:
                with self.lock:
                    topic, i = self.topic, self.next % len(self.asked[self.topic])
                    self.next += 1
                got = answer(self.server, self.asked[topic][i], gaps)
                with self.lock:
                    self.answers += 1
                    if got != self.wanted[topic][i]:
                        self.different.append((topic, i, got))
        except Exception as e:  # noqa: BLE001: shown by end()
            self.failed.append(e)
        with self.lock:
            self.gaps += gaps

    def end(self):
        self.ended = True
        for t in self.threads:
            t.join()
        if self.failed:
            raise self.failed[0]


def figures(server):
    names = {"rank_balancedness": "now", "rank_balancedness_bound": "bound", "rank_balancedness_at_start": "start",
             "rebalance_plans_total": "plans", "expert_moves_total": "moves", "rebalance_looks_total": "looks"}  # fmt: skip
    stats = server.stats()
    return {to: stats["hadal_" + name] for name, to in names.items()}


def watch(server, seconds, least):
    """Figures of every look in the next seconds, and of at least so many, with their times."""
    begun, seen, looks = time.monotonic(), [], figures(server)["looks"]
    while time.monotonic() - begun < seconds or len(seen) < least:
        f = figures(server)
        if f["looks"] != looks:
            looks = f["looks"]
            seen.append({**f, "s": time.monotonic() - begun})
        time.sleep(0.1)
    return seen


def period(seen):
    """When all later looks are on average within NEAR of the bound; the means from then on."""
    for i in range(len(seen)):
        rest = seen[i:]
        means = {k: statistics.mean(f[k] for f in rest) for k in ("now", "bound", "start")}
        near = [f["now"] >= f["bound"] - NEAR for f in rest]
        if near[0] and means["now"] >= means["bound"] - NEAR:
            return {"s": seen[i]["s"], "looks": i + 1, **means, "share": sum(near) / len(near)}
    return None


def percentile(values, p):
    return sorted(values)[min(len(values) - 1, int(len(values) * p))]


def run(a, asked, wanted, mode):
    """Periods and times of one server."""
    server = Server("--ep", a.ep, "--redundant", a.redundant, "--rebalance", mode, "--threads", a.threads, "--backend", a.backend,
                    "--max-running", a.clients, model=a.model)  # fmt: skip
    load = Load(server, asked, wanted, a.clients)
    rows, topics, begun = [], list(asked), time.monotonic()
    for k in range(a.periods):
        load.topic = topics[k % len(topics)]
        if mode == "off":
            time.sleep(a.period)
            continue
        before = figures(server)
        seen = watch(server, a.period, a.looks)
        if a.show:
            for f in seen:
                print(f"{f['s']:6.1f} s  {f['now']:.3f} of {f['bound']:.3f}, start {f['start']:.3f}, {f['plans']:.0f} plans, {f['moves']:.0f} moves", file=sys.stderr)
        rows.append((load.topic, period(seen), seen[-1]["moves"] - before["moves"] if seen else 0, seen))
    load.end()
    seconds = time.monotonic() - begun
    server.close()
    if load.different:
        raise SystemExit(f"{len(load.different)} answers are not those of one rank, the first: {load.different[0]}")
    return rows, load, seconds


def print_periods(rows, spell):
    print(f"| topic | within {NEAR} of the bound | then balancedness | bound | places at the start | looks that near | experts moved |")
    print("|---|---|---|---|---|---|---|")
    met = True
    for topic, p, moves, seen in rows:
        if not p:
            last = seen[-1] if seen else {"now": 0, "bound": 0, "start": 0}
            print(f"| {topic} | not in {spell} s | {last['now']:.3f} | {last['bound']:.3f} | {last['start']:.3f} | 0% | {moves:.0f} |")
            met = False
            continue
        print(f"| {topic} | after {p['s']:.1f} s, {p['looks']} looks | {p['now']:.3f} | {p['bound']:.3f} | {p['start']:.3f} | {p['share']:.0%} | {moves:.0f} |")
        met &= p["now"] >= p["start"] + ABOVE
    return met


def print_times(loads):
    print("\n| | answers | between tokens: median, ms | p99 | p99.9 | longest |\n|---|---|---|---|---|---|")
    for name, load in loads:
        ms = [1e3 * g for g in load.gaps]
        cells = [f"{x:.1f}" for x in (statistics.median(ms), percentile(ms, 0.99), percentile(ms, 0.999), max(ms))]
        print(f"| {name} | {load.answers} | " + " | ".join(cells) + " |")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("model", nargs="?", default=str(ROOT / "models" / "tiny-v4"))
    p.add_argument("--backend", default="cpu")
    p.add_argument("--ep", type=int, default=4)
    p.add_argument("--redundant", type=int, default=8)
    p.add_argument("--period", type=float, default=60, help="seconds of a topic")
    p.add_argument("--looks", type=int, default=0, help="of a topic at least, for a machine with other load")
    p.add_argument("--periods", type=int, default=4)
    p.add_argument("--clients", type=int, default=16)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--questions", type=int, default=16, help="of a topic")
    p.add_argument("--auto-only", action="store_true", help="no second server for the times between tokens")
    p.add_argument("--show", action="store_true", help="every look, on standard error")
    p.add_argument("--check", action="store_true")
    a = p.parse_args()
    asked = questions(a.questions)
    alone = Server("--threads", a.threads, "--backend", a.backend, "--max-running", a.clients, model=a.model)
    wanted = {topic: [answer(alone, body) for body in of] for topic, of in asked.items()}
    alone.close()
    rows, moving, seconds = run(a, asked, wanted, "auto")
    print(f"{Path(a.model).name}, --ep {a.ep} --redundant {a.redundant}, {a.clients} clients, {a.threads} threads, load average {os.getloadavg()[0]:.1f}; "
          f"{moving.answers} answers in {seconds:.0f} s, all those of one rank:\n")  # fmt: skip
    met = print_periods(rows, f"{a.period:g}")
    if not a.auto_only:
        _, fixed, _ = run(a, asked, wanted, "off")
        print_times([("--rebalance auto", moving), ("--rebalance off", fixed)])
    if a.check and not met:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
