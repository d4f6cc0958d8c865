"""A server that plays scripted answers to the page: what a small model never says, it says at will.

Hostile text, errors, streams that break, engines with many experts or with missing fields. Also
good for working on the page without a build: `python tests/e2e/page_mock.py 8090`.
"""

import http.server
import json
import math
import pathlib
import random
import sys
import threading
import time

WEB = pathlib.Path(__file__).resolve().parents[2] / "src" / "server" / "web"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

SUM = {
    "reasoning": "347 + 586\nones: 7 + 6 = 13, write 3, carry 1\ntens: 4 + 8 + 1 = 13, write 3, carry 1\n"
    "hundreds: 3 + 5 + 1 = 9, write 9, carry 0\nSo 347 + 586 = 933",
    "content": "347 + 586 = 933",
}

MARKDOWN = """## What a trench is

A *hadal* trench is **deeper than 6,000 m**. See [the zone](https://example.org/zone) or `depth()`.

1. It begins where the abyss ends.
2. It is cold:
   - 1 to 4 °C
   - no light
3. It is narrow.

| place | depth |
|---|---:|
| Mariana | 10,935 m |
| Tonga | 10,800 m |

```c
/* pressure in bar */
static double pressure(double depth) {
    return depth / 10.0 + 1.0;
}
```

> The deep is **quiet**.

That is all.
"""

FORMULAS = r"""For $ax^2 + bx + c = 0$ with \(a \ne 0\) the roots are

$$
x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}
$$

It costs $5 and $10, not $x$ dollars; the $n$th term is \(a_n = \frac{1}{n^2}\).

\[
A = \begin{bmatrix} a_{11} & \cdots & a_{1n} \\ \vdots & \ddots & \vdots \\ a_{m1} & \cdots & a_{mn} \end{bmatrix}, \quad
f(x) = \begin{cases} x^2 & \text{if } x \ge 0 \\ -x & \text{otherwise} \end{cases}
\]

$$\sum_{n=1}^{\infty} \frac{1}{n^2} = \frac{\pi^2}{6}, \qquad \int_{-\infty}^{\infty} e^{-x^2}\,dx = \sqrt{\pi}, \qquad \boxed{E = mc^2}, \qquad \lim_{n\to\infty}\left(1+\frac1n\right)^n = e$$

Broken: $\frac{1}{$.

```python
@dataclass
class Point:
    '''A point.'''
    x: float = 0.5e-3  # m

    def norm(self, p=2):
        return abs(self.x) ** p
```
"""

HOSTILE = """<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>

[click](javascript:document.title='owned') ![alt](https://example.org/track.png) [ok](https://example.org/)

<svg onload=alert(1)> **<b>bold</b>** `<i>` \u202etxt

"""

ANSWERS = {
    "What is 347 + 586?": SUM,
    "markdown": {"content": MARKDOWN},
    "hostile": {"content": HOSTILE},
    "formulas": {"content": FORMULAS},
    "long line": {"content": "deep " * 60000, "piece": 4096},
    "long": {"content": "\n\n".join([MARKDOWN] * 40), "piece": 200},
    "endless": {"content": "down and ", "endless": True},
    "light": {"call": ("set_light", '{"on": true}')},
    "breaks": {"content": "The sea is", "breaks": True},
}  # fmt: skip
ERRORS = {
    "busy": (429, "The queue is full.", {"Retry-After": "3"}),
    "wrong": (400, "temperature must be at least 0.", {}),
}


def pieces(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


def script_of(body):
    """What the last message asks for: an entry of ANSWERS, or a tool call and its answer."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return {"reasoning": "I have the result.", "content": f"The answer is {list(json.loads(last['content']).values())[0]}."}
    if body.get("tools") and "alculator" in last["content"]:
        return {"reasoning": "I use the calculator for 4821 * 37.", "call": ("calculator", '{"expression": "4821 * 37"}')}
    return ANSWERS.get(last["content"], {"content": f"You said: {last['content']}"})


def deltas(script):
    yield {"role": "assistant", "content": ""}
    for piece in pieces(script.get("reasoning", ""), 3):
        yield {"reasoning_content": piece}
    size = script.get("piece", 3)
    while script.get("endless"):
        yield {"content": script["content"]}
    for piece in pieces(script.get("content", ""), size):
        yield {"content": piece}
    if "call" in script:
        name, arguments = script["call"]
        yield {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}]}
        for piece in pieces(arguments, 4):
            yield {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}


class Engine:
    """A busy engine that never was: 40 requests on their way, 24 layers of 64 experts."""

    def __init__(self):
        self.random = random.Random(1)
        self.n = 0
        self.requests = []
        self.next_id = 1
        self.stats = {
            "waiting": 0, "running": 0, "max_running": 16, "paused": False, "draining": False, "steps": 0, "rows": 0,
            "finished": 0, "retracted": 2, "drafted_at": [0] * 7, "accepted_at": [0] * 7, "prompt_tokens": 0,
            "cached_tokens": 0, "output_tokens": 1000, "pages": [512, 512], "pages_free": [300, 200], "pages_cached": [90, 250],
            "page_tokens": 128, "host_pages": [0, 256], "host_free": [0, 180],
            "experts_elsewhere": {"source": "file", "elsewhere": 1536, "slots": 384, "slot_bytes": 2_000_000_000, "fetch_bytes": 5_000_000_000,
                             "used": 1000, "staged": 750, "failed": 0, "predicted": 400, "right": 340}, "step_ns": 0, "host_ns": 0, "last_step_ns": 0,
            "weight_version": "step-7 <b>", "weight_bytes": 22884624, "kv_bytes": 67108864, "activation_bytes": 9437184, "max_context": 8192,
        }  # fmt: skip

    def turn(self):
        s, r = self.stats, self.random
        self.n += 1
        while len(self.requests) < 26 and r.random() < 0.8:
            prompt = r.randrange(100, 4000)
            cached = r.choice([0, prompt // 128 // 2 * 128])
            s["prompt_tokens"] += prompt
            s["cached_tokens"] += cached
            self.requests.append({"id": self.next_id, "answer": 0, "phase": "waiting", "prompt_tokens": prompt,
                                  "cached_tokens": cached, "done_tokens": cached, "output_tokens": 0, "goal": r.randrange(50, 400)})  # fmt: skip
            self.next_id += 1
        running = [q for q in self.requests if q["phase"] != "waiting"]
        for q in self.requests:
            if q["phase"] == "waiting" and len(running) < 16:
                q["phase"] = "prefill"
                running.append(q)
            elif q["phase"] == "prefill":
                q["done_tokens"] = min(q["prompt_tokens"], q["done_tokens"] + 512)
                if q["done_tokens"] == q["prompt_tokens"]:
                    q["phase"] = "decode"
            elif q["phase"] == "decode":
                q["output_tokens"] += r.randrange(8, 16)
        done = [q for q in self.requests if q["output_tokens"] > q["goal"]]
        s["finished"] += len(done)
        self.requests = [q for q in self.requests if q not in done]
        s["running"] = len([q for q in self.requests if q["phase"] != "waiting"])
        s["waiting"] = len(self.requests) - s["running"]
        for place in range(3):
            s["drafted_at"][place] += 100
            s["accepted_at"][place] += 92 - 14 * place
        s["steps"] += 40
        s["rows"] += 900
        s["step_ns"] += 250_000_000
        s["host_ns"] += 9_000_000
        wave = math.sin(self.n / 9)
        message = {
            "t": self.n / 4,
            "stats": s,
            "rates": {"tokens_s": 900 + 200 * wave + 50 * r.random(), "prompt_tokens_s": max(0, 3000 * wave + 400 * r.random())},
            "ttft_ms": {"p50": 120 + 30 * wave, "p95": 340 + 40 * wave},
            "itl_ms": {"p50": 11 + wave, "p95": 19 + 2 * r.random()},
            "requests": [{k: v for k, v in q.items() if k != "goal"} for q in self.requests],
        }
        if self.n % 4 == 1:
            message["experts"] = {
                "n_experts": 64,
                "layers": [[int(100 * r.random() ** (1 + layer / 12)) for _ in range(64)] for layer in range(24)],
            }
        return message


def past():
    """What the engine did in the minute before."""
    waves = [math.sin(n / 30) for n in range(240)]
    return {
        "t": [n / 4 - 60 for n in range(240)],
        "tokens_s": [700 + 300 * wave for wave in waves], "prompt_tokens_s": [max(0, 3000 * wave) for wave in waves],
        "ttft_p50_ms": [None] * 40 + [100 + 20 * wave for wave in waves[40:]], "ttft_p95_ms": [None] * 40 + [300 + 50 * wave for wave in waves[40:]],
        "itl_p50_ms": [10 + wave for wave in waves], "itl_p95_ms": [18 + 2 * wave for wave in waves],
        "prompt_tokens": [0] * 240, "cached_tokens": [0] * 240, "running": [4] * 240, "waiting": [0] * 240,
    }  # fmt: skip


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_):
        pass

    def answer(self, status, kind, body, headers=()):
        self.send_response(status)
        for name, value in [("Content-Type", kind), ("Content-Length", len(body)), *headers]:
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status, message, headers=()):
        body = json.dumps({"error": {"message": message, "type": "error", "code": None, "param": None}}).encode()
        self.answer(status, "application/json", body, headers)

    def allowed(self):
        key = self.server.key
        if not key or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.refuse(401, "An API key is needed." if "Authorization" not in self.headers else "This key is unknown.")
        return False

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def event(self, data):
        self.wfile.write(b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n")
        self.wfile.flush()

    def do_GET(self):
        path = self.path.partition("?")[0]
        file = WEB / "index.html" if path == "/" else WEB / path.removeprefix("/page/")
        if path == "/v1/models":
            if self.allowed():
                self.answer(200, "application/json", b'{"object": "list", "data": [{"id": "mock", "object": "model"}]}')
        elif path == "/engine/live":
            if self.allowed():
                self.live()
        elif path == "/engine/history":
            if self.allowed():
                self.answer(200, "application/json", json.dumps(self.server.history).encode())
        elif path == "/engine/requests":
            if self.allowed():
                place = self.server.place
                one = {"id": 1, "answer": 0, "phase": "waiting" if place else "decode", "ahead": max(0, place - 1)}
                self.answer(200, "application/json", json.dumps({"requests": [one]}).encode())
        elif file.parent == WEB and file.is_file():
            self.answer(200, TYPES[file.suffix], file.read_bytes(), [("Content-Security-Policy", CSP), ("Cache-Control", "no-store")])
        else:
            self.refuse(404, "There is nothing here.")

    def live(self):
        self.begin_stream()
        engine = Engine()
        try:
            while not self.server.stopping.is_set():
                message = engine.turn()
                self.event(self.server.change(message))
                self.server.stopping.wait(self.server.live_pause)
        except OSError:
            pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        self.server.bodies.append(body)
        asked = body["messages"][-1]["content"]
        if asked in ERRORS:
            status, message, headers = ERRORS[asked]
            self.refuse(status, message, headers.items())
            return
        while self.server.place:
            time.sleep(0.005)
        self.begin_stream()
        try:
            self.play(script_of(body))
        except OSError:
            self.server.vanished.set()

    def play(self, script):
        def chunk(delta, finish=None):
            self.event({"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        n = 0
        for delta in deltas(script):
            chunk(delta)
            n += 1
            time.sleep(self.server.pause)
        if script.get("breaks"):
            return
        chunk({}, "tool_calls" if "call" in script else "stop")
        details = {"reasoning_tokens": 0, "accepted_prediction_tokens": n // 2, "rejected_prediction_tokens": 1, "draft_steps": n // 2}
        self.event({"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": n, "total_tokens": n + 16,
                                             "prompt_tokens_details": {"cached_tokens": 8}, "completion_tokens_details": details}})  # fmt: skip
        self.event("[DONE]")


class Server(http.server.ThreadingHTTPServer):
    """start() gives the address; bodies are the requests so far; vanished: a reader went away;
    place: of requests in the queue, 0 lets them begin."""

    daemon_threads = True

    def __init__(self, port=0, key="", pause=0.0, live_pause=0.02, change=lambda message: message):
        super().__init__(("127.0.0.1", port), Handler)
        self.key, self.pause, self.live_pause, self.change = key, pause, live_pause, change
        self.bodies = []
        self.place = 0
        self.history = past()
        self.vanished = threading.Event()
        self.stopping = threading.Event()

    def start(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def stop(self):
        self.stopping.set()
        self.shutdown()
        self.server_close()


if __name__ == "__main__":
    server = Server(int(sys.argv[1]) if len(sys.argv) > 1 else 8090, pause=0.02, live_pause=0.25)
    print(server.start(), flush=True)
    threading.Event().wait()
