"""A mutant that no longer applies guards nothing, and is found only when somebody runs it."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "tools" / "mutants").glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_every_mutant_applies_to_this_tree(patch):
    words = ["patch", "-p1", "--dry-run", "--force", "-s", "-i", str(patch)]
    tried = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert tried.returncode == 0, tried.stdout
