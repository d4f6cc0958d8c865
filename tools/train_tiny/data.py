"""Batches: documents of the corpus, tokenized and packed into rows of equal length.

Batch i depends only on (seed, i, shape), so training can stop and go on anywhere. Documents
start at multiples of 4 (the window of a C4 entry) and are never cut.
"""
import os
from dataclasses import dataclass

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from tokenizers import Tokenizer

import corpus
from encoding import ASSISTANT, BOS, EOS, PAD
from encoding_v31 import OUTPUT, OUTPUT_END
from families import FAMILIES

POOL = 24
PER_BATCH = 1 << 14  # document numbers reserved for each batch


@dataclass
class Marks:
    bos: int
    eos: int
    pad: int
    assistant: int
    output: int       # V3.1: a tool's output begins
    output_end: int   # the assistant goes on behind it

    @classmethod
    def of(cls, tok: Tokenizer) -> "Marks":
        return cls(*(tok.token_to_id(t) for t in (BOS, EOS, PAD, ASSISTANT, OUTPUT, OUTPUT_END)))


def answer_mask(ids: np.ndarray, m: Marks) -> np.ndarray:
    """True on what the assistant says, its end-of-sequence token included."""
    pos = np.arange(len(ids))
    opens = (ids == m.assistant) | (ids == m.output_end)
    shut = ids == m.output
    shut[1:] |= ids[:-1] == m.eos
    opened, closed = (np.maximum.accumulate(np.where(x, pos, -1)) for x in (opens, shut))
    return (opened > closed) & ~opens


def weights(ids: np.ndarray, prompt: float, m: Marks) -> np.ndarray:
    """Loss weight of each token as a target. The tag after the assistant marker is the prompt's choice."""
    w = np.where(answer_mask(ids, m), 1.0, prompt).astype(np.float32)
    w[1:][ids[:-1] == m.assistant] = 0
    w[ids == m.bos] = 0
    return w


class Batches(torch.utils.data.Dataset):
    """ids, start, weight, kind: arrays [rows, length]; kind is the index into corpus.KINDS."""

    def __init__(self, tokenizer: str, rows: int, length: int, seed: int, first: int, count: int, budget: int,
                 mix: list[float] | None = None, family: str = "v4"):
        self.path, self.rows, self.length = tokenizer, rows, length
        self.seed, self.first, self.count, self.budget = seed, first, count, budget
        self.mix, self.tok, self.chat = mix, None, FAMILIES[family].encoding

    def __len__(self) -> int:
        return self.count

    def documents(self, index: int):
        """Endless (ids, kind, weight) of one batch, in chunks through the tokenizer."""
        number = self.seed * 10 ** 12 + (self.first + index) * PER_BATCH
        while True:
            docs = [corpus.document(number + i, self.budget, self.mix, self.chat) for i in range(POOL)]
            number += POOL
            for (kind, _, prompt), e in zip(docs, self.tok.encode_batch([d[1] for d in docs], add_special_tokens=False)):
                if len(e.ids) <= self.length:
                    ids = np.array(e.ids, dtype=np.int64)
                    yield ids, corpus.KINDS.index(kind), weights(ids, prompt, self.marks)

    def __getitem__(self, index: int):
        if self.tok is None:
            self.tok = Tokenizer.from_file(self.path)
            self.marks = Marks.of(self.tok)
        source = self.documents(index)
        pool = [next(source) for _ in range(POOL)]
        ids = np.full((self.rows, self.length), self.marks.pad, dtype=np.int32)
        start = np.zeros((self.rows, self.length), dtype=np.int32)
        weight = np.zeros((self.rows, self.length), dtype=np.float32)
        kind = np.zeros((self.rows, self.length), dtype=np.int8)
        for r in range(self.rows):
            at = 0
            while True:
                fit = next((i for i, d in enumerate(pool) if at + len(d[0]) <= self.length), None)
                if fit is None:
                    start[r, at:] = at
                    break
                doc, k, w = pool[fit]
                pool[fit] = next(source)
                n, padded = len(doc), min(-(-len(doc) // 4) * 4, self.length - at)
                ids[r, at:at + n], weight[r, at:at + n] = doc, w
                start[r, at:at + padded], kind[r, at:at + padded] = at, k
                at += padded
        return tuple(torch.from_numpy(x) for x in (ids, start, weight, kind))


def loader(workers: int, **args) -> torch.utils.data.DataLoader:
    """Batches in order, made by worker processes ahead of time."""
    return torch.utils.data.DataLoader(Batches(**args), batch_size=None, num_workers=workers, pin_memory=torch.cuda.is_available(),
                                       prefetch_factor=4 if workers else None)
