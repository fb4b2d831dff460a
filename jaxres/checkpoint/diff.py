"""Compares two committed states: arrays bit by bit, and the facts of progress.json.

`compare` and `facts` are pure; `diff` reads two step directories, one array of each at a time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxres.checkpoint.digests.content_digest import array_row, block_grid, digest_of_rows
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.manifest import ArrayInfo, Manifest
from jaxres.runlog.run_log import Commit
from jaxres.storage.path import RunPath


@dataclass(frozen=True)
class Difference:
    """Where two arrays of the same dtype and shape differ; NaNs with equal bits are equal."""

    elements: int
    """Number of elements whose bits differ."""
    of_elements: int
    """Number of all elements."""
    first: tuple[int, ...]
    """Index of the first differing element, in C order."""
    largest: float | None
    """Largest absolute difference; None if no differing pair is finite."""
    nonfinite: int
    """Number of differing pairs with a NaN or an infinity, whose difference is undefined."""
    blocks: int
    """Number of blocks of the content digest's grid that differ."""
    of_blocks: int
    """Number of all blocks."""
    first_block: tuple[int, ...]
    """Index, in that grid, of the block that holds the first differing element."""
    first_bits: tuple[str, str]
    """Bits of the first differing element on both sides, in hex, most significant byte first."""


@dataclass(frozen=True)
class ArrayDiff:
    """One array that differs between the two sides."""

    path: str
    a: ArrayInfo | None
    """None: absent on side a."""
    b: ArrayInfo | None
    """None: absent on side b."""
    difference: Difference | None
    """None: the array is absent on one side, or dtype or shape differ."""


@dataclass(frozen=True)
class FactDiff:
    """One value of progress.json that differs between the two sides; None: absent."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Side:
    """One of the two states that are compared."""

    step_dir: RunPath
    step: int
    digest: str


@dataclass(frozen=True)
class StateDiff:
    """All differences between states a and b; empty if they are equal."""

    a: Side
    b: Side
    num_arrays: int
    """Number of distinct array paths of both sides together."""
    arrays: tuple[ArrayDiff, ...]
    facts: tuple[FactDiff, ...]

    @property
    def is_equal(self) -> bool:
        """Whether the states are equal, guard memory included."""
        return not self.arrays and not self.facts


def compare(a: np.ndarray, b: np.ndarray) -> Difference | None:
    """Returns where two arrays of the same dtype and shape differ in bits; None: nowhere."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape), (a.dtype, a.shape, b.dtype, b.shape)
    unequal = _unequal_bits(a, b)
    count = int(np.count_nonzero(unequal))
    if count == 0:
        return None
    first = tuple(int(i) for i in np.unravel_index(int(np.argmax(unequal)), a.shape))
    largest, nonfinite = _largest(a[unequal], b[unequal])
    blocks, of_blocks = _blocks(unequal, itemsize=a.dtype.itemsize)
    return Difference(
        elements=count,
        of_elements=a.size,
        first=first,
        largest=largest,
        nonfinite=nonfinite,
        blocks=blocks,
        of_blocks=of_blocks,
        first_block=_block_of(first, a),
        first_bits=(_bits(a, first), _bits(b, first)),
    )


def _block_of(index: tuple[int, ...], array: np.ndarray) -> tuple[int, ...]:
    """Returns the block of the digest's grid that holds an element."""
    grid = block_grid(array.shape, array.dtype.itemsize)
    sizes = (size // n for size, n in zip(array.shape, grid, strict=True))
    return tuple(i // size for i, size in zip(index, sizes, strict=True))


def _bits(array: np.ndarray, index: tuple[int, ...]) -> str:
    """Returns the bits of one element in hex, most significant byte first."""
    element = array[index].tobytes()
    return (element[::-1] if sys.byteorder == "little" else element).hex()


def _unequal_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a mask, in the arrays' shape, of the elements whose bits differ."""
    bytes_a, bytes_b = (
        np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(-1, x.dtype.itemsize)
        for x in (a, b)
    )
    if a.dtype.itemsize in (1, 2, 4, 8):
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        return (bytes_a.view(unsigned) != bytes_b.view(unsigned)).reshape(a.shape)
    return (bytes_a != bytes_b).any(axis=1).reshape(a.shape)


def _largest(a: np.ndarray, b: np.ndarray) -> tuple[float | None, int]:
    """Returns the largest finite |a - b| of two 1-D arrays, and the number of nonfinite pairs."""
    if a.dtype.kind in "iub":
        # Unsigned subtraction wraps around to the right magnitude at any width.
        wide = np.uint64 if a.dtype.kind == "u" else np.int64
        low, high = np.minimum(a, b).astype(wide), np.maximum(a, b).astype(wide)
        return float((high.view(np.uint64) - low.view(np.uint64)).max()), 0
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(over="ignore", invalid="ignore"):
        differences = np.abs(a.astype(wide) - b.astype(wide))
    finite = np.isfinite(differences)
    return float(differences[finite].max()) if finite.any() else None, int(
        np.count_nonzero(~finite)
    )


def _blocks(unequal: np.ndarray, *, itemsize: int) -> tuple[int, int]:
    """Returns the number of blocks of the digest's grid with an unequal element, and of all."""
    grid = block_grid(unequal.shape, itemsize)
    pairs = ((n, size // n) for size, n in zip(unequal.shape, grid, strict=True))
    cut = unequal.reshape([length for pair in pairs for length in pair])
    within_block = tuple(range(1, cut.ndim, 2))
    return int(np.count_nonzero(cut.any(axis=within_block))), math.prod(grid)


def facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[FactDiff, ...]:
    """Returns the facts that differ; guard memory is named `guards/<guard>/<name>`."""
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    return tuple(
        FactDiff(name, flat_a.get(name), flat_b.get(name))
        for name in dict.fromkeys([*flat_a, *flat_b])
        if (name in flat_a, flat_a.get(name)) != (name in flat_b, flat_b.get(name))
    )


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def diff(a: tuple[RunPath, Commit], b: tuple[RunPath, Commit]) -> StateDiff:
    """Compares two committed steps, each given as a step directory and its commit record.

    Raises:
      Unrestorable: one of them is damaged.
      StorageUnavailable: storage could not be read.
    """
    first, second = _Stored(*a, manifests.read(*a)), _Stored(*b, manifests.read(*b))
    paths = sorted({*first.manifest.arrays, *second.manifest.arrays})
    rows_here, rows_there, differing = [], [], []
    for path in paths:
        array, other = first.array(path), second.array(path)
        rows_here += [] if array is None else [array_row(path, array)]
        rows_there += [] if other is None else [array_row(path, other)]
        infos = first.manifest.arrays.get(path), second.manifest.arrays.get(path)
        if array is None or other is None or infos[0] != infos[1]:
            differing.append(ArrayDiff(path, *infos, None))
        elif (difference := compare(array, other)) is not None:
            differing.append(ArrayDiff(path, *infos, difference))
    progress, other_progress = manifests.read_progress(*a), manifests.read_progress(*b)
    return StateDiff(
        a=Side(first.step_dir, first.commit.step, digest_of_rows(rows_here, progress=progress)),
        b=Side(
            second.step_dir,
            second.commit.step,
            digest_of_rows(rows_there, progress=other_progress),
        ),
        num_arrays=len(paths),
        arrays=tuple(differing),
        facts=facts(progress, other_progress),
    )


@dataclass(frozen=True)
class _Stored:
    """A committed step on storage, one of the two sides."""

    step_dir: RunPath
    commit: Commit
    manifest: Manifest

    def array(self, path: str) -> np.ndarray | None:
        """Reads one array; None if the step has no array at that path."""
        if path not in self.manifest.arrays:
            return None
        return manifests.read_array(self.step_dir, self.commit, path, self.manifest)


def as_text(diff_: StateDiff) -> str:
    """Returns the differences as text, one line each, and the verdict."""
    sides = [("A", diff_.a), ("B", diff_.b)]
    rows = [f"{name}  {side.step_dir}  step {side.step}  {side.digest}" for name, side in sides]
    rows += [f"{array.path}: {_array_text(array)}" for array in diff_.arrays]
    rows += [
        f"{fact.name}: {_value_text(fact.a)} in A, {_value_text(fact.b)} in B"
        for fact in diff_.facts
    ]
    if diff_.is_equal:
        rows.append(f"equal: {diff_.a.digest}")
    else:
        rows.append(
            f"{len(diff_.arrays)} of {diff_.num_arrays} arrays and {len(diff_.facts)} facts differ"
        )
        if diff_.a.digest == diff_.b.digest:
            rows.append("the content digests are equal: what differs is not a part of them")
    return "".join(f"{row}\n" for row in rows)


def _array_text(array: ArrayDiff) -> str:
    where = array.difference
    if where is None:
        return f"{array.a or 'absent'} in A, {array.b or 'absent'} in B"
    parts = [
        f"{array.a}: {where.elements:,} of {where.of_elements:,} elements differ",
        f"in {where.blocks} of {where.of_blocks} blocks",
        f"first at [{','.join(map(str, where.first))}]",
    ]
    if where.largest is not None:
        parts.append(f"largest difference {where.largest:.6g}")
    if where.nonfinite:
        parts.append(f"{where.nonfinite:,} of them NaN or infinite")
    return ", ".join(parts)


def _value_text(value: Any) -> str:
    return "none" if value is None else str(value)


def as_json(result: StateDiff) -> str:
    """Returns one JSON object per line: both states, every difference, the verdict."""
    rows: list[dict[str, Any]] = [
        {"kind": "state", "side": name, "path": str(side.step_dir)}
        | {"step": side.step, "digest": side.digest}
        for name, side in (("a", result.a), ("b", result.b))
    ]
    for array in result.arrays:
        infos = {"a": str(array.a) if array.a else None, "b": str(array.b) if array.b else None}
        where = dataclasses.asdict(array.difference) if array.difference else None
        rows.append({"kind": "array", "path": array.path, **infos, "difference": where})
    rows += [{"kind": "fact", **dataclasses.asdict(fact)} for fact in result.facts]
    rows.append({"kind": "verdict", "equal": result.is_equal})
    return "".join(json.dumps(row) + "\n" for row in rows)
