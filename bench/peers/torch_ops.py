#!/usr/bin/env python3
"""Times PyTorch on the cases of `hadal bench ops` and prints ours, the peer, the limit.

    build-cuda/hadal bench ops --backend cuda --json > ops.json
    bench/peers/torch_ops.py [--json] ops.json

Needs torch with CUDA. The peer computes the same from bfloat16 (stored matrices too; or FP8 with
a scale per row where that is faster), ours from float32 activations. A time is that of one of
several copies in a CUDA graph over rotating operands, the median of rounds. --json: the cases
again, an object on a line, with the peer and its microseconds.
"""

import json
import statistics
import sys

import torch
import torch.nn.functional as F

ROUNDS, ROUND_SECONDS, MAX_COPIES = 5, 0.01, 20
POOL_BYTES = 512 << 20  # operands are read in turn over so much
DEVICE, BF16, FP8 = "cuda", torch.bfloat16, torch.float8_e4m3fn


def normal(*shape, dtype=BF16):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32 if dtype == torch.float32 else BF16).to(dtype)


def rotating(make):
    """As many operands as the pool holds; each call gives the next."""
    first = make()
    size = sum(t.numel() * t.element_size() for t in (first if isinstance(first, tuple) else (first,)))
    all_of_them = [first] + [make() for _ in range(min(MAX_COPIES, max(0, POOL_BYTES // size - 1)))]
    at = 0

    def take():
        nonlocal at
        at = (at + 1) % len(all_of_them)
        return all_of_them[at]

    return take


def seconds_of(run):
    """Of one run within a graph of several."""
    run()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def graph_of(copies):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(copies):
                run()
        return graph

    def time_of(graph, copies):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / copies

    graph = graph_of(2)
    time_of(graph, 2)
    copies = max(2, min(MAX_COPIES, int(ROUND_SECONDS / time_of(graph, 2))))
    graph = graph_of(copies)
    time_of(graph, copies)
    return statistics.median(time_of(graph, copies) for _ in range(ROUNDS))


# ---- a peer is a list of (name, function to time) ----


def linear(c):
    x = normal(c["rows"], c["cols"])
    weight = rotating(lambda: normal(c["outs"], c["cols"]))
    yield "bf16", lambda: F.linear(x, weight())
    if c["weights"] == "BF16" or c["rows"] < 16 or c["rows"] % 16:
        return
    x8, one = x.to(FP8), torch.ones(c["rows"], 1, device=DEVICE)
    weight8 = rotating(lambda: (normal(c["outs"], c["cols"], dtype=FP8), torch.ones(1, c["outs"], device=DEVICE)))

    def scaled():
        w, scale = weight8()
        return torch._scaled_mm(x8, w.t(), scale_a=one, scale_b=scale, out_dtype=BF16)

    yield "fp8 by rows", scaled


def linear_heads(c):
    heads, each = c["n"], c["outs"] // c["n"]
    transposed = c["top_k"] > 0
    x = normal(heads, c["rows"], each if transposed else c["cols"])
    weight = rotating(lambda: normal(heads, each, c["cols"]))
    yield "bf16 bmm", lambda: torch.bmm(x, weight() if transposed else weight().transpose(1, 2))


def grouped_gemm(c):
    places = c["rows"] * c["top_k"]
    expert = torch.arange(places, device=DEVICE) % c["n"]
    ends = torch.cumsum(torch.bincount(expert, minlength=c["n"]), 0).to(torch.int32)
    x = normal(places, c["cols"])
    weight = rotating(lambda: normal(c["n"], c["outs"], c["cols"]))
    yield "bf16 grouped", lambda: torch._grouped_mm(x, weight().transpose(1, 2), offs=ends)


def attention(c):
    rows, heads, width = c["rows"], c["outs"], c["cols"]
    listed = c["top_k"] + (128 if width == 512 else 0) if c["top_k"] else c["n"]
    if c["top_k"]:  # every row has keys of its own
        q = normal(rows, heads, width)
        pool = rotating(lambda: normal(c["n"], width))
        index = torch.randint(0, c["n"], (rows, listed), device=DEVICE)

        def selected():
            keys = pool()[index]
            p = torch.softmax(torch.bmm(q, keys.transpose(1, 2)).float() * 0.04, -1).to(BF16)
            return torch.bmm(p, keys[:, :, :512])

        yield "bf16 gather, bmm", selected
        return
    q = normal(rows * heads, width)
    pool = rotating(lambda: normal(listed, width))

    def dense():
        keys = pool()
        p = torch.softmax((q @ keys.t()).float() * 0.04, -1).to(BF16)
        return p @ keys[:, :512]

    yield "bf16 matmuls", dense


def indexer_topk(c):
    if c["outs"] == 1:  # one narrow head: what is left is the choice
        scores = rotating(lambda: normal(c["rows"], c["n"], dtype=torch.float32))
        yield "topk alone", lambda: torch.topk(scores(), c["top_k"])
    q, weight = normal(c["rows"] * c["outs"], c["cols"]), normal(c["rows"], 1, c["outs"])
    pool = rotating(lambda: normal(c["n"], c["cols"]))

    def select():
        hits = torch.relu(q @ pool().t()).view(c["rows"], c["outs"], c["n"])
        return torch.topk(torch.bmm(weight, hits).view(c["rows"], c["n"]).float(), c["top_k"]).indices

    yield "bf16 matmul, topk", select


def compress(c):
    block, width = c["n"], c["cols"]
    parts, blocks = 2 if block == 4 else 1, c["rows"] // block
    if not blocks:
        return
    kv, gate = (normal(blocks, block, parts * width, dtype=torch.float32) for _ in range(2))
    weight = normal(width, dtype=torch.float32)

    def taken(x):
        """A block's positions, behind those of the block before."""
        return torch.cat([F.pad(x[:-1, :, :width], (0, 0, 0, 0, 1, 0)), x[:, :, width:]], 1) if parts == 2 else x

    def mix():
        return F.rms_norm((taken(kv) * torch.softmax(taken(gate), 1)).sum(1), (width,), weight, 1e-6)

    yield "float32", mix


def hc_pre(c):
    streams, cols = c["n"], c["cols"]
    x = normal(c["rows"], streams * cols, dtype=torch.float32)
    fn = rotating(lambda: normal(2 * streams + streams * streams, streams * cols, dtype=torch.float32))

    def mix():
        m = (x @ fn().t()) * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        comb = torch.softmax(m[:, 2 * streams :].view(-1, streams, streams), -1)
        for _ in range(20):
            comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
        pre = torch.sigmoid(m[:, :streams]).view(-1, 1, streams)
        return torch.bmm(pre, x.view(-1, streams, cols)), comb

    yield "float32", mix


def hc_post(c):
    x, comb = normal(c["rows"], c["n"], c["cols"]), normal(c["rows"], c["n"], c["n"])
    y, post = normal(c["rows"], 1, c["cols"]), normal(c["rows"], c["n"], 1)
    yield "bf16", lambda: torch.baddbmm(post * y, comb, x)


def rms_norm(c):
    x, weight = normal(c["rows"], c["cols"]), normal(c["cols"])
    yield "bf16", lambda: F.rms_norm(x, (c["cols"],), weight, 1e-6)


def swiglu(c):
    gate, up = normal(c["rows"], c["cols"]), normal(c["rows"], c["cols"])
    yield "bf16", lambda: F.silu(gate.clamp(max=10)) * up.clamp(-10, 10)


def moe_topk(c):
    logits, bias = normal(c["rows"], c["cols"], dtype=torch.float32), normal(c["cols"], dtype=torch.float32)

    def choose():
        score = torch.sigmoid(logits)
        expert = torch.topk(score + bias, c["top_k"]).indices
        weight = score.gather(1, expert)
        return expert, weight / weight.sum(-1, keepdim=True)

    yield "without groups", choose


def moe_permute(c):
    expert = torch.randint(0, c["n"], (c["rows"] * c["top_k"],), device=DEVICE, dtype=torch.int32)
    yield "stable sort", lambda: torch.sort(expert, stable=True)


def moe_combine(c):
    y = normal(c["rows"] * c["top_k"], c["cols"])
    place = torch.randperm(c["rows"] * c["top_k"], device=DEVICE)
    weight = normal(c["rows"], 1, c["top_k"])
    yield "bf16", lambda: torch.bmm(weight, y[place].view(c["rows"], c["top_k"], c["cols"]))


def argmax(c):
    logits = normal(c["rows"], c["cols"], dtype=torch.float32)
    yield "float32", lambda: torch.argmax(logits, -1)


def sample(c):
    logits = normal(c["rows"], c["cols"], dtype=torch.float32)

    def choose():
        best = torch.topk(logits, 50)
        p = torch.softmax(best.values, -1)
        p = torch.where(torch.cumsum(p, -1) - p < 0.95, p, 0.0)
        return best.indices.gather(1, torch.argmax(p / torch.empty_like(p).exponential_(), -1, keepdim=True))

    yield "float32", choose


PEERS = {f.__name__: f for f in (linear, linear_heads, grouped_gemm, attention, indexer_topk, compress, hc_pre,
                                 hc_post, rms_norm, swiglu, moe_topk, moe_permute, moe_combine, argmax, sample)}  # fmt: skip


def peer_of(case):
    """The fastest of the case's peers: its name and seconds."""
    best = ("-", None)
    for name, run in PEERS.get(case["op"], lambda _: ())(case):
        try:
            seconds = seconds_of(run)
        except (RuntimeError, AttributeError) as why:
            print(f"{case['case']}, {name}: {str(why).splitlines()[0][:120]}", file=sys.stderr)
            continue
        if best[1] is None or seconds < best[1]:
            best = (name, seconds)
    return best


def print_row(c, name, seconds):
    peer = f"{seconds * 1e6:10.2f} {seconds * 1e6 / c['us']:8.2f}" if seconds else f"{'-':>10} {'-':>8}"
    print(f"{c['case']:<28} {c['rows']:>5} {c['us']:10.2f}  {name:<18} {peer} {c['limit_us']:10.2f} "
          f"{c['binds']:>5} {100 * c['limit_us'] / c['us']:7.1f}% {100 * c['spread']:6.1f}%", flush=True)


def main():
    as_json = "--json" in sys.argv
    paths = [a for a in sys.argv[1:] if a != "--json"]
    source = open(paths[0]) if paths else sys.stdin
    cases = [json.loads(line) for line in source if line.startswith("{")]
    if not as_json:
        print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
        print(f"{'case':<28} {'rows':>5} {'ours us':>10}  {'peer':<18} {'peer us':>10} {'speedup':>8} "
              f"{'limit us':>10} {'binds':>5} {'of limit':>8} {'spread':>7}")  # fmt: skip
    for c in cases:
        name, seconds = peer_of(c)
        if as_json:
            us = seconds and seconds * 1e6
            print(json.dumps({**c, "torch": torch.__version__, "peer": name, "peer_us": us}), flush=True)
        else:
            print_row(c, name, seconds)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
