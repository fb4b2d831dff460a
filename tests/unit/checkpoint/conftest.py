"""Fixtures: a run directory with a log, and real saves of tiny states."""

import dataclasses
import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import SingleHost
from jaxres.config.schema.checkpoint import CheckpointSection, KeepSection
from jaxres.engine.state import Progress
from jaxres.engine.trainable import ALL
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunLog, read_records
from tests.sharing import made_once
from tests.unit.checkpoint import hosts
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS


def nothing():
    pass


@dataclass
class Attempt:
    """One attempt of a run: its run directory, its log and the events of its saves."""

    run_dir: RunDir
    log: RunLog
    events: list = field(default_factory=list)

    def checkpoints(
        self,
        *,
        before_commit=nothing,
        keep_last=2,
        emit=None,
        log=None,
        timeout_seconds=SURE_SECONDS,
        busy="wait",
        peers=None,
        snapshot="auto",
        check_snapshot="auto",
        writer="tensorstore",
        background_share=1.0,
        clock=None,
        trainable=ALL,
    ):
        log = log or self.log
        if clock is not None:
            log.clock = clock
        return Checkpointer(
            CheckpointSection(
                keep=KeepSection(last=keep_last),
                timeout_seconds=timeout_seconds,
                max_failed_saves=3,
                busy=busy,
                snapshot=snapshot,
                check_snapshot=check_snapshot,
                writer=writer,
                background_share=background_share,
            ),
            run_dir=self.run_dir,
            log=log,
            claim=dataclasses.replace(CLAIM, attempt=self.log.attempt),
            peers=peers or SingleHost(),
            emit=emit or self.events.append,
            before_commit=before_commit,
            trainable=trainable,
        )

    def save(self, *steps, **kwargs):
        """Saves these steps, waits for the commits and returns the newest one."""
        with self.checkpoints(**kwargs) as checkpoints:
            for step in steps:
                checkpoints.save(state(step), progress(step))
            checkpoints.wait()
        return self.log.history().newest

    def step_dir(self, step):
        (commit,) = [c for c in self.log.history().committed if c.step == step]
        return self.run_dir.root / commit.path

    def again(self):
        """Claims and returns the next attempt on the same run directory."""
        return claimed(self.run_dir, attempt=self.log.attempt + 1)


def claimed(run_dir, *, attempt=1):
    claim = dataclasses.replace(CLAIM, attempt=attempt)
    log = RunLog.claim(run_dir.log, claim, after=read_records(run_dir.log), clock=SystemClock())
    return Attempt(run_dir, log)


@pytest.fixture(scope="session")
def written_by(tmp_path_factory):
    """Number of hosts -> a run directory with steps 8 and 16, saved by that many real processes.

    Shared by all tests: copy it, do not change it.
    """

    @functools.cache
    def written(num_hosts):
        def make(folder):
            hosts.run(num_hosts, folder / "run", "save")

        return RunDir(made_once(tmp_path_factory, f"written-by-{num_hosts}", make) / "run")

    return written


@pytest.fixture
def attempt(tmp_path):
    return claimed(RunDir(tmp_path / "run"))


def progress(step):
    return Progress(step=step, cursor=24 * step, epoch=1, tokens=1000 * step)


def sharding(*axes, shape=(8,), names=("fsdp",)):
    mesh = Mesh(np.asarray(jax.devices()).reshape(shape), names)
    return NamedSharding(mesh, PartitionSpec(*axes))


def state(step):
    """A tiny state, different at each step; one array is sharded over eight devices."""
    weights = jnp.arange(128, dtype=jnp.float32).reshape(16, 8) / 3 + step
    return {
        "params": {"w": jax.device_put(weights, sharding("fsdp")), "b": jnp.ones(3, jnp.bfloat16)},
        "opt": {"count": jnp.asarray(step, jnp.int32)},
        "key": jax.random.key_data(jax.random.key(step)),
        "step": jnp.asarray(step, jnp.int32),
    }


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
