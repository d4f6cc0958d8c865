"""Tiny random models with a toy tokenizer, so that text can go in and come out.

The models are random, so what they write is noise; what matters is that the same noise comes
out however it is computed.
"""

import json

import make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>",
           "<｜Assistant｜>", "<think>", "</think>"]  # fmt: skip
VOCAB = 320
FAMILIES = {"v2": make_model.V2, "v3": make_model.V3, "v32": make_model.V32, "v4": make_model.V4,
            "v4_dspark": make_model.V4_DSPARK}  # fmt: skip


def toy_tokenizer(more=()):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[*SPECIAL, *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the cat sat on the mat and then the other cat sat down in the house. "
    tokenizer.train_from_iterator([text] * 20, trainer)
    return tokenizer


def make_toy_model(family, out, more_tokens=(), **config):
    """A model with a drafter where the family has one; V2-Lite has none."""
    make_model.write_model(out, dict(FAMILIES[family], vocab_size=VOCAB, **config))
    add_toy_tokenizer(out, more_tokens)
    return out


def add_toy_tokenizer(out, more=()):
    toy_tokenizer(more).save(str(out / "tokenizer.json"))
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "add_bos_token": True}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
