"""The base that a run of CI compares with, and the files that tests and mutants name."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tools.ci.results import ROOT

FOLDERS = ("", "emulators")
"""Folders of this repository from which modules are imported."""


def changed_since(commit: str | None) -> frozenset[str] | None:
    """Returns the files that differ between a commit and the working tree; None without a base.

    A commit that is no ancestor of the present one, as after a rebase, is no base.
    """
    if commit is None or _git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return None
    listed = _git("diff", "--name-only", commit)
    listed.check_returncode()
    return frozenset(listed.stdout.split())


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@cache
def imported(path: str) -> frozenset[str]:
    """Returns the files of this repository that a Python file imports.

    Args:
      path: the file, relative to the repository's root.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= _files_of([node.module, *(f"{node.module}.{n.name}" for n in node.names)])
        if isinstance(node, ast.Import):
            found |= _files_of(name.name for name in node.names)
    return frozenset(found)


def _files_of(modules: Iterable[str]) -> set[str]:
    paths = (Path(folder, *module.split(".")) for module in modules for folder in FOLDERS)
    places = (place for path in paths for place in (path.with_suffix(".py"), path / "__init__.py"))
    return {str(place) for place in places if (ROOT / place).is_file()}
