"""Which values the arrays of rows may have, so that a model computes with them as they are.

JAX has numbers of 32 bits unless JAX_ENABLE_X64 is set: it would wrap larger integers. An index
beyond an array, such as a token without a row of the embedding, is no error on a device either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxres.config.schema.model import AnyModel, CustomModel, VitModel
from jaxres.data.batching import Arrays

LARGEST = int(np.iinfo(np.int32).max)
WIDE = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
"""Types that JAX narrows."""


@dataclass(frozen=True)
class Limit:
    """The values, type and shape of one array of a row that a model of jaxres reads."""

    low: int
    high: int
    """Largest value."""
    shape: tuple[int, ...] | None
    """Of one row; None: any."""
    only_whole: bool = True
    """Whether the type is an integer; else it may be a float too, of whole numbers."""
    why: str = ""
    """Where `high` comes from."""


def limits_of(model: AnyModel, *, vocab_size: int | None, seq_len: int) -> Mapping[str, Limit]:
    """Returns the limits of the arrays that a model reads, by name; of a custom model none.

    Args:
      vocab_size: number of token ids of the data; None: unknown.
    """
    if isinstance(model, CustomModel):
        return {}
    if isinstance(model, VitModel):
        label = Limit(0, model.num_classes - 1, (), why=f"model.num_classes={model.num_classes}")
        shape = (model.image_size, model.image_size, 3)
        return {"label": label, "image": Limit(0, 255, shape, why="uint8")}
    sizes = {"the data's vocab_size": vocab_size, "model.vocab_size": model.vocab_size}
    known = {name: size for name, size in sizes.items() if size is not None}
    name = min(known, key=lambda name: known[name], default="")
    high, why = (known[name] - 1, f"{name}={known[name]}") if known else (LARGEST, "")
    token, row = Limit(0, high, (seq_len,), why=why), (seq_len,)
    return {
        "tokens_BT": token,
        "targets_BT": token,
        "segment_ids_BT": Limit(0, LARGEST, row),
        "positions_BT": Limit(0, seq_len - 1, row, why=f"data.seq_len={seq_len}"),
        "weights_BT": Limit(0, 1, row, only_whole=False),
    }


def problem(
    arrays: Arrays, limits: Mapping[str, Limit], *, has_64_bits: bool
) -> tuple[int, str] | None:
    """Returns the index of the first row with an unusable value, and the error.

    Args:
      limits: limits of some of them, by name.
      has_64_bits: whether a device keeps numbers of 64 bits.
    """
    for name, array in arrays.items():
        limit = limits.get(name)
        text = "" if limit is None else _wrong_type(array, limit)
        if text:
            return 0, f"{name} is {array.dtype}{list(array.shape[1:])}, and {text}"
        bad = None if limit is None else _outside(array, limit)
        if limit is not None and bad is not None:
            kind = "an integer" if limit.only_whole else "0 or 1"
            allowed = kind if limit.high == 1 else f"in {limit.low}..{limit.high}"
            return _at(name, array, bad, f"not {allowed}" + (f" ({limit.why})" * bool(limit.why)))
        bad = None if has_64_bits else _too_wide(array)
        if bad is not None:
            text = (
                "which 32 bits can't hold, as JAX computes: give smaller numbers, or set "
                "JAX_ENABLE_X64=1"
            )
            return _at(name, array, bad, text)
    return None


def _wrong_type(array: NDArray[Any], limit: Limit) -> str:
    """Returns the error in an array's type or shape; empty: none."""
    kinds, names = ("iu", "integers") if limit.only_whole else ("fiub", "numbers")
    if array.dtype.kind not in kinds:
        return f"must be {names}"
    if limit.shape is not None and array.shape[1:] != limit.shape:
        return f"must have the shape {list(limit.shape)}"
    return ""


def _outside(array: NDArray[Any], limit: Limit) -> NDArray[np.bool_] | None:
    """Returns which values are outside of the limit; None: there is none."""
    if not limit.only_whole:
        bad = (array != limit.low) & (array != limit.high)
        return bad if bad.any() else None
    if not array.size or (limit.low, limit.high) == (0, 255) == _range_of(array.dtype):
        return None
    if limit.low <= array.min() and array.max() <= limit.high:
        return None
    return (array < limit.low) | (array > limit.high)


def _too_wide(array: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Returns which values are others in 32 bits, beside rounding; None: there is none."""
    if array.dtype.name not in WIDE or not array.size:
        return None
    if array.dtype.kind in "iu":
        low, high = _range_of(np.dtype(WIDE[array.dtype.name]))
        if low <= array.min() and array.max() <= high:
            return None
        return (array < low) | (array > high)
    with np.errstate(over="ignore"):
        bad = np.isfinite(array) & ~np.isfinite(array.astype(WIDE[array.dtype.name]))
    return bad if bad.any() else None


def _range_of(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Returns the smallest and the largest value of an integer type."""
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _at(name: str, array: NDArray[Any], bad: NDArray[np.bool_], what: str) -> tuple[int, str]:
    row, *rest = np.argwhere(bad)[0].tolist()
    place = f"{name}[{', '.join(map(str, rest))}]" if rest else name
    return row, f"{place} is {array[(row, *rest)]}, {what}"
