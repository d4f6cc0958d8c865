"""Compare the DSpark drafter with reference drafts: `check_dspark.py DIR` holds config.json, model.safetensors,
tokens.json and drafts.json (tests/golden/README.md). The proof that what is trained drafts as the engine does.
"""
import json
import sys

import torch
import torch.nn.functional as F

from check_golden import read_weights
from dspark import FORMS, Anchors, DSpark, DSparkConfig
from families import family_of


def open_drafter(path: str, j: dict, longest: int) -> DSpark:
    """The stages of a whole checkpoint, on the rest."""
    family, w = family_of(j), read_weights(path, j)
    c = family.from_json(j)
    c.tokenizer = f"{path}/tokenizer.json"
    model = family.model(c, {k: x for k, x in w.items() if not k.startswith("mtp.")}, longest)
    model.sparse = True
    keys = {**j, **j.get("text_config", {})}
    d = DSparkConfig(**{k: keys["dspark_" + k] for k in DSparkConfig.__dataclass_fields__ if "dspark_" + k in keys})
    return DSpark(model, {k: x for k, x in w.items() if k.startswith("mtp.")}, d, FORMS[family.name])


@torch.no_grad()
def main() -> None:
    path = sys.argv[1]
    torch.set_num_threads(1)
    j, tokens, cases = (json.load(open(f"{path}/{name}.json")) for name in ("config", "tokens", "drafts"))
    pad_to = family_of(j).from_json(j).pad_to
    padded = -(-(len(tokens) + 1) // pad_to) * pad_to
    drafter = open_drafter(path, j, padded)
    ids = F.pad(torch.tensor(tokens), (0, padded - len(tokens)))[None]
    start = torch.zeros_like(ids)
    taps, _ = drafter.trunk(ids, start)
    at = torch.tensor([case["position"] for case in cases["cases"]])
    known = torch.tensor([case["token"] for case in cases["cases"]])
    anchors = Anchors(at // drafter.c.sliding_window, at[:, None], torch.zeros_like(at))  # a group for each
    mixed, _ = drafter.draft(drafter.absorb(taps), known[:, None], start, anchors)
    got = drafter.places(mixed.view(len(at), cases["block_size"], -1), known)
    wrong, worst = 0, 0.0
    for i, case in enumerate(cases["cases"]):
        wrong += got[0][i].tolist() != case["drafts"]
        for x, name in ((got[1], "confidence"), (got[2], "logit")):
            worst = max(worst, float((x[i] - torch.tensor(case[name])).abs().max()))
    print(f"{path}: {len(at)} blocks, {wrong} with other drafts, largest difference {worst:.1e}")
    sys.exit(int(wrong > 0 or worst >= 1e-3))


if __name__ == "__main__":
    main()
