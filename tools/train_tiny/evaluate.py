"""Measure an exported model with PyTorch: exact match per task by greedy decoding, loss before and after
quantization, accepted drafts on its own text, expert skew. `evaluate.py MODEL [--cases N] [--small small.pt]`.

Decoding recomputes the whole text at every step: slow per token, fast in batches, and no cache to get wrong.
"""
import argparse
import json
import re
import time

import torch
from tokenizers import Tokenizer

from data import loader
from encoding import EOS
from export import load_model
from families import family_of
from make_eval import TASKS, cases
from train import HELD_OUT_SEED, shifted, weighted_ce

Tensor = torch.Tensor
HELD_OUT = {"rows": 8, "length": 4096, "budget": 3900}


def bucket(n: int, step: int = 128) -> int:
    return -(-n // step) * step


@torch.no_grad()
def greedy(model, prompts: list[list[int]], limits: list[int], eos: int, device: str) -> list[list[int]]:
    """Completions without the end token. All rows advance together; finished rows leave the batch."""
    done: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    while live:
        rows = [prompts[i] + done[i] for i in live]
        width = bucket(max(map(len, rows)))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for r, row in enumerate(rows):
            ids[r, :len(row)] = torch.tensor(row)
        ids = ids.to(device)
        x, _, _ = model.trunk(ids, torch.zeros_like(ids))
        last = torch.tensor([len(r) - 1 for r in rows], device=device)
        x = x[torch.arange(len(rows), device=device), last].unsqueeze(1)
        token = model.logits(model.head_input(x))[:, 0].argmax(-1).tolist()
        keep = []
        for i, t in zip(live, token):
            if t != eos:
                done[i].append(t)
                if len(done[i]) < limits[i]:
                    keep.append(i)
        live = keep
    return done


def judge(case: dict, parsed: dict | None) -> bool:
    """Does the completion satisfy the checker?"""
    if parsed is None:
        return False
    kind, expect = case["checker"]["type"], case["checker"]["expect"]
    content = parsed["content"].strip()
    if kind == "exact":
        return content == expect
    if kind == "final_number":
        numbers = re.findall(r"-?\d+", content)
        return bool(numbers) and numbers[-1] == expect
    if kind == "contains":
        return expect in content
    if kind == "regex":
        return re.search(expect, content, re.S) is not None
    return parsed["tool_calls"] == expect


@torch.no_grad()
def accepted(model, texts: list[tuple[list[int], int]], device: str) -> float:
    """Mean number of accepted drafts of 3 where the text is the model's own greedy output."""
    hits, rows = 0.0, 0.0
    for ids, begin in texts:
        n = len(ids)
        t = torch.zeros(1, bucket(n), dtype=torch.long)
        t[0, :n] = torch.tensor(ids)
        t = t.to(device)
        start = torch.zeros_like(t)
        x, _, _ = model.trunk(t, start)
        chain, kvs = torch.ones(t.shape, device=device), []
        pos = torch.arange(t.shape[1], device=device)
        here = (pos >= begin) & (pos < n - 4)
        for s in (1, 2, 3):
            x, kv, _ = model.mtp(x, t, start, s, kvs[0] if kvs else None, tuple(kvs[1:]))
            kvs.append(kv)
            guess = model.logits(model.head_input(x, "mtp.0.")).argmax(-1)
            chain = chain * (guess == shifted(t, s + 1)).float()
            hits += float(chain[0, here].sum())
        rows += float(here.sum())
    return hits / max(rows, 1)


@torch.no_grad()
def held_out_loss(model, family: str, tokenizer: str, device: str, n: int) -> tuple[float, list]:
    """Weighted loss on held-out documents, and expert loads per layer."""
    total, loads = [], None
    for ids, start, weight, _ in loader(2, tokenizer=tokenizer, shapes=[HELD_OUT], seed=HELD_OUT_SEED, first=0, count=n, family=family):
        ids, start, weight = (x.to(device) for x in (ids.long(), start, weight))
        x, _, load = model.trunk(ids, start)
        loss, _ = weighted_ce(model.head_input(x), model.w[model.head], shifted(ids, 1), shifted(weight, 1))
        total.append(float(loss))
        if model.mtp:
            load = load + [model.mtp(x, ids, start)[2]]
        loads = load if loads is None else [a + b for a, b in zip(loads, load)]
    return sum(total) / len(total), [(round(float(x.max() / x.mean()), 2), round(float(x.min() / x.mean()), 2)) for x in loads]


def run_task(model, chat, tok: Tokenizer, task: str, n: int, device: str, batch: int) -> dict:
    """Greedy answers to n cases of a task."""
    eos = tok.token_to_id(EOS)
    todo = cases(task, n)
    prompts = [tok.encode(chat.render(c["messages"], c["thinking"]), add_special_tokens=False).ids for c in todo]
    out: list[list[int]] = []
    size = max(1, min(batch, batch * 512 // max(map(len, prompts))))
    for i in range(0, len(todo), size):
        out += greedy(model, prompts[i:i + size], [c["max_tokens"] for c in todo[i:i + size]], eos, device)
    texts = [tok.decode(o, skip_special_tokens=False) for o in out]
    parsed = [chat.parse(t, c["thinking"]) for c, t in zip(todo, texts)]
    right = [judge(c, p) for c, p in zip(todo, parsed)]
    own = [(p + o + [eos], len(p)) for p, o in zip(prompts, out)][:24]
    result = {"exact": sum(right) / n, "n": n, "prompt_tokens": round(sum(map(len, prompts)) / n)}
    if model.mtp:
        result["accepted"] = round(accepted(model, own, device), 3)
    if task == "tools":
        result["well_formed"] = sum(bool(p and p["tool_calls"]) for p in parsed) / n
    result["wrong"] = [{"prompt": c["messages"][-1]["content"][-160:], "expect": c["checker"]["expect"], "got": t[-300:]} for c, t, r in zip(todo, texts, right) if not r][:4]
    if task == "story":
        result["texts"] = [{"prompt": c["messages"][-1]["content"], "text": t} for c, t in zip(todo, texts)][:10]
    return result


def unquantized(small: str, like, device: str, dtype: torch.dtype):
    """The masters of a checkpoint as a model of the same kind."""
    s = torch.load(small, map_location=device, weights_only=True)
    w = {**s["master"], **s["biases"], **s["fixed"]}
    model = type(like)(like.c, {k: x.to(like.w[k].dtype) for k, x in w.items()}, 4096)
    model.sparse = like.sparse
    return model


def write(path: str, result: dict) -> None:
    with open(path, "w") as f:
        json.dump(result, f, indent=1, ensure_ascii=False)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("model")
    ap.add_argument("--cases", type=int, default=200, help="a task; 0: only the losses and the experts' loads")
    ap.add_argument("--tasks", default=",".join(TASKS))
    ap.add_argument("--out", default="evaluation.json")
    ap.add_argument("--seconds", type=float, default=1e9, help="stop starting new tasks after this")
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--small", help="the checkpoint, to compare with the loss before quantization")
    ap.add_argument("--loss-batches", type=int, default=8)
    args = ap.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    begun = time.time()
    model = load_model(args.model, 4096, device, dtype)
    family = family_of(json.load(open(f"{args.model}/config.json")))
    tok = Tokenizer.from_file(f"{args.model}/tokenizer.json")
    result: dict = {}
    if args.loss_batches:
        loss, skew = held_out_loss(model, family.name, f"{args.model}/tokenizer.json", device, args.loss_batches)
        result.update(loss=round(loss, 5), skew=skew)
        print("loss", round(loss, 5), "max/mean, min/mean per layer", skew, flush=True)
    if args.small:
        loss, _ = held_out_loss(unquantized(args.small, model, device, dtype), family.name, f"{args.model}/tokenizer.json", device, args.loss_batches)
        result["loss_unquantized"] = round(loss, 5)
        print("loss before quantization", round(loss, 5), flush=True)
    result["tasks"] = {}
    write(args.out, result)
    for task in args.tasks.split(",") if args.cases else []:
        if time.time() - begun > args.seconds:
            break
        result["tasks"][task] = r = run_task(model, family.encoding, tok, task, args.cases, device, args.batch)
        print(task, {k: v for k, v in r.items() if k not in ("wrong", "texts")}, f"{time.time() - begun:.0f} s", flush=True)
        write(args.out, result)


if __name__ == "__main__":
    main()
