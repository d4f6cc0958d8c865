"""Draw curve.csv: `plot.py curve.csv curve.png`. Losses of the main model and of the first draft; below, the load of
the busiest expert of each layer. Gray lines: longer rows begin, rounding begins.
"""
import csv
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    rows = list(csv.DictReader(open(sys.argv[1])))
    x = [int(r["step"]) for r in rows]
    fig, (top, low) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=[2, 1])
    top.plot(x, [float(r["loss"]) for r in rows], label="loss", lw=0.8)
    top.plot(x, [float(r["draft_loss"]) for r in rows], label="draft loss (MTP)", lw=0.8)
    top.set_yscale("log")
    for k in (k for k in rows[0] if k.startswith("skew_")):
        low.plot(x, [float(r[k]) for r in rows], lw=0.5)
    low.set_ylabel("max/mean load")
    low.set_ylim(1, 6)
    for a, b in zip(rows, rows[1:]):
        if any(a[k] != b[k] for k in ("length", "quantized")):
            for ax in (top, low):
                ax.axvline(int(b["step"]), color="gray", lw=0.6)
    low.set_xlabel("step of 65,536 tokens")
    top.legend()
    fig.tight_layout()
    fig.savefig(sys.argv[2], dpi=90)


if __name__ == "__main__":
    main()
