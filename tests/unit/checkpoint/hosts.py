"""One of several real processes that save one state together: HOST NUM_HOSTS PORT RUN_DIR."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres.checkpoint.store import Checkpoints
from jaxres.clock import SystemClock
from jaxres.config.schema import CheckpointSection
from jaxres.hosts import ALONE, Alone, Member
from jaxres.peers import join
from jaxres.rundir import RunDir
from jaxres.runlog import RunLog, read_records
from jaxres.state import Progress
from tests.unit.records import CLAIM

SHAPES = {
    "wide": ((128, 96), jnp.float32, ("fsdp",)),
    "columns": ((64, 128), jnp.bfloat16, (None, "fsdp")),
    "small": ((16, 3), jnp.bfloat16, ("fsdp",)),  # One block, of which each host has a part.
    "everywhere": ((5000,), jnp.float32, ()),
    "step": ((), jnp.int32, ()),
}


def values(name: str, step: int) -> np.ndarray:
    """Returns what an array holds at a step."""
    shape, dtype, _ = SHAPES[name]
    seed = sum(map(ord, name)) + step
    noise = np.random.default_rng(seed).integers(1, 2**15, size=shape)
    return np.asarray(noise / 7).astype(dtype)


def mesh() -> Mesh:
    """Returns all devices along one axis."""
    return Mesh(np.asarray(jax.devices()), ("fsdp",))


def state(step: int) -> dict[str, jax.Array]:
    """Returns the state, of which each process makes its own shards."""
    return {
        name: jax.make_array_from_callback(
            shape,
            NamedSharding(mesh(), PartitionSpec(*axes)),
            lambda index, name=name: values(name, step)[index],
        )
        for name, (shape, _, axes) in SHAPES.items()
    }


def like() -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what a restore asks for."""
    return {
        name: jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh(), PartitionSpec(*axes))
        )
        for name, (shape, dtype, axes) in SHAPES.items()
    }


def progress(step: int) -> Progress:
    """Returns the facts at a step."""
    return Progress(step=step, cursor=24 * step, tokens=100 * step)


def main(arguments: list[str]) -> None:
    """Saves steps 8 and 16, and restores the second."""
    host, num_hosts, port, root = int(arguments[0]), int(arguments[1]), arguments[2], arguments[3]
    jax.config.update("jax_platforms", "cpu")
    run_dir, clock = RunDir(Path(root)), SystemClock()
    member = Member(host, num_hosts, f"127.0.0.1:{port}") if num_hosts > 1 else ALONE
    peers = Alone() if member.is_alone else join(member, heartbeat_seconds=20, clock=clock)
    claim = dataclasses.replace(CLAIM, num_hosts=num_hosts)
    if member.leads:
        RunLog.claim(run_dir.log, claim, after=read_records(run_dir.log), clock=clock)
    peers.meet("claimed", seconds=30)
    log = RunLog(run_dir.log, attempt=1, last_seq=1, clock=clock)
    checkpoints = Checkpoints(
        CheckpointSection(timeout_seconds=30),
        run_dir=run_dir,
        log=log,
        claim=claim,
        peers=peers,
        emit=print,
        clock=clock,
        before_commit=lambda: None,
    )
    with checkpoints:
        for step in (8, 16):
            checkpoints.save(state(step), progress(step))
            checkpoints.wait()
    peers.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
