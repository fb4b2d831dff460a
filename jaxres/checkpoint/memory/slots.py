"""Files of states in shared memory: the raw pieces of one host, and an index with their digests.

A host has two slots, so that one state is whole while the other is being written. A slot is a file
of pieces, whose pages are reserved once and reused, and an index that exists only while the pieces
are whole: it is deleted before they are overwritten, and replaced atomically after them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from jaxres.checkpoint.digests.block_digests import Box
from jaxres.checkpoint.digests.content_digest import as_bytes
from jaxres.checkpoint.snapshot import box_of
from jaxres.checkpoint.state_arrays import Tree, named_arrays
from jaxres.engine import device_use
from jaxres.faults import RunError
from jaxres.storage import codec, files
from jaxres.storage.checksummed_json import decode_checksummed, encode_checksummed
from jaxres.storage.codec import OtherFormat

FORMAT = 1
NUM_SLOTS = 2
ALIGNMENT = 64
PAGE_BYTES = 4096
MAX_INDEX_BYTES = 2**28
CHUNK_BYTES = 2**20
"""A piece is hashed and written in parts that fit into the processor's cache."""
StateKey = tuple[int, int, str]
"""Step, number of the start record, and nonce of the attempt of a state."""
Key = tuple[str, Box]
"""Path of an array, and the box of a piece of it."""


class MemoryDamaged(RunError):
    """A state in shared memory differs from the written one."""


@dataclass(frozen=True)
class SlotPiece:
    """A part of an array that devices of this host hold, and its place in the file."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole array."""
    box: Box
    offset: int
    size: int
    """Number of bytes."""


@dataclass(frozen=True, kw_only=True)
class SlotIndex:
    """Content of the file of pieces."""

    step: int
    seq: int
    """Number of the start record under which the state was trained."""
    nonce: str
    """Nonce of the claim of that attempt."""
    progress: Mapping[str, Any]
    """The fields of Progress."""
    pieces: tuple[SlotPiece, ...]
    digests: tuple[str, ...]
    """xxh3-128 of each piece, in hex."""

    @property
    def key(self) -> StateKey:
        """Identity of the state, equal on all hosts."""
        return self.step, self.seq, self.nonce


def layout(shapes: Tree, *, host: int) -> tuple[SlotPiece, ...]:
    """Returns the pieces of a state on a host's devices, each once, with their places.

    Args:
      shapes: nested dict of arrays or jax.ShapeDtypeStruct, with shardings.
      host: number of the host, which is its process index in JAX.
    """
    pieces, offset = list[SlotPiece](), 0
    for path, (info, leaf) in named_arrays(shapes).items():
        indices = leaf.sharding.devices_indices_map(info.shape)
        boxes = {box_of(i, info.shape) for d, i in indices.items() if d.process_index == host}
        for box in sorted(boxes):
            items = int(np.prod([stop - start for start, stop in box], dtype=np.int64))
            size = items * leaf.dtype.itemsize
            pieces.append(SlotPiece(path, info.dtype, info.shape, box, offset, size))
            offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(pieces)


def slot_bytes(pieces: Sequence[SlotPiece]) -> int:
    """Returns the size of a file of these pieces, in whole pages."""
    return -(-(pieces[-1].offset + pieces[-1].size) // PAGE_BYTES) * PAGE_BYTES


class Slot:
    """One file of pieces and its index."""

    def __init__(self, data: Path, pieces: Sequence[SlotPiece]) -> None:
        """Opens nothing yet.

        Args:
          data: the file of pieces, in shared memory.
          pieces: the pieces of the state.
        """
        self.pieces = tuple(pieces)
        self._data = data
        self._index = data.with_suffix(".json")
        self._file = -1
        self.index: SlotIndex | None = None
        """Index of the whole state in the slot; None: the slot has none that this host can use."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return slot_bytes(self.pieces)

    def missing_bytes(self) -> int:
        """Returns the bytes of memory that `open` will reserve."""
        try:
            found = self._data.stat()
        except FileNotFoundError:
            return self.size_bytes
        size = self.size_bytes
        return size if found.st_size != size else max(0, size - found.st_blocks * 512)

    def open(self) -> None:
        """Reserves the memory and reads the index.

        Raises:
          OSError: there is not enough memory.
          MemoryDamaged: the index differs from what was written.
        """
        if self._data.exists() and self._data.stat().st_size != self.size_bytes:
            self._data.unlink()
        if not self._data.exists():
            self.drop()
        self._file = os.open(self._data, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._file, 0, self.size_bytes)
        try:
            index = _decoded(files.read_whole(self._index))
        except (FileNotFoundError, OtherFormat):
            return
        except ValueError as error:
            raise MemoryDamaged(f"{self._index}: {error}") from error
        if index.pieces == self.pieces:
            self.index = index

    @property
    def is_unused(self) -> bool:
        """Whether memory is reserved for it, and it holds no state."""
        return self._file >= 0 and self.index is None

    def close(self) -> None:
        """Closes the file, which stays in memory."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def drop(self) -> None:
        """Forgets the state in the slot."""
        self.index = None
        self._index.unlink(missing_ok=True)

    def delete(self) -> None:
        """Gives the memory back. The file stays open: another thread may be writing to it."""
        self.drop()
        if self._file >= 0:
            os.ftruncate(self._file, 0)
        self._data.unlink(missing_ok=True)

    def write(self, parts: Mapping[Key, Any]) -> tuple[str, ...]:
        """Overwrites the pieces, and returns their digests; the slot holds nothing until `publish`.

        Args:
          parts: path and box -> items, as arrays of devices or of NumPy.
        """
        self.drop()
        return tuple(
            self._write(piece, _chunks(as_bytes(_items(parts[piece.path, piece.box]))))
            for piece in self.pieces
        )

    def _write(self, piece: SlotPiece, chunks: Iterable[bytes | memoryview]) -> str:
        digest, offset = xxhash.xxh3_128(), piece.offset
        for chunk in map(memoryview, chunks):
            digest.update(chunk)
            if os.pwrite(self._file, chunk, offset) != len(chunk):
                raise OSError(errno.ENOSPC, "written in part", str(self._data))
            offset += len(chunk)
        return digest.hexdigest()

    def publish(
        self,
        digests: tuple[str, ...],
        *,
        step: int,
        seq: int,
        nonce: str,
        progress: Mapping[str, Any],
    ) -> None:
        """Writes the index; from now on the slot holds the state whole."""
        self._publish(
            SlotIndex(
                step=step,
                seq=seq,
                nonce=nonce,
                progress=progress,
                pieces=self.pieces,
                digests=digests,
            )
        )

    def _publish(self, index: SlotIndex) -> None:
        temporary = self._index.with_suffix(".tmp")
        temporary.write_bytes(_encoded(index))
        temporary.replace(self._index)
        self.index = index

    def sent(self) -> tuple[int, Iterator[bytes]]:
        """Returns the slot for another host: the number of bytes, and the bytes in parts."""
        assert self.index is not None
        index = _encoded(self.index)
        return sum(piece.size for piece in self.pieces) + len(index), self._sent(index)

    def _sent(self, index: bytes) -> Iterator[bytes]:
        yield index
        for piece in self.pieces:
            for start in range(0, piece.size, CHUNK_BYTES):
                size = min(CHUNK_BYTES, piece.size - start)
                yield os.pread(self._file, size, piece.offset + start)

    def receive(
        self, size: int, read: Callable[[int], bytes], *, key: StateKey | None = None
    ) -> None:
        """Overwrites the slot with one that another host has sent, and publishes it if it is whole.

        Args:
          size: number of bytes that were sent.
          read: returns the next bytes, at most as many as it is asked for.
          key: the state that was asked for; None: any.

        Raises:
          MemoryDamaged: they are not of these pieces or that state, or a piece has another digest.
          OSError: they can't be written; from `read` too.
        """
        held = sum(piece.size for piece in self.pieces)
        if not 0 < size - held <= MAX_INDEX_BYTES:
            raise MemoryDamaged(f"{self._data}: {size} bytes were sent, with {held} of pieces")
        try:
            index = _decoded(b"".join(_received(size - held, read)))
        except (OtherFormat, ValueError) as error:
            raise MemoryDamaged(f"{self._data}: {error}") from error
        if index.pieces != self.pieces:
            raise MemoryDamaged(f"{self._data}: the pieces of another state were sent")
        if key not in (None, index.key):
            raise MemoryDamaged(f"{self._data}: {index.key} was sent, {key} was asked for")
        self.drop()
        found = tuple(self._write(piece, _received(piece.size, read)) for piece in self.pieces)
        if index.digests != found:
            damaged = next(
                piece.path
                for piece, own, sent in zip(self.pieces, found, index.digests, strict=True)
                if own != sent
            )
            raise MemoryDamaged(f"{self._data}: {damaged} has not the digest that was sent with it")
        self._publish(index)

    def read(self, shapes: Tree) -> Tree:
        """Returns the state on this host's devices; every device's copy is verified.

        Args:
          shapes: nested dict of jax.ShapeDtypeStruct with shardings, of which the pieces are.

        Raises:
          MemoryDamaged: the bytes on a device are not those that were written.
          OSError: the file can't be read.
        """
        assert self.index is not None
        digests = dict(zip(self.pieces, self.index.digests, strict=True))
        by_path: dict[str, dict[Box, SlotPiece]] = {}
        for piece in self.pieces:
            by_path.setdefault(piece.path, {})[piece.box] = piece
        arrays = [
            self._array(leaf, by_path[path], digests)
            for path, (_, leaf) in named_arrays(shapes).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(shapes), arrays)

    def _array(
        self, leaf: Any, boxes: Mapping[Box, SlotPiece], digests: Mapping[SlotPiece, str]
    ) -> jax.Array:
        """Returns an array with the shape, dtype and sharding of `leaf`, from its pieces."""
        held = {box: self._items(piece, leaf.dtype) for box, piece in boxes.items()}
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        parts = {device: box_of(index or (), leaf.shape) for device, index in indices.items()}
        placed = {
            device: jax.device_put(held[box], device, may_alias=False)
            for device, box in parts.items()
        }
        for device, box in parts.items():
            found = xxhash.xxh3_128_hexdigest(as_bytes(np.asarray(placed[device])))
            if found != digests[boxes[box]]:
                raise MemoryDamaged(
                    f"{self._data}: {boxes[box].path} has digest {found}, "
                    f"{digests[boxes[box]]} was written"
                )
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, list(placed.values())
        )

    def _items(self, piece: SlotPiece, dtype: Any) -> np.ndarray:
        data = bytearray(piece.size)
        view, done = memoryview(data), 0
        while done < piece.size:
            count = os.preadv(self._file, [view[done:]], piece.offset + done)
            if count == 0:
                raise MemoryDamaged(f"{self._data}: ends before {piece.path}")
            done += count
        shape = [stop - start for start, stop in piece.box]
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


def oldest(slots: Sequence[Slot]) -> Slot:
    """Returns the slot to overwrite: one that holds nothing, or the state that was trained first.

    A copy that arrives after a rollback has a higher step than those that follow, and an older
    start record; no run continues from it.
    """

    def age(slot: Slot) -> tuple[int, int]:
        return (-1, -1) if slot.index is None else (slot.index.seq, slot.index.step)

    return min(slots, key=age)


def parts_of(state: Tree, pieces: Sequence[SlotPiece]) -> dict[Key, jax.Array]:
    """Returns the items of the pieces of a state, each as an array of one device."""
    shards = {
        (path, box_of(shard.index, info.shape)): shard
        for path, (info, array) in named_arrays(state).items()
        for shard in array.addressable_shards
    }
    return {(piece.path, piece.box): shards[piece.path, piece.box].data for piece in pieces}


def _encoded(index: SlotIndex) -> bytes:
    return encode_checksummed({codec.FORMAT: FORMAT, **codec.encode(index)})


def _decoded(data: bytes) -> SlotIndex:
    fields = decode_checksummed(data, number=FORMAT)
    del fields[codec.FORMAT]
    return codec.decode(SlotIndex, fields)


def _items(part: Any) -> np.ndarray:
    return device_use.fetch([part])[0] if isinstance(part, jax.Array) else np.asarray(part)


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _received(size: int, read: Callable[[int], bytes]) -> Iterator[bytes]:
    while size:
        chunk = read(min(CHUNK_BYTES, size))
        if not chunk:
            raise ConnectionError("the other host sent less than a whole state")
        size -= len(chunk)
        yield chunk
