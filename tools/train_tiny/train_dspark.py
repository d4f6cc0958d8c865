"""Train a DSpark drafter for a finished model: `train_dspark.py RUN.json`, with the options of train.py.

The trunk is the exported file and stays as it is; its distribution at every position is what the drafts should have.
A run file also names the trunk, the drafter's sizes (`dspark`), the layers that the stages begin as (`like`), and how
many anchors a sequence has: `chunks` times `anchors`.
"""
import time

import torch

import corpus
from data import loader
from dspark import FORMS, Anchors, DSpark, DSparkConfig, choose, init, target_weights
from export import load_model, load_weights
from layers import working
from optim import Optimizer
from ranks import Ranks
from train import BIASES, Trainer, main

Tensor = torch.Tensor
LOSS = (0.1, 0.9, 1.0)  # of cross entropy, total variation and confidence
FADE = 4.0  # place i of a block has the weight exp(-i / FADE)


class DSparkTrainer(Trainer):
    columns = ["ce", "tv", "confidence", "same_0", "same_last", "grad_norm"]

    def __init__(self, name: str, run: dict, directory: str, device: str, compiled: bool):
        self.name, self.run, self.dir, self.device = name, run, directory, device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        longest = max(p["length"] for p in run["phases"])
        trunk = load_model(run["trunk"], longest, device, dtype, compiled=compiled)
        config, form = DSparkConfig(**run["dspark"]), FORMS[run["family"]]
        self.w = {}
        for k, x in init(config.of_stages(trunk.c), config, run["stages"], form, load_weights(run["trunk"]), run["like"], run["seed"]).items():
            self.w[k] = working(k, x, device, dtype).requires_grad_(not k.endswith(BIASES))
        self.c = trunk.c
        self.model = DSpark(trunk, self.w, config, form, compiled=compiled)
        self.opt = Optimizer(self.w, run["family"], self.c.o_groups, run["muon_lr"], run["adam_lr"])
        self.place = torch.exp(-torch.arange(config.block_size, device=device) / FADE)
        self.lots = torch.Generator(device)
        self.ranks = Ranks(device)
        self.step, self.spent, self.within = 0, 0.0, float("inf")
        self.quantized, self.checked = False, 0.0
        self.skipped = 0
        self.begun = time.time()
        self.biases = [k for k in self.w if k.endswith(BIASES)]

    def rows(self, ids: Tensor, start: Tensor, anchors: Anchors):
        """Losses and matches of the blocks behind the anchors, each [G, A, K], and the loads."""
        k = self.model.d.block_size
        taps, hidden = self.model.trunk(ids, start)
        before = anchors.pick(ids, k, 0)
        mixed, loads = self.model.draft(self.model.absorb(taps), before[..., 0].contiguous(), start, anchors)
        out = self.model.losses(mixed, before.flatten(), anchors.pick(hidden, k, 0).flatten(0, 2))
        return [x.view(before.shape) for x in out], loads

    def one_step(self, batch: tuple, t: float) -> tuple[Tensor, list[Tensor]]:
        ids, start, weight = (x.to(self.device, non_blocking=True) for x in (batch[0].long(), *batch[1:3]))
        if t >= self.run["qat_from"] and not self.quantized:
            self.quantized = True
            self.opt.publish(True)
        k = self.model.d.block_size
        self.lots.manual_seed(self.run["seed"] * 10 ** 6 + self.step)
        anchors = choose(weight, start, self.c.sliding_window, k, self.run["chunks"], self.run["anchors"], self.lots)
        (*parts, same), loads = self.rows(ids, start, anchors)
        each = target_weights(weight, start, anchors, k)
        share = each * self.place
        share = share / share.sum().clamp_min(1.0)
        means = [(x * share).sum() for x in parts]
        sum(a * x for a, x in zip(LOSS, means)).backward()
        norm = self.update(t, {k: g.float() for k, g in self.opt.gradients().items()}, loads)
        right = [(same[..., i] * each[..., i]).sum() / each[..., i].sum().clamp_min(1.0) for i in (0, -1)]
        return torch.stack([*(x.detach() for x in means), *right, norm]), loads

    def evaluate(self, batches: int, seed: int, rows: int, length: int, workers: int = 4) -> dict:
        """On held-out documents, by kind: accepted drafts of a block in answers, where a draft is right if the
        trunk's first choice is the same given the document's tokens before it; and the share right by place.
        Gradients are on, so that what was compiled serves."""
        k, form = self.model.d.block_size, corpus.KINDS
        total = torch.zeros(len(form), 2 + k, device=self.device)
        away = torch.zeros(k, device=self.device)
        self.lots.manual_seed(0)
        for ids, start, weight, kind in loader(workers, tokenizer=self.run["tokenizer"], shapes=[{"rows": rows, "length": length}], seed=seed, first=0,
                                               count=batches, family=self.run["family"]):
            ids, start, weight, kind = (x.to(self.device) for x in (ids.long(), start, weight, kind.long()))
            answer = (weight == 1).float()
            anchors = choose(answer, start, self.c.sliding_window, k, self.run["chunks"], self.run["anchors"], self.lots)
            (_, tv, _, same), _ = self.rows(ids, start, anchors)
            full = target_weights(answer, start, anchors, k).amin(-1)  # blocks within an answer
            chain = same.float().cumprod(-1) * full[..., None]
            of = kind[anchors.row[:, None], anchors.at]
            for i in range(len(form)):
                here = (of == i) * full
                total[i] += torch.stack([here.sum(), (chain.sum(-1) * here).sum(), *(same * here[..., None]).sum((0, 1))])
            away += (tv.detach() * full[..., None]).sum((0, 1))
        n = total[:, 0].clamp_min(1.0)
        everything = total.sum(0)
        return dict(blocks=int(everything[0]), accepted={name: round(float(total[i, 1] / n[i]), 3) for i, name in enumerate(form) if total[i, 0]},
                    right=[round(float(x / everything[0]), 4) for x in everything[2:]], tv=[round(float(x / everything[0]), 4) for x in away])


if __name__ == "__main__":
    main(DSparkTrainer)
