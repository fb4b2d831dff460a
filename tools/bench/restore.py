"""Benchmark of a restore on another topology against one on the same topology, in one run.

    python tools/bench/restore.py --devices 8 --mib 256

Saves one state sharded over all virtual devices, then restores it in turns with the
same sharding, on fewer devices, and along another axis. Prints ratios; the file cache is warm.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres.checkpoint.restore.load_arrays import load
from jaxres.checkpoint.write import background_save

ROUNDS = 5
LEAVES = 14
TIMEOUT_SECONDS = 600.0


def sharding(devices: Sequence[Any], spec: PartitionSpec) -> NamedSharding:
    """Returns a sharding over these devices."""
    return NamedSharding(Mesh(np.asarray(devices), ("fsdp",)), spec)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--mib", type=int, default=256)
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    devices = jax.devices()
    rows = max(options.devices, options.mib * 2**20 // (LEAVES * 4 * 1024)) // 64 * 64
    same = sharding(devices, PartitionSpec("fsdp"))
    make = jax.jit(
        lambda: {f"leaf{i}": jnp.full((rows, 1024), float(i)) for i in range(LEAVES)},
        out_shardings=same,
    )
    layouts = {
        "as it was saved": same,
        f"{options.devices // 2} devices": sharding(
            devices[: options.devices // 2], PartitionSpec("fsdp")
        ),
        "1 device": sharding(devices[:1], PartitionSpec("fsdp")),
        "split along the other dim": sharding(devices, PartitionSpec(None, "fsdp")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    with tempfile.TemporaryDirectory() as folder:
        step_dir = Path(folder, "step")
        state = make()
        background_save.wait_save(
            background_save.start_save(
                state, step_dir, background_save.SaveSettings(writer="orbax")
            ),
            step_dir,
            timeout=TIMEOUT_SECONDS,
        )
        for index in range(ROUNDS + 1):
            for name, layout in layouts.items():
                like = {
                    key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
                    for key, x in state.items()
                }
                begun = time.perf_counter()
                jax.block_until_ready(load(step_dir, like))
                if index:  # The first warms the caches.
                    seconds[name].append(time.perf_counter() - begun)
    base = seconds["as it was saved"]
    mib = sum(x.nbytes for x in state.values()) / 2**20
    print(f"{mib:.0f} MiB in {LEAVES} arrays, saved over {options.devices} devices")
    for name, taken in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(taken, base, strict=True))
        print(f"{name:28} {statistics.median(taken):6.2f} s   {ratio:.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
