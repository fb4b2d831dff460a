"""Copies of the working tree, to which mutants are applied.

Every file that is changed gets a modification time of its own, so that no bytecode of another
version of it is used: Python compares whole seconds and the size.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tools.mutants.tables import Mutant, apply

BYTECODE = "__pycache__"
FIRST_TIME = 1_000_000_000
"""Seconds: before the time of any file that is copied."""


def copy_tree(root: Path, tree: Path) -> None:
    """Copies a working tree, without files that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    for name in sorted(set(filter(None, listed.stdout.split("\0")))):
        if Path(root, name).is_file() or Path(root, name).is_symlink():
            Path(tree, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(root, name), Path(tree, name), follow_symlinks=False)


def python_path(tree: Path) -> str:
    """Returns the PYTHONPATH with which a process imports jaxres and the emulators of a tree."""
    return os.pathsep.join((str(tree), str(tree / "emulators")))


def errors(paths: Iterable[Path]) -> str:
    """Returns the first syntax error of Python files, or, if ruff is installed, undefined name.

    A change with one crashes instead of doing something wrong.
    """
    paths = [path for path in paths if path.suffix == ".py"]
    for path in paths:
        try:
            compile(path.read_bytes(), path, "exec")
        except SyntaxError as error:
            return f"{path}:{error.lineno}: {error.msg}"
    if not paths or importlib.util.find_spec("ruff") is None:
        return ""
    options = ("--isolated", "--no-cache", "--select", "F821", "--output-format", "concise")
    command = [sys.executable, "-m", "ruff", "check", *options, *map(str, paths)]
    checked = subprocess.run(command, capture_output=True, text=True)
    return checked.stdout.partition("\n")[0] if checked.returncode else ""


@dataclass
class Tree:
    """A copy for one mutant at a time.

    Attributes:
      folder: where it is.
      original: a copy that stays as it is.
    """

    folder: Path
    original: Path
    _known: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Facts of each file and folder as it must be."""
    _times: itertools.count[int] = field(default_factory=lambda: itertools.count(FIRST_TIME))

    def __post_init__(self) -> None:
        shutil.copytree(self.original, self.folder, symlinks=True)
        self._known = _facts(self.folder)

    def apply(self, mutant: Mutant) -> str:
        """Applies a mutant; returns why it can't be used, or an empty string."""
        if why := apply(mutant, self.folder):
            return why
        changed = [self.folder / name for name in mutant.files]
        for path in changed:
            self._set_time(path)
        return errors(changed)

    def restore(self) -> None:
        """Removes added files and restores changed or removed ones.

        Bytecode stays: that of a file that was changed fits no file again.
        """
        found = _facts(self.folder)
        for name, facts in found.items():
            if self._known.get(name, ())[:1] != facts[:1]:  # New, or another kind or mode.
                _remove(self.folder / name)
        for name, facts in self._known.items():
            path = self.folder / name
            if stat.S_ISDIR(facts[0]):
                path.mkdir(exist_ok=True)
            elif found.get(name) != facts:
                _remove(path)
                shutil.copy2(self.original / name, path, follow_symlinks=False)
                if stat.S_ISREG(facts[0]):
                    self._set_time(path)
                self._known[name] = _facts_of(path)

    def _set_time(self, path: Path) -> None:
        seconds = next(self._times)
        os.utime(path, (seconds, seconds))


def _facts(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the facts of all files and folders below a folder, parents first."""
    found = {}
    for parent, folders, files in os.walk(folder):
        if BYTECODE in folders:
            folders.remove(BYTECODE)
        for name in (*folders, *files):
            path = Path(parent, name)
            found[str(path.relative_to(folder))] = _facts_of(path)
    return found


def _facts_of(path: Path) -> tuple[int, ...]:
    """Returns mode, size and time; only the mode of a folder, whose time changes with bytecode."""
    facts = path.lstat()
    if stat.S_ISDIR(facts.st_mode):
        return (facts.st_mode,)
    return (facts.st_mode, facts.st_size, facts.st_mtime_ns)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
