"""The V4 and V4.1 chat encodings: messages to text, and the strict reading of a completion.

Messages are dicts with role, content and, where they apply, reasoning, tool_calls
([{"name", "arguments": {...}}]) or tools (a list of schemas, on the system message).
"""
import json
import re

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
EFFORT = "Reasoning Effort: %d (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
USUAL_EFFORT = 75

TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜{block}>" block like the following:

<｜DSML｜{block}>
<｜DSML｜{invoke} name="$TOOL_NAME">
<｜DSML｜{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜{parameter}>
...
</｜DSML｜{invoke}>
<｜DSML｜{invoke} name="$TOOL_NAME2">
...
</｜DSML｜{invoke}>
</｜DSML｜{block}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


def dump(value) -> str:
    return json.dumps(value, ensure_ascii=False)


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


class Encoding:
    """A dialect: the words of its tags, and whether it marks system messages and names an effort (V4.1)."""
    KEEPS_THOUGHTS = True  # beside calls, also in earlier answers

    def __init__(self, block: str, invoke: str, parameter: str, effort: bool):
        self.words = dict(block=block, invoke=invoke, parameter=parameter)
        self.HAS_EFFORT = effort
        tag = {k: DSML + w for k, w in self.words.items()}
        self.open, self.close = f"<{tag['block']}>", f"</{tag['block']}>"
        self.call, self.call_end = f'<{tag["invoke"]} name="%s">', f"</{tag['invoke']}>"
        self.argument = f'<{tag["parameter"]} name="%s" string="%s">%s</{tag["parameter"]}>'
        name = '([^"]+)'
        value = self.argument % (name, "(true|false)", "(.*?)") + "\n"
        values = "(?:" + value.replace("(", "(?:") + ")*"
        nothing = "\n|" if effort else ""  # V4.1 has an empty line for no arguments
        self.invoke = re.compile(f"{self.call % name}\n({nothing}{values}){self.call_end}\n", re.S)
        self.value = re.compile(value, re.S)

    def render_calls(self, calls: list[dict]) -> str:
        """The block of calls, without the two line feeds before it."""
        out = [self.open]
        for call in calls:
            out.append(self.call % call["name"])
            for key, value in call["arguments"].items():
                text, kind = (value, "true") if isinstance(value, str) else (dump(value), "false")
                out.append(self.argument % (key, kind, text))
            if self.HAS_EFFORT and not call["arguments"]:
                out.append("")
            out.append(self.call_end)
        return "\n".join(out + [self.close])

    def opening(self, messages: list[dict], thinking: bool, effort: int) -> str:
        if not self.HAS_EFFORT or not (thinking or messages[0]["role"] == "system"):
            return BOS
        return BOS + SYSTEM + (EFFORT % effort if thinking else "")

    def render(self, messages: list[dict], thinking: bool, effort: int = USUAL_EFFORT) -> str:
        """The whole conversation; ends with the generation prompt if the last message is the user's."""
        keep = any(m.get("tools") for m in messages)
        messages = merge_tool_results(messages)
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        text = self.opening(messages, thinking, effort)
        for i, m in enumerate(messages):
            if m["role"] == "system":
                text += m["content"]
                if m.get("tools"):
                    text += "\n\n" + TOOLS.format(**self.words, schemas="\n".join(dump(t) for t in m["tools"]))
            elif m["role"] == "user":
                text += USER + m["content"]
                if i + 1 == len(messages) or messages[i + 1]["role"] == "assistant":
                    text += ASSISTANT + (THINK if thinking and (keep or i >= last) else END_THINK)
            else:
                if thinking and (keep or i > last):
                    text += m.get("reasoning", "") + END_THINK
                text += m["content"]
                if m.get("tool_calls"):
                    text += "\n\n" + self.render_calls(m["tool_calls"])
                text += EOS
        return text

    def parse(self, text: str, thinking: bool) -> dict | None:
        """{reasoning, content, tool_calls} of a completion without its EOS, or None if it is malformed."""
        reasoning = ""
        if thinking:
            reasoning, sep, text = text.partition(END_THINK)
            if not sep or DSML in reasoning:
                return None
        content, sep, block = text.partition(f"\n\n{self.open}\n")
        if THINK in content or END_THINK in content or DSML in content:
            return None
        calls = []
        if sep:
            if not block.endswith(self.close):
                return None
            block, at = block[:-len(self.close)], 0
            while at < len(block):
                m = self.invoke.match(block, at)
                if not m:
                    return None
                at = m.end()
                try:
                    args = {k: v if s == "true" else json.loads(v) for k, s, v in self.value.findall(m[2])}
                except json.JSONDecodeError:
                    return None
                calls.append({"name": m[1], "arguments": args})
            if not calls:
                return None
        return {"reasoning": reasoning, "content": content, "tool_calls": calls}


V4 = Encoding("tool_calls", "invoke", "parameter", effort=False)
V41 = Encoding(" calls", " invoke", " parameter", effort=True)
