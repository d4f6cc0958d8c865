"""A running server for tests: hadal serve on a free port, or drive_http, which is its HTTP layer
with handlers that do nothing. Raw sockets where the bytes matter, http.client elsewhere."""

import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import time

import pytest
from conftest import HADAL, ROOT, for_gpu

try:
    import jsonschema
except ImportError:
    jsonschema = None

TINY = ROOT / "models" / "tiny-v4"
DRIVER = pathlib.Path(HADAL).parent / "drive_http"
LEAK_CHECKED = "asan" in DRIVER.parent.name  # every program looks for leaks at its end, and is slow
PATIENCE = 120  # seconds before a hung test gives up; no test measures time with it


def free_port(host="127.0.0.1"):
    """One that nobody listens at, below those that the kernel gives to connections: none takes it before it is listened at."""
    for port in random.sample(range(20000, 32000), 1000):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind((host, port))
            return port
    raise RuntimeError("no free port")


def wait_until(condition, what):
    """Polls until the condition holds; a test that waits for ever would hang the suite."""
    end = time.monotonic() + PATIENCE
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.005)


class Reply:
    def __init__(self, response):
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def text(self):
        return self.body.decode()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def code(self):
        return self.json["error"]["code"]


class Listening:
    """A process that listens on self.port."""

    port = None

    def connection(self, timeout=PATIENCE):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def request(self, method, path, body=None, headers=None, connection=None):
        c = connection or self.connection()
        headers = dict(headers or {})
        if isinstance(body, (dict, list)):
            body = json.dumps(body)
            headers.setdefault("Content-Type", "application/json")
        c.request(method, path, body=body, headers=headers)
        reply = Reply(c.getresponse())
        if not connection:
            c.close()
        return reply

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def post(self, path, body=None, **options):
        return self.request("POST", path, body=body, **options)

    def socket(self):
        s = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return s

    def raw(self, data):
        """Sends bytes, returns everything until the server closes."""
        with self.socket() as s:
            try:
                s.sendall(data)
                s.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            return read_all(s)


def read_all(s):
    data = b""
    try:
        while piece := s.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def read_until(s, text):
    """Everything up to a text, and what came with it."""
    data = b""
    while text not in data:
        piece = s.recv(65536)
        assert piece, f"closed before {text}"
        data += piece
    return data


def reset(s):
    """Closes with RST instead of FIN."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.close()


def events_of(response):
    """The data of server-sent events, as they come; comments are left out."""
    for line in response:
        if line.startswith(b"data: "):
            yield line[6:].strip()


class Driver(Listening):
    def __init__(self, keys=None, **limits):
        words = [f"{name}={value}" for name, value in limits.items()]
        self.process = subprocess.Popen([DRIVER, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **(keys or {})})
        self.port = int(self.process.stdout.readline().split()[1])

    def state(self):
        return self.get("/state").json

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait() == 0


class Hosts:
    """An /etc/hosts of their own for the processes of `launcher`, in which many.example is what resolve() says."""

    def __init__(self, folder):
        if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
            pytest.skip("this system lets nobody have mounts of his own (unshare -m)")
        self.file = folder / "hosts"
        self.launcher = ("unshare", "-m", "sh", "-c", f'mount --bind {self.file} /etc/hosts && exec "$@"', "sh")

    def resolve(self, *last):
        """127.0.0.N for each; in place, since the file is mounted."""
        with self.file.open("w") as f:
            f.write("127.0.0.1 localhost\n" + "".join(f"127.0.0.{n} many.example\n" for n in last))


class Description:
    """What /openapi.json says of a server: replies are held against it."""

    def __init__(self, text):
        self.whole = json.loads(text)
        self.validators = {}

    def operation(self, method, path):
        for known, item in self.whole["paths"].items():
            pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(known))
            if re.fullmatch(pattern, path) and method.lower() in item:
                return item[method.lower()]
        return None

    def validate(self, value, schema):
        name = json.dumps(schema)
        if name not in self.validators:
            self.validators[name] = jsonschema.Draft202012Validator({**schema, "components": self.whole["components"]})
        self.validators[name].validate(value)

    def check(self, method, path, reply):
        operation = self.operation(method, path.split("?")[0])
        kind = (reply.headers["Content-Type"] or "").split(";")[0]
        responses = operation and operation["responses"]
        if not responses or reply.status not in (200, *range(400, 600)):
            return
        content = responses.get("200" if reply.status == 200 else "default", {}).get("content", {})
        if kind == "application/json" and kind in content:
            self.validate(reply.json, content[kind]["schema"])
        elif kind == "text/event-stream" and "$ref" in content.get(kind, {}).get("schema", {}):
            for event in events_of(reply.body.split(b"\n")):
                document = json.loads(event) if event != b"[DONE]" else {"error": None}
                if "error" not in document or reply.status != 200:
                    self.validate(document, content[kind]["schema"])


class Server(Listening):
    description = None
    ending = False  # was told to drain

    def request(self, method, path, **options):
        reply = super().request(method, path, **options)
        if jsonschema and self.description is None:
            said = super().request("GET", "/openapi.json")
            self.description = Description(said.text) if said.status == 200 else None
        if self.description:
            self.description.check(method, path, reply)
        return reply

    def __init__(self, *flags, model=TINY, port=0, env=None, program=HADAL, launcher=(), **process):
        words = [*launcher, program, "serve", model, "--port", port, *flags]
        self.log = b""
        process = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, **process}
        self.process = subprocess.Popen(for_gpu(words), stdout=subprocess.PIPE, env={**os.environ, **(env or {})}, **process)
        first = self.process.stdout.readline().decode()
        assert first.startswith("hadal "), first + self.process.stderr.read().decode()
        self.port = int(first.rsplit(":", 1)[1].split()[0])
        self.said = first
        while not first.startswith("ready"):
            first = self.process.stdout.readline().decode()
            assert first, self.said
            self.said += first

    def signal(self, number):
        self.process.send_signal(number)
        self.ending |= number in (signal.SIGTERM, signal.SIGINT)

    def stats(self, **options):
        """Figures of /metrics by name, without labels."""
        figures = {}
        for line in self.get("/metrics", **options).text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                figures[name.split("{")[0]] = float(value)
        return figures

    def loads(self):
        return self.get("/v1/loads").json["loads"][0]

    def wait(self):
        self.log += self.process.communicate()[1]
        return self.process.returncode

    def close(self, missed=0):
        """missed: how many audits may have found something that was not given back."""
        if self.process.poll() is None and not self.ending:  # a second signal would end it at once
            self.signal(signal.SIGTERM)
        assert self.wait() == 0, self.log.decode()
        assert self.log.count(b"audit_failed") == missed, self.log.decode()
