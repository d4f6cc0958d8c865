"""Compiling side by side: before the first step each process compiles a share of the kernels on made-up batches;
the others then find them in the compiler's cache on disk.
"""
import torch

from layers import Model
from ranks import Ranks

Tensor = torch.Tensor


def signature(name: str, args: tuple, options: dict) -> tuple:
    """What the compiler looks at: shapes, types and gradients of tensors, and other values."""
    def of(x):
        if isinstance(x, Tensor):
            return tuple(x.shape), x.dtype, x.requires_grad
        if isinstance(x, dict):
            return tuple((k, of(v)) for k, v in x.items())
        return x if isinstance(x, (int, float, str, bool, type(None))) else id(x)
    return (name, torch.is_grad_enabled(), *map(of, args), of(options))


class Warm:
    """Takes the place of a model's parts: runs them plainly, one by one, and compiles those that are this process's."""

    def __init__(self, model: Model, ranks: Ranks):
        self.model, self.ranks, self.seen = model, ranks, set()
        self.parts = {name: self.part(name, plain, model.fast[name]) for name, plain in model.plain.items()}

    def part(self, name: str, plain, fast):
        def call(*args, **options):
            key = signature(name, args, options)
            if key not in self.seen:
                self.seen.add(key)
                if len(self.seen) % self.ranks.world == self.ranks.rank:
                    compile_both_ways(fast(*map(leaves, args), **options))
            return leaves(plain(*args, **options))
        return call


def compile_both_ways(out) -> None:
    """The backward kernel is compiled when it first runs."""
    ends = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor) and x.requires_grad]
    if ends:
        torch.autograd.backward([x.float().sum() for x in ends])


def leaves(out):
    """The same values without what made them, so that nothing is kept for a backward pass of all parts."""
    if isinstance(out, tuple):
        return tuple(map(leaves, out))
    return out.detach().requires_grad_(out.requires_grad) if isinstance(out, Tensor) and not out.is_leaf else out
