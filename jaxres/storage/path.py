"""The path of a file: a local path, or a name in a bucket (`gs://bucket/folder/name`)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import TypeIs

SCHEME = "gs://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f#?*\[\]]")
"""Characters that Google advises against in names."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
"""Of a URL, or of one whose slashes `Path` has made one."""
_NOT_FOR_ORBAX = re.compile(r"[\x00-\x1f\x7f*?\[\]\\]")
"""Orbax takes `*?[]` for patterns, and TensorStore takes a backslash for a slash."""
LONGEST_NAME = 255
"""Most bytes of a file's name."""
_BUCKET_ROOTS = ("gs", "s3", "az", "hf")
"""Top-level folders that epath, with which Orbax opens files, takes for buckets."""


@dataclass(frozen=True, order=True)
class GcsPath:
    """A name in a bucket, with the methods of a pure path: none of them accesses storage."""

    bucket: str
    key: str
    """Name without slashes at its ends; empty: the bucket itself."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> GcsPath:
        return GcsPath(self.bucket, f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        """Last part of the name."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> GcsPath:
        """Folder that contains it."""
        return GcsPath(self.bucket, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> GcsPath:
        """Returns the path with another last part."""
        return self.parent / name

    def absolute(self) -> GcsPath:
        """Returns the path itself: it is always absolute."""
        return self


RunPath = Path | GcsPath


def is_path(value: object) -> TypeIs[RunPath]:
    """Returns whether a value is a path of either kind."""
    return isinstance(value, RunPath)


def is_remote(path: RunPath) -> TypeIs[GcsPath]:
    """Returns whether a path is in a bucket."""
    return isinstance(path, GcsPath)


def is_address(text: str) -> bool:
    """Returns whether a text is a URL, in a bucket too; `Path` may have removed one of its slashes.

    >>> [is_address(text) for text in ("s3://bucket/a", "gs:/bucket/a", "a:b/c", "./s3:/a")]
    [True, True, False, False]
    """
    return _ADDRESS.match(text) is not None


def parse_path(text: str) -> RunPath:
    """Returns the path of a text; raises ValueError if it is invalid.

    >>> parse_path("gs://bucket/runs/a/"), parse_path("runs/a")
    (GcsPath(bucket='bucket', key='runs/a'), PosixPath('runs/a'))
    """
    if not text.startswith(SCHEME):
        if not text or "\0" in text or is_address(text):
            raise ValueError("must be a local path or gs://BUCKET/FOLDER")
        return Path(text)
    bucket, _, key = text.removeprefix(SCHEME).partition("/")
    key = key.rstrip("/")
    parts = key.split("/")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError("must be gs://BUCKET/FOLDER; a bucket's name has only a-z, 0-9, . _ and -")
    if {"", ".", ".."} & set(parts) or _FORBIDDEN.search(key):
        raise ValueError("must be gs://BUCKET/FOLDER, without empty parts and without *?[]#")
    return GcsPath(bucket, key)


def normalized(path: RunPath) -> RunPath:
    """Returns the normal form: absolute, `~` expanded, without `..` and repeated slashes.

    Each `..` is resolved as the operating system does it, so through symbolic links. The part of
    the path after the last `..` keeps its links: what they point to may change.

    Raises:
      ValueError: the path is relative and the current directory does not exist any more.

    >>> normalized(Path("//data/../data/./run"))
    PosixPath('/data/run')
    """
    if is_remote(path):
        return path
    try:
        whole = Path(os.path.expanduser(path)).absolute()
    except FileNotFoundError as error:
        raise ValueError(
            "is relative, and the current directory does not exist any more"
        ) from error
    parts = whole.parts[1:]  # The first one may be `//`, which TensorStore refuses.
    after = len(parts) - parts[::-1].index("..") if ".." in parts else 0
    return Path(os.path.realpath(Path("/", *parts[:after])), *parts[after:])


def run_root(path: RunPath) -> RunPath:
    """Returns the normal form of a run directory's path.

    Raises:
      ValueError: no checkpoint can be saved there, whatever the storage.
    """
    root = normalized(path)
    if is_remote(root):
        size = len(f"{root.bucket}/{root.key}".encode())
        if size > LONGEST_NAME:
            raise ValueError(
                f"bucket and folder have {size} bytes, at most {LONGEST_NAME} are possible: a "
                "folder of local files has this name"
            )
        return root
    wrong = next((part for part in root.parts[1:] if _NOT_FOR_ORBAX.search(part)), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} has one of * ? [ ] \\ or a control character: rename it")
    if not _is_text(root):
        raise ValueError(f"{str(root)!a} is not UTF-8 text: rename it")
    if root.parts[1:2] and root.parts[1] in _BUCKET_ROOTS:
        raise ValueError(f"Orbax takes /{root.parts[1]} for a bucket: choose another")
    if wrong := {f"{scheme}:" for scheme in _BUCKET_ROOTS} & set(root.parts):
        raise ValueError(f"Orbax takes the folder {wrong.pop()} for a bucket: rename it")
    return root


def _is_text(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def relative(path: RunPath, root: RunPath) -> str:
    """Returns the path of a file relative to a folder.

    >>> relative(parse_path("gs://bucket/run/log/1"), parse_path("gs://bucket/run"))
    'log/1'
    """
    if is_remote(path):
        assert is_remote(root), root
        assert path.bucket == root.bucket, (path, root)
        assert path.key.startswith(f"{root.key}/"), (path, root)
        return path.key.removeprefix(f"{root.key}/")
    return path.relative_to(str(root)).as_posix()


def require_inside(name: str) -> str:
    """Returns a name that a file gives, if joining it to a folder stays in the folder.

    >>> require_inside("state/d/1"), require_inside("00000008-0001")
    ('state/d/1', '00000008-0001')

    Raises:
      ValueError: it is absolute, goes up, or is no name of a file.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"the name {name!r:.60} is not one of a file below its folder")
    return name


def require_one_name(name: str) -> str:
    """Returns the name that a file gives, if it names a file in the folder itself.

    Raises:
      ValueError: as `require_inside`, or it is a path.
    """
    if "/" in require_inside(name):
        raise ValueError(f"{name!r:.60} is a path, expected a name")
    return name
