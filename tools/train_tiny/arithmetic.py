"""Sums with the steps written out digit by digit: addition, subtraction, products, comparisons, word problems.

Every step names its place (ones, tens, ...), so the model never has to count columns; the
carry is written as a term of the next line.
"""
import random

from exchange import Exchange
from words import BOYS, FOODS, GIRLS, OBJECTS, one, plural, zipf

PLACES = ["ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands"]


def number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10 ** digits)


def digit(x: int, place: int) -> int:
    return x // 10 ** place % 10


def addition_steps(a: int, b: int) -> str:
    """Column addition, the last line states the sum."""
    lines, carry = [f"{a} + {b}"], 0
    width = max(len(str(a)), len(str(b)))
    for i in range(width):
        x, y = digit(a, i), digit(b, i)
        s = x + y + carry
        terms = f"{x} + {y}" + (f" + {carry}" if i else "")
        lines.append(f"{PLACES[i]}: {terms} = {s}, write {s % 10}, carry {s // 10}")
        carry = s // 10
    if carry:
        lines.append(f"{PLACES[width]}: write {carry}")
    return "\n".join(lines) + f"\nSo {a} + {b} = {a + b}"


def subtraction_steps(a: int, b: int) -> str:
    """Column subtraction for a >= b."""
    lines, borrow = [f"{a} - {b}"], 0
    for i in range(len(str(a))):
        x, y = digit(a, i), digit(b, i) + borrow
        text = f"{x} - {digit(b, i)}" + (f" - {borrow}" if i else "")
        if x < y:
            lines.append(f"{PLACES[i]}: {text} is below 0, add 10, write {x + 10 - y}, borrow 1")
            borrow = 1
        else:
            lines.append(f"{PLACES[i]}: {text} = {x - y}, write {x - y}, borrow 0")
            borrow = 0
    return "\n".join(lines) + f"\nSo {a} - {b} = {a - b}"


def row_steps(a: int, d: int) -> list[str]:
    """a times one digit."""
    lines, carry = [f"{a} * {d}"], 0
    for i in range(len(str(a))):
        s = digit(a, i) * d + carry
        terms = f"{digit(a, i)} * {d}" + (f" + {carry}" if i else "")
        lines.append(f"{PLACES[i]}: {terms} = {s}, write {s % 10}, carry {s // 10}")
        carry = s // 10
    if carry:
        lines.append(f"{PLACES[len(str(a))]}: write {carry}")
    lines.append(f"So {a} * {d} = {a * d}")
    return lines


def product_steps(a: int, b: int) -> str:
    """Long multiplication with at most two digits in b."""
    if b < 10:
        return "\n".join(row_steps(a, b))
    low, high = b % 10, b // 10
    lines = [f"{a} * {b} = {a} * {high}0 + {a} * {low}"] + row_steps(a, low) + row_steps(a, high)
    lines.append(f"So {a} * {high}0 = {a * high}0")
    lines.append(addition_steps(a * high * 10, a * low))
    return "\n".join(lines) + f"\nSo {a} * {b} = {a * b}"


def ask(rng: random.Random, expression: str) -> str:
    r = rng.random()
    e = expression
    if r < 0.1:
        e = e.replace(" ", "")
    elif r < 0.25:
        e = e.replace("+", "plus").replace("-", "minus").replace("*", "times")
    elif r < 0.3:
        e = e.replace("*", "x")
    a, sign, b = expression.split()
    if sign == "+" and rng.random() < 0.1:
        return one(rng, f"Add {a} and {b}.", f"What is the sum of {a} and {b}?")
    if sign == "*" and rng.random() < 0.1:
        return one(rng, f"Multiply {a} by {b}.", f"What is the product of {a} and {b}?")
    return one(rng, f"What is {e}?", f"What is {e}?", f"Calculate {e}.", f"{e} = ?", f"How much is {e}?", f"{e}",
               f"Please compute {e}.", f"Can you work out {e}?", f"what is {e}", f"What's {e}?", f"{e}=")


def computed(rng: random.Random, task: str, expression: str, value: int, steps: str) -> Exchange:
    last = f"{expression} = {value}"
    return Exchange(task, ask(rng, expression), steps, last, steps, ("final_number", str(value)))


def addition(rng: random.Random, digits: int | None = None) -> Exchange:
    if digits is None:
        n, m = rng.choices([1, 2, 3, 4], [1, 3, 5, 2], k=2)
    else:
        n = m = digits
    a, b = number(rng, n), number(rng, m)
    return computed(rng, "addition", f"{a} + {b}", a + b, addition_steps(a, b))


def subtraction(rng: random.Random) -> Exchange:
    a, b = number(rng, rng.choice([2, 3, 3, 4])), number(rng, rng.choice([1, 2, 3]))
    a, b = max(a, b), min(a, b)
    return computed(rng, "subtraction", f"{a} - {b}", a - b, subtraction_steps(a, b))


def product(rng: random.Random, digits: int | None = None) -> Exchange:
    n, m = (digits, digits) if digits else (rng.choice([1, 2, 2, 2]), rng.choice([1, 2, 2]))
    a, b = number(rng, n), number(rng, m)
    if a < 10 <= b:
        a, b = b, a
    return computed(rng, "product", f"{a} * {b}", a * b, product_steps(a, b))


def compare_steps(a: int, b: int) -> str:
    n, m = len(str(a)), len(str(b))
    if n != m:
        return f"{a} has {n} digits and {b} has {m} digits. So {max(a, b)} is larger."
    lines = [f"Both numbers have {n} digits."]
    for i in reversed(range(n)):
        x, y = digit(a, i), digit(b, i)
        sign = ">" if x > y else "<" if x < y else "="
        lines.append(f"{PLACES[i]}: {x} {sign} {y}")
        if x != y:
            break
    lines.append("So they are equal." if a == b else f"So {max(a, b)} is larger.")
    return "\n".join(lines)


def comparison(rng: random.Random) -> Exchange:
    a = number(rng, rng.choice([1, 2, 3, 4]))
    b = number(rng, len(str(a))) if rng.random() < 0.7 else number(rng, rng.choice([1, 2, 3, 4]))
    if rng.random() < 0.3 and a > 9:
        b = a // 10 * 10 + rng.randrange(10)
    if a == b:
        b += 1
    larger = rng.random() < 0.6
    word = "larger" if larger else "smaller"
    user = one(rng, f"Which is {word}, {a} or {b}?", f"Which number is {word}: {a} or {b}?")
    value = max(a, b) if larger else min(a, b)
    steps = compare_steps(a, b) + ("" if larger else f" So {value} is smaller.")
    return Exchange("comparison", user, steps, f"{value} is {word}.", None, ("contains", f"{value} is {word}"))


def word_problem(rng: random.Random) -> Exchange:
    boy = rng.random() < 0.5
    who, it = zipf(rng, BOYS if boy else GIRLS), "he" if boy else "she"
    other = zipf(rng, GIRLS if boy else BOYS)
    thing = plural(zipf(rng, FOODS if rng.random() < 0.5 else OBJECTS))
    a, b = number(rng, rng.choice([1, 2, 2, 3])) + 2, number(rng, rng.choice([1, 2, 2, 3])) + 2
    kind = rng.randrange(4)
    if kind == 0:
        user = f"{who} has {a} {thing}. {other} gives {who} {b} more. How many {thing} does {who} have now?"
        think, value = f"{who} starts with {a} and gets {b} more, so I add.\n" + addition_steps(a, b), a + b
    elif kind == 1:
        a, b = max(a, b), min(a, b)
        user = f"{who} has {a} {thing} and gives {b} of them to {other}. How many {thing} does {who} have left?"
        think, value = f"{who} starts with {a} and gives away {b}, so I subtract.\n" + subtraction_steps(a, b), a - b
    elif kind == 2:
        user = f"{who} finds {a} {thing} in the morning and {b} {thing} in the evening. How many {thing} does {it} find in all?"
        think, value = f"{it.capitalize()} finds {a} and then {b}, so I add.\n" + addition_steps(a, b), a + b
    else:
        a, b = rng.randrange(2, 10), rng.randrange(2, 30)
        user = f"{who} has {a} boxes with {b} {thing} in each box. How many {thing} does {who} have in all?"
        think, value = f"There are {a} boxes with {b} each, so I multiply.\n" + product_steps(b, a), a * b
    verb = "has" if kind != 2 else "finds"
    tail = {0: "now", 1: "left", 2: "in all", 3: "in all"}[kind]
    answer = f"{who} {verb} {value} {thing} {tail}."
    return Exchange("word_problem", user, think, answer, think + "\n" + answer, ("final_number", str(value)))


def draw(rng: random.Random) -> Exchange:
    """One arithmetic exchange, addition most often."""
    kind = rng.choices([addition, subtraction, product, comparison, word_problem], [45, 12, 18, 10, 15])[0]
    return kind(rng)
