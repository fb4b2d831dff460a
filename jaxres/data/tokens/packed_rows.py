"""Rows of packed documents, and the files of their packing plans.

A plan is computed once and kept in a cache folder: the pieces in `<key>.npy`, and in `<key>.json`
what the plan was made from and its digest. Both are replaced atomically, the record last. The
digest is part of the data set's fingerprint, so a run never continues with another plan.
Dims: B rows of a call, P pieces, T = seq_len, W = T + 1.
"""

from __future__ import annotations

import io
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxres import __version__
from jaxres.data.batching import Arrays, check_ids
from jaxres.data.tokens.packing import Packing, PackingPlan, plan_rows
from jaxres.data.tokens.token_arrays import token_arrays
from jaxres.data.tokens.token_folder import TokenFolder, TokensDamaged
from jaxres.faults import ConfigError
from jaxres.storage import files
from jaxres.storage.checksummed_json import canonical_json, decode_checksummed, encode_checksummed

PLAN_FORMAT = 1
"""Format of the two files, and version of the rule by which the rows are planned.

Another rule needs another number, and the plans of runs that exist then have another digest."""


@dataclass(frozen=True)
class PackedRows:
    """Rows of whole documents and pieces of longer ones, over [start, stop) of the tokens."""

    corpus: TokenFolder
    plan: PackingPlan
    digest: str
    """xxh3-128 of the plan's inputs, followed by its pieces."""
    start: int
    stop: int

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.plan)

    def rows(self, ids: NDArray[np.int64]) -> Arrays:
        """Returns `token_arrays` of rows; positions restart in each piece, padding is token 0."""
        check_ids(ids, len(self))
        plan, T = self.plan, self.plan.seq_len
        tokens_BW = np.zeros((len(ids), T + 1), np.int32)
        segment_ids_BW, positions_BW = np.zeros_like(tokens_BW), np.zeros_like(tokens_BW)
        indices_W = np.arange(T + 1, dtype=np.int32)
        for i, row in enumerate(np.asarray(ids).tolist()):
            pieces = slice(int(plan.begins_R[row]), int(plan.begins_R[row + 1]))
            starts_P, lengths_P = plan.starts_P[pieces], plan.lengths_P[pieces]
            self.corpus.check_tokens(starts_P, starts_P + lengths_P)
            at, spans = 0, zip(starts_P.tolist(), lengths_P.tolist(), strict=True)
            for segment, (start, length) in enumerate(spans, 1):
                end = at + length
                tokens_BW[i, at:end] = self._tokens(row, start, length)
                segment_ids_BW[i, at:end] = segment
                positions_BW[i, at:end] = indices_W[:length]
                at = end
        return token_arrays(tokens_BW, segment_ids_BW, positions_BW)

    def _tokens(self, row: int, start: int, length: int) -> NDArray[Any]:
        """Returns the tokens of a piece; raises as `TokenFolder.unusable_id`."""
        tokens = self.corpus.tokens[start : start + length]
        num_ids = self.corpus.num_ids
        if tokens.max() >= num_ids:
            index = int(np.flatnonzero(tokens >= num_ids)[0])
            raise self.corpus.unusable_id(row, start + index, int(tokens[index]))
        return tokens


def open_packed_rows(
    corpus: TokenFolder,
    *,
    start: int,
    stop: int,
    seq_len: int,
    packing: Packing,
    folder: Path,
    progress: Callable[[str], None],
) -> PackedRows:
    """Opens the plan of the tokens [start, stop) in `folder`; computes it if there is none.

    Raises:
      ConfigError: the plan's file is damaged, and another plan is computed now.
      TokensDamaged: the document offsets differ from their digests.
    """
    made_from = {
        "format": PLAN_FORMAT,
        "packing": packing,
        "seq_len": seq_len,
        "start": start,
        "stop": stop,
        "corpus": corpus.meta.fingerprint,
    }
    key = xxhash.xxh3_128_hexdigest(canonical_json(made_from))
    recorded = _read_record(folder / f"{key}.json")
    if recorded is not None:
        try:
            pieces_3P = _recorded_pieces(folder / f"{key}.npy", corpus, made_from, recorded)
            return PackedRows(corpus, _as_plan(pieces_3P, seq_len), recorded, start, stop)
        except (ValueError, EOFError, FileNotFoundError) as problem:
            text = f"The packing plan {folder / key}.npy can't be used, so it is made again"
            progress(f"{text}: {problem}")
    progress(f"Packing {corpus.meta.num_documents:,} documents into rows ({packing})")
    plan = plan_rows(_offsets(corpus), start=start, stop=stop, seq_len=seq_len, packing=packing)
    pieces_3P = _as_pieces(plan)
    digest = _digest(made_from, pieces_3P)
    if recorded not in (None, digest):
        raise ConfigError(
            f"data.packing: {folder / key}.npy is damaged, and the plan that is computed now has "
            f"digest {digest}, {key}.json records {recorded}. Restore the file from a copy, or "
            "use the version of jaxres that made it. For a new run, remove both files."
        )
    _write(folder, key, made_from | {"num_rows": len(plan), "plan": digest}, pieces_3P)
    return PackedRows(corpus, plan, digest, start, stop)


def _recorded_pieces(
    path: Path, corpus: TokenFolder, made_from: dict[str, Any], recorded: str
) -> NDArray[np.int64]:
    """Returns the pieces of a recorded plan.

    Raises:
      ValueError, EOFError, FileNotFoundError: the file is missing, or is not the one recorded.
    """
    try:
        pieces_3P = _read_pieces(path, corpus)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise files.fault_of(error)(f"the packing plan can't be read: {error}") from error
    if _digest(made_from, pieces_3P) != recorded:
        raise ValueError("it differs from its digest")
    return pieces_3P


def _offsets(corpus: TokenFolder) -> NDArray[np.int64]:
    """Returns the checked offsets of all documents."""
    offsets = corpus.offsets[:]
    corpus.check_offsets(np.array([0]), np.array([len(offsets)]))
    if (offsets[1:] < offsets[:-1]).any():
        raise TokensDamaged(
            f"{corpus.path('offsets.npy')}: the documents do not begin in ascending order",
            "Rewrite the folder.",
        )
    return offsets


def _as_pieces(plan: PackingPlan) -> NDArray[np.int64]:
    """Returns row, start and length of each piece, as they are stored."""
    rows_P = np.repeat(np.arange(len(plan)), np.diff(plan.begins_R))
    return np.stack([rows_P, plan.starts_P, plan.lengths_P]).astype("<i8")


def _as_plan(pieces_3P: NDArray[np.int64], seq_len: int) -> PackingPlan:
    rows_P, starts_P, lengths_P = pieces_3P
    counts_R = np.bincount(rows_P)
    begins_R = np.concatenate([[0], np.cumsum(counts_R)]).astype(np.int64)
    return PackingPlan(seq_len, begins_R, starts_P, lengths_P)


def _digest(made_from: dict[str, Any], pieces_3P: NDArray[np.int64]) -> str:
    digest = xxhash.xxh3_128(canonical_json(made_from))
    digest.update(np.ascontiguousarray(pieces_3P).data)
    return digest.hexdigest()


def _read_record(path: Path) -> str | None:
    """Returns the recorded digest; None: there is no valid record."""
    try:
        data = files.read(path)
        return None if data is None else decode_checksummed(data, number=PLAN_FORMAT)["plan"]
    except (ValueError, KeyError):
        return None


def _read_pieces(path: Path, corpus: TokenFolder) -> NDArray[np.int64]:
    """Reads the whole array at once, so that the digest covers the pieces that rows use."""
    with files.open_file(path) as file:
        pieces_3P = np.load(file, allow_pickle=False)
    if pieces_3P.dtype != np.dtype("<i8") or pieces_3P.ndim != 2 or len(pieces_3P) != 3:
        raise ValueError(f"it is {pieces_3P.dtype}{list(pieces_3P.shape)}, not int64[3, pieces]")
    if pieces_3P.shape[1] and pieces_3P[1:].sum(axis=0).max() > corpus.meta.num_tokens:
        raise ValueError("it has tokens after the end of the corpus")
    return pieces_3P


def _write(folder: Path, key: str, fields: dict[str, Any], pieces_3P: NDArray[np.int64]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, pieces_3P, allow_pickle=False)
    versions = {"jaxres": __version__, "numpy": np.__version__, "python": platform.python_version()}
    files.make_dir(folder)
    files.replace(folder / f"{key}.npy", buffer.getvalue())
    files.replace(folder / f"{key}.json", encode_checksummed(fields | {"versions": versions}))
