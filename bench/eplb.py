"""Times the published algorithm in plain Python (the port of the tests) on the case of bench_eplb.

    .venv/bin/python bench/eplb.py
"""

import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "e2e"))
from test_eplb import published

LAYERS, EXPERTS, SLOTS, RANKS = 58, 256, 288, 32

dice = random.Random(20261124)
loads = [[round(1e4 * dice.lognormvariate(0, 1)) for _ in range(EXPERTS)] for _ in range(LAYERS)]
begin = time.process_time()
for layer in loads:
    published(layer, SLOTS, 1, 1, RANKS)
print(f"published in Python, {LAYERS} layers: {(time.process_time() - begin) * 1e3:.0f} ms")
