"""Data parallelism over the GPUs of a machine: one process a GPU, each with its part of every batch.

Gradients and counts are summed by one all-reduce a step. What the clock decides, the first process decides for all.
"""
import os
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist

Tensor = torch.Tensor


def launch(n: int) -> int:
    """Run this program n times, each on one of the visible GPUs; the exit status is that of the first that failed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(n)]
    if torch.cuda.device_count() and len(devices) < n:
        raise SystemExit(f"--gpus {n}: only {len(devices)} visible")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    running = []
    for rank in range(n):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0",
                   NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo",
                   CUDA_VISIBLE_DEVICES=devices[rank] if rank < len(devices) else "")
        running.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
    status = 0
    while running:
        for p in [p for p in running if p.poll() is not None]:
            running.remove(p)
            status = status or p.returncode
            for other in running if p.returncode else []:
                other.terminate()
        time.sleep(0.2)
    return status


class Ranks:
    """This process among its like; alone without RANK in the environment."""

    def __init__(self, device: str):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.cpu = None
        if self.world > 1:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
            self.cpu = dist.new_group(backend="gloo")

    def sum(self, x: Tensor) -> Tensor:
        """In place, over all processes."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def sum_all(self, tensors: list[Tensor]) -> list[Tensor]:
        """Float32 sums of many tensors, one message."""
        if self.world == 1:
            return [x.float() for x in tensors]
        flat = self.sum(torch.cat([x.reshape(-1).float() for x in tensors]))
        return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors)]

    def of_first(self, value: float) -> float:
        """The first process's value."""
        if self.world == 1:
            return value
        x = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(x, 0, group=self.cpu)
        return float(x)

    def close(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.cpu)
            dist.destroy_process_group()
