"""Program of one host among several real processes: HOST NUM_HOSTS PORT RUN_DIR save|restore."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import ALONE, HostRank, SingleHost
from jaxres.config.schema.checkpoint import CheckpointSection
from jaxres.engine.state import Progress
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunLog, fold, read_records
from jaxres.train.jax_coordination import join
from tests.promises.trainer import ROOT, free_address
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS

SHAPES = {
    "wide": ((128, 96), jnp.float32, ("fsdp",)),
    "columns": ((64, 128), jnp.bfloat16, (None, "fsdp")),
    "small": ((16, 3), jnp.bfloat16, ("fsdp",)),  # One block, shared by all hosts.
    "everywhere": ((5000,), jnp.float32, ()),
    "step": ((), jnp.int32, ()),
}


def values(name: str, step: int) -> np.ndarray:
    """Returns the numbers of an array at a step."""
    shape, dtype, _ = SHAPES[name]
    seed = sum(map(ord, name)) + step
    noise = np.random.default_rng(seed).integers(1, 2**15, size=shape)
    return np.asarray(noise / 7).astype(dtype)


def mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with one axis of the devices, by default of all."""
    return Mesh(np.asarray(devices or jax.devices()), ("fsdp",))


def state(step: int) -> dict[str, jax.Array]:
    """Returns the state; each process creates its own shards."""
    return {
        name: jax.make_array_from_callback(
            shape,
            NamedSharding(mesh(), PartitionSpec(*axes)),
            lambda index, name=name: values(name, step)[index],
        )
        for name, (shape, _, axes) in SHAPES.items()
    }


def like(devices: Sequence[jax.Device] | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of the state for a restore."""
    return {
        name: jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh(devices), PartitionSpec(*axes))
        )
        for name, (shape, dtype, axes) in SHAPES.items()
    }


def progress(step: int) -> Progress:
    """Returns the facts at a step."""
    return Progress(step=step, cursor=24 * step, tokens=100 * step)


def run(num_hosts: int, root: Path, what: str) -> list[str]:
    """Starts that many processes, requires that all exit with 0, and returns their outputs."""
    port = free_address().rpartition(":")[2]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(host), str(num_hosts), port, str(root), what],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for host in range(num_hosts)
    ]
    outputs = [process.communicate(timeout=SURE_SECONDS)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * num_hosts, "\n".join(outputs)
    return outputs


def main(arguments: list[str]) -> None:
    """Saves steps 8 and 16, or restores the newest intact step and prints its number."""
    host, num_hosts, port, root = int(arguments[0]), int(arguments[1]), arguments[2], arguments[3]
    jax.config.update("jax_platforms", "cpu")
    run_dir, clock = RunDir(Path(root)), SystemClock()
    member = HostRank(host, num_hosts, f"127.0.0.1:{port}") if num_hosts > 1 else ALONE
    peers = SingleHost() if member.is_alone else join(member, heartbeat_seconds=20, clock=clock)
    records = read_records(run_dir.log)
    peers.barrier("read", seconds=30)
    claim = dataclasses.replace(CLAIM, num_hosts=num_hosts, attempt=len(records) + 1)
    if member.leads:
        RunLog.claim(run_dir.log, claim, after=records, clock=clock)
    peers.barrier("claimed", seconds=30)
    log = RunLog(run_dir.log, attempt=claim.attempt, last_seq=len(records) + 1, clock=clock)
    checkpoints = Checkpointer(
        CheckpointSection(timeout_seconds=SURE_SECONDS),
        run_dir=run_dir,
        log=log,
        claim=claim,
        peers=peers,
        emit=print,
        before_commit=lambda: None,
    )
    with checkpoints:
        for step in (8, 16) if arguments[4] == "save" else ():
            checkpoints.save(state(step), progress(step))
            checkpoints.wait()
        if arguments[4] == "restore":
            found = checkpoints.restore(fold(log.records()), like(), seconds=30)
            assert found is not None
            assert is_that_of(found.state, found.commit.step)
            print(f"restored {found.commit.step}")
    peers.shutdown()


def is_that_of(tree: dict[str, jax.Array], step: int) -> bool:
    """Returns whether all shards of this process hold the numbers of a step."""
    return all(
        np.asarray(shard.data).tobytes() == values(name, step)[shard.index].tobytes()
        for name, array in tree.items()
        for shard in array.addressable_shards
    )


if __name__ == "__main__":
    main(sys.argv[1:])
