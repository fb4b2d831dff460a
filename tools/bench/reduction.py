"""Benchmark of train.reduction=invariant: its step against the fast one with equal microbatches.

    python tools/bench/reduction.py [--blocks 20] [--steps 10]

With one device and with two virtual ones, under data parallelism and fsdp. The fast step computes
its rows in as many parts as the invariant one, so that the ratio is the price of the fixed order
alone; a second ratio is that to the fast step without microbatches. Both steps are compiled in this
process and take turns. Exits 1 if a first ratio is above 1.10.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("NPROC", str(len(os.sched_getaffinity(0))))

import guards  # tools/bench/guards.py
import jax
import numpy as np

from jaxres.config.schema.model import GptModel
from jaxres.config.schema.run_config import MeshSection
from jaxres.engine import mesh as meshes
from jaxres.engine.invariant_reduction import InvariantReduction

LIMIT = 1.10
ROWS, LENGTH, SHARDS = 32, 64, 8
MODEL = GptModel(num_layers=2, d_model=128, num_heads=4, compute_dtype="float32")
MESHES = {"1 device": {"data": 1}, "data=2": {"data": 2}, "fsdp=2": {"data": 1, "fsdp": 2}}


def ratios(mesh: Any, *, blocks: int, steps_a_block: int) -> tuple[list[float], list[float], float]:
    """Returns for each block the invariant step over the two fast ones; and its milliseconds."""
    batch = guards.rows(ROWS, LENGTH)
    sides = [
        guards.compiled_step(mesh, batch, model=MODEL, reduction=InvariantReduction(mesh, SHARDS)),
        guards.compiled_step(mesh, batch, model=MODEL, microbatches=SHARDS // mesh.size),
        guards.compiled_step(mesh, batch, model=MODEL),
    ]
    now = [state for _, state, _ in sides]
    found = []
    for block in range(blocks + 2):
        measured = [0.0] * len(sides)
        for side in range(len(sides)) if block % 2 else reversed(range(len(sides))):
            step, _, batch = sides[side]
            measured[side], now[side] = guards.seconds(step, now[side], batch, count=steps_a_block)
        if block >= 2:
            found.append(measured)
    own = 1e3 * float(np.median([times[0] for times in found]))
    return [t[0] / t[1] for t in found], [t[0] / t[2] for t in found], own


def main() -> int:
    """Prints the ratios of each mesh; returns 1 if a first one is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    code = 0
    for name, sizes in MESHES.items():
        count = int(np.prod(list(sizes.values())))
        mesh = meshes.build(MeshSection(**sizes), devices=jax.devices()[:count])
        equal, whole, own = ratios(mesh, blocks=given.blocks, steps_a_block=given.steps)
        texts = [
            "{:.3f} ({:.3f} to {:.3f})".format(*guards.interval(each)) for each in (equal, whole)
        ]
        print(
            f"{name}: a step {own:.1f} ms; to fast with equal microbatches {texts[0]}, without "
            f"microbatches {texts[1]} (median, 95 % interval)"
        )
        code |= guards.interval(equal)[0] > LIMIT
    if code:
        print(f"FAIL: a ratio is above {LIMIT}")
    return code


if __name__ == "__main__":
    sys.exit(main())
