"""Writes token folders as a stream, which can be resumed after a kill."""

from __future__ import annotations

import json
import operator
import os
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from jaxres.data.tokens.token_digests import BLOCK_BYTES, BlockHasher
from jaxres.data.tokens.token_folder import (
    CHECKSUM,
    DTYPES,
    FORMAT_VERSION,
    MAX_VOCAB_SIZE,
    Meta,
    token_type,
)
from jaxres.storage.checksummed_json import digest_of
from jaxres.storage.files import sync_dir

PARTIAL_OFFSETS = "offsets.partial"
"""Offsets of the documents that `sync` has made durable, int64; removed when complete."""
READ_ITEMS = 2**20


@dataclass(frozen=True)
class Written:
    """The durable part of a writer's tokens."""

    num_tokens: int
    num_documents: int
    digest: str
    """xxh3-128 of the bytes of these tokens, followed by the bytes of the offsets."""


class TokenWriter:
    """Writes a token folder as a stream; it is complete once the context exits without an error.

    meta.json is written last and all files are fsynced, so an incomplete folder never opens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        tokenizer: str,
        dtype: str | None = None,
        resume: Written | None = None,
    ) -> None:
        """Creates the folder, or continues one whose writer was killed after `sync`.

        Args:
          folder: the folder to write.
          dtype: type of the tokens; None: the usual one for this many ids.
          resume: what an earlier writer has made durable.

        Raises:
          FileExistsError: the folder exists and has files.
          TypeError: `vocab_size` is no whole number.
          ValueError: the folder to resume does not have what `sync` made durable.
        """
        vocab_size = operator.index(vocab_size)  # A NumPy integer can't be written to meta.json.
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size {vocab_size} is not in 1..{MAX_VOCAB_SIZE}")
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._dtype = dtype or token_type(vocab_size)
        self._offsets = array("q", [0])
        self._num_synced = 1
        self._num_tokens = 0
        self._hash = xxhash.xxh3_128()
        self._blocks = BlockHasher()
        if resume is None:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise FileExistsError(17, "the folder exists and is not empty", str(folder))
            self._file = (folder / "tokens.bin").open("wb")
        else:
            self._file = (folder / "tokens.bin").open("r+b")
            try:
                self._read_back(resume)
            except BaseException:
                self._file.close()
                raise

    def _read_back(self, written: Written) -> None:
        """Reads the durable tokens and offsets; cuts off everything after them."""
        dtype, left = DTYPES[self._dtype], written.num_tokens
        while left:
            values = np.frombuffer(self._file.read(min(left, READ_ITEMS) * dtype.itemsize), dtype)
            if not len(values):
                break
            self._append(values)
            left -= len(values)
        with (self._folder / PARTIAL_OFFSETS).open("r+b") as file:
            self._offsets.frombytes(file.read(8 * written.num_documents))
            file.truncate(8 * written.num_documents)
        self._num_synced = len(self._offsets)
        self._file.truncate()
        if left or written != self._written():
            raise ValueError(f"{self._folder} does not have what was recorded as written")

    def _written(self) -> Written:
        digest = self._hash.copy()
        digest.update(np.array(self._offsets, "<i8").data)
        return Written(self._num_tokens, len(self._offsets) - 1, digest.hexdigest())

    @property
    def num_documents(self) -> int:
        """Number of complete documents."""
        return len(self._offsets) - 1

    def sync(self) -> Written:
        """Makes everything so far durable; returns the state to resume from."""
        self._file.flush()
        os.fsync(self._file.fileno())
        with (self._folder / PARTIAL_OFFSETS).open("ab") as file:
            file.write(np.array(self._offsets[self._num_synced :], "<i8").data)
            file.flush()
            os.fsync(file.fileno())
        self._num_synced = len(self._offsets)
        sync_dir(self._folder)
        return self._written()

    def __enter__(self) -> TokenWriter:
        """Returns the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes tokens.bin; completes the folder unless an error occurred."""
        with self._file as file:
            if error is None:
                file.flush()
                os.fsync(file.fileno())
        if error is None:
            self._finish()

    def write(self, tokens: ArrayLike) -> None:
        """Appends tokens, 1-D integers, to the current document."""
        values = np.asarray(tokens)
        if values.size == 0:
            return
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(f"tokens are {values.dtype}{list(values.shape)}, not 1-D integers")
        if values.min() < 0 or values.max() >= self._vocab_size:
            raise ValueError(
                f"document {len(self._offsets) - 1} has tokens {values.min()}..{values.max()}; "
                f"vocab_size is {self._vocab_size}"
            )
        encoded = values.astype(DTYPES[self._dtype])
        self._file.write(encoded.data)
        self._append(encoded)

    def _append(self, encoded: NDArray[Any]) -> None:
        self._hash.update(encoded.data)
        self._blocks.update(encoded)
        self._num_tokens += len(encoded)

    def write_documents(self, tokens: NDArray[Any], ends: NDArray[np.int64]) -> None:
        """Appends tokens; documents end after the tokens at the ascending indices `ends`."""
        begin = self._num_tokens
        self.write(tokens)
        self._offsets.frombytes((np.asarray(ends, "<i8") + begin + 1).tobytes())

    def end_document(self) -> None:
        """Ends the current document; the next token begins another."""
        self._offsets.append(self._num_tokens)

    def _finish(self) -> None:
        offsets = np.array(self._offsets, "<i8")
        if offsets[-1] != self._num_tokens or self._num_tokens == 0:
            raise ValueError("there are no tokens, or the last document was not ended")
        self._hash.update(offsets.data)
        offset_blocks = BlockHasher()
        offset_blocks.update(offsets)
        digests = np.concatenate([self._blocks.finish(), offset_blocks.finish()])
        for name, items in (("offsets.npy", offsets), ("digests.npy", digests)):
            with (self._folder / name).open("wb") as file:
                np.save(file, items, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        meta = Meta(
            format=FORMAT_VERSION,
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            num_tokens=self._num_tokens,
            num_documents=len(offsets) - 1,
            tokenizer=self._tokenizer,
            fingerprint=self._hash.hexdigest(),
            block_bytes=BLOCK_BYTES,
        )
        fields = asdict(meta)
        with (self._folder / "meta.json").open("w") as file:
            file.write(json.dumps(fields | {CHECKSUM: digest_of(fields)}, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        sync_dir(self._folder)


def write_tokens(
    folder: Path, documents: Iterable[ArrayLike], *, vocab_size: int, tokenizer: str
) -> None:
    """Writes documents, each a sequence of token ids, as a new token folder."""
    with TokenWriter(folder, vocab_size=vocab_size, tokenizer=tokenizer) as writer:
        for document in documents:
            writer.write(document)
            writer.end_document()
