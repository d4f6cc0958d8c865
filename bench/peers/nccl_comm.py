#!/usr/bin/env python3
"""NCCL's collectives at the sizes of `hadal bench comm`, in its columns; one process for each GPU.

    bench/peers/nccl_comm.py [RANKS]      # default 2

A time is that of one of 100 calls in the queue of a stream, as `hadal bench comm` has it, and of one of 100 in a
CUDA graph; the bytes of a gather or a scattered sum are those of all ranks together. "all_reduce, add, norm" is a
sum, the residual's addition and PyTorch's RMS norm, rows of 4,096 floats. Needs PyTorch with NCCL.
"""

import os
import statistics
import sys

import torch
import torch.distributed as dist

SIZES = [64, 4096, 8192, 16384, 32768, 1 << 20, 16 << 20]
CALLS, ROUNDS, COLS = 100, 20, 4096


def operations(n, ranks, rank):
    x = torch.zeros(n, device="cuda")
    part = torch.zeros(max(1, n // ranks), device="cuda")
    residual = torch.zeros(n, device="cuda").view(-1, min(n, COLS))
    weight = torch.ones(min(n, COLS), device="cuda")

    def reduce_add_norm():
        dist.all_reduce(x)
        residual.add_(x.view_as(residual))
        torch.nn.functional.rms_norm(residual, weight.shape, weight, 1e-6)

    yield "all_reduce", lambda: dist.all_reduce(x)
    yield "reduce_scatter", lambda: dist.reduce_scatter_tensor(part, x)
    yield "all_gather", lambda: dist.all_gather_into_tensor(x, part)
    yield "all_reduce, add, norm", reduce_add_norm


def median_us(run):
    times = []
    for i in range(ROUNDS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / CALLS)
    return statistics.median(times[3:])


def captured(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def repeated(call):
    return lambda: [call() for _ in range(CALLS)]


def run(rank, ranks):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29511"))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if rank == 0:
        print(f"NCCL {version}, PyTorch {torch.__version__}, {ranks} x {torch.cuda.get_device_name()}")
        print(f"{'':14} {'operation':21} {'bytes':>8} {'us':>10} {'MB/s':>9}")
    for how, way in (("nccl", repeated), ("nccl, graph", captured)):
        for size in SIZES:
            for name, call in operations(size // 4, ranks, rank):
                call()
                us = median_us(way(call))
                if rank == 0:
                    print(f"{how:14} {name:21} {size:8} {us:10.2f} {size / us:9.0f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    n = int(sys.argv[1]) if len(sys.argv) == 2 else 2
    if len(sys.argv) > 2 or n < 2:
        sys.exit(__doc__.strip())
    torch.multiprocessing.spawn(run, (n,), n)
