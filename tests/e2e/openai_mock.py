"""A small server of the OpenAI interface that answers as a test tells it: what a load generator
meets besides good answers, and what it was sent."""

import http.server
import json
import threading
import time


class Mock:
    """answers: a list of kinds, request by request (the last one stays); see KINDS below. Requests
    without "stream" are probes: they are answered plainly and not recorded in bodies."""

    def __init__(self, *answers, tokens=5, usage=True, refuse=()):
        self.answers = list(answers or ["good"])
        self.tokens, self.usage, self.refuse = tokens, usage, refuse
        self.bodies, self.headers, self.probes = [], [], []
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.let_go = threading.Event()
        mock = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args):
                pass

            def do_GET(self):
                reply_json(self, 200, {"object": "list", "data": [{"id": mock.model}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                mock.post(self, body)

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512

            def handle_error(self, request, address):
                pass  # clients that leave

        self.model = "mock"
        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.let_go.set()
        self.server.shutdown()
        self.server.server_close()

    def post(self, handler, body):
        for name in self.refuse:
            if name in body:
                return reply_json(handler, 400, {"error": {"message": f"unknown parameter {name}", "code": "unknown_parameter"}})
        if not body["stream"]:
            self.probes.append(body)
            return reply_json(handler, 200, {"usage": {"prompt_tokens": count_words(body), "completion_tokens": 1}})
        with self.lock:
            kind = self.answers[min(len(self.bodies), len(self.answers) - 1)]
            self.bodies.append(body)
            self.headers.append(handler.headers)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            KINDS[kind](self, handler, body)
        finally:
            with self.lock:
                self.now -= 1

    def usage_of(self, body):
        return {"prompt_tokens": count_words(body), "completion_tokens": self.tokens, "prompt_tokens_details": {"cached_tokens": 1}}


def count_words(body):
    """One token per word, and three around every message."""
    if "messages" in body:
        return sum(3 + len(m["content"].split()) for m in body["messages"])
    return len(body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split())


def reply_json(handler, status, value):
    data = json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def begin(handler):
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()


def send(handler, data):
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


def event(value):
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chunk(body, text, reason=None):
    choice = {"index": 0, "finish_reason": reason}
    choice.update({"delta": {"content": text}} if "messages" in body else {"text": text})
    return event({"choices": [choice]})


def texts(mock, handler, body):
    for i in range(mock.tokens):
        send(handler, chunk(body, f" token{i}"))


def good(mock, handler, body):
    begin(handler)
    send(handler, b": a comment\n\n")
    texts(mock, handler, body)
    send(handler, chunk(body, "", "length"))
    if mock.usage:
        send(handler, event({"choices": [], "usage": mock.usage_of(body)}))
    send(handler, event(b"[DONE]"))
    handler.wfile.write(b"0\r\n\r\n")


def pieces(mock, handler, body):
    """The same bytes in pieces that end anywhere."""
    begin(handler)
    whole = b"".join(chunk(body, f" token{i}") for i in range(mock.tokens)) + chunk(body, "", "stop") + event(b"[DONE]")
    for i in range(0, len(whole), 7):
        send(handler, whole[i:i + 7])
    handler.wfile.write(b"0\r\n\r\n")


def cut(mock, handler, body):
    begin(handler)
    texts(mock, handler, body)
    handler.close_connection = True


def unended(mock, handler, body):
    begin(handler)
    texts(mock, handler, body)
    handler.wfile.write(b"0\r\n\r\n")


def failing(mock, handler, body):
    begin(handler)
    texts(mock, handler, body)
    send(handler, event({"error": {"message": "out of pages", "code": 500}}))
    handler.wfile.write(b"0\r\n\r\n")


def garbage(mock, handler, body):
    begin(handler)
    send(handler, event(b"{nonsense"))
    handler.wfile.write(b"0\r\n\r\n")


def busy(mock, handler, body):
    reply_json(handler, 429, {"error": {"message": "try later", "type": "rate_limit", "code": "too_many"}})


def odd(mock, handler, body):
    reply_json(handler, 400, {"error": {"message": "\x1b[31m" + "é" * 150, "code": "\n" + "ü" * 60}})


def silent(mock, handler, body):
    mock.let_go.wait(120)
    handler.close_connection = True


def vanishing(mock, handler, body):
    handler.close_connection = True


def slow(mock, handler, body):
    time.sleep(0.05)
    good(mock, handler, body)


KINDS = {f.__name__: f for f in (good, pieces, cut, unended, failing, garbage, busy, odd, silent, vanishing, slow)}
