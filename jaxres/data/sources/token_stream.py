"""Tokenises the documents of files in order, in bounded memory, from any position on."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxres.config.schema.data import DocumentSource, TextSource
from jaxres.data.sources.documents import (
    TextPiece,
    TokenPiece,
    check_text_name,
    check_unchanged,
    read_pieces,
)
from jaxres.data.sources.folder_tree import unreadable
from jaxres.data.sources.source_files import SourceFile
from jaxres.data.tokens import dropped_text
from jaxres.data.tokens.text_cuts import ANYWHERE, Cuts
from jaxres.data.tokens.tokenizer import LibraryTokenizer, Tokenizer
from jaxres.faults import ConfigError
from jaxres.storage.files import LFS_POINTER, open_file, refuse_lfs_pointer

BATCH_CHARS = 2**22
BATCH_PIECES = 4096
NUM_NAMED = 10
NUM_AHEAD = 2
"""Batches that are tokenised while the next pieces are read."""

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Position:
    """The end of the pieces that are tokenised."""

    file: int = 0
    """Index of the file."""
    piece: int = 0
    """Number of its pieces that are tokenised."""
    num_empty: int = 0
    """Number of documents without text before, which are left out."""
    num_bad: int = 0
    """Number of bad records before, which are left out."""


@dataclass(frozen=True)
class TokenBlock:
    """Consecutive tokens of the corpus."""

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    """Indices, in ascending order, after whose token a document ends."""
    position: Position
    """Position after the block."""
    num_bytes: int
    """Bytes of the files that are read."""
    problems: tuple[str, ...] = ()
    """Why some documents are bad records; of the first NUM_NAMED of a source."""
    characters: frozenset[str] = frozenset()
    """Distinct characters of the text, if the tokenizer may drop some."""


@dataclass(frozen=True)
class _Batch:
    pieces: Sequence[TextPiece] | TokenPiece
    position: Position
    num_bytes: int
    problems: tuple[str, ...] = ()


def token_blocks(
    files: Sequence[SourceFile],
    source: DocumentSource,
    tokenizer: Tokenizer | None,
    *,
    start: Position | None = None,
    max_bad: int = 0,
) -> Iterator[TokenBlock]:
    """Yields the tokens of all documents from a position on.

    Args:
      files: the listing of the source.
      tokenizer: None: the files have token ids.
      start: position after a block of an earlier call; None: the first document.
      max_bad: most documents that are left out as bad records; one more raises ConfigError.
    """

    def encode(batch: _Batch) -> TokenBlock:
        characters = frozenset[str]()
        if isinstance(batch.pieces, TokenPiece):
            tokens, ends = batch.pieces.tokens, batch.pieces.ends
        else:
            assert tokenizer is not None
            tokens, ends = _encode(batch.pieces, tokenizer)
            if may_drop:
                texts = (piece.text for piece in batch.pieces)
                characters = characters.union(*(x for x in texts if isinstance(x, str)))
        rest = (batch.position, batch.num_bytes, batch.problems, characters)
        return TokenBlock(tokens, ends, *rest)

    may_drop = isinstance(tokenizer, LibraryTokenizer) and dropped_text.may_drop(tokenizer)
    cuts = ANYWHERE if tokenizer is None else tokenizer.cuts
    return _ahead(encode, _batches(files, source, start or Position(), cuts, max_bad))


def check_begin(files: Sequence[SourceFile], source: DocumentSource) -> None:
    """Reads the first document. Raises ConfigError if files are evidently of another kind."""
    with contextlib.closing(_pieces(files, source, Position(), ANYWHERE)) as pieces:
        next(pieces, None)


def _encode(
    pieces: Sequence[TextPiece], tokenizer: Tokenizer
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    parts, ends, count = [np.empty(0, np.uint32)], list[int](), 0
    end = np.array([tokenizer.end_of_document], np.uint32)
    later = [not piece.begins_document for piece in pieces]
    encoded = tokenizer.encode_all([piece.text for piece in pieces], later=later)
    for piece, tokens in zip(pieces, encoded, strict=True):
        parts.append(tokens)
        count += len(tokens)
        if piece.ends_document:
            parts.append(end)
            ends.append(count)
            count += 1
    return np.concatenate(parts), np.array(ends, np.int64)


def _ahead(function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Yields the results in order; a thread computes some of them ahead."""
    waiting: deque[Future[B]] = deque()
    with ThreadPoolExecutor(2, "jaxres-tokenise") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > NUM_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _batches(
    files: Sequence[SourceFile],
    source: DocumentSource,
    start: Position,
    cuts: Cuts,
    max_bad: int,
) -> Iterator[_Batch]:
    """Groups pieces; a batch ends where its size says, so that its position is well defined."""
    keeps_empty = isinstance(source, TextSource)
    pieces, num_chars, position, num_bytes = list[TextPiece](), 0, start, 0
    problems: tuple[str, ...] = ()
    for piece, index, count, num_bytes in _pieces(files, source, start, cuts):
        if isinstance(piece, TokenPiece):
            yield _Batch(piece, Position(index, count), num_bytes)
            continue
        is_bad = bool(piece.problem)
        is_empty = not keeps_empty and not piece.text and not is_bad
        num_empty, num_bad = position.num_empty + is_empty, position.num_bad + is_bad
        position = Position(index, count, num_empty, num_bad)
        if num_bad > max_bad and is_bad:
            raise _too_many(piece.problem, max_bad)
        if is_bad and num_bad <= NUM_NAMED:
            problems = (*problems, piece.problem)
        if is_empty or is_bad:
            continue
        pieces.append(piece)
        num_chars += len(piece.text)
        if num_chars >= BATCH_CHARS or len(pieces) >= BATCH_PIECES:
            yield _Batch(pieces, position, num_bytes, problems)
            pieces, num_chars, problems = [], 0, ()
    if pieces or position.num_empty or position.num_bad:
        yield _Batch(pieces, position, num_bytes, problems)


def _too_many(problem: str, max_bad: int) -> ConfigError:
    if not max_bad:
        return ConfigError(f"{problem} No bad record is left out: guards.bad_records=null.")
    return ConfigError(
        f"{problem} Before it {max_bad:,} documents are left out as bad records already "
        "(guards.bad_records.max)."
    )


def _refuse_pointer(file: SourceFile, raw: BinaryIO) -> None:
    """Raises ConfigError if a file is a pointer of Git LFS, which as text would be trained on."""
    try:
        refuse_lfs_pointer(raw.read(len(LFS_POINTER)), f"data.source.path: {file.path}")
    except ConfigError as error:
        raise ConfigError(f"{error} Or leave it out with data.source.exclude.") from error
    raw.seek(0)


def _pieces(
    files: Sequence[SourceFile], source: DocumentSource, start: Position, cuts: Cuts
) -> Generator[tuple[TextPiece | TokenPiece, int, int, int]]:
    """Yields each piece, its file's index, its number in the file from 1, and the bytes read."""
    for file in files:
        check_text_name(file, source)
    before = sum(file.size_bytes for file in files[: start.file])
    for index, file in enumerate(files[start.file :], start.file):
        skipped = start.piece if index == start.file else 0
        try:
            with open_file(file.path) as raw:
                _refuse_pointer(file, raw)
                pieces = islice(read_pieces(file, source, raw, cuts), skipped, None)
                for count, piece in enumerate(pieces, skipped + 1):
                    yield piece, index, count, before + min(raw.tell(), file.size_bytes)
                check_unchanged(file, raw)
        except OSError as error:
            raise unreadable(file.path, error) from error
        before += file.size_bytes
