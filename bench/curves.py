#!/usr/bin/env python3
"""Loss curves beside PyTorch: `hadal train` and tools/train_tiny from the same weights, on the same batches of one file.

    bench/curves.py [--hadal build/hadal] [--models tiny-v3 toy-v4] [--steps 200] [--batch 8] [--backend cpu] [--threads 2] [--json FILE]
                    [--svg DIR]

tiny-v3 begins with random float32 weights of its shape, and toy-v4 is the random model of tests/e2e. The file has documents of
train_tiny's corpus; the order of `hadal train` is written a second time here. Both sides compute in float32, with AdamW, decay of
matrices, the gradient clipped, warm-up and a cosine. Prints the largest difference of a loss in the first 20 steps, and by how much
the means of the last quarter differ. Needs torch, safetensors and tokenizers."""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in ("scripts", "tools/train_tiny", "tests/e2e"):
    sys.path.insert(0, str(ROOT / folder))
from plots import plot, table

SEED, RATE, DECAY, CLIP, WARMUP, LAST = 3, 5e-4, 0.1, 1.0, 10, 0.1
LONGEST, DOCUMENTS = 128, 400
MASK = (1 << 32) - 1


# ---- the file ----


def documents(tokenizer, vocab, chat):
    """Tokens and masks of short documents of the corpus; a small vocabulary has what is left of larger ids."""
    import corpus
    from data import Marks, answer_mask
    from tokenizers import Tokenizer
    import numpy as np

    tok = Tokenizer.from_file(str(tokenizer))
    marks, found, number = Marks.of(tok), [], corpus.HELD_OUT
    while len(found) < DOCUMENTS:
        ids = np.array(tok.encode(corpus.document(number, 100, chat=chat)[1], add_special_tokens=False).ids)
        number += 1
        mask = answer_mask(ids, marks).astype(int)
        mask[0] = 0
        if len(ids) <= LONGEST and mask.any():
            found.append({"tokens": (ids % vocab).tolist(), "mask": mask.tolist()})
    return found


# ---- the order of hadal train, once more ----


def philox(seed, high, low):
    """Philox4x32-10 (Salmon et al., 2011)."""
    c = [low & MASK, low >> 32, high & MASK, high >> 32]
    k = [seed & MASK, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def shuffled(n, seed, place):
    """The example at a place of an endless sequence of shuffled epochs: swap or not (Hoang et al., 2012)."""
    epoch, x = divmod(place, n)
    for round in range(96):
        low = epoch << 32 | round
        partner = ((philox(seed, 2, low)[0] * n >> 32) + n - x) % n
        if philox(seed, 3 + max(partner, x), epoch << 32 | 96 + round)[1] & 1:
            x = partner
    return x


# ---- both sides ----


def factor(step, steps):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP - 1)))


def ours(model, data, out, args, *more):
    log = out.with_suffix(".log")
    words = [args.hadal, "train", model, "--data", data, "--out", out, "--log", log, "--steps", args.steps, "--batch", args.batch]
    words += ["--seed", SEED, "--lr", RATE, "--weight-decay", DECAY, "--clip", CLIP, "--schedule", "cosine", "--warmup", WARMUP]
    words += ["--last-lr", LAST, "--backend", args.backend, "--threads", args.threads, "-q", *more]
    done = subprocess.run([str(w) for w in words], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


class Peer:
    """tools/train_tiny's model of float32 weights, with torch.optim.AdamW."""

    def __init__(self, model, device):
        import torch
        from check_golden import missing, read_weights
        from families import family_of

        self.torch, self.device = torch, device
        config = json.loads((model / "config.json").read_text())
        family = family_of(config)
        c = family.from_json(config)
        weights = read_weights(str(model), config)
        for name, shape in missing(family.shapes(c), weights).items():
            weights[name] = torch.zeros(shape)
        weights = {k: w.to(device) for k, w in weights.items()}
        self.length = -(-LONGEST // c.pad_to) * c.pad_to
        self.model = family.model(c, weights, self.length)
        self.model.sparse = True
        self.trained = {k: w.requires_grad_() for k, w in weights.items() if w.is_floating_point() and not k.endswith("bias")}
        groups = [[w for w in self.trained.values() if (w.dim() > 1) == matrix] for matrix in (True, False)]
        self.optimizer = torch.optim.AdamW(
            [{"params": groups[0], "weight_decay": DECAY}, {"params": groups[1], "weight_decay": 0.0}], lr=RATE, betas=(0.9, 0.95), eps=1e-8
        )

    def step(self, examples, rate):
        torch, f = self.torch, self.torch.nn.functional
        pad = lambda name: torch.tensor([e[name] + [0] * (self.length - len(e[name])) for e in examples], device=self.device)
        ids, mask = pad("tokens"), pad("mask")
        x = self.model.trunk(ids, torch.zeros_like(ids))[0]
        rows = self.model.head_input(x)[:, :-1][mask[:, 1:] == 1]
        loss = f.cross_entropy(f.linear(rows, self.model.w[self.model.head]), ids[:, 1:][mask[:, 1:] == 1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def theirs(model, examples, args):
    import torch

    torch.set_num_threads(args.threads)
    peer = Peer(model, args.backend)
    order = lambda step: [examples[shuffled(len(examples), SEED, step * args.batch + k)] for k in range(args.batch)]
    return [peer.step(order(step), RATE * factor(step, args.steps)) for step in range(args.steps)]


def begin(name, folder):
    """A model folder that may have random weights, options of hadal train, and the folder with the weights that the run begins with."""
    from families import FAMILIES

    if name == "toy-v4":
        from toy_models import make_toy_model

        model = make_toy_model("v4", folder / name)
        return model, ["--weights", "f32"], model, FAMILIES["v4"].encoding
    model = ROOT / "models" / name
    config = json.loads((model / "config.json").read_text()) | {"torch_dtype": "float32"}
    config.pop("quantization_config")
    init = folder / "init.json"
    init.write_text(json.dumps(config))
    return model, ["--init", init], folder / f"{name}-run" / "start", FAMILIES["v3"].encoding


def compare(name, folder, args):
    model, more, start, chat = begin(name, folder)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    examples = documents(ROOT / "models" / "tiny-v3" / "tokenizer.json", vocab, chat)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(e) + "\n" for e in examples))
    own, peer = ours(model, data, folder / f"{name}-run", args, *more), theirs(start, examples, args)
    last = slice(args.steps * 3 // 4, None)
    mean = [sum(x[last]) / len(x[last]) for x in (own, peer)]
    return {
        "hadal": own,
        "PyTorch": peer,
        "first": max(abs(a - b) for a, b in zip(own[:20], peer)),
        "last": mean,
        "apart": abs(mean[0] / mean[1] - 1),
    }


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hadal", default=str(ROOT / "build/hadal"))
    p.add_argument("--models", nargs="*", default=["tiny-v3", "toy-v4"])
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--json", type=Path)
    p.add_argument("--svg", type=Path, help="folder of plots")
    args = p.parse_args()
    found, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            r = found[name] = compare(name, Path(folder), args)
            rows.append([name, f"{r['hadal'][0]:.5f}", f"{r['first']:.1e}", *(f"{x:.5f}" for x in r["last"]), f"{r['apart']:.3%}"])
            if args.json:
                args.json.write_text(json.dumps(found))
            if args.svg:
                lines = {"hadal": r["hadal"], "PyTorch": r["PyTorch"]}
                top = math.ceil(max(map(max, lines.values())))
                svg = plot(f"{name}, {args.steps} steps of {args.batch} examples", "step", "loss", list(range(1, args.steps + 1)), lines, high=top)
                (args.svg / f"{name}-loss.svg").write_text(svg)
    head = ["model", "loss of step 1", "largest difference in steps 1 to 20"]
    print(table([*head, "mean of the last quarter, hadal", "PyTorch", "apart"], rows), end="")


if __name__ == "__main__":
    main()
