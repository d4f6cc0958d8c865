"""A trainer that dies: sends new weights in parts, and kills itself at a message.

weight_sender.py PORT NAME N STEP HOW: the parts lie in shared memory as NAME-0 to NAME-(N - 1). HOW is
"half": half of message STEP leaves, or "after": its reply has come. STEP -1: it lives."""

import http.client
import json
import os
import signal
import sys

PORT, NAME, N, STEP, HOW = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def send(step, path, body):
    c = http.client.HTTPConnection("127.0.0.1", PORT)
    data = json.dumps(body).encode()
    if step == STEP and HOW == "half":
        c.putrequest("POST", path)
        c.putheader("Content-Type", "application/json")
        c.putheader("Content-Length", str(len(data)))
        c.endheaders(data[: len(data) // 2])
        die()
    c.request("POST", path, data, {"Content-Type": "application/json"})
    reply = c.getresponse()
    text = reply.read()
    if step == STEP:
        die()
    if reply.status != 200:
        sys.exit(f"{path}: {reply.status} {text.decode()}")
    return json.loads(text) if text.startswith(b"{") else None


send(0, "/pause_generation", {"mode": "retract"})
send(1, "/flush_cache", {})
number = send(2, "/begin_weight_update", {"selector": "all"})["update"]
for i in range(N):
    send(3 + i, "/update_weights_from_tensor", {"shared_memory": f"{NAME}-{i}", "update": number})
send(3 + N, "/end_weight_update", {"update": number, "parts": N, "weight_version": "sent"})
send(4 + N, "/continue_generation", {})
