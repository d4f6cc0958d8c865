"""Muon for the matrices, AdamW for the rest, float32 masters apart from the weights that the model reads.

The model's tensors are working copies: bf16 casts of the masters or, in the quantization-aware
part of a run, what a reader of the quantized file would get. Their gradients go to the masters
unchanged (the straight-through estimate).
"""
import torch

from quantize import FP8_BLOCKS, format_of, round_to

Tensor = torch.Tensor


def newton_schulz(g: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of a stack [N, r, c], roughly."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


def is_matrix(name: str, w: Tensor) -> bool:
    """Muon's share: hidden matrices. Tables, router, mixing and vectors go to AdamW."""
    adam = ("embed", "head", "gate.weight", "hc_", "ape", "weights_proj", "q_weight", "k_weight")
    return w.dim() >= 2 and not any(a in name for a in adam)


class Optimizer:
    def __init__(self, weights: dict[str, Tensor], family: str, o_groups: int, muon_lr: float = 6e-3, adam_lr: float = 3e-3,
                 momentum: float = 0.95, decay: float = 0.1):
        self.family, self.muon_lr, self.adam_lr, self.momentum, self.decay = family, muon_lr, adam_lr, momentum, decay
        self.work = {k: w for k, w in weights.items() if w.is_floating_point() and w.requires_grad}
        self.fmt = {k: format_of(k, family) for k in self.work}
        self.master = {k: w.detach().float().clone() for k, w in self.work.items()}
        self.groups: dict[tuple, list[str]] = {}
        self.split = {}
        for k, w in self.work.items():
            if is_matrix(k, w):
                if k.endswith("wo_a.weight"):
                    self.split[k] = (o_groups, w.shape[0] // o_groups, w.shape[1])
                elif w.dim() == 2:
                    self.split[k] = (1, *w.shape)
                else:
                    self.split[k] = tuple(w.shape)
                self.groups.setdefault(self.split[k][1:], []).append(k)
        self.moment = {k: torch.zeros_like(self.master[k]) for k in self.split}
        self.adam_names = [k for k in self.work if k not in self.split]
        self.adam_m = {k: torch.zeros_like(self.master[k]) for k in self.adam_names}
        self.adam_v = {k: torch.zeros_like(self.master[k]) for k in self.adam_names}
        self.t = 0

    def gradients(self) -> dict[str, Tensor]:
        """Those that there are, handed out once."""
        grad = {k: w.grad for k, w in self.work.items() if w.grad is not None}
        for w in self.work.values():
            w.grad = None
        return grad

    @torch.no_grad()
    def step(self, scale: float, grad: dict[str, Tensor]) -> Tensor:
        """One update by float32 gradients, with both learning rates times scale; weights without one stay. Returns
        the norm of the AdamW group's gradient. If any gradient is not finite, nothing changes, and the norm says so."""
        norms = dict(zip(grad, torch._foreach_norm(list(grad.values()))))
        whole = torch.stack(list(norms.values())).norm()
        if not whole.isfinite():
            return whole
        self.t += 1
        for (r, c), names in self.groups.items():
            names = [k for k in names if k in grad]
            if not names:
                continue
            g = [grad[k] for k in names]
            m = [self.moment[k] for k in names]
            torch._foreach_mul_(m, self.momentum)
            torch._foreach_add_(m, g)
            look = torch._foreach_add(g, m, alpha=self.momentum)
            stack = torch.cat([x.view(self.split[k]) for k, x in zip(names, look)])
            u = newton_schulz(stack).float() * (0.18 * max(r, c) ** 0.5 * self.muon_lr * scale)
            parts = u.split([self.split[k][0] for k in names])
            masters = [self.master[k] for k in names]
            torch._foreach_mul_(masters, 1 - self.decay * self.muon_lr * scale)
            torch._foreach_sub_(masters, [p.reshape(w.shape) for p, w in zip(parts, masters)])
        adam_names = [k for k in self.adam_names if k in grad]
        g = [grad[k] for k in adam_names]
        norm = torch.stack([norms[k] for k in adam_names]).norm()
        torch._foreach_mul_(g, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        m, v = ([d[k] for k in adam_names] for d in (self.adam_m, self.adam_v))
        torch._foreach_lerp_(m, g, 0.1)
        torch._foreach_mul_(v, 0.95)
        torch._foreach_addcmul_(v, g, g, 0.05)
        bias = torch._foreach_div(v, 1 - 0.95 ** self.t)
        torch._foreach_sqrt_(bias)
        torch._foreach_add_(bias, 1e-12)
        torch._foreach_addcdiv_([self.master[k] for k in adam_names], m, bias, -self.adam_lr * scale / (1 - 0.9 ** self.t))
        return norm

    @torch.no_grad()
    def publish(self, quantized: bool) -> None:
        """Masters -> working copies."""
        names = list(self.work)
        if not quantized:
            torch._foreach_copy_([self.work[k] for k in names], [self.master[k] for k in names])
            return
        tall = FP8_BLOCKS[self.family].rows
        for fmt in ("fp4", "fp8"):
            for (r, c), members in self.groups.items():
                members = [k for k in members if self.fmt[k] == fmt]
                if members and not (r % tall or c % 32):
                    stack = torch.cat([self.master[k].view(self.split[k]) for k in members])
                    parts = round_to(stack, fmt, self.family).split([self.split[k][0] for k in members])
                    for k, p in zip(members, parts):
                        self.work[k].copy_(p.reshape(self.work[k].shape))
                for k in members if r % tall or c % 32 else []:
                    self.work[k].copy_(round_to(self.master[k], fmt, self.family))
        for k in names:
            if self.fmt[k] in ("bf16", "f32", "table"):
                self.work[k].copy_(round_to(self.master[k], self.fmt[k], self.family))

    def state(self) -> dict:
        return dict(master=self.master, moment=self.moment, m=self.adam_m, v=self.adam_v, t=self.t)

    @torch.no_grad()
    def load(self, s: dict) -> None:
        for mine, theirs in ((self.master, s["master"]), (self.moment, s["moment"]), (self.adam_m, s["m"]), (self.adam_v, s["v"])):
            for k, x in theirs.items():
                mine[k].copy_(x)
        self.t = s["t"]
