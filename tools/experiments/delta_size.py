"""Share of a training state that changes between checkpoints, and savings of a delta.

    python -m tools.experiments.delta_size [RUN_DIR]

Trains a run, unless one of its config is given. Exits 1 if a lossless delta of the state saves half
of the bytes at some distance.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore
import zstandard

from tools.experiments.plans import rounded
from tools.experiments.training_process import ROOT, TrainingProcess, jaxres, write_result

FOLDER = ROOT / "experiments" / "delta_size"
PAIRS = ((300, 301), (290, 300), (200, 300), (100, 200))
"""Steps of which the second is saved as a delta from the first."""
THRESHOLD = 1e-6
"""The published recipe leaves out the numbers that have changed by less."""
PARTS = {"params": "params/", "first moments": "/mu/", "second moments": "/nu/"}
Arrays = dict[str, np.ndarray]


def main() -> int:
    """Trains, compares the pairs and writes results/results.json."""
    with tempfile.TemporaryDirectory(prefix="delta-size-") as folder:
        run_dir = Path(sys.argv[1]) if sys.argv[1:] else Path(folder, "run")
        if not sys.argv[1:]:
            cache = f"data.cache_dir={folder}/cache"
            TrainingProcess(FOLDER / "run.yaml", run_dir=run_dir, overrides=(cache,)).finish()
        rows = map(json.loads, jaxres("checkpoints", "list", str(run_dir), "--json").splitlines())
        paths = {row["step"]: run_dir / row["path"] for row in rows}
        pairs = {f"{old} to {new}": compare(paths[old], paths[new]) for old, new in PAIRS}
    result = {
        "claim": "a lossless delta of an Adam state saves less than half of its bytes",
        "holds": all(pair["all"]["saved_by_delta"] < 0.5 for pair in pairs.values()),
        "pairs": rounded(pairs, 7),
    }
    write_result(FOLDER / "results" / "results.json", result)
    print(json.dumps(result, indent=2))
    return 0 if result["holds"] else 1


def compare(old_dir: Path, new_dir: Path) -> dict[str, Any]:
    """Returns the facts of each part of the state, of all of it, and of a bfloat16 copy."""
    old, new = read(old_dir), read(new_dir)
    parts = {name: (joined(old, mark), joined(new, mark)) for name, mark in PARTS.items()}
    before = np.concatenate([part for part, _ in parts.values()])
    parts["all"] = (before, np.concatenate([part for _, part in parts.values()]))
    found = {name: facts(*both) for name, both in parts.items()}
    half = [array.astype(ml_dtypes.bfloat16) for array in parts["params"]]
    return {**found, "params as bfloat16": facts(*half)}


def read(step_dir: Path) -> Arrays:
    """Returns the arrays of a step, by path; reads with TensorStore, without jaxres."""
    base = {"driver": "file", "path": f"{step_dir}/state/"}
    names = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
    arrays = {}
    for name in sorted(key.decode() for key in names if key.endswith(b"/zarr.json")):
        path = name.removesuffix("zarr.json")
        store = {"driver": "ocdbt", "base": base, "path": path}
        array = tensorstore.open({"driver": "zarr3", "kvstore": store}).result()
        arrays[path.replace(".", "/")] = np.asarray(array.read().result())
    return arrays


def joined(arrays: Arrays, mark: str) -> np.ndarray:
    """Returns the numbers of one part of the state."""
    chosen = [array for path, array in arrays.items() if mark in f"/{path}"]
    return np.concatenate([array.reshape(-1) for array in chosen if array.dtype == np.float32])


def facts(old: np.ndarray, new: np.ndarray) -> dict[str, Any]:
    """Returns the changes between two arrays, and the delta's size relative to the uncompressed."""
    size = new.dtype.itemsize
    before, after = (array.view(np.uint8).reshape(-1, size) for array in (old, new))
    xor = before ^ after
    full, delta = compressed(after), compressed(xor)
    is_far = np.abs(new.astype(np.float32) - old.astype(np.float32)) > THRESHOLD
    return {
        "numbers": len(new),
        "changed_numbers": float(np.mean(xor.any(axis=1))),
        "changed_bytes_low_to_high": [float(np.mean(xor[:, at] != 0)) for at in range(size)],
        "changed_bits": float(np.unpackbits(xor).mean()),
        "full": full,
        "delta": delta,
        "saved_by_delta": 1 - min(delta.values()),
        "saved_over_compressed_full": 1 - min(delta.values()) / min(full.values()),
        "lossy": lossy(old.astype(np.float32), new.astype(np.float32), is_far),
    }


def compressed(data: np.ndarray) -> dict[str, float]:
    """Returns compressed bytes by uncompressed ones; the bytes of equal weight lie together."""
    grouped = np.ascontiguousarray(data.T).tobytes()
    sizes = {
        "zlib 6": len(zlib.compress(grouped, 6)),
        "zstd 3": len(zstandard.ZstdCompressor(3).compress(grouped)),
    }
    return {name: size / len(grouped) for name, size in sizes.items()}


def lossy(old: np.ndarray, new: np.ndarray, is_far: np.ndarray) -> dict[str, float]:
    """Returns the savings of the published recipe and the relative errors of omitted changes."""
    restored = np.where(is_far, new, old)
    errors = np.abs(restored - new)[new != 0] / np.abs(new[new != 0])
    kept = float(np.mean(is_far))
    return {
        "numbers_kept": kept,
        # Beside each number of 4 bytes its index of 4, or a bit for each of all numbers.
        "saved": 1 - min(2 * kept, kept + 1 / 32),
        **{f"relative_error_p{at}": float(np.percentile(errors, at)) for at in (50, 99)},
    }


if __name__ == "__main__":
    sys.exit(main())
