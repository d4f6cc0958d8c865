"""The V4 chat encoding: messages to text, and the strict reading of a completion.

Messages are dicts with role, content and, where they apply, reasoning, tool_calls
([{"name", "arguments": {...}}]) or tools (a list of schemas, on the system message).
"""
import json
import re

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
KEEPS_THOUGHTS = True  # beside calls, also in earlier answers
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"

TOOLS = """## Tools

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

%s

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


def dump(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def render_calls(calls: list[dict]) -> str:
    """The <｜DSML｜tool_calls> block, without the two line feeds before it."""
    out = ["<｜DSML｜tool_calls>"]
    for call in calls:
        out.append(f'<｜DSML｜invoke name="{call["name"]}">')
        for key, value in call["arguments"].items():
            text, kind = (value, "true") if isinstance(value, str) else (dump(value), "false")
            out.append(f'<｜DSML｜parameter name="{key}" string="{kind}">{text}</｜DSML｜parameter>')
        out.append("</｜DSML｜invoke>")
    return "\n".join(out + ["</｜DSML｜tool_calls>"])


def merge_tool_results(messages: list[dict]) -> list[dict]:
    """Tool messages become <tool_result> blocks of user messages; neighbors join."""
    out: list[dict] = []
    for m in messages:
        if m["role"] == "tool":
            m = {"role": "user", "content": f"<tool_result>{m['content']}</tool_result>"}
        if m["role"] == "user" and out and out[-1]["role"] == "user":
            out[-1] = {**out[-1], "content": out[-1]["content"] + "\n\n" + m["content"]}
        else:
            out.append(dict(m))
    return out


def render(messages: list[dict], thinking: bool) -> str:
    """The whole conversation; ends with the generation prompt if the last message is the user's."""
    keep = any(m.get("tools") for m in messages)
    messages = merge_tool_results(messages)
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    text = BOS
    for i, m in enumerate(messages):
        if m["role"] == "system":
            text += m["content"]
            if m.get("tools"):
                text += "\n\n" + TOOLS % "\n".join(dump(t) for t in m["tools"])
        elif m["role"] == "user":
            text += USER + m["content"]
            if i + 1 == len(messages) or messages[i + 1]["role"] == "assistant":
                text += ASSISTANT + (THINK if thinking and (keep or i >= last) else END_THINK)
        else:
            if thinking and (keep or i > last):
                text += m.get("reasoning", "") + END_THINK
            text += m["content"]
            if m.get("tool_calls"):
                text += "\n\n" + render_calls(m["tool_calls"])
            text += EOS
    return text


INVOKE = re.compile(r'<｜DSML｜invoke name="([^"]+)">\n((?:<｜DSML｜parameter name="[^"]+" string="(?:true|false)">.*?</｜DSML｜parameter>\n)*)</｜DSML｜invoke>\n', re.S)
PARAMETER = re.compile(r'<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>\n', re.S)


def parse(text: str, thinking: bool) -> dict | None:
    """{reasoning, content, tool_calls} of a completion without its EOS, or None if it is malformed."""
    reasoning = ""
    if thinking:
        reasoning, sep, text = text.partition(END_THINK)
        if not sep or DSML in reasoning:
            return None
    content, sep, block = text.partition("\n\n<｜DSML｜tool_calls>\n")
    if THINK in content or END_THINK in content or DSML in content:
        return None
    calls = []
    if sep:
        if not block.endswith("</｜DSML｜tool_calls>"):
            return None
        block, at = block[:-len("</｜DSML｜tool_calls>")], 0
        while at < len(block):
            m = INVOKE.match(block, at)
            if not m:
                return None
            at = m.end()
            try:
                args = {k: v if s == "true" else json.loads(v) for k, s, v in PARAMETER.findall(m[2])}
            except json.JSONDecodeError:
                return None
            calls.append({"name": m[1], "arguments": args})
        if not calls:
            return None
    return {"reasoning": reasoning, "content": content, "tool_calls": calls}
