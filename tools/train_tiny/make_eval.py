"""Held-out task files for `hadal eval`: one JSON object a line, {"task", "messages", "tools", "thinking", "checker", "max_tokens"}.

The checker is {"type": exact | final_number | regex | tool_call | contains, "expect": ...}; it judges
the answer after </think>. `make_eval.py OUT.jsonl [N]` writes N cases a task.
"""
import json
import random
import sys

import about
import arithmetic
import lists
import recall
import stories
import tooluse

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
}


def cases(task: str, n: int) -> list[dict]:
    """The first n held-out cases of a task."""
    return [TASKS[task](random.Random(f"{SEED} {task} {i}")) for i in range(n)]


def openai(c: dict) -> dict:
    """Tools as the OpenAI interface has them: with the request."""
    tools = [{"type": "function", "function": t} for m in c["messages"] for t in m.get("tools", [])]
    plain = [{k: v for k, v in m.items() if k != "tools"} for m in c["messages"]]
    return {**c, "messages": plain, **({"tools": tools} if tools else {})}


def main() -> None:
    n = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    with open(sys.argv[1], "w") as f:
        for task in TASKS:
            for c in cases(task, n):
                f.write(json.dumps(openai(c), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
