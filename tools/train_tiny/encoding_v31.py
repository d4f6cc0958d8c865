"""The V3.1 chat encoding: messages to text, and the strict reading of a completion. Messages as in encoding.py.

A think tag opens every answer to a user; what follows a tool's output has none. Reasoning is never
kept: only the last answer can have thoughts, and only if it answers a user.
"""
import json
import re

from encoding import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, dump

KEEPS_THOUGHTS = False
HAS_EFFORT = False
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OUTPUT, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"

TOOLS = f"""## Tools
You have access to the following tools:

%sIMPORTANT: ALWAYS adhere to this exact format for tool use:
{CALLS}{CALL}tool_call_name{SEP}tool_call_arguments{CALL_END}{{additional_tool_calls}}{CALLS_END}

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""

# What libraries that run templates are given; tests hold it against the program's own rendering.
TEMPLATE = """{%- set state = namespace(system=[], before='') -%}
{%- for m in messages if m['role'] == 'system' and m['content'] -%}
{%- set state.system = state.system + [m['content']] -%}
{%- endfor -%}
{%- if tools -%}
{%- set block = namespace(text='') -%}
{%- for t in tools -%}
{%- set block.text = block.text + '### ' + t['function']['name'] + '\nDescription: ' + t['function']['description'] + '\n\nParameters: ' + t['function']['parameters']|tojson + '\n\n' -%}
{%- endfor -%}
{%- set state.system = state.system + [{{TOOLS}}] -%}
{%- endif -%}
{{- bos_token + state.system|join('\n\n') -}}
{%- for m in messages if m['role'] != 'system' -%}
{%- if m['role'] == 'user' -%}
{{- '<｜User｜>' + m['content'] -}}
{%- elif m['role'] == 'tool' -%}
{{- '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' -}}
{%- elif m['role'] == 'assistant' -%}
{%- set said = m['content'] or '' -%}
{%- if state.before == 'user' -%}{{- '<｜Assistant｜></think>' -}}{%- endif -%}
{%- if state.before != 'tool' and not m['tool_calls'] and '</think>' in said -%}{%- set said = said.split('</think>', 1)[1] -%}{%- endif -%}
{{- said -}}
{%- if m['tool_calls'] -%}
{{- '<｜tool▁calls▁begin｜>' -}}
{%- for c in m['tool_calls'] -%}
{{- '<｜tool▁call▁begin｜>' + c['function']['name'] + '<｜tool▁sep｜>' + c['function']['arguments'] + '<｜tool▁call▁end｜>' -}}
{%- endfor -%}
{{- '<｜tool▁calls▁end｜>' -}}
{%- endif -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- set state.before = m['role'] -%}
{%- endfor -%}
{%- if add_generation_prompt and state.before == 'user' -%}
{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') -}}
{%- endif -%}
""".replace("{{TOOLS}}", " + block.text + ".join(repr(part) for part in TOOLS.split("%s")))


def render_tools(tools: list[dict]) -> str:
    return TOOLS % "".join(f"### {t['name']}\nDescription: {t['description']}\n\nParameters: {dump(t['parameters'])}\n\n" for t in tools)


def render_calls(calls: list[dict]) -> str:
    return CALLS + "".join(f"{CALL}{c['name']}{SEP}{dump(c['arguments'])}{CALL_END}" for c in calls) + CALLS_END


def render(messages: list[dict], thinking: bool) -> str:
    """The whole conversation; ends with the generation prompt if the last message is the user's."""
    system = [m for m in messages if m["role"] == "system"]
    parts = ["\n\n".join(m["content"] for m in system if m["content"])]
    parts += [render_tools(m["tools"]) for m in system if m.get("tools")]
    text, before = BOS + "\n\n".join(p for p in parts if p), ""
    for i, m in enumerate(messages):
        if m["role"] == "user":
            text += USER + m["content"]
        elif m["role"] == "tool":
            text += OUTPUT + m["content"] + OUTPUT_END
        elif m["role"] == "assistant":
            thought = thinking and i + 1 == len(messages) and before == "user"
            if before == "user":
                text += ASSISTANT + (THINK + m.get("reasoning", "") if thought else "") + END_THINK
            text += m["content"] + (render_calls(m["tool_calls"]) if m.get("tool_calls") else "") + EOS
        before = m["role"]
    return text + (ASSISTANT + (THINK if thinking else END_THINK) if before == "user" else "")


ONE_CALL = re.compile(f"{CALL}(.*?){SEP}(.*?){CALL_END}", re.S)


def parse(text: str, thinking: bool) -> dict | None:
    """{reasoning, content, tool_calls} of a completion without its EOS, or None if it is malformed."""
    reasoning = ""
    if thinking:
        reasoning, sep, text = text.partition(END_THINK)
        if not sep or CALLS in reasoning:
            return None
    content, sep, block = text.partition(CALLS)
    if THINK in content or END_THINK in content or CALL in content:
        return None
    calls = []
    if sep:
        if not block.endswith(CALLS_END) or ONE_CALL.sub("", block) != CALLS_END:
            return None
        try:
            calls = [{"name": name, "arguments": json.loads(arguments)} for name, arguments in ONE_CALL.findall(block)]
        except json.JSONDecodeError:
            return None
        if not calls or not all(isinstance(c["arguments"], dict) for c in calls):
            return None
    return {"reasoning": reasoning, "content": content, "tool_calls": calls}
