"""The corpus: document number -> text. Nothing is stored; the generator is the data set.

A document is a conversation in a family's chat encoding, thinking on or off, or a plain story.
A training run of seed S takes numbers from S * 10^12 on; the tokenizer, the held-out loss and the
task files use numbers and seeds that no run reaches.
"""
import random

import about
import arithmetic
import encoding
import jsonanswers
import lists
import recall
import stories
import toolresults
import tooluse
from exchange import Exchange

HELD_OUT = 10 ** 9
SYSTEM = ["You are a helpful assistant.", "You are tiny, a small model.", "Answer the question.", "You are a friendly assistant.", "Be brief."]
KINDS = ["story", "story_question", "arithmetic", "lists", "recall", "tools", "chat", "about", "agents", "json"]
# share of documents; recall and tool documents are several times longer than the others
WEIGHTS = [14, 10, 30, 11, 9, 6, 8, 7, 10, 6]
PROMPT_WEIGHT = {"recall": 0.03, "tools": 0.1, "agents": 0.05, "json": 0.05}


def to_messages(rng: random.Random, turns: list[Exchange], thinking: bool) -> list[dict]:
    messages = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEM)})
    for e in turns:
        messages.append({"role": "user", "content": e.user})
        messages.append({"role": "assistant", "content": e.spoken(thinking), "reasoning": e.reasoning})
    return messages


def short_turn(rng: random.Random) -> Exchange:
    return rng.choices([arithmetic.draw, lists.draw, about.draw], [5, 2, 4])[0](rng)


def aside(rng: random.Random) -> Exchange:
    """Small talk beside tools; sums are left to these."""
    return rng.choices([lists.draw, about.draw], [2, 4])[0](rng)


def story_talk(rng: random.Random) -> list[Exchange]:
    """A story told by the model, then questions about it."""
    told, s = stories.told(rng)
    return [told] + [stories.question(rng, s) for _ in range(rng.randrange(1, 6))]


def chat_turns(rng: random.Random) -> list[Exchange]:
    turns: list[Exchange] = []
    for _ in range(rng.randrange(2, 6)):
        r = rng.random()
        if r < 0.2:
            turns += story_talk(rng)
        elif r < 0.3:
            turns += stories.with_questions(rng, 1)
        elif r < 0.4:
            turns += recall.exchanges(rng, 700)[:3]
        else:
            turns.append(short_turn(rng))
    return turns


def until_a_call(rng: random.Random, messages: list[dict]) -> list[dict]:
    """A dialogue that ends with one of its calls: some encodings show thoughts only in the last answer."""
    calls = [i for i, m in enumerate(messages) if m.get("tool_calls")]
    return messages[:rng.choice(calls) + 1]


def conversation(rng: random.Random, kind: str, thinking: bool, budget: int, chat=encoding.V4) -> list[dict]:
    """The messages of a document of a kind; budget bounds its tokens, chat is the chat encoding."""
    if kind in ("tools", "agents"):
        if kind == "tools":
            messages = tooluse.dialogue(rng, aside, thinking)
        else:
            messages = toolresults.dialogue(rng, aside, thinking and chat.KEEPS_THOUGHTS, thinking)
        return until_a_call(rng, messages) if thinking and not chat.KEEPS_THOUGHTS else messages
    if kind == "json":
        return jsonanswers.messages(rng, thinking)
    if kind == "story":
        turns = [stories.told(rng)[0]]
    elif kind == "story_question":
        turns = story_talk(rng) if rng.random() < 0.3 else stories.with_questions(rng, rng.randrange(1, 8))
    elif kind == "recall":
        turns = recall.exchanges(rng, budget)
    elif kind == "chat":
        turns = chat_turns(rng)
    else:
        turns = [{"arithmetic": arithmetic, "lists": lists, "about": about}[kind].draw(rng)]
    return to_messages(rng, turns, thinking)


def document(number: int, budget: int = 2000, mix: list[float] | None = None, chat=encoding.V4) -> tuple[str, str, float]:
    """(kind, text, loss weight of prompt tokens) of document `number`; mix replaces WEIGHTS and may name the
    first kinds only."""
    rng = random.Random(number * 2654435761 + 12345)
    mix = mix or WEIGHTS
    kind = rng.choices(KINDS[:len(mix)], mix)[0]
    thinking = rng.random() < 0.6
    if kind == "story" and rng.random() < 0.4:
        return kind, encoding.BOS + stories.story(rng).text + encoding.EOS, 1.0
    messages = conversation(rng, kind, thinking, budget, chat)
    effort = {"effort": rng.choice([encoding.USUAL_EFFORT, rng.randrange(1, 101)])} if chat.HAS_EFFORT else {}
    return kind, chat.render(messages, thinking, **effort), PROMPT_WEIGHT.get(kind, 0.2)
