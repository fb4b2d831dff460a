"""The five-minute command runs a case of every promise; longer cases are marked as slow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="module")
def fast() -> list[str]:
    command = [sys.executable, "-m", "pytest", "-n0", "--collect-only", "tests/promises"]
    command += ["-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stdout + listed.stderr
    return listed.stdout.splitlines()


@pytest.mark.parametrize("promise", promises())
def test_every_promise_has_a_case_in_the_fast_tier(promise: str, fast: list[str]) -> None:
    arguments = promises()[promise]
    if "tests/promises" not in arguments:
        assert (ROOT / arguments).is_file(), "it has unit tests only"
        return
    assert [name for name in fast if selects(arguments, name)], f"no fast case in {arguments}"


def test_every_file_of_promises_is_in_the_table() -> None:
    listed = set(re.findall(r"test_\w+\.py", "".join(promises().values())))
    files = {path.name for path in (ROOT / "tests/promises").glob("test_*.py")}
    assert {name for name in files - listed if not re.search("gce|bucket", name)} == set()
