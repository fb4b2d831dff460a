"""The five-minute command runs a case of every promise; what it leaves out is named as slow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CAMPAIGNS = {"test_gce_campaign.py"}
"""Longer runs of promises in other files."""


def test_every_promise_has_a_case_in_the_fast_tier() -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "--collect-only", "tests/promises"]
    command += ["-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stdout + listed.stderr
    chosen = set(re.findall(r"(test_\w+\.py)", listed.stdout))
    promises = {path.name for path in (ROOT / "tests/promises").glob("test_*.py")}
    assert promises - chosen == CAMPAIGNS
