"""Reads the mutants: wrong changes of the code, and the promise that each of them breaks.

`tests/mutants/FOLDER.toml` has those of `jaxres/FOLDER`, `other.toml` all others:

    [committed-before-durable]
    promise = "tests/promises/test_x.py::test_y"
    raises = "OverflowError"
    file = "jaxres/checkpoint/checkpointer.py"
    old = 'if is_durable:'
    new = 'if True:'

`old` occurs once in the file, so that a mutant does not depend on the lines around it. A mutant of
several places has a list `[[NAME.edits]]` of file, old and new. `raises` is for a promise that can
only end with that exception instead of an assertion of its test.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "mutants"
TOO_WIDE = ("Exception", "BaseException")
EDIT = {"file", "old", "new"}


@dataclass(frozen=True)
class Edit:
    """A text of a file that is replaced."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A wrong change, and the promise it breaks.

    Attributes:
      raises: the class with which the promise fails; None: an assertion of the test.
    """

    name: str
    promise: str
    edits: tuple[Edit, ...]
    raises: str | None = None

    @property
    def files(self) -> frozenset[str]:
        """Files that it changes."""
        return frozenset(edit.file for edit in self.edits)

    @property
    def digest(self) -> str:
        """A digest of the change, the promise and the class."""
        text = repr((self.promise, self.raises, [astuple(edit) for edit in self.edits]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_all(folder: Path = FOLDER) -> list[Mutant]:
    """Reads all mutants, by name.

    Raises:
      ValueError: as `decode`, or two tables have the same name.
    """
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        for name, row in tomllib.loads(path.read_text()).items():
            if name in found:
                raise ValueError(f"{path}: {name} is also in another table")
            found[name] = decode(name, row)
    return [found[name] for name in sorted(found)]


def decode(name: str, row: Mapping[str, Any]) -> Mutant:
    """Returns a mutant from its row.

    Raises:
      ValueError: a key is missing or unknown, or `raises` is a class that every error has.
    """
    edits = row.get("edits") or [{key: row[key] for key in EDIT & row.keys()}]
    known = {"promise", "raises", *({"edits"} if "edits" in row else EDIT)}
    if unknown := row.keys() - known:
        raise ValueError(f"{name}: unknown {', '.join(sorted(unknown))}")
    if not row.get("promise") or any(edit.keys() != EDIT for edit in edits):
        raise ValueError(f"{name}: needs promise, file, old and new")
    if row.get("raises") in TOO_WIDE:
        raise ValueError(f"{name}: needs a narrower class than {row['raises']}")
    return Mutant(name, row["promise"], tuple(Edit(**edit) for edit in edits), row.get("raises"))


def apply(mutant: Mutant, tree: Path) -> str:
    """Changes the files of a tree; returns why it does not apply, or an empty string."""
    texts = {name: tree / name for name in sorted(mutant.files)}
    if absent := [name for name, path in texts.items() if not path.is_file()]:
        return f"{absent[0]}: there is no such file"
    changed = {name: path.read_text() for name, path in texts.items()}
    for edit in mutant.edits:
        if (times := changed[edit.file].count(edit.old)) != 1:
            return f"{edit.file}: {times} times instead of once: {edit.old!r}"
        changed[edit.file] = changed[edit.file].replace(edit.old, edit.new)
    for name, text in changed.items():
        texts[name].write_text(text)
    return ""
