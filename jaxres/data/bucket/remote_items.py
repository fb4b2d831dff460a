"""Items of an array in a bucket, whose blocks are fetched when they are read and then cached.

A block is compared with its digest whenever it comes from the bucket or from the local disk, so
nothing else than what was written is ever returned. Blocks of one call are fetched concurrently.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxres.clock import SystemClock
from jaxres.data.bucket.block_cache import BlockCache, name_of
from jaxres.data.tokens.token_digests import num_blocks
from jaxres.faults import RunError, StorageUnavailable
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from jaxres.storage.threads import spawn_thread

THREADS = 32
"""Concurrent requests: the rows of a batch are in as many blocks. A read waits for a round trip."""
TRIES = 3
"""Fetches of a block that differs from its digest: a part of an object has no checksum of its own,
so it may be damaged on the way."""
MEMORY_BYTES = 128 * 2**20
"""Blocks of an array that are kept in memory: more than a batch needs."""
PAUSE_SECONDS = 2.0
"""Pause after the bucket has not answered all retries of a request, or has refused it."""
SCAN_BLOCKS = 256
T = TypeVar("T")
R = TypeVar("R")


class ReadPool:
    """Daemon threads: a process does not wait at its exit for a bucket that does not answer."""

    def __init__(self, num_threads: int = THREADS) -> None:
        """The threads start with the first call."""
        self._num_threads = num_threads
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._is_started = False

    def run(self, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Returns the result of a call for each item; raises the first error in their order."""
        if len(items) < 2:
            return [call(item) for item in items]
        with self._starting:
            if not self._is_started:
                self._is_started = True
                for number in range(self._num_threads):
                    spawn_thread(f"bucket-{number}", self._run, daemon=True)
        done: queue.SimpleQueue[tuple[int, R | None, BaseException | None]] = queue.SimpleQueue()

        def task(index: int) -> None:
            try:
                done.put((index, call(items[index]), None))
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread.
                done.put((index, None, error))

        for index in range(len(items)):
            self._tasks.put(lambda index=index: task(index))
        results = sorted((done.get() for _ in items), key=lambda result: result[0])
        for _, _, error in results:
            if error is not None:
                raise error
        return [value for _, value, _ in results]  # type: ignore[misc]

    def _run(self) -> None:
        while True:
            self._tasks.get()()


@dataclass(frozen=True)
class RemoteFile:
    """One generation of an object, and how its parts are fetched."""

    path: GcsPath
    stat: gcs_objects.Stat
    outage_seconds: float
    """How long a bucket that does not answer is asked again."""

    def read(self, start: int, stop: int) -> bytes:
        """Returns a part of the object.

        Raises:
          StorageUnavailable: the bucket has not answered for `outage_seconds`.
          ConfigError: the object was replaced or deleted.
        """
        clock = SystemClock()
        until = clock.monotonic() + self.outage_seconds
        while True:
            try:
                return gcs_objects.read_range(self.path, self.stat, start=start, stop=stop)
            except StorageUnavailable:
                if clock.monotonic() >= until:
                    raise
            clock.sleep(PAUSE_SECONDS)


class RemoteItems:
    """The items of a RemoteFile, with the interface of a memory map and of its digests."""

    def __init__(
        self,
        file: RemoteFile,
        *,
        dtype: np.dtype[Any],
        header_bytes: int,
        digests: NDArray[np.uint64],
        block_bytes: int,
        cache: BlockCache,
        pool: ReadPool,
        on_damage: Callable[[str], RunError],
    ) -> None:
        """Args: where the items begin; a digest for each block of their bytes; the error to raise.

        `on_damage` gets what is wrong with a block that the bucket has in this state.
        """
        self.file = file
        self.dtype = dtype
        self.nbytes = file.stat.size - header_bytes
        self._header_bytes = header_bytes
        self._digests = digests
        self._block_bytes = block_bytes
        self._cache = cache
        self._name = name_of(file.path, file.stat)
        self._pool = pool
        self._on_damage = on_damage
        self._lock = threading.Lock()
        self._memory: OrderedDict[int, NDArray[Any]] = OrderedDict()
        assert len(digests) == num_blocks(self.nbytes, block_bytes)
        assert block_bytes % dtype.itemsize == 0, block_bytes

    def __len__(self) -> int:
        """Number of items."""
        return self.nbytes // self.dtype.itemsize

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._digests)

    def __getitem__(self, key: Any) -> Any:
        """Returns one item, a slice without step, or the items at an array of indices."""
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            assert step == 1, key
            return self._range(start, max(start, stop))
        if isinstance(key, np.ndarray):
            return self._at(key)
        index = int(key)
        return self._range(index % len(self), index % len(self) + 1)[0]

    def first_damaged(self, starts_B: NDArray[np.int64], stops_B: NDArray[np.int64]) -> int | None:
        """Loads the blocks of some ranges of items into memory; raises at a damaged one."""
        wanted = [
            np.arange(start, stop)
            for start, stop in zip(
                self._block_of(starts_B), self._block_of(stops_B - 1) + 1, strict=True
            )
        ]
        self._load(np.concatenate(wanted) if wanted else ())

    def searchsorted(self, values: Any, side: str = "right") -> NDArray[np.int64]:
        """Returns the number of the ascending items <= each value; for side="right" only.

        Guesses by proportion, and every third time by halves: documents of similar lengths take one
        or two rounds of concurrent requests, any others a number that grows with the logarithm.
        """
        assert side == "right", side
        values_B = np.atleast_1d(np.asarray(values, np.int64))
        # Items at lows are at most the value, items at highs are above it, or do not exist.
        lows_B = np.full(len(values_B), -1, np.int64)
        highs_B = np.full(len(values_B), len(self), np.int64)
        first, last = (int(self[index]) for index in (0, -1))
        floors_B = np.full(len(values_B), first, np.float64)
        ceilings_B = np.full(len(values_B), last, np.float64)
        for number in range(3 * 64):
            open_B = np.flatnonzero(highs_B - lows_B > 1)
            if not len(open_B):
                break
            shares_B = (values_B - floors_B)[open_B] / np.maximum(ceilings_B - floors_B, 1.0).take(
                open_B
            )
            shares_B = np.full(len(open_B), 0.5) if number % 3 == 2 else np.clip(shares_B, 0, 1)
            widths_B = (highs_B - lows_B)[open_B]
            guesses_B = lows_B[open_B] + (shares_B * widths_B).astype(np.int64)
            guesses_B = np.clip(guesses_B, lows_B[open_B] + 1, highs_B[open_B] - 1)
            blocks = self._block_of(guesses_B)
            loaded = self._load(blocks)
            for i, block in zip(open_B.tolist(), blocks.tolist(), strict=True):
                items, begin = loaded[block], self._first(block)
                found = int(items.searchsorted(values_B[i], side="right"))
                if found < len(items):
                    highs_B[i], ceilings_B[i] = begin + found, float(items[found])
                if found > 0:
                    lows_B[i], floors_B[i] = begin + found - 1, float(items[found - 1])
        return highs_B if np.ndim(values) else highs_B[0]

    def describe(self, block: int, path: Path) -> str:
        """Returns the name of a block; `first_damaged` has already raised its error."""
        return f"{self.file.path} ({path}): block {block}"

    def scan(self) -> Iterator[tuple[NDArray[Any], list[str]]]:
        """Reads every block from the bucket, past the cache; yields items and errors."""
        for start in range(0, len(self._digests), SCAN_BLOCKS):
            blocks = range(start, min(start + SCAN_BLOCKS, len(self._digests)))
            for data, wrong in self._pool.run(self._fetched, blocks):
                yield np.frombuffer(data, self.dtype), [] if wrong is None else [wrong]

    def _block_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices * self.dtype.itemsize // self._block_bytes

    def _first(self, block: int) -> int:
        return block * self._block_bytes // self.dtype.itemsize

    def _range(self, start: int, stop: int) -> NDArray[Any]:
        if start >= stop:
            return np.empty(0, self.dtype)
        first, last = self._block_of(np.array([start, stop - 1])).tolist()
        loaded = self._load(range(first, last + 1))
        items = np.concatenate([loaded[block] for block in range(first, last + 1)])
        return items[start - self._first(first) : stop - self._first(first)]

    def _at(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        indices = np.where(indices < 0, indices + len(self), indices)
        blocks, of = np.unique(self._block_of(indices), return_inverse=True)
        loaded = self._load(blocks)
        found = np.empty(len(indices), self.dtype)
        for number, block in enumerate(blocks.tolist()):
            chosen = of == number
            found[chosen] = loaded[block][indices[chosen] - self._first(block)]
        return found

    def _load(self, blocks: Iterable[int] | NDArray[np.int64]) -> dict[int, NDArray[Any]]:
        """Returns the items of blocks; blocks that are not in memory are read concurrently."""
        wanted = sorted({int(block) for block in blocks})
        with self._lock:
            loaded = {block: self._memory[block] for block in wanted if block in self._memory}
            for block in loaded:
                self._memory.move_to_end(block)
        missing = [block for block in wanted if block not in loaded]
        loaded |= zip(missing, self._pool.run(self._keep, missing), strict=True)
        return loaded

    def _keep(self, block: int) -> NDArray[Any]:
        items = np.frombuffer(self._checked(block), self.dtype)
        with self._lock:
            self._memory[block] = items
            while len(self._memory) > max(1, MEMORY_BYTES // self._block_bytes):
                self._memory.popitem(last=False)
        return items

    def _checked(self, block: int) -> bytes:
        """Returns a block that equals its digest: of the local cache, else of the bucket."""
        data = self._cache.read(self._name, block)
        if data is not None:
            if self._is_good(block, data):
                return data
            self._cache.remove(self._name, block)
        data, wrong = self._fetched(block)
        if wrong is not None:
            raise self._on_damage(wrong)
        self._cache.write(self._name, block, data)
        return data

    def _is_good(self, block: int, data: bytes) -> bool:
        return xxhash.xxh3_64_intdigest(data) == self._digests[block]

    def _fetched(self, block: int) -> tuple[bytes, str | None]:
        """Returns a block as stored in the bucket, and its error."""
        start = block * self._block_bytes
        stop = min(start + self._block_bytes, self.nbytes)
        data = b""
        for _ in range(TRIES):
            data = self.file.read(self._header_bytes + start, self._header_bytes + stop)
            if self._is_good(block, data):
                return data, None
        return data, (
            f"{self.file.path}: block {block} (bytes {start:,} to {stop:,}) has digest "
            f"{xxhash.xxh3_64_intdigest(data):016x}, digests.npy records "
            f"{int(self._digests[block]):016x}"
        )
