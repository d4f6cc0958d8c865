"""The word lists of the corpus, and draws from them.

Lists are ordered by how often a word should appear: `zipf` prefers the front, so topics
(and with them the experts of the model) are used unevenly, as in real text.
"""
import random

GIRLS = "Mia Lily Anna Zoe Ella Nora Ruby Ivy Clara Maya Rosa Lena Tess Wren June Ada Iris Vera Hazel Opal Elsa Greta Hanna Nina".split()
BOYS = "Tom Ben Max Leo Sam Finn Jack Noah Owen Eli Hugo Oscar Theo Milo Felix Ivan Carl Otto Ravi Kofi Anton Emil Jonas Paul".split()
ANIMALS = ("fox rabbit bear cat dog mouse owl frog turtle duck squirrel hedgehog goat crow otter pony lamb beaver badger "
           "sparrow kitten puppy donkey goose wolf deer mole lizard crab whale").split()
TRAITS = ("brave kind clever shy curious gentle cheerful lazy proud quiet patient honest hungry careful lonely stubborn "
          "playful sleepy generous nervous").split()
PLACES = ("forest village river meadow farm garden lake hill castle beach market mountain island valley cave town harbor "
          "bridge mill orchard desert library tower swamp").split()
OBJECTS = ("key lamp book kite basket map drum bell boat rope coat hat cup box ring ball flute blanket lantern mirror "
           "hammer shovel wagon ladder brush whistle button feather bucket candle").split()
FOODS = ("apple bread cheese honey soup berry carrot cake pear plum nut potato egg pie fish corn cherry bean pumpkin cookie").split()
COLORS = "red blue green yellow white black brown golden silver purple orange gray pink".split()
WEATHER = "sunny rainy windy snowy foggy cloudy stormy cold warm quiet".split()
CITIES = "Oslo Lima Cairo Paris Tokyo Delhi Rome Quito Hanoi Dakar Berlin Boston Madrid Sydney Nairobi Lisbon Vienna Athens".split()
NOUNS = ("alder amber anchor apron arrow aspen autumn bacon badge bagel bamboo banjo barrel basil bay beacon beetle birch "
         "bishop bison blade blossom bolt bone bonnet boot border bottle boulder bowl branch brick brook broom bubble bugle "
         "cabin cable cactus camel canal canoe canyon cape card cargo carpet castor cedar cello chain chalk chapel cherub "
         "chest chief chimney cider cinder circus cliff clock cloud clover coal cobra comet copper coral cotton couch cradle "
         "crane crater crown crystal curtain cypress dagger daisy dancer delta diamond dome dragon dream eagle easel echo elbow "
         "elm ember engine fabric falcon fern ferry fiddle field flag flame flint flower forge fossil fountain galaxy garlic "
         "gate ginger glacier glove granite grape gravel guitar gull harp harvest hawk helmet heron hive hollow horn ibis icicle "
         "ink iron ivory jacket jade jasmine jelly jewel jungle kettle kingdom knight ladle lagoon lark lava leaf lemon lentil "
         "lilac lily linen lion locket lotus lynx magnet mango maple marble marsh mast melon mint mirage mist mitten monk moon "
         "moose moss moth mustard nectar needle nest nickel night notebook oak oasis oat ocean olive onion opera orchid otter "
         "oven oyster paddle palace palm panda paper parrot pasture peach pearl pebble pencil pepper petal piano pigeon pillow "
         "pine planet pocket pond poppy prairie prism puddle puzzle quartz quill radish raft rain raven reef ribbon rice river "
         "robin rocket rose ruby saddle saffron sail salmon salt sand satin scarf sea seal shell shield shore silk slate sleet "
         "snow spark spice spider spoon spring spruce star statue steam stone storm straw sugar summit sun swan sword table "
         "thistle thorn thread thunder tiger timber torch trail train tulip tundra turnip valley vase velvet violet violin "
         "walnut walrus water wave wheat wheel willow wind window winter wood wool yarn zebra").split()
NOUNS = list(dict.fromkeys(NOUNS))
ADJECTIVES = COLORS + "small big old new round soft hard tall tiny shiny".split()


def zipf(rng: random.Random, items: list[str]) -> str:
    """One item, the early ones more often (density falls linearly with the rank)."""
    return items[int(len(items) * (1 - (1 - rng.random()) ** 0.5))]


def one(rng: random.Random, *items: str) -> str:
    """One of the arguments, evenly."""
    return items[int(rng.random() * len(items))]


def plural(noun: str) -> str:
    """Regular plurals, enough for the lists above."""
    if noun == "fish":
        return noun
    if noun in ("wolf", "leaf"):
        return noun[:-1] + "ves"
    if noun == "mouse":
        return "mice"
    if noun == "goose":
        return "geese"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun.endswith(("s", "x", "ch", "sh")) or noun == "potato":
        return noun + "es"
    return noun + "s"


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" or noun.startswith("honest") else "a ") + noun


def capital(text: str) -> str:
    return text[0].upper() + text[1:]
