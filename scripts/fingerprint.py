#!/usr/bin/env python3
"""Digests of what the program computes, to show that a change of words or files changed no result.

    scripts/fingerprint.py HADAL OUT.json      # before and after the change, with each program
    scripts/fingerprint.py --compare A.json B.json

Covers the logits of the golden cases, of the shared cases ($HADAL_SHARED) and of the shipped models,
seeded answers of a server (with and without drafts, constrained, with penalties, in company),
/openapi.json without its descriptions, and the names in /metrics. Exit 1 if A and B differ.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODELS = ["tiny-v4", "tiny-v3"]
DRAFTS = ["0", "3", "-1"]  # --draft-tokens
CLIENTS = 8
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "why": {"type": "string", "maxLength": 30}},
    "required": ["sum", "why"],
    "additionalProperties": False,
}


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def logits(hadal):
    folders = sorted(p.parent for p in (ROOT / "tests/golden").glob("*/tokens.json"))
    shared = os.environ.get("HADAL_SHARED")
    if shared:
        folders += sorted(p.parent for p in pathlib.Path(shared).glob("cases/*/tokens.json"))
    with tempfile.TemporaryDirectory() as scratch:
        made = pathlib.Path(scratch) / "tokens.json"
        made.write_text(json.dumps([[(7 * i * i + 3 * i) % 500 for i in range(300)]]))
        runs = [(p.name, p, p / "tokens.json") for p in folders]
        runs += [(name, ROOT / "models" / name, made) for name in MODELS]
        for name, model, tokens in runs:
            out = pathlib.Path(scratch) / "out.npy"
            command = [hadal, "logits", model, "--tokens", tokens, "--out", out, "--quiet"]
            done = subprocess.run(command, capture_output=True, text=True)
            yield f"logits {name}", sha256(out.read_bytes()) if done.returncode == 0 else done.stderr.strip()


def requests():
    """(path, body) of 40 seeded requests."""
    for i in range(40):
        common = {"seed": 1000 + i, "temperature": [0, 0.7, 1.0, 1.3][i % 4], "max_tokens": 48}
        question = [{"role": "user", "content": f"What is {37 * i + 11} + {91 * i + 5}?"}]
        if i % 5 == 0:
            yield "/v1/chat/completions", {**common, "messages": question, "logprobs": True}
        elif i % 5 == 1:
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
            yield "/v1/chat/completions", {**common, "messages": question, "response_format": form}
        elif i % 5 == 2:
            penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.3, "top_p": 0.9}
            yield "/v1/completions", {**common, **penalties, "prompt": f"Once upon a time {i}", "n": 2}
        elif i % 5 == 3:
            yield "/v1/chat/completions", {**common, "messages": question, "top_k": 20, "stop": ["7"]}
        else:
            sampling = {"temperature": 0.9, "max_new_tokens": 40, "sampling_seed": 5 + i, "regex": "[a-f ]{5,30}"}
            yield "/generate", {"text": f"Sort: {i} 9 3", "sampling_params": sampling}


def without_volatile(value):
    """What may differ between two runs of one program: ids, times, cache hits, counts of drafts."""
    volatile = {"id", "created", "created_at", "e2e_latency", "system_fingerprint", "description"}
    volatile |= {"prompt_tokens_details", "completion_tokens_details", "cached_tokens"}
    if isinstance(value, dict):
        return {k: without_volatile(v) for k, v in value.items() if k not in volatile and not k.startswith("spec_")}
    return [without_volatile(v) for v in value] if isinstance(value, list) else value


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.read()
    except urllib.error.HTTPError as refusal:
        return refusal.read()


def digest_of_answer(port, request):
    answer = without_volatile(json.loads(ask(port, *request)))
    return sha256(json.dumps(answer, sort_keys=True).encode())


def served(hadal):
    for model in MODELS:
        for drafts in DRAFTS:
            command = [hadal, "serve", ROOT / "models" / model, "--port", "0", "--draft-tokens", drafts]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                port = next(re.search(r"http://[^ ]*?:(\d+)", line)[1] for line in server.stdout if "http://" in line)
                with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
                    digests = list(pool.map(lambda r: digest_of_answer(port, r), requests()))
                for i, digest in enumerate(digests):
                    yield f"answer {model} drafts {drafts} {i}", digest
                if drafts == "0":
                    described = without_volatile(json.loads(ask(port, "/openapi.json")))
                    yield f"openapi {model}", sha256(json.dumps(described, sort_keys=True).encode())
                    names = sorted(set(re.findall(rb"^([a-z_:]+)[ {]", ask(port, "/metrics"), re.M)))
                    yield f"metrics {model}", sha256(b"\n".join(names))
            finally:
                server.terminate()
                server.communicate()


def compare(a, b):
    a, b = (json.loads(pathlib.Path(p).read_text()) for p in (a, b))
    different = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
    for name in different:
        print(f"differs: {name}")
    print(f"{len(a)} digests, {len(different)} differ")
    return 1 if different else 0


def main():
    if len(sys.argv) == 4 and sys.argv[1] == "--compare":
        return compare(*sys.argv[2:])
    if len(sys.argv) != 3:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    hadal, out = sys.argv[1:]
    digests = dict(logits(hadal)) | dict(served(hadal))
    pathlib.Path(out).write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{len(digests)} digests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
