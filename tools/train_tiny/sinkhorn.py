"""Sinkhorn normalization of V4's 4x4 mixing matrices: plain PyTorch and one Triton kernel.

The plain loop is the definition. On a GPU its 39 tiny normalizations would be 39 kernel
launches, so there a registered operator runs them in registers and keeps only the sums it
divided by; the backward pass walks them in reverse (B = A/s gives A = B*s back).
"""
import torch

Tensor = torch.Tensor
ROUNDS, EPS = 20, 1e-6

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU
    triton = None


def sinkhorn_plain(logits: Tensor, rounds: int = ROUNDS, eps: float = EPS) -> Tensor:
    """logits [..., 4, 4] f32 -> doubly stochastic matrix; rows first by softmax, ends on columns."""
    c = torch.softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


if triton is not None:
    @triton.jit
    def _forward(x_ptr, y_ptr, s_ptr, n, ROUNDS: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        live = row < n
        at = row[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        a = tl.load(x_ptr + at, mask=live[:, None, None], other=0.0)
        a = tl.exp(a - tl.max(a, axis=2)[:, :, None])
        a = a / tl.sum(a, axis=2)[:, :, None] + EPS
        keep = row[:, None] * 4 + i[None, :]
        for k in range(2 * ROUNDS - 1):
            if k % 2 == 0:
                s = tl.sum(a, axis=1) + EPS
                a = a / s[:, None, :]
            else:
                s = tl.sum(a, axis=2) + EPS
                a = a / s[:, :, None]
            tl.store(s_ptr + k * n * 4 + keep, s, mask=live[:, None])
        tl.store(y_ptr + at, a, mask=live[:, None, None])

    @triton.jit
    def _backward(y_ptr, s_ptr, g_ptr, dx_ptr, n, ROUNDS: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        live = row < n
        at = row[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        b = tl.load(y_ptr + at, mask=live[:, None, None], other=0.25)
        g = tl.load(g_ptr + at, mask=live[:, None, None], other=0.0)
        keep = row[:, None] * 4 + i[None, :]
        for j in range(2 * ROUNDS - 1):
            k = 2 * ROUNDS - 2 - j
            s = tl.load(s_ptr + k * n * 4 + keep, mask=live[:, None], other=1.0)
            if k % 2 == 0:
                g = (g - tl.sum(g * b, axis=1)[:, None, :]) / s[:, None, :]
                b = b * s[:, None, :]
            else:
                g = (g - tl.sum(g * b, axis=2)[:, :, None]) / s[:, :, None]
                b = b * s[:, :, None]
        p = b - EPS
        g = p * (g - tl.sum(g * p, axis=2)[:, :, None])
        tl.store(dx_ptr + at, g, mask=live[:, None, None])

    @torch.library.custom_op("tiny::sinkhorn", mutates_args=())
    def _sinkhorn_gpu(logits: Tensor) -> tuple[Tensor, Tensor]:
        n = logits.numel() // 16
        out = torch.empty_like(logits)
        sums = torch.empty(2 * ROUNDS - 1, n, 4, device=logits.device)
        _forward[(triton.cdiv(n, 64),)](logits, out, sums, n, ROUNDS=ROUNDS, EPS=EPS, BLOCK=64)
        return out, sums

    @_sinkhorn_gpu.register_fake
    def _(logits):
        return torch.empty_like(logits), logits.new_empty(2 * ROUNDS - 1, logits.numel() // 16, 4)

    @torch.library.custom_op("tiny::sinkhorn_backward", mutates_args=())
    def _sinkhorn_gpu_backward(out: Tensor, sums: Tensor, grad: Tensor) -> Tensor:
        n = out.numel() // 16
        dx = torch.empty_like(out)
        _backward[(triton.cdiv(n, 64),)](out, sums, grad, dx, n, ROUNDS=ROUNDS, EPS=EPS, BLOCK=64)
        return dx

    @_sinkhorn_gpu_backward.register_fake
    def _(out, sums, grad):
        return torch.empty_like(out)

    def _save(ctx, inputs, output):
        ctx.save_for_backward(*output)

    def _grad(ctx, grad, _):
        out, sums = ctx.saved_tensors
        return _sinkhorn_gpu_backward(out, sums, grad.contiguous())

    _sinkhorn_gpu.register_autograd(_grad, setup_context=_save)


def sinkhorn(logits: Tensor) -> Tensor:
    """The plain loop on a CPU, the kernel on a GPU."""
    if triton is not None and logits.is_cuda:
        return _sinkhorn_gpu(logits.contiguous())[0]
    return sinkhorn_plain(logits)
