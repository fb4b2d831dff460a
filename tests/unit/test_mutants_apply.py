"""Every mutant applies: one that does not would be noticed only when it is run."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "tools" / "mutants").glob("*.patch"))


def complaint(patch):
    """Returns why a mutant does not apply; empty: it does."""
    command = ["patch", "-p1", "--dry-run", "--force", "-s", "-i", str(patch)]
    tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return f"{patch.stem}: {tried.stdout}{tried.stderr}" if tried.returncode else ""


def test_every_mutant_applies_to_this_tree():
    assert len(PATCHES) > 500
    with ThreadPoolExecutor(2) as pool:
        assert [said for said in pool.map(complaint, PATCHES) if said] == []
