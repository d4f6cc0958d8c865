#!/bin/sh
# Make models/tiny-v4 from nothing but the seeds: tokenizer, three training runs, export, evaluation, golden logits.
# Run it in the repository root. One H200 needs about 35 minutes; every run goes on where it stopped.
set -e
here=tools/train_tiny
work=${WORK:-build/train_tiny}
model=models/tiny-v4
mkdir -p "$work" "$model"
[ -f $model/tokenizer.json ] || python3 $here/train_tokenizer.py --out $model/tokenizer.json
python3 $here/train.py $here/runs/tiny_v4.json --dir "$work/a"
python3 $here/train.py $here/runs/tiny_v4_recall.json --dir "$work/b" --init "$work/a/small.pt"
python3 $here/train.py $here/runs/tiny_v4_last.json --dir "$work/c" --init "$work/b/small.pt"
python3 $here/export.py "$work/c/small.pt" $model/tokenizer.json $model.new
cp $model.new/* $model/ && rm -r $model.new
python3 $here/make_eval.py $model/eval/tiny.jsonl 50
python3 $here/evaluate.py $model --small "$work/c/small.pt" --out $model/evaluation.json
python3 $here/golden.py $model $model/golden
