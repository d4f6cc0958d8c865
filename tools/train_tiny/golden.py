"""Golden logits for the C engine: `golden.py MODEL OUT`. Float32 arithmetic on the dequantized shipped file,
no rounding of activations, KV or indexer. Three token lists; for each the rows named in cases.json:
main_N.npy [rows, vocab] (logits after token row) and mtp_N.npy (first draft of the MTP layer: row t and the
embedding of token t+1 give the logits of token t+2).
"""
import json
import os
import sys

import numpy as np
import torch
from tokenizers import Tokenizer

from encoding import END_THINK
from export import load_model
from families import family_of
from make_eval import cases

ROWS = 3


def token_lists(tok: Tokenizer, chat) -> list[list[int]]:
    """An addition with its answer, a story, and facts with a question that crosses the window."""
    out = []
    for task, thinking in (("addition_3", True), ("story", False), ("recall_500", False)):
        c = next(c for c in cases(task, 50) if task != "recall_500" or len(tok.encode(c["messages"][0]["content"]).ids) < 480)
        text = chat.render(c["messages"], thinking) + (END_THINK if thinking else "") + c["reference"]
        out.append(tok.encode(text, add_special_tokens=False).ids)
    return [out[0], out[1][:200], out[2][:1] + out[2][-299:]]


@torch.no_grad()
def main() -> None:
    path, out = sys.argv[1:3]
    os.makedirs(out, exist_ok=True)
    torch.set_num_threads(2)
    family = family_of(json.load(open(f"{path}/config.json")))
    tok = Tokenizer.from_file(f"{path}/tokenizer.json")
    model = load_model(path, 512, "cpu", torch.float32)
    record = []
    for i, ids in enumerate(token_lists(tok, family.encoding)):
        n = len(ids)
        t = torch.zeros(1, -(-n // 128) * 128, dtype=torch.long)
        t[0, :n] = torch.tensor(ids)
        start = torch.zeros_like(t)
        x, _, _ = model.trunk(t, start)
        rows = list(range(max(0, n - 1 - ROWS), n - 1))
        main_logits = model.logits(model.head_input(x))[0, rows]
        np.save(f"{out}/main_{i}.npy", main_logits.numpy().astype(np.float32))
        if model.mtp:
            x, _, _ = model.mtp(x, t, start)
            mtp_logits = model.logits(model.head_input(x, "mtp.0."))[0, rows]
            np.save(f"{out}/mtp_{i}.npy", mtp_logits.numpy().astype(np.float32))
        record.append({"tokens": ids, "rows": rows})
        print(i, n, "tokens, main guesses right", int((main_logits.argmax(-1) == t[0, [r + 1 for r in rows]]).sum()), "of", len(rows))
    with open(f"{out}/cases.json", "w") as f:
        json.dump(record, f)
        f.write("\n")


if __name__ == "__main__":
    main()
