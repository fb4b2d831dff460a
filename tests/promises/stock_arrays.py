"""Program that saves steps with arrays of every kind: HOST NUM_HOSTS PORT RUN_DIR WRITER
NUM_DEVICES...

Step N is on N devices. `table` returns what a reader must find.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import sys
from pathlib import Path
from typing import Literal, cast

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import ALONE, HostRank, SingleHost
from jaxres.config.schema.checkpoint import CheckpointSection
from jaxres.engine.state import Progress
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunLog
from jaxres.train.jax_coordination import join
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS

DTYPES = (
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32"),
    *("int8", "int32", "uint32", "bool"),
)
RARE_DTYPES = (
    *("int2", "int4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e4m3b11fnuz", "float8_e8m0fnu", "uint8", "int16", "uint16", "complex64"),
)
"""The others that TensorStore has, but for those of 64 bits, which JAX does not use by default."""
ALL = ("data", "fsdp")
PLACED = {
    "rows": ((16, 3), (ALL,)),  # One block, of which each device has a part.
    "columns": ((5, 24), (None, ALL)),  # The first dim divides by no number of devices.
    "odd": ((7, 9), ()),  # Neither dim does.
    "scalar": ((), ()),
    "blocks": ((130, 1000), (None, ALL)),  # Shards of 125 columns do not hold whole blocks.
    "spread": ((96, 640), (None, "fsdp")),  # Replicated over `data`.
}
RARELY_PLACED = ("rows", "scalar")
"""Arrays that are saved in the rare dtypes too."""
KEYS = {"threefry": "threefry2x32", "rbg": "rbg"}
Writer = Literal["tensorstore", "orbax"]
WRITERS: tuple[Writer, Writer] = ("tensorstore", "orbax")
Table = dict[str, list[object]]
"""Path -> dtype, shape, and SHA-256 of the items in C order."""


def values(name: str, dtype_name: str, step: int) -> np.ndarray:
    """Returns an array of random bits: NaNs of every payload, infinities and -0 are among them."""
    dtype = np.dtype(getattr(ml_dtypes, dtype_name, dtype_name))
    shape, _ = PLACED[name]
    seed = [*f"{name} {dtype_name} {step}".encode()]
    bits = np.random.default_rng(seed).bytes(math.prod(shape) * dtype.itemsize)
    data = np.frombuffer(bits, np.uint8)
    if dtype_name == "bool":
        data = data & 1
    elif dtype_name == "float4_e2m1fn":
        data = data & 15
    elif dtype_name in ("int2", "int4"):
        info = ml_dtypes.iinfo(dtype)
        data = (data % 2**info.bits).astype(np.int8) + int(info.min)
        data = data.astype(dtype)
    return data.view(dtype).reshape(shape)


def dtypes_of(name: str) -> tuple[str, ...]:
    """Returns the names of the dtypes in which an array is saved."""
    return (*DTYPES, *RARE_DTYPES) if name in RARELY_PLACED else DTYPES


def key_data(name: str, step: int) -> np.ndarray:
    """Returns the data of a PRNG key, as a state holds it."""
    return np.asarray(jax.random.key_data(jax.random.key(step, impl=KEYS[name])))


def table(step: int) -> Table:
    """Returns dtype, shape and SHA-256 of every array that a step must contain."""
    kinds = [(name, kind) for name in PLACED for kind in dtypes_of(name)]
    arrays = {f"{name}/{kind}": values(name, kind, step) for name, kind in kinds}
    arrays |= {f"key/{name}": key_data(name, step) for name in KEYS}
    return {
        path: [array.dtype.name, list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
        for path, array in arrays.items()
    }


def state(step: int, devices: list[jax.Device]) -> dict[str, dict[str, jax.Array]]:
    """Returns the state of a step; each process creates its own shards."""
    by_data = 2 if len(devices) > 1 else 1
    mesh = Mesh(np.asarray(devices).reshape(by_data, -1), ALL)

    def placed(array: np.ndarray, axes: tuple[object, ...]) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    tree = {
        name: {kind: placed(values(name, kind, step), axes) for kind in dtypes_of(name)}
        for name, (_, axes) in PLACED.items()
    }
    return tree | {"key": {name: placed(key_data(name, step), ()) for name in KEYS}}


def save(
    run_dir: RunDir,
    member: HostRank,
    nums_devices: list[int],
    writer: Writer = "tensorstore",
) -> None:
    """Saves a step on each number of devices; `writer` is `checkpoint.writer`."""
    clock = SystemClock()
    peers = SingleHost() if member.is_alone else join(member, heartbeat_seconds=20, clock=clock)
    claim = dataclasses.replace(CLAIM, num_hosts=member.num_hosts, attempt=1)
    if member.leads:
        RunLog.claim(run_dir.log, claim, after=(), clock=clock)
    peers.barrier("claimed", seconds=SURE_SECONDS)
    checkpoints = Checkpointer(
        CheckpointSection(timeout_seconds=SURE_SECONDS, keep_last=5, writer=writer),
        run_dir=run_dir,
        log=RunLog(run_dir.log, attempt=1, last_seq=1, clock=clock),
        claim=claim,
        peers=peers,
        emit=print,
        before_commit=lambda: None,
    )
    with checkpoints:
        for step in nums_devices:
            tree = state(step, jax.devices()[:step])
            checkpoints.save(tree, Progress(step=step, cursor=24 * step, tokens=100 * step))
            checkpoints.wait()
    peers.shutdown()


def main(arguments: list[str]) -> None:
    """Runs one host."""
    host, num_hosts, port, root, writer, *nums_devices = arguments
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(map(int, nums_devices)) // int(num_hosts))
    alone = int(num_hosts) == 1
    member = ALONE if alone else HostRank(int(host), int(num_hosts), f"127.0.0.1:{port}")
    save(RunDir(Path(root)), member, [int(n) for n in nums_devices], cast(Writer, writer))


if __name__ == "__main__":
    main(sys.argv[1:])
