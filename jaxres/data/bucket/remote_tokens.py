"""Opens a token folder in a bucket without copying its tokens: rows are read by ranges.

The small files of the folder are copied to data.cache_dir, so the digests are the ones that the
bucket's checksum covers. Blocks of the tokens, and of long offsets, are fetched when a row needs
them. All objects are those of one generation: one that changes afterwards is an error.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxres.config.schema.data import DataSection
from jaxres.data.bucket import download_cache
from jaxres.data.bucket.block_cache import BlockCache
from jaxres.data.bucket.remote_items import ReadPool, RemoteFile, RemoteItems
from jaxres.data.tokens.token_digests import CheckedBlocks
from jaxres.data.tokens.token_folder import (
    DTYPES,
    OFFSET_BYTES,
    OFFSETS_READ_BYTES,
    CacheDamaged,
    Meta,
    TokenFolder,
    TokensDamaged,
    check_ends,
    check_shape,
    check_size,
    open_digests,
    open_offsets,
    read_meta,
)
from jaxres.faults import ConfigError, RunError, StorageRefused
from jaxres.storage import gcs_objects
from jaxres.storage.files import fault_of
from jaxres.storage.path import GcsPath

COPIED_BYTES = 64 * 2**20
"""Largest size of the other files that are copied, such as a tokenizer."""
BLOCK_BYTES = (2**12, 2**24)
"""Smallest and largest block that is fetched alone. Folders with others are copied whole."""
OUTAGE_SHARE = 0.5
"""Share of data.timeout_seconds during which a bucket that does not answer is asked again."""
HEADER_BYTES = 4096


def open_in_bucket(
    config: DataSection, remote: GcsPath, *, progress: Callable[[str], None]
) -> TokenFolder | None:
    """Opens the token folder; None: it has no digests, so it must be copied.

    Raises:
      ConfigError: the folder does not exist, or it is damaged in the bucket.
      CacheDamaged: a copy on this machine is damaged; it is removed.
      StorageRefused: this account may not read the folder or write to the local disk.
      StorageUnavailable: the bucket does not respond, or the local disk is full.
    """
    root = config.cache_dir.expanduser().absolute()
    try:
        objects = download_cache.list_objects(remote, ())
        if not {"meta.json", "tokens.bin", "offsets.npy", "digests.npy"} <= set(objects):
            return None
        copied = {name: stat for name, stat in objects.items() if _is_copied(name, stat)}
        folder = download_cache.copy_objects(
            remote, copied, root=root / "staged", progress=progress
        )
        blame = _blame(folder, copied)
        try:
            meta = read_meta(folder)
            if not _has_good_blocks(meta):
                return None
            cache = _open_cache(root / "blocks", limit_bytes=round(config.bucket_cache_gb * 1e9))
            opener = _Opener(config, remote, objects, folder, meta, cache, blame)
            return opener.open()
        except TokensDamaged as error:
            raise blame(error) from error
    except (ConfigError, StorageRefused) as error:
        if isinstance(error, TokensDamaged):
            raise
        raise type(error)(f"{download_cache.KEY}: {error}") from error


def _is_copied(name: str, stat: gcs_objects.Stat) -> bool:
    """Returns whether an object is copied whole, because it is small or needed as a whole."""
    if name in ("tokens.bin", "offsets.npy"):
        return name == "offsets.npy" and stat.size <= OFFSETS_READ_BYTES
    return name in ("meta.json", "digests.npy") or stat.size <= COPIED_BYTES


def _has_good_blocks(meta: Meta) -> bool:
    low, high = BLOCK_BYTES
    size = meta.block_bytes
    return size is not None and low <= size <= high and size % OFFSET_BYTES == 0


def _open_cache(folder: Path, *, limit_bytes: int) -> BlockCache:
    try:
        return BlockCache(folder, limit_bytes=limit_bytes)
    except OSError as error:
        raise fault_of(error)(
            f"data.cache_dir: {folder} can't be created ({error}). Free space there, or set "
            "data.cache_dir to a folder that can be written."
        ) from error


def _blame(
    folder: Path, copied: Mapping[str, gcs_objects.Stat]
) -> Callable[[TokensDamaged], RunError]:
    """Returns a function that turns damage into its error: the copied file's, else the bucket's."""

    def blame(error: TokensDamaged) -> RunError:
        for name, stat in copied.items():
            if download_cache.crc32c(folder / name) != stat.crc32c:
                download_cache.discard(folder)
                return CacheDamaged(
                    f"{folder / name}: this copy of an object in a bucket is damaged, and removed; "
                    f"the next start copies it again. It made this look damaged: {error.what}"
                )
        return error

    return blame


class _Opener:
    """Opens the arrays of one folder, with their common settings."""

    def __init__(
        self,
        config: DataSection,
        remote: GcsPath,
        objects: Mapping[str, gcs_objects.Stat],
        folder: Path,
        meta: Meta,
        cache: BlockCache,
        blame: Callable[[TokensDamaged], RunError],
    ) -> None:
        self._outage_seconds = OUTAGE_SHARE * config.timeout_seconds
        self._remote = remote
        self._objects = objects
        self._folder = folder
        self._meta = meta
        self._cache = cache
        self._blame = blame
        self._pool = ReadPool()

    def open(self) -> TokenFolder:
        """Returns the folder; reads the ends of long offsets."""
        meta, remote = self._meta, self._remote
        check_size(self._objects["tokens.bin"].size, meta, remote / "tokens.bin")
        of_tokens, of_offsets = open_digests(self._folder / "digests.npy", meta)
        tokens = self._items("tokens.bin", DTYPES[meta.dtype], 0, of_tokens)
        if (self._folder / "offsets.npy").exists():
            offsets = open_offsets(self._folder / "offsets.npy", meta)
            assert meta.block_bytes is not None, self._folder
            blocks = CheckedBlocks(offsets, of_offsets, block_bytes=meta.block_bytes)
        else:
            offsets = blocks = self._remote_offsets(of_offsets)
        corpus = TokenFolder(
            folder=self._folder,
            meta=meta,
            tokens=tokens,
            offsets=offsets,
            token_blocks=tokens,
            offset_blocks=blocks,
            on_damage=self._blame,
            source=remote,
        )
        if isinstance(blocks, CheckedBlocks):
            corpus.check_offsets(np.array([0]), np.array([len(offsets)]))
        return corpus

    def _remote_offsets(self, digests: NDArray[np.uint64]) -> RemoteItems:
        path, size_bytes = self._remote / "offsets.npy", self._objects["offsets.npy"].size
        head = io.BytesIO(self._file("offsets.npy").read(0, min(HEADER_BYTES, size_bytes)))
        try:
            version = np.lib.format.read_magic(head)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read(head)
        except (ValueError, KeyError, EOFError) as error:
            raise TokensDamaged(f"{path} can't be read: {error}") from error
        check_shape(dtype, shape, self._meta, path)
        if size_bytes != head.tell() + shape[0] * OFFSET_BYTES:
            raise TokensDamaged(f"{path} has {size_bytes:,} bytes, less or more than its header")
        offsets = self._items("offsets.npy", dtype, head.tell(), digests)
        check_ends(offsets, self._meta, path)
        return offsets

    def _file(self, name: str) -> RemoteFile:
        return RemoteFile(self._remote / name, self._objects[name], self._outage_seconds)

    def _items(
        self, name: str, dtype: np.dtype, header_bytes: int, digests: NDArray[np.uint64]
    ) -> RemoteItems:
        assert self._meta.block_bytes is not None, name
        return RemoteItems(
            self._file(name),
            dtype=dtype,
            header_bytes=header_bytes,
            digests=digests,
            block_bytes=self._meta.block_bytes,
            cache=self._cache,
            pool=self._pool,
            on_damage=self._damaged,
        )

    def _damaged(self, what: str) -> RunError:
        return self._blame(
            TokensDamaged(
                what,
                "Copy the object to the bucket again, or write the folder again. `jaxres data "
                "verify CONFIG.yaml` lists every damaged block.",
            )
        )
