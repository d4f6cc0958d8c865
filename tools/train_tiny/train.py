"""Train one model: `train.py RUN.json`. Stops at --minutes or at the last step, whichever is first, and
goes on from DIR/state.pt when started again. Writes DIR/curve.csv while it runs.

A run file names the family, the seed and the phases: until which share of the run, rows, length, mixture of
documents, sparse selection; or several of these under "batches", which take turns. The share is that of the steps
or, with --within, of the minutes, if that is more: then the run ends in time on a slower machine too, with less
learned. --gpus N shares every batch among N processes ("parts" in the run file is a multiple of N).
"""
import argparse
import csv
import json
import math
import os
import time

import torch
import torch.nn.functional as F

import corpus
from data import loader
from export import load_weights
from families import FAMILIES
from layers import working
from optim import Optimizer
from ranks import Ranks, launch
from warm import Warm

Tensor = torch.Tensor
HELD_OUT_SEED = 10 ** 6 + 1  # documents of this seed are never trained on
BIASES = ("gate.bias", "e_score_correction_bias")
MOST_SKIPPED = 20  # steps in a row whose gradient is not finite; then the run ends


def weighted_ce(hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of weighted cross entropies, and the 0/1 map of right guesses."""
    logits = F.linear(hidden, head).float()
    ce = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    return (ce * weight).sum() / weight.sum(), (logits.argmax(-1) == target).detach()


def shifted(x: Tensor, by: int) -> Tensor:
    return F.pad(x[:, by:], (0, by))


def shapes_of(phase: dict) -> list[dict]:
    """Kinds of batches of a phase that take turns."""
    return phase.get("batches", [phase])


class Trainer:
    columns = ["loss", "draft_loss", "indexer_kl", "grad_norm"]  # of one_step's values, the norm last

    def __init__(self, name: str, run: dict, directory: str, device: str, compiled: bool):
        self.name, self.run, self.dir, self.device = name, run, directory, device
        self.begun = time.time()
        self.ranks = Ranks(device)
        family = FAMILIES[run["family"]]
        self.c = family.config(**run["model"])
        self.c.tokenizer = run["tokenizer"]
        self.w = {}
        for k, x in family.init(self.c, run["seed"]).items():
            self.w[k] = working(k, x, device, torch.bfloat16 if device == "cuda" else torch.float32)
            self.w[k].requires_grad_(x.is_floating_point() and not k.endswith(BIASES))
        longest = max(s["length"] for p in run["phases"] for s in shapes_of(p))
        self.model = family.model(self.c, self.w, longest, compiled)
        self.head = self.w[self.model.head]
        self.opt = Optimizer(self.w, run["family"], getattr(self.c, "o_groups", 1), run["muon_lr"], run["adam_lr"])
        self.ce = torch.compile(weighted_ce, dynamic=False) if compiled else weighted_ce
        self.step, self.spent, self.within = 0, 0.0, math.inf
        self.quantized, self.checked = False, 0.0
        self.skipped = 0
        self.biases = [k for k in self.w if k.endswith(BIASES)]

    def seconds(self) -> float:
        """Since this start, the same for all processes."""
        return self.ranks.of_first(time.time() - self.begun)

    def share(self, seconds: float) -> float:
        """How much of the schedule lies behind."""
        return max(self.step / self.run["steps"], (self.spent + seconds) / self.within)

    def guess(self, hidden: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and right guesses; all rows as one, so that shapes of the same size share a kernel."""
        loss, hit = self.ce(hidden.flatten(0, 1)[None], self.head, target.reshape(1, -1), weight.reshape(1, -1))
        return loss, hit.view(target.shape)

    def losses(self, ids: Tensor, start: Tensor, weight: Tensor, drafts: int):
        """(main, [draft losses], indexer loss, loads, [right guesses of the main model and of each draft])."""
        x, index, loads = self.model.trunk(ids, start)
        main, hit = self.guess(self.model.head_input(x), shifted(ids, 1), shifted(weight, 1))
        draft, kvs, right = [], [], [hit]
        for s in range(1, drafts + 1):
            x, kv, load = self.model.mtp(x, ids, start, s, kvs[0] if kvs else None, kvs[1:])
            kvs.append(kv)
            if s == 1:
                loads = loads + [load]
            loss, hit = self.guess(self.model.head_input(x, "mtp.0."), shifted(ids, s + 1), shifted(weight, s + 1))
            draft.append(loss)
            right.append(hit)
        return main, draft, index, loads, right

    def schedule(self, t: float) -> float:
        """Warm-up, constant, then a cosine to `end`."""
        hold, end = self.run["hold"], self.run["end"]
        if t < hold:
            return min(1.0, (self.step + 1) / 40)
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * (t - hold) / (1 - hold)))

    @torch.no_grad()
    def balance(self, loads: list[Tensor]) -> None:
        """Keep every expert alive and the busiest one within a band: real models are skewed, and so shall this one be."""
        by_layer = dict(zip(self.model.routed_layers(), loads))
        least, low, high = self.run["band"]
        for k in self.biases:
            load = by_layer[k.rsplit("gate.", 1)[0]]
            share = load / load.mean()
            busiest = F.one_hot(share.argmax(), len(share)) * (share.max() < low)
            self.w[k].add_((share < least).float() + busiest - (share > high).float(), alpha=1e-3)

    def phase(self, t: float) -> dict:
        return next((p for p in self.run["phases"] if t < p["until"]), self.run["phases"][-1])

    def batches(self, p: dict, workers: int):
        return loader(workers, tokenizer=self.run["tokenizer"], shapes=shapes_of(p), seed=self.run["seed"], first=self.step,
                      count=self.run["steps"] - self.step, family=self.run["family"], parts=self.run.get("parts", 1), rank=self.ranks.rank,
                      world=self.ranks.world)

    def warm_up(self) -> None:
        """Compile what the phases need, a share in each process."""
        if self.ranks.world == 1 or self.model.fast is self.model.plain:
            return
        warm = Warm(self.model, self.ranks)
        self.model.f = warm.parts
        for p in self.run["phases"]:
            for s in shapes_of(p):
                self.suit(p, s)
                ids = torch.randint(3, self.c.vocab_size, (s["rows"] // self.ranks.world, s["length"]), device=self.device)
                self.model.trunk(ids, torch.zeros_like(ids))
        self.model.f = self.model.fast
        self.opt.gradients()
        print(f"rank {self.ranks.rank}: {len(warm.seen)} kernels compiled by all after {time.time() - self.begun:.1f} s", flush=True)
        self.seconds()

    def suit(self, phase: dict, shape: dict) -> None:
        """Set the model for batches of a phase: what it selects, which indexers learn."""
        self.model.sparse = phase.get("sparse", False)
        self.model.index = shape.get("index", True)

    def prepare(self, t: float) -> None:
        """Set the model for this step."""
        p, model = self.phase(t), self.model
        turns = shapes_of(p)
        self.suit(p, turns[self.step % len(turns)])
        model.rounded = t >= self.run.get("cache_from", 1.0) and self.step // len(turns) % 2 == 0
        if t >= self.run["qat_from"] and not self.quantized:
            self.quantized = True
            self.opt.publish(True)

    def one_step(self, batch: tuple, t: float) -> tuple[Tensor, list[Tensor]]:
        """Forward, backward, update. Returns (loss, first draft's loss, indexer loss, gradient norm) and the loads."""
        ids, start, weight = (x.to(self.device, non_blocking=True) for x in (batch[0].long(), *batch[1:3]))
        self.prepare(t)
        drafts = min(self.run["drafts"], self.run["drafts"] if t >= self.run["drafts_from"] else 1)
        main, draft, index, loads, _ = self.losses(ids, start, weight, drafts)
        own = shifted(weight, 1).sum()
        part = own / self.ranks.sum(own.clone())
        index = torch.as_tensor(index, device=main.device).float() / self.ranks.world
        ((main + self.run["mtp_weight"] * sum(draft) / (1 if drafts < 2 else 1.5)) * part + index * 0.5).backward()
        values = torch.stack([main.detach() * part, (draft[0] if draft else main * 0).detach() * part, index.detach()])
        grad = self.opt.gradients()
        values, *sums = self.ranks.sum_all([values, *loads, *grad.values()])
        loads = sums[:len(loads)]
        norm = self.update(t, dict(zip(grad, sums[len(loads):])), loads)
        return torch.cat([values, norm[None]]), loads

    def update(self, t: float, grad: dict[str, Tensor], loads: list[Tensor]) -> Tensor:
        """Take one step by these gradients, or skip it if they are not finite. Returns their norm."""
        norm = self.opt.step(self.schedule(t), grad)
        self.step += 1
        if norm.isfinite():
            self.opt.publish(self.quantized)
            self.balance(loads)
            self.skipped = 0
            return norm
        self.skipped += 1
        if self.skipped == MOST_SKIPPED:
            bad = [k for k, g in grad.items() if not g.isfinite().all()]
            raise SystemExit(f"{self.name}: the gradients of the last {MOST_SKIPPED} steps, up to step {self.step}, were not finite; "
                             f"now those of {len(bad)} of {len(grad)} weights, {', '.join(bad[:3])} among them")
        return norm

    def train(self, minutes: float, workers: int) -> None:
        self.warm_up()
        log = Log(self) if self.ranks.rank == 0 else None
        seconds = self.seconds()
        while (t := self.share(seconds)) < 1 and seconds < minutes * 60:
            p = self.phase(t)
            for batch in self.batches(p, workers):
                values, loads = self.one_step(batch, t)
                if log:
                    log.add(values, loads, batch[0].numel() * self.ranks.world, seconds, t)
                if self.step % 1000 == 0 or seconds > self.checked + 240:
                    self.checked = seconds
                    self.save()
                seconds = self.seconds()
                t = self.share(seconds)
                if t >= 1 or self.phase(t) is not p or seconds >= minutes * 60:
                    break
        self.save()

    @torch.no_grad()
    def evaluate(self, batches: int, seed: int, rows: int, length: int, workers: int = 4) -> dict:
        """Teacher-forced on held-out documents: loss, share of whole answers right, draft hits, by kind."""
        total: dict[str, list[float]] = {}
        data = loader(workers, tokenizer=self.run["tokenizer"], shapes=[{"rows": rows, "length": length}], seed=seed, first=0, count=batches,
                      family=self.run["family"])
        drafts = min(3, self.run["drafts"])
        accept = {k: [0.0, 0.0] for k in corpus.KINDS}
        losses = []
        self.model.f = self.model.plain
        ce, self.ce = self.ce, weighted_ce
        for ids, start, weight, kind in data:
            ids, start, weight, kind = (x.to(self.device) for x in (ids.long(), start, weight, kind))
            main, draft, _, loads, right = self.losses(ids, start, weight, drafts)
            losses.append([float(main), *(float(d) for d in draft)])
            said = shifted(weight, 1) == 1
            kinds = shifted(kind, 1)
            for i, name in enumerate(corpus.KINDS):
                here = said & (kinds == i)
                spans = torch.cumsum((here & ~F.pad(here[:, :-1], (1, 0))).long().flatten(), 0)[here.flatten()]
                if not len(spans):
                    continue
                spans = spans.unique(return_inverse=True)[1]
                wrong = torch.zeros(int(spans.max()) + 1, device=ids.device).index_add_(0, spans, (~right[0][here]).float())
                t = total.setdefault(name, [0, 0])
                t[0] += float((wrong == 0).sum())
                t[1] += len(wrong)
                chain = torch.ones_like(weight)
                for s in range(1, drafts + 1):
                    chain = chain * (right[s] & (shifted(weight, s + 1) == 1)).float()
                    accept[name][0] += float(chain[here].sum())
                accept[name][1] += float(here.sum())
        self.model.f, self.ce = self.model.fast, ce
        mean = torch.tensor(losses).mean(0).tolist()
        return dict(loss=[round(x, 4) for x in mean], exact={k: round(a / b, 4) for k, (a, b) in total.items()}, answers={k: b for k, (a, b) in total.items()},
                    accepted={k: round(a / b, 3) for k, (a, b) in accept.items() if b}, skew=[round(float(x.max() / x.mean()), 2) for x in loads],
                    least=[round(float(x.min() / x.mean()), 2) for x in loads])

    def save(self) -> None:
        if self.ranks.rank:
            return
        torch.save(dict(step=self.step, spent=self.spent + time.time() - self.begun, optimizer=self.opt.state(), biases={k: self.w[k] for k in self.biases}), f"{self.dir}/state.tmp")
        os.replace(f"{self.dir}/state.tmp", f"{self.dir}/state.pt")
        self.save_small()

    def load(self) -> None:
        s = torch.load(f"{self.dir}/state.pt", map_location=self.device, weights_only=True)
        self.step, self.spent = s["step"], s["spent"]
        self.opt.load(s["optimizer"])
        with torch.no_grad():
            for k, x in s["biases"].items():
                self.w[k].copy_(x)
        self.opt.publish(False)

    def start_from(self, path: str) -> None:
        """Begin with the weights of an exported model."""
        with torch.no_grad():
            for k, x in load_weights(path).items():
                self.opt.master.get(k, self.w[k]).copy_(x)
        self.opt.publish(False)

    def save_small(self) -> None:
        """What an export needs: masters, bf16 where the file is not float32."""
        o = self.opt
        half = {k: x if o.fmt[k] == "f32" else x.bfloat16() for k, x in o.master.items()}
        torch.save(dict(step=self.step, spent=self.spent + time.time() - self.begun, run=self.run, biases={k: self.w[k] for k in self.biases},
                        fixed={k: x for k, x in self.w.items() if not x.is_floating_point()},
                        master=half), f"{self.dir}/small.tmp")
        os.replace(f"{self.dir}/small.tmp", f"{self.dir}/small.pt")


    def report(self, batches: int, workers: int) -> None:
        """Memory, and the measure on held-out documents."""
        if self.device == "cuda":
            print("peak GB", round(torch.cuda.max_memory_allocated() / 1e9, 1))
        p = self.run["phases"][-1]
        self.model.sparse, self.model.rounded = p.get("sparse", False), False
        s = shapes_of(p)[0]
        if batches:
            print(json.dumps(self.evaluate(batches, HELD_OUT_SEED, s["rows"], s["length"], workers)), flush=True)


class Log:
    """curve.csv: a row every 20 steps, the more telling ones printed too. Means are those of the steps that were taken."""

    def __init__(self, t: Trainer):
        self.trainer = t
        path = f"{t.dir}/curve.csv"
        new = not os.path.exists(path)
        self.file = open(path, "a", newline="")
        self.out = csv.writer(self.file)
        if new:
            layers = range(len(t.model.routed_layers()))
            self.out.writerow(["run", "step", *t.columns, "tokens_per_s", "seconds", "length", "quantized",
                               *(f"{kind}_{i}" for kind in ("skew", "least") for i in layers), "skipped"])
        self.window, self.tokens, self.mark = [], 0, time.time()

    def add(self, values: Tensor, loads: list[Tensor], tokens: int, seconds: float, share: float) -> None:
        t = self.trainer
        self.window.append(values)
        self.tokens += tokens
        if t.step % 20:
            return
        rows = torch.stack(self.window)
        taken = rows[:, -1].isfinite()  # the others were skipped
        mean = rows[taken].mean(0).tolist()
        now = time.time()
        shares = [x / x.mean() for x in loads]
        longest = max(s["length"] for s in shapes_of(t.phase(share)))
        row = [t.name, t.step, *(round(x, 4) for x in mean), round(self.tokens / (now - self.mark)), round(t.spent + seconds, 1), longest,
               int(t.quantized), *(round(float(x.max()), 2) for x in shares), *(round(float(x.min()), 2) for x in shares),
               int((~taken).sum())]
        self.out.writerow(row)
        self.file.flush()
        if t.step % 100 == 0 or t.step <= 60:
            print(*row, flush=True)
        self.window, self.tokens, self.mark = [], 0, now


def main(kind: type = Trainer) -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("run")
    ap.add_argument("--dir", default="run")
    ap.add_argument("--minutes", type=float, default=math.inf, help="stop after these; the next start goes on")
    ap.add_argument("--within", type=float, default=math.inf, help="minutes that this run may take")
    ap.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="processes that make batches, for each GPU")
    ap.add_argument("--gpus", type=int, default=1, help="processes that share every batch, each on one GPU")
    ap.add_argument("--init", help="exported model to begin with")
    ap.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile; by default on a GPU only")
    ap.add_argument("--held-out", type=int, default=4, help="batches to measure with at the end")
    args = ap.parse_args()
    if args.gpus > 1 and "RANK" not in os.environ:
        raise SystemExit(launch(args.gpus))
    run = json.load(open(args.run))
    os.makedirs(args.dir, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(False)  # V3's masks are for the memory-efficient kernel
    torch._dynamo.config.recompile_limit = 64
    device = "cuda" if torch.cuda.is_available() else "cpu"
    t = kind(os.path.basename(args.run).removesuffix(".json"), run, args.dir, device, device == "cuda" if args.compile is None else args.compile)
    t.within = args.within * 60
    if os.path.exists(f"{args.dir}/state.pt"):
        t.load()
        print("go on at step", t.step, flush=True)
    elif args.init:
        t.start_from(args.init)
    t.train(args.minutes, args.workers)
    t.ranks.close()
    if t.ranks.rank == 0:
        t.report(args.held_out, min(4, args.workers))


if __name__ == "__main__":
    main()
