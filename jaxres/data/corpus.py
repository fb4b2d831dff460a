"""The corpus: a source's documents, tokenised once into a cached token folder.

The name of a cache entry is a hash of the files' names and contents and of the tokenizer; the
fingerprint inside depends on the tokens only. An entry is built in a temporary folder, by one
process at a time, and renamed, so that an entry that exists is complete. A process that is killed
leaves its folder, and the next one continues there. A damaged entry is renamed too, so that the
next attempt builds it again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np
import xxhash

from jaxres.clock import Clock, SystemClock
from jaxres.config.schema.data import (
    DocumentSource,
    HuggingfaceSource,
    ImagesSource,
    NanogptSource,
    TextSource,
)
from jaxres.config.schema.data import Tokenizer as TokenizerSection
from jaxres.config.schema.training import BadRecordsSection
from jaxres.data.sources import content_key
from jaxres.data.sources.images import (
    CLASSES,
    IMAGES,
    numbered,
    parquet_classes,
    pillow,
    with_labels,
)
from jaxres.data.sources.lost_text import LostText
from jaxres.data.sources.saved_dataset import other_rows
from jaxres.data.sources.source_files import SourceFile, list_corpus
from jaxres.data.sources.token_stream import Position, check_begin, token_blocks
from jaxres.data.tokens.token_folder import (
    DTYPES,
    FORMAT_VERSION,
    CacheDamaged,
    Meta,
    TokenFolder,
    TokensDamaged,
    file_id,
    open_tokens,
    remove_at_once,
    token_type,
)
from jaxres.data.tokens.token_writer import PARTIAL_OFFSETS, TokenWriter, Written
from jaxres.data.tokens.tokenizer import LibraryTokenizer, Tokenizer, open_tokenizer
from jaxres.faults import ConfigError, RunError
from jaxres.storage.checksummed_json import canonical_json, decode_checksummed, encode_checksummed
from jaxres.storage.files import exists, fault_of, read, read_whole, sync_dir

LEFTOVER_SECONDS = 7 * 24 * 3600.0
"""Age at which the folder of a killed build, which another start could continue, is removed."""
ASIDE_SECONDS = 24 * 3600.0
"""Age at which a damaged entry that was moved aside is removed."""
SYNC_SECONDS = 20.0
REPORT_SECONDS = 10.0
LONG_BUILD_SECONDS = 600.0
WAIT_SECONDS = 0.2
NUM_INSTALL_TRIES = 10
JOURNAL = "build.json"
BAD_DOCUMENTS = "bad_documents.txt"
"""File of an entry with the number of documents that were left out; missing: none, or unknown."""
NOTES = "notes.txt"
"""File of an entry with what its build has told of the documents, a line each; missing: nothing."""
BAD_TOLD = "WARNING: bad records, which are left out: {:,}"
NUM_BYTES = 256
ROW_KEYS = ("size", "augment", "augment_seed")
"""Keys of a source of images that only say how rows are made from them."""
BAD_RECORDS = BadRecordsSection()
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Corpus:
    """The files to tokenise, and the place of the result."""

    source: DocumentSource
    files: list[SourceFile]
    tokenizer: Tokenizer | None
    """None: the files have token ids."""
    vocab_size: int
    entry: Path
    """Folder of the tokenised corpus, which may not exist yet."""
    content: str
    """Digest of the names and contents of the files."""
    kept_content: Path
    """File that keeps it for the next start."""
    classes: tuple[str, ...] = ()
    """Names of the classes of images, by label."""
    left_out: tuple[str, ...] = ()
    """Names of the files that no pattern of the source matches."""
    max_bad: int = BAD_RECORDS.max
    """Most documents that are left out as bad records; one more is an error."""
    warnings: tuple[str, ...] = ()
    """Warnings of a build about the listing."""
    named_by: str = "data.cache_dir"
    """Key or flag that names the place of `entry`, for messages."""

    @property
    def tokenizer_name(self) -> str:
        """The field `tokenizer` of meta.json."""
        if isinstance(self.source, ImagesSource):
            return IMAGES
        return "ids" if self.tokenizer is None else self.tokenizer.name

    @property
    def dtype(self) -> str:
        """Type of the tokens."""
        is_bytes = isinstance(self.source, ImagesSource)
        return "uint8" if is_bytes else token_type(self.vocab_size)


def describe_corpus(
    source: DocumentSource,
    tokenizer: TokenizerSection,
    *,
    cache_dir: Path,
    bad_records: BadRecordsSection | None = BAD_RECORDS,
    progress: Callable[[str], None] = lambda _: None,
) -> Corpus:
    """Lists the files of a source, and opens its tokenizer.

    All files are read if no start with the same listing has succeeded so far.
    """
    listing = list_corpus(source)
    files, classes, warnings = listing.files, (), listing.warnings
    if isinstance(source, NanogptSource):
        opened, vocab_size = None, source.vocab_size
    elif isinstance(source, ImagesSource):
        pillow("Image")
        files, classes = with_labels(files, source.classes, folders=listing.folders)
        warnings = [*warnings, *([] if source.classes else numbered(classes))]
        opened, vocab_size = None, NUM_BYTES
    else:
        opened = open_tokenizer(tokenizer)
        vocab_size = opened.vocab_size
    max_bad = 0 if bad_records is None else bad_records.max
    name = "ids" if opened is None else f"{opened.name}{opened.encoding}"
    name += "" if max_bad else " without bad records"
    cache_dir = cache_dir.expanduser()
    kept_content = content_key.place_of(files, cache_dir)
    content = content_key.kept(kept_content, files)
    if content is None:
        check_begin(files, source)
        content = content_key.digest(files, progress)
    entry = cache_dir / "corpora" / _cache_key(source, content, name)
    return Corpus(
        source,
        files,
        opened,
        vocab_size,
        entry,
        content,
        kept_content,
        classes=classes,
        left_out=tuple(listing.left_out),
        max_bad=max_bad,
        warnings=tuple(warnings),
    )


def _cache_key(source: DocumentSource, content: str, tokenizer: str) -> str:
    """Returns the name of the cache entry of files of a content."""
    parts = [f"format {FORMAT_VERSION} tokenizer {tokenizer}".encode(), content.encode()]
    if not isinstance(source, TextSource):
        omitted = {"path", "include", "exclude", *ROW_KEYS}
        parts.append(canonical_json(source.model_dump(mode="json", exclude=omitted)))
    elif source.encoding != "utf-8":
        parts.append(source.encoding.encode())
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def open_corpus(corpus: Corpus, *, progress: Callable[[str], None]) -> TokenFolder:
    """Opens the token folder of a corpus; builds it first if the cache has no valid one.

    Raises:
      ConfigError: a file can't be tokenised, or it changes meanwhile.
      StorageUnavailable: the disk is full.
    """
    for warning in corpus.warnings:  # Also of a cached one: files may be beside it since.
        progress(f"WARNING: {warning}")
    if corpus.left_out:
        progress(_describe_left_out(corpus))
    clock, corpora = SystemClock(), corpus.entry.parent
    _remove_leftovers(corpora, clock)
    with contextlib.suppress(OSError, RunError):  # Then the next start reads the files again.
        content_key.keep(corpus.kept_content, corpus.content)
    if exists(corpus.entry):
        try:
            return _as_cached(_open_entry(corpus, progress), corpus.entry)
        except TokensDamaged as error:
            progress(f"The cached corpus is damaged and will be rebuilt: {error}")
    try:
        return _as_cached(_build(corpus, progress, clock), corpus.entry)
    except OSError as error:
        raise fault_of(error)(
            f"{corpus.named_by}: the tokenised corpus can't be written to {corpora}: {error}. Free "
            f"space there, or give {corpus.named_by} another folder, that can be written."
        ) from error


def open_cached(corpus: Corpus, folder: Path | None = None) -> TokenFolder:
    """Opens a cached corpus; raises TokensDamaged also if it has other properties than ours."""
    folder = folder or corpus.entry
    opened = open_tokens(folder)
    expected = (corpus.vocab_size, corpus.tokenizer_name)
    if (opened.meta.vocab_size, opened.meta.tokenizer) != expected:
        raise TokensDamaged(
            f"{folder / 'meta.json'}: vocab_size {opened.meta.vocab_size} and tokenizer "
            f"{opened.meta.tokenizer!r}; the tokenizer {expected[1]} has {expected[0]}"
        )
    return opened


def describe(meta: Meta) -> str:
    """Returns a token folder's size as text: its tokens and documents, or images."""
    if meta.tokenizer == IMAGES:
        return f"{meta.num_documents:,} images, {meta.num_tokens / 1e6:,.1f} MB"
    return f"{meta.num_tokens:,} tokens, {meta.num_documents:,} documents"


def fingerprint_of(corpus: Corpus) -> str:
    """Returns the fingerprint of the corpus that the files make now; tokenises all of them."""
    dtype = DTYPES[corpus.dtype]
    digest, offsets, num_tokens = xxhash.xxh3_128(), [np.zeros(1, "<i8")], 0
    for block in token_blocks(
        corpus.files, corpus.source, corpus.tokenizer, max_bad=corpus.max_bad
    ):
        digest.update(block.tokens.astype(dtype).data)
        offsets.append((block.ends + num_tokens + 1).astype("<i8"))
        num_tokens += len(block.tokens)
    digest.update(np.concatenate(offsets).data)
    return digest.hexdigest()


def _as_cached(opened: TokenFolder, entry: Path) -> TokenFolder:
    """Returns the open corpus, which moves its entry aside if one of its blocks is damaged."""
    tokens_id = opened.tokens_id

    def on_damage(error: TokensDamaged) -> CacheDamaged:
        with contextlib.suppress(FileNotFoundError):  # Another process may have moved it.
            if file_id(entry / "tokens.bin") == tokens_id:
                move_aside(entry)
        return CacheDamaged(
            f"{error.what}. This cached corpus is moved aside; the next start builds it again "
            "from data.source.path. If this happens again, the disk or the memory is faulty."
        )

    return replace(opened, on_damage=on_damage)


def _build(corpus: Corpus, progress: Callable[[str], None], clock: Clock) -> TokenFolder:
    """Builds the entry, unless another process does so first."""
    entry = corpus.entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    building, lock = _lock(entry, progress, clock)
    try:
        with contextlib.suppress(TokensDamaged):
            if exists(entry):
                return _open_entry(corpus, progress)
        try:
            _tokenise(corpus, building, progress, clock)
            content_key.check_unchanged(corpus.files, corpus.content)
            # Open before the rename: the memory maps stay valid even if the entry is removed later.
            opened = open_cached(corpus, building)
        except Exception as error:
            if isinstance(error, ConfigError) or not (building / JOURNAL).exists():
                shutil.rmtree(building, ignore_errors=True)  # Nothing could continue this build.
            raise
        _install(building, corpus)
    finally:
        with contextlib.suppress(OSError):
            building.rmdir()  # Only if it is empty.
        os.close(lock)
    progress(describe(opened.meta))
    return replace(opened, folder=entry)


def _describe_left_out(corpus: Corpus) -> str:
    """Describes the files that the patterns leave out: their number, the most frequent endings."""
    endings = Counter(PurePath(name).suffix or "no ending" for name in corpus.left_out)
    named = ", ".join(f"{count:,} with {ending}" for ending, count in endings.most_common(5))
    return (
        f"Left out: {len(corpus.left_out):,} files that no pattern of data.source.include matches "
        f"({named}), such as {corpus.left_out[0]}"
    )


def _lock(entry: Path, progress: Callable[[str], None], clock: Clock) -> tuple[Path, int]:
    """Waits until no other process builds this entry.

    Returns the folder in which to build it, and its descriptor, which holds the lock. On file
    systems without locks each process has its own folder.
    """
    building = entry.parent / f".building-{entry.name}"
    reported = clock.monotonic() - REPORT_SECONDS
    while True:
        building.mkdir(exist_ok=True)
        lock = os.open(building, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):  # Its owner has renamed or removed it.
                if file_id(building) == (os.fstat(lock).st_dev, os.fstat(lock).st_ino):
                    return building, lock
        except OSError as error:
            if error.errno in NO_LOCKS:
                private = building.with_name(f"{building.name}-{os.getpid()}-{uuid.uuid4().hex}")
                private.mkdir()
                return private, lock
            if not isinstance(error, BlockingIOError):
                os.close(lock)
                raise
        os.close(lock)
        if clock.monotonic() - reported >= REPORT_SECONDS:
            reported = clock.monotonic()
            progress(f"Another process tokenises this corpus into {entry}; waiting for it")
        clock.sleep(WAIT_SECONDS)


def _tokenise(
    corpus: Corpus, building: Path, progress: Callable[[str], None], clock: Clock
) -> None:
    """Writes the whole corpus to a folder; continues the partial folder of a killed process."""
    with contextlib.suppress(TokensDamaged):
        open_cached(corpus, building)
        return _remove_progress(building)
    if isinstance(corpus.tokenizer, LibraryTokenizer):
        corpus.tokenizer.require_unambiguous()
    notes = list[str]()
    if isinstance(corpus.source, ImagesSource) and not corpus.classes:
        names, notes = parquet_classes(corpus.files, corpus.source.label_column)
        corpus = replace(corpus, classes=names)
    total_bytes = sum(file.size_bytes for file in corpus.files)
    verb = "Copying" if isinstance(corpus.source, ImagesSource) else "Tokenising"
    progress(
        f"{verb} {len(corpus.files):,} files, {total_bytes / 1e6:,.1f} MB, into {corpus.entry}"
    )
    writer, at, lost = _open_writer(corpus, building, progress)
    report, synced, bad = _Report(total_bytes, progress, clock), clock.monotonic(), ""
    with writer:
        blocks = token_blocks(
            corpus.files, corpus.source, corpus.tokenizer, start=at, max_bad=corpus.max_bad
        )
        for block in blocks:
            writer.write_documents(block.tokens, block.ends)
            lost.count(block)
            at = block.position
            for bad in block.problems:
                progress(f"BAD RECORD: {bad} It is left out")
            report.at(block.num_bytes)
            if clock.monotonic() - synced >= SYNC_SECONDS:
                _write_journal(building, block.position, writer.sync(), lost)
                synced = clock.monotonic()
        if not writer.num_documents:
            what = "every document is empty" + (f" or a bad record: {bad}" if bad else "")
            raise ConfigError(f"data.source.path: {corpus.source.path}: {what}")
        notes += [*_notes(corpus.source, writer.num_documents, at), *lost.lines()]
        _write_files(corpus, building, num_bad=at.num_bad, notes=notes)
    if at.num_bad:
        progress(BAD_TOLD.format(at.num_bad))
    for line in notes:
        progress(line)
    return _remove_progress(building)


def _notes(source: DocumentSource, num_documents: int, at: Position) -> Iterator[str]:
    """Yields how many documents have no text, and whether a saved data set records others."""
    if at.num_empty:
        yield f"Documents without text, which are left out: {at.num_empty:,}"
    if isinstance(source, HuggingfaceSource):
        num_rows = num_documents + at.num_empty + at.num_bad
        if (other := other_rows(Path(source.path).expanduser(), num_rows)) is not None:
            yield other


def _remove_progress(building: Path) -> None:
    """Removes the files that only an incomplete folder needs."""
    for name in (JOURNAL, f"{JOURNAL}.new", PARTIAL_OFFSETS):
        (building / name).unlink(missing_ok=True)


def _open_writer(
    corpus: Corpus, building: Path, progress: Callable[[str], None]
) -> tuple[TokenWriter, Position, LostText]:
    """Returns a writer, the position in the files at which it continues, and what is lost."""
    new = {
        "vocab_size": corpus.vocab_size,
        "tokenizer": corpus.tokenizer_name,
        "dtype": corpus.dtype,
    }
    try:
        fields = decode_checksummed(read_whole(building / JOURNAL), number=FORMAT_VERSION)
        at, written = Position(**fields["position"]), Written(**fields["written"])
        lost = LostText.of(corpus.tokenizer, fields.get("lost", {}))
        writer = TokenWriter(building, **new, resume=written)
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        progress(f"What an interrupted start has tokenised can't be used: {error!r}")
    else:
        progress(f"Continues after the {written.num_tokens:,} tokens of an interrupted start")
        return writer, at, lost
    for path in building.iterdir():
        path.unlink()
    return TokenWriter(building, **new), Position(), LostText.of(corpus.tokenizer, {})


def _write_journal(building: Path, position: Position, written: Written, lost: LostText) -> None:
    new = building / f"{JOURNAL}.new"
    fields = {"format": FORMAT_VERSION, "position": vars(position), "written": vars(written)}
    fields["lost"] = lost.fields()
    with new.open("wb") as file:
        file.write(encode_checksummed(fields))
        file.flush()
        os.fsync(file.fileno())
    new.replace(building / JOURNAL)
    sync_dir(building)


def _open_entry(corpus: Corpus, progress: Callable[[str], None]) -> TokenFolder:
    """Opens the entry of a cached corpus, and tells what its build has told of its documents.

    Raises:
      ConfigError: they are more than the config allows.
      TokensDamaged: the entry is damaged.
    """
    opened, path = open_cached(corpus), corpus.entry / BAD_DOCUMENTS
    text = (read(path) or b"0").decode(errors="replace").strip()
    if not (text.isascii() and text.isdecimal()):
        raise TokensDamaged(f"{path}: is no number")
    num_bad = int(text)
    if num_bad > corpus.max_bad:
        raise ConfigError(
            f"{corpus.source.path}: {num_bad:,} documents are left out of it as bad records, and "
            f"guards.bad_records.max={corpus.max_bad}. Correct or remove them, or raise it."
        )
    if num_bad:
        progress(BAD_TOLD.format(num_bad))
    for line in (read(corpus.entry / NOTES) or b"").decode(errors="replace").splitlines():
        progress(line)
    return opened


def _write_files(corpus: Corpus, folder: Path, *, num_bad: int, notes: Sequence[str]) -> None:
    """Writes the files of the tokenizer or the names of the classes, and what each start tells."""
    written = {} if corpus.tokenizer is None else dict(corpus.tokenizer.files)
    if corpus.classes:
        written[CLASSES] = canonical_json(list(corpus.classes))
    if num_bad:
        written[BAD_DOCUMENTS] = f"{num_bad}\n".encode()
    if notes:
        written[NOTES] = "".join(f"{line}\n" for line in notes).encode()
    for name, data in written.items():
        with (folder / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


class _Report:
    """Reports how far a build is, and how long it will take."""

    def __init__(self, total_bytes: int, progress: Callable[[str], None], clock: Clock) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._clock = clock
        self._begin = self._last = clock.monotonic()
        self._first_bytes: int | None = None
        self._is_hinted = False

    def at(self, num_bytes: int) -> None:
        """Reports at most every few seconds; `num_bytes` of the files are tokenised."""
        now = self._clock.monotonic()
        if self._first_bytes is None:
            self._first_bytes, self._begin = num_bytes, now
        if now - self._last < REPORT_SECONDS:
            return
        self._last = now
        rate = (num_bytes - self._first_bytes) / max(now - self._begin, 1e-9)
        left = (self._total_bytes - num_bytes) / rate if rate else 0.0
        self._progress(
            f"Read {num_bytes / 1e6:,.0f} of {self._total_bytes / 1e6:,.0f} MB, "
            f"about {left / 60:.0f} minutes left"
        )
        if left > LONG_BUILD_SECONDS and not self._is_hinted:
            self._is_hinted = True
            self._progress(
                "To do this once, on a machine without GPUs: jaxres data build CONFIG.yaml --out "
                "FOLDER, which prints how to train on that folder"
            )


def _install(building: Path, corpus: Corpus) -> None:
    """Renames a complete folder to its entry, unless another process has created a valid one."""
    entry = corpus.entry
    for _ in range(NUM_INSTALL_TRIES):
        try:
            building.rename(entry)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return sync_dir(entry.parent)
        try:
            open_cached(corpus)
        except TokensDamaged:
            remove_at_once(entry)
        else:
            shutil.rmtree(building, ignore_errors=True)
            return None
    raise ConfigError(f"data.cache_dir: other processes keep damaging {entry}; remove it")


def move_aside(entry: Path) -> None:
    """Renames a damaged entry; it is deleted after a day."""
    os.utime(entry)
    entry.rename(entry.parent / f".damaged-{entry.name}-{os.getpid()}-{uuid.uuid4().hex}")


def _remove_leftovers(corpora: Path, clock: Clock) -> None:
    """Removes temporary folders that no process has written for long."""
    limits = {".building-*": LEFTOVER_SECONDS}
    limits |= {".removed-*": ASIDE_SECONDS, ".damaged-*": ASIDE_SECONDS}
    for pattern, seconds in limits.items():
        for folder in corpora.glob(pattern):
            # A running process writes continuously, so its newest file is recent. The time of a
            # damaged folder is when it was moved aside.
            try:
                times = [path.stat().st_mtime for path in (folder, *folder.glob("*"))]
            except OSError:
                continue  # It was renamed or removed in the meantime.
            if clock.wall() - max(times) > seconds:
                shutil.rmtree(folder, ignore_errors=True)
