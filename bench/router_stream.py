#!/usr/bin/env python3
"""Streamed events through `hadal router` alone, on one core, with nginx as a proxy beside it.

    bench/router_stream.py [--streams 64] [--seconds 4] [--batch 8] [--rounds 3] [--beside HADAL]

An upstream that computes nothing answers every request with an endless stream of events, with a pause of a millisecond after
each write: of one event, with the time inside, or of --batch events. The first two figures are events per second of the
proxy's processor time, with many streams; the third is the delay from write to read of one stream, less that without a
proxy. Router and nginx (one worker, `proxy_buffering off`) are pinned to one core and take turns, upstream and clients
have the others; without nginx its rows are missing. With --beside another build takes turns, too. On a machine with few or busy
cores give few streams: a proxy that comes late finds several events together. Medians of the rounds."""

import argparse
import multiprocessing
import os
import re
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOADS = b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0, "num_total_tokens": 0, "max_running_requests": 4096}]}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text):
    return b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n' % text


def answer(s, batch, stop):
    try:
        request = b""
        while True:
            while b"\r\n\r\n" not in request:
                piece = s.recv(65536)
                if not piece:
                    return
                request += piece
            head, _, request = request.partition(b"\r\n\r\n")
            if b"/v1/loads" in head:
                s.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(LOADS) + LOADS)
                continue
            s.sendall(HEAD)
            together = chunk(event(b" word") * batch) if b"/v1/chat" in head else None
            while not stop.is_set():
                s.sendall(together or chunk(event(b"%d" % time.perf_counter_ns())))
                time.sleep(0.001)
            return
    except OSError:
        pass
    finally:
        s.close()


def upstream(listener, batch, cores, stop):
    os.sched_setaffinity(0, cores)
    while True:
        s, _ = listener.accept()
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=answer, args=(s, batch, stop), daemon=True).start()


def ask(port, path):
    s = socket.create_connection(("127.0.0.1", port))
    body = b'{"stream": true}'
    s.sendall(b"POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (path, port, len(body)) + body)
    return s


def per_second(process, port, path, streams, seconds):
    """Events for each second of the proxy's processor time."""
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        selector.register(ask(port, path), selectors.EVENT_READ)
    n, begun, used, room = 0, None, 0, bytearray(1 << 18)
    while begun is None or time.perf_counter() < begun + seconds:
        for key, _ in selector.select(1):
            got = key.fileobj.recv_into(room)
            assert got, "a stream ended"
            n += room.count(b"data: ", 0, got)
        if begun is None and n > 100 * streams:
            begun, used, n = time.perf_counter(), cpu_seconds(process.pid), 0
    used = cpu_seconds(process.pid) - used
    for key in list(selector.get_map().values()):
        key.fileobj.close()
    return n / used


def delay(port, n=2000):
    """Median microseconds from the upstream's write to the client's read."""
    s, found, data = ask(port, b"/v1/completions"), [], b""
    while len(found) < n:
        got = s.recv(65536)
        assert got, "a stream ended"
        now = time.perf_counter_ns()
        *whole, data = (data + got).split(b"\n\n")
        times = (re.search(rb'"content":"(\d+)"', e) for e in whole)  # none where a chunk ends within
        found += [(now - int(t[1])) / 1e3 for t in times if t]
    s.close()
    return statistics.median(found)


def cpu_seconds(pid):
    """Of all threads of a process, so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_router(to, core, program):
    port = free_port()
    words = ["taskset", "-c", str(core), program, "router", "--port", str(port), "--decode", f"127.0.0.1:{to}"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL), port


def start_nginx(to, core, folder):
    port = free_port()
    (folder / "nginx.conf").write_text(f"""daemon off; worker_processes 1; pid {folder}/pid; error_log stderr warn; master_process off;
events {{ worker_connections 4096; }}
http {{ access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{to}; proxy_http_version 1.1; proxy_buffering off; }} }} }}
""")
    return subprocess.Popen(["taskset", "-c", str(core), "nginx", "-p", folder, "-c", folder / "nginx.conf"]), port


def wait_open(port):
    for _ in range(2000):
        try:
            s = ask(port, b"/v1/completions")
            good = b" 200 " in s.recv(4096)
            s.close()
            if good:
                return
        except OSError:
            pass
        time.sleep(0.01)
    sys.exit("a proxy does not answer")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--batch", type=int, default=8, help="events that the upstream writes together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", help="another build of hadal")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    proxy_core, others = cores[-1], set(cores[:-1]) or set(cores)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    stop = multiprocessing.Event()
    multiprocessing.Process(target=upstream, args=(listener, args.batch, others, stop), daemon=True).start()
    os.sched_setaffinity(0, others)
    to = listener.getsockname()[1]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        proxies = {"none": (None, to), "hadal router": start_router(to, proxy_core, os.environ.get("HADAL", ROOT / "build" / "hadal"))}
        if args.beside:
            proxies["the other build"] = start_router(to, proxy_core, args.beside)
        if shutil.which("nginx"):
            proxies["nginx"] = start_nginx(to, proxy_core, Path(folder))
        try:
            for _, port in proxies.values():
                wait_open(port)
            for _ in range(args.rounds):
                for name, (process, port) in proxies.items():
                    figures = found.setdefault(name, [[], [], []])
                    for k, path in enumerate((b"/v1/completions", b"/v1/chat/completions") if process else ()):
                        figures[k].append(per_second(process, port, path, args.streams, args.seconds))
                    figures[2].append(delay(port))
        finally:
            for process, _ in proxies.values():
                if process:
                    process.kill()
                    process.wait()
    medians = {name: [statistics.median(f or [0]) for f in figures] for name, figures in found.items()}
    bare = medians.pop("none")[2]
    print(f"| proxy | events/s, each apart | events/s, {args.batch} together | added delay, us |\n|---|---|---|---|")
    for name, (apart, together, late) in medians.items():
        print(f"| {name} | {apart:,.0f} | {together:,.0f} | {late - bare:.0f} |")
    if "nginx" in medians:
        ours, peer = medians["hadal router"], medians["nginx"]
        print(f"| router / nginx | {ours[0] / peer[0]:.2f} | {ours[1] / peer[1]:.2f} | {(ours[2] - bare) / (peer[2] - bare):.2f} |")
    else:
        print("\nnginx is not installed: no peer")


if __name__ == "__main__":
    main()
