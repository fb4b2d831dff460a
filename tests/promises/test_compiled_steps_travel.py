"""A host that lacks the compiled steps gets them from another host of the attempt, or all compile.

Each host has a home folder of its own here, and so its own folder of compiled steps, as on machines
of its own. Steps are sent under a key that readers of the run's bucket do not have.
"""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from jaxres.engine import executable
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.vm.instance_spec import PROGRAMS_SECRET
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests.promises.cloud import Cloud
from tests.promises.trainer import (
    FAULTY,
    PACED,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    free_address,
    run_history,
    snapshot,
)
from tests.tiers import campaign_but

SECRET = {"JAXRES_SECRET": "f" * 64}


def start(workspace: Workspace, **env: str) -> list[TrainingProcess]:
    """Starts both hosts of a run, each with a home folder of its own."""
    at, attempt = free_address(), run_history(workspace.run_dir("run")).attempt + 1
    found = list[TrainingProcess]()
    for host in (0, 1):
        home = workspace.root / f"home{host}"
        home.mkdir(exist_ok=True)
        own = PACED | {"HOME": str(home)} | env
        places = ("compilation.cache_dir=~/compiled", "hosts.heartbeat_seconds=300")
        found.append(
            workspace.start_host("run", *places, host=host, hosts=2, at=at, config=FAULTY, env=own)
        )
        found[-1].attempt = attempt
    return found


def programs(workspace: Workspace, host: int) -> set[str]:
    """Returns the names of a host's stored steps."""
    folder = workspace.root / f"home{host}" / "compiled" / "programs"
    return {path.name for path in folder.glob(f"*{executable.SUFFIX}")}


def interrupt(workspace: Workspace, **env: str) -> None:
    """Trains on both hosts until they have compiled and committed, and stops them."""
    trainers = start(workspace, **env)
    trainers[0].wait_commit(20)
    os.kill(trainers[1].process.pid, signal.SIGTERM)
    codes = [trainer.wait_exit() for trainer in trainers]
    assert codes == [ExitCode.PREEMPTED] * 2, "".join(trainer.printed() for trainer in trainers)
    assert [bool(programs(workspace, host)) for host in (0, 1)] == [True, True]


def replace(workspace: Workspace, host: int) -> None:
    """Empties the home folder of a host, as that of a new machine."""
    shutil.rmtree(workspace.root / f"home{host}")


def finish(workspace: Workspace, **env: str) -> list[TrainingProcess]:
    """Trains on both hosts to the end."""
    trainers = start(workspace, **env)
    for trainer in trainers:
        assert trainer.wait_exit() == 0, trainer.printed()
    return trainers


def of(trainers: list[TrainingProcess], kind: str) -> list[list[dict[str, object]]]:
    """Returns the events of a kind of each host."""
    return [trainers[0].events_of(kind, host) for host in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("lost", campaign_but([0, 1], 1))
def test_a_replaced_host_compiles_nothing_and_the_run_ends_bit_exact(
    workspace: Workspace, fault_free_pair: RunDir, lost: int
) -> None:
    interrupt(workspace)
    before = programs(workspace, 1 - lost)
    replace(workspace, lost)
    trainers = finish(workspace)
    assert of(trainers, "steps_compiled") == [[], []], "a host has compiled"
    received = of(trainers, "compiled_steps_received")
    assert [[event["host"] for event in events] for events in received] == (
        [[1], []] if lost == 0 else [[], [0]]
    )
    assert all(of(trainers, "compiled_steps_loaded"))
    assert programs(workspace, lost) <= before, "stored under another name"
    assert programs(workspace, lost)
    assert_bit_exact(workspace.run_dir("run"), fault_free_pair)


def texts_in(run_dir: RunDir) -> list[bytes]:
    """Returns the content of all files that a reader of a run directory can read."""
    return list(snapshot(run_dir.root).values())


@pytest.mark.slow
def test_where_readers_of_the_bucket_have_the_secret_each_host_compiles_and_says_why(
    bucket: Workspace,
) -> None:
    interrupt(bucket)
    secret = files.read(bucket.run_dir("run").secret)
    assert secret is not None, "the only secret of the run is in the bucket"
    replace(bucket, 1)
    trainers = finish(bucket)
    assert of(trainers, "compiled_steps_received") == [[], []], "a reader could send programs"
    for events in of(trainers, "steps_compiled"):
        (event,) = events
        assert "host 0 has them" in str(event["reason"])
        assert "set the same JAXRES_SECRET" in str(event["reason"])
    assert not any(executable.MAGIC in text for text in texts_in(bucket.run_dir("run")))


@pytest.mark.campaign
def test_with_a_secret_outside_the_bucket_its_readers_find_neither_key_nor_program(
    bucket: Workspace,
) -> None:
    interrupt(bucket, **SECRET)
    replace(bucket, 1)
    trainers = finish(bucket, **SECRET)
    assert of(trainers, "steps_compiled") == [[], []], "a host has compiled"
    assert files.read(bucket.run_dir("run").secret) is None
    readable = texts_in(bucket.run_dir("run"))
    assert readable
    assert not any(executable.MAGIC in text for text in readable)
    assert not any(SECRET["JAXRES_SECRET"].encode() in text for text in readable)


@pytest.mark.slow
def test_a_replaced_vm_compiles_nothing_and_its_secret_is_not_in_the_bucket(
    cloud: Cloud, fault_free_pair: RunDir
) -> None:
    config = cloud.config(num_hosts=2, env=PACED)
    launcher = cloud.up(config, "compilation.cache_dir=~/compiled")
    cloud.wait_commit(20)
    cloud.gce.preempt(cloud.member(1), notice=True)
    cloud.wait_printed_on_vms("saving after the current step")
    cloud.go_on()
    assert launcher.wait_exit() == 0, cloud.describe()
    assert run_history(cloud.run_dir).attempt == 2
    events = [read_events(cloud.run_dir.events(2, host)) for host in (0, 1)]
    kinds = [{event["event"] for event in each} for each in events]
    assert not any("steps_compiled" in each for each in kinds), "a VM has compiled"
    assert sum("compiled_steps_received" in each for each in kinds) == 1
    found = {vm.items[PROGRAMS_SECRET] for vm in cloud.gce.vms_so_far()}
    assert len(found) == 1, "VMs of one launcher have one secret"
    readable = [*snapshot(cloud.run).values(), launcher.printed().encode()]
    assert readable
    assert not any(secret.encode() in text for text in readable for secret in found)
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()
