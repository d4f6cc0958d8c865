"""Dialogues with tools as programs hold them: adding tools and others under many names, schemas in several styles, and
results as numbers, floats, quoted text, sentences, objects of several keys, and errors.

What to do about an error: one that may pass (RETRY) is answered with the same call again, once. Otherwise the model says
what failed and does without the tool where it can.
"""
import json
import random
from dataclasses import dataclass, field

import arithmetic
from words import BOYS, CITIES, COLORS, FOODS, GIRLS, NOUNS, OBJECTS, PLACES, WEATHER, capital, one, plural, zipf

ADD = ["add", "sum", "plus", "add_numbers", "addition", "calculate_sum", "sum_numbers", "add_two_numbers", "math_add", "get_sum", "adder", "addNumbers", "Add", "compute_sum",
       "sum_of", "add_integers", "add_tool"]
SUBTRACT = ["subtract", "minus", "difference", "subtract_numbers", "sub", "math_subtract"]
MULTIPLY = ["multiply", "times", "product", "multiply_numbers", "mul", "math_multiply"]
PAIRS = [("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("num1", "num2"), ("n1", "n2"), ("first_number", "second_number"), ("augend", "addend"),
         ("number1", "number2"), ("p", "q"), ("one", "two"), ("value1", "value2"), ("lhs", "rhs")]
CALCULATORS = ["calculator", "calculate", "calc", "compute", "evaluate", "math", "arithmetic", "eval_expression"]
OPERATIONS = [("add", "subtract", "multiply"), ("+", "-", "*"), ("plus", "minus", "times"), ("sum", "difference", "product")]
TOWNS = CITIES + ["New York", "San Francisco", "Rio de Janeiro", "London", "Zurich", "San Francisco, CA", "Paris, France"]
VALUE_KEYS = ["result", "result", "sum", "answer", "value", "output", "total"]
EXTRAS = [("status", "ok"), ("ok", True), ("unit", None), ("success", True), ("cached", False), ("error", None), ("type", "number"), ("source", "tool"), ("version", 2)]

RETRY = ["service unavailable", "timeout", "connection refused", "server busy", "too many requests", "try again later", "network down", "temporary failure", "gateway timeout",
         "internal error", "connection lost", "rate limit reached"]
FINAL = ["not found", "permission denied", "unknown tool", "access denied", "invalid key", "not allowed", "quota exceeded", "no such method", "tool disabled", "bad request"]
SYSTEM = ["You are a helpful assistant.", "You are a helpful assistant with tools.", "Use the tools when they help.", "Be brief.", "You are an agent. Use the tools.",
          "Answer the question. Use the tools.", "You answer questions with the tools that you have.", "", "", ""]


@dataclass
class Task:
    """One request that a tool answers. facts: what it found, one value or several; sentences: the same as text.
    unknown: what is not known without it; own: how to do without it, step by step, or None."""
    tool: dict
    user: str
    thought: str
    arguments: dict
    facts: dict
    sentences: list[str]
    answer: str
    unknown: str
    own: str | None = None
    about: dict = field(default_factory=dict)  # what an object may say besides


def schema(rng: random.Random, name: str, description: str, params: dict[str, dict]) -> dict:
    """A function as clients write it: the order of keys, titles and strictness differ."""
    titles, told = rng.random() < 0.35, rng.random() < 0.6
    properties = {}
    for key, p in params.items():
        shown = {k: v for k, v in p.items() if told or k != "description"}
        if titles:
            shown = {"title": key.replace("_", " ").title(), **shown} if rng.random() < 0.5 else {**shown, "title": key.replace("_", " ").title()}
        properties[key] = shown
    parts = [("type", "object"), ("properties", properties), ("required", list(params))]
    if rng.random() < 0.5:
        parts = parts[1:] + parts[:1]
    if titles:
        parts.append(("title", one(rng, name, f"{name}_args")))
    if rng.random() < 0.4:
        parts.insert(one(rng, 0, len(parts)), ("additionalProperties", False))
    tool = {"name": name, "description": description, "parameters": dict(parts)}
    if rng.random() < 0.2:
        tool["strict"] = True
    return tool


def number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.choices([1, 2, 3, 4, 6], [1, 4, 6, 2, 1])[0])


def steps(a: int, op: str, b: int) -> str | None:
    """The written-out way, for what the model can do by itself."""
    if op == "+" and max(a, b) < 10000:
        return arithmetic.addition_steps(a, b)
    if op == "-" and 10000 > a >= b:
        return arithmetic.subtraction_steps(a, b)
    if op == "*" and max(a, b) < 100:
        return arithmetic.product_steps(a, b)
    return None


def asked(rng: random.Random, expression: str, name: str) -> str:
    text = arithmetic.ask(rng, expression) if rng.random() < 0.6 else f"What is {expression}?"
    r = rng.random()
    if r < 0.08:
        return f"{text} Use the {name} tool."
    if r < 0.16:
        return one(rng, f"Use {name}: {text}", f"{text} Use the tool.", f"{text} Use {name}.")
    return text


def wordings(rng: random.Random, a: str, op: str, b: str, value: float) -> list[str]:
    """Ways to say a result, most of which name the operands too, before or behind it."""
    who = one(rng, "The machine", "The program", "The service", "The function", "It", "My table", f"The {rng.choice(NOUNS)}")
    verb = rng.choice(["gives", "found", "has", "reports", "wrote", "says", "makes", "counted", "sends", "came to"])
    noun, mark = rng.choice(NOUNS), rng.choice([" = ", ": ", " is ", " -> ", ", ", " "])
    does = {"+": "added to", "-": "without", "*": "times"}[op]
    return [f"{who} {verb} {value}.", f"{who} {verb} {value}", f"{capital(noun)}{mark}{value}", f"{noun}{mark}{value}", f"{one(rng, 'yes', 'fine', 'well', 'done', 'here', 'good')}{mark}{value}",
            f"{a} {does} {b} {verb} {value}.", f"{a} {op} {b} {verb} {value}", f"{a} {one(rng, 'and', 'with', 'then', does)} {b}{mark}{value}", f"From {a} and {b} {who[0].lower()}{who[1:]} made {value}.",
            f"{value}{mark}{a} {op} {b}", f"{value} from {a} and {b}", f"{a}, {b}: {value}", f"{value} {noun}", f"We have {value} now.", f"I {verb} {value}!"]


def computed(rng: random.Random, tool: dict, expression: str, arguments: dict, value: float) -> Task:
    a, op, b = expression.split()
    word = {"+": "sum", "-": "difference", "*": "product"}[op]
    own = None if "." in expression else steps(int(a), op, int(b))
    sentences = [f"The {word} is {value}.", f"{expression} = {value}", f"Result: {value}", f"The result is {value}.", f"The answer is {value}", f"The {word} of {a} and {b} is {value}.",
                 f"result={value}", f"{value} is the {word}.", f"Done. The {word} is {value}", f"Calculated {value}", f"The result of {expression} is {value}.", f"Answer: {value}",
                 f"The tool says {value}.", f"It is {value}.", f"Here is the {word}: {value}", f"<result>{value}</result>",
                 *wordings(rng, a, op, b, value)]
    return Task(tool, asked(rng, expression, tool["name"]), one(rng, f"I use {tool['name']} for {expression}.", f"The tool {tool['name']} can do this."), arguments,
                {rng.choice(VALUE_KEYS + [word]): value}, sentences, f"{expression} = {value}", expression, own, {"expression": expression, "a": float(a) if "." in a else int(a)})


def operands(rng: random.Random, op: str) -> tuple[float, float, float]:
    """Two numbers and what they make; now and then with decimals."""
    if rng.random() < 0.08 and op == "+":
        a, b = rng.randrange(10, 9999), rng.randrange(10, 9999)
        return a / 100, b / 100, (a + b) / 100
    a, b = number(rng), number(rng)
    if op == "*":
        a, b = a % 1000, b % 100
    if op == "-":
        a, b = max(a, b), min(a, b)
    return a, b, a + b if op == "+" else a - b if op == "-" else a * b


def pair_tool(rng: random.Random, op: str = "+", names: list[str] | None = None, pairs=PAIRS) -> Task:
    """A function of two numbers."""
    a, b, value = operands(rng, op)
    names = names or {"+": ADD, "-": SUBTRACT, "*": MULTIPLY}[op]
    verb, does = {"+": ("Add", "Adds"), "-": ("Subtract", "Subtracts"), "*": ("Multiply", "Multiplies")}[op]
    name, (p, q) = rng.choice(names), rng.choice(pairs)
    if rng.random() < 0.1:
        name = f"{rng.choice(NOUNS)}_{name.lower()}"
    kind = one(rng, "integer", "number") if isinstance(a, int) else "number"
    about = one(rng, f"{verb} two numbers.", f"{does} two numbers.", f"{verb} two numbers and return the result.", f"{does} {p} and {q}.", f"{verb} two {kind}s.", f"{verb} {p} and {q}")
    tool = schema(rng, name, about, {p: {"type": kind, "description": one(rng, "The first number", "First number.", "a number")},
                                     q: {"type": kind, "description": one(rng, "The second number", "Second number.", "a number")}})
    return computed(rng, tool, f"{a} {op} {b}", {p: a, q: b}, value)


def word(rng: random.Random) -> str:
    """A name that no list has: nouns joined, letters, syllables, or what programs make of these."""
    r = rng.random()
    if r < 0.3:
        nouns = rng.sample(NOUNS, 2)
        return one(rng, "_".join(nouns), nouns[0] + capital(nouns[1]), nouns[0])
    if r < 0.5:
        return one(rng, rng.choice("abcdefghijklmnopqrstuvwxyz"), rng.choice("abcdefghijklmnopqrstuvwxyz") + str(rng.randrange(10)), rng.choice(NOUNS)[:rng.randrange(2, 6)] + str(rng.randrange(10)))
    stem = "".join(rng.choice(["", *"bcdfghklmnprstvwxz", "st", "tr", "pl", "cr", "sh", "th"]) + rng.choice(["a", "e", "i", "o", "u", "al", "er", "in", "on", "um", "ate", "ease", "ine", "and"])
                   for _ in range(rng.randrange(1, 4)))
    if r < 0.75:
        stem = one(rng, rng.choice(NOUNS), stem)
        tail = rng.choice(["it", "up", "all", "two", "both", "them", "one", "now", "of", "off", "in", "on"])
        return one(rng, f"{stem}_{tail}", f"{stem}{capital(tail)}", f"{tail}_{stem}", f"{tail}{capital(stem)}", f"{stem}{rng.randrange(10)}")
    return stem + one(rng, "", "", "", str(rng.randrange(10)), "_" + rng.choice(NOUNS))


def pair_of(rng: random.Random) -> tuple[str, str]:
    """Names of two numbers: alike but for a mark, neighbors in the alphabet, or unrelated."""
    r, stem = rng.random(), word(rng)
    if r < 0.2 and len(stem) > 1:
        marks = one(rng, ("1", "2"), ("_1", "_2"), ("_a", "_b"), ("_one", "_two"), ("A", "B"), ("_left", "_right"), ("0", "1"))
        return stem + marks[0], stem + marks[1]
    if r < 0.3:
        first = rng.choice("acdefghjkoqrstwxy")  # the evaluation has the others
        return first, chr(ord(first) + 1)
    other = word(rng)
    return (stem, other) if stem != other else rng.choice(PAIRS)


def renamed_pair(rng: random.Random) -> Task:
    """A function whose names say nothing, so that they have to be read from the schema."""
    names = [word(rng)] if rng.random() < 0.7 else ADD
    return pair_tool(rng, "+", names, [pair_of(rng)])


def other_pair(rng: random.Random) -> Task:
    return pair_tool(rng, rng.choice("-*"))


def operation_tool(rng: random.Random) -> Task:
    """A calculator that is told the operation."""
    op = rng.choice("++-*")
    a, b, value = operands(rng, op)
    words, (p, q) = rng.choice(OPERATIONS), rng.choice(PAIRS)
    key = rng.choice(["op", "operation", "operator"])
    kind = one(rng, "integer", "number") if isinstance(a, int) else "number"
    choice = {"type": "string", "enum": list(words)} if rng.random() < 0.7 else {"type": "string", "description": f"{words[0]}, {words[1]} or {words[2]}"}
    params, first = {p: {"type": kind}, q: {"type": kind}}, rng.random() < 0.5
    params = {key: choice, **params} if first else {**params, key: choice}
    arguments = {p: a, q: b, key: words["+-*".index(op)]}
    tool = schema(rng, rng.choice(CALCULATORS), one(rng, "Calculate with two numbers.", "A calculator.", "Do arithmetic.", "Performs an arithmetic operation."), params)
    if "enum" not in choice:
        tool["parameters"]["properties"][key]["description"] = choice["description"]
    return computed(rng, tool, f"{a} {op} {b}", {k: arguments[k] for k in params}, value)


def expression_tool(rng: random.Random) -> Task:
    op = rng.choice("++-*")
    a, b, value = operands(rng, op)
    key = rng.choice(["expression", "expression", "expr", "formula", "query", "input", "text"])
    tool = schema(rng, rng.choice(CALCULATORS), one(rng, "Evaluate an arithmetic expression.", "Evaluates an arithmetic expression.", "A calculator.", "Calculate an expression."),
                  {key: {"type": "string", "description": one(rng, "The expression", "What to calculate")}})
    return computed(rng, tool, f"{a} {op} {b}", {key: f"{a} {op} {b}"}, value)


def list_tool(rng: random.Random) -> Task:
    items = [rng.randrange(10 ** rng.randrange(1, 4)) for _ in range(rng.randrange(2, 6))]
    text, total = ", ".join(map(str, items)), sum(items)
    key = rng.choice(["numbers", "values", "items", "list", "nums", "terms"])
    tool = schema(rng, rng.choice(["sum_all", "add_all", "total", "sum_values", "add_list"]), one(rng, "Add all numbers of a list.", "The sum of a list.", "Sums numbers."),
                  {key: {"type": "array", "items": {"type": one(rng, "integer", "number")}, "description": "The numbers"}})
    return Task(tool, one(rng, f"Add these numbers: {text}", f"What is the sum of {text}?", f"Sum up {text}."), f"I use {tool['name']} for these numbers.", {key: items}, {rng.choice(VALUE_KEYS): total},
                [f"The sum is {total}.", f"The total is {total}", f"Sum: {total}", f"{len(items)} numbers, sum {total}"], f"The sum is {total}.", "the sum", None, {"count": len(items)})


def weather(rng: random.Random) -> Task:
    city, sky, t = rng.choice(TOWNS), zipf(rng, WEATHER), rng.randrange(-9, 40)
    key = rng.choice(["city", "city", "location", "place", "town"])
    params, arguments = {key: {"type": "string", "description": one(rng, "The city", "Name of the city")}}, {key: city}
    user = one(rng, f"What is the weather in {city}?", f"How is the weather in {city}?", f"What's the weather like in {city} today?", f"Tell me the weather in {city}.", f"weather in {city}")
    if rng.random() < 0.25:
        unit = rng.choice(["celsius", "fahrenheit"])
        params["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        arguments["unit"], user = unit, f"{user.rstrip('?.')} in {unit}?"
    tool = schema(rng, rng.choice(["get_weather", "get_weather", "weather", "current_weather", "get_current_weather", "forecast", "weather_lookup"]),
                  one(rng, "Get the weather of a city.", "Get the current weather in a city.", "The weather somewhere."), params)
    sentences = [f"It is {sky} in {city}, {t} degrees.", f"{sky}, {t} degrees", f"{capital(sky)}, {t}°C", f"{t} degrees and {sky}", f"The weather in {city} is {sky}, {t} degrees.", f"{city}: {sky}, {t}C"]
    facts = {"temperature": t, rng.choice(["sky", "condition", "weather", "conditions"]): sky}
    return Task(tool, user, f"I ask for the weather in {city}.", arguments, facts, sentences, f"It is {sky} in {city}, {t} degrees.", f"the weather in {city}", None,
                {key: city, "humidity": rng.randrange(20, 100), "wind": rng.randrange(60)})


def lookup(rng: random.Random) -> Task:
    """A search with a free text, answered with a fact."""
    who = zipf(rng, GIRLS + BOYS)
    what, value = rng.choice([("birthday", f"{rng.choice(['March', 'April', 'May', 'June', 'July'])} {rng.randrange(1, 29)}"), ("favorite food", rng.choice(FOODS)),
                              ("favorite color", rng.choice(COLORS)), ("city", rng.choice(CITIES)), ("phone number", str(rng.randrange(100000, 999999))), ("age", str(rng.randrange(5, 90)))])
    key = rng.choice(["query", "q", "question", "search", "text"])
    tool = schema(rng, rng.choice(["search", "lookup", "find", "web_search", "search_notes", "query"]), one(rng, "Search for a fact.", "Look something up.", "Search the notes."),
                  {key: {"type": "string", "description": "What to look for"}})
    return Task(tool, one(rng, f"What is the {what} of {who}?", f"Look up the {what} of {who}.", f"Find the {what} of {who}."), f"I look up the {what} of {who}.", {key: f"{what} of {who}"},
                {rng.choice(["answer", "result", "text", "value"]): value}, [f"The {what} of {who} is {value}.", f"{who}: {what} {value}", f"{capital(what)}: {value}", f"Found: {value}"],
                f"The {what} of {who} is {value}.", f"the {what} of {who}", None, {"name": who, "score": rng.randrange(100)})


def price(rng: random.Random) -> Task:
    thing, p = zipf(rng, OBJECTS + FOODS), rng.randrange(2, 999)
    key = rng.choice(["item", "product", "name", "thing"])
    tool = schema(rng, rng.choice(["get_price", "price_of", "price", "lookup_price"]), one(rng, "Get the price of a thing.", "The price of an item in coins."), {key: {"type": "string"}})
    return Task(tool, one(rng, f"What does the {thing} cost?", f"How much is the {thing}?", f"Tell me the price of the {thing}."), f"I ask for the price of the {thing}.", {key: thing}, {rng.choice(["price", "coins", "cost", "result"]): p},
                [f"The {thing} costs {p} coins.", f"Price: {p}", f"{p} coins", f"The price is {p}."], f"The {thing} costs {p} coins.",
                f"the price of the {thing}", None, {key: thing, "stock": rng.randrange(100)})


def sentence(rng: random.Random) -> str:
    """Something to send, to note or to translate."""
    who, thing, place = zipf(rng, GIRLS + BOYS), zipf(rng, OBJECTS + FOODS), zipf(rng, PLACES)
    return one(rng, f"I am at the {place}", f"Bring the {rng.choice(COLORS)} {thing}", f"Meet me at {rng.randrange(1, 12)}", f"{who} has the {thing}", f"Buy {rng.randrange(2, 30)} {plural(thing)}",
               f"The {thing} is in the {place}", " ".join(rng.sample(NOUNS, rng.randrange(2, 6))), f"Dear {who}, thank you for the {thing}!")


def message(rng: random.Random) -> Task:
    """Tools that take a whole sentence as a string."""
    text, who = sentence(rng), zipf(rng, GIRLS + BOYS)
    note = rng.random() < 0.4
    name = rng.choice(["write_note", "save_note", "add_note", "note"] if note else ["send_message", "send_email", "send", "notify"])
    body = rng.choice(["text", "body", "message", "content"])
    params, arguments = {body: {"type": "string", "description": "The text"}}, {body: text}
    if not note:
        to = rng.choice(["to", "recipient", "name"])
        params, arguments = {to: {"type": "string"}, **params}, {to: who, **arguments}
    user = one(rng, f"Write a note: {text}", f"Note this: {text}") if note else one(rng, f"Send {who} this message: {text}", f"Tell {who}: {text}", f"Write to {who}: {text}")
    tool = schema(rng, name, "Keep a note." if note else "Send a message to somebody.", params)
    said = "I wrote the note." if note else f"I sent the message to {who}."
    return Task(tool, user, "I write the note." if note else f"I send this to {who}.", arguments, {rng.choice(["status", "result"]): "ok"}, ["ok", "OK", "done", "Sent." if not note else "Saved.", "success"],
                said, "what happened to the note" if note else "what happened to the message", None, {"id": rng.randrange(1000)})


def clock(rng: random.Random) -> Task:
    city, time = rng.choice(TOWNS), f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    key = rng.choice(["city", "timezone", "place", "location"])
    tool = schema(rng, rng.choice(["get_time", "current_time", "time_in", "clock"]), one(rng, "Get the time in a city.", "What time it is somewhere."), {key: {"type": "string"}})
    return Task(tool, one(rng, f"What time is it in {city}?", f"Tell me the time in {city}."), f"I ask for the time in {city}.", {key: city}, {rng.choice(["time", "result", "now"]): time},
                [f"It is {time} in {city}.", time, f"The time is {time}.", f"Now: {time}"], f"It is {time} in {city}.", f"the time in {city}", None, {key: city})


def invented(rng: random.Random) -> Task:
    """Random names of the tool, of its parameter and of what comes back."""
    verb, noun = rng.choice(["find", "get", "check", "count", "read", "show", "ask", "fetch"]), rng.choice(NOUNS)
    key = rng.choice(["name", "key", "id", "word", "item", "title", "label"] + NOUNS[:100])
    value, result = rng.choice(NOUNS), rng.choice([rng.choice(NOUNS), str(rng.randrange(1000)), " ".join(rng.sample(NOUNS, 2))])
    name = one(rng, f"{verb}_{noun}", f"{verb}{capital(noun)}", noun)
    tool = schema(rng, name, f"{capital(verb)} the {noun} of something.", {key: {"type": "string", "description": "Which one"}})
    return Task(tool, one(rng, f"{capital(verb)} the {noun} of {value}.", f"What is the {noun} of {value}?", f"Use {name} for {value}."), f"I use {name} for {value}.", {key: value}, {rng.choice([noun, "result", "value"]): result}, [f"The {noun} of {value} is {result}.", f"{noun}: {result}", f"{value} has {noun} {result}", f"Found {result}"],
                f"The {noun} of {value} is {result}.", f"the {noun} of {value}", None, {key: value, "count": rng.randrange(100)})


KINDS = [pair_tool, renamed_pair, other_pair, operation_tool, expression_tool, list_tool, weather, lookup, price, message, clock, invented]
WEIGHTS = [10, 24, 5, 7, 6, 3, 5, 4, 3, 6, 2, 6]
SUMS = [pair_tool, pair_tool, operation_tool, expression_tool]
STRINGS = [weather, lookup, price, message, clock, invented]
FORMS = ["bare", "float", "quoted", "text", "object", "wrapped"]
FORM_WEIGHTS = [4, 4, 4, 10, 7, 1]


def result(rng: random.Random, task: Task, form: str) -> str:
    """What the tool sends back."""
    (key, value), several = next(iter(task.facts.items())), len(task.facts) > 1
    if form == "text" or several and form in ("bare", "float", "quoted"):
        return rng.choice(task.sentences)
    if form == "bare":
        return str(value) + ("\n" if rng.random() < 0.1 else "")
    if form == "float":
        return str(float(value)) if isinstance(value, (int, float)) else str(value)
    if form == "quoted":
        return one(rng, f'"{value}"', f'"{value}"', f"'{value}'")
    if form == "wrapped":
        return json.dumps([{"type": "text", "text": rng.choice(task.sentences + ([] if several else [str(value)]))}], ensure_ascii=False)
    facts = dict(task.facts)
    if rng.random() < 0.15 and not several:
        facts[key] = str(value) if rng.random() < 0.5 or not isinstance(value, int) else float(value)
    more = [e for e in rng.sample(EXTRAS, rng.randrange(0, 3)) if e[0] not in facts]
    more += [e for e in task.about.items() if rng.random() < 0.5 and e[0] not in facts]
    pairs = list(facts.items()) + more
    rng.shuffle(pairs)
    shape = rng.random()
    if shape < 0.08:
        return json.dumps({"data": dict(pairs)}, ensure_ascii=False)
    if shape < 0.16:
        return str(dict(pairs))
    return json.dumps(dict(pairs), ensure_ascii=False, **one(rng, {}, {}, {}, {"separators": (",", ":")}, {"indent": 2}))


def error(rng: random.Random, reason: str) -> str:
    """What comes back when the tool fails."""
    return one(rng, f"error: {reason}", f"error: {reason}", f"Error: {reason}", f"ERROR: {reason}", f"Tool error: {reason}", f"Exception: {reason}", f"The tool failed: {reason}.",
               f"Error {rng.randrange(400, 505)}: {reason}", f"RuntimeError('{reason}')", f"An error occurred: {reason}", f"failed: {reason}", json.dumps({"error": reason}),
               json.dumps({"ok": False, "error": reason}), json.dumps({"status": "error", "message": reason}), json.dumps({"error": {"message": reason, "code": rng.randrange(400, 505)}}))


def reason_to_stop(rng: random.Random) -> str:
    return rng.choice(FINAL) if rng.random() < 0.7 else " ".join(rng.sample(NOUNS, 2))


def call(tasks: list[Task], thought: str) -> dict:
    return {"role": "assistant", "content": "", "reasoning": thought, "tool_calls": [{"name": t.tool["name"], "arguments": t.arguments} for t in tasks]}


def tool_says(text: str) -> dict:
    return {"role": "tool", "content": text}


def without_the_tool(task: Task, reason: str, shown: bool) -> dict:
    """The answer after a failure; shown: thoughts are written, so the steps go there."""
    failed = f"The tool failed: {reason}."
    if not task.own:
        return {"role": "assistant", "content": f"{failed} I do not know {task.unknown}.", "reasoning": "The tool failed."}
    if shown:
        return {"role": "assistant", "content": f"{failed} {task.answer}", "reasoning": f"The tool failed, so I calculate.\n{task.own}"}
    return {"role": "assistant", "content": f"{failed} I calculate it myself.\n{task.own}", "reasoning": ""}


def answered(rng: random.Random, task: Task, shown: bool) -> list[dict]:
    """From the first call to the answer, with or without failures."""
    messages = [call([task], task.thought)]
    r = rng.random()
    if r < 0.08:
        reason = reason_to_stop(rng)
        return messages + [tool_says(error(rng, reason)), without_the_tool(task, reason, shown)]
    if r < 0.2:
        reason = rng.choice(RETRY)
        messages += [tool_says(error(rng, reason)), call([task], "The tool failed, I try again.")]
        if rng.random() < 0.4:
            return messages + [tool_says(error(rng, reason)), without_the_tool(task, reason, shown)]
    form = rng.choices(FORMS, FORM_WEIGHTS)[0]
    return messages + [tool_says(result(rng, task, form)), {"role": "assistant", "content": task.answer, "reasoning": one(rng, "I have the result.", "The tool gave the answer.")}]


def calculates(task: Task) -> bool:
    return " = " in task.answer or task.answer.startswith("The sum")


def offered(rng: random.Random, tasks: list[Task], more: int) -> list[dict]:
    """The tools of the tasks and up to `more` others, which never calculate, in any order."""
    tools = {t.tool["name"]: t.tool for t in tasks}
    for _ in range(more):
        extra = rng.choice(STRINGS)(rng).tool
        tools.setdefault(extra["name"], extra)
    order = list(tools.values())
    rng.shuffle(order)
    return order


def arithmetic_family(rng: random.Random) -> list[Task]:
    """A question beside the tools for other operations: add, subtract and multiply side by side."""
    pairs = [rng.choice(PAIRS)]
    tasks = [pair_tool(rng, op, [names[i]], pairs) for i in [rng.randrange(6)] for op, names in (("+", ADD), ("-", SUBTRACT), ("*", MULTIPLY))]
    rng.shuffle(tasks)
    return tasks


def begun(rng: random.Random, tools: list[dict]) -> dict:
    return {"role": "system", "content": rng.choice(SYSTEM), "tools": tools}


def dialogue(rng: random.Random, small_talk, shown: bool, thinking: bool) -> list[dict]:
    """Messages of one to four requests; shown: thoughts beside calls are written."""
    if rng.random() < 0.2:
        tasks = arithmetic_family(rng)
        messages = [begun(rng, offered(rng, tasks, rng.randrange(0, 2)))]
        tasks = tasks[:rng.randrange(1, 4)]
    else:
        tasks, names = [], set()
        for _ in range(rng.choice([1, 2, 2, 3])):
            t = rng.choices(KINDS, WEIGHTS)[0](rng)
            if t.tool["name"] not in names and not (calculates(t) and any(map(calculates, tasks))):
                tasks.append(t)
                names.add(t.tool["name"])
        messages = [begun(rng, offered(rng, tasks, rng.randrange(0, 4)))]
    alone = not any(map(calculates, tasks))  # nothing here adds, so a sum is done without tools
    while tasks:
        if rng.random() < 0.12:
            e = arithmetic.draw(rng) if alone and rng.random() < 0.4 else small_talk(rng)
            messages += [{"role": "user", "content": e.user}, {"role": "assistant", "content": e.spoken(thinking), "reasoning": e.reasoning}]
        if len(tasks) > 1 and rng.random() < 0.15:
            both, tasks = tasks[:2], tasks[2:]
            messages += [{"role": "user", "content": " ".join(t.user for t in both)}, call(both, " ".join(t.thought for t in both))]
            messages += [tool_says(result(rng, t, rng.choices(FORMS, FORM_WEIGHTS)[0])) for t in both]
            messages.append({"role": "assistant", "content": " ".join(t.answer for t in both), "reasoning": "I have both results."})
            continue
        task = tasks.pop(0)
        messages += [{"role": "user", "content": task.user}, *answered(rng, task, shown)]
    return messages
