"""Small stories from a grammar, with characters and facts that stay the same, and questions about them.

A story is planned first (who, what they want, who helps, how it ends) and then told; the
questions ask for the plan, so every answer is in the text.
"""
import random
from dataclasses import dataclass

from exchange import Exchange
from words import (ANIMALS, BOYS, COLORS, FOODS, GIRLS, OBJECTS, PLACES, TRAITS, WEATHER, a, capital, one, zipf)


@dataclass
class Person:
    name: str
    kind: str       # "girl", "boy" or an animal
    trait: str
    it: str         # she, he
    them: str       # her, him
    its: str        # her, his


def person(rng: random.Random, taken: set[str], animal: bool | None = None) -> Person:
    girl = rng.random() < 0.5
    name = zipf(rng, GIRLS if girl else BOYS)
    while name in taken:
        name = one(rng, *(GIRLS if girl else BOYS))
    taken.add(name)
    if animal is None:
        animal = rng.random() < 0.5
    kind = zipf(rng, ANIMALS) if animal else ("girl" if girl else "boy")
    words = ("she", "her", "her") if girl else ("he", "him", "his")
    return Person(name, kind, zipf(rng, TRAITS), *words)


@dataclass
class Story:
    text: str
    facts: list[tuple[str, str]]   # question, answer
    hero: Person
    topic: str


def opening(rng: random.Random, h: Person, home: str) -> str:
    first = one(rng, "Once upon a time", "Long ago", "One day", "Many years ago")
    who = f"{a(h.trait)} {h.kind} named {h.name}"
    if first == "One day":
        return f"There was once {who}. {h.name} lived near the {home}."
    return one(rng, f"{first}, there was {who}. {h.name} lived near the {home}.",
               f"{first}, {who} lived near the {home}.",
               f"{first}, near a {home}, there lived {who}.")


def lost_and_found(rng: random.Random) -> Story:
    taken: set[str] = set()
    h, f = person(rng, taken), person(rng, taken)
    home, place = rng.sample(PLACES, 2)
    color, thing = zipf(rng, COLORS), zipf(rng, OBJECTS)
    spot = one(rng, "under a stone", "behind a tree", "in the tall grass", "under a bench", "next to an old wall", "inside a hollow log")
    reward = zipf(rng, FOODS)
    item = f"{color} {thing}"
    text = [opening(rng, h, home)]
    text.append(one(rng, f"{capital(h.it)} had {a(item)} and loved it very much.",
                    f"{capital(h.its)} favorite thing was {a(item)}."))
    day = zipf(rng, WEATHER)
    text.append(one(rng, f"One {day} morning, {h.name} went to the {place} and lost the {thing}.",
                    f"On a {day} day, {h.it} walked to the {place}. When {h.it} came home, the {thing} was gone."))
    text.append(one(rng, f"{h.name} was very sad and looked everywhere.", f"{capital(h.it)} searched and searched, but {h.it} could not find it.",
                    f"{h.name} sat down and cried."))
    text.append(one(rng, f"Then {f.name} the {f.trait} {f.kind} came along." if f.kind not in ("girl", "boy") else f"Then {a(f.trait)} {f.kind} named {f.name} came along.",
                    f"Soon {h.name} met {a(f.trait)} {f.kind} named {f.name}."))
    text.append(one(rng, f'"Why are you sad?" asked {f.name}. "I lost my {thing}," said {h.name}.',
                    f'"What is wrong?" {f.name} asked. "My {item} is gone," {h.name} said.'))
    text.append(one(rng, f'"I will help you," said {f.name}.', f'"Do not worry. We will find it together," said {f.name}.'))
    text.append(one(rng, f"They went back to the {place} and looked {spot}.", f"Together they walked to the {place}. {f.name} looked {spot}."))
    text.append(one(rng, f"There it was! The {thing} was {spot}.", f"And there was the {item}, {spot}!"))
    text.append(one(rng, f"{h.name} was so happy that {h.it} gave {f.name} {a_food(reward)}.", f'"Thank you!" said {h.name}, and {h.it} gave {f.name} {a_food(reward)}.'))
    text.append(one(rng, f"From that day on, {h.name} and {f.name} were best friends.", "They stayed friends forever.", f"{h.name} never lost the {thing} again."))
    facts = [(f"What did {h.name} lose?", f"{h.name} lost {a(item)}."), (f"What color was the {thing}?", f"The {thing} was {color}."),
             (f"Who helped {h.name}?", f"{f.name} helped {h.name}."), (f"Where was the {thing}?", f"The {thing} was {spot}."),
             (f"What did {h.name} give {f.name}?", f"{h.name} gave {f.name} {a_food(reward)}."),
             (f"Where did {h.name} live?", f"{h.name} lived near the {home}."), (f"Where did {h.name} lose the {thing}?", f"{h.name} lost the {thing} at the {place}."),
             *who_facts(h), *who_facts(f)]
    return Story(" ".join(text), facts, h, f"a lost {thing}")


def a_food(food: str) -> str:
    return f"some {food}" if food in ("bread", "cheese", "honey", "soup", "fish", "corn") else a(food)


def who_facts(p: Person) -> list[tuple[str, str]]:
    return [(f"Who was {p.name}?", f"{p.name} was {a(p.trait)} {p.kind}."), (f"What kind of character was {p.name}?", f"{p.name} was {a(p.trait)} {p.kind}.")]


def the_contest(rng: random.Random) -> Story:
    taken: set[str] = set()
    h, r = person(rng, taken), person(rng, taken)
    home, goal = rng.sample(PLACES, 2)
    prize = f"{zipf(rng, COLORS)} {zipf(rng, OBJECTS)}"
    game = one(rng, "run to the", "walk to the", "jump all the way to the")
    text = [opening(rng, h, home)]
    text.append(one(rng, f"{capital(h.its)} neighbor {r.name} was {a(r.trait)} {r.kind}.", f"Next door lived {a(r.trait)} {r.kind} named {r.name}."))
    text.append(one(rng, f'One day {r.name} said, "I am faster than you."', f'"Nobody is as fast as I am," said {r.name} one day.'))
    text.append(one(rng, f'"Let us {game} {goal}," said {h.name}. "The winner gets {a(prize)}."', f"So they agreed to {game} {goal}. The prize was {a(prize)}."))
    text.append(one(rng, f"At first {r.name} was far ahead.", f"{r.name} started very fast."))
    mishap = one(rng, "stopped to eat", "fell asleep under a tree", "took the wrong path", "stopped to look at a flower")
    text.append(one(rng, f"But {r.name} {mishap}.", f"Then {r.name} {mishap}."))
    helps = rng.random() < 0.5
    if helps:
        text.append(f"{h.name} saw this and waited, because {h.it} wanted to be fair.")
        text.append(f"In the end they reached the {goal} together and shared the {prize.split()[1]}.")
        winner = f"{h.name} and {r.name} reached the {goal} together."
    else:
        text.append(one(rng, f"{h.name} kept going, step by step.", f"{h.name} did not stop and did not look back."))
        text.append(f"So {h.name} reached the {goal} first and won the {prize}.")
        winner = f"{h.name} won."
    text.append(one(rng, f'"You are a good friend," said {r.name}.', f"{r.name} smiled and said, " + '"Well done!"', f"After that, {r.name} never boasted again."))
    facts = [("Who won?", winner), ("What was the prize?", f"The prize was {a(prize)}."), (f"What did {r.name} do on the way?", f"{r.name} {mishap}."),
             (f"Where did {h.name} live?", f"{h.name} lived near the {home}."), ("Where was the goal?", f"The goal was the {goal}."), *who_facts(h), *who_facts(r)]
    return Story(" ".join(text), facts, h, "a race")


def the_gift(rng: random.Random) -> Story:
    taken: set[str] = set()
    h, f, s = person(rng, taken), person(rng, taken), person(rng, taken)
    home, market = rng.sample(PLACES, 2)
    food, thing, color = zipf(rng, FOODS), zipf(rng, OBJECTS), zipf(rng, COLORS)
    event = one(rng, "birthday", "party", "wedding")
    text = [opening(rng, h, home)]
    text.append(one(rng, f"{capital(h.its)} best friend was {f.name}, {a(f.trait)} {f.kind}.", f"{h.name} had a good friend, {a(f.trait)} {f.kind} named {f.name}."))
    text.append(f"It was almost time for the {event} of {f.name}, but {h.name} had no gift.")
    text.append(one(rng, f"So {h.it} went to the {market} with {a_food(food)} to trade.", f"{h.name} took {a_food(food)} and went to the {market}."))
    text.append(f"There {h.it} met {s.name}, {a(s.trait)} {s.kind}, who had {a(color + ' ' + thing)}.")
    text.append(one(rng, f'"May I have the {thing}?" asked {h.name}. "I can give you {a_food(food)}."', f'"I will trade you {a_food(food)} for the {thing}," said {h.name}.'))
    text.append(one(rng, f'"That is fair," said {s.name}.', f'"I am very hungry, so yes," said {s.name}.'))
    text.append(f"{h.name} carried the {thing} home and put it in a {zipf(rng, COLORS)} bag.")
    text.append(one(rng, f"When {f.name} saw the {thing}, {f.it} laughed with joy.", f'{f.name} opened the bag. "What a lovely {thing}!" {f.it} said.'))
    text.append(one(rng, f"It was the best {event} of all.", f"{h.name} was happy too, because giving is a joy.", f"They danced until the moon came up."))
    facts = [(f"What did {h.name} give {f.name}?", f"{h.name} gave {f.name} {a(color + ' ' + thing)}."), (f"Who had the {thing} first?", f"{s.name} had the {thing} first."),
             (f"What did {h.name} trade for the {thing}?", f"{h.name} traded {a_food(food)} for the {thing}."), (f"Who was the gift for?", f"The gift was for {f.name}."),
             (f"What color was the {thing}?", f"The {thing} was {color}."), (f"Where did {h.name} live?", f"{h.name} lived near the {home}."),
             (f"Where did {h.name} meet {s.name}?", f"{h.name} met {s.name} at the {market}."), *who_facts(h), *who_facts(f), *who_facts(s)]
    return Story(" ".join(text), facts, h, "a gift")


def the_storm(rng: random.Random) -> Story:
    taken: set[str] = set()
    h, f = person(rng, taken), person(rng, taken)
    home, shelter = rng.sample(PLACES, 2)
    thing = zipf(rng, OBJECTS)
    meal = zipf(rng, FOODS)
    text = [opening(rng, h, home)]
    text.append(one(rng, f"One evening a great storm came.", f"One night the wind began to howl and the rain fell hard."))
    text.append(one(rng, f"{h.name} was afraid that the water would take {h.its} house.", f"The water rose higher and higher, and {h.name} had to leave."))
    text.append(f"{capital(h.it)} took {h.its} {thing} and ran to the {shelter}.")
    text.append(one(rng, f"In the dark {h.it} heard a small voice.", f'On the way {h.it} heard someone call, "Help!"'))
    text.append(f"It was {f.name}, {a(f.trait)} {f.kind}, who was stuck in the mud.")
    text.append(one(rng, f"{h.name} used the {thing} to pull {f.them} out.", f"{h.name} held out the {thing}, and {f.name} held on until {f.it} was free."))
    text.append(f"Together they sat in the {shelter} and ate {a_food(meal)} until the storm was over.")
    text.append(one(rng, f"In the morning the sun came out, and {f.name} helped {h.name} to build a new house.", f"The next day they walked home under a rainbow."))
    text.append(one(rng, f"{h.name} was glad that {h.it} had been {h.trait}." if h.trait in ("brave", "kind", "clever", "gentle", "patient", "careful", "generous") else f"{h.name} had found a new friend.", "And they were friends ever after."))
    facts = [(f"Where did {h.name} run?", f"{h.name} ran to the {shelter}."), ("Who was stuck in the mud?", f"{f.name} was stuck in the mud."),
             (f"What did {h.name} use to help {f.name}?", f"{h.name} used the {thing}."), ("What did they eat?", f"They ate {a_food(meal)}."),
             (f"Where did {h.name} live?", f"{h.name} lived near the {home}."), *who_facts(h), *who_facts(f)]
    return Story(" ".join(text), facts, h, "a storm")


KINDS = [lost_and_found, the_contest, the_gift, the_storm]


def story(rng: random.Random) -> Story:
    return rng.choices(KINDS, [4, 3, 2, 1])[0](rng)


def told(rng: random.Random, s: Story) -> Exchange:
    """A request for a story that mentions some of the plan."""
    h = s.hero
    user = one(rng, "Tell me a story.", "Please tell me a story.", "Write a short story.", f"Tell me a story about {a(h.kind)}.",
               f"Tell me a story about {a(h.trait)} {h.kind}.", f"Write a story about {a(h.kind)} named {h.name}.", f"Tell me a story about {h.name}.",
               f"Can you tell me a story about {s.topic}?", f"I would like a story about {s.topic}.", f"Tell a story about {a(h.trait)} {h.kind} named {h.name}.")
    think = f"The story is about {h.name}, {a(h.trait)} {h.kind}, and {s.topic}."
    return Exchange("story", user, think, s.text, None, ("regex", "^[A-Z].*[.!\"]$"))


def question(rng: random.Random, s: Story) -> Exchange:
    """A question about a story that is already in the conversation."""
    q, answer = rng.choice(s.facts)
    think = one(rng, "I look in the story. ", "The story says it. ") + answer
    return Exchange("story_question", q, think, answer, None, ("exact", answer))


def with_question(rng: random.Random) -> Exchange:
    """Story and question in one message."""
    s = story(rng)
    e = question(rng, s)
    e.user = one(rng, f"{s.text}\n\n{e.user}", f"Read this story and answer the question.\n\n{s.text}\n\nQuestion: {e.user}", f"{e.user}\n\n{s.text}")
    return e
