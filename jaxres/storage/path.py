"""The path of a file: a local path, or a name in a bucket (`gs://bucket/folder/name`)."""

from __future__ import annotations

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


def parse_path(text: str) -> RunPath:
    """Returns the path of a text; raises ValueError if it is invalid.

    >>> parse_path("gs://bucket/runs/a/"), parse_path("runs/a")
    (GcsPath(bucket='bucket', key='runs/a'), PosixPath('runs/a'))
    """
    if not text.startswith(SCHEME):
        return Path(text)
    bucket, _, key = text.removeprefix(SCHEME).partition("/")
    key = key.rstrip("/")
    parts = key.split("/")
    if not _BUCKET.fullmatch(bucket) or {"", ".", ".."} & set(parts) or _FORBIDDEN.search(key):
        raise ValueError("must be gs://BUCKET/FOLDER, without empty parts and without *?[]#")
    return GcsPath(bucket, key)


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
