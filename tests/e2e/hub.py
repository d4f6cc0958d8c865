"""A hub on this machine for tests: the endpoints that hadal pull asks, and everything a network does wrong.

Faults are by the file's name: Hub.faults["model.safetensors"] = [fault, ...], one per request, then none.
A fault is a function of (handler, bytes, first byte wanted) that answers the request itself.
"""

import contextlib
import hashlib
import http.server
import json
import ssl
import threading
import time
import urllib.parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def git_sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", headers=None, length=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, data, first, headers=None):
        if first > len(data) or (first and first == len(data)):
            return self.reply(416, headers={"Content-Range": f"bytes */{len(data)}"})
        if not first:
            return self.reply(200, data, headers)
        return self.reply(206, data[first:], {**(headers or {}), "Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"})

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.answer()

    def answer(self):
        hub = self.server.hub
        path = urllib.parse.unquote(self.path.split("?")[0])
        wanted = self.headers.get("Range")
        first = int(wanted[len("bytes=") : -1]) if wanted else 0
        with hub.lock:
            hub.asked.append((self.command, path, first, self.headers.get("Authorization")))
            name = path.split("/resolve/")[-1].split("/", 1)[-1] if "/resolve/" in path else "" if path.startswith("/api/") else path.split("/cdn/")[-1]
            fault = hub.faults[name].pop(0) if hub.faults.get(name) else None
        data = hub.files.get(name, b"") if name else json.dumps(hub.listing()).encode()
        if fault:
            return fault(self, data, first)
        if path.startswith("/api/models/"):
            if path != f"/api/models/{hub.repo}/revision/{hub.revision}":
                return self.reply(404, headers={"X-Error-Message": "Repository not found"})
            return self.reply(200, data)
        if name not in hub.files:
            return self.reply(404)
        large = name in hub.large
        etag = {"ETag": f'"{git_sha1(data)}"'}
        if large and "/resolve/" in path:
            etag = {"X-Linked-ETag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
            return self.reply(302, b"Found. Redirecting", {**etag, "Location": f"{hub.cdn}/cdn/{urllib.parse.quote(name)}?signature=secret"})
        return self.send_file(data, first, {} if large else etag)


class Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that left is no error."""


class Hub:
    def __init__(self, files, repo="org/model", certificate=None):
        self.files, self.repo, self.revision = dict(files), repo, "main"
        self.large = {name for name in files if name.endswith(".safetensors")}
        self.faults, self.asked, self.lock = {}, [], threading.Lock()
        self.changed = {}  # name: what the listing says instead
        self.servers = []
        self.url = self.listen(certificate)
        self.cdn = self.listen(certificate)  # another port: another origin
        self.released = threading.Event()

    def listen(self, certificate=None):
        server = Listener(("127.0.0.1", 0), Handler)
        server.hub = self
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.servers.append(server)
        return f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}"

    def close(self):
        self.released.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def listing(self):
        siblings = []
        for name, data in self.files.items():
            entry = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
            if name in self.large:
                entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
            siblings.append({**entry, **self.changed.get(name, {})})
        return {"id": self.repo, "sha": COMMIT, "siblings": siblings}

    def requests_of(self, name):
        return [(method, first) for method, path, first, _ in self.asked if path.endswith("/" + name)]


# ---- faults ----


def cut(at):
    """The connection ends after this many bytes, whatever was promised."""

    def fault(handler, data, first):
        handler.send_response(206 if first else 200)
        if first:
            handler.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - first))
        handler.end_headers()
        handler.wfile.write(data[first:at])
        handler.close_connection = True

    return fault


def stall(at):
    """The same, but the connection stays open and silent."""

    def fault(handler, data, first):
        cut(at)(handler, data, first)
        handler.wfile.flush()
        handler.server.hub.released.wait(60)

    return fault


def corrupt(handler, data, first):
    handler.send_file(bytes(b ^ 1 for b in data), first)


def without_ranges(handler, data, first):
    handler.reply(200, data)


def with_other_range(handler, data, first):
    handler.reply(206, data[1:], {"Content-Range": f"bytes 1-{len(data) - 1}/{len(data)}"})


def longer(handler, data, first):
    handler.reply(200, data + b"more")


def endless(handler, data, first):
    """More than was listed, without a length."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            time.sleep(0.001)


def answer(status, **headers):
    def fault(handler, data, first):
        handler.reply(status, b"no", {name.replace("_", "-"): value for name, value in headers.items()})

    return fault


def redirect(to):
    return answer(302, Location=to)
