"""Finds out that token ids are read as another type, or in another byte order, than their file has.

Ids of 32 bits that are read as 16 are followed by their upper half each, which is 0, or below 4 for
vocabularies of up to 2^18: every second id says nothing. In the other byte order small ids are
multiples of 256. Ids of 8 bits that are read as 16 have two of them in each: the upper byte is
distributed as the lower one is. No text has such ids, nor does one end with a thousand ids 0, as a
file does whose writer made it in its full size and was killed before it had filled it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxres.faults import ConfigError

MIN_IDS = 16
"""So few ids could be such by chance."""
UPPER_HALVES = 4
"""Number of upper halves of ids of any known vocabulary."""
MIN_PAIRS = 512
"""So few ids may have both bytes in one range by chance."""
BYTES_OF_TEXT = 245
"""UTF-8 has no byte from here on; the lower bytes of ids of a larger vocabulary have all values."""
SAME_SHARE = 0.2
"""Two distributions that differ in less than this share are the same one."""
MIN_ZEROS = 1024
"""So few ids 0 at the end could be a text."""


HEADER_VERSION = 1
"""The version of llm.c's header that is known."""
LIT_GPT = b"LITPKDS"
"""Begin of a chunk of lit-gpt (PackedDataset), which has a header of its own and padding."""


def refuse_chunk(header: bytes, where: str) -> None:
    """Raises ConfigError for a file of lit-gpt, which is not plain ids."""
    if header.startswith(LIT_GPT):
        raise ConfigError(
            f"{where} is a chunk of lit-gpt's PackedDataset, not plain token ids. Write the ids of "
            "its documents to a .bin file of uint16 or uint32, each with its end-of-text id."
        )


def refuse_version(version: int, where: str) -> None:
    """Raises ConfigError for a later header of llm.c."""
    if version != HEADER_VERSION:
        raise ConfigError(
            f"{where}: its header is llm.c's of version {version}, and version {HEADER_VERSION} is "
            "known. Write the file again in that version."
        )


class IdPattern:
    """Statistics of a file's ids, given in parts, that show a wrong type or byte order."""

    def __init__(self) -> None:
        self._num_ids = self._num_zeros = 0
        self._highest = [0, 0]
        """Highest id at even and at odd positions."""
        self._low_bits = [0, 0]
        """All bits of the lower byte that an id has at even and at odd positions."""
        self._bytes = np.zeros((2, 256), np.int64)
        """How often each value is the lower, and the upper, byte of an id of 16 bits."""

    def add(self, ids: NDArray[Any]) -> None:
        """Takes the next ids of the file."""
        for start in (0, 1):
            some, which = ids[start::2], (self._num_ids + start) % 2
            if len(some):
                self._highest[which] = max(self._highest[which], int(some.max()))
                self._low_bits[which] |= int(np.bitwise_or.reduce(some)) & 0xFF
        if ids.dtype.itemsize == 2:
            for which, part in enumerate((ids & 0xFF, ids >> 8)):
                self._bytes[which] += np.bincount(part, minlength=256)
        self._num_ids += len(ids)
        at_end = int(np.argmax(ids[::-1] != 0)) if ids.any() else len(ids)
        self._num_zeros = at_end + (self._num_zeros if at_end == len(ids) else 0)

    def zeros_at_end(self) -> int:
        """Returns the number of ids 0 at the end; 0 if a text may have so few."""
        return self._num_zeros if self._num_zeros >= MIN_ZEROS else 0

    def problem(self) -> str | None:
        """Returns why the ids can't be the written ids; None: nothing speaks against it."""
        if self._num_ids < MIN_IDS:
            return None
        halves = [
            highest < UPPER_HALVES or (not low_bits and highest < UPPER_HALVES * 256)
            for highest, low_bits in zip(self._highest, self._low_bits, strict=True)
        ]
        if halves[0] != halves[1]:
            return f"every second id is at most {min(self._highest)}, as of a wider type"
        if not any(self._low_bits) and any(self._highest):
            return "every id is a multiple of 256, as in the other byte order"
        if self._has_two_in_each():
            return "both bytes of the ids have the same values, as of a narrower type (uint8)"
        return None

    def _has_two_in_each(self) -> bool:
        """Returns whether each id of 16 bits looks like two ids of 8 bits."""
        num_ids = int(self._bytes[0].sum())
        lower, upper = self._bytes
        if num_ids < MIN_PAIRS or self._bytes[:, BYTES_OF_TEXT:].any() or not upper[1:].any():
            return False
        return bool(np.abs(lower - upper).sum() < 2 * SAME_SHARE * num_ids)
