"""Where something is: a local path, or a name in a bucket (`gs://bucket/folder/name`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SCHEME = "gs://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_UNFIT = re.compile(r"[\x00-\x1f\x7f#?*\[\]]")
"""Signs that Google advises against in names."""


@dataclass(frozen=True, order=True)
class BucketPath:
    """A name in a bucket. It takes a path's words, but nothing that would reach out to storage."""

    bucket: str
    key: str
    """Without slashes at its ends; empty: the bucket itself."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> BucketPath:
        return BucketPath(self.bucket, f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        """The folder that it is in."""
        return BucketPath(self.bucket, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> BucketPath:
        """Returns the same place with another last part."""
        return self.parent / name

    def absolute(self) -> BucketPath:
        """Returns itself: there is no other way to write it."""
        return self


Place = Path | BucketPath


def place(text: str) -> Place:
    """Returns the place that a word names; raises ValueError if it is none.

    >>> place("gs://bucket/runs/a/"), place("runs/a")
    (BucketPath(bucket='bucket', key='runs/a'), PosixPath('runs/a'))
    """
    if not text.startswith(SCHEME):
        return Path(text)
    bucket, _, key = text.removeprefix(SCHEME).partition("/")
    key = key.rstrip("/")
    parts = key.split("/")
    if not _BUCKET.fullmatch(bucket) or {"", ".", ".."} & set(parts) or _UNFIT.search(key):
        raise ValueError("must be gs://BUCKET/FOLDER, without empty parts and without *?[]#")
    return BucketPath(bucket, key)


def relative(path: Place, root: Place) -> str:
    """Returns the path below a folder.

    >>> relative(place("gs://bucket/run/log/1"), place("gs://bucket/run"))
    'log/1'
    """
    if isinstance(path, BucketPath) and isinstance(root, BucketPath):
        assert path.bucket == root.bucket, (path, root)
        assert path.key.startswith(f"{root.key}/"), (path, root)
        return path.key.removeprefix(f"{root.key}/")
    assert isinstance(path, Path), path
    assert isinstance(root, Path), root
    return path.relative_to(root).as_posix()
