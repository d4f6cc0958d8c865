"""Dialogues with tools in DSML: a calculator, lookups, and many small invented tools.

A dialogue is a list of messages (encoding.py); the schemas vary, so the model has to read
names and parameters from the prompt instead of knowing them.
"""
import json
import random

from words import ANIMALS, BOYS, CITIES, COLORS, FOODS, GIRLS, NOUNS, OBJECTS, PLACES, WEATHER, a, capital, one, plural, zipf


def schema(name: str, description: str, /, **params: tuple[str, str]) -> dict:
    """OpenAI function schema; params: name=(type, description)."""
    return {"name": name, "description": description,
            "parameters": {"type": "object",
                           "properties": {k: {"type": t, "description": d} for k, (t, d) in params.items()},
                           "required": list(params)}}


def calculator(rng: random.Random):
    a, b = rng.randrange(10, 10 ** rng.randrange(2, 6)), rng.randrange(2, 10 ** rng.randrange(1, 5) + 2)
    op = rng.choice("+-**")
    expression = f"{a} {op} {b}"
    value = a + b if op == "+" else a - b if op == "-" else a * b
    user = one(rng, f"What is {expression}? Use the calculator.", f"Please calculate {expression} with the calculator.", f"Compute {expression} with your tool.", f"What is {expression}?")
    return (schema("calculator", "Evaluate an arithmetic expression.", expression=("string", "The expression")),
            user, f"I use the calculator for {expression}.", {"expression": expression}, {"result": value}, f"{expression} = {value}")


def lookup(rng: random.Random):
    who = zipf(rng, GIRLS + BOYS)
    what, value = rng.choice([("birthday", f"{rng.choice(['March', 'April', 'May', 'June', 'July'])} {rng.randrange(1, 29)}"), ("favorite food", rng.choice(FOODS)),
                              ("favorite color", rng.choice(COLORS)), ("city", rng.choice(CITIES)), ("phone number", str(rng.randrange(100000, 999999))), ("pet", rng.choice(ANIMALS))])
    user = one(rng, f"What is the {what} of {who}?", f"Look up the {what} of {who}.", f"Please find the {what} of {who}.")
    return (schema("lookup", "Look up a fact in the notebook.", query=("string", "What to look up")),
            user, f"I look up the {what} of {who}.", {"query": f"{what} of {who}"}, {"answer": value}, f"The {what} of {who} is {value}.")


def weather(rng: random.Random):
    city, unit = zipf(rng, CITIES), rng.choice(["celsius", "fahrenheit"])
    sky, t = zipf(rng, WEATHER), rng.randrange(-9, 40)
    user = one(rng, f"What is the weather in {city}? Use {unit}.", f"How is the weather in {city} in {unit}?")
    return (schema("get_weather", "Get the weather of a city.", city=("string", "The city"), unit=("string", "celsius or fahrenheit")),
            user, f"I ask for the weather in {city}.", {"city": city, "unit": unit}, {"temperature": t, "sky": sky}, f"It is {sky} in {city}, {t} degrees {unit}.")


def price(rng: random.Random):
    thing, n = zipf(rng, OBJECTS + FOODS), rng.randrange(1, 60)
    p = rng.randrange(2, 999)
    user = one(rng, f"What do {n} {plural(thing)} cost?", f"Tell me the price of {n} {plural(thing)}.")
    return (schema("get_price", "Get the price of some things in coins.", item=("string", "The thing, singular"), count=("integer", "How many")),
            user, f"I ask for the price of {n} {plural(thing)}.", {"item": thing, "count": n}, {"coins": p}, f"{n} {plural(thing)} cost {p} coins.")


def light(rng: random.Random):
    room, on, level = zipf(rng, PLACES), rng.random() < 0.6, rng.randrange(1, 101)
    user = f"Turn {'on' if on else 'off'} the light in the {room}, level {level}."
    return (schema("set_light", "Turn a light on or off.", place=("string", "Where"), on=("boolean", "On or off"), level=("integer", "1 to 100")),
            user, f"I turn the light in the {room} {'on' if on else 'off'}.", {"place": room, "on": on, "level": level}, {"ok": True}, f"The light in the {room} is {'on' if on else 'off'} now.")


def invented(rng: random.Random):
    """A tool with a random name and a random parameter name."""
    verb, noun = rng.choice(["find", "get", "check", "count", "read", "show", "ask"]), rng.choice(NOUNS)
    key = rng.choice(["name", "key", "id", "word", "item", "title", "label"])
    value, result = rng.choice(NOUNS), rng.choice([rng.choice(NOUNS), str(rng.randrange(1000))])
    name = f"{verb}_{noun}"
    user = one(rng, f"{capital(verb)} the {noun} of {value}.", f"Please {verb} the {noun} of {value}.", f"Use {name} for {value}.")
    return (schema(name, f"{capital(verb)} the {noun} of something.", **{key: ("string", "Which one")}),
            user, f"I use {name} for {value}.", {key: value}, {noun: result}, f"The {noun} of {value} is {result}.")


def add_numbers(rng: random.Random):
    """A list parameter, to show JSON values."""
    items = [rng.randrange(100) for _ in range(rng.randrange(2, 6))]
    text = ", ".join(map(str, items))
    return (schema("sum_list", "Add all numbers of a list.", numbers=("array", "The numbers")),
            one(rng, f"Add these numbers: {text}", f"What is the sum of {text}?"), "I use sum_list for these numbers.", {"numbers": items}, {"sum": sum(items)}, f"The sum is {sum(items)}.")


KINDS = [calculator, lookup, weather, price, light, invented, add_numbers]
WEIGHTS = [6, 4, 2, 2, 1, 7, 1]


def dialogue(rng: random.Random, small_talk, thinking: bool) -> list[dict]:
    """Messages of one to three requests; small_talk(rng) gives an exchange that needs no tool."""
    n = rng.choice([1, 1, 2, 3])
    plans = [rng.choices(KINDS, WEIGHTS)[0](rng) for _ in range(n)]
    tools = {p[0]["name"]: p[0] for p in plans}
    for _ in range(rng.randrange(0, 3)):
        extra = rng.choices(KINDS, WEIGHTS)[0](rng)[0]
        tools.setdefault(extra["name"], extra)
    order = list(tools.values())
    rng.shuffle(order)
    system = one(rng, "You are a helpful assistant.", "You are a helpful assistant with tools.", "Use the tools when they help.", "")
    messages = [{"role": "system", "content": system, "tools": order}]
    i = 0
    while i < n:
        if rng.random() < 0.15:
            e = small_talk(rng)
            messages += [{"role": "user", "content": e.user}, {"role": "assistant", "content": e.spoken(thinking), "reasoning": e.reasoning}]
        together = 2 if i + 1 < n and rng.random() < 0.25 else 1
        batch = plans[i:i + together]
        i += together
        messages.append({"role": "user", "content": " ".join(p[1] for p in batch)})
        messages.append({"role": "assistant", "content": "", "reasoning": " ".join(p[2] for p in batch),
                         "tool_calls": [{"name": p[0]["name"], "arguments": p[3]} for p in batch]})
        messages += [{"role": "tool", "content": json.dumps(p[4])} for p in batch]
        think = one(rng, "I have the result.", "The tool gave the answer.") if together == 1 else "I have both results."
        messages.append({"role": "assistant", "content": " ".join(p[5] for p in batch), "reasoning": think})
    return messages
