"""Restores a stock Orbax checkpoint after flips of single bits: SOURCE FOLDER FIRST_HIT NUM_HITS.

Prints a line when a bit is flipped and a line with what Orbax did, for each hit.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tools.experiments.corruption import TIMEOUT_SECONDS, flip
from tools.experiments.delta_size import read

RIGHT = "restored right"


def main(source: str, folder: str, first: str, num_hits: str) -> None:
    """Saves the arrays of a step with Orbax alone, and flips a bit of a copy for each hit."""
    jax.config.update("jax_platforms", "cpu")
    arrays = {
        path.strip("/").replace("/", "."): array for path, array in read(Path(source)).items()
    }
    clean = Path(folder, "clean")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(clean, arrays)
    assert restored(clean, wanted=arrays) == RIGHT
    for hit in range(int(first), int(num_hits)):
        copy = Path(folder, str(hit))
        shutil.copytree(clean, copy)
        kind = flip(copy, number=hit)
        print(json.dumps({"kind": kind}), flush=True)
        signal.alarm(TIMEOUT_SECONDS)  # Ends the process if Orbax hangs.
        outcome = restored(copy, wanted=arrays)
        signal.alarm(0)
        print(json.dumps({"kind": kind, "outcome": outcome}), flush=True)
        shutil.rmtree(copy)


def restored(copy: Path, *, wanted: dict[str, Any]) -> str:
    """Returns whether a restore raised, or gave the right or other bytes."""
    like = {path: jax.ShapeDtypeStruct(a.shape, a.dtype) for path, a in wanted.items()}
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(copy, like)
    except Exception:  # noqa: BLE001  Orbax and TensorStore raise many kinds.
        return "error"
    equal = found.keys() == wanted.keys() and all(
        np.asarray(found[path]).tobytes() == array.tobytes() for path, array in wanted.items()
    )
    return RIGHT if equal else "restored wrong, silently"


if __name__ == "__main__":
    main(*sys.argv[1:])
