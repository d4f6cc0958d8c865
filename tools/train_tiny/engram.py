"""Addresses of V4.1's Engram tables: classes of tokens, primes, multipliers, and the rows of a text's n-grams."""
import json
import unicodedata

import numpy as np
import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def folded(text: str) -> str:
    """Without marks and case, white space joined; text itself if nothing is left."""
    flat = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    flat = "".join(c.lower() for c in flat if unicodedata.category(c)[0] != "M")
    words, blank = [], False
    for c in flat:
        space = c in " \t\r\n"
        if not (space and blank):
            words.append(" " if space else c)
        blank = space
    joined = "".join(words)
    return (joined if joined == " " else joined.strip()) or text


def token_classes(tokenizer: str, vocab: int) -> tuple[Tensor, int]:
    """Class of every token [vocab] in order of first occurrence, and how many there are."""
    file, letters = json.load(open(tokenizer)), byte_letters()
    stored = {i: token for token, i in file["model"]["vocab"].items()}
    added = {t["id"]: t["content"] for t in file["added_tokens"]}
    numbers: dict[str, int] = {}
    found = []
    for i in range(vocab):
        text = added.get(i)
        if text is None:
            text = bytes(letters[c] for c in stored[i]).decode(errors="replace")
        key = stored[i] if "\ufffd" in text else folded(text)
        found.append(numbers.setdefault(key, len(numbers)))
    return torch.tensor(found), len(numbers)


def primes(layers: int, columns: int, first: int) -> list[list[int]]:
    """A list of primes for each table, ascending from `first` on, none twice."""
    out, n = [], first - 1
    for _ in range(layers):
        own: list[int] = []
        while len(own) < columns:
            n += 1
            if n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1)):
                own.append(n)
        out.append(own)
    return out


def multipliers(layer: int, classes: int, orders: int) -> list[int]:
    bound = (2 ** 63 - 1) // classes // 2
    return [int(x) * 2 + 1 for x in np.random.default_rng(10007 * layer).integers(0, bound, orders)]


class Addresses:
    """Rows of each table for token ids."""

    def __init__(self, c, device):
        of, classes = token_classes(c.tokenizer, c.vocab_size)
        if classes != c.engram_compressed_vocab_size:
            raise ValueError(f"{c.tokenizer}: {classes} classes of tokens, the configuration says {c.engram_compressed_vocab_size}")
        self.of, self.pad, self.heads, self.orders = of.to(device), int(of[c.engram_pad_token_id]), c.engram_n_heads, c.engram_max_ngram_size
        self.primes = primes(len(c.engram_layer_ids), self.heads * (self.orders - 1), c.engram_vocab_size)
        rows = [sum(p) for p in self.primes]
        if rows != c.engram_num_embeddings:
            raise ValueError(f"engram_num_embeddings is {c.engram_num_embeddings}, the primes add up to {rows}")
        self.multipliers = [multipliers(layer, classes, self.orders) for layer in c.engram_layer_ids]
        self.modulus = [torch.tensor(p, device=device) for p in self.primes]
        self.first = [torch.tensor([0, *np.cumsum(p[:-1]).tolist()], device=device) for p in self.primes]

    def rows(self, ids: Tensor, start: Tensor) -> list[Tensor]:
        """[B, T, columns] for each table; what lies before a document counts as padding."""
        x = self.of[ids]
        t = torch.arange(ids.shape[1], device=ids.device)
        past = [x] + [torch.where(t - s >= start, F.pad(x[:, :-s], (s, 0)), self.pad) for s in range(1, self.orders)]
        out = []
        for m, modulus, first in zip(self.multipliers, self.modulus, self.first):
            mixed, hashes = past[0] * m[0], []
            for k in range(1, self.orders):
                mixed = mixed ^ (past[k] * m[k])
                hashes += [mixed] * self.heads
            out.append(torch.stack(hashes, -1) % modulus + first)
        return out
