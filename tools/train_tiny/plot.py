"""Draw curve.csv: `plot.py curve.csv curve.png`. Losses of the main model and of the first draft; below, the load of
the busiest expert of each layer. Gray lines: another run, longer rows or rounding begins.
"""
import csv
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    rows = list(csv.DictReader(open(sys.argv[1])))
    steps = [int(r["step"]) for r in rows]
    x, before = [], 0  # runs one behind the other
    for i, r in enumerate(rows):
        if i and r["run"] != rows[i - 1]["run"]:
            before += steps[i - 1]
        x.append(before + steps[i])
    fig, (top, low) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=[2, 1])
    top.plot(x, [float(r["loss"]) for r in rows], label="loss", lw=0.8)
    top.plot(x, [float(r["draft_loss"]) for r in rows], label="draft loss (MTP)", lw=0.8)
    top.set_yscale("log")
    for k in (k for k in rows[0] if k.startswith("skew_")):
        low.plot(x, [float(r[k]) for r in rows], lw=0.5)
    low.set_ylabel("max/mean load")
    low.set_ylim(1, 6)
    for at, a, b in zip(x[1:], rows, rows[1:]):
        if any(a[k] != b[k] for k in ("run", "length", "quantized")):
            for ax in (top, low):
                ax.axvline(at, color="gray", lw=0.6)
    low.set_xlabel("step of 65,536 tokens")
    top.legend()
    fig.tight_layout()
    fig.savefig(sys.argv[2], dpi=90)


if __name__ == "__main__":
    main()
