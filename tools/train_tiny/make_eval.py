"""Held-out task files for `hadal eval`: one JSON object a line, {"task", "messages", "tools", "thinking", "checker", "max_tokens"}.

The checker is {"type": exact | final_number | regex | tool_call | contains, "expect": ...}; it judges
the answer after </think>. `make_eval.py OUT.jsonl [N]` writes N cases a task.
"""
import json
import random
import sys

import about
import arithmetic
import jsonanswers
import lists
import recall
import stories
import toolresults
import tooluse
from words import one

SEED = 2 * 10 ** 9


def case(task: str, exchanges, thinking: bool, max_tokens: int) -> dict:
    e = exchanges[-1]
    return {"task": task, "messages": [{"role": "user", "content": e.user}], "thinking": thinking,
            "checker": {"type": e.check[0], "expect": e.check[1]}, "max_tokens": max_tokens, "reference": e.spoken(thinking)}


def tool_case(rng: random.Random, thinking: bool) -> dict:
    """The first request of a tool dialogue; expect is the list of calls."""
    while True:
        messages = tooluse.dialogue(rng, about.draw, thinking)
        if messages[2].get("tool_calls"):
            calls = [{"name": c["name"], "arguments": c["arguments"]} for c in messages[2]["tool_calls"]]
            return {"task": "tools", "messages": messages[:2], "thinking": thinking, "checker": {"type": "tool_call", "expect": calls}, "max_tokens": 300}


# Names and sentences that no training document has.
NEW_NAMES = ["add_up", "summation", "tally", "combine", "addTwo", "sum_it", "increase", "plus_it", "make_sum", "accumulate"]
NEW_PAIRS = [("i", "j"), ("m", "n"), ("x1", "x2"), ("number_one", "number_two"), ("base", "more"), ("op1", "op2"), ("u", "v"), ("term1", "term2")]


def new_sentence(r: random.Random, task: toolresults.Task) -> str:
    a, _, b = task.unknown.split()
    value = task.answer.split(" = ")[1]
    return one(r, f"I got {value}.", f"{a} plus {b} equals {value}.", f"Sum = {value}", f"The calculator shows {value}", f"Output: {value}", f"ok, {value}", f"The tool returned {value}.")


def asked(r: random.Random, task: toolresults.Task) -> list[dict]:
    """The question with the tool and up to two others."""
    return [toolresults.begun(r, toolresults.offered(r, [task], r.randrange(3))), {"role": "user", "content": task.user}]


def call_case(name: str, task: toolresults.Task, r: random.Random) -> dict:
    """The first call of a request."""
    expect = [{"name": task.tool["name"], "arguments": task.arguments}]
    return {"task": name, "messages": asked(r, task), "thinking": r.random() < 0.5, "checker": {"type": "tool_call", "expect": expect}, "max_tokens": 300}


def result_case(name: str, task: toolresults.Task, r: random.Random, text: str) -> dict:
    """The answer behind a tool's result."""
    messages = [*asked(r, task), toolresults.call([task], ""), toolresults.tool_says(text)]
    return {"task": name, "messages": messages, "thinking": False, "checker": {"type": "exact", "expect": task.answer}, "max_tokens": 100}


def form_case(form: str, r: random.Random) -> dict:
    task = r.choice(toolresults.SUMS if form == "float" or r.random() < 0.6 else [toolresults.lookup, toolresults.price, toolresults.invented, toolresults.weather])(r)
    return result_case(f"result_{form}", task, r, toolresults.result(r, task, form))


def sum_task(r: random.Random) -> toolresults.Task:
    """An addition that the model can do by itself."""
    while not (task := toolresults.pair_tool(r)).own:
        pass
    return task


def new_text_case(r: random.Random) -> dict:
    task = sum_task(r)
    return result_case("result_new_text", task, r, new_sentence(r, task))


def error_case(r: random.Random) -> dict:
    """What is not to be tried again: the model says so and calculates."""
    task, reason = sum_task(r), toolresults.reason_to_stop(r)
    c = result_case("result_error", task, r, toolresults.error(r, reason))
    said = toolresults.without_the_tool(task, reason, False)["content"]
    return {**c, "checker": {"type": "exact", "expect": said}, "max_tokens": 300}


def retry_case(r: random.Random) -> dict:
    """What may pass: the model calls again; half of the cases fail twice, then it says so and does without."""
    task, reason = r.choice([toolresults.pair_tool, toolresults.weather, toolresults.lookup])(r), r.choice(toolresults.RETRY)
    c = result_case("result_retry", task, r, toolresults.error(r, reason))
    if r.random() < 0.5:
        return {**c, "checker": {"type": "tool_call", "expect": c["messages"][2]["tool_calls"]}, "max_tokens": 300}
    again = [*c["messages"], toolresults.call([task], ""), toolresults.tool_says(toolresults.error(r, reason))]
    said = toolresults.without_the_tool(task, reason, False)["content"]
    return {**c, "messages": again, "checker": {"type": "exact", "expect": said}, "max_tokens": 300}


TASKS = {
    "addition_1": lambda r: case("addition_1", [arithmetic.addition(r, 1)], True, 200),
    "addition_2": lambda r: case("addition_2", [arithmetic.addition(r, 2)], True, 200),
    "addition_3": lambda r: case("addition_3", [arithmetic.addition(r, 3)], True, 200),
    "addition_4": lambda r: case("addition_4", [arithmetic.addition(r, 4)], True, 260),
    "addition_3_plain": lambda r: case("addition_3_plain", [arithmetic.addition(r, 3)], False, 200),
    "subtraction": lambda r: case("subtraction", [arithmetic.subtraction(r)], True, 260),
    "product_2": lambda r: case("product_2", [arithmetic.product(r, 2)], True, 420),
    "comparison": lambda r: case("comparison", [arithmetic.comparison(r)], True, 200),
    "word_problem": lambda r: case("word_problem", [arithmetic.word_problem(r)], True, 300),
    "sort": lambda r: case("sort", [lists.sort(r)], True, 300),
    "reverse": lambda r: case("reverse", [lists.reverse(r)], True, 150),
    "count": lambda r: case("count", [lists.count(r)], True, 200),
    "story_question": lambda r: case("story_question", stories.with_questions(r, 1), True, 100),
    "recall_500": lambda r: case("recall_500", recall.probe(r, 500), False, 40),
    "recall_1000": lambda r: case("recall_1000", recall.probe(r, 1000), False, 40),
    "recall_2000": lambda r: case("recall_2000", recall.probe(r, 2000), False, 40),
    "recall_3500": lambda r: case("recall_3500", recall.probe(r, 3500), False, 40),
    "tools": lambda r: tool_case(r, r.random() < 0.5),
    "about": lambda r: case("about", [about.draw(r)], r.random() < 0.5, 120),
    "story": lambda r: case("story", [stories.told(r)[0]], False, 300),
    "tool_sums": lambda r: call_case("tool_sums", r.choice(toolresults.SUMS)(r), r),
    "tool_new_names": lambda r: call_case("tool_new_names", toolresults.pair_tool(r, "+", NEW_NAMES, NEW_PAIRS), r),
    "tool_strings": lambda r: call_case("tool_strings", r.choice(toolresults.STRINGS)(r), r),
    "result_bare": lambda r: form_case("bare", r),
    "result_float": lambda r: form_case("float", r),
    "result_quoted": lambda r: form_case("quoted", r),
    "result_text": lambda r: form_case("text", r),
    "result_new_text": new_text_case,
    "result_object": lambda r: form_case("object", r),
    "result_error": error_case,
    "result_retry": retry_case,
    "json_answer": lambda r: case("json_answer", [jsonanswers.draw(r)], r.random() < 0.5, 120),
}


def cases(task: str, n: int) -> list[dict]:
    """The first n held-out cases of a task."""
    return [TASKS[task](random.Random(f"{SEED} {task} {i}")) for i in range(n)]


def openai_call(call: dict, call_id: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}}


def openai(c: dict) -> dict:
    """Tools, calls and results as the OpenAI interface has them: tools with the request, calls with ids."""
    tools = [{"type": "function", "function": t} for m in c["messages"] for t in m.get("tools", [])]
    plain, ids = [], iter(())
    for i, m in enumerate(c["messages"]):
        m = {k: v for k, v in m.items() if k not in ("tools", "reasoning")}
        if m.get("tool_calls"):
            names = [f"call_{i}_{k}" for k in range(len(m["tool_calls"]))]
            m["tool_calls"], ids = [openai_call(x, n) for x, n in zip(m["tool_calls"], names)], iter(names)
        elif m["role"] == "tool":
            m["tool_call_id"] = next(ids)
        plain.append(m)
    return {**c, "messages": plain, **({"tools": tools} if tools else {})}


def main() -> None:
    n = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    with open(sys.argv[1], "w") as f:
        for task in TASKS:
            for c in cases(task, n):
                f.write(json.dumps(openai(c), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
