"""Reads and writes safetensors files one tensor at a time, without jax.

The package of that name is not used: it needs all tensors of a file in memory at once, and its
numpy writer (0.8.0) silently writes wrong numbers for an array that is not C-contiguous. Files are
read, not memory-mapped: truncating a mapped file kills the process.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from jaxres.checkpoint.read.manifest import ArrayInfo
from jaxres.faults import ConfigError
from jaxres.storage import files as storage
from jaxres.storage import foreign_json, gcs_objects
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.gcs_objects import Stat
from jaxres.storage.path import GcsPath, RunPath, is_remote, require_inside

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_ADAPTERS = re.compile(r"adapter_config\.json|adapter_model.*|adapters\.(safetensors|npz)")
"""Names that PEFT and MLX give the files of adapters, which are no whole model."""
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
OBJECT_BYTES = 64 * 2**20
"""Most bytes of one request to a bucket."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the format's reference reader."""
_TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BOOL": np.bool_,
}
DTYPES = {code: np.dtype(kind) for code, kind in _TYPES.items()}
"""Type code of the format -> dtype of the numbers; all little-endian."""
TYPE_CODES = {dtype.name: code for code, dtype in DTYPES.items()}
"""Name of a dtype -> type code of the format."""


@dataclass(frozen=True)
class Tensor:
    """Location, dtype and shape of one tensor."""

    file: RunPath
    name: str
    info: ArrayInfo
    """Shape and dtype; the dtype is NumPy's name, or the format's type code if NumPy has none."""
    start: int
    """Offset in the file, in bytes."""
    size: int
    """Size in bytes."""
    generation: Stat | None = None
    """The object of a bucket as it was when the header was read; None: a file of a disk."""

    def read(self) -> np.ndarray:
        """Reads the numbers.

        Raises:
          ConfigError: the type is unknown, or the file was truncated.
          StorageUnavailable: storage could not be read.
        """
        if self.info.dtype not in TYPE_CODES:
            raise broken(self.file, f"{self.name} is of an unknown type: {self.info}")
        return np.frombuffer(self.stored(), np.dtype(self.info.dtype)).reshape(self.info.shape)

    def stored(self) -> bytearray:
        """Reads the bytes of the numbers; raises as `read` does."""
        if is_remote(self.file):
            assert self.generation is not None, self
            return _read_object(self.file, self.generation, self.start, self.start + self.size)
        with (
            storage.typed_errors(self.file),
            open(self.file, "rb", opener=storage.only_files) as file,
        ):
            file.seek(self.start)
            data = bytearray(self.size)
            if file.readinto(data) != self.size:
                raise broken(self.file, f"{self.name} is cut off")
        return data


def _read_object(path: GcsPath, generation: Stat, start: int, stop: int) -> bytearray:
    """Reads a part of an object; the checksum of the whole object can't be compared."""
    data = bytearray()
    while start + len(data) < stop:
        first = start + len(data)
        end = min(stop, first + OBJECT_BYTES)
        data += gcs_objects.read_range(path, generation, start=first, stop=end)
    return data


def broken(path: RunPath, what: str) -> ConfigError:
    """Returns the error for a file that is damaged or incomplete."""
    return ConfigError(
        f"{path}: not a valid safetensors file: {what}. Copy or download it again; nothing was "
        "loaded from it."
    )


def open_file(path: RunPath) -> dict[str, Tensor]:
    """Returns name -> tensor of one file; checks the header against the size of the file.

    Raises:
      ConfigError: the file does not exist, or is not a valid safetensors file.
      StorageUnavailable: storage could not be read.
    """
    generation = gcs_objects.stat(path) if is_remote(path) else None
    if is_remote(path):
        header, size = _object_header(path, generation)
    else:
        header, size = _file_header(path)
    length = len(header)
    try:
        fields = foreign_json.loads(header)
        metadata = dict(fields.pop("__metadata__", None) or {})
        tensors = [
            replace(_tensor(path, name, entry, 8 + length), generation=generation)
            for name, entry in fields.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise broken(path, f"its header can't be read ({error!r})") from error
    _refuse_quantized(path, metadata)
    end = 8 + length
    for tensor in sorted(tensors, key=lambda t: (t.start, t.size)):
        if tensor.start != end:
            raise broken(path, f"{tensor.name} begins at byte {tensor.start}, expected {end}")
        end += tensor.size
    if end != size:
        raise broken(path, f"it has {size} bytes, its header describes {end}")
    return {tensor.name: tensor for tensor in tensors}


NO_FILE = "no such file. Give a safetensors file, or a folder of them."


def _file_header(path: Path) -> tuple[bytes, int]:
    """Returns the header of a file of a disk, and its size."""
    with storage.typed_errors(path):
        if not storage.is_file(path):
            raise ConfigError(f"{path}: {NO_FILE}")
    with storage.typed_errors(path), open(path, "rb", opener=storage.only_files) as file:
        size = os.fstat(file.fileno()).st_size
        storage.refuse_lfs_pointer(file.read(len(storage.LFS_POINTER)), path)
        file.seek(0)
        return file.read(_header_length(path, file.read(8), size)), size


def _object_header(path: GcsPath, generation: Stat | None) -> tuple[bytes, int]:
    """Returns the header of an object of a bucket, and its size."""
    if generation is None:
        raise ConfigError(f"{path}: {NO_FILE}")
    size = generation.size
    begin = bytes(_read_object(path, generation, 0, min(size, len(storage.LFS_POINTER))))
    storage.refuse_lfs_pointer(begin, path)
    length = _header_length(path, begin[:8], size)
    return bytes(_read_object(path, generation, 8, 8 + length)), size


def _header_length(path: RunPath, begin: bytes, size: int) -> int:
    length = int.from_bytes(begin, "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise broken(path, f"a header of {length} bytes in a file of {size}")
    return length


def _refuse_quantized(path: RunPath, metadata: Mapping[str, Any]) -> None:
    """Raises ConfigError if a file's metadata say that its numbers are quantized."""
    for key, value in metadata.items():
        if "quant" in str(key).lower() and value not in ("", "none", "null", "{}"):
            raise ConfigError(
                f"{path}: its __metadata__ has {key}: {str(value)[:200]}: the numbers are "
                "quantized, which jaxres does not convert. Convert the model to bfloat16 with the "
                "program that quantized it, or take the original."
            )


def _tensor(path: RunPath, name: str, entry: Mapping[str, Any], base: int) -> Tensor:
    code, shape = entry["dtype"], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)) or stop < start:
        raise ValueError(f"{name}: shape {shape}, bytes {start} to {stop}")
    dtype = DTYPES.get(code)
    if dtype is not None and math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"{name}: {code}{list(shape)} in {stop - start} bytes")
    info = ArrayInfo(dtype.name if dtype is not None else str(code), shape)
    return Tensor(path, name, info, base + start, stop - start)


def is_one_file(path: RunPath) -> bool:
    """Returns whether a path is no folder; in a bucket, where each name can be one: an object."""
    return gcs_objects.stat(path) is not None if is_remote(path) else not storage.is_dir(path)


def open_path(path: RunPath) -> dict[str, Tensor]:
    """Returns name -> tensor of a file, or of a folder with one file or several and their index.

    Raises:
      ConfigError: the path does not exist, a file is damaged or missing, or the files are of
        several models or saves.
      StorageUnavailable: storage could not be read.
    """
    if is_one_file(path):
        return open_file(path)
    index = storage.read(path / INDEX)
    names = sorted(storage.list_names(path))
    files = [name for name in names if name.endswith(".safetensors")]
    adapters = [name for name in names if _ADAPTERS.fullmatch(name)]
    if adapters and (index is not None or not {*files} <= {*adapters}):
        raise ConfigError(
            f"{path}: has {', '.join(adapters[:3])} beside the weights: whether they include these "
            "adapters is not known. Move the files of the adapters away if they do; else merge "
            "them into the weights (with PEFT's `merge_and_unload`) and give the folder of the "
            "result."
        )
    if index is not None:
        tensors = _open_index(path, index)
        named = {tensor.file for tensor in tensors.values()}
        others = [name for name in files if _SHARD.fullmatch(name) and path / name not in named]
        if others:
            raise ConfigError(
                f"{path}: {INDEX} does not name {', '.join(others[:3])}: they are of two saves, or "
                "a copy is not complete. Move the files that are not meant away."
            )
        if SINGLE_FILE in files:
            _refuse_another_save(path, tensors)
        return tensors
    shards = [name for name in files if _SHARD.fullmatch(name)]
    if SINGLE_FILE in files and shards:
        raise ConfigError(
            f"{path}: has {SINGLE_FILE} and {shards[0]}, and no {INDEX}: they are of two saves. "
            f"Give the path of {SINGLE_FILE}, or put the index of the others there and move "
            f"{SINGLE_FILE} away."
        )
    if SINGLE_FILE in files or len(files) == 1:
        return open_file(path / (SINGLE_FILE if SINGLE_FILE in files else files[0]))
    present = f"several ({', '.join(files[:3])}, ...) and no {INDEX}" if files else "none"
    raise ConfigError(
        f"{path}: expected one safetensors file here, or {INDEX}; there are {present}."
    )


def _refuse_another_save(folder: RunPath, indexed: Mapping[str, Tensor]) -> None:
    """Raises ConfigError unless the index names the single file, or both have the same tensors."""
    if any(tensor.file == folder / SINGLE_FILE for tensor in indexed.values()):
        return
    single = open_file(folder / SINGLE_FILE)
    different = sorted(single.keys() ^ indexed.keys()) or (
        name
        for name, tensor in single.items()
        if (tensor.info, tensor.size) != (indexed[name].info, indexed[name].size)
        or tensor.stored() != indexed[name].stored()
    )
    if (name := next(iter(different), None)) is not None:
        raise ConfigError(
            f"{folder}: {SINGLE_FILE} and the files of {INDEX} differ (in {name}): one is an older "
            "save, and which is meant is not known. Move the files that are not meant to another "
            f"folder, or give the path of {SINGLE_FILE}."
        )


def _open_index(folder: RunPath, index: bytes) -> dict[str, Tensor]:
    storage.refuse_lfs_pointer(index, folder / INDEX)
    try:
        weight_map: dict[str, str] = foreign_json.loads(index)["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise broken(folder / INDEX, f"it can't be read ({error!r})") from error
    try:
        files = [require_inside(str(file)) for file in files]
    except ValueError as error:
        raise ConfigError(
            f"{folder / INDEX}: {error}. Put the files there, and give their names relative to it."
        ) from error
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in open_file(folder / file).items():
            if weight_map.get(name) != file:
                expected = weight_map.get(name, "no file")
                raise broken(folder / file, f"it has {name}, which {INDEX} assigns to {expected}")
            tensors[name] = tensor
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise broken(
            folder / weight_map[absent[0]], f"{absent[0]}, which {INDEX} assigns to it, is missing"
        )
    return tensors


def write_file(
    path: Path, infos: Mapping[str, ArrayInfo], contents: Iterator[tuple[str, np.ndarray]]
) -> None:
    """Writes a file durably; consumes one item of `contents` for each info, in the same order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Some readers require it.
    end = 0
    for name, info in infos.items():
        size = math.prod(info.shape) * np.dtype(info.dtype).itemsize
        header[name] = {
            "dtype": TYPE_CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = canonical_json(header)
    text += b" " * (-len(text) % 8)
    with storage.typed_errors(path), path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for expected, info in infos.items():
            name, array = next(contents)
            assert (name, array.dtype.name, array.shape) == (expected, info.dtype, info.shape)
            _write_numbers(file, array)
        file.flush()
        os.fsync(file.fileno())


def _write_numbers(file: IO[bytes], array: np.ndarray) -> None:
    flat = np.ascontiguousarray(array).reshape(-1)
    file.write(flat.view(np.uint8).data)
