#!/bin/sh
# Make models/NAME (tiny-v3 or tiny-v4) from nothing but the seeds: training run, export, evaluation, golden logits.
# Run it in the repository root: `tools/train_tiny/make_tiny.sh tiny-v4 [MINUTES]`. A stopped run goes on where it was.
# MINUTES is what the training may take; without it the run file's steps decide. RUN names another run file.
set -e
name=$1
case $name in tiny-v3 | tiny-v4) ;; *) echo "usage: make_tiny.sh tiny-v3|tiny-v4 [MINUTES]" >&2; exit 2 ;; esac
here=tools/train_tiny
run=${RUN:-$here/runs/$(echo "$name" | tr - _).json}
work=${WORK:-build/train_tiny/$name}
model=${MODEL:-models/$name}
mkdir -p "$work" "$model"
[ -f models/tiny-v4/tokenizer.json ] || python3 $here/train_tokenizer.py --out models/tiny-v4/tokenizer.json
python3 $here/train.py "$run" --dir "$work" ${2:+--within "$2"}
python3 $here/export.py "$work/small.pt" models/tiny-v4/tokenizer.json "$model"
cp "$work/curve.csv" "$model/curve.csv"
python3 $here/plot.py "$model/curve.csv" "$model/curve.png"
python3 $here/evaluate.py "$model" --small "$work/small.pt" --cases "${CASES:-200}" --out "$model/evaluation.json"
python3 $here/golden.py "$model" "$model/golden"
