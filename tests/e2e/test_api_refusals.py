"""Bad bodies: JSON, parameters, messages, tools and schemas that must be refused, by name and with
the right status, or taken as documented. After all of them nothing is left behind.

tests/golden/api/refusals.jsonl has code, param and message of every refusal. To write it anew:
python tests/e2e/test_api_refusals.py"""

import json

import pytest
from conftest import GOLDEN
from serving import Server

REFUSALS = GOLDEN / "api" / "refusals.jsonl"

CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"]


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    s.close()


def chat(**fields):
    return CHAT, {"messages": HI, "max_tokens": 2, **fields}


def complete(**fields):
    return COMPLETE, {"prompt": "hi", "max_tokens": 2, **fields}


def say(*messages, **fields):
    return CHAT, {"messages": list(messages), "max_tokens": 2, **fields}


def user(content):
    return say({"role": "user", "content": content})


def calls(*made, content=None):
    return say(*HI, {"role": "assistant", "content": content, "tool_calls": list(made)})


def call(id="c", name="add", arguments="{}"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tools(*given, **fields):
    return chat(tools=list(given), **fields)


def tool(name="add", parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": {} if parameters is None else parameters}}


def form(schema):
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def prop(schema):
    return form({"type": "object", "properties": {"a": schema}, "required": ["a"]})


def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return form(schema)


def raw(text, path=CHAT):
    return path, text if isinstance(text, bytes) else text.encode()


def inside(text):
    """A chat body with text pasted in as one more member."""
    return raw(b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":2,' + (text if isinstance(text, bytes) else text.encode()) + b"}")


def image(url):
    return user([{"type": "image_url", "image_url": {"url": url}}])


CYCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
TREE = {"$defs": {"n": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "required": ["c"]}}, "$ref": "#/$defs/n"}

# name: ((path, body), status, code or None, ...); the row of the list of bad inputs comes first.
ROWS = {
    # JSON and text
    "J01 empty body": (raw(""), 400, "empty_body"),
    "J02 cut short": (raw('{"messages":[{"role"'), 400, "invalid_json"),
    "J03 bytes behind": (raw("{} {}"), 400, "invalid_json"),
    "J04 deep": (raw("[" * 1000000), 400, "too_deep"),
    "J05 many values": (raw('{"x":[' + "1," * 1100000 + "1]}"), 400, "too_many_values"),
    "J06 twice the same key": (inside('"model":"a","model":"b"'), 400, "duplicate_key"),
    "J07 half a surrogate": (inside(r'"user":"\ud800"'), 400, "invalid_json"),
    "J08 not UTF-8: C3 28": (inside(b'"user":"\xc3\x28"'), 400, "invalid_json"),
    "J08 not UTF-8: C0 80": (inside(b'"user":"\xc0\x80"'), 400, "invalid_json"),
    "J08 not UTF-8: ED A0 80": (inside(b'"user":"\xed\xa0\x80"'), 400, "invalid_json"),
    "J08 not UTF-8: F4 90 80 80": (inside(b'"user":"\xf4\x90\x80\x80"'), 400, "invalid_json"),
    "J09 byte-order mark": (raw(b"\xef\xbb\xbf" + json.dumps(chat()[1]).encode()), 200, None),
    "J10 UTF-16": (raw(json.dumps(chat()[1]).encode("utf-16")), 400, "invalid_json"),
    "J11 U+0000 in a message": (user("a\0b"), 200, None),
    "J12 U+0000 in model": (chat(model="a\0b"), 400, "invalid_value"),
    "J12 U+0000 in stop": (chat(stop=["a\0"]), 400, "invalid_value"),
    "J12 U+0000 in a tool's name": (tools(tool("a\0b")), 400, "invalid_value"),
    "J12 U+0000 in a key": (inside(r'"a\u0000b":1'), 400, "invalid_json"),
    "J13 NaN": (inside('"temperature":NaN'), 400, "invalid_json"),
    "J13 Infinity": (inside('"temperature":Infinity'), 400, "invalid_json"),
    "J13 1e999": (inside('"temperature":1e999'), 400, "invalid_value"),
    "J13 how 1e999 is carried, spelled": (inside(r'"user":"\ufdd0\uFDD1 1"'), 400, "invalid_json"),
    "J13 how 1e999 is carried, raw": (inside('"user":"\ufdd0\ufdd1 1"'.encode()), 400, "invalid_json"),
    "J14 16.0 is an integer": (chat(n=1.0), 200, None),
    "J14 1e2 is one": (inside('"min_p":0e2'), 200, None),
    "J14 16.5 is none": (chat(n=1.5), 400, "invalid_value"),
    "J14 2^53 + 1": (chat(n=2**53 + 1), 400, "invalid_value"),
    "J14 2^64": (chat(n=2**64), 400, "invalid_value"),
    "J15 number as string": (chat(n="1"), 400, "invalid_value"),
    "J15 true as string": (chat(stream="true"), 400, "invalid_value"),
    "J15 true as 1": (chat(stream=1), 400, "invalid_value"),
    "J16 array": (raw("[]"), 400, "invalid_json"),
    "J16 string": (raw('"a"'), 400, "invalid_json"),
    "J16 number": (raw("1"), 400, "invalid_json"),
    "J16 null": (raw("null"), 400, "invalid_json"),
    "J17 comment": (raw("{/**/}"), 400, "invalid_json"),
    "J17 trailing comma": (raw('{"a":1,}'), 400, "invalid_json"),
    "J17 single quotes": (raw("{'a':1}"), 400, "invalid_json"),
    "J18 null for an option": (chat(temperature=None, stop=None, n=None, stream=None), 200, None),
    "J18 null for messages": (chat(messages=None), 400, "missing_required_parameter"),
    "J19 long key": (chat(**{"k" * 300: 1}), 400, "key_too_long"),
    "J19 many keys": (chat(**{f"k{i}": 1 for i in range(300)}), 400, "too_many_keys"),
    "J20 unknown key": (chat(zzz=1), 200, None),
    "J21 one key, nested 100,000 times": (raw('{"a":' * 100000), 400, "too_deep"),
    # parameters
    "R01 model missing": (chat(), 200, None),
    "R01 model of 10 KiB": (chat(model="m" * 10240), 400, "string_above_max_length"),
    "R02 prompt missing": ((COMPLETE, {}), 400, "missing_required_parameter"),
    "R02 prompt null": (complete(prompt=None), 400, "missing_required_parameter"),
    "R03 empty prompt": (complete(prompt=""), 400, "empty_prompt"),
    "R04 []": (complete(prompt=[]), 400, "empty_prompt"),
    "R04 [[]]": (complete(prompt=[[]]), 400, "empty_prompt"),
    "R04 ['']": (complete(prompt=[""]), 400, "empty_prompt"),
    "R04 [1, 'a']": (complete(prompt=[1, "a"]), 400, "invalid_value"),
    "R04 {}": (complete(prompt={}), 400, "invalid_value"),
    "R04 7": (complete(prompt=7), 400, "invalid_value"),
    "R05 65 prompts": (complete(prompt=["a"] * 65), 400, "invalid_value"),
    "R05 100,000 prompts": (complete(prompt=["a"] * 100000), 400, "invalid_value"),
    "R06 id -1": (complete(prompt=[-1]), 400, "invalid_value"),
    "R06 id beyond the vocabulary": (complete(prompt=[5, 4096]), 400, "invalid_value"),
    "R06 id 2^31": (complete(prompt=[2**31]), 400, "invalid_value"),
    "R06 id 2^40": (complete(prompt=[2**40]), 400, "invalid_value"),
    "R06 id 1.5": (complete(prompt=[1.5]), 400, "invalid_value"),
    "R08 longer than the context": (complete(prompt=[5] * 9000), 400, "context_length_exceeded"),
    "R08 a chat longer than the context": (user("word " * 20000), 400, "context_length_exceeded"),
    "R09 more bytes than could fit": (complete(prompt="a" * 200000), 400, "context_length_exceeded"),
    "R10 one character, many times": (complete(prompt="a" * 100000), 400, "context_length_exceeded"),
    "R11 too many asked for": (chat(max_tokens=100000), 400, "context_length_exceeded"),
    "R13 max_tokens 0": (chat(max_tokens=0), 400, "invalid_value"),
    "R13 max_tokens -1": (chat(max_tokens=-1), 400, "invalid_value"),
    "R13 max_tokens 2^31": (chat(max_tokens=2**31), 400, "invalid_value"),
    "R13 max_tokens 1e18": (chat(max_tokens=10**18), 400, "invalid_value"),
    "R14 two that differ": (chat(max_tokens=2, max_completion_tokens=3), 400, "invalid_value"),
    "R15 min above max": (chat(min_tokens=3), 400, "invalid_value"),
    "R16 n 0": (chat(n=0), 400, "invalid_value"),
    "R16 n -1": (chat(n=-1), 400, "invalid_value"),
    "R16 n 9": (chat(n=9), 400, "invalid_value"),
    "R16 n 10^9": (chat(n=10**9), 400, "invalid_value"),
    "R17 best_of 2": (complete(best_of=2), 400, "unsupported_parameter"),
    "R17 best_of 1, as benchmarks send it": (complete(best_of=1), 200, None),
    "R19 temperature -0.1": (chat(temperature=-0.1), 400, "invalid_value"),
    "R19 temperature 2.1": (chat(temperature=2.1), 400, "invalid_value"),
    "R19 temperature 1e308": (chat(temperature=1e308), 400, "invalid_value"),
    "R19 temperature 1e-320": (chat(temperature=1e-320), 200, None),
    "R20 top_p 0": (chat(top_p=0), 400, "invalid_value"),
    "R20 top_p -0.1": (chat(top_p=-0.1), 400, "invalid_value"),
    "R20 top_p 1.0001": (chat(top_p=1.0001), 400, "invalid_value"),
    "R20 top_p 1": (chat(top_p=1), 200, None),
    "R21 top_k -2": (chat(top_k=-2), 400, "invalid_value"),
    "R21 top_k 0": (chat(top_k=0), 200, None),
    "R21 top_k beyond the vocabulary": (chat(top_k=5000), 200, None),
    "R21 top_k 2^40": (chat(top_k=2**40), 400, "invalid_value"),
    "R22 min_p 1.5": (chat(min_p=1.5), 400, "invalid_value"),
    "R22 min_p -1": (chat(min_p=-1), 400, "invalid_value"),
    "R23 frequency_penalty 2.01": (chat(frequency_penalty=2.01), 400, "invalid_value"),
    "R23 presence_penalty -2.01": (chat(presence_penalty=-2.01), 400, "invalid_value"),
    "R24 repetition_penalty 0": (chat(repetition_penalty=0), 400, "invalid_value"),
    "R24 repetition_penalty -1": (chat(repetition_penalty=-1), 400, "invalid_value"),
    "R24 repetition_penalty 1e-30": (chat(repetition_penalty=1e-30), 400, "invalid_value"),
    "R24 repetition_penalty 11": (chat(repetition_penalty=11), 400, "invalid_value"),
    "R26 bias of the vocabulary's size": (chat(logit_bias={"4096": 1}), 400, "invalid_value"),
    "R26 bias of -1": (chat(logit_bias={"-1": 1}), 400, "invalid_value"),
    "R26 bias of abc": (chat(logit_bias={"abc": 1}), 400, "invalid_value"),
    "R26 bias of 007": (chat(logit_bias={"007": 1}), 400, "invalid_value"),
    "R27 bias 101": (chat(logit_bias={"7": 101}), 400, "invalid_value"),
    "R27 bias 1e400": (inside('"logit_bias":{"7":1e400}'), 400, "invalid_value"),
    "R27 bias as string": (chat(logit_bias={"7": "5"}), 400, "invalid_value"),
    "R28 100,000 biases": (chat(logit_bias={str(i): 1 for i in range(100000)}), 400, "invalid_value"),
    "R30 17 stops": (chat(stop=["x"] * 17), 400, "invalid_value"),
    "R30 empty stop": (chat(stop=""), 400, "invalid_value"),
    "R30 stop of 257 bytes": (chat(stop="x" * 257), 400, "invalid_value"),
    "R30 stop [1]": (chat(stop=[1]), 400, "invalid_value"),
    "R30 stop of 1 MiB": (chat(stop="x" * 2**20), 400, "invalid_value"),
    "R32 stop id beyond the vocabulary": (chat(stop_token_ids=[151645]), 400, "invalid_value"),
    "R33 10,000 stop ids": (chat(stop_token_ids=[5] * 10000), 400, "invalid_value"),
    "R34 top_logprobs 21": (chat(logprobs=True, top_logprobs=21), 400, "invalid_value"),
    "R34 top_logprobs -1": (chat(logprobs=True, top_logprobs=-1), 400, "invalid_value"),
    "R34 top_logprobs alone": (chat(top_logprobs=2), 400, "invalid_value"),
    "R35 logprobs 1,000": (complete(logprobs=1000), 400, "invalid_value"),
    "R35 logprobs -1": (complete(logprobs=-1), 400, "invalid_value"),
    "R36 prompt_logprobs 1": (complete(prompt_logprobs=1), 400, "unsupported_parameter"),
    "R36 prompt_logprobs -1": (complete(prompt_logprobs=-1), 400, "unsupported_parameter"),
    "R37 echo": (complete(echo=True, max_tokens=1), 200, None),
    "R37 echo with logprobs": (complete(echo=True, max_tokens=0, logprobs=1), 200, None),
    "R38 seed -1": (chat(seed=-1), 200, None),
    "R38 seed 2^63": (chat(seed=2**63), 400, "invalid_value"),
    "R38 seed 1.5": (chat(seed=1.5), 400, "invalid_value"),
    "R38 seed x": (chat(seed="x"), 400, "invalid_value"),
    "R39 stream yes": (chat(stream="yes"), 400, "invalid_value"),
    "R39 stream_options alone": (chat(stream_options={"include_usage": True}), 400, "invalid_value"),
    "R39 unknown stream option": (chat(stream=True, stream_options={"x": 1}), 400, "invalid_value"),
    "R41 priority 101": (chat(priority=101), 400, "invalid_value"),
    "R43 chat_template": (chat(chat_template="{{x}}"), 400, "unsupported_parameter"),
    "R43 tokenize": (chat(chat_template_kwargs={"tokenize": True}), 400, "invalid_value"),
    "R44 custom_logit_processor": (chat(custom_logit_processor="x"), 400, "unsupported_parameter"),
    "R44 lora_path": (chat(lora_path="x"), 400, "unsupported_parameter"),
    "R44 prompt_embeds": (complete(prompt_embeds="x"), 400, "unsupported_parameter"),
    "R45 kv_transfer_params": (chat(kv_transfer_params={}), 400, "unsupported_parameter"),
    "R45 bootstrap_host": (chat(bootstrap_host="h"), 400, "unsupported_parameter"),
    "R46 cache_salt of 129 bytes": (chat(cache_salt="s" * 129), 400, "string_above_max_length"),
    "R47 rid with a line feed": (chat(rid="a\nb"), 400, "invalid_value"),
    "R48 truncate_prompt_tokens": (complete(truncate_prompt_tokens=-1), 400, "unsupported_parameter"),
    "R49 suffix": (complete(suffix="x"), 200, None),
    "R49 suffix, echoed": (complete(suffix="x", echo=True), 400, "invalid_value"),
    "R49 suffix that is none": (complete(suffix=5), 400, "invalid_value"),
    # messages
    "M01 missing": ((CHAT, {}), 400, "missing_required_parameter"),
    "M01 []": (say(), 400, "invalid_value"),
    "M01 an object": (chat(messages={}), 400, "invalid_value"),
    "M01 4,097": (say(*HI * 4097), 400, "invalid_value"),
    "M02 no role": (say({"content": "x"}), 400, "invalid_value"),
    "M02 admin": (say({"role": "admin", "content": "x"}), 400, "invalid_value"),
    "M02 System": (say({"role": "System", "content": "x"}), 400, "invalid_value"),
    "M02 a number": (say({"role": 1, "content": "x"}), 400, "invalid_value"),
    "M03 null": (user(None), 400, "invalid_value"),
    "M03 number": (user(1), 400, "invalid_value"),
    "M03 {}": (user({}), 400, "invalid_value"),
    "M04 null without calls": (say(*HI, {"role": "assistant", "content": None}), 400, "invalid_value"),
    "M05 an image inside": (image("http://169.254.169.254/"), 400, None),
    "M06 a file": (image("file:///etc/passwd"), 400, None),
    "M07 input_audio": (user([{"type": "input_audio", "input_audio": {}}]), 400, None),
    "M07 video_url": (user([{"type": "video_url"}]), 400, None),
    "M07 file": (user([{"type": "file"}]), 400, None),
    "M07 unknown part": (user([{"type": "zzz"}]), 400, None),
    "M08 no parts": (user([]), 400, "invalid_value"),
    "M08 1,025 parts": (user([{"type": "text", "text": "x"}] * 1025), 400, "invalid_value"),
    "M09 no text": (user([{"type": "text"}]), 400, "invalid_value"),
    "M10 result without an id": (say(*HI, {"role": "tool", "content": "x"}), 400, "invalid_value"),
    "M10 result of no call": (say(*HI, {"role": "tool", "tool_call_id": "z", "content": "x"}), 400, "invalid_value"),
    "M11 call without an id": (calls({"type": "function", "function": {"name": "a", "arguments": "{}"}}), 400, "invalid_value"),
    "M11 the same id twice": (calls(call(), call()), 400, "invalid_value"),
    "M11 129 calls": (calls(*[call(id=f"c{i}") for i in range(129)]), 400, "invalid_value"),
    "M12 arguments 5": (calls(call(arguments=5)), 400, "invalid_value"),
    "M12 arguments that are no JSON": (calls(call(arguments="{")), 200, None),
    "M16 a special token as a tool's name": (tools(tool("<think>")), 400, "invalid_value"),
    "M17 placeholders": (user("\x00123,456\x00"), 200, None),
    "M20 two system messages": (say({"role": "system", "content": "a"}, *HI, {"role": "system", "content": "b"}, *HI), 200, None),
    "M21 odd characters": (user("\u202e\u0378" + "\u0301" * 1000), 200, None),
    "M22 4,096 messages": (say(*[{"role": "user", "content": "x"}] * 4096), 400, "context_length_exceeded"),
    # tools, schemas, patterns
    "S01 tools 5": (chat(tools=5), 400, "invalid_value"),
    "S01 129 tools": (tools(*[tool(f"t{i}") for i in range(129)]), 400, "invalid_value"),
    "S01 {}": (tools({}), 400, "invalid_value"),
    "S02 empty name": (tools(tool("")), 400, "invalid_value"),
    "S02 name of 65": (tools(tool("t" * 65)), 400, "invalid_value"),
    "S02 name with /": (tools(tool("a/b")), 400, "invalid_value"),
    "S02 twice the same": (tools(tool(), tool()), 400, "invalid_value"),
    "S03 parameters 5": (tools(tool(parameters=5)), 400, "invalid_value"),
    "S04 stsring": (form({"type": "stsring"}), 400, "invalid_schema"),
    "S05 a type that is 7": (form({"type": ["string", 7]}), 400, "invalid_schema"),
    "S05 type 5": (form({"type": 5}), 400, "invalid_schema"),
    "S06 (": (chat(regex="("), 400, "invalid_pattern"),
    "S06 [z-a]": (chat(regex="[z-a]"), 400, "invalid_pattern"),
    "S06 looking behind": (chat(regex="(?<=a)b"), 400, "unsupported_pattern"),
    "S06 reference back": (chat(regex=r"(a)\1"), 400, "unsupported_pattern"),
    "S07 (a+)+": (chat(regex="(a+)+"), 200, None),
    "S07 a{1,100000}": (chat(regex="a{1,100000}"), 400, "schema_too_complex"),
    "S08 pattern of 64 KiB": (chat(regex="a" * 65536), 400, "string_above_max_length"),
    "S09 a cycle": (form(CYCLE), 400, "schema_cycle"),
    "S10 a tree": (form(TREE), 200, None),
    "S11 reference to elsewhere": (form({"$ref": "http://x/y"}), 400, "unsupported_schema"),
    "S12 missing definition": (form({"$ref": "#/$defs/z"}), 400, "invalid_schema"),
    "S13 maxItems below minItems": (prop({"type": "array", "minItems": 3, "maxItems": 2}), 400, "invalid_schema"),
    "S13 minItems -1": (prop({"type": "array", "minItems": -1}), 400, "invalid_schema"),
    "S13 maxItems 2^64": (prop({"type": "array", "maxItems": 2**64}), 400, None),
    "S14 maxLength deep inside": (prop(prop({"type": "string", "maxLength": 65536})[1]["response_format"]["json_schema"]["schema"]), 200, None),
    "S15 maxLength 2^31": (prop({"type": "string", "maxLength": 2**31}), 400, "schema_too_complex"),
    "S16 33 levels": (nested(33), 400, "schema_too_deep"),
    "S16 5,000 levels": (raw('{"response_format":' + '{"a":' * 5000), 400, "too_deep"),
    "S18 enum of a million": (prop({"enum": ["x"] * 20000}), 400, "schema_too_complex"),
    "S18 empty enum": (prop({"enum": []}), 400, None),
    "S19 not": (prop({"not": {"type": "string"}}), 400, "unsupported_schema"),
    "S20 const of 1 MiB": (prop({"const": "x" * 2**20}), 400, "schema_too_complex"),
    "S21 schema of 300 KiB": (prop({"description": "x" * 300 * 1024}), 400, "schema_too_complex"),
    "S23 unknown function": (tools(ADD, tool_choice={"type": "function", "function": {"name": "z"}}), 400, "invalid_value"),
    "S23 choice without tools": (chat(tool_choice="required"), 400, "invalid_value"),
    "S23 choice 5": (tools(ADD, tool_choice=5), 400, "invalid_value"),
    "S24 unknown form": (chat(response_format={"type": "xml"}), 400, "invalid_value"),
    "S24 no schema": (chat(response_format={"type": "json_schema"}), 400, "missing_required_parameter"),
    "S24 a form and a forced call": (tools(ADD, tool_choice="required", response_format={"type": "json_object"}), 200, None),
    "S24 two forms": (chat(regex="a", response_format={"type": "json_object"}), 400, "invalid_value"),
    "S25 a grammar": (chat(ebnf='root ::= root "a"'), 400, "unsupported_parameter"),
    "S26 allowed tools": (tools(ADD, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}}), 200, None),
    "S26 allowed but not there": (tools(ADD, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "z"}}]}}), 400, "invalid_value"),
    "S26 allowed without a mode": (tools(ADD, tool_choice={"type": "allowed_tools", "allowed_tools": {"tools": []}}), 400, "invalid_value"),
    "old shapes: function_call": (say(*HI, {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}, *HI), 400, "unsupported_parameter"),
    "old shapes: null": (say(*HI, {"role": "assistant", "content": "x", "function_call": None, "audio": None, "tool_calls": None}, *HI), 200, None),
    "old shapes: role function": (say(*HI, {"role": "function", "name": "f", "content": "x"}), 400, "invalid_value"),
    "modalities text": (chat(modalities=["text"]), 200, None),
    "modalities audio": (chat(modalities=["text", "audio"]), 400, "unsupported_parameter"),
    "modalities 5": (chat(modalities=[5]), 400, "unsupported_parameter"),
    # what the engine and the grammar compiler refuse, by the field that was wrong
    "field: a strict tool's schema": (tools({"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "stsring"}}}), 400, "invalid_schema"),
    "field: a strict tool beside a form": (tools({"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}, response_format={"type": "json_object"}), 400, "unsupported_schema"),
    "field: a form that does not end": (chat(ignore_eos=True, response_format={"type": "json_object"}), 400, "invalid_value"),
    "field: calls that do not end": (tools(ADD, tool_choice="required", ignore_eos=True), 400, "invalid_value"),
    "field: a long prompt with a form": (chat(messages=[{"role": "user", "content": "word " * 20000}], response_format={"type": "json_object"}), 400, "context_length_exceeded"),
    "field: too many asked for, with a form": (chat(max_tokens=100000, response_format={"type": "json_object"}), 400, "context_length_exceeded"),
    # the other endpoints
    "template: no role": (("/apply-template", {"messages": [{"content": "x"}]}), 400, "invalid_value"),
    "template: tools 5": (("/apply-template", {"messages": HI, "tools": 5}), 400, "invalid_value"),
    "tokenize: no role": (("/tokenize", {"messages": [{"content": "x"}]}), 400, "invalid_value"),
    "calls: no text": (("/parse_function_call", {"tools": [ADD]}), 400, "missing_required_parameter"),
    "calls: tools 5": (("/parse_function_call", {"text": "x", "tools": 5}), 400, "invalid_value"),
    "reasoning: no text": (("/separate_reasoning", {}), 400, "missing_required_parameter"),
    "count: no messages": ((MESSAGES + "/count_tokens", {}), 400, None),
    "messages: a bad tool": ((MESSAGES, {"max_tokens": 2, "messages": HI, "tools": [{"name": "a/b", "input_schema": {"type": "object"}}]}), 400, None),
    "messages: temperature 3": ((MESSAGES, {"max_tokens": 2, "messages": HI, "temperature": 3}), 400, None),
    "responses: a form of no type": ((RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}), 400, "invalid_schema"),
    "responses: temperature 3": ((RESPONSES, {"input": "a", "temperature": 3}), 400, "invalid_value"),
    "responses: count of nothing": ((RESPONSES + "/input_tokens", {}), 400, "missing_required_parameter"),
    "generate: temperature 3": ((GENERATE, {"text": "a", "sampling_params": {"temperature": 3}}), 400, "invalid_value"),
    "generate: a bad pattern": ((GENERATE, {"text": "a", "sampling_params": {"regex": "("}}), 400, "invalid_pattern"),
    "generate: text too long": ((GENERATE, {"text": "word " * 20000}), 400, "context_length_exceeded"),
    "E08 a model of 10 KiB": (("/v1/models/" + "m" * 10240, None), 414, None),
    "E08 no such model": (("/v1/models/%ff", None), {400, 404}, None),
    "generate: nothing": ((GENERATE, {}), 400, "invalid_value"),
    "generate: both": ((GENERATE, {"text": "a", "input_ids": [5]}), 400, "invalid_value"),
    "generate: parameters 5": ((GENERATE, {"text": "a", "sampling_params": 5}), 400, "invalid_value"),
    "generate: too few parameters": ((GENERATE, {"text": ["a", "b"], "sampling_params": [{}]}), 400, "invalid_value"),
    "generate: scores without logprobs": ((GENERATE, {"text": "a", "logprob_start_len": 0}), 400, "invalid_value"),
    "generate: image": ((GENERATE, {"text": "a", "image_data": "x"}), 400, "unsupported_parameter"),
    "tokenize: nothing": (("/tokenize", {}), 400, "missing_required_parameter"),
    "detokenize: -1": (("/detokenize", {"tokens": [-1]}), 400, "invalid_value"),
    "messages: none": ((MESSAGES, {"max_tokens": 2}), 400, None),
    "messages: image": ((MESSAGES, {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "image"}]}]}), 400, None),
    "messages: tool of the server": ((MESSAGES, {"max_tokens": 2, "messages": HI, "tools": [{"type": "web_search_20250305", "name": "w"}]}), 400, None),
    "messages: edits": ((MESSAGES, {"max_tokens": 2, "messages": HI, "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}), 400, None),
    "messages: edits of thinking": ((MESSAGES, {"max_tokens": 2, "messages": HI, "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]}}), 400, None),
    "messages: a tool that comes later": ((MESSAGES, {"max_tokens": 2, "messages": HI, "tools": [{"name": "w", "input_schema": {"type": "object"}, "defer_loading": True}]}), 400, None),
    "messages: another caller": ((MESSAGES, {"max_tokens": 2, "messages": HI, "tools": [{"name": "w", "input_schema": {"type": "object"}, "allowed_callers": ["code_execution_20250825"]}]}), 400, None),
    "messages: no more than a tool": ((MESSAGES, {"max_tokens": 2, "messages": HI, "tools": [{"type": "custom", "name": "w", "input_schema": {"type": "object"}, "allowed_callers": ["direct"], "defer_loading": False, "strict": True}]}), 200, None),
    "responses: allowed tools": ((RESPONSES, {"input": "a", "max_output_tokens": 2, "tools": [{"type": "function", "name": "f", "parameters": None}], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}}), 200, None),
    "responses: no input": ((RESPONSES, {}), 400, "missing_required_parameter"),
    "responses: unknown item": ((RESPONSES, {"input": [{"type": "zzz"}]}), 400, "invalid_value"),
    "responses: background unstored": ((RESPONSES, {"input": "a", "background": True, "store": False}), 400, "invalid_value"),
    "responses: unknown id": ((RESPONSES, {"input": "a", "previous_response_id": "x"}), 404, "previous_response_not_found"),
    "responses: web search": ((RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}), 400, "unsupported_parameter"),
}


def send(server, name):
    path, body = ROWS[name][0]
    return server.post(path, body, headers={"Content-Type": "application/json"}) if body is not None else server.get(path)


def line_of(name, reply):
    """The row of the golden file. A JSON library words its errors as it likes."""
    error = reply.json["error"]
    message = "" if error.get("code") == "invalid_json" else error["message"]
    return json.dumps([name, reply.status, error.get("code"), error.get("param"), message], ensure_ascii=False)


def lines():
    return {json.loads(line)[0]: line for line in REFUSALS.read_text().splitlines()}


@pytest.mark.parametrize("name", ROWS)
def test_row(server, name):
    _, status, code = ROWS[name]
    reply = send(server, name)
    statuses = status if isinstance(status, set) else {status}
    assert reply.status in statuses, reply.text
    if reply.status >= 400:
        error = reply.json["error"]
        assert error["message"] and error["type"]
        assert line_of(name, reply) == lines()[name]
    if code:
        assert reply.json["error"]["code"] == code, reply.text


def test_unknown_field_is_named(server):  # J20
    reply = server.post(*chat(zzz=1, yyy=2))
    assert reply.headers["X-Ignored-Params"] == "zzz, yyy"


def test_special_tokens_stay_text(server):  # M13, M14, M15
    """Messages that spell them hold as many control tokens as a clean one, also in parts."""
    texts = ["".join(SPECIAL), [{"type": "text", "text": part} for s in SPECIAL for part in (s[:3], s[3:])]]
    control = set(server.post("/tokenize", {"prompt": "".join(SPECIAL), "parse_special": True}).json["tokens"])

    def n_control(content):
        reply = server.post("/tokenize", {"messages": [{"role": "user", "content": content}]})
        return sum(t in control for t in reply.json["tokens"])

    assert len(control) >= 6
    assert {n_control(t) for t in texts} == {n_control("clean")}
    plain = server.post("/tokenize", {"prompt": "".join(SPECIAL), "parse_special": False}).json["tokens"]
    assert not control & set(plain)
    reply = server.post("/v1/completions", {"prompt": "".join(SPECIAL), "max_tokens": 1, "return_token_ids": True})
    assert reply.json["choices"][0]["prompt_token_ids"][-len(plain):] == plain


def test_nothing_is_left(server):
    load = server.loads()
    assert load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0
    assert server.post(*chat()).status == 200


if __name__ == "__main__":
    s = Server()
    replies = {name: send(s, name) for name in ROWS}
    REFUSALS.write_text("".join(line_of(n, r) + "\n" for n, r in replies.items() if r.status >= 400))
    s.close()
