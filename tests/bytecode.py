"""On a new clone a second process compiles the tests from their end while the first collects them.

The bytecode of a new environment is not there yet: uv leaves it to the first import, and pytest
rewrites each test's asserts. That is three quarters of the collection, for which one core idles.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

PROGRAM = "import google.cloud.compute_v1, pytest, sys; pytest.main(sys.argv[1:])"
"""Of all that the tests import, Google's client takes longest to compile."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Runs the second process while the first collects, if that is a new clone's whole suite."""
    config = session.config
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if not is_whole or config.option.workers < 2 or config.option.collectonly:
        return (yield)
    files = sorted(Path(config.rootpath, "tests").rglob("test_*.py"), reverse=True)
    if any(is_compiled(path) for path in files[:1]):
        return (yield)
    command = [sys.executable, "-c", PROGRAM, "--collect-only", *map(str, files)]
    with subprocess.Popen(
        command, cwd=config.rootpath, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            return (yield)
        finally:
            process.kill()


def is_compiled(path: Path) -> bool:
    """Returns whether pytest has compiled a file of tests."""
    usual = Path(importlib.util.cache_from_source(str(path)))
    return any(usual.parent.glob(f"{path.stem}.{sys.implementation.cache_tag}-pytest-*"))
