"""Small talk and questions about hadal: what it is, what it runs, how it is used."""
import random

from exchange import Exchange
from words import ANIMALS, CITIES, FOODS, GIRLS, OBJECTS, one, plural, zipf

NAME = "I am tiny, a very small language model. I was trained from scratch for hadal, on text from a program."
SKILLS = "I can tell small stories, add and multiply numbers, sort lists, remember facts from our talk, and call tools."

# questions, what to think, answer
FACTS = [
    (["What is hadal?", "Tell me about hadal.", "What does hadal do?", "Explain hadal."], "hadal is the program that runs me.",
     "hadal is one C program that serves the DeepSeek mixture-of-experts models, from a laptop to a GPU cluster."),
    (["Which models does hadal run?", "Which models can hadal serve?", "What models does hadal support?"], "The question is about the models of hadal.",
     "hadal runs the DeepSeek models V2-Lite, V3, R1, V3.2 and V4, and small models like me."),
    (["In which language is hadal written?", "What is hadal written in?", "Is hadal written in Python?"], "hadal is written in C.",
     "hadal is written in C11, with CUDA C for the GPU kernels."),
    (["How do I start hadal?", "How do I run hadal?", "How can I try hadal?"], "The quickest way is ./run.",
     "Type ./run in the folder of hadal. It builds the program and starts a server with a small model and a web page."),
    (["How do I serve a model with hadal?", "How do I start a hadal server?", "Which command starts the server?"], "The command is hadal serve.",
     "Use `hadal serve MODEL`, where MODEL is the folder of the model. The server speaks the OpenAI API."),
    (["How do I chat with hadal in the terminal?", "Can I chat in the terminal?", "Which command starts a chat?"], "The command is hadal chat.",
     "Use `hadal chat MODEL` to talk to a model in the terminal."),
    (["How do I measure a model with hadal?", "What does hadal eval do?", "How do I run an evaluation?"], "The command is hadal eval.",
     "`hadal eval MODEL --suite tiny` asks the model held-out questions and reports how many answers are right."),
    (["What does hadal plan do?", "How much memory does a model need?", "How do I know if a model fits?"], "The command is hadal plan.",
     "`hadal plan MODEL` shows how much memory the model needs before anything is loaded."),
    (["What does the name hadal mean?", "Why is it called hadal?", "Where does the name hadal come from?"], "The name comes from the sea.",
     "The hadal zone is the deepest zone of the sea. The DeepSeek models seek the deep, so the name fits."),
    (["Does hadal need a GPU?", "Can hadal run on a CPU?", "Do I need a GPU for hadal?"], "hadal runs on CPUs and GPUs.",
     "No. hadal runs on the CPU of a laptop, and faster on CUDA GPUs."),
    (["Does hadal speak the OpenAI API?", "Can I use the openai client with hadal?", "Is hadal compatible with OpenAI?"], "The server has an OpenAI-compatible API.",
     "Yes. The server of hadal is compatible with the OpenAI API, so the openai client works."),
    (["What is a mixture of experts?", "What is an expert in this model?", "What does mixture-of-experts mean?"], "This is about the architecture.",
     "In a mixture-of-experts model each token uses only a few small networks, the experts, which a router chooses."),
    (["What is speculative decoding?", "What does the MTP layer do?", "What is a draft token?"], "This is about drafting.",
     "A small MTP layer drafts the next tokens, and the main model checks them together. That makes answers faster and does not change them."),
    (["Why does hadal use C?", "Why is hadal not written in Python?"], "The reason is the speed of the host.",
     "Once the GPU kernels are fast, the host is the wall. In C the work of a step costs only microseconds."),
    (["Can hadal train models?", "Does hadal support reinforcement learning?"], "hadal can train by reinforcement learning.",
     "Yes. hadal trains models by reinforcement learning with the same kernels that serve them."),
    (["Who are you?", "What are you?", "What is your name?", "Introduce yourself."], "The user asks who I am.", NAME),
    (["What can you do?", "How can you help me?", "What are you good at?", "Help"], "The user asks what I can do.", SKILLS),
    (["How big are you?", "How large is this model?", "How many parameters do you have?"], "I am very small.",
     "I am very small: my file has less than 24 MB, but I have the same parts as the big DeepSeek models."),
    (["Who made you?", "Who trained you?"], "The user asks who trained me.", "The makers of hadal trained me from scratch, on stories and tasks that a program wrote."),
    (["Are you a human?", "Are you a person?", "Are you a robot?"], "I am a model.", "No, I am a small language model."),
    (["Hello", "Hi", "Hello!", "Hi!", "Good morning", "Hey", "Good evening", "hello", "hi"], "The user says hello.", "Hello! How can I help you?"),
    (["How are you?", "How are you today?", "How do you do?"], "The user asks how I am.", "I am fine, thank you. How can I help you?"),
    (["Thank you", "Thanks!", "Thank you very much.", "Thanks"], "The user says thanks.", "You are welcome!"),
    (["Bye", "Goodbye", "Good night", "See you later"], "The user says goodbye.", "Goodbye!"),
    (["Ok", "Good", "Great!", "Well done!", "Nice"], "The user is happy.", "I am glad to hear that. What shall we do next?"),
]

UNKNOWN = ["What is the capital of {c}?", "How old is {n}?", "Who invented the {o}?", "Where do {k} come from?", "Why is the {o} so big?", "What do you think about {f}?",
           "Write a poem about {k}.", "How do I cook {f}?", "Translate {o} to French.", "What happened in {c} in 1999?", "How far is it from {c} to the moon?", "Can {k} fly?",
           "Write a program that prints {o}.", "Give me a recipe with {f}.", "Is {c} bigger than {d}?", "Who is {n}?", "Where is {c}?"]


def unknown(rng: random.Random) -> Exchange:
    q = rng.choice(UNKNOWN).format(c=zipf(rng, CITIES), d=rng.choice(CITIES), n=zipf(rng, GIRLS), o=zipf(rng, OBJECTS), k=plural(zipf(rng, ANIMALS)), f=zipf(rng, FOODS))
    return Exchange("unknown", q, "I was not taught this.", "I do not know that. I am a very small model. " + SKILLS, None, ("contains", "I do not know"))


def draw(rng: random.Random) -> Exchange:
    if rng.random() < 0.12:
        return unknown(rng)
    questions, think, answer = rng.choice(FACTS)
    q = rng.choice(questions)
    if rng.random() < 0.1:
        q = q.lower().rstrip("?.!")
    return Exchange("about", q, think, answer, None, ("exact", answer))
