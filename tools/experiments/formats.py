"""Size, CPU time and damage of one state in the usual file formats.

    python -m tools.experiments.formats   # needs safetensors, which is in the extra `test`

Exits 1 if safetensors is not the smallest, or does not need the least CPU time to be read.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file, save_file

from tools.experiments.training_process import ROOT, write_result

FOLDER = ROOT / "experiments" / "formats"
NUM_ARRAYS, SHAPE = 16, (256, 512)
ROUNDS, FLIPS = 15, 200
Arrays = dict[str, np.ndarray]


def save_npz(path: Path, arrays: Arrays) -> None:
    """Saves an uncompressed npz file."""
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load_npz(path: Path) -> Arrays:
    """Reads an npz file."""
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def save_compressed(path: Path, arrays: Arrays) -> None:
    """Saves a compressed npz file."""
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def save_pickle(path: Path, arrays: Arrays) -> None:
    """Saves a pickle."""
    path.write_bytes(pickle.dumps(arrays, protocol=5))


def load_pickle(path: Path) -> Arrays:
    """Reads a pickle that this program has written."""
    return pickle.loads(path.read_bytes())  # noqa: S301


def save_orbax(path: Path, arrays: Arrays) -> None:
    """Saves an Orbax checkpoint."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, arrays)


def load_orbax(path: Path) -> Arrays:
    """Reads an Orbax checkpoint."""
    like = {name: jax.ShapeDtypeStruct(SHAPE, np.float32) for name in names()}
    with ocp.StandardCheckpointer() as checkpointer:
        return {name: np.asarray(array) for name, array in checkpointer.restore(path, like).items()}


FORMATS: dict[str, tuple[Callable[[Path, Arrays], Any], Callable[[Path], Arrays]]] = {
    "npz": (save_npz, load_npz),
    "npz, compressed": (save_compressed, load_npz),
    "pickle": (save_pickle, load_pickle),
    "safetensors": (lambda path, arrays: save_file(arrays, path), load_file),
    "orbax": (save_orbax, load_orbax),
}


def names() -> list[str]:
    """Returns the names of the arrays."""
    return [f"array_{number:02d}" for number in range(NUM_ARRAYS)]


def files_of(path: Path) -> list[Path]:
    """Returns the files with at least one byte at a path."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in found if file.is_file() and file.stat().st_size]


def outcome(path: Path, load: Callable[[Path], Arrays], wanted: Arrays) -> str:
    """Returns whether reading raises, or gives the right or other bytes."""
    try:
        found = load(path)
        equal = found.keys() == wanted.keys() and all(
            np.asarray(found[name]).tobytes() == array.tobytes() for name, array in wanted.items()
        )
    except Exception:  # noqa: BLE001  Each format raises errors of its own.
        return "error"
    return "right" if equal else "wrong, silently"


def after_flips(folder: Path, name: str, wanted: Arrays) -> Counter[str]:
    """Counts the outcomes of reads after a flip of a single bit, each in an intact copy."""
    save, load = FORMATS[name]
    clean, copy = folder / "clean", folder / "copy"
    save(clean, wanted)
    assert outcome(clean, load, wanted) == "right"
    found: Counter[str] = Counter()
    for number in range(FLIPS):
        chance = random.Random(number)
        (shutil.copytree if clean.is_dir() else shutil.copy)(clean, copy)
        files = files_of(copy)
        (file,) = chance.choices(files, [file.stat().st_size for file in files])
        data = bytearray(file.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        found[outcome(copy, load, wanted)] += 1
        remove(copy)
    remove(clean)
    return found


def remove(path: Path) -> None:
    """Deletes a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def cpu_seconds(call: Callable[..., Any], *arguments: Any) -> float:
    """Returns the CPU time of all threads of this process during a call."""
    began = time.process_time()
    call(*arguments)
    return time.process_time() - began


def main() -> int:
    """Measures all formats in turns and writes results/results.json."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=SHAPE).astype(np.float32) for name in names()}
    raw = sum(array.nbytes for array in arrays.values())
    written: dict[str, list[float]] = {name: [] for name in FORMATS}
    read: dict[str, list[float]] = {name: [] for name in FORMATS}
    sizes, flips = {}, {}
    with tempfile.TemporaryDirectory(prefix="formats-") as name:
        folder = Path(name)
        for _ in range(ROUNDS):
            for kind, (save, load) in FORMATS.items():
                path = folder / "state"
                written[kind].append(cpu_seconds(save, path, arrays))
                read[kind].append(cpu_seconds(load, path))
                sizes[kind] = sum(file.stat().st_size for file in files_of(path)) / raw
                remove(path)
        for kind in FORMATS:
            flips[kind] = after_flips(folder, kind, arrays)
    writes, reads = (
        {kind: statistics.median(times[kind]) for kind in FORMATS} for times in (written, read)
    )
    rows = {
        kind: {
            "bytes_by_raw_bytes": round(sizes[kind], 4),
            "write_cpu_by_npz": round(writes[kind] / writes["npz"], 2),
            "read_cpu_by_npz": round(reads[kind] / reads["npz"], 2),
            "after_a_flip": flips[kind],
        }
        for kind in FORMATS
    }
    result = {
        "claim": "safetensors is the smallest format and needs the least CPU time to be read",
        "holds": min(sizes, key=sizes.__getitem__) == "safetensors"
        and min(reads, key=reads.__getitem__) == "safetensors",
        "raw_bytes": raw,
        "formats": rows,
    }
    write_result(FOLDER / "results" / "results.json", result)
    print(json.dumps(result, indent=2))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
