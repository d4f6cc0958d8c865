"""Random conversations and JSON values for the chat tests, from a seed."""

import json
import random

WORDS = [
    "", "Hello", "What's the weather?", "naïve café", "你好，世界", "🙂 👩‍👩‍👧", "\n", "  two  spaces ",
    "tab\there", 'quote " and \\ slash', "<｜User｜>", "<｜Assistant｜><think>", "</think>",
    "<think>plan</think>answer", "a</think>b</think>c", "<｜end▁of▁sentence｜>", "｜DSML｜",
    "</｜DSML｜parameter>", "</tool_result>", "{\"a\": 1}", "\u0000", "\u007f\u0080\u2028", "e\u0301" * 3,
    "# Title\n\n- item", "x" * 300, "\U0010ffff", "\r\n",
]
NAMES = ["get_weather", "search", "open-url", "f", "A_1", "n" * 64]
KEYS = ["city", "n", "", "键", "a b", "x\"y", "nested", "Z\\", "arguments", "\t"]
NUMBERS = [
    0, -0.0, 1, -1, 1.0, 0.1, 1e-7, 1e-4, 1e-5, 1e15, 1e16, 1e17, 1.5e300, 5e-324, 2.0**-44, 123456789.123,
    9007199254740993, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30, 3.141592653589793, 1e22, 1e23, 100.0,
]


def text(r, most=3):
    return "".join(r.choice(WORDS) for _ in range(r.randint(0, most)))


def some_text(r):
    return text(r) or "text"


def number(r):
    kind = r.random()
    if kind < 0.6:
        return r.choice(NUMBERS)
    if kind < 0.8:
        return r.randint(-(10**6), 10**6)
    return r.uniform(-1, 1) * 10.0 ** r.randint(-20, 20)


def value(r, depth=3):
    kind = r.randint(0, 7 if depth else 4)
    if kind < 2:
        return text(r)
    if kind == 2:
        return number(r)
    if kind == 3:
        return r.choice([True, False, None])
    if kind == 4:
        return r.choice([[], {}, ""])
    if kind == 5:
        return [value(r, depth - 1) for _ in range(r.randint(0, 4))]
    return {r.choice(KEYS) + str(i): value(r, depth - 1) for i in range(r.randint(0, 4))}


def arguments(r, broken=0.0):
    """A tool call's arguments: the text of an object in some spelling, seldom something else."""
    if r.random() < broken:
        return r.choice(["", "not json", "[1, 2]", "{\"a\": 1", "\"s\"", "{'a': 1}", "nul", "{\"a\": 01}", "{\"a\": 1.}",
                         "{1: 2}", "{123456789012345678901234567890: 1}", "{\"a\": \"\x01\"}"])
    v = {r.choice(KEYS): value(r) for _ in range(r.randint(0, 4))}
    if r.random() < 0.1:
        v["odd"] = [float("inf"), -float("inf"), float("nan")]
    out = json.dumps(v, ensure_ascii=r.random() < 0.5, indent=r.choice([None, None, 2]),
                     separators=r.choice([None, (",", ":"), (" , ", " : ")]))
    if r.random() < 0.1:
        out = '{"twice": 1, "b": 1E400, "twice": {"k": 1, "k": -0}}'
    return out


def calls(r, ids, **kw):
    """Between one and three calls with fresh ids, which are appended to ids."""
    out = []
    for _ in range(r.choice([1, 1, 2, 2, 3])):
        ids.append("call_%d" % len(ids))
        out.append({"id": ids[-1], "type": "function",
                    "function": {"name": r.choice(NAMES), "arguments": arguments(r, **kw)}})
    return out


def tools(r):
    out = []
    for name in r.sample(NAMES, r.randint(1, 3)):
        f = {"name": name, "description": text(r), "parameters": {"type": "object", "properties": value(r)}}
        f.update(r.choice([{}, {"strict": True}, {"x": value(r)}]))
        if r.random() < 0.2:
            del f["description"]
        out.append({"type": "function", "function": f})
    return out


def rounds(r, messages, ids, reasoning=False, lone=True, **kw):
    """An answer, perhaps after rounds of tool calls and all their results in some order."""
    for _ in range(r.choice([0, 0, 1, 1, 2])):
        made = calls(r, ids, **kw)
        m = {"role": "assistant", "content": r.choice([None, None, text(r)]), "tool_calls": made}
        if reasoning and r.random() < 0.7:
            m["reasoning_content"] = text(r)
        messages.append(m)
        order = list(made)
        if r.random() < 0.5:
            r.shuffle(order)
        for c in order:
            messages.append({"role": "tool", "tool_call_id": c["id"], "content": text(r)})
    if lone or messages[-1]["role"] != "tool":
        m = {"role": "assistant", "content": text(r)}
        if reasoning and r.random() < 0.7:
            m["reasoning_content"] = r.choice([text(r), None])
        messages.append(m)


def conversation(r, reasoning=False, **kw):
    """A well-formed dialogue that ends with a user, an answer, or results."""
    messages, ids = [], []
    for _ in range(r.choice([0, 1, 1, 2])):
        messages.append({"role": "system", "content": text(r)})
    for _ in range(r.randint(1, 4)):
        messages.append({"role": "user", "content": text(r)})
        if r.random() < 0.1:
            messages.append({"role": "user", "content": text(r)})
        if r.random() < 0.9:
            rounds(r, messages, ids, reasoning, lone=r.random() < 0.9, **kw)
        if r.random() < 0.1:
            messages.append({"role": "system", "content": text(r)})
    if r.random() < 0.6:
        messages.append({"role": "user", "content": text(r)})
    return messages


def dsml_conversation(r, v4):
    """A dialogue with everything the V3.2 or V4 encoder knows."""
    messages = conversation(r, reasoning=True, broken=0.1 if v4 else 0)
    for m in list(messages):
        if m["role"] == "user" and r.random() < 0.15:
            m["role"] = "developer"
            m["content"] = some_text(r)
        if m["role"] in ("system", "developer"):
            if r.random() < 0.2:
                m["tools"] = tools(r)
            if r.random() < 0.1:
                m["response_format"] = {"type": "json_schema", "schema": value(r)}
        if v4 and r.random() < 0.05:
            m["task"] = r.choice(["action", "query", "authority", "domain", "title", "read_url"])
        if v4 and m["role"] == "assistant" and r.random() < 0.1:
            m["wo_eos"] = True
        if v4 and m["role"] == "tool" and r.random() < 0.2:
            m["content"] = [r.choice([{"type": "text", "text": text(r)}, {"type": "image_url", "image_url": {}}])
                            for _ in range(r.randint(1, 3))]
        if v4 and r.random() < 0.05:
            messages.insert(messages.index(m), {"role": "latest_reminder", "content": text(r)})
    return messages
