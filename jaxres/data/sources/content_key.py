"""Digest of the content of a corpus' files, which names its tokens in the cache.

So tokens of another content are never taken for the files' tokens, even if size and time are
equal, and files that were copied again, or moved, find their tokens again. To read all files at
each start would take too long: the digest is kept under a hash of the listing, with the times at
which the inodes changed (ctime), which no program can set.

A file with a byte order mark has another digest than earlier versions gave it, because they read
the mark as text.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from jaxres.data.sources.folder_tree import unreadable
from jaxres.data.sources.source_files import SourceFile
from jaxres.faults import ConfigError
from jaxres.storage.checksummed_json import decode_checksummed, encode_checksummed
from jaxres.storage.files import open_file, read_whole, replace

FORMAT = 1
CHUNK_BYTES = 4 * 2**20
REPORT_BYTES = 16 * 2**30
THREADS = 4
MARK = codecs.BOM_UTF8


def place_of(files: Sequence[SourceFile], cache_dir: Path) -> Path:
    """Returns the file in which the digest of a listing is kept."""
    parts = list[bytes]()
    for file in sorted(files, key=lambda file: file.name):
        stamp = f"{file.size_bytes} {file.mtime_ns} {file.ctime_ns}".encode()
        parts += [os.fsencode(file.name), os.fsencode(file.path), stamp]
    name = hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
    return cache_dir / "listings" / name


def kept(place: Path, files: Sequence[SourceFile]) -> str | None:
    """Returns a digest that is kept; None: there is none that can be used.

    Without the field `marks` it is an earlier version's, for which a byte order mark was text.
    """
    try:
        fields = decode_checksummed(read_whole(place), number=FORMAT)
        if fields.get("marks") or not _have_marks(files):
            return str(fields["content"])
    except (OSError, ValueError, KeyError):
        pass
    return None


def keep(place: Path, content: str) -> None:
    """Keeps a digest. Raises OSError, and the errors of storage."""
    data = encode_checksummed({"format": FORMAT, "content": content, "marks": True})
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists() or read_whole(place) != data:
        replace(place, data)


def digest(files: Sequence[SourceFile], progress: Callable[[str], None]) -> str:
    """Returns the digest of the names and contents of files; reads all of them.

    Raises:
      ConfigError, StorageRefused, StorageUnavailable: a file can't be read.
    """
    total = hashlib.blake2b(digest_size=16)
    whole = sum(file.size_bytes for file in files)
    num_bytes, reported = 0, 0
    for file, content in _each(sorted(files, key=lambda file: file.name)):
        total.update(os.fsencode(file.name) + b"\0" + content)
        num_bytes += file.size_bytes
        if num_bytes - reported >= REPORT_BYTES:
            reported = num_bytes
            progress(
                f"Read {num_bytes / 1e9:,.0f} of {whole / 1e9:,.0f} GB of the files, whose digest "
                "names their tokens in the cache"
            )
    return total.hexdigest()


def check_unchanged(files: Sequence[SourceFile], content: str) -> None:
    """Raises ConfigError if files have another content than when they were listed.

    Only if a time has changed are they read: a new link or mode changes it too.
    """
    try:
        changed = [file for file in files if os.stat(file.path).st_ctime_ns != file.ctime_ns]
    except OSError as error:
        raise unreadable(Path(error.filename), error) from error
    if changed and digest(files, lambda _: None) != content:
        raise ConfigError(
            f"data.source.path: files changed while they were read, such as {changed[0].path}. "
            "Start again when they no longer change, or exclude them with data.source.exclude."
        )


def _each(files: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, bytes]]:
    with ThreadPoolExecutor(THREADS, "jaxres-digest") as pool:
        try:
            yield from zip(files, pool.map(_file_digest, files), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _file_digest(file: SourceFile) -> bytes:
    found, left = xxhash.xxh3_128(), file.size_bytes + 1  # So that a file that grows ends.
    mark = b""
    try:
        with open_file(file.path) as raw:
            while left > 0 and (chunk := raw.read(min(CHUNK_BYTES, left))):
                mark = MARK if raw.tell() == len(chunk) and chunk.startswith(MARK) else mark
                found.update(chunk)
                left -= len(chunk)
    except OSError as error:
        raise unreadable(file.path, error) from error
    return found.digest() + mark


def _have_marks(files: Sequence[SourceFile]) -> bool:
    """Returns whether a file begins with a byte order mark."""

    def has_mark(file: SourceFile) -> bool:
        with open_file(file.path) as raw:
            return raw.read(len(MARK)) == MARK

    with ThreadPoolExecutor(THREADS, "jaxres-digest") as pool:
        return any(pool.map(has_mark, files))
