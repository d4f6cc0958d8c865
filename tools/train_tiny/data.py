"""Batches: documents of the corpus, tokenized and packed into rows of equal length.

Batch i depends only on (seed, i, shape, parts), so training can stop and go on anywhere, on any number of GPUs that
divides the parts. Documents start at multiples of 4 (the window of a C4 entry) and are never cut.
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
    """ids, start, weight, kind: arrays [rows, length]; kind is the index into corpus.KINDS. Batch i has the rows, length,
    budget and mix of shapes[i % n]; its `parts` have documents of their own, of which rank r of w takes every w-th part."""

    def __init__(self, tokenizer: str, shapes: list[dict], seed: int, first: int, count: int, family: str = "v4", parts: int = 1,
                 rank: int = 0, world: int = 1):
        if parts % world or any(s["rows"] % parts for s in shapes):
            raise ValueError(f"{parts} parts of batches do not suit {world} processes and {[s['rows'] for s in shapes]} rows")
        self.path, self.shapes, self.seed, self.first, self.count = tokenizer, shapes, seed, first, count
        self.tok, self.chat, self.parts, self.own = None, FAMILIES[family].encoding, parts, range(rank, parts, world)

    def __len__(self) -> int:
        return self.count

    def documents(self, index: int, part: int, shape: dict):
        """Endless (ids, kind, weight) of one part of a batch, in chunks through the tokenizer."""
        number = self.seed * 10 ** 12 + index * PER_BATCH + part * (PER_BATCH // self.parts)
        budget = shape.get("budget", shape["length"] - 100)
        while True:
            docs = [corpus.document(number + i, budget, shape.get("mix"), self.chat) for i in range(POOL)]
            number += POOL
            for (kind, _, prompt), e in zip(docs, self.tok.encode_batch([d[1] for d in docs], add_special_tokens=False)):
                if len(e.ids) <= shape["length"]:
                    ids = np.array(e.ids, dtype=np.int64)
                    yield ids, corpus.KINDS.index(kind), weights(ids, prompt, self.marks)

    def __getitem__(self, index: int):
        if self.tok is None:
            self.tok = Tokenizer.from_file(self.path)
            self.marks = Marks.of(self.tok)
        index += self.first
        parts = [self.packed(index, p, self.shapes[index % len(self.shapes)]) for p in self.own]
        return tuple(torch.from_numpy(np.concatenate(x)) for x in zip(*parts))

    def packed(self, index: int, part: int, shape: dict):
        rows, length = shape["rows"] // self.parts, shape["length"]
        source = self.documents(index, part, shape)
        pool = [next(source) for _ in range(POOL)]
        ids = np.full((rows, length), self.marks.pad, dtype=np.int32)
        start = np.zeros((rows, length), dtype=np.int32)
        weight = np.zeros((rows, length), dtype=np.float32)
        kind = np.zeros((rows, length), dtype=np.int8)
        for r in range(rows):
            at = 0
            while True:
                fit = next((i for i, d in enumerate(pool) if at + len(d[0]) <= length), None)
                if fit is None:
                    start[r, at:] = at
                    break
                doc, k, w = pool[fit]
                pool[fit] = next(source)
                n, padded = len(doc), min(-(-len(doc) // 4) * 4, length - at)
                ids[r, at:at + n], weight[r, at:at + n] = doc, w
                start[r, at:at + padded], kind[r, at:at + padded] = at, k
                at += padded
        return ids, start, weight, kind


def loader(workers: int, **args) -> torch.utils.data.DataLoader:
    """Batches in order, made by worker processes ahead of time."""
    return torch.utils.data.DataLoader(Batches(**args), batch_size=None, num_workers=workers, pin_memory=torch.cuda.is_available(),
                                       prefetch_factor=4 if workers else None)
