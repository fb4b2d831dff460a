"""Finds the files below a folder that match patterns, through links to folders.

pathlib's `**` follows no links to folders, and skips folders that it can't list: a corpus would
lack their files without a message. Here each folder is listed once, and such a folder is an error.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from jaxres.data.sources import own_folders
from jaxres.faults import ConfigError, RunError
from jaxres.storage.files import fault_of, is_folder, name_exists, raise_failure, status_of

WILD = frozenset("*?[")


@dataclass(frozen=True)
class Entry:
    """A name in a folder. `is_dir`: it is a folder, or a link to one."""

    path: Path
    is_dir: bool
    is_link: bool
    is_dangling: bool


def parts_of(pattern: str) -> tuple[str, ...]:
    """Returns the parts of a pattern between slashes. Raises ConfigError if it is invalid."""
    parts = PurePath(pattern).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise _invalid(pattern, "it must be a relative path without `..`")
    if any("**" in part and part != "**" for part in parts):
        raise _invalid(pattern, "`**` must be between slashes")
    return parts


class FolderTree:
    """A folder and its tree. Links to folders are followed, but no folder is there twice.

    Folders that jaxres itself writes are left out: `own` has their relative paths and kinds.

    Args:
      root: the folder, without links in its path.
      exclude: patterns of relative paths, as in fnmatch; `NAME/*` also leaves out the folder.
      skip: names of folders that are left out. If there are some, so are links to folders,
        dangling links and folders that can't be listed.
    """

    def __init__(self, root: Path, exclude: Sequence[str], *, skip: frozenset[str]) -> None:
        self.root = root
        self._cut = len(str(root).rstrip("/")) + 1
        self._exclude = exclude
        self._skip = skip
        self._own: dict[Path, str | None] = {}
        """Each folder that was seen -> its kind if jaxres has written it."""
        self._listed: dict[Path, tuple[Entry, ...]] = {}
        self._first: dict[tuple[int, int], Path] = {}
        """Device and inode of a folder -> its first path."""
        self._linked: set[Path] = set()
        """Folders whose path has a link below the root."""
        self._entered: set[Path] = set()
        """Folders in which a pattern has looked for names."""

    def matches(self, pattern: str) -> Iterator[Path]:
        """Yields the paths that match a pattern; one with `**` may yield a path several times.

        Raises:
          ConfigError: the pattern is invalid, a link is dangling, or a folder is there twice.
          StorageRefused, StorageUnavailable: a folder can't be listed.
        """
        yield from self._matches(self.root, parts_of(pattern))

    def folders(self) -> list[str]:
        """Returns the names of the folders in the root, if it has been listed."""
        entries = self._listed.get(self.root, ())
        return [entry.path.name for entry in entries if entry.is_dir and not self._is_left(entry)]

    def files(self) -> list[str]:
        """Returns the relative paths of the files in all folders that have been listed."""
        return [
            self._name(entry.path)
            for entries in self._listed.values()
            for entry in entries
            if not entry.is_dir and not entry.is_dangling
        ]

    def not_entered(self) -> list[str]:
        """Returns the relative paths of the folders beside files that no pattern looks into."""
        entries = itertools.chain.from_iterable(self._listed.values())
        return sorted(
            self._name(entry.path)
            for entry in entries
            if entry.is_dir and entry.path not in self._entered and not self._is_left(entry)
        )

    @property
    def own(self) -> dict[str, str]:
        """The folders of jaxres that were seen -> their kinds."""
        return {self._name(path): kind for path, kind in self._own.items() if kind}

    def leaves_out(self, pattern: str) -> bool | None:
        """Returns whether a pattern of `exclude` fits a name that was listed; None: none was."""
        if not self._listed:
            return None
        entries = itertools.chain.from_iterable(self._listed.values())
        return any(self._is_excluded(entry, pattern) for entry in entries)

    def _matches(self, folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
        first, rest = parts[0], parts[1:]
        self._entered.add(folder)
        if first == "**":
            for each in self._below(folder) if rest else ():
                yield from self._matches(each, rest)
            return
        for entry in self._named(folder, first):
            if not rest:
                yield entry.path
            elif self._is_open(entry):
                yield from self._matches(entry.path, rest)

    def _named(self, folder: Path, pattern: str) -> list[Entry]:
        if not WILD & set(pattern):  # The folder may have many other names.
            path = folder / pattern
            return [_entry(path, is_link=path.is_symlink())] if name_exists(path) else []
        entries = self._entries(folder)
        return [entry for entry in entries if fnmatchcase(entry.path.name, pattern)]

    def _below(self, folder: Path) -> list[Path]:
        """Returns a folder and all folders below it."""
        below, left = list[Path](), [folder]
        while left:
            below.append(left.pop())
            left += [entry.path for entry in self._entries(below[-1]) if self._is_open(entry)]
        return below

    def _is_open(self, entry: Entry) -> bool:
        """Returns whether to search below a name. Raises a ConfigError if the link is dangling."""
        if not (entry.is_dir or entry.is_dangling) or self._is_left(entry):
            return False
        if entry.is_dangling and not self._skip:
            raise unreadable(entry.path, "it is a dangling link")
        if entry.is_link or entry.path.parent in self._linked:
            self._linked.add(entry.path)
        return entry.is_dir

    def _is_left(self, entry: Entry) -> bool:
        if self._skip and (entry.is_link or entry.path.name in self._skip):
            return True
        if any(self._is_excluded(entry, pattern) for pattern in self._exclude):
            return True
        if self._skip or not entry.is_dir:
            return False
        if entry.path not in self._own:
            self._own[entry.path] = own_kind(entry.path)
        return self._own[entry.path] is not None

    def _is_excluded(self, entry: Entry, pattern: str) -> bool:
        """Returns whether a pattern of `exclude` fits a file, a link, or a folder and all in it."""
        name, is_folder = self._name(entry.path), entry.is_dir or entry.is_dangling
        if is_folder and pattern.endswith("*") and is_excluded(f"{name}/", pattern):
            return True
        return (entry.is_link or not entry.is_dir) and is_excluded(name, pattern)

    def _entries(self, folder: Path) -> tuple[Entry, ...]:
        if folder not in self._listed:
            try:
                self._check_once(folder)
                with os.scandir(folder) as found:
                    names = sorted(
                        (each.name, each.is_symlink(), each.is_dir(follow_symlinks=False))
                        for each in found
                    )
            except OSError as error:
                if not self._skip:
                    raise unreadable(folder, error) from error
                raise_failure(error, folder)  # It is not left out for a moment only.
                names = []
            self._listed[folder] = tuple(
                _entry(folder / name, is_link=True)
                if is_link
                else Entry(folder / name, is_dir=is_dir, is_link=False, is_dangling=False)
                for name, is_link, is_dir in names
            )
        return self._listed[folder]

    def _check_once(self, folder: Path) -> None:
        """Raises a ConfigError if a link leads to a folder that is listed under another path."""
        status = os.stat(folder)
        first = self._first.setdefault((status.st_dev, status.st_ino), folder)
        if first == folder or self._linked.isdisjoint((first, folder)):
            return  # Without a link: the folder is mounted twice.
        given, other = (folder, first) if folder in self._linked else (first, folder)
        raise ConfigError(
            f"data.source.path: {given} is, through a link, the same folder as {other}, so its "
            "files would be trained on twice. Remove the link, or leave it out with "
            f"data.source.exclude: [{self._name(given)}/*]."
        )

    def _name(self, path: Path) -> str:
        return str(path)[self._cut :]


def own_kind(folder: Path) -> str | None:
    """Returns the kind of a folder that jaxres itself has written; None: it is another's."""
    try:
        return own_folders.kind_of(lambda name: name_exists(folder / name))
    except OSError as error:
        raise unreadable(folder, error) from error


def is_excluded(name: str, pattern: str) -> bool:
    """Returns whether a pattern of `exclude` fits: as in fnmatch, and `**/` fits no folder too.

    >>> [is_excluded(name, "**/*.md") for name in ("a.md", "b/a.md", "b/c/a.md", "a.txt")]
    [True, True, True, False]
    >>> [is_excluded(name, "a/**/*.md") for name in ("a/b.md", "a/b/c.md", "b.md")]
    [True, True, False]
    """
    head, deep, tail = pattern.partition("**/")
    if not deep:
        return fnmatchcase(name, pattern)
    none = [f"{head}{tail}"] if not head or head.endswith("/") else []
    return any(is_excluded(name, each) for each in (*none, f"{head}*/{tail}"))


def is_match(name: str, pattern: str) -> bool:
    """Returns whether a relative path matches a pattern.

    >>> is_match("a.txt", "**/*.txt"), is_match("b/a.txt", "*/*.txt"), is_match("a.txt", "*/*.txt")
    (True, True, False)
    """
    return _is_match(PurePath(name).parts, PurePath(pattern).parts)


def _is_match(names: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    if not (names and parts):
        return not (names or parts)
    if parts[0] == "**":
        return any(_is_match(names[start:], parts[1:]) for start in range(len(names)))
    return fnmatchcase(names[0], parts[0]) and _is_match(names[1:], parts[1:])


def unreadable(path: Path, reason: OSError | str) -> RunError:
    """Returns the error for a file or folder of the corpus that can't be read."""
    kind = fault_of(reason) if isinstance(reason, OSError) else ConfigError
    return kind(
        f"data.source.path: {path} can't be read: {reason}. "
        "Fix it, or exclude it with data.source.exclude."
    )


def _entry(path: Path, *, is_link: bool) -> Entry:
    try:
        is_dangling = is_link and status_of(path) is None
        return Entry(path, is_folder(path), is_link, is_dangling=is_dangling)
    except OSError as error:
        raise unreadable(path, error) from error


def _invalid(pattern: str, why: str) -> ConfigError:
    return ConfigError(f"data.source.include: {pattern!r} is not a valid pattern: {why}")
