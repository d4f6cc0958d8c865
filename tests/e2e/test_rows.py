"""README.md gives as many tested rows as there are."""

import subprocess
import sys

from conftest import ROOT


def test_figures_of_the_readme():
    counted = subprocess.run([sys.executable, ROOT / "scripts" / "count_rows.py", "--check"], capture_output=True, text=True)
    assert counted.returncode == 0, counted.stdout + counted.stderr
