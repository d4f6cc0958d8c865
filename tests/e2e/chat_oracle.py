"""The chat encodings a second time, written from their rules, to compare hadal render with.

Every function returns the prompt of a list of well-formed OpenAI messages. Tools and response
formats stand in the messages."""

import json

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
OPEN, CLOSE = "<think>", "</think>"
TASKS = {t: f"<｜{t}｜>" for t in ("action", "query", "authority", "domain", "title", "read_url")}

EFFORT_1 = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
EFFORT_2 = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.

"""

V32_TOOLS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
@@
</functions>
"""

V4_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

@@

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


def dumps(v):
    return json.dumps(v, ensure_ascii=False)


def cut(content, which):
    if which == "first":
        return content.split(CLOSE, 1)[1] if CLOSE in content else content
    return content.split(CLOSE)[-1] if which == "last" else content


def system_text(messages):
    return "\n\n".join(m["content"] for m in messages if m["role"] == "system")


def v2(messages, generation=True, **_):
    out = BOS
    for m in messages:
        out += {"system": "%s\n\n", "user": "User: %s\n\n", "assistant": "Assistant: %s" + EOS}[m["role"]] % m["content"]
    return out + ("Assistant:" if generation else "")


# user_opens, keeps_text, which reasoning is cut, whether always
V3_DIALECTS = {
    "v3": (False, False, None, False),
    "v3-0324": (True, True, None, False),
    "r1": (False, True, "last", False),
    "r1-0528": (True, True, "last", True),
}


def v3(messages, dialect="v3", thinking=False, generation=True, **_):
    user_opens, keeps_text, which, always = V3_DIALECTS[dialect]
    turns = [m for m in messages if m["role"] != "system"]
    out = BOS + system_text(messages)
    for i, m in enumerate(turns):
        before = turns[i - 1]["role"] if i else None
        after = turns[i + 1]["role"] if i + 1 < len(turns) else None
        if m["role"] == "user":
            out += USER + m["content"] + (ASSISTANT if user_opens else "")
        elif m["role"] == "tool":
            out += "\n" if before == "tool" else "<｜tool▁outputs▁begin｜>"
            out += "<｜tool▁output▁begin｜>" + m["content"] + "<｜tool▁output▁end｜>"
            if after is None:
                out += "<｜tool▁outputs▁end｜>"
        else:
            calls = m.get("tool_calls")
            if m["content"] is not None and not keeps_text:
                calls = None
            out += "<｜tool▁outputs▁end｜>" if before == "tool" else "" if user_opens else ASSISTANT
            plain = not calls and before != "tool"
            out += cut(m["content"] or "", which if plain or always else None)
            if calls:
                out += "<｜tool▁calls▁begin｜>" + "\n".join(
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
                    % (c["function"]["name"], c["function"]["arguments"]) for c in calls) + "<｜tool▁calls▁end｜>"
            out += EOS
    last = turns[-1]["role"] if turns else None
    if generation and last != "tool":
        if not (user_opens and last == "user"):
            out += ASSISTANT
        if dialect == "r1" and thinking:
            out += OPEN + "\n"
    return out


def v31(messages, terminus=False, thinking=False, generation=True, **_):
    turns = [m for m in messages if m["role"] != "system"]
    any_system = len(turns) < len(messages)
    # Terminus treats an answer with calls right behind the system text as one to a user,
    # but only if some system message exists; without turns only_system stays set.
    out = BOS + system_text(messages)
    prefixed = False
    for i, m in enumerate(turns):
        before = turns[i - 1]["role"] if i else None
        if m["role"] == "user":
            out += USER + m["content"]
        elif m["role"] == "tool":
            out += "<｜tool▁output▁begin｜>" + m["content"] + "<｜tool▁output▁end｜>"
        elif m.get("tool_calls"):
            if before == "user" or (terminus and any_system and i == 0):
                out += ASSISTANT + CLOSE
            out += (m["content"] or "") + "<｜tool▁calls▁begin｜>" + "".join(
                "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
                % (c["function"]["name"], c["function"]["arguments"]) for c in m["tool_calls"])
            out += "<｜tool▁calls▁end｜>" + EOS
        else:
            if before == "user":
                out += ASSISTANT + (OPEN if m.get("prefix") and thinking else CLOSE)
            prefixed = prefixed or bool(m.get("prefix"))
            out += (m["content"] if before == "tool" else cut(m["content"], "first")) + EOS
    last = turns[-1]["role"] if turns else None
    opens = last == "user"
    if terminus and last != "tool":
        opens = opens or not prefixed or (last is None and any_system)
    if generation and opens:
        out += ASSISTANT + (OPEN if thinking else CLOSE)
    return out


def lines_of(tools):
    return "\n".join(dumps(t["function"]) for t in tools)


def extras(m, template):
    out = "\n\n" + template.replace("@@", lines_of(m["tools"])) if m.get("tools") else ""
    if m.get("response_format"):
        out += "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        out += dumps(m["response_format"])
    return out


def dsml(calls, block):
    if not calls:
        return ""
    out = []
    for c in calls:
        try:
            members = json.loads(c["function"]["arguments"])
            assert isinstance(members, dict)
        except (ValueError, AssertionError):
            members = {"arguments": c["function"]["arguments"]}
        body = "\n".join('<｜DSML｜parameter name="%s" string="%s">%s</｜DSML｜parameter>'
                         % (k, "true" if isinstance(v, str) else "false", v if isinstance(v, str) else dumps(v))
                         for k, v in members.items())
        out.append('<｜DSML｜invoke name="%s">\n%s\n</｜DSML｜invoke>' % (c["function"]["name"], body))
    return "\n\n<｜DSML｜%s>\n%s\n</｜DSML｜%s>" % (block, "\n".join(out), block)


def last_asking(messages):
    return max((i for i, m in enumerate(messages) if m["role"] in ("user", "developer")), default=-1)


def without_old_developers(messages):
    last = last_asking(messages)
    return [m for i, m in enumerate(messages) if m["role"] != "developer" or i >= last]


def v32(messages, thinking=False, generation=True, **_):
    if thinking:
        messages = without_old_developers(messages)
    last, out, results = last_asking(messages), BOS, []
    for i, m in enumerate(messages):
        role, content = m["role"], m.get("content") or ""
        final = i == len(messages) - 1 and not generation
        tag = OPEN if thinking and i >= last else CLOSE
        if role == "system":
            out += content + extras(m, V32_TOOLS)
        elif role == "developer":
            out += USER + extras(m, V32_TOOLS) + "\n\n# The user's message is: " + content
        elif role == "user":
            out += USER + content
        elif role == "assistant":
            if thinking and i > last:
                out += (m.get("reasoning_content") or "") + CLOSE
            out += content + dsml(m.get("tool_calls"), "function_calls") + EOS
            results = list(m.get("tool_calls") or [])
        else:
            before = messages[i - 1]["role"]
            out += ("\n\n<function_results>" if before != "tool" else "") + "\n<result>" + content + "</result>"
            results.pop()
            if not results:
                out += "\n</function_results>" + ("" if final else "\n\n" + tag)
        if role in ("developer", "user") and not final:
            out += ASSISTANT + (OPEN if thinking and i == last else CLOSE)
    return out


def v4_turns(messages):
    """Users and results become one turn of blocks, the results in the order of their calls."""
    turns, order = [], {}
    for m in messages:
        if m["role"] in ("user", "tool"):
            merges = turns and "blocks" in turns[-1] and (m["role"] == "tool" or not turns[-1].get("task"))
            if not merges:
                turns.append({"role": "user", "blocks": []})
                if m["role"] == "user":
                    turns[-1]["task"] = m.get("task")
            turns[-1]["blocks"].append(m)
        else:
            turns.append(m)
    for t in turns:
        if t.get("tool_calls"):
            order = {c["id"]: i for i, c in enumerate(t["tool_calls"]) if c.get("id")}
        elif "blocks" in t and order:
            queue = sorted((b for b in t["blocks"] if b["role"] == "tool"),
                           key=lambda b: order.get(b.get("tool_call_id", ""), 0))
            t["blocks"] = [queue.pop(0) if b["role"] == "tool" else b for b in t["blocks"]]
    return turns


def v4_block(b):
    content = b["content"]
    if b["role"] == "user":
        return content
    if isinstance(content, list):
        content = "\n\n".join(p["text"] if p["type"] == "text" else "[Unsupported %s]" % p["type"] for p in content)
    return "<tool_result>" + content + "</tool_result>"


def v4(messages, thinking=False, generation=True, effort="none", refreshed=False, **_):
    keeps = any(m.get("tools") for m in messages)
    turns = v4_turns(messages)
    if thinking and not keeps:
        turns = without_old_developers(turns)
    last, out = last_asking(turns), BOS
    if thinking:
        out += {("max", False): EFFORT_1, ("high", True): EFFORT_1, ("max", True): EFFORT_2}.get((effort, refreshed), "")
    for i, t in enumerate(turns):
        role = t["role"]
        if role == "user":
            out += USER + "\n\n".join(v4_block(b) for b in t["blocks"])
        elif role == "latest_reminder":
            out += "<｜latest_reminder｜>" + t["content"]
        elif role == "assistant":
            if thinking and not (i and turns[i - 1].get("task")) and (keeps or i > last):
                out += (t.get("reasoning_content") or "") + CLOSE
            out += (t.get("content") or "") + dsml(t.get("tool_calls"), "tool_calls") + ("" if t.get("wo_eos") else EOS)
        else:
            out += (USER if role == "developer" else "") + t["content"] + extras(t, V4_TOOLS)
        if i + 1 == len(turns):
            if not generation:
                continue
        elif turns[i + 1]["role"] not in ("assistant", "latest_reminder"):
            continue
        task = t.get("task")
        if task == "action":
            out += ASSISTANT + (OPEN if thinking else CLOSE)
        if task:
            out += TASKS[task]
        elif role in ("user", "developer"):
            out += ASSISTANT + (OPEN if thinking and (keeps or i >= last) else CLOSE)
    return out


ENCODERS = {
    "v2": v2, "v3.1": v31, "v3.1-terminus": lambda m, **k: v31(m, terminus=True, **k), "v3.2": v32, "v4": v4,
    "v4-0731": lambda m, **k: v4(m, refreshed=True, **k),
}
for _d in V3_DIALECTS:
    ENCODERS[_d] = lambda m, d=_d, **k: v3(m, dialect=d, **k)
