#!/usr/bin/env python3
"""Agent frameworks against a server: 20 sums with an adding tool, through each one's own loop.

    [HADAL=build/hadal] tests/agents/run.py

Every framework asks "What is A + B?" and offers one tool that adds. A sum counts when the tool was called with A and B
and the final text has their sum. The frameworks are those of requirements.txt; the last line says how many solved all 20.
"""

import asyncio
import json
import os
import pathlib
import random
import re
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from serving import Server  # noqa: E402

N = 20
ROUNDS = 6  # calls and answers of one question at most
draw = random.Random(20)
SUMS = [(draw.randrange(10, 1000), draw.randrange(10, 1000)) for _ in range(N)]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
called = []  # arguments of the tool since the question was asked


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    called.append((a, b))
    return a + b


# ---- one function per framework: url -> the function that answers a question ----


def openai_chat(url):
    import openai

    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    tools = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}]

    def ask(question):
        messages = [{"role": "user", "content": question}]
        for _ in range(ROUNDS):
            said = client.chat.completions.create(model="tiny-v4", messages=messages, tools=tools, temperature=0).choices[0].message
            if not said.tool_calls:
                return said.content
            messages.append(said)
            for call in said.tool_calls:
                result = add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})

    return ask


def openai_responses(url):
    import openai

    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    tools = [{"type": "function", "name": "add", "description": "Add two numbers.", "parameters": PARAMETERS, "strict": False}]

    def ask(question):
        given, before = question, openai.omit
        for _ in range(ROUNDS):
            r = client.responses.create(model="tiny-v4", input=given, tools=tools, previous_response_id=before, temperature=0)
            calls = [item for item in r.output if item.type == "function_call"]
            if not calls:
                return r.output_text
            before = r.id
            given = [{"type": "function_call_output", "call_id": c.call_id, "output": str(add(**json.loads(c.arguments)))} for c in calls]

    return ask


def anthropic_messages(url):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none")
    tools = [{"name": "add", "description": "Add two numbers.", "input_schema": PARAMETERS}]

    def ask(question):
        messages = [{"role": "user", "content": question}]
        for _ in range(ROUNDS):
            said = client.messages.create(model="tiny-v4", max_tokens=1000, messages=messages, tools=tools, extra_body={"temperature": 0})
            calls = [block for block in said.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in said.content if block.type == "text")
            messages.append({"role": "assistant", "content": said.content})
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": str(add(**c.input))} for c in calls]
            messages.append({"role": "user", "content": results})

    return ask


def langchain(url):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url + "/v1", api_key="none", model="tiny-v4", temperature=0).bind_tools([tool(add)])

    def ask(question):
        messages = [HumanMessage(question)]
        for _ in range(ROUNDS):
            said = model.invoke(messages)
            if not said.tool_calls:
                return said.content
            messages += [said, *(ToolMessage(add(**c["args"]), tool_call_id=c["id"]) for c in said.tool_calls)]

    return ask


def pydantic_ai(url):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny-v4", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))
    agent = Agent(model, tools=[add], model_settings={"temperature": 0})
    return lambda question: agent.run_sync(question).output


def openai_agents(url):
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none")
    agent = agents.Agent(
        "adder",
        model=agents.OpenAIResponsesModel("tiny-v4", client),
        tools=[agents.function_tool(add)],
        model_settings=agents.ModelSettings(temperature=0),
    )
    loop = asyncio.new_event_loop()
    return lambda question: loop.run_until_complete(agents.Runner.run(agent, question)).final_output


def inspect_ai(url):
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool(name="add")
    def adder():
        async def execute(a: int, b: int):
            """Add two numbers.

            Args:
                a: The first number.
                b: The second number.
            """
            return add(a, b)

        return execute

    model = get_model("openai-api/hadal/tiny-v4", base_url=url + "/v1", api_key="none", config=GenerateConfig(temperature=0))
    logs = tempfile.mkdtemp()

    def ask(question):
        task = Task(dataset=[Sample(question)], solver=[use_tools(adder()), generate()])
        (log,) = eval(task, model=model, display="none", log_dir=logs)
        return log.samples[0].output.completion if log.status == "success" else f"{log.status}: {log.error}"

    return ask


FRAMEWORKS = [openai_chat, openai_responses, anthropic_messages, langchain, pydantic_ai, openai_agents, inspect_ai]


def solved(ask, a, b):
    """Was the tool asked, and is the sum in the answer? A failure is printed."""
    called.clear()
    try:
        answer = ask(f"What is {a} + {b}?")
    except Exception as e:
        answer = f"{type(e).__name__}: {e}"
    if (a, b) in called and str(a + b) in re.findall(r"\d+", str(answer)):
        return True
    print(f"    {a} + {b}: calls {called}, answer {str(answer)[:300]!r}", flush=True)
    return False


def main():
    os.environ.update(OPENAI_API_KEY="none", ANTHROPIC_API_KEY="none")
    server, whole = Server(), 0
    for framework in FRAMEWORKS:
        ask = framework(f"http://127.0.0.1:{server.port}")
        right = sum([solved(ask, a, b) for a, b in SUMS])
        print(f"{framework.__name__:20} {right} of {N}", flush=True)
        whole += right == N
    server.close()
    print(f"{whole} of {len(FRAMEWORKS)} frameworks solved all {N} sums")
    return 0 if whole == len(FRAMEWORKS) else 1


if __name__ == "__main__":
    sys.exit(main())
