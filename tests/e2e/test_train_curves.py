"""Two hundred steps of `hadal train` beside PyTorch, from the same weights on the same batches of a file (bench/curves.py)."""

import json
import subprocess
import sys

import pytest
from conftest import HADAL, ROOT


@pytest.mark.long
def test_losses_are_those_of_pytorch(tmp_path):
    for package in ("torch", "safetensors", "tokenizers"):
        pytest.importorskip(package)
    out = tmp_path / "curves.json"
    done = subprocess.run([sys.executable, ROOT / "bench" / "curves.py", "--hadal", HADAL, "--json", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    curves = json.loads(out.read_text())
    assert set(curves) == {"tiny-v3", "toy-v4"}
    for name, curve in curves.items():
        own, peer = curve["hadal"], curve["PyTorch"]
        assert len(own) == len(peer) == 200 and own[-1] < 0.6 * own[0], name
        assert max(abs(a - b) for a, b in zip(own[:20], peer)) < 1e-3, name
        assert sum(own[149:]) == pytest.approx(sum(peer[149:]), rel=5e-3), name
