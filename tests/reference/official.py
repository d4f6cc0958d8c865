#!/usr/bin/env python3
"""V4.1 with the roundings of its own program, in float64.

    tests/reference/official.py CASE_DIR [--expect FILE]   compares with the last rows of a case
    tests/reference/official.py CASE_DIR --write FILE      writes the logits
    ... --narrow    with bfloat16 where a GPU has it: what --precision official computes

Inputs of FP8 and FP4 matrices (but for the grouped output projection), window vectors, shared
entries, index keys and index queries are rounded; what is between them is float64. --narrow also
rounds queries, window vectors and weights of attention, and inputs of the grouped projection and of
BF16 matrices where columns are whole spans of 64.
"""

import argparse
import pathlib
import sys

import add_mtp
import mtp
import numpy as np
import v41


def nearest(table, values):
    """The nearest of a table's numbers; ties go to the even code."""
    codes = np.arange(len(table))
    far = np.abs(np.abs(values)[..., None] - table)
    tied = far == far.min(-1, keepdims=True)
    code = np.where(tied, codes * 2 + codes % 2, 4 * len(table)).argmin(-1)
    even = np.where(tied & (codes % 2 == 0), codes, len(table)).min(-1)
    return np.copysign(table[np.where(even < len(table), even, code)], values)


def power_up(x):
    fraction, exponent = np.frexp(x)
    return np.ldexp(1.0, exponent - (fraction == 0.5))


E4M3, E2M1 = v41.E4M3[:127], v41.E2M1[:8]


def rounded(x, group, scale_of, table):
    """Of float32 numbers, as programs have them: a few lie on a border only as these."""
    x = x.astype(np.float32).astype(float)
    groups = x.reshape(*x.shape[:-1], -1, group)
    scale = scale_of(np.abs(groups).max(-1, keepdims=True))
    return (nearest(table, groups / scale) * scale).reshape(x.shape)


def fp8_of_32(x):
    """E4M3 times a power of two for each 32 columns."""
    return rounded(x, 32, lambda most: power_up(np.maximum(most, 1e-4) / 448), E4M3)


def fp4_of_16(x):
    """E2M1 times an E4M3 for each 16 columns."""
    return rounded(x, 16, lambda most: nearest(E4M3, np.maximum(most, 6 * 2.0**-9) / 6), E2M1)


def fp4_of_32(x):
    """E2M1 times a power of two for each 32 columns."""
    return rounded(x, 32, lambda most: power_up(np.maximum(most, 6 * 2.0**-126) / 6), E2M1)


def bf16(x):
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(float)


class Official(v41.V41):
    def __init__(self, config, tensors, classes, quantised, narrow):
        super().__init__(config, tensors, classes)
        self.quantised, self.narrow = quantised, narrow

    def linear(self, name, x):
        if name in self.quantised:
            return super().linear(name, fp8_of_32(x))
        wide = name + ".weight" in self.narrow and x.shape[-1] % 64 == 0
        return super().linear(name, bf16(x) if wide else x)

    def output(self, p, q, kv, mask, t, kind):
        if not self.narrow:
            return super().output(p, q, kv, mask, t, kind)
        c, n = self.c, len(q)
        q, kv = bf16(q), bf16(kv)
        score = np.where(mask, np.einsum("tad,ud->atu", q, kv) * c["head_dim"] ** -0.5, -np.inf)
        score = score.astype(np.float32).astype(float)
        sink = np.broadcast_to(self.w[p + "attn_sink"][:, None, None], (*score.shape[:2], 1))
        top = score.max(-1, keepdims=True)
        weight = np.exp(score - top)
        total = weight.sum(-1, keepdims=True) + np.exp(sink - top)
        out = np.einsum("atu,ud->tad", bf16(weight), kv) / total.transpose(1, 0, 2)
        out = self.rotate_tail(out, t, kind, inverse=True).reshape(n, c["o_groups"], -1)
        out = bf16(out) if out.shape[-1] % 64 == 0 else out
        wo_a = self.w[p + "wo_a.weight"].reshape(c["o_groups"], c["o_lora_rank"], -1)
        return self.linear(p + "wo_b", np.einsum("tgi,goi->tgo", out, wo_a).reshape(n, -1))

    def moe(self, p, h, tokens):
        """Routes weigh what w2 reads."""
        ids, weight = self.route(p, h, tokens)
        out = self.mlp(p + "shared_experts.", h)
        for e in range(self.c["n_routed_experts"]):
            t, slot = np.nonzero(ids == e)
            if len(t):
                out[t] += self.mlp(f"{p}experts.{e}.", h[t], weight[t, slot, None])
        return out

    def mlp(self, p, h, weight=1.0):
        limit = self.c["swiglu_limit"]
        gate = np.minimum(self.linear(p + "w1", h), limit)
        up = np.clip(self.linear(p + "w3", h), -limit, limit)
        return self.linear(p + "w2", mtp.silu(gate) * up * weight)

    def window_key(self, p, h, position, kind="main"):
        return fp8_of_32(super().window_key(p, h, position, kind))

    def index_query(self, q):
        return fp4_of_32(q)

    def write_shared(self, p, h, ratio):
        super().write_shared(p, h, ratio)
        self.entries, self.keys = fp4_of_16(self.entries), fp4_of_32(self.keys)


def open_case(folder, narrow=False):
    raw = add_mtp.read_raw(folder / "model.safetensors")
    quantised = {name.removesuffix(".scale") for name in raw if name.endswith(".scale")}
    wide = {name for name, (dtype, _, _) in raw.items() if narrow and dtype == "BF16"}
    plain, tokens = v41.open_case(folder)
    config = {**plain.c, "text_config": {}}
    return Official(config, plain.w, plain.classes, quantised, wide), tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", type=pathlib.Path)
    parser.add_argument("--expect", type=pathlib.Path)
    parser.add_argument("--write", type=pathlib.Path)
    parser.add_argument("--narrow", action="store_true")
    args = parser.parse_args()
    model, tokens = open_case(args.case, args.narrow)
    logits, _ = model.main(tokens)
    if args.write:
        np.save(args.write, logits.astype(np.float32))
        return
    want = np.load(args.expect or args.case / "expect_exact_rounding.npy")
    got = logits[-len(want) :]
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    print(f"{args.case.name}: {len(want)} rows, relative error {error:.1e}, largest {np.abs(got - want).max():.1e}")
    if error > v41.TOLERANCE:
        sys.exit(1)


if __name__ == "__main__":
    main()
