"""Every mutant applies: one that does not would be noticed only when it is run."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "tools" / "mutants").glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_every_mutant_applies_to_this_tree(patch):
    command = ["patch", "-p1", "--dry-run", "--force", "-s", "-i", str(patch)]
    tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert tried.returncode == 0, tried.stdout
