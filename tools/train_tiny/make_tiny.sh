#!/bin/sh
# Make models/NAME (tiny-v3, tiny-v4 or tiny-v41) from nothing but the seeds: training, export, evaluation, golden logits.
# Run it in the repository root: `tools/train_tiny/make_tiny.sh tiny-v4`. One H200 needs about 36 minutes for tiny-v4, 25 for tiny-v3;
# a stopped run goes on where it was. The model before rounding to FP8 and FP4 is left in $WORK/bf16. RUNS names other
# run files (the toy ones need no GPU); INIT an exported model that the first of them begins with; TRAIN and EVALUATE hold
# more options for train.py and evaluate.py.
set -e
case $1 in
tiny-v3) runs=${RUNS:-tiny_v3 tiny_v3_rest tiny_v3_tools tiny_v3_names} ;;
tiny-v4) runs=${RUNS:-tiny_v4 tiny_v4_rest tiny_v4_finish tiny_v4_tools tiny_v4_names} ;;
tiny-v41) runs=${RUNS:-tiny_v41 tiny_v41_rest} ;;
*) echo "usage: make_tiny.sh tiny-v3|tiny-v4|tiny-v41" >&2; exit 2 ;;
esac
here=tools/train_tiny
work=${WORK:-build/train_tiny/$1}
model=${MODEL:-models/$1}
tokenizer=models/tiny-v4/tokenizer.json
mkdir -p "$work" "$model/eval"
[ -f $tokenizer ] || python3 $here/train_tokenizer.py --out $tokenizer
if [ "$1" = tiny-v41 ]; then
    python3 $here/train_tokenizer.py --like $tokenizer --out models/tiny-v41/tokenizer.json
    tokenizer=models/tiny-v41/tokenizer.json
fi
init=$INIT
for run in $runs; do
    python3 $here/train.py $here/runs/"$run".json --dir "$work/$run" ${init:+--init "$init"} $TRAIN
    init=$work/$run/model
    python3 $here/export.py "$work/$run/small.pt" $tokenizer "$init"
    small=$work/$run/small.pt
done
python3 $here/export.py --bf16 "$small" $tokenizer "$work/bf16"
cp "$init"/* "$model"
{ [ -z "$INIT" ] || cat "$INIT/curve.csv"; for run in $runs; do cat "$work/$run/curve.csv"; done; } | awk 'NR == 1 || !/^run,/' > "$work/curve.csv"
cp "$work/curve.csv" "$model/curve.csv"
python3 $here/plot.py "$model/curve.csv" "$model/curve.png"
python3 $here/make_eval.py "$model/eval/tiny.jsonl" 50
python3 $here/evaluate.py "$model" --small "$small" --out "$model/evaluation.json" $EVALUATE
python3 $here/golden.py "$model" "$model/golden"
