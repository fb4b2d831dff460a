"""Token folders (tokens.bin, offsets.npy, digests.npy, meta.json); rows as windows over them.

docs/data.md describes the format. Dims: B rows of a call, T = seq_len, W = T + 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxres.data.batching import Arrays, BadRecord, check_ids
from jaxres.data.tokens.read_ahead import ReadAhead
from jaxres.data.tokens.token_arrays import token_arrays
from jaxres.data.tokens.token_digests import CheckedBlocks, num_blocks
from jaxres.data.tokens.token_width import IdPattern
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, RunError
from jaxres.storage.checksummed_json import digest_of
from jaxres.storage.files import LFS_POINTER, fault_of, open_file, read_whole, refuse_lfs_pointer
from jaxres.storage.path import RunPath

FORMAT_VERSION = 1
FILES = ("meta.json", "tokens.bin", "offsets.npy", "digests.npy")
DTYPES = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
MAX_VOCAB_SIZE = 2**31 - 1
NUM_OFFSETS_CHECKED = 1024
NUM_IDS_CHECKED = 2**20
NUM_LAST_CHECKED = 4096
"""First and last ids of a folder without digests that are checked at the opening."""
OFFSET_BYTES = 8

OFFSETS_READ_BYTES = 16 * 2**20
"""Largest size of the offsets whose blocks are all checked when the folder is opened."""
CHECKSUM = "checksum"
"""Field of meta.json: xxh3-128 of the canonical JSON of all others; absent if written by hand."""


class TokensDamaged(ConfigError):
    """The files of a token folder are inconsistent, or differ from their digests."""

    def __init__(self, what: str, remedy: str = "") -> None:
        """Args: the error and its place; the remedy, which a cached folder replaces."""
        super().__init__(f"{what}. {remedy}" if remedy else what)
        self.what = what


class CacheDamaged(RunError):
    """A cached copy of the data was damaged and is removed; the next attempt makes it again."""

    exit_code = ExitCode.STORAGE


@dataclass(frozen=True)
class Meta:
    """The contents of meta.json."""

    format: int
    dtype: str
    vocab_size: int
    num_tokens: int
    num_documents: int
    tokenizer: str
    fingerprint: str
    """xxh3-128 of the bytes of all tokens, followed by the bytes of all offsets."""
    block_bytes: int | None = None
    """Size of the blocks of digests.npy; None: there are no digests."""


class Items(Protocol):
    """The items of a file: a memory map, or `RemoteItems`."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of an item."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        ...

    def __len__(self) -> int:
        """Number of items."""
        ...

    def __getitem__(self, key: Any, /) -> Any:
        """Returns an item, a slice, or the items at an array of indices."""
        ...

    def searchsorted(self, values: Any, /, side: Any) -> Any:
        """Returns the number of the ascending items <= each value, with side="right"."""
        ...


class Blocks(Protocol):
    """The blocks of a file's items: `CheckedBlocks`, or `RemoteItems`."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        ...

    def first_damaged(self, starts_B: NDArray[np.int64], stops_B: NDArray[np.int64]) -> int | None:
        """Checks the blocks of some ranges of items; returns the first damaged one."""
        ...

    def describe(self, block: int, path: Path) -> str:
        """Returns the error message about a damaged block."""
        ...


@dataclass(frozen=True)
class TokenFolder:
    """An open token folder; its arrays are memory maps, or are read from a bucket."""

    folder: Path
    meta: Meta
    tokens: Items
    offsets: Items
    token_blocks: Blocks | None = None
    """None: the folder has no digests."""
    offset_blocks: Blocks | None = None
    tokens_id: tuple[int, int] = (0, 0)
    """Device and inode of the open tokens.bin."""
    on_damage: Callable[[TokensDamaged], RunError] = field(default=lambda error: error)
    """Called when a block is damaged; returns the error to raise."""
    without_row: Mapping[int, str] = field(default_factory=dict)
    """The last of the ids, for which the model's embedding has no row -> their tokens."""
    source: RunPath | None = None
    """The folder in a bucket whose objects are read where they are; `folder` has its small ones."""

    @cached_property
    def _ahead(self) -> ReadAhead | None:
        return ReadAhead(self.tokens) if isinstance(self.tokens, np.ndarray) else None

    def path(self, name: str) -> RunPath:
        """Returns the path of a file, for messages."""
        return (self.source or self.folder) / name

    @property
    def num_ids(self) -> int:
        """Number of the ids that a row may have."""
        return min([self.meta.vocab_size, *self.without_row])

    def unusable_id(self, row: int, index: int, token: int) -> ConfigError:
        """Returns the error for a token of a row that is not below `num_ids`.

        A BadRecord, unless the tokenizer has the token and only the model has no row for it.
        """
        where = f"{self.path('tokens.bin')}: row {row}, token {index} of the file is {token}"
        if token in self.without_row:
            return ConfigError(
                f"{where} ({self.without_row[token]!r}), and the model's embedding has "
                f"{self.num_ids} rows (model.vocab_size). Take that token out of the data (with "
                "data.tokenizer.special_tokens=text its spelling becomes letters), or train a "
                "model that has a row for it."
            )
        return BadRecord(
            f"{where}, but vocab_size is {self.meta.vocab_size}. Rewrite the folder, or fix "
            "vocab_size in meta.json."
        )

    def check_tokens(self, starts_B: NDArray[np.int64], stops_B: NDArray[np.int64]) -> None:
        """Raises if a block of some ranges of tokens differs from its digest.

        Also requests the ranges from the disk, all at once.
        """
        if self._ahead is not None:
            size = self.tokens.dtype.itemsize
            spans = zip((starts_B * size).tolist(), (stops_B * size).tolist(), strict=True)
            self._ahead.request(spans)
        self._check(self.token_blocks, "tokens.bin", starts_B, stops_B)

    def check_offsets(self, starts_B: NDArray[np.int64], stops_B: NDArray[np.int64]) -> None:
        """Raises if a block of some ranges of offsets differs from its digest.

        A binary search ends between two offsets that it has read. If both are checked, damaged ones
        elsewhere have not changed its result.
        """
        self._check(self.offset_blocks, "offsets.npy", starts_B, stops_B)

    def _check(
        self,
        blocks: Blocks | None,
        name: str,
        starts_B: NDArray[np.int64],
        stops_B: NDArray[np.int64],
    ) -> None:
        wrong = None if blocks is None else blocks.first_damaged(starts_B, stops_B)
        if blocks is None or wrong is None:
            return
        raise self.on_damage(
            TokensDamaged(
                blocks.describe(wrong, self.folder / name),
                "Restore the folder from a copy, or write it again. `jaxres data verify "
                "CONFIG.yaml` lists every damaged block.",
            )
        )


def token_type(vocab_size: int) -> str:
    """Returns the type of the tokens of a folder; only tokens that are bytes of files are uint8."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def file_id(path: Path) -> tuple[int, int]:
    """Returns the device and inode of a file: another file at the same path has other ones."""
    status = path.stat()
    return status.st_dev, status.st_ino


def open_tokens(folder: Path) -> TokenFolder:
    """Opens a token folder in a time that does not depend on its size.

    Raises TokensDamaged if the sizes disagree, ConfigError if a file is a pointer of Git LFS, or
    has ids of another type; other values are checked when their row is read.
    """
    try:
        for name in FILES:
            with contextlib.suppress(FileNotFoundError), open_file(folder / name) as file:
                refuse_lfs_pointer(file.read(len(LFS_POINTER)), folder / name)
        meta = read_meta(folder)
        dtype = DTYPES[meta.dtype]
        size_bytes = (folder / "tokens.bin").stat().st_size
        tokens_id = file_id(folder / "tokens.bin")
        check_size(size_bytes, meta, folder / "tokens.bin")
        tokens = np.memmap(folder / "tokens.bin", dtype, mode="r").view(np.ndarray)
        offsets = open_offsets(folder / "offsets.npy", meta)
        blocks = _open_blocks(folder / "digests.npy", meta, tokens, offsets)
        if meta.block_bytes is None:
            _refuse_other_type(tokens[:NUM_IDS_CHECKED], folder / "tokens.bin")
            _refuse_unfilled(tokens[-NUM_LAST_CHECKED:], folder / "tokens.bin")
    except FileNotFoundError as error:
        raise TokensDamaged(
            f"{error.filename} does not exist. A token folder has tokens.bin, offsets.npy and "
            "meta.json (docs/data.md)."
        ) from error
    except OSError as error:
        raise fault_of(error)(f"the token folder {folder} can't be read: {error}") from error
    corpus = TokenFolder(folder, meta, tokens, offsets, *blocks, tokens_id=tokens_id)
    last = len(offsets) - 1
    if offsets.nbytes <= OFFSETS_READ_BYTES:
        corpus.check_offsets(np.array([0]), np.array([last + 1]))
    else:
        corpus.check_offsets(np.array([0, last]), np.array([1, last + 1]))
    return corpus


def _refuse_other_type(tokens: NDArray[Any], path: Path) -> None:
    """Raises ConfigError for ids that another tool has written in another width or byte order."""
    pattern = IdPattern()
    pattern.add(tokens)
    problem = None if tokens.dtype == DTYPES["uint8"] else pattern.problem()
    if problem is not None:
        raise ConfigError(
            f"{path}: read as {tokens.dtype.name}, little-endian, {problem}. Set `dtype` in "
            "meta.json to its writer's type, or write the file again as uint16 or uint32, "
            "little-endian."
        )


def _refuse_unfilled(tokens: NDArray[Any], path: Path) -> None:
    """Raises ConfigError for ids that end with zeros, as those of a writer that was killed."""
    pattern = IdPattern()
    pattern.add(tokens)
    if tokens.dtype != DTYPES["uint8"] and (zeros := pattern.zeros_at_end()):
        raise ConfigError(
            f"{path}: its last {zeros:,} ids or more are 0, as those of a file whose writer was "
            "killed. Write it again, or leave them out, in offsets.npy and meta.json too."
        )


def read_meta(folder: Path) -> Meta:
    """Returns the contents of meta.json; raises TokensDamaged if a field is wrong."""
    path = folder / "meta.json"
    try:
        fields = json.loads(read_whole(path))
    except ValueError as error:
        raise TokensDamaged(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TokensDamaged(f"{path} is not a JSON object")
    for name, kind in Meta.__annotations__.items():
        found = type(fields.get(name)).__name__.replace("NoneType", "None")
        if found not in kind.split(" | "):
            raise TokensDamaged(
                f"{path}: {name} is {fields.get(name)!r}; it must be of type {kind}"
            )
    meta = Meta(**{name: fields[name] for name in Meta.__annotations__ if name in fields})
    if meta.format != FORMAT_VERSION:
        raise TokensDamaged(f"{path}: format {meta.format}; this version reads {FORMAT_VERSION}")
    if meta.dtype not in DTYPES:
        raise TokensDamaged(f"{path}: dtype {meta.dtype!r}; it must be one of {', '.join(DTYPES)}")
    if not meta.fingerprint.strip():
        raise TokensDamaged(
            f"{path}: fingerprint is empty, and a run knows its data by it. Write a text that no "
            "other content has, such as a digest of tokens.bin and offsets.npy"
        )
    if not 1 <= meta.vocab_size <= MAX_VOCAB_SIZE:
        raise TokensDamaged(f"{path}: vocab_size {meta.vocab_size} is not in 1..{MAX_VOCAB_SIZE}")
    if meta.num_tokens < 1 or meta.num_documents < 1:
        raise TokensDamaged(f"{path}: no tokens or no documents")
    if meta.block_bytes is not None and meta.block_bytes < 1:
        raise TokensDamaged(f"{path}: block_bytes {meta.block_bytes} is not at least 1")
    checksum = fields.pop(CHECKSUM, None)
    if checksum is not None and checksum != digest_of(fields):
        raise TokensDamaged(
            f"{path}: its {CHECKSUM} does not match its other fields. Restore it from a copy; if "
            f"you have changed a field yourself, remove the line {CHECKSUM}."
        )
    return meta


def check_size(size_bytes: int, meta: Meta, path: RunPath) -> None:
    """Raises TokensDamaged if tokens.bin has another size than meta.json says."""
    if size_bytes != meta.num_tokens * DTYPES[meta.dtype].itemsize:
        raise TokensDamaged(
            f"{path} has {size_bytes:,} bytes, but meta.json says "
            f"{meta.num_tokens:,} tokens of {meta.dtype}. Rewrite the folder."
        )


def remove_at_once(folder: Path) -> None:
    """Removes a folder in one step, so that no process sees a part of it."""
    removed = folder.parent / f".removed-{folder.name}-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        folder.rename(removed)
    except FileNotFoundError:
        return  # Another process removed it first.
    shutil.rmtree(removed, ignore_errors=True)


def open_offsets(path: Path, meta: Meta) -> NDArray[np.int64]:
    """Returns the memory map of a local offsets.npy; raises TokensDamaged if its ends are wrong."""
    offsets = _mapped(path)
    check_shape(offsets.dtype, offsets.shape, meta, path)
    check_ends(offsets, meta, path)
    return offsets


def _mapped(path: Path) -> NDArray[Any]:
    """Returns the memory map of a .npy file; raises TokensDamaged if it is none."""
    open_file(path).close()  # NumPy would wait for a pipe.
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except (ValueError, EOFError) as error:
        raise TokensDamaged(f"{path} can't be read: {error}") from error


def check_shape(dtype: np.dtype[Any], shape: tuple[int, ...], meta: Meta, path: RunPath) -> None:
    """Raises TokensDamaged if the header of offsets.npy does not fit meta.json."""
    if dtype != np.dtype("<i8") or shape != (meta.num_documents + 1,):
        raise TokensDamaged(
            f"{path} is {dtype}{list(shape)}; with {meta.num_documents:,} "
            f"documents in meta.json it must be int64[{meta.num_documents + 1}]"
        )


def check_ends(offsets: Items, meta: Meta, path: RunPath) -> None:
    """Raises TokensDamaged if the first or the last offsets are wrong."""
    for begin in (0, max(len(offsets) - NUM_OFFSETS_CHECKED, 0)):
        some = np.asarray(offsets[begin : begin + NUM_OFFSETS_CHECKED])
        for at in np.flatnonzero(some[1:] < some[:-1])[:1]:
            raise TokensDamaged(
                f"{path} must rise: entry {begin + at + 1:,} is {some[at + 1]:,} after {some[at]:,}"
            )
    if offsets[0] != 0 or offsets[-1] != meta.num_tokens:
        raise TokensDamaged(
            f"{path} must rise from 0 to {meta.num_tokens:,}, the number of tokens; "
            f"it goes from {offsets[0]:,} to {offsets[-1]:,}"
        )


def _open_blocks(
    path: Path, meta: Meta, tokens: NDArray[Any], offsets: NDArray[np.int64]
) -> tuple[CheckedBlocks, CheckedBlocks] | tuple[None, None]:
    """Returns the blocks of tokens and of offsets; None if the folder has no digests."""
    size = meta.block_bytes
    if size is None:
        return None, None
    of_tokens, of_offsets = open_digests(path, meta)
    return (
        CheckedBlocks(tokens, of_tokens, block_bytes=size),
        CheckedBlocks(offsets, of_offsets, block_bytes=size),
    )


def open_digests(path: Path, meta: Meta) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns the digests of the blocks of tokens and of the blocks of offsets."""
    size = meta.block_bytes
    assert size is not None, path
    digests = _mapped(path)
    cut = num_blocks(meta.num_tokens * DTYPES[meta.dtype].itemsize, size)
    count = cut + num_blocks((meta.num_documents + 1) * OFFSET_BYTES, size)
    if digests.dtype != np.dtype("<u8") or digests.shape != (count,):
        raise TokensDamaged(
            f"{path} is {digests.dtype}{list(digests.shape)}; with blocks of {size:,} bytes it "
            f"must be uint64[{count}]"
        )
    return digests[:cut], digests[cut:]


@dataclass(frozen=True)
class TokenRows:
    """Rows that are windows of seq_len + 1 tokens over [start, stop) of the token stream.

    Row i has the tokens [i*T, i*T + T] of that range: T inputs, and T targets shifted by one.
    """

    corpus: TokenFolder
    seq_len: int
    start: int
    stop: int

    def __len__(self) -> int:
        """Number of complete windows."""
        return max(0, (self.stop - self.start - 1) // self.seq_len)

    def rows(self, ids: NDArray[np.int64]) -> Arrays:
        """Returns `token_arrays`; positions restart in each document and at the row's start."""
        check_ids(ids, len(self))
        starts_B = self.start + np.asarray(ids, np.int64) * self.seq_len
        tokens_BW = self._tokens(ids, starts_B)
        begins_BW = self._begins(ids, starts_B)
        segment_ids_BW = 1 + np.cumsum(begins_BW, axis=1, dtype=np.int32)
        indices_W = np.arange(self.seq_len + 1, dtype=np.int32)
        begun_BW = np.maximum.accumulate(np.where(begins_BW, indices_W, np.int32(0)), axis=1)
        return token_arrays(tokens_BW, segment_ids_BW, indices_W - begun_BW)

    def _tokens(self, ids: NDArray[np.int64], starts_B: NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns the tokens of the windows; raises as `TokenFolder.unusable_id`."""
        width, num_ids = self.seq_len + 1, self.corpus.num_ids
        self.corpus.check_tokens(starts_B, starts_B + width)
        tokens_BW = np.empty((len(ids), width), self.corpus.tokens.dtype)
        for window, start in zip(tokens_BW, starts_B.tolist(), strict=True):
            window[:] = self.corpus.tokens[start : start + width]
        if tokens_BW.size and tokens_BW.max() >= num_ids:
            i, index = np.argwhere(tokens_BW >= num_ids)[0].tolist()
            token = int(tokens_BW[i, index])
            raise self.corpus.unusable_id(int(ids[i]), int(starts_B[i]) + index, token)
        return tokens_BW.astype(np.int32)

    def _begins(self, ids: NDArray[np.int64], starts_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns the positions in each window, except its first token, where a document begins."""
        begins_BW = np.zeros((len(ids), self.seq_len + 1), np.bool_)
        offsets = self.corpus.offsets
        firsts_B = offsets.searchsorted(starts_B, side="right")
        lasts_B = offsets.searchsorted(starts_B + self.seq_len, side="right")
        # Includes two offsets before the window, because a search ends next to a wrong offset.
        befores_B = np.maximum(np.minimum(firsts_B, lasts_B) - 2, 0)
        stops_B = np.minimum(np.maximum(firsts_B, lasts_B) + 1, len(offsets))
        self.corpus.check_offsets(befores_B, stops_B)
        rows, indices = _ranges(befores_B, stops_B)
        near = offsets[indices]
        falls = (near[1:] < near[:-1]) & (rows[1:] == rows[:-1])
        if falls.any() or (firsts_B > lasts_B).any():
            i = min([*rows[1:][falls], *np.flatnonzero(firsts_B > lasts_B)])
            raise BadRecord(
                f"{self.corpus.path('offsets.npy')}: row {ids[i]}, documents {firsts_B[i]} to "
                f"{lasts_B[i]} do not begin in ascending order. Rewrite the folder."
            )
        rows, indices = _ranges(firsts_B, lasts_B)
        begins_BW[rows, offsets[indices] - starts_B[rows]] = True
        return begins_BW


def _ranges(
    starts_B: NDArray[np.int64], stops_B: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the numbers of all ranges in order, each with the index of its range.

    >>> _ranges(np.array([3, 9, 5]), np.array([5, 9, 6]))
    (array([0, 0, 2]), array([3, 4, 5]))
    """
    lengths_B = np.maximum(stops_B - starts_B, 0)
    indices = np.repeat(np.arange(len(lengths_B)), lengths_B)
    before_B = np.cumsum(lengths_B) - lengths_B
    return indices, np.arange(len(indices)) + (starts_B - before_B)[indices]
