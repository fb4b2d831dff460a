"""Text data: lists the files of a corpus and tokenises them once, into a cached token folder.

The name of a cache entry is a hash of the listing (names, sizes, times); the fingerprint inside
depends on the contents only. An entry is built in a temporary folder and renamed, so that an entry
that exists is complete even if several processes build it or are killed. A damaged entry is renamed
too, so that the next attempt builds it again.

The byte tokenizer has one token per byte, and one more token that ends a document.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sysconfig
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

import numpy as np
import xxhash

from jaxres.clock import Clock, SystemClock
from jaxres.config.schema import TextSource
from jaxres.data.token_folder import (
    FORMAT_VERSION,
    CacheDamaged,
    TokenFolder,
    TokensDamaged,
    TokenWriter,
    file_id,
    open_tokens,
)
from jaxres.faults import ConfigError, RunError
from jaxres.storage.files import fault_of, sync_dir

STDLIB = "{stdlib}"
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders below {stdlib} that are not part of it, or that a running Python changes."""
LEFTOVER_SECONDS = 24 * 3600.0
CHUNK_BYTES = 4 * 2**20
REPORT_BYTES = 256 * 2**20
NUM_INSTALL_TRIES = 10


@dataclass(frozen=True)
class TextFile:
    """A file of the corpus in the listing; `name` is its path relative to the corpus."""

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int


def open_text(
    source: TextSource,
    *,
    cache_dir: Path,
    progress: Callable[[str], None],
    clock: Clock | None = None,
) -> TokenFolder:
    """Opens the source's token folder; builds it first if the cache has no valid one."""
    files = list_files(source)
    entry = cache_entry(files, cache_dir=cache_dir)
    corpora = entry.parent
    _remove_leftovers(corpora, clock or SystemClock())
    if entry.exists():
        try:
            return _as_cached(open_cached(entry), entry)
        except TokensDamaged as error:
            progress(f"The cached corpus is damaged and will be rebuilt: {error}")
    try:
        return _as_cached(_build(files, entry, progress), entry)
    except OSError as error:
        raise fault_of(error)(
            f"data.cache_dir: the tokenised corpus can't be written to {corpora}: {error}. "
            "Free space there, or set data.cache_dir to a folder that can be written."
        ) from error


def cache_entry(files: list[TextFile], *, cache_dir: Path) -> Path:
    """Returns the folder of the tokenised corpus, which may not exist yet."""
    return cache_dir.expanduser() / "corpora" / _cache_key(files)


def open_cached(entry: Path) -> TokenFolder:
    """Opens a cached corpus; raises TokensDamaged also if it has other properties than ours."""
    corpus = open_tokens(entry)
    if (corpus.meta.vocab_size, corpus.meta.tokenizer) != (VOCAB_SIZE, NAME):
        raise TokensDamaged(
            f"{entry / 'meta.json'}: vocab_size {corpus.meta.vocab_size} and tokenizer "
            f"{corpus.meta.tokenizer!r}; the tokenizer {NAME} has {VOCAB_SIZE}"
        )
    return corpus


def fingerprint_of(files: list[TextFile]) -> str:
    """Returns the fingerprint of the corpus that the files make now; reads all of them."""
    digest, offsets = xxhash.xxh3_128(), [0]
    for file in files:
        offsets.append(offsets[-1] + file.size_bytes + 1)
        for chunk in _read(file):
            digest.update(np.frombuffer(chunk, np.uint8).astype("<u2").data)
        digest.update(np.array([END_OF_DOCUMENT], "<u2").data)
    digest.update(np.array(offsets, "<i8").data)
    return digest.hexdigest()


def _as_cached(corpus: TokenFolder, entry: Path) -> TokenFolder:
    """Returns the open corpus, which moves its entry aside if one of its blocks is damaged."""
    opened = corpus.tokens_id

    def on_damage(error: TokensDamaged) -> CacheDamaged:
        with contextlib.suppress(FileNotFoundError):  # Another process may have moved it.
            if file_id(entry / "tokens.bin") == opened:
                move_aside(entry)
        return CacheDamaged(
            f"{error.what}. This cached corpus is moved aside; the next start builds it again "
            "from data.source.path. If this happens again, the disk or the memory is faulty."
        )

    return replace(corpus, on_damage=on_damage)


def list_files(source: TextSource) -> list[TextFile]:
    """Lists the corpus, ordered by a hash of the names so that its tail is representative."""
    root, patterns = _root_and_patterns(source)
    stdlib = _stdlib() if STDLIB in source.path else None
    files: dict[str, TextFile] = {}
    for path in _matches(root, patterns, skip=STDLIB_EXCLUDED if stdlib else frozenset()):
        if stdlib and _is_foreign(path, stdlib):
            continue
        name = path.relative_to(root).as_posix()
        if not any(fnmatchcase(name, pattern) for pattern in source.exclude):
            _list_file(files, name, path, skip_dangling=stdlib is not None)
    if any("**" in pattern for pattern in patterns) and not stdlib and patterns == source.include:
        _check_folders(root, source.exclude)
    if not files:
        raise ConfigError(
            f"data.source.path: {source.path} matches no file (looked below {root} for "
            f"{', '.join(patterns)}, without {', '.join(source.exclude) or 'exclusions'})"
        )
    if not any(file.size_bytes for file in files.values()):
        raise ConfigError(f"data.source.path: all files of {source.path} are empty")
    return sorted(files.values(), key=lambda file: (_name_hash(file.name), file.name))


def _root_and_patterns(source: TextSource) -> tuple[Path, tuple[str, ...]]:
    """Splits the path into an existing folder and the patterns to match below it."""
    path = Path(source.path.replace(STDLIB, str(_stdlib()))).expanduser()
    if path.is_dir():
        return path.resolve(), source.include
    if path.exists():
        return path.parent.resolve(), (_escape(path.name),)
    wild = [i for i, part in enumerate(path.parts) if set(part) & set("*?[")]
    if wild:
        root = Path(*path.parts[: wild[0]])
        if root.is_dir():
            return root.resolve(), (str(PurePath(*path.parts[wild[0] :])),)
    raise ConfigError(
        f"data.source.path: {source.path} does not exist ({path.absolute()}). If the data have "
        "moved, give the new path: a run resumes with it if the content is the same."
    )


def _escape(name: str) -> str:
    """Returns the pattern that matches only this name."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _matches(root: Path, patterns: tuple[str, ...], *, skip: frozenset[str]) -> Iterator[Path]:
    """Yields the matching files, without descending into the top folders named in `skip`.

    Those may be large, and a restart waits for the listing.
    """
    for pattern in patterns:
        try:
            if not (skip and pattern.startswith("**/")):
                yield from root.glob(pattern)
                continue
            yield from root.glob(pattern.removeprefix("**/"))
            for folder in root.iterdir():
                if folder.name not in skip and folder.is_dir() and not folder.is_symlink():
                    yield from folder.glob(pattern)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"data.source.include: {pattern!r} is not a valid pattern: {error}"
            ) from error
        except OSError as error:
            raise fault_of(error)(f"data.source.path: {root} can't be listed: {error}") from error


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


def _is_foreign(path: Path, stdlib: Path) -> bool:
    """Returns whether a file in the library's folder is not part of the library."""
    depth = len(stdlib.parts)
    is_below = path.parts[:depth] == stdlib.parts
    return is_below and not STDLIB_EXCLUDED.isdisjoint(path.parts[depth:])


def _list_file(files: dict[str, TextFile], name: str, path: Path, *, skip_dangling: bool) -> None:
    """Adds a regular file; ignores folders and devices; raises if the path can't be read."""
    try:
        if path.is_file():
            status = path.stat()
            files[name] = TextFile(name, path, status.st_size, status.st_mtime_ns)
            return
        dangling = path.is_symlink() and not path.exists()
    except OSError as error:
        raise _unreadable(path, error) from error
    if dangling and not skip_dangling:
        raise _unreadable(path, "it is a dangling link")


def _check_folders(root: Path, exclude: tuple[str, ...]) -> None:
    """Raises a RunError if a folder can't be listed, which pathlib's glob ignores."""

    def raise_unreadable(error: OSError) -> None:
        path = Path(error.filename)
        name = path.relative_to(root).as_posix()
        if not any(fnmatchcase(f"{name}/", pattern) for pattern in exclude):
            raise _unreadable(path, error)

    for _ in os.walk(root, onerror=raise_unreadable):
        pass


def _unreadable(path: Path, reason: OSError | str) -> RunError:
    kind = fault_of(reason) if isinstance(reason, OSError) else ConfigError
    return kind(
        f"data.source.path: {path} can't be read: {reason}. "
        "Fix it, or exclude it with data.source.exclude."
    )


def _name_hash(name: str) -> bytes:
    return hashlib.blake2b(os.fsencode(name), digest_size=16).digest()


def _cache_key(files: list[TextFile]) -> str:
    """Returns the name of the cache entry.

    It depends on the absolute paths: if all times are equal, as in container images, the listings
    of two corpora may otherwise be the same.
    """
    parts = [f"format {FORMAT_VERSION} tokenizer {NAME}".encode()]
    for file in sorted(files, key=lambda file: file.name):
        stamp = f"{file.size_bytes} {file.mtime_ns}".encode()
        parts += [os.fsencode(file.name), os.fsencode(file.path), stamp]
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def _build(files: list[TextFile], entry: Path, progress: Callable[[str], None]) -> TokenFolder:
    building = entry.parent / f".building-{entry.name}-{os.getpid()}-{uuid.uuid4().hex}"
    total_bytes = sum(file.size_bytes for file in files)
    progress(f"Tokenising {len(files):,} files, {total_bytes / 1e6:,.1f} MB, into {entry}")
    try:
        with TokenWriter(building, vocab_size=VOCAB_SIZE, tokenizer=NAME) as writer:
            _write_files(writer, files, total_bytes, progress)
        # Open before the rename: the memory maps stay valid even if the entry is removed later.
        corpus = open_tokens(building)
        _install(building, entry)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    progress(f"Tokenised {corpus.meta.num_tokens:,} tokens")
    return replace(corpus, folder=entry)


def _write_files(
    writer: TokenWriter,
    files: list[TextFile],
    total_bytes: int,
    progress: Callable[[str], None],
) -> None:
    num_bytes, next_report = 0, REPORT_BYTES
    for file in files:
        for chunk in _read(file):
            writer.write(np.frombuffer(chunk, np.uint8))
            num_bytes += len(chunk)
            if num_bytes >= next_report:
                progress(f"Tokenised {num_bytes / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB")
                next_report += REPORT_BYTES
        writer.write([END_OF_DOCUMENT])
        writer.end_document()


def _read(file: TextFile) -> Iterator[bytes]:
    """Yields the file in chunks; raises ConfigError if it differs from the listing."""
    try:
        with file.path.open("rb", buffering=0) as stream:
            num_bytes = 0
            # Limited by the listed size, so that a file that keeps growing ends too.
            while num_bytes <= file.size_bytes and (chunk := stream.read(CHUNK_BYTES)):
                num_bytes += len(chunk)
                yield chunk
            status = os.fstat(stream.fileno())
    except OSError as error:
        raise _unreadable(file.path, error) from error
    if (num_bytes, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise ConfigError(
            f"data.source.path: {file.path} changed while it was read. Start again when it no "
            "longer changes, or exclude it with data.source.exclude."
        )


def _install(building: Path, entry: Path) -> None:
    """Renames a complete folder to its entry, unless another process has created a valid one."""
    for _ in range(NUM_INSTALL_TRIES):
        try:
            building.rename(entry)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return sync_dir(entry.parent)
        try:
            open_cached(entry)
        except TokensDamaged:
            _remove(entry)
        else:
            return None
    raise ConfigError(f"data.cache_dir: other processes keep damaging {entry}; remove it")


def move_aside(entry: Path) -> None:
    """Renames a damaged entry; it is deleted after a day."""
    os.utime(entry)
    entry.rename(entry.parent / f".damaged-{entry.name}-{os.getpid()}-{uuid.uuid4().hex}")


def _remove(entry: Path) -> None:
    """Removes an entry in one step, so that no process sees a part of it."""
    removed = entry.parent / f".removed-{entry.name}-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        entry.rename(removed)
    except FileNotFoundError:
        return  # Another process removed it first.
    shutil.rmtree(removed, ignore_errors=True)


def _remove_leftovers(corpora: Path, clock: Clock) -> None:
    """Removes temporary folders of processes that were killed at least a day ago."""
    for pattern in (".building-*", ".removed-*", ".damaged-*"):
        for folder in corpora.glob(pattern):
            # A running process writes continuously, so its newest file is recent. The time of a
            # damaged folder is when it was moved aside.
            try:
                times = [path.stat().st_mtime for path in (folder, *folder.glob("*"))]
            except OSError:
                continue  # It was renamed or removed in the meantime.
            if clock.wall() - max(times) > LEFTOVER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
NAME = "bytes"


def encode(text: str) -> list[int]:
    """Returns the text's UTF-8 bytes, without an end of document, as a prompt needs.

    >>> encode("é!")
    [195, 169, 33]
    """
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    r"""Returns the text of tokens: a newline for the end of a document, \ufffd for invalid UTF-8.

    Tokens beyond the vocabulary, which an embedding's padding rows can produce, are \ufffd too.

    >>> decode([*encode("a"), END_OF_DOCUMENT, 255, 300])
    'a\n\ufffd\ufffd'
    """
    return b"".join(_byte(token) for token in tokens).decode(errors="replace")


def _byte(token: int) -> bytes:
    """Returns the byte of a token; for other tokens 0xff, which is never valid UTF-8."""
    if token == END_OF_DOCUMENT:
        return b"\n"
    return bytes([token]) if 0 <= token < END_OF_DOCUMENT else b"\xff"
