"""Train one model: `train.py RUN.json`. Stops at --minutes or at the last step, whichever is first, and
goes on from DIR/state.pt when started again. Writes DIR/curve.csv while it runs.

A run file names the family, the phases (rows, length, steps share, sparse selection) and the seed.
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
import model_v4
from data import loader
from optim import Optimizer

Tensor = torch.Tensor
HELD_OUT_SEED = 10 ** 6 + 1  # documents of this seed are never trained on
F32_WORK = ("norm.weight", "hc_", "attn_sink", "ape", "bias", "gate.weight", "layernorm", "enorm", "hnorm")


def weighted_ce(hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of weighted cross entropies, and the 0/1 map of right guesses."""
    logits = F.linear(hidden, head).float()
    ce = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    return (ce * weight).sum() / weight.sum(), (logits.argmax(-1) == target).detach()


def shifted(x: Tensor, by: int) -> Tensor:
    return F.pad(x[:, by:], (0, by))


class Trainer:
    def __init__(self, run: dict, directory: str, device: str):
        self.run, self.dir, self.device = run, directory, device
        self.c = model_v4.V4Config(**run["model"])
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        w = {}
        for k, x in model_v4.init(self.c, run.get("init_seed", run["seed"])).items():
            f32 = any(p in k for p in F32_WORK) or not x.is_floating_point()
            w[k] = x.to(device, x.dtype if f32 else dtype)
            trained = x.is_floating_point() and not k.endswith(("gate.bias", "e_score_correction_bias"))
            w[k].requires_grad_(trained)
        self.w = w
        longest = max(p["length"] for p in run["phases"])
        self.model = model_v4.V4(self.c, w, longest, compiled=device == "cuda")
        self.opt = Optimizer(w, run["family"], getattr(self.c, "o_groups", 1), run["muon_lr"], run["adam_lr"])
        self.ce = torch.compile(weighted_ce, dynamic=False) if device == "cuda" else weighted_ce
        self.step, self.spent = 0, 0.0
        self.biases = [k for k in w if k.endswith(("gate.bias", "e_score_correction_bias"))]

    def losses(self, ids: Tensor, start: Tensor, weight: Tensor, drafts: int, eval_only: bool = False):
        """(main, [draft losses], indexer loss, loads, right guesses)."""
        x, index, loads = self.model.trunk(ids, start)
        main, right = self.ce(self.model.head_input(x), self.w["head.weight"], shifted(ids, 1), shifted(weight, 1))
        draft, kvs = [], []
        for s in range(1, drafts + 1):
            x, kv, load = self.model.mtp(x, ids, start, s, kvs[0] if kvs else None, kvs[1:])
            kvs.append(kv)
            if s == 1:
                loads = loads + [load]
            loss, hit = self.ce(self.model.head_input(x, "mtp.0."), self.w["head.weight"], shifted(ids, s + 1), shifted(weight, s + 1))
            draft.append(loss)
            right = right if not eval_only else torch.stack([*right.unbind(0), hit]) if right.dim() == 3 else torch.stack([right, hit])
        return main, draft, index, loads, right

    def schedule(self) -> float:
        """Warm-up, constant, then a cosine to 5 %."""
        t = self.step / self.run["steps"]
        warm = min(1.0, (self.step + 1) / 40)
        hold = self.run.get("hold", 0.5)
        if t < hold:
            return warm
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (t - hold) / (1 - hold)))

    @torch.no_grad()
    def balance(self, loads: list[Tensor]) -> None:
        """Push only experts outside the wanted band: skew stays, collapse does not."""
        if self.step > 0.85 * self.run["steps"]:
            return
        by_layer = dict(zip(self.model.routed_layers(), loads))
        for k in self.biases:
            load = by_layer[k.rsplit("gate.", 1)[0]]
            share = load / load.mean()
            low, high = self.run.get("band", [0.25, 2.5])
            self.w[k].add_((share < low).float() - (share > high).float(), alpha=1e-3)

    def phase(self) -> dict:
        t = self.step / self.run["steps"]
        return next(p for p in self.run["phases"] if t < p["until"])

    def train(self, minutes: float, workers: int) -> None:
        begun = time.time()
        log = open(f"{self.dir}/curve.csv", "a", newline="")
        out = csv.writer(log)
        while self.step < self.run["steps"]:
            p = self.phase()
            last = math.ceil(p["until"] * self.run["steps"])
            self.model.sparse = p.get("sparse", False)
            batches = loader(workers, tokenizer=self.run["tokenizer"], rows=p["rows"], length=p["length"], seed=self.run["seed"],
                             first=self.step, count=last - self.step, budget=p["length"] - 100, mix=self.run.get("mix"))
            window, mark, tokens = [], time.time(), 0
            for ids, start, weight, _ in batches:
                ids, start, weight = (x.to(self.device, non_blocking=True) for x in (ids.long(), start, weight))
                quantized = self.step >= self.run["qat_from"] * self.run["steps"]
                if quantized and not getattr(self, "qat", False):
                    self.opt.publish(True)
                    self.qat = True
                drafts = self.run["drafts"] if self.step >= self.run["drafts_from"] * self.run["steps"] else 1
                main, draft, index, loads, _ = self.losses(ids, start, weight, drafts)
                (main + self.run["mtp_weight"] * sum(draft) / (1 if drafts == 1 else 1.5) + index * 0.5).backward()
                norm = self.opt.step(self.schedule())
                self.opt.publish(quantized)
                self.balance(loads)
                self.step += 1
                tokens += ids.numel()
                window.append(torch.stack([main.detach(), draft[0].detach(), torch.as_tensor(index, device=main.device).detach().float(), norm]))
                if self.step % 20 == 0 or self.step == self.run["steps"]:
                    v = torch.stack(window).mean(0).tolist()
                    skew = [round(float(x.max() / x.mean()), 2) for x in loads]
                    low = [round(float(x.min() / x.mean()), 2) for x in loads]
                    now = time.time()
                    row = [self.step, *(round(x, 4) for x in v), round(tokens / (now - mark)), round(self.spent + now - begun, 1), quantized, *skew, *low]
                    out.writerow(row)
                    log.flush()
                    if self.step % 100 == 0 or self.step <= 60 or self.run["steps"] < 400:
                        print(*row, flush=True)
                    window, mark, tokens = [], now, 0
                if self.step % 1000 == 0:
                    self.save()
                if self.step % 2500 == 0:
                    print(json.dumps(self.evaluate(2, HELD_OUT_SEED, p["rows"], p["length"])), flush=True)
                if time.time() - begun > minutes * 60:
                    self.spent += time.time() - begun
                    self.save()
                    return
            del batches
        self.spent += time.time() - begun
        self.save()

    @torch.no_grad()
    def evaluate(self, batches: int, seed: int, rows: int, length: int, workers: int = 4) -> dict:
        """Teacher-forced on held-out documents: loss, share of whole answers right, draft hits, by kind."""
        total: dict[str, list[float]] = {}
        data = loader(workers, tokenizer=self.run["tokenizer"], rows=rows, length=length, seed=seed, first=0, count=batches, budget=length - 100)
        accept = {k: [0.0, 0.0] for k in corpus.KINDS}
        losses = []
        self.model.f = self.model.plain
        ce, self.ce = self.ce, weighted_ce
        for ids, start, weight, kind in data:
            ids, start, weight, kind = (x.to(self.device) for x in (ids.long(), start, weight, kind))
            main, draft, _, loads, right = self.losses(ids, start, weight, 3, eval_only=True)
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
                chain = torch.ones_like(right[0], dtype=torch.float)
                for s in (1, 2, 3):
                    chain = chain * (right[s] & (shifted(weight, s + 1) == 1)).float()
                    accept[name][0] += float(chain[here].sum())
                accept[name][1] += float(here.sum())
        self.model.f, self.ce = self.model.fast, ce
        mean = torch.tensor(losses).mean(0).tolist()
        return dict(loss=[round(x, 4) for x in mean], exact={k: round(a / b, 4) for k, (a, b) in total.items()}, answers={k: b for k, (a, b) in total.items()},
                    accepted={k: round(a / b, 3) for k, (a, b) in accept.items() if b}, skew=[round(float(x.max() / x.mean()), 2) for x in loads],
                    least=[round(float(x.min() / x.mean()), 2) for x in loads])

    def save(self) -> None:
        torch.save(dict(step=self.step, spent=self.spent, optimizer=self.opt.state(), biases={k: self.w[k] for k in self.biases}), f"{self.dir}/state.tmp")
        os.replace(f"{self.dir}/state.tmp", f"{self.dir}/state.pt")
        self.save_small()

    def load(self) -> None:
        s = torch.load(f"{self.dir}/state.pt", map_location=self.device, weights_only=True)
        self.step, self.spent = s["step"], s["spent"]
        self.opt.load(s["optimizer"])
        with torch.no_grad():
            for k, x in s["biases"].items():
                self.w[k].copy_(x)
        self.opt.publish(self.step >= self.run["qat_from"] * self.run["steps"])

    def start_from(self, path: str) -> None:
        """Begin a new schedule with the weights of an earlier run."""
        s = torch.load(path, map_location=self.device, weights_only=True)
        with torch.no_grad():
            for k, x in s["optimizer"]["master"].items():
                self.opt.master[k].copy_(x)
            for k, x in s["biases"].items():
                self.w[k].copy_(x)
            for p in self.run.get("revive", []):
                self.revive(p + "attn.")
        self.opt.publish(False)

    def revive(self, p: str) -> None:
        """Give a C4 layer whose entries nobody looks at a fresh start: entries as means of the raw KV vectors."""
        m = self.opt.master
        m[p + "compressor.wkv.weight"].copy_(m[p + "wkv.weight"].repeat(2, 1))
        m[p + "compressor.norm.weight"].copy_(m[p + "kv_norm.weight"])
        m[p + "compressor.wgate.weight"].mul_(0.1)
        m[p + "compressor.ape"].zero_()

    def save_small(self) -> None:
        """What a later session needs to go on or to export: masters (bf16 where the file is not float32), AdamW moments in bf16."""
        o = self.opt
        half = {k: x if o.fmt[k] == "f32" else x.bfloat16() for k, x in o.master.items()}
        torch.save(dict(step=self.step, spent=self.spent, run=self.run, biases={k: self.w[k] for k in self.biases},
                        fixed={k: x for k, x in self.w.items() if not x.is_floating_point()},
                        optimizer=dict(master=half, m={k: x.bfloat16() for k, x in o.adam_m.items()}, v={k: x.bfloat16() for k, x in o.adam_v.items()}, t=o.t)),
                   f"{self.dir}/small.tmp")
        os.replace(f"{self.dir}/small.tmp", f"{self.dir}/small.pt")


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("run")
    ap.add_argument("--dir", default="run")
    ap.add_argument("--minutes", type=float, default=1e9)
    ap.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    ap.add_argument("--init", help="small.pt of an earlier run to begin from")
    ap.add_argument("--steps", type=int, help="override the run file (smoke tests)")
    args = ap.parse_args()
    run = json.load(open(args.run))
    if args.steps:
        run["steps"] = args.steps
    os.makedirs(args.dir, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    device = "cuda" if torch.cuda.is_available() else "cpu"
    t = Trainer(run, args.dir, device)
    if os.path.exists(f"{args.dir}/state.pt"):
        t.load()
        print("go on at step", t.step, flush=True)
    elif args.init:
        t.start_from(args.init)
    t.train(args.minutes, args.workers)
    if device == "cuda":
        print("peak GB", round(torch.cuda.max_memory_allocated() / 1e9, 1))
    p = t.phase() if t.step < run["steps"] else run["phases"][-1]
    t.model.sparse = p.get("sparse", False)
    print(json.dumps(t.evaluate(4, HELD_OUT_SEED, p["rows"], p["length"], min(4, args.workers))), flush=True)


if __name__ == "__main__":
    main()
