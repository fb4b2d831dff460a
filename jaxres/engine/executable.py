"""Compiled programs as files, and the key under which one may be used again.

A key is a digest over all that decides what is compiled and how, so that a file under another key
is another program's. A file is checked by its own digest before anything in it is looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
import optax
from jax.experimental import serialize_executable

from jaxres.faults import TypedEnd
from jaxres.storage import files

MAGIC = b"jaxres compiled 1\n"
SUFFIX = ".compiled"
DECIDING = ("XLA_", "JAX_", "NPROC", "LIBTPU_INIT_ARGS", "TF_XLA_", "TF_CUDNN_", "NVIDIA_TF32_")
"""Beginnings of the names of environment variables that XLA reads, and that no host has for itself
alone."""
ELSEWHERE = ("jax_compilation_cache_dir",)
"""Settings of JAX's that say where things are, not what they are."""


class Unusable(Exception):
    """A file is there and no program comes of it."""


def key(words: Mapping[str, Any]) -> str:
    """Returns the digest of all that decides.

    >>> key({"a": 1, "b": 2}) == key({"b": 2, "a": 1}), key({"a": 1}) == key({"a": 2})
    (True, False)
    """
    text = json.dumps(words, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def here(devices: Sequence[Any], *, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what decides besides the program itself: libraries, machine, devices, settings.

    Args:
      devices: of the mesh, in its order.
      environment: this process's.
    """
    modules = {"jax": jax, "jaxlib": jaxlib, "flax": flax, "optax": optax, "numpy": np}
    settings = jax.config.values.items()
    return {
        "versions": {name: module.__version__ for name, module in modules.items()},
        "python": sys.version,
        "processor": _processor(),
        "platform": [devices[0].platform, devices[0].client.platform_version],
        "devices": [[d.id, d.process_index, d.device_kind] for d in devices],
        "processes": jax.process_count(),
        "environment": {n: v for n, v in environment.items() if n.startswith(DECIDING)},
        "settings": {name: repr(value) for name, value in settings if name not in ELSEWHERE},
    }


def _processor() -> str:
    """Returns model and abilities of the first core; programs are compiled for these."""
    text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    telling = ("model", "flags", "Features", "CPU ", "vendor", "cpu family", "stepping")
    return hashlib.sha256(
        "\n".join(line for line in text.splitlines() if line.startswith(telling)).encode()
    ).hexdigest()


def sources(folder: Path, *, since: float) -> str | None:
    """Returns the digest of a package's Python files, or None if one was changed meanwhile.

    Args:
      folder: the package's.
      since: wall-clock time from before its import; what is imported is older.
    """
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        if path.stat().st_ctime >= since:
            return None
        total.update(b"\0".join([str(path.relative_to(folder)).encode(), path.read_bytes(), b""]))
    return total.hexdigest()


def file_of(folder: Path, key: str) -> Path:
    """Returns where the programs of a key are kept."""
    return folder / f"{key}{SUFFIX}"


def dump(program: Any) -> bytes:
    """Returns a file's content.

    Raises:
      Unusable: XLA can't turn the program into bytes.
    """
    try:
        content = pickle.dumps(serialize_executable.serialize(program))
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise Unusable(f"XLA does not hand it out: {error}") from error
    return MAGIC + hashlib.sha256(content).digest() + content


def load(data: bytes, devices: Sequence[Any]) -> Any:
    """Returns the compiled program of a file's content.

    Raises:
      Unusable: it is damaged, or this machine does not take it.
    """
    head, content = data[: len(MAGIC) + 32], data[len(MAGIC) + 32 :]
    if head != MAGIC + hashlib.sha256(content).digest():
        raise Unusable("its content is not what was written")
    try:
        parts = pickle.loads(content)
        return serialize_executable.deserialize_and_load(*parts, execution_devices=devices)
    except (
        jax.errors.JaxRuntimeError,
        *(pickle.UnpicklingError, ValueError, TypeError, KeyError, AttributeError, ImportError),
    ) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unusable(f"it can't be loaded here: {first[:200]}") from error


def keep(folder: Path, key: str, data: bytes, *, most: int) -> None:
    """Writes a file, and removes the oldest of more than `most`.

    Raises:
      TypedEnd: storage refuses.
    """
    files.make_dir(folder)
    files.replace(file_of(folder, key), data)
    with files.typed_errors(folder):
        names = [name for name in files.list_names(folder) if name.endswith(SUFFIX)]
        times: dict[str, int] = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # Another process has removed it.
                times[name] = (folder / name).stat().st_mtime_ns
        for name in sorted(times, key=lambda name: times[name])[:-most]:
            (folder / name).unlink(missing_ok=True)


def read(folder: Path, key: str) -> bytes | None:
    """Returns the content of a key's file; None: there is none.

    Raises:
      Unusable: storage does not give it.
    """
    try:
        return files.read(file_of(folder, key))
    except (TypedEnd, OSError) as error:
        raise Unusable(str(error)) from error
