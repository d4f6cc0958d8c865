"""Small stories from a grammar, with characters and facts that stay the same, and questions about them.

A story is planned first (who, what they want, who helps, how it ends) and then told; the
questions ask for the plan, so every answer is in the text. Who the hero is decides much of what
is likely (`prefer`): one lives at a lake and loves lamps, another always meets storms. So the
most likely story differs from hero to hero, and from one request to the next.
"""
import random
import zlib
from dataclasses import dataclass

from exchange import Exchange
from words import (ANIMALS, BOYS, COLORS, FOODS, GIRLS, OBJECTS, PLACES, TRAITS, WEATHER, a, capital, one, zipf)

GOOD = ("brave", "kind", "clever", "gentle", "patient", "careful", "generous", "honest")
SPOTS = ["under a stone", "behind a tree", "in the tall grass", "under a bench", "next to an old wall", "inside a hollow log"]


def evenly(rng: random.Random, items: list):
    return items[int(rng.random() * len(items))]


def prefer(rng: random.Random, key: str, items: list, otherwise=zipf):
    """The item that goes with the key, every other time; else any."""
    return items[zlib.crc32(key.encode()) % len(items)] if rng.random() < 0.5 else otherwise(rng, items)


@dataclass
class Person:
    name: str
    kind: str       # "girl", "boy" or an animal
    trait: str
    it: str         # she, he
    them: str       # her, him
    its: str        # her, his

    @property
    def who(self) -> str:
        return f"{a(self.trait)} {self.kind}"


def person(rng: random.Random, taken: set[str], key: str = "") -> Person:
    """Somebody new; the key makes some more likely than others."""
    kind = prefer(rng, "kind" + key, ANIMALS) if rng.random() < 0.5 else prefer(rng, "child" + key, ["girl", "boy"], evenly)
    girl = kind == "girl" or (kind != "boy" and zlib.crc32(kind.encode()) % 2 == 0)
    names = GIRLS if girl else BOYS
    name = prefer(rng, "name" + kind + key, names)
    while name in taken:
        name = one(rng, *names)
    taken.add(name)
    words = ("she", "her", "her") if girl else ("he", "him", "his")
    return Person(name, kind, prefer(rng, "trait" + name, TRAITS), *words)


@dataclass
class Story:
    text: str
    facts: list[tuple[str, str]]   # question, answer
    hero: Person
    topic: str


class Teller:
    """Collects the sentences and the questions they answer; draws for the story of one hero."""

    def __init__(self, rng: random.Random, hero: Person, taken: set[str]):
        self.rng, self.hero, self.taken = rng, hero, taken
        self.text: list[str] = []
        self.facts: list[tuple[str, str]] = []
        self.drawn = 0

    def pick(self, items: list, otherwise=zipf):
        """One item; the hero has a favorite at every point of a story."""
        self.drawn += 1
        return prefer(self.rng, f"{self.hero.name} {self.drawn}", items, otherwise)

    def say(self, *ways: str) -> None:
        self.text.append(self.pick(list(ways), evenly) if len(ways) > 1 else ways[0])

    def ask(self, question: str, answer: str) -> None:
        self.facts.append((question, answer))

    def places(self, n: int) -> list[str]:
        out: list[str] = []
        while len(out) < n:
            place = self.pick(PLACES)
            if place not in out:
                out.append(place)
        return out

    def thing(self) -> tuple[str, str]:
        """(color, object); an object has a favorite color."""
        thing = self.pick(OBJECTS)
        return prefer(self.rng, thing, COLORS), thing

    def other(self) -> Person:
        self.drawn += 1
        p = person(self.rng, self.taken, f"{self.hero.name} {self.drawn}")
        self.introduce(p)
        return p

    def introduce(self, p: Person) -> None:
        self.ask(f"Who was {p.name}?", f"{p.name} was {p.who}.")
        self.ask(f"What kind of character was {p.name}?", f"{p.name} was {p.who}.")

    def begin(self, home: str) -> None:
        """The first sentences: who, and where they live."""
        h = self.hero
        who = f"{h.who} named {h.name}"
        self.say(f"Once upon a time, there was {who}. {h.name} lived near the {home}.", f"Once upon a time, {who} lived near the {home}.",
                 f"Long ago, near the {home}, there lived {who}.", f"There was once {who}. {h.name} lived near the {home}.",
                 f"{h.name} was {h.who}. {capital(h.it)} lived near the {home}.", f"Near the {home} stood a small house. In it lived {who}.",
                 f"This is the story of {h.name}, {h.who} who lived near the {home}.", f"Many years ago, {who} had a house near the {home}.",
                 f"Everybody near the {home} knew {h.name}. {capital(h.it)} was {h.who}.", f"{h.name} lived near the {home}. {capital(h.it)} was {h.who}.")
        self.introduce(h)
        self.ask(f"Where did {h.name} live?", f"{h.name} lived near the {home}.")
        self.ask(f"Who lived near the {home}?", f"{h.name} lived near the {home}.")

    def done(self, topic: str) -> Story:
        return Story(" ".join(self.text), self.facts, self.hero, topic)


def a_food(food: str) -> str:
    return f"some {food}" if food in ("bread", "cheese", "honey", "soup", "fish", "corn") else a(food)


def lost_and_found(t: Teller) -> Story:
    h = t.hero
    home, place = t.places(2)
    color, thing = t.thing()
    spot, reward, item = t.pick(SPOTS), t.pick(FOODS), f"{color} {thing}"
    t.begin(home)
    t.say(f"{capital(h.it)} had {a(item)} and loved it very much.", f"{capital(h.its)} favorite thing was {a(item)}.", f"{capital(h.its)} mother had given {h.them} {a(item)}.")
    day = t.pick(WEATHER)
    t.say(f"One {day} morning, {h.name} went to the {place} and lost the {thing}.", f"On a {day} day, {h.it} walked to the {place}. When {h.it} came home, the {thing} was gone.",
          f"One {day} day, {h.name} played at the {place} until evening. Then {h.it} saw that the {thing} was gone.")
    t.say(f"{h.name} was very sad and looked everywhere.", f"{capital(h.it)} searched and searched, but {h.it} could not find it.", f"{h.name} sat down and cried.")
    f = t.other()
    t.say(f"Then {f.who} named {f.name} came along.", f"Soon {h.name} met {f.who} named {f.name}.", f"{f.name}, {f.who}, heard {h.them}.")
    t.say(f'"Why are you sad?" asked {f.name}. "I lost my {thing}," said {h.name}.', f'"What is wrong?" {f.name} asked. "My {item} is gone," {h.name} said.')
    t.say(f'"I will help you," said {f.name}.', f'"Do not worry. We will find it together," said {f.name}.', f'"I have good eyes," said {f.name}. "Let us look."')
    t.say(f"They went back to the {place} and looked {spot}.", f"Together they walked to the {place}. {f.name} looked {spot}.")
    t.say(f"There it was! The {thing} was {spot}.", f"And there was the {item}, {spot}!")
    t.say(f"{h.name} was so happy that {h.it} gave {f.name} {a_food(reward)}.", f'"Thank you!" said {h.name}, and {h.it} gave {f.name} {a_food(reward)}.')
    t.say(f"From that day on, {h.name} and {f.name} were best friends.", "They stayed friends forever.", f"{h.name} never lost the {thing} again.")
    t.ask(f"What did {h.name} lose?", f"{h.name} lost {a(item)}.")
    t.ask(f"What color was the {thing}?", f"The {thing} was {color}.")
    t.ask(f"Who helped {h.name}?", f"{f.name} helped {h.name}.")
    t.ask(f"Where was the {thing}?", f"The {thing} was {spot}.")
    t.ask(f"What did {h.name} give {f.name}?", f"{h.name} gave {f.name} {a_food(reward)}.")
    t.ask(f"Where did {h.name} lose the {thing}?", f"{h.name} lost the {thing} at the {place}.")
    t.ask("How was the weather?", f"It was {day}.")
    return t.done(f"a lost {thing}")


def the_contest(t: Teller) -> Story:
    h = t.hero
    home, goal = t.places(2)
    color, thing = t.thing()
    game = t.pick(["run to the", "walk to the", "jump all the way to the"], evenly)
    t.begin(home)
    r = t.other()
    t.say(f"{capital(h.its)} neighbor {r.name} was {r.who}.", f"Next door lived {r.who} named {r.name}.")
    t.say(f'One day {r.name} said, "I am faster than you."', f'"Nobody is as fast as I am," said {r.name} one day.')
    t.say(f'"Let us {game} {goal}," said {h.name}. "The winner gets {a(color)} {thing}."', f"So they agreed to {game} {goal}. The prize was {a(color)} {thing}.")
    t.say(f"At first {r.name} was far ahead.", f"{r.name} started very fast.")
    mishap = t.pick(["stopped to eat", "fell asleep under a tree", "took the wrong path", "stopped to look at a flower"], evenly)
    t.say(f"But {r.name} {mishap}.", f"Then {r.name} {mishap}.")
    if t.pick([True, False], evenly):
        t.say(f"{h.name} saw this and waited, because {h.it} wanted to be fair.")
        t.say(f"In the end they reached the {goal} together and shared the {thing}.")
        winner = f"{h.name} and {r.name} reached the {goal} together."
    else:
        t.say(f"{h.name} kept going, step by step.", f"{h.name} did not stop and did not look back.")
        t.say(f"So {h.name} reached the {goal} first and won the {color} {thing}.")
        winner = f"{h.name} won."
    t.say(f'"You are a good friend," said {r.name}.', f'{r.name} smiled and said, "Well done!"', f"After that, {r.name} never boasted again.")
    t.ask("Who won?", winner)
    t.ask("What was the prize?", f"The prize was {a(color)} {thing}.")
    t.ask(f"What did {r.name} do on the way?", f"{r.name} {mishap}.")
    t.ask("Where was the goal?", f"The goal was the {goal}.")
    return t.done("a race")


def the_gift(t: Teller) -> Story:
    h = t.hero
    home, market = t.places(2)
    color, thing = t.thing()
    food, bag = t.pick(FOODS), t.pick(COLORS)
    event = t.pick(["birthday", "party", "wedding"], evenly)
    t.begin(home)
    f = t.other()
    t.say(f"{capital(h.its)} best friend was {f.name}, {f.who}.", f"{h.name} had a good friend, {f.who} named {f.name}.")
    t.say(f"It was almost time for the {event} of {f.name}, but {h.name} had no gift.")
    t.say(f"So {h.it} went to the {market} with {a_food(food)} to trade.", f"{h.name} took {a_food(food)} and went to the {market}.")
    s = t.other()
    t.say(f"There {h.it} met {s.name}, {s.who}, who had {a(color)} {thing}.")
    t.say(f'"May I have the {thing}?" asked {h.name}. "I can give you {a_food(food)}."', f'"I will trade you {a_food(food)} for the {thing}," said {h.name}.')
    t.say(f'"That is fair," said {s.name}.', f'"I am very hungry, so yes," said {s.name}.')
    t.say(f"{h.name} carried the {thing} home and put it in a {bag} bag.")
    t.say(f"When {f.name} saw the {thing}, {f.it} laughed with joy.", f'{f.name} opened the bag. "What a lovely {thing}!" {f.it} said.')
    t.say(f"It was the best {event} of all.", f"{h.name} was happy too, because giving is a joy.", "They danced until the moon came up.")
    t.ask(f"What did {h.name} give {f.name}?", f"{h.name} gave {f.name} {a(color)} {thing}.")
    t.ask(f"Who had the {thing} first?", f"{s.name} had the {thing} first.")
    t.ask(f"What did {h.name} trade for the {thing}?", f"{h.name} traded {a_food(food)} for the {thing}.")
    t.ask("Who was the gift for?", f"The gift was for {f.name}.")
    t.ask(f"What color was the {thing}?", f"The {thing} was {color}.")
    t.ask("What color was the bag?", f"The bag was {bag}.")
    t.ask(f"Where did {h.name} meet {s.name}?", f"{h.name} met {s.name} at the {market}.")
    return t.done("a gift")


def the_storm(t: Teller) -> Story:
    h = t.hero
    home, shelter = t.places(2)
    thing, meal = t.pick(OBJECTS), t.pick(FOODS)
    t.begin(home)
    t.say("One evening a great storm came.", "One night the wind began to howl and the rain fell hard.", "Dark clouds came over the hills, and then the storm began.")
    t.say(f"{h.name} was afraid that the water would take {h.its} house.", f"The water rose higher and higher, and {h.name} had to leave.")
    t.say(f"{capital(h.it)} took {h.its} {thing} and ran to the {shelter}.")
    t.say(f"In the dark {h.it} heard a small voice.", f'On the way {h.it} heard someone call, "Help!"')
    f = t.other()
    t.say(f"It was {f.name}, {f.who}, who was stuck in the mud.")
    t.say(f"{h.name} used the {thing} to pull {f.them} out.", f"{h.name} held out the {thing}, and {f.name} held on until {f.it} was free.")
    t.say(f"Together they sat in the {shelter} and ate {a_food(meal)} until the storm was over.")
    t.say(f"In the morning the sun came out, and {f.name} helped {h.name} to build a new house.", "The next day they walked home under a rainbow.")
    t.say(f"{h.name} was glad that {h.it} had been {h.trait}." if h.trait in GOOD else f"{h.name} had found a new friend.", "And they were friends ever after.")
    t.ask(f"Where did {h.name} run?", f"{h.name} ran to the {shelter}.")
    t.ask("Who was stuck in the mud?", f"{f.name} was stuck in the mud.")
    t.ask(f"What did {h.name} use to help {f.name}?", f"{h.name} used the {thing}.")
    t.ask("What did they eat?", f"They ate {a_food(meal)}.")
    return t.done("a storm")


def the_garden(t: Teller) -> Story:
    h = t.hero
    home, = t.places(1)
    crop, tool = t.pick(["berry", "carrot", "pumpkin", "potato", "bean", "corn", "cherry", "pear"]), t.pick(["shovel", "bucket", "rope", "wagon", "ladder"])
    days = t.pick(["three", "five", "seven", "ten"], evenly)
    t.begin(home)
    t.say(f"{capital(h.it)} wanted to grow the biggest {crop} of all.", f'"I will grow {a_food(crop)}," {h.it} said, "bigger than any other."', f"One spring day {h.it} put the seed of {a_food(crop)} into the ground.")
    t.say(f"Every morning {h.name} gave it water and waited for {days} days.", f"{capital(h.it)} waited for {days} days, but nothing came out of the ground.")
    f = t.other()
    t.say(f"Then {f.name} came to the garden. {capital(f.it)} was {f.who}.", f"{f.name}, {f.who}, looked over the wall.")
    t.say(f'"The ground is too hard," said {f.name}. "Take my {tool}."', f'"You need {a(tool)}," said {f.name} and gave {h.them} one.')
    t.say("They worked until the sun went down.", f"So {h.name} and {f.name} worked side by side all day.")
    t.say("Soon there was a small green leaf, and then many more.", "After some rain the garden was full of green leaves.")
    size = t.pick(["a house", "a boat", "a barrel", "a horse"], evenly)
    t.say(f"In autumn it was as big as {size}!", f"It grew and grew until it was as big as {size}.")
    t.say(f"{h.name} gave half of it to {f.name}.", "They ate it together with everybody in the village.", f'"Half of it is yours," said {h.name}.')
    t.say("Good things need time and a friend.", f"The next year they made a garden for {f.name} too.", "And there was enough for the whole winter.")
    t.ask(f"What did {h.name} grow?", f"{h.name} grew {a_food(crop)}.")
    t.ask(f"What did {f.name} give {h.name}?", f"{f.name} gave {h.name} {a(tool)}.")
    t.ask(f"How long did {h.name} wait?", f"{h.name} waited for {days} days.")
    t.ask("How big was it?", f"It was as big as {size}.")
    t.ask(f"Who helped {h.name}?", f"{f.name} helped {h.name}.")
    return t.done("a garden")


def the_mystery(t: Teller) -> Story:
    h = t.hero
    home, place = t.places(2)
    food, mark = t.pick(FOODS), t.pick(["small tracks", "a white feather", "a torn ribbon", "wet spots", "a brown button"], evenly)
    t.begin(home)
    t.say(f"One morning {h.its} {food} was gone.", f"{capital(h.it)} put {a_food(food)} on the table. An hour later it was gone.", f'"Who took my {food}?" cried {h.name} one day.')
    t.say(f"On the floor {h.it} saw {mark}.", f"There was nothing left but {mark}.")
    s, c = t.other(), t.other()
    t.say(f"First {h.name} asked {s.name}, {s.who}.", f"{h.name} went to {s.name}, {s.who} from next door.")
    t.say(f'"It was not me," said {s.name}. "I was at the {place} all day."', f'"I was at the {place}," said {s.name}, "and I do not even like {food}."')
    t.say(f"Then {h.it} found {c.name}, {c.who}, behind the house.", f"Then {h.it} met {c.name}. {capital(c.it)} was {c.who}.")
    t.say(f'{c.name} looked at the ground. "I took the {food}," {c.it} said. "I was so hungry."', f'"I am sorry," said {c.name}. "I ate the {food}, because I had nothing else."')
    t.say(f'"Next time you can ask me," said {h.name}.', f'{h.name} was not angry. "Come and eat with us," {h.it} said.')
    t.say(f"And {c.name} never took anything again.", f"The next day {c.name} brought a new {food}.", "From then on all three ate together every evening.")
    t.ask(f"Who took the {food}?", f"{c.name} took the {food}.")
    t.ask(f"What did {h.name} see?", f"{h.name} saw {mark}.")
    t.ask(f"Where was {s.name}?", f"{s.name} was at the {place}.")
    t.ask("What was gone?", f"The {food} was gone.")
    t.ask(f"Who did {h.name} ask first?", f"{h.name} asked {s.name} first.")
    return t.done("a mystery")


def the_journey(t: Teller) -> Story:
    h = t.hero
    home, first, second, goal = t.places(4)
    color, thing = t.thing()
    help_thing, why = t.pick(["rope", "lantern", "map", "boat", "ladder"], evenly), t.pick(["to see the snow", "to hear the old bell", "to find the golden tree", "to visit the sea"], evenly)
    t.begin(home)
    t.say(f"All {h.its} life {h.it} wanted to go to the {goal} {why}.", f'"Today I will go to the {goal}," {h.it} said, "{why}."')
    t.say(f"{capital(h.it)} packed {a(color)} {thing} and left before the sun was up.", f"With {a(color)} {thing} under {h.its} arm, {h.name} set out.")
    t.say(f"First {h.it} came to the {first}.", f"By noon {h.name} had reached the {first}.")
    f = t.other()
    t.say(f"There sat {f.name}, {f.who}.", f"{f.name}, {f.who}, was resting there.")
    t.say(f'"I am tired," said {f.name}. {h.name} let {f.them} have the {thing}.', f"{f.name} liked the {thing} so much that {h.name} gave it away.")
    t.say(f'"Then take my {help_thing}," said {f.name}.', f"To say thanks, {f.name} gave {h.them} {a(help_thing)}.")
    t.say(f"At the {second} the way was dark and steep, but the {help_thing} helped.", f"Without the {help_thing}, {h.name} could never have crossed the {second}.")
    t.say(f"At last {h.it} stood in the {goal}, and it was more beautiful than any dream.", f"In the evening {h.name} reached the {goal} and laughed with joy.")
    t.say(f"When {h.it} came home, {h.it} told everybody about it.", f"{capital(h.it)} never forgot that day.", f"And the next time {f.name} came along.")
    t.ask(f"Where did {h.name} want to go?", f"{h.name} wanted to go to the {goal}.")
    t.ask(f"What did {h.name} pack?", f"{h.name} packed {a(color)} {thing}.")
    t.ask(f"Where did {h.name} meet {f.name}?", f"{h.name} met {f.name} at the {first}.")
    t.ask(f"What did {f.name} give {h.name}?", f"{f.name} gave {h.name} {a(help_thing)}.")
    t.ask("Where was it dark and steep?", f"It was dark and steep at the {second}.")
    t.ask(f"What color was the {thing}?", f"The {thing} was {color}.")
    return t.done("a journey")


def the_truth(t: Teller) -> Story:
    h = t.hero
    home, place = t.places(2)
    color, thing = t.thing()
    work = t.pick(["carry water", "paint the door", "clean the windows", "cut the grass"], evenly)
    t.begin(home)
    f = t.other()
    t.say(f"One day {h.it} visited {f.name}, {f.who} who lived at the {place}.", f"{f.name}, {f.who}, lived at the {place}. {h.name} often went there to play.")
    t.say(f"{f.name} had {a(color)} {thing}, and nobody was allowed to touch it.", f"On a high shelf stood {a(color)} {thing}.")
    t.say(f"When {f.name} was out, {h.name} touched the {thing}, and it broke.", f"{h.name} wanted only to look at the {thing}, but it fell and broke.")
    t.say(f'"Who broke my {thing}?" asked {f.name}.', f'{f.name} came back. "What happened to my {thing}?" {f.it} cried.')
    t.say(f'"It was the wind," said {h.name}, but {h.it} felt bad.', f'"I do not know," said {h.name} and went home.')
    t.say(f"That night {h.it} could not sleep.", f"All evening {h.name} could not eat.")
    t.say(f'In the morning {h.it} went back. "I broke it," {h.it} said. "I am sorry."', f'So {h.name} returned and told the truth. "It was me," {h.it} said.')
    t.say(f'"Thank you for telling me," said {f.name}.', f"{f.name} was quiet for a while. Then {f.it} smiled.")
    t.say(f"To make it good again, {h.name} helped to {work}.", f"That day {h.name} stayed to {work}.")
    t.say("It is good to be honest.", f"And {h.name} never lied to {f.name} again.", "After that they trusted each other more than before.")
    t.ask("What broke?", f"The {color} {thing} broke.")
    t.ask(f"Who broke the {thing}?", f"{h.name} broke the {thing}.")
    t.ask(f"Where did {f.name} live?", f"{f.name} lived at the {place}.")
    t.ask(f"What color was the {thing}?", f"The {thing} was {color}.")
    t.ask(f"What did {h.name} help to do?", f"{h.name} helped to {work}.")
    return t.done(f"a broken {thing}")


KINDS = [lost_and_found, the_contest, the_gift, the_storm, the_garden, the_mystery, the_journey, the_truth]


def story(rng: random.Random, key: str = "") -> Story:
    """Any story; the key makes some heroes more likely than others."""
    taken: set[str] = set()
    hero = person(rng, taken, key)
    plot = prefer(rng, "plot" + hero.name + hero.kind, KINDS)
    return plot(Teller(rng, hero, taken))


# requests that leave everything open, and what can be asked for
OPEN = ["Tell me a story.", "Please tell me a story.", "Write a short story.", "Tell me another story.", "I want to hear a story.", "Can you tell me a story?", "Story, please.",
        "Make up a story.", "Write a story for me.", "Tell me a story before I sleep."]


def told(rng: random.Random) -> tuple[Exchange, Story]:
    """A request for a story, which may mention some of the plan, and the story."""
    if rng.random() < 0.3:
        user = rng.choice(OPEN)
        s = story(rng, user)
    else:
        s = story(rng)
        h = s.hero
        user = one(rng, f"Tell me a story about {a(h.kind)}.", f"Tell me a story about {h.who}.", f"Write a story about {a(h.kind)} named {h.name}.", f"Tell me a story about {h.name}.",
                   f"Can you tell me a story about {s.topic}?", f"I would like a story about {s.topic}.", f"Tell a story about {h.who} named {h.name}.",
                   f"Write a story about {h.name} and {s.topic}.", f"Tell me a story about {a(h.kind)} and {s.topic}.")
    think = f"The story is about {s.hero.name}, {s.hero.who}, and {s.topic}."
    return Exchange("story", user, think, s.text, None, ("regex", "^[A-Z].*[.!\"]$")), s


def question(rng: random.Random, s: Story) -> Exchange:
    """A question about a story that is already in the conversation."""
    q, answer = rng.choice(s.facts)
    think = one(rng, "I look in the story. ", "The story says it. ") + answer
    return Exchange("story_question", q, think, answer, None, ("exact", answer))


def with_questions(rng: random.Random, n: int) -> list[Exchange]:
    """Story and question in one message, and n - 1 questions more."""
    s = story(rng)
    first, *more = [question(rng, s) for _ in range(n)]
    first.user = one(rng, f"{s.text}\n\n{first.user}", f"Read this story and answer the question.\n\n{s.text}\n\nQuestion: {first.user}", f"{first.user}\n\n{s.text}")
    return [first, *more]
