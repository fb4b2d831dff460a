"""The test command runs tests of every promise, but for a few whose tests are all slow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TABLE = re.compile(r"^\| (?!promise|-)(.+) \| `(.+)` \|$", re.MULTILINE)


def promises() -> dict[str, str]:
    """Returns promise -> arguments of pytest, from the table in tests/promises/README.md."""
    text = (ROOT / "tests/promises/README.md").read_text().partition("## Track record")[0]
    return dict(TABLE.findall(text))


def selects(arguments: str, name: str) -> bool:
    """Returns whether pytest's arguments, paths or `-k TEXT paths`, select a test."""
    keyword, _, paths = arguments.removeprefix("-k ").partition(" ")
    if not arguments.startswith("-k "):
        keyword, paths = "", arguments
    return keyword in name and any(name.startswith(path) for path in paths.split())


def listed(*arguments: str) -> list[str]:
    """Returns the names of the promise tests that pytest would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "tests/promises"]
    command += ["-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow  # Twice a collection.
def test_a_tier_of_ci_has_tests_of_every_promise() -> None:
    fast, slow = listed(), listed("-m", "slow and not campaign and not gpu")
    for promise, arguments in promises().items():
        if promise.endswith("(slow)"):
            assert [name for name in slow if selects(arguments, name)], f"no case in {arguments}"
            continue
        unit = [path for path in arguments.split() if path.startswith("tests/unit/")]
        assert all((ROOT / path).is_file() for path in unit)
        assert unit or [name for name in fast if selects(arguments, name)], (
            f"no fast case in {arguments}, which does not say (slow)"
        )


def test_every_file_of_promises_is_in_the_table() -> None:
    listed = set(re.findall(r"test_\w+\.py", "".join(promises().values())))
    files = {path.name for path in (ROOT / "tests/promises").glob("test_*.py")}
    assert {name for name in files - listed if not re.search("gce|bucket", name)} == set()
