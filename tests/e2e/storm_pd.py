#!/usr/bin/env python3
"""A router, two prefill and two decode servers of two processes each on two hosts (network namespaces), under load,
while servers, ranks and the router are killed, stopped and started again and the cable is cut.

    tests/e2e/storm_pd.py [--seconds 600] [--clients 64] [--each 10] [--every 4] [--seed 1]

Clients ask --each cases of every task of models/eval/tiny.jsonl, again and again, and want the very answer of one
server alone. An answer that ends with an error is asked for anew, and counted. In the end every case is asked once
more in quiet, every server must have all its pages and no lease, and end cleanly. Needs root, iproute2 and UCX.
Exits 77 where these are missing."""

import argparse
import collections
import concurrent.futures
import http.client
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
HADAL = os.environ.get("HADAL", str(ROOT / "build" / "hadal"))
TINY = ROOT / "models" / "tiny-v4"
FLAGS = ("--threads", 1, "--max-running", 32, "--context", 8192, "--kv-host", 0.2, "--backend", "cpu")
SECRETS = {"HADAL_API_KEY": "k" * 16, "HADAL_ADMIN_KEY": "a" * 16, "HADAL_PEER_KEY": "p" * 32, "HADAL_RANK_KEY": "r" * 32}
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))}
PATIENCE = 120


def call(address, method, path, body=None, timeout=PATIENCE):
    host, port = address.rsplit(":", 1)
    c = http.client.HTTPConnection(host, int(port), timeout=timeout)
    try:
        key = SECRETS["HADAL_ADMIN_KEY" if path == "/flush_cache" else "HADAL_API_KEY"]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        c.request(method, path, json.dumps(body) if body is not None else None, headers)
        r = c.getresponse()
        return r.status, r.read().decode()
    finally:
        c.close()


def wait_for(what, condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return
        except (OSError, http.client.HTTPException, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"after {seconds} s not yet: {what}")


class Hosts:
    """This host, and another one behind a cable."""

    def __init__(self):
        self.name, self.net = f"hadal{os.getpid()}", f"10.77.{os.getpid() % 250}"
        self.veth = [f"hd{os.getpid() % 100000}{end}" for end in "ab"]
        made = [self.ip("netns", "add", self.name), self.ip("link", "add", self.veth[0], "type", "veth", "peer", self.veth[1], "netns", self.name)]
        if any(made):
            self.close()
            print("no network namespaces here")
            sys.exit(77)
        self.ip("addr", "add", f"{self.net}.1/24", "dev", self.veth[0])
        self.ip("link", "set", self.veth[0], "up")
        self.ip("route", "add", "unreachable", f"{self.net}.0/24", "metric", "4000")  # a cut cable's packets leave by no other way
        for words in (("addr", "add", f"{self.net}.2/24", "dev", self.veth[1]), ("link", "set", self.veth[1], "up"), ("link", "set", "lo", "up")):
            self.ip("-n", self.name, *words)

    @staticmethod
    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True).returncode

    def cable(self, state):
        self.ip("link", "set", self.veth[0], state)

    def close(self):
        self.ip("route", "del", "unreachable", f"{self.net}.0/24", "metric", "4000")
        self.ip("link", "del", self.veth[0])
        self.ip("netns", "del", self.name)


class Program:
    """Something that listens at an address, is killed and comes again."""

    def __init__(self, words, log, inside=()):
        self.words, self.inside, self.log, self.process = words, inside, log, None

    def start(self):
        words = [str(w) for w in [*self.inside, HADAL, *self.words]]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(words, env={**CLEAN, **SECRETS}, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self, number):
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait()


class World:
    """A server of two processes."""

    def __init__(self, hosts, n, role, layout, folder, peers=()):
        there = n % 2
        host, port = f"{hosts.net}.{1 + there}", 31000 + 10 * n
        self.name, self.address, self.transfer = f"{role}-{n}", f"{host}:{port}", f"{host}:{port + 1}"
        flags = ["serve", TINY, *FLAGS, *layout, "--role", role, "--world", 2, "--meet", f"127.0.0.1:{port + 2}"]
        flags += ["--transfer-listen", self.transfer] if role == "prefill" else ["--prefill-peers", ",".join(f"{p.address}={p.transfer}" for p in peers)]
        inside = ["ip", "netns", "exec", hosts.name] if there else []
        first = ["--host", host, "--port", port, "--rank", 0]
        self.ranks = [Program([*flags, *words], folder / f"{self.name}.{r}.log", inside) for r, words in enumerate((first, ["--rank", 1]))]

    def start(self):
        for r in self.ranks:
            r.start()

    def is_ready(self):
        return call(self.address, "GET", "/health", timeout=5)[0] == 200

    def figures(self):
        """By name and labels, those that say what is in use."""
        text = call(self.address, "GET", "/metrics")[1]
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines if name.startswith(("hadal_kv_pages", "hadal_pd_leases{", "hadal_living_"))}

    def settle(self):
        """Nothing runs, and nothing is cached. Other ranks report after a round."""
        wait_for(f"{self.name} is at rest", lambda: call(self.address, "POST", "/flush_cache")[0] == 200)
        before, now = None, self.figures()
        while now != before:
            time.sleep(0.5)
            before, now = now, self.figures()
        return now


class Storm:
    def __init__(self, args, folder):
        self.args, self.random, self.hosts = args, random.Random(args.seed), Hosts()
        self.done, self.count, self.wrong, self.ends = collections.Counter(), collections.Counter(), [], threading.Event()
        prefill = [World(self.hosts, 0, "prefill", ("--tp", 2), folder), World(self.hosts, 1, "prefill", ("--dp", 2, "--ep", 2), folder)]
        decode = [World(self.hosts, n, "decode", ("--ep", 2), folder, prefill) for n in (2, 3)]
        self.worlds, self.at = prefill + decode, f"{self.hosts.net}.1:30999"
        names = lambda ws: ",".join(w.address for w in ws)
        self.router = Program(["router", "--host", f"{self.hosts.net}.1", "--port", 30999, "--prefill", names(prefill), "--decode", names(decode)], folder / "router.log")

    def start(self):
        for w in self.worlds:
            w.start()
        self.router.start()
        self.wait_whole()
        self.fresh = {w.name: w.settle() for w in self.worlds}

    def servers_up(self):
        return sum(s["up"] for s in json.loads(call(self.at, "GET", "/router/servers", timeout=5)[1])["servers"])

    def wait_whole(self):
        for w in self.worlds:
            wait_for(f"{w.name} is whole", w.is_ready)
        wait_for("the router knows all", lambda: self.servers_up() == len(self.worlds))

    # ---- clients ----

    def ask(self, address, case):
        body = {"messages": case["messages"], "temperature": 0, "max_tokens": case["max_tokens"]}
        for field in ("tools", "response_format"):
            if field in case:
                body[field] = case[field]
        body["chat_template_kwargs"] = {"thinking": bool(case.get("thinking"))}
        status, text = call(address, "POST", "/v1/chat/completions", body)
        if status != 200:
            raise OSError(f"{status}: {text[:200]}")
        choice = json.loads(text)["choices"][0]
        for tool in choice["message"].get("tool_calls") or []:
            tool.pop("id")
        return choice

    def ask_until_answered(self, i):
        while True:
            try:
                return self.ask(self.at, self.cases[i])
            except (OSError, http.client.HTTPException, ValueError) as e:
                self.count["errors"] += 1
                self.count[str(e)[:60]] += 1
                time.sleep(0.2)

    def check(self, i):
        said = self.ask_until_answered(i)
        if said != self.right[i]:
            self.wrong.append((self.cases[i], said, self.right[i]))
        self.count["answers"] += 1

    def client(self, first):
        for k in itertools.count(first, self.args.clients):
            if self.ends.is_set():
                return
            self.check(k % len(self.cases))

    # ---- faults ----

    def kill_rank(self, w):
        w.ranks[1].stop(signal.SIGKILL)
        time.sleep(1)
        w.ranks[1].start()

    def kill_server(self, w, number=signal.SIGKILL):
        w.ranks[0].stop(number)
        w.ranks[1].stop(signal.SIGKILL if number == signal.SIGKILL else signal.SIGTERM)
        w.start()

    def stop_rank(self, w):
        w.ranks[1].process.send_signal(signal.SIGSTOP)
        time.sleep(2)
        w.ranks[1].process.send_signal(signal.SIGCONT)

    def cut(self, _):
        self.hosts.cable("down")
        time.sleep(2)
        self.hosts.cable("up")

    def restart_router(self, _):
        self.router.stop(signal.SIGKILL)
        self.router.start()

    def drain(self, w):
        self.kill_server(w, signal.SIGTERM)

    def rage(self):
        """One fault after the other; each server is whole again before something is done to it anew."""
        faults = [self.kill_rank, self.kill_server, self.stop_rank, self.cut, self.restart_router, self.drain]
        end = time.monotonic() + self.args.seconds
        while time.monotonic() < end:
            fault, w = self.random.choice(faults), self.random.choice(self.worlds)
            try:
                whole = w.is_ready()
            except (OSError, http.client.HTTPException):
                whole = False
            if whole:
                fault(w)
                self.done[fault.__name__] += 1
                print(f"{time.strftime('%H:%M:%S')} {fault.__name__} {w.name}: {self.count['answers']} answers, {self.count['errors']} errors", flush=True)
            time.sleep(self.args.every * self.random.uniform(0.5, 1.5))

    # ---- the whole ----

    def load_cases(self):
        by_task = collections.defaultdict(list)
        for line in (ROOT / "models" / "eval" / "tiny.jsonl").open():
            case = json.loads(line)
            if "messages" in case:
                by_task[case["task"]].append(case)
        self.cases = [c for cases in by_task.values() for c in cases[: self.args.each]]
        self.random.shuffle(self.cases)

    def answers_alone(self, folder):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        alone = Program(["serve", TINY, "--port", port, "--max-running", 64, "--context", 8192, "--backend", "cpu"], folder / "alone.log")
        alone.start()
        address = f"127.0.0.1:{port}"
        wait_for("the server alone is ready", lambda: call(address, "GET", "/health")[0] == 200)
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            self.right = list(pool.map(lambda c: self.ask(address, c), self.cases))
        assert alone.stop(signal.SIGTERM) == 0

    def run(self, folder):
        self.load_cases()
        self.answers_alone(folder)
        print(f"{len(self.cases)} cases; the servers start", flush=True)
        self.start()
        clients = [threading.Thread(target=self.client, args=(i,)) for i in range(self.args.clients)]
        for c in clients:
            c.start()
        try:
            self.rage()
        finally:
            self.ends.set()
            self.hosts.cable("up")
        self.wait_whole()
        for c in clients:
            c.join()
        before = self.count["errors"]
        with concurrent.futures.ThreadPoolExecutor(self.args.clients) as pool:
            list(pool.map(self.check, range(len(self.cases))))
        assert self.count["errors"] == before, "an error in quiet"
        for w in self.worlds:
            try:
                wait_for(f"{w.name} has what it had", lambda w=w: w.settle() == self.fresh[w.name], 30)
            except AssertionError:
                now, was = w.settle(), self.fresh[w.name]
                for name in sorted(now.keys() | was.keys()):
                    if now.get(name) != was.get(name):
                        print(f"{w.name}: {name} {was.get(name)} before, {now.get(name)} now")
                raise
        codes = [self.router.stop(signal.SIGTERM)]
        for w in self.worlds:
            codes += [w.ranks[0].stop(signal.SIGTERM), w.ranks[1].process.wait()]
        print(f"faults: {dict(self.done)}\nclients: {dict(self.count)}\nexit codes: {codes}")
        for case, said, right in self.wrong[:3]:
            print(f"wrong: {case['task']}: {said} instead of {right}")
        return not self.wrong and not any(codes) and sum(self.done.values()) > 0

    def close(self):
        for p in [self.router, *(r for w in self.worlds for r in w.ranks)]:
            if p.process and p.process.poll() is None:
                p.process.kill()
                p.process.wait()
        self.hosts.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seconds", 600), ("clients", 64), ("each", 10), ("every", 4), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        storm, ok = Storm(args, pathlib.Path(folder)), False
        try:
            ok = storm.run(pathlib.Path(folder))
        except AssertionError as e:
            print(f"failed: {e}")
        finally:
            storm.close()
            if not ok:
                for log in sorted(pathlib.Path(folder).glob("*.log")):
                    print(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
