#!/usr/bin/env python3
"""A step of reinforcement learning beside the same loop in PyTorch: sample, score, normalize, go back, update.

    bench/rl_step.py [--hadal build/hadal] [--steps 5] [--groups 24] [--samples 8] [--max-tokens 64] [--threads N] [--backend cuda]
                     [--no-drafts] [--cpu-time] [--json FILE]

tiny-v3 sorts lists of one file of prompts. `hadal rl` samples, scores and trains; the peer samples with tools/train_tiny's layers and a
cache of keys and values, one pass for the prompts of a step and one per token, all samples together, those that have ended left out
every 8 tokens, and trains with the same loss (Dr.GRPO) and torch.optim.AdamW, in float32 and without rounding weights. One runs after the other.
A step of hadal is the time between two of its lines. Prints medians of sampled tokens per second, their ratio, and the share of a step
that is neither sampling nor training. --cpu-time: one thread each, by processor time, for a machine with other work; parts and shares
are then still of the clock. Needs torch, safetensors and tokenizers."""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny-v3"
for folder in ("scripts", "tools/train_tiny"):
    sys.path.insert(0, str(ROOT / folder))
from plots import table

RATE, N_NUMBERS, N_PROMPTS = 4e-5, 8, 2400
PIECE = {"cpu": 32, "cuda": 192}  # sequences that the peer trains at once


def prompts():
    rng = random.Random(1)
    lists = [rng.sample(range(100), N_NUMBERS) for _ in range(N_PROMPTS)]
    text = lambda numbers: ", ".join(map(str, numbers))
    return [("Sort these numbers from smallest to largest: " + text(x), text(sorted(x))) for x in lists]


# ---- hadal ----


class Ours:
    """A run of hadal rl, line by line."""

    def __init__(self, args, folder):
        path = folder / "prompts.jsonl"
        line = lambda p: {"messages": [{"role": "user", "content": p[0]}], "thinking": False, "checker": {"type": "exact", "expect": p[1]}}
        path.write_text("".join(json.dumps(line(p)) + "\n" for p in prompts()))
        self.log = folder / "log"
        words = [args.hadal, "rl", MODEL, "--prompts", path, "--out", folder / "out", "--log", self.log, "--algorithm", "dr-grpo", "--lr", RATE]
        words += ["--groups", args.groups, "--samples", args.samples, "--max-tokens", args.max_tokens, "--context", 256]
        words += ["--steps", args.steps + 1, "--threads", args.threads, "--backend", args.backend, *(["--no-drafts"] if args.no_drafts else [])]
        self.cpu_time = args.cpu_time
        self.run = subprocess.Popen([str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def now(self):
        if not self.cpu_time:
            return time.monotonic()
        used = Path(f"/proc/{self.run.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")

    def steps(self):
        """Seconds of every step but the first, whose beginning is not seen."""
        times, clock = [], []
        for line in self.run.stdout:
            if line.startswith("step "):
                times.append(self.now())
                clock.append(time.monotonic())
        if self.run.wait():
            sys.exit(self.run.stderr.read())
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        found = []
        for a, b, ca, cb, line in zip(times, times[1:], clock, clock[1:], lines[1:]):
            sample, train = line["sample_seconds"], line["train_seconds"] + line["update_seconds"]
            found.append({"step": b - a, "sample": sample, "train": train, "rest": 1 - (sample + train) / (cb - ca), "tokens": line["tokens"],
                          "reward": line["reward"], "dlogp": line["dlogp_max"]})  # fmt: skip
        return found


# ---- PyTorch ----


class Cache:
    """Keys and values of a layer [sequences, heads, positions, width]."""

    def __init__(self, k, v):
        self.k, self.v = k, v

    def keep(self, which):
        return Cache(self.k[which], self.v[which])


class Peer:
    def __init__(self, args):
        import torch
        from encoding_v31 import render
        from export import load_model
        from tokenizers import Tokenizer

        torch.set_num_threads(args.threads)
        torch.manual_seed(1)
        self.torch, self.args, self.device = torch, args, args.backend
        self.tok = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self.eos = self.tok.token_to_id("<｜end▁of▁sentence｜>")
        self.model = load_model(str(MODEL), 256, self.device, torch.float32)
        self.c, self.w = self.model.c, self.model.w
        trained = [w.requires_grad_() for k, w in self.w.items() if w.is_floating_point() and "bias" not in k and "gate.weight" not in k]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.trained = trained
        self.prompts = [(self.tok.encode(render([{"role": "user", "content": p}], False), add_special_tokens=False).ids, right) for p, right in prompts()]
        self.at = 0

    def now(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return time.process_time() if self.args.cpu_time else time.monotonic()

    def attention(self, h, p, pos, cache):
        """Rows [B, T] at positions pos see the cache, which receives theirs; as model_v3.attention."""
        from layers import linear, rms_norm, rope

        torch, c = self.torch, self.c
        n, nope, rank = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
        turn_at = self.model.table[pos]
        cq = rms_norm(linear(h, p["q_a_proj.weight"]), p["q_a_layernorm.weight"], c.rms_norm_eps)
        q = rope(linear(cq, p["q_b_proj.weight"]).unflatten(-1, (n, -1)).transpose(1, 2).flatten(0, 1), turn_at.repeat_interleave(n, 0)).unflatten(0, (-1, n))
        latent, turn = linear(h, p["kv_a_proj_with_mqa.weight"]).split([rank, c.qk_rope_head_dim], -1)
        made = linear(rms_norm(latent, p["kv_a_layernorm.weight"], c.rms_norm_eps), p["kv_b_proj.weight"]).unflatten(-1, (n, -1))
        turn = rope(turn, turn_at).unsqueeze(2).expand(-1, -1, n, -1)
        row = torch.arange(len(h), device=self.device)[:, None]
        cache.k[row, :, pos] = torch.cat([made[..., :nope], turn], -1)
        cache.v[row, :, pos] = made[..., nope:]
        seen = (torch.arange(self.room, device=self.device) <= pos[..., None]).unsqueeze(1)
        o = torch.nn.functional.scaled_dot_product_attention(q, cache.k[:, :, : self.room], cache.v[:, :, : self.room], attn_mask=seen, scale=c.softmax_scale)
        return linear(o.transpose(1, 2).flatten(-2), p["o_proj.weight"])

    def hidden(self, ids, pos, caches):
        from layers import rms_norm
        from model_v3 import ffn

        x, eps = self.torch.nn.functional.embedding(ids, self.w["model.embed_tokens.weight"]), self.c.rms_norm_eps
        for p, cache in zip(self.model.blocks[:-1], caches):
            x = x + self.attention(rms_norm(x, p["attn_norm"], eps), p["attn"], pos, cache)
            x = x + ffn(rms_norm(x, p["ffn_norm"], eps), p["ffn"], self.c)[0]
        return x

    def sample(self, group):
        """Answers to the prompts, `samples` each, in their order."""
        torch, c, most = self.torch, self.c, self.args.max_tokens
        lengths = torch.tensor([len(ids) for ids, _ in group], device=self.device)
        self.room = int(lengths.max())
        whole = self.room + most
        ids = torch.tensor([ids + [0] * (self.room - len(ids)) for ids, _ in group], device=self.device)
        shape = (len(group), c.num_attention_heads, whole)
        caches = [Cache(*(torch.zeros(*shape, d, device=self.device) for d in (c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim))) for _ in self.model.blocks[:-1]]
        x = self.hidden(ids, torch.arange(self.room, device=self.device).expand(len(group), -1), caches)
        x = x[torch.arange(len(group), device=self.device), lengths - 1]
        times = torch.arange(len(group), device=self.device).repeat_interleave(self.args.samples)
        caches, x, pos = [cache.keep(times) for cache in caches], x[times], lengths[times]
        alive, done = torch.arange(len(times), device=self.device), torch.zeros(len(times), dtype=torch.bool, device=self.device)
        said = torch.full((len(times), most), self.eos, device=self.device)
        for t in range(most):
            logits = self.model.logits(self.model.head_input(x))
            token = torch.multinomial(logits.softmax(-1), 1)[:, 0].masked_fill(done, self.eos)
            said[alive, t] = token
            done = done | (token == self.eos)
            if t % 8 == 7:
                left = ~done
                if not left.any():
                    break
                caches, token, pos, alive = [cache.keep(left) for cache in caches], token[left], pos[left], alive[left]
                done = done[left]
            self.room = min(whole, self.room + 1)
            x = self.hidden(token[:, None], pos[:, None], caches)[:, 0]
            pos = pos + 1
        return [row[: row.index(self.eos) + 1] if self.eos in row else row for row in said.tolist()]

    def scored(self, group, answers):
        right = [r for _, r in group for _ in range(self.args.samples)]
        return [float(a[-1] == self.eos and self.tok.decode(a[:-1]).strip() == r) for a, r in zip(answers, right)]

    def train(self, group, answers, rewards):
        """Dr.GRPO, in pieces."""
        torch, f, n = self.torch, self.torch.nn.functional, self.args.samples
        r = torch.tensor(rewards, device=self.device).view(-1, n)
        advantage = (r - r.mean(-1, keepdim=True)).flatten()
        seqs = [group[i // n][0] + a for i, a in enumerate(answers)]
        order = sorted(range(len(seqs)), key=lambda i: -len(seqs[i]))
        for first in range(0, len(order), PIECE[self.device]):
            piece = order[first : first + PIECE[self.device]]
            wide = -(-len(seqs[piece[0]]) // 8) * 8
            ids = torch.tensor([seqs[i] + [0] * (wide - len(seqs[i])) for i in piece], device=self.device)
            at = torch.tensor([(k, t) for k, i in enumerate(piece) for t in range(len(group[i // n][0]), len(seqs[i]))], device=self.device).T
            x = self.model.trunk(ids, torch.zeros_like(ids))[0]
            logits = self.model.logits(self.model.head_input(x[at[0], at[1] - 1]))
            loss = f.cross_entropy(logits, ids[at[0], at[1]], reduction="none") * advantage[torch.tensor(piece, device=self.device)[at[0]]]
            (loss.sum() / (len(seqs) * self.args.max_tokens)).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self):
        group = self.prompts[self.at : self.at + self.args.groups]
        self.at += self.args.groups
        times, clock = [self.now()], [time.monotonic()]

        def note():
            times.append(self.now())
            clock.append(time.monotonic())

        with self.torch.no_grad():
            answers = self.sample(group)
        note()
        rewards = self.scored(group, answers)
        note()
        self.train(group, answers, rewards)
        note()
        sample, reward, train = (b - a for a, b in zip(clock, clock[1:]))
        return {"step": times[-1] - times[0], "sample": sample, "train": train, "rest": reward / (sample + reward + train), "tokens": sum(map(len, answers)),
                "reward": statistics.mean(rewards)}  # fmt: skip


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hadal", default=os.environ.get("HADAL", str(ROOT / "build/hadal")))
    for name, default in (("steps", 5), ("groups", 24), ("samples", 8), ("max-tokens", 64), ("threads", os.cpu_count())):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--no-drafts", action="store_true")
    p.add_argument("--cpu-time", action="store_true")
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    if args.cpu_time:
        args.threads = 1
    with tempfile.TemporaryDirectory() as folder:
        sides = {"hadal": Ours(args, Path(folder)).steps()}
    peer = Peer(args)
    sides["PyTorch"] = [peer.step() for _ in range(args.steps + 1)][1:]
    rows, rates = [], []
    for name, steps in sides.items():
        middle = lambda key: statistics.median(s[key] for s in steps)
        rates.append(statistics.median(s["tokens"] / s["step"] for s in steps))
        rows.append([name, f"{middle('step'):.3f}", f"{middle('sample'):.3f}", f"{middle('train'):.3f}", f"{max(0.0, middle('rest')):.1%}", round(middle("tokens")),
                     f"{middle('reward'):.2f}", round(rates[-1])])  # fmt: skip
    print(f"tiny-v3, {args.groups} x {args.samples} samples, {args.threads} threads, {args.backend}; medians of {args.steps} steps", end="")
    print(f"; largest |dlogp| of hadal {max(s['dlogp'] for s in sides['hadal']):g}")
    print(table(["", "step, s", "sampling, s", "training, s", "neither", "sampled tokens", "reward", "tokens/s"], rows), end="")
    print(f"ratio {rates[0] / rates[1]:.2f}")
    if args.json:
        args.json.write_text(json.dumps(sides))


if __name__ == "__main__":
    main()
