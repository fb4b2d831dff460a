"""Every example in a docstring gives what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLACES = ("jaxres", "emulators/jaxres_emulators", "tests")


def modules_with_examples() -> list[str]:
    """Returns the names of the modules whose text has an example."""
    paths = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("emulators.")
        for path in paths
        if path != Path(__file__) and "    >>> " in path.read_text()
    ]


@pytest.mark.parametrize("name", modules_with_examples())
def test_every_example_of_a_module_gives_what_it_says(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted, "it has an example that is in no docstring"
    assert found.failed == 0, "the output has the example"
