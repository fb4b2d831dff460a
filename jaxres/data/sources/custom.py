"""Rows from a user's object with __len__ and __getitem__, such as a grain MapDataset."""

from __future__ import annotations

import importlib
import inspect
import json
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxres.config.schema.data import CustomSource
from jaxres.data import row_values
from jaxres.data.batching import Arrays, BadRecord, check_ids, is_record_fault
from jaxres.data.row_values import Limit
from jaxres.data.tokens.token_arrays import token_arrays
from jaxres.faults import ConfigError
from jaxres.secret_values import without_rotatable

NUM_FINGERPRINT_ROWS = 16

Row = dict[str, NDArray[Any]]
Spec = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


class CustomItems(Protocol):
    """The object that the target returns."""

    def __len__(self) -> int:
        """Number of items."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Returns a dict of arrays or scalars, or seq_len + 1 token ids."""
        ...


@dataclass(frozen=True)
class CustomRows:
    """The items [start, stop) of the user's object; each must have the same shapes."""

    items: CustomItems
    target: str
    seq_len: int
    vocab_size: int | None
    spec: Spec
    start: int
    stop: int
    varies_by_epoch: bool = False
    """Whether an id is epoch * len(self) + row, and the object's item_at is called."""
    limits: Mapping[str, Limit] = field(default_factory=dict[str, Limit])
    """Values of some arrays with which the model can compute; others are bad records."""
    has_64_bits: bool = False
    """Whether the devices keep numbers of 64 bits; else values that 32 bits can't hold are bad."""

    def __len__(self) -> int:
        """Number of items of this part."""
        return self.stop - self.start

    def rows(self, ids: NDArray[np.int64]) -> Arrays:
        """Returns the items' arrays, stacked; token ids become the arrays of a token row."""
        ids = np.asarray(ids)
        epochs, rows = np.divmod(ids, len(self)) if self.varies_by_epoch else (ids * 0, ids)
        check_ids(rows, len(self))
        at = zip((self.start + rows).tolist(), epochs.tolist(), strict=True)
        items = [self._row(index, epoch) for index, epoch in at]
        arrays = {
            key: np.array([item[key] for item in items], dtype).reshape(len(items), *shape)
            for key, (shape, dtype) in self.spec.items()
        }
        bad = row_values.problem(arrays, self.limits, has_64_bits=self.has_64_bits)
        if bad is not None:
            raise BadRecord(
                f"data.source.target {self.target}: item {self.start + int(rows[bad[0]])}: {bad[1]}"
            )
        return arrays

    def _row(self, index: int, epoch: int) -> Row:
        row = read_item(
            self.items,
            index,
            target=self.target,
            seq_len=self.seq_len,
            vocab_size=self.vocab_size,
            epoch=epoch if self.varies_by_epoch else None,
        )
        if spec_of(row) != self.spec:
            raise BadRecord(
                f"data.source.target {self.target}: item {index} has {_describe(spec_of(row))}, "
                f"earlier ones have {_describe(self.spec)}. All items must have the same shapes "
                "and types."
            )
        return row


def build_items(source: CustomSource) -> CustomItems:
    """Imports the target and calls it with its arguments."""
    where = f"data.source.target: {source.target}"
    module_name, _, attribute = source.target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{where} can't be imported: {error}. Is its folder on PYTHONPATH?"
        ) from error
    build = getattr(module, attribute, None)
    if not callable(build):
        raise ConfigError(f"{where}: module {module_name} has no function {attribute}")
    try:
        call = inspect.signature(build).bind(**source.args)
    except TypeError as error:
        raise ConfigError(f"{where} does not take data.source.args: {error}") from error
    items: Any = build(*call.args, **call.kwargs)
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise ConfigError(
            f"{where} returned a {type(items).__name__}; it must have __len__ and __getitem__"
        )
    if len(items) < 1:
        raise ConfigError(f"{where} returned no items")
    return items


def read_item(
    items: CustomItems,
    index: int,
    *,
    target: str,
    seq_len: int,
    vocab_size: int | None,
    epoch: int | None = None,
) -> Row:
    """Returns one item as named arrays, of an epoch if one is given.

    Raises BadRecord if it is not a valid row.
    """
    where = f"data.source.target {target}: item {index}"
    read: Any = items
    try:
        item = items[index] if epoch is None else read.item_at(index, epoch)
    except Exception as error:
        error.add_note(f"(while reading item {index} of data.source.target {target})")
        raise
    if isinstance(item, Mapping):
        row = {str(key): _native(np.asarray(value)) for key, value in item.items()}
        invalid = [key for key, value in row.items() if not _is_number(value.dtype)]
        if invalid or not row:
            raise BadRecord(
                f"{where}: {invalid or 'an empty dict'}: values must be numbers of at most 64 bits"
            )
        return row
    tokens = np.asarray(item)
    if tokens.dtype.kind not in "iu" or tokens.shape != (seq_len + 1,):
        raise BadRecord(
            f"{where} is {type(item).__name__} {tokens.dtype}{list(tokens.shape)}; it must be a "
            f"dict of arrays, or data.seq_len + 1 = {seq_len + 1} token ids"
        )
    limit = vocab_size or np.iinfo(np.int32).max
    wrong = np.flatnonzero((tokens < 0) | (tokens >= limit))
    if len(wrong):
        raise BadRecord(f"{where}: token {wrong[0]} is {tokens[wrong[0]]}, not in 0..{limit - 1}")
    return _token_row(tokens.astype(np.int32))


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """Returns an array in this machine's byte order; files of IDX, FITS or HDF5 have another."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def _token_row(tokens_W: NDArray[np.int32]) -> Row:
    """Returns the arrays of a row that consists of one document."""
    length = len(tokens_W)
    return dict(
        token_arrays(tokens_W, np.ones(length, np.int32), np.arange(length, dtype=np.int32))
    )


def spec_of(row: Row) -> Spec:
    """Returns the shape and dtype of each array, by name."""
    return {key: (row[key].shape, row[key].dtype) for key in sorted(row)}


def _describe(spec: Spec) -> str:
    return ", ".join(f"{key} {dtype}{list(shape)}" for key, (shape, dtype) in spec.items())


def fingerprints_of(items: CustomItems, source: CustomSource, *, seq_len: int) -> tuple[str, str]:
    """Returns the object's `fingerprint`, or else a hash of the call, the length and some items.

    The call is without secrets in the first one; earlier versions have recorded the second one.
    """
    fingerprint = getattr(items, "fingerprint", None)
    if isinstance(fingerprint, str):
        return fingerprint, fingerprint
    num_items = len(items)
    calls = [
        [source.target, args, num_items] for args in (without_rotatable(source.args), source.args)
    ]
    digests = [xxhash.xxh3_128(json.dumps(call, sort_keys=True).encode()) for call in calls]
    count = min(num_items, NUM_FINGERPRINT_ROWS)
    for index in sorted({i * (num_items - 1) // max(1, count - 1) for i in range(count)}):
        for part in _row_as_bytes(items, index, source, seq_len=seq_len):
            for digest in digests:
                digest.update(part)
    return digests[0].hexdigest(), digests[1].hexdigest()


def _row_as_bytes(
    items: CustomItems, index: int, source: CustomSource, *, seq_len: int
) -> Iterator[bytes]:
    try:
        row = read_item(items, index, target=source.target, seq_len=seq_len, vocab_size=None)
    except Exception as error:
        if not is_record_fault(error):
            raise
        yield f"{index} can't be used".encode()
        return
    for key in sorted(row):
        yield f"{index} {key} {row[key].dtype.str} {row[key].shape}".encode()
        yield row[key].tobytes()


def vocab_size_of(items: CustomItems) -> int | None:
    """Returns the object's `vocab_size`, or None. Raises ConfigError if it is no whole number."""
    return _count(items, "vocab_size")


def tokens_per_row_of(items: CustomItems, *, default: int) -> int:
    """Returns the object's `tokens_per_row`, or the default. Raises as `vocab_size_of`."""
    tokens = _count(items, "tokens_per_row")
    return default if tokens is None else tokens


def _count(items: CustomItems, name: str) -> int | None:
    value: Any = getattr(items, name, None)
    try:
        return None if value is None else operator.index(value)
    except TypeError as error:
        raise ConfigError(
            f"data.source.target: {name} of the object is {value!r}; it must be a whole number"
        ) from error
