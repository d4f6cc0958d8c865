"""Draw curve.csv: `plot.py curve.csv curve.png`. Main loss and first-draft loss over all runs, indexer loss below."""
import csv
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    rows = list(csv.DictReader(open(sys.argv[1])))
    x = range(len(rows))
    fig, (top, low) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=[2, 1])
    top.plot(x, [float(r["loss"]) for r in rows], label="loss", lw=0.8)
    top.plot(x, [float(r["draft_loss"]) for r in rows], label="draft loss (MTP)", lw=0.8)
    top.set_yscale("log")
    low.plot(x, [float(r["indexer_kl"]) for r in rows], label="indexer KL", lw=0.8, color="C2")
    low.set_yscale("log")
    for i in range(1, len(rows)):
        if rows[i]["run"] != rows[i - 1]["run"]:
            for ax in (top, low):
                ax.axvline(i, color="gray", lw=0.6)
    low.set_xlabel("20 steps of 65,536 tokens each; gray: next run")
    top.legend()
    low.legend()
    fig.tight_layout()
    fig.savefig(sys.argv[2], dpi=90)


if __name__ == "__main__":
    main()
