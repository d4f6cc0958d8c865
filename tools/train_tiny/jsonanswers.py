"""Answers that are JSON: facts taken out of a sentence, answers to questions, stories as strings, with and without being told the keys."""
import json
import random

import about
import arithmetic
import stories
from exchange import Exchange
from words import ANIMALS, BOYS, CITIES, COLORS, FOODS, GIRLS, NOUNS, OBJECTS, PLACES, TRAITS, WEATHER, a, one, plural, zipf

TYPES = {str: "string", int: "integer", list: "array", bool: "boolean", float: "number"}


def person(rng: random.Random) -> tuple[str, dict]:
    who = zipf(rng, GIRLS + BOYS) if rng.random() < 0.8 else rng.choice(["Ann", "Bob", "Eve", "Kim", "Alice", "John Smith", "Mary Jones"])
    age, city, food = rng.randrange(2, 99), rng.choice(CITIES), rng.choice(FOODS)
    return one(rng, (f"{who} is {age}", {"name": who, "age": age}), (f"{who} is {age} years old.", {"name": who, "age": age}),
               (f"{who} is {age} years old and lives in {city}.", {"name": who, "age": age, "city": city}), (f"{who} lives in {city}.", {"name": who, "city": city}),
               (f"{who} likes {food}.", {"name": who, "food": food}), (f"My name is {who} and I live in {city}.", {"name": who, "city": city}))


def thing(rng: random.Random) -> tuple[str, dict]:
    color, it, n, place = rng.choice(COLORS), zipf(rng, OBJECTS), rng.randrange(2, 999), rng.choice(PLACES)
    return one(rng, (f"The {color} {it} costs {n} coins.", {"item": it, "color": color, "price": n}), (f"The {it} costs {n} coins.", {"item": it, "price": n}),
               (f"The {color} {it} is in the {place}.", {"item": it, "color": color, "place": place}), (f"There are {n} {plural(it)} in the {place}.", {"item": it, "count": n, "place": place}))


def animal(rng: random.Random) -> tuple[str, dict]:
    kind, who, trait, place = zipf(rng, ANIMALS), zipf(rng, GIRLS + BOYS), rng.choice(TRAITS), rng.choice(PLACES)
    return one(rng, (f"{who} is {a(trait)} {kind}.", {"name": who, "animal": kind, "trait": trait}), (f"{who} is {a(kind)} who lives near the {place}.", {"name": who, "animal": kind, "place": place}))


def day(rng: random.Random) -> tuple[str, dict]:
    city, sky, t = rng.choice(CITIES), rng.choice(WEATHER), rng.randrange(-9, 40)
    return f"It is {sky} in {city}, {t} degrees.", {"city": city, "weather": sky, "temperature": t}


def bought(rng: random.Random) -> tuple[str, dict]:
    who, items = zipf(rng, GIRLS + BOYS), rng.sample(OBJECTS + FOODS, rng.randrange(2, 5))
    return f"{who} buys {', '.join(items[:-1])} and {items[-1]}.", {"name": who, "items": items}


def pair(rng: random.Random) -> tuple[str, dict]:
    """Keys and values that mean nothing."""
    keys, values = rng.sample(NOUNS, 2), [rng.choice(NOUNS) if rng.random() < 0.6 else rng.randrange(1000) for _ in range(2)]
    return f"The {keys[0]} is {values[0]} and the {keys[1]} is {values[1]}.", dict(zip(keys, values))


def schema_of(value: dict) -> dict:
    def of(x) -> dict:
        return {"type": TYPES[type(x)], **({"items": {"type": "string"}} if isinstance(x, list) else {})}
    return {"type": "object", "properties": {k: of(x) for k, x in value.items()}, "required": list(value)}


def hint(rng: random.Random, value: dict) -> str:
    """How people ask for an object with these keys."""
    keys = list(value)
    named = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
    shape = "{" + ", ".join(f'"{k}": {TYPES[type(x)]}' for k, x in value.items()) + "}"
    return one(rng, f"Answer in JSON with the {'key' if len(keys) == 1 else 'keys'} {named}.", f"Reply as JSON: {shape}", f"Give me JSON with {named}.", f"Return a JSON object {shape}.",
               f"Answer only with JSON of this schema: {json.dumps(schema_of(value))}", f"JSON with {named}, please.")


def response_format(value: dict, rng: random.Random) -> str:
    """The system text of V4's response formats."""
    shape = one(rng, schema_of(value), {"type": "json_schema", "json_schema": {"name": rng.choice(NOUNS), "schema": schema_of(value)}})
    return "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n" + json.dumps(shape)


def extraction(rng: random.Random, hinted: bool) -> tuple[str, dict]:
    text, value = rng.choices([person, thing, animal, day, bought, pair], [4, 3, 2, 2, 2, 2])[0](rng)
    if hinted and rng.random() < 0.5:
        keys = rng.sample(list(value), rng.randrange(1, len(value) + 1))
        value = {k: value[k] for k in keys}
    return text, value


def question(rng: random.Random) -> tuple[str, str, dict]:
    """(question, what to think, answer) of the other tasks."""
    r = rng.random()
    key = rng.choice(["answer", "answer", "result", "text", "reply"])
    if r < 0.25:
        e = stories.told(rng)[0]
        return e.user, "", {rng.choice(["story", "text", "answer"]): e.answer}
    if r < 0.5:
        e = arithmetic.addition(rng, rng.randrange(1, 4))
        value = int(e.check[1])
        return e.user, e.reasoning, {key: value if rng.random() < 0.7 else str(value)}
    e = about.draw(rng)
    return e.user, e.reasoning, {key: e.answer}


def dumped(value: dict) -> str:
    return json.dumps(value, ensure_ascii=False)


def draw(rng: random.Random, hinted: bool = True) -> Exchange:
    """One exchange; hinted: the question says that it wants JSON and which keys."""
    text, value = extraction(rng, hinted)
    asked = text if not hinted else one(rng, f"{text} {hint(rng, value)}", f"{text}\n{hint(rng, value)}", f"{hint(rng, value)} {text}")
    return Exchange("json", asked, "The user wants JSON.", dumped(value), None, ("exact", dumped(value)))


def messages(rng: random.Random, thinking: bool) -> list[dict]:
    """A short talk: the form said in the question or by the system, or a statement alone, which is always answered so."""
    r = rng.random()
    if r < 0.25:
        turns, system = [draw(rng, False)], ""
    elif r < 0.45:
        turns, system = [draw(rng) for _ in range(rng.randrange(1, 4))], ""
    elif r < 0.7:
        text, value = extraction(rng, True)
        turns, system = [Exchange("json", text, "The user wants JSON.", dumped(value))], one(rng, hint(rng, value), response_format(value, rng))
    else:
        while True:
            text, think, value = question(rng)
            if thinking or not isinstance(next(iter(value.values())), int) and not str(next(iter(value.values()))).isdigit():
                break
        how = hint(rng, value)
        inside = rng.random() < 0.5
        turns = [Exchange("json", f"{text} {how}" if inside else text, think, dumped(value))]
        system = "" if inside else one(rng, how, response_format(value, rng))
    out = [{"role": "system", "content": system}] if system else []
    for e in turns:
        out += [{"role": "user", "content": e.user}, {"role": "assistant", "content": e.spoken(thinking), "reasoning": e.reasoning}]
    return out
