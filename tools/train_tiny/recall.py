"""Key-value recall: facts early in a text, questions later, with distances spread evenly on a log scale.

Values come from the same lists everywhere, so nothing but the context tells them.
"""
import math
import random

from exchange import Exchange
from stories import story
from words import ADJECTIVES, CITIES, COLORS, FOODS, NOUNS, OBJECTS, one

TOKENS_PER_FACT = 8


def keys(rng: random.Random, n: int) -> list[str]:
    if n <= 150 and rng.random() < 0.6:
        return rng.sample(NOUNS, n)
    out: dict[str, None] = {}
    while len(out) < n:
        out[f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"] = None
    return list(out)


def values(rng: random.Random, n: int) -> list[str]:
    kind = rng.random()
    if kind < 0.45:
        return [str(rng.randrange(100, 1000)) for _ in range(n)]
    if kind < 0.6:
        return [str(rng.randrange(10, 100)) for _ in range(n)]
    pool = rng.choice([COLORS, CITIES, OBJECTS + FOODS, NOUNS])
    return [rng.choice(pool) for _ in range(n)]


# fact line, question, answer
FORMS = [("- {k}: {v}", "What is {k}?", "{k}: {v}"),
         ("- {k}: {v}", "Which value does {k} have?", "{k}: {v}"),
         ("The code of {k} is {v}.", "What is the code of {k}?", "The code of {k} is {v}."),
         ("{k} = {v}", "{k} = ?", "{k} = {v}")]


def far(rng: random.Random, n: int) -> int:
    """An index in [0, n) whose distance to the end is log-uniform."""
    return n - min(n, int(math.exp(rng.random() * math.log(n + 1)))) if n > 1 else 0


def exchanges(rng: random.Random, budget: int) -> list[Exchange]:
    """A message with the facts and the first question, then more questions; budget in tokens."""
    fact, ask, say = rng.choice(FORMS)
    n_questions = rng.randrange(6, 25)
    most = max(70, budget - 40 * n_questions)
    room = rng.randrange(60, most) if rng.random() < 0.5 else int(math.exp(rng.uniform(math.log(60), math.log(most))))
    fillers = rng.random() < 0.35
    n = max(3, room // (TOKENS_PER_FACT * (6 if fillers else 1)))
    ks, vs = keys(rng, n), values(rng, n)
    lines = [fact.format(k=k, v=v) for k, v in zip(ks, vs)]
    if fillers:
        text = with_filler(rng, lines, room)
    else:
        text = "\n".join(lines)
    intro = one(rng, "Remember this:", "Here is a list.", "Please remember these facts.", "Read this list:")
    out = []
    for i in range(n_questions):
        at = far(rng, n) if rng.random() < 0.3 else rng.randrange(n)
        if i == 0 and rng.random() < 0.3:
            at = rng.randrange(min(n, 3))
        k, v = ks[at], vs[at]
        answer = say.format(k=k, v=v)
        question = ask.format(k=k)
        user = question if i else f"{intro}\n{text}\n\n{question}"
        out.append(Exchange("recall", user, f"I look for {k}. It says: {fact.format(k=k, v=v).removeprefix('- ')}", answer, None, ("contains", v)))
    return out


def with_filler(rng: random.Random, lines: list[str], room: int) -> str:
    """The facts strewn between the sentences of stories."""
    text, used, words = [], 0, room * 0.75
    sentences: list[str] = []
    while used < words or lines:
        if not sentences:
            sentences = story(rng).text.replace('." ', '."|').replace(". ", ".|").split("|")
        s = sentences.pop(0)
        text.append(s)
        used += s.count(" ") + 2
        share = max(1.0, words / (len(s) / 5 + 1))
        if lines and (rng.random() < len(lines) / max(share - len(text), 1) or used >= words):
            text.append(lines.pop(0))
    return "\n".join(text)


def probe(rng: random.Random, distance: int) -> list[Exchange]:
    """For evaluation: one question about a fact that lies about `distance` tokens back."""
    fact, ask, say = rng.choice(FORMS)
    n = max(3, distance // TOKENS_PER_FACT)
    ks, vs = keys(rng, n), values(rng, n)
    text = "\n".join(fact.format(k=k, v=v) for k, v in zip(ks, vs))
    at = rng.randrange(0, max(1, n // 20))
    k, v = ks[at], vs[at]
    return [Exchange("recall", f"Remember this:\n{text}\n\n{ask.format(k=k)}",
                     f"I look for {k}. It says: {fact.format(k=k, v=v).removeprefix('- ')}", say.format(k=k, v=v), None, ("contains", v))]
