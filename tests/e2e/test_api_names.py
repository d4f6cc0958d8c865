"""Every name the official clients can send: it works, changes nothing, or is refused by name.

The names come from the signatures of the installed clients, so a newer client brings its own;
one without a row here is skipped, loudly. Replies are held against the clients' own models, and
what the server says of its routes against the routes it has."""

import inspect
import re

import pytest
from conftest import ROOT
from serving import Server

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": True}
CLAUDE_TOOL = {"name": "f", "input_schema": PARAMETERS}
FORM = {"type": "json_schema", "schema": PARAMETERS}
TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
HEADERS = {"betas", "user_profile_id", "workspace_id"}  # not in the body

# A value for each name; ("no", value) where it must be refused.
SHARED = {
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"7": 1}, "n": 2, "seed": 3, "stop": ["x"],
    "temperature": 0.5, "top_p": 0.5, "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s",
    "service_tier": "auto", "prompt_cache_key": "k", "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "in_memory", "moderation": ("no", {"model": "m"}), "parallel_tool_calls": False,
    "store": False, "stream": False, "verbosity": "low", "top_logprobs": 2,
}  # fmt: skip
CHAT = SHARED | {
    "audio": ("no", {"format": "mp3", "voice": "alloy"}), "function_call": ("no", "auto"),
    "functions": ("no", [{"name": "f"}]), "logprobs": True, "max_completion_tokens": 3, "max_tokens": 3,
    "modalities": ("no", ["text", "audio"]), "prediction": ("no", {"type": "content", "content": "x"}),
    "reasoning_effort": "low", "response_format": {"type": "json_object"}, "stream_options": None,
    "tool_choice": "none", "tools": [TOOL], "top_logprobs": None, "web_search_options": ("no", {}),
}  # fmt: skip
COMPLETE = SHARED | {"best_of": ("no", 2), "echo": True, "logprobs": 2, "max_tokens": 3, "suffix": "x", "stream_options": None}
RESPOND = SHARED | {
    "access_programs": {"cyber": "standard"}, "background": False, "background_options": {},
    "context_management": ("no", [{"type": "compaction"}]), "conversation": ("no", "conv_1"),
    "image": ("no", {"context_compression": "disabled"}), "include": ["message.output_text.logprobs"], "instructions": "Be brief.",
    "max_output_tokens": 3, "max_tool_calls": 1, "previous_response_id": None, "prompt": ("no", {"id": "p"}),
    "reasoning": {"effort": "low", "summary": "auto", "context": "auto", "mode": "standard"}, "stream_options": None,
    "text": {"format": {"type": "text"}, "verbosity": "low"}, "tool_choice": "none", "tools": [FLAT_TOOL],
    "truncation": "disabled", "personality": ("no", "friendly"),
}  # fmt: skip
MESSAGES = {
    "cache_control": {"type": "ephemeral"}, "container": ("no", "c"), "diagnostics": ("no", {"previous_message_id": "m"}),
    "inference_geo": "eu", "metadata": {"user_id": "u"}, "output_config": {"effort": "low", "format": FORM},
    "output_format": FORM, "service_tier": "auto", "speed": "standard", "stop_sequences": ["x"], "stream": False,
    "system": "Be brief.", "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
    "tool_choice": {"type": "none"}, "tools": [CLAUDE_TOOL],
    "billing_policy": {"type": "billing_policy", "bill_to": "self"}, "compaction": ("no", {"type": "auto"}),
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "fallback_credit_token": "t", "fallbacks": "default",
    "mcp_servers": ("no", [{"type": "url", "name": "n", "url": "u"}]), "thread": ("no", {"type": "create"}),
}  # fmt: skip

OPENAI = openai.OpenAI(api_key="none", base_url="http://127.0.0.1:1/v1")
CLAUDE = anthropic.Anthropic(api_key="none", base_url="http://127.0.0.1:1")
# method: (client, path to it, what it needs, rows)
METHODS = {
    "chat.completions.create": (OPENAI, {"model": "m", "messages": HI, "max_completion_tokens": 4}, CHAT),
    "completions.create": (OPENAI, {"model": "m", "prompt": "hi", "max_tokens": 4}, COMPLETE),
    "responses.create": (OPENAI, {"model": "m", "input": "hi", "max_output_tokens": 4}, RESPOND),
    "responses.input_tokens.count": (OPENAI, {"model": "m", "input": "hi"}, RESPOND),
    "messages.create": (CLAUDE, {"model": "m", "messages": HI, "max_tokens": 4}, MESSAGES),
    "messages.count_tokens": (CLAUDE, {"model": "m", "messages": HI}, MESSAGES),
    "beta.messages.create": (CLAUDE, {"model": "m", "messages": HI, "max_tokens": 4}, MESSAGES),
    "beta.messages.count_tokens": (CLAUDE, {"model": "m", "messages": HI}, MESSAGES),
}
class Form(pydantic.BaseModel):
    a: str


# What a name needs beside it, and what it is elsewhere.
BESIDE = {"tool_choice": {"chat.completions.create": {"tools": [TOOL]}}, "max_tokens": {"chat.completions.create": {"max_completion_tokens": openai.NOT_GIVEN}}}

ELSEWHERE = {("messages.count_tokens", "output_format"): Form}


def method_of(client, name):
    for part in name.split("."):
        client = getattr(client, part)
    return client


def exists(name):
    try:
        return method_of(METHODS[name][0], name)
    except AttributeError:
        return None


NAMES = [(m, p) for m in METHODS if exists(m) for p in inspect.signature(exists(m)).parameters if p not in TRANSPORT | HEADERS and p not in METHODS[m][1]]


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    s.close()


@pytest.fixture(scope="module")
def clients(server):
    address = f"http://127.0.0.1:{server.port}"
    strict = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
    return {OPENAI: openai.OpenAI(base_url=f"{address}/v1", **strict), CLAUDE: anthropic.Anthropic(base_url=address, **strict)}


@pytest.mark.parametrize("method, name", NAMES)
def test_name(clients, method, name):
    client, needed, rows = METHODS[method]
    if name not in rows:
        pytest.skip(f"{name} of {method} is newer than this table: decide what it does")
    value, refused = rows[name], False
    if isinstance(value, tuple):
        refused, value = True, value[1]
    call = method_of(clients[client], method.rsplit(".", 1)[0]).with_raw_response
    ask = getattr(call, method.rsplit(".", 1)[1])
    value = ELSEWHERE.get((method, name), value)
    given = {**needed, **BESIDE.get(name, {}).get(method, {}), name: value}
    if refused:
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as error:
            ask(**given)
        assert name in str(error.value)
        return
    raw = ask(**given)
    assert "x-ignored-params" not in raw.headers
    raw.parse()  # as strictly as the client can


def test_streams_fit_the_clients_models(clients):
    o, c = clients[OPENAI], clients[CLAUDE]
    for chunk in o.chat.completions.create(model="m", messages=HI, stream=True, max_tokens=4, stream_options={"include_usage": True}, logprobs=True):
        assert chunk.object == "chat.completion.chunk"
    assert [e.type for e in o.responses.create(model="m", input="hi", stream=True, max_output_tokens=4)][-1] == "response.incomplete"
    assert [e.type for e in c.messages.create(model="m", messages=HI, stream=True, max_tokens=4)][-1] == "message_stop"


def test_models_fit_both_clients(clients):
    assert clients[OPENAI].models.list().data[0].id == "tiny-v4"
    assert clients[OPENAI].models.retrieve("tiny-v4").max_model_len > 0
    (model,) = clients[CLAUDE].models.list()
    assert model.id == model.display_name == "tiny-v4" and clients[CLAUDE].models.retrieve("tiny-v4").created_at == model.created_at


# ---- routes ----


def mounted():
    """Every route of the server's sources: (method, path)."""
    row = re.compile(r'^    \{"([A-Z ]+)", +"(/[^"]*)", +HTTP_\w+, +HTTP_\w+, +(\w+) *\}', re.M)
    for path in sorted(set((ROOT / "src").glob("*/*.c")) - set((ROOT / "src/router").glob("*.c"))):
        for methods, route, handler in row.findall(path.read_text()):
            for method in methods.split():
                yield method.lower(), route, handler


def test_every_route_is_described(server):
    """And what is not described says that it is not supported."""
    paths = server.get("/openapi.json").json["paths"]
    routes = list(mounted())
    assert len(routes) > 60
    described = {(m, re.sub(r"\{.*", "*", p)) for p, item in paths.items() for m in item}
    for method, route, handler in routes:
        if handler == "api_unsupported":
            reply = server.request(method.upper(), route.replace("*", "x"), body={} if method == "post" else None)
            assert reply.status == 404 and "is not supported by this server" in reply.text, route
        else:
            assert (method, route) in described, (method, route)
    for method, path in described:
        assert any(method == m and path == r for m, r, _ in routes), path
    for item in paths.values():
        for operation in item.values():
            assert operation["summary"] and operation["responses"]
