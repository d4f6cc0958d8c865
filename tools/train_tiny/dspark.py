"""The DSpark drafter: stages that draft a block of tokens in one pass, on a trunk that stays as it is.

A block is drafted behind an anchor, position p, when the token at p + 1 is known. Its row i stands at p + 1 + i and
predicts the token at p + 2 + i; row 0 has the known token, the others a filler. Rows attend to vectors made from the
trunk's taps at the last `sliding_window` positions up to p, and to each other. Anchors lie in groups of one chunk of
`sliding_window` positions, so that a group reads two chunks of keys.

Shapes: B sequences of T tokens, G groups, A anchors in each, K rows in a block, N = G * A * K rows in all.
"""
from dataclasses import dataclass, replace
from typing import Callable

import torch
import torch.nn.functional as F

from layers import Model, linear, rms_norm, rope, sub
from model_v4 import SHIFT, V4Config, hc_last
from model_v4 import init as init_v4
from model_v4 import shapes as shapes_v4
from model_v41 import V41Config
from model_v41 import collapse as collapse_v41
from model_v41 import init as init_v41
from model_v41 import shapes as shapes_v41

Tensor = torch.Tensor


@dataclass
class DSparkConfig:
    """Field names as in the published config.json, behind dspark_."""
    block_size: int
    noise_token_id: int
    markov_rank: int
    target_layer_ids: list
    n_routed_experts: int = 0  # of a stage; 0: as many as the trunk's layers have
    num_experts_per_tok: int = 0

    def of_stages(self, c):
        """The trunk's config with what the stages have of their own."""
        own = {k: getattr(self, k) for k in ("n_routed_experts", "num_experts_per_tok")}
        return replace(c, **{k: v for k, v in own.items() if v})

    def to_json(self) -> dict:
        return {"dspark_" + k: getattr(self, k) for k, f in self.__dataclass_fields__.items() if getattr(self, k) != f.default}


@dataclass(frozen=True)
class Form:
    """What a family's drafter has of its own. Its trunk says on which side of a layer a tap is."""
    markov_in: str         # embedding of the token before
    markov_out: str        # its projection to the vocabulary
    query_norm: bool       # queries are normed per head
    layer: Callable        # config -> {name behind `mtp.S.`: shape} of a stage, those of the last too
    fresh: Callable        # config, seed -> such weights
    last: tuple[str, ...]  # the names of `layer` that only the last stage has
    run: Callable          # model, weights of the stages, ids [1, N], attend(h, weights), config -> the vectors before
    #                        the last norm [N, H], loads


def layer_v4(c: V4Config) -> dict[str, tuple[int, ...]]:
    """The MTP layer without the projections of its two inputs."""
    mtp = sub(shapes_v4(c), "mtp.0.")
    return {k: v for k, v in mtp.items() if k.split(".")[0] not in ("e_proj", "h_proj", "enorm", "hnorm")}


def fresh_v4(c: V4Config, seed: int) -> dict[str, Tensor]:
    return sub(init_v4(c, seed), "mtp.0.")


def run_v4(model, stages: list[dict], ids: Tensor, attend: Callable, c: V4Config) -> tuple[Tensor, list[Tensor]]:
    x = F.embedding(ids, model.w["embed.weight"]).unsqueeze(2).expand(-1, -1, c.hc_mult, -1).contiguous()
    loads = []
    for p in stages:
        x, _, _, load = model.block(x, p, ids, None, 0, lambda h, w: (attend(h, w), None, None))
        loads.append(load)
    last = stages[-1]["hc"]
    return hc_last(x[0], last["hc_head_fn"], last["hc_head_scale"], last["hc_head_base"], c), loads


def one_layer_v41(c: V41Config) -> V41Config:
    return replace(c, num_hidden_layers=1, compress_ratios=[0], kv_source_layer_ids=[], index_source_layer_ids=[], engram_layer_ids=[])


def layer_v41(c: V41Config) -> dict[str, tuple[int, ...]]:
    return {**sub(shapes_v41(one_layer_v41(c)), "layers.0."), "norm.weight": (c.hidden_size,)}


def fresh_v41(c: V41Config, seed: int) -> dict[str, Tensor]:
    return sub(init_v41(one_layer_v41(c), seed), "layers.0.")


def run_v41(model, stages: list[dict], ids: Tensor, attend: Callable, c: V41Config) -> tuple[Tensor, list[Tensor]]:
    x, pre = model.streams(ids)
    loads = []
    for p in stages:
        x, pre, load = model.block(x, pre, p, ids, lambda h: attend(h, p["attn"]), c)
        loads.append(load)
    return collapse_v41(x, pre)[0], loads


FORMS = {"v4": Form("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", True, layer_v4, fresh_v4,
                    ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"), run_v4),
         "v41": Form("markov_head.embed.weight", "markov_head.head.weight", False, layer_v41, fresh_v41, ("norm.weight",), run_v41)}


def shapes(c, d: DSparkConfig, stages: int, form: Form) -> dict[str, tuple[int, ...]]:
    """Every tensor of the drafter: name -> shape."""
    h, last, layer = c.hidden_size, f"mtp.{stages - 1}.", form.layer(c)
    out = {f"mtp.{s}.{k}": v for s in range(stages) for k, v in layer.items() if k not in form.last}
    out["mtp.0.main_proj.weight"] = (h, len(d.target_layer_ids) * h)
    out["mtp.0.main_norm.weight"] = (h,)
    out.update({last + k: layer[k] for k in form.last})
    out[last + form.markov_in] = out[last + form.markov_out] = (c.vocab_size, d.markov_rank)
    out[last + "confidence_head.proj.weight"] = (1, h + d.markov_rank)
    return out


def init(c, d: DSparkConfig, stages: int, form: Form, trunk: dict[str, Tensor], like: list[str], seed: int) -> dict[str, Tensor]:
    """Float32 weights. Stage s begins as the trunk's layer like[s], its first experts if there are more, where it has
    such a tensor, or fresh; the last norm and collapse as the trunk's MTP layer or its own, the keys' projection as
    the last tap, the Markov head as nothing. c is the config of the stages."""
    g = torch.Generator().manual_seed(seed)
    fresh = [form.fresh(c, seed + s) for s in range(stages)]
    w = {}
    for name, shape in shapes(c, d, stages, form).items():
        _, stage, rest = name.split(".", 2)
        source = f"{like[int(stage)]}.{rest}" if like else ""
        mtp = f"mtp.0.{rest}" if rest in form.last else ""
        if rest.startswith("main_proj"):
            w[name] = torch.cat([torch.zeros(shape[0], shape[1] - shape[0]), torch.eye(shape[0])], 1) + torch.randn(shape, generator=g) * 0.02
        elif rest == form.markov_in:
            w[name] = torch.randn(shape, generator=g) * 0.02
        elif rest == form.markov_out or rest.startswith("confidence_head"):
            w[name] = torch.zeros(shape)
        elif rest.startswith("main_norm"):
            w[name] = torch.ones(shape)
        else:
            known = [x for x in (trunk.get(mtp), trunk.get(source), fresh[int(stage)].get(rest), trunk.get(rest)) if x is not None]
            w[name] = known[0][:shape[0]]
        assert w[name].shape == shape, name
    return {k: x.clone() for k, x in w.items()}


@dataclass
class Anchors:
    """Where blocks are drafted."""
    chunk: Tensor  # [G] the number of each group's chunk among all chunks of the batch
    at: Tensor     # [G, A] position of each anchor in its sequence
    row: Tensor    # [G] the group's sequence

    def positions(self, k: int) -> Tensor:
        """[G, A, K] of the rows of the blocks."""
        return self.at.unsqueeze(-1) + 1 + torch.arange(k, device=self.at.device)

    def pick(self, x: Tensor, k: int, shift: int) -> Tensor:
        """x [B, T, ...] at the blocks' positions + shift, within the sequence -> [G, A, K, ...]."""
        at = (self.positions(k) + shift).clamp(max=x.shape[1] - 1)
        return x[self.row[:, None, None], at]


def target_weights(weight: Tensor, start: Tensor, anchors: Anchors, k: int) -> Tensor:
    """[G, A, K] loss weights of the tokens that the rows predict: none behind the anchor's document."""
    t = weight.shape[1]
    own = start[anchors.row[:, None], anchors.at]
    same = (anchors.pick(start, k, 1) == own.unsqueeze(-1)) & (anchors.positions(k) + 1 < t)
    return anchors.pick(weight, k, 1) * same


def choose(weight: Tensor, start: Tensor, window: int, k: int, chunks: int, each: int, g: torch.Generator) -> Anchors:
    """Anchors by lot, `each` in `chunks` chunks of every sequence, where what they predict has weight."""
    b, t = weight.shape
    device, nb = weight.device, t // window
    every = Anchors(torch.arange(b, device=device), torch.arange(t, device=device).expand(b, t), torch.arange(b, device=device))
    mass = target_weights(weight, start, every, k).sum(-1).unflatten(1, (nb, window))

    def lots(x: Tensor) -> Tensor:
        return (x + 1e-6).log() - (-torch.rand(x.shape, generator=g, device=device).clamp_min(1e-9).log()).log()

    chosen = lots(mass.sum(-1)).topk(chunks, -1).indices.sort(-1).values  # [B, C]
    row = torch.arange(b, device=device)[:, None].expand_as(chosen)
    inside = lots(mass[row, chosen]).topk(each, -1).indices.sort(-1).values
    return Anchors((row * nb + chosen).flatten(), (chosen.unsqueeze(-1) * window + inside).flatten(0, 1), row.flatten())


def block_attention(h: Tensor, p: dict, x: Tensor, anchors: tuple[Tensor, Tensor, Tensor], start: Tensor, table: Tensor, k: int, query_norm: bool,
                    c) -> Tensor:
    """Attention of the rows h [1, N, H] of blocks; x [B, T, H] are the normed taps, table the rotary one."""
    chunk, at, row = anchors
    (b, t, _), (groups, each) = x.shape, at.shape
    n, d, win = c.num_attention_heads, c.head_dim, c.sliding_window
    block = (at.unsqueeze(-1) + 1 + torch.arange(k, device=h.device)).flatten()
    here = table[block]
    cq = rms_norm(linear(h, p["wq_a.weight"]), p["q_norm.weight"], c.rms_norm_eps)
    q = linear(cq, p["wq_b.weight"]).unflatten(-1, (n, d))
    q = rope(rms_norm(q, None, 1e-6) if query_norm else q, here) * d ** -0.5
    own = rope(rms_norm(linear(h, p["wkv.weight"]), p["kv_norm.weight"], c.rms_norm_eps), here).view(groups * each, k, d)
    kv = rope(rms_norm(linear(x, p["wkv.weight"]), p["kv_norm.weight"], c.rms_norm_eps), table[:t])

    blocks = kv.unflatten(1, (t // win, win))
    keys = torch.cat([F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2).flatten(0, 1)[chunk]  # [G, 2W, D]
    key_pos = ((chunk % (t // win) - 1) * win)[:, None] + torch.arange(2 * win, device=h.device)
    live = (key_pos[:, None] <= at[..., None]) & (key_pos[:, None] > at[..., None] - win)
    live = live & (key_pos[:, None] >= start[row[:, None], at][..., None])
    scores = torch.bmm(q.reshape(groups, each * k * n, d), keys.transpose(1, 2)).view(groups, each, k * n, 2 * win)
    e = torch.exp(scores.float() - SHIFT).masked_fill(~live[:, :, None], 0)
    inner = torch.exp(torch.bmm(q.reshape(groups * each, k * n, d), own.transpose(1, 2)).float() - SHIFT)
    z = e.sum(-1).view(groups * each, k * n) + inner.sum(-1)
    z = z.view(groups * each * k, n) + torch.exp(p["attn_sink"] - SHIFT)
    out = torch.bmm(e.to(q.dtype).view(groups, each * k * n, 2 * win), keys).view(groups * each, k * n, d).float()
    out = out + torch.bmm(inner.to(q.dtype), own).float()
    out = rope((out.view(1, groups * each * k, n, d) / z.unsqueeze(-1)).to(q.dtype), here, inverse=True)

    g = c.o_groups
    wo_a = p["wo_a.weight"].unflatten(0, (g, c.o_lora_rank))
    low = torch.einsum("btgi,gri->btgr", out.reshape(1, groups * each * k, g, -1).to(wo_a.dtype), wo_a)
    return linear(low.flatten(-2), p["wo_b.weight"])


def block_losses(mixed: Tensor, norm: Tensor, before: Tensor, want: Tensor, head: Tensor, markov_in: Tensor, markov_out: Tensor, confidence: Tensor,
                 eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row [N]: cross entropy and total variation to the trunk's distribution, whose normed vectors are `want`,
    the loss of the confidence, and whether both guess the same."""
    b = F.embedding(before, markov_in)
    logits = linear(rms_norm(mixed, norm, eps), head).float() + linear(b, markov_out).float()
    target = torch.softmax(linear(want, head).float(), -1)
    log = torch.log_softmax(logits, -1)
    away = 0.5 * (log.exp() - target).abs().sum(-1)
    sure = linear(torch.cat([mixed, b.to(mixed.dtype)], -1), confidence).float().squeeze(-1)
    bce = F.binary_cross_entropy_with_logits(sure, 1 - away.detach(), reduction="none")
    return -(target * log).sum(-1), away, bce, (logits.argmax(-1) == target.argmax(-1)).detach()


class DSpark:
    """The stages beside their frozen trunk, `model`."""

    def __init__(self, model: Model, weights: dict[str, Tensor], config: DSparkConfig, form: Form, compiled: bool = False):
        self.model, self.w, self.d, self.form, self.c = model, weights, config, form, config.of_stages(model.c)
        self.stages = 1 + max(int(k.split(".")[1]) for k in weights)
        self.last = sub(weights, f"mtp.{self.stages - 1}.")
        self.blocks = [model.parts_of(sub(weights, f"mtp.{s}.")) for s in range(self.stages)]
        self.plain = dict(attention=block_attention, losses=block_losses)
        self.f = {k: torch.compile(f, dynamic=False) for k, f in self.plain.items()} if compiled else self.plain

    @property
    def sparse(self) -> bool:
        return self.model.sparse

    @sparse.setter
    def sparse(self, on: bool) -> None:
        self.model.sparse = on

    def routed_layers(self) -> list[str]:
        return [f"mtp.{s}.ffn." for s in range(self.stages)]

    @torch.no_grad()
    def trunk(self, ids: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Taps [B, T, taps * H] and the vectors that the output head multiplies [B, T, H]."""
        taps = dict.fromkeys(self.d.target_layer_ids)
        x, _, _ = self.model.trunk(ids, start, taps)
        return torch.cat([*taps.values()], -1), self.model.head_input(x)

    def absorb(self, taps: Tensor) -> Tensor:
        """What all stages make their keys from [B, T, H]."""
        return rms_norm(linear(taps, self.w["mtp.0.main_proj.weight"]), self.w["mtp.0.main_norm.weight"], self.c.rms_norm_eps)

    def draft(self, absorbed: Tensor, known: Tensor, start: Tensor, anchors: Anchors) -> tuple[Tensor, list[Tensor]]:
        """The collapsed vectors [N, H] of the blocks behind the anchors, whose next tokens are known [G, A]; loads."""
        k, c = self.d.block_size, self.c
        ids = torch.full((*known.shape, k), self.d.noise_token_id, dtype=known.dtype, device=known.device)
        ids[..., 0] = known
        ids = ids.view(1, -1)
        where = (anchors.chunk, anchors.at, anchors.row)

        def attend(h: Tensor, p: dict) -> Tensor:
            return self.f["attention"](h, p, absorbed, where, start, self.model.angles["main"], k, self.form.query_norm, c)

        return self.form.run(self.model, self.blocks, ids, attend, c)

    def losses(self, mixed: Tensor, before: Tensor, want: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """block_losses of rows whose token before is known."""
        w, f = self.last, self.form
        return self.f["losses"](mixed, w["norm.weight"], before, want, self.model.w["head.weight"], w[f.markov_in], w[f.markov_out],
                                w["confidence_head.proj.weight"], self.c.rms_norm_eps)

    def places(self, mixed: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Greedy drafts [M, K], their confidences and winning logits, of the vectors [M, K, H] of M blocks."""
        w, f = self.last, self.form
        base = linear(rms_norm(mixed, w["norm.weight"], self.c.rms_norm_eps), self.model.w["head.weight"]).float()
        drafts, sure, won = [], [], []
        for i in range(mixed.shape[1]):
            b = F.embedding(known, w[f.markov_in])
            logits = base[:, i] + linear(b, w[f.markov_out]).float()
            sure.append(linear(torch.cat([mixed[:, i], b.to(mixed.dtype)], -1), w["confidence_head.proj.weight"]).float()[:, 0])
            best = logits.max(-1)
            known = best.indices
            drafts.append(known)
            won.append(best.values)
        return torch.stack(drafts, 1), torch.stack(sure, 1), torch.stack(won, 1)
