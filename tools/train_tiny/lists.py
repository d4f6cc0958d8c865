"""List tasks: sort, reverse, count, largest and smallest, first and last."""
import random

from exchange import Exchange
from words import ANIMALS, COLORS, FOODS, NOUNS, OBJECTS, one


def numbers(rng: random.Random) -> list[int]:
    return rng.sample(range(100), rng.randrange(3, 9))


def some_words(rng: random.Random) -> list[str]:
    return rng.sample(rng.choice([FOODS, ANIMALS, OBJECTS, COLORS, NOUNS]), rng.randrange(3, 8))


def join(items: list) -> str:
    return ", ".join(str(i) for i in items)


def sort(rng: random.Random) -> Exchange:
    if rng.random() < 0.3:
        items = some_words(rng)
        user = one(rng, f"Sort these words by the alphabet: {join(items)}", f"Put these words in alphabetical order: {join(items)}")
        done = sorted(items)
        steps = "I take the first word by the alphabet again and again.\n"
    else:
        items = numbers(rng)
        down = rng.random() < 0.25
        how = "from largest to smallest" if down else "from smallest to largest"
        user = one(rng, f"Sort these numbers {how}: {join(items)}", f"Sort {how}: {join(items)}")
        if not down and rng.random() < 0.5:
            user = one(rng, f"Sort these numbers: {join(items)}", f"Please sort this list: {join(items)}")
        done = sorted(items, reverse=down)
        steps = f"I take the {'largest' if down else 'smallest'} number again and again.\n"
    left = list(items)
    for x in done[:-1]:
        left.remove(x)
        steps += f"{x}, left: {join(left)}\n"
    steps += f"{done[-1]}"
    return Exchange("sort", user, steps, join(done), None, ("exact", join(done)))


def reverse(rng: random.Random) -> Exchange:
    items = some_words(rng) if rng.random() < 0.6 else numbers(rng)
    user = one(rng, f"Reverse this list: {join(items)}", f"Write this list backwards: {join(items)}")
    back = items[::-1]
    return Exchange("reverse", user, f"The last item is {back[0]}, so I start with it and go to the front.",
                    join(back), None, ("exact", join(back)))


def count(rng: random.Random) -> Exchange:
    items = some_words(rng)
    if rng.random() < 0.5:
        user = one(rng, f"How many words are in this list? {join(items)}", f"Count the items: {join(items)}")
        steps = join([f"{i + 1} {w}" for i, w in enumerate(items)])
        n, answer = len(items), f"There are {len(items)} items."
    else:
        word = rng.choice(items)
        items += [word] * rng.randrange(0, 4)
        rng.shuffle(items)
        user = f"How often does {word} appear in this list? {join(items)}"
        n, steps = 0, []
        for w in items:
            n += w == word
            steps.append(f"{w} {n}")
        steps, answer = join(steps), f"{word} appears {n} time{'s' if n > 1 else ''}."
    return Exchange("count", user, steps, answer, f"{steps}\n{answer}", ("final_number", str(n)))


def pick(rng: random.Random) -> Exchange:
    if rng.random() < 0.6:
        items = numbers(rng)
        word, f = rng.choice([("largest", max), ("smallest", min)])
        value = f(items)
        best, steps = items[0], [str(items[0])]
        for x in items[1:]:
            best = f(best, x)
            steps.append(f"{x} -> {best}")
        return Exchange("pick", one(rng, f"What is the {word} number in this list? {join(items)}", f"Find the {word} number: {join(items)}"),
                        join(steps), f"The {word} number is {value}.", None, ("final_number", str(value)))
    items = some_words(rng)
    word, at = rng.choice([("first", 0), ("second", 1), ("third", 2), ("last", -1)])
    return Exchange("pick", f"What is the {word} word in this list? {join(items)}", f"The {word} word is {items[at]}.",
                    f"The {word} word is {items[at]}.", None, ("contains", f"is {items[at]}"))


def draw(rng: random.Random) -> Exchange:
    return rng.choices([sort, reverse, count, pick], [4, 3, 3, 3])[0](rng)
