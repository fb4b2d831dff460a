"""Of three hosts one is lost: the other supervisors exit with 79 in time and name it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from jaxres_emulators.proxy import Proxy
from tests.promises.networks import network, permitted
from tests.promises.trainer import (
    ENDLESS,
    FAULTY,
    PACED,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    free_address,
    starts,
)

HOSTS = 3
HEARTBEAT_SECONDS = 15
LONG = (ENDLESS, f"hosts.heartbeat_seconds={HEARTBEAT_SECONDS}")
SHORT = (*LONG, "train.steps=80")
SLOW = {"PACE": "0.005"}
LATEST_SECONDS = 300.0
"""Bound of the end of all hosts, which takes the limit and some seconds: no measure of speed."""


def kill_worker(trainer: TrainingProcess) -> None:
    trainer.kill(signal.SIGKILL, target="worker")


def kill_all(trainer: TrainingProcess) -> None:
    trainer.kill(signal.SIGKILL)


def stop_all(trainer: TrainingProcess) -> None:
    trainer.kill(signal.SIGSTOP)


@dataclass(frozen=True)
class Loss:
    """How a host is lost, and the exit of its own supervisor."""

    lose: Callable[[TrainingProcess], None]
    host: int
    own_code: int | None


LOSSES = {
    "its worker is killed": Loss(kill_worker, 2, 128 + signal.SIGKILL),
    "it is killed": Loss(kill_all, 2, -signal.SIGKILL),
    "the lead is killed": Loss(kill_all, 0, -signal.SIGKILL),
    "it is stopped": Loss(stop_all, 2, None),
}


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    """The same run without a lost host."""
    workspace = Workspace(tmp_path_factory.mktemp("fault-free"), caches)
    workspace.launched("fault-free", *SHORT, hosts=HOSTS, config=FAULTY)
    return workspace.run_dir("fault-free")


def under_way(trainers: list[TrainingProcess]) -> None:
    trainers[0].wait_commit(20)
    trainers[0].wait_step(25)


def named_by_the_others(trainers: list[TrainingProcess], lost: int) -> None:
    """Asserts that the others exit with 79 and name the host."""
    since = time.monotonic()
    for host, trainer in enumerate(trainers):
        if host != lost:
            printed = trainer.assert_fails(ExitCode.PEER_LOST, f"host {lost} (")
            assert re.search(r"(last finished|after) step (is )?\d+", printed), printed
    assert time.monotonic() - since < LATEST_SECONDS


OFTEN = ("the lead is killed",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.campaign) for name in LOSSES],
)
def test_a_lost_host_is_named_by_every_other_supervisor(
    workspace: Workspace, fault_free: RunDir, name: str
) -> None:
    loss = LOSSES[name]
    held = PACED | {"HELD": "30"}
    trainers = workspace.start_hosts("run", *SHORT, hosts=HOSTS, config=FAULTY, env=held)
    under_way(trainers)
    loss.lose(trainers[loss.host])
    named_by_the_others(trainers, loss.host)
    if loss.own_code is not None:
        assert trainers[loss.host].wait_exit() == loss.own_code, trainers[loss.host].printed()
    workspace.end_all()

    workspace.launched("run", *SHORT, hosts=HOSTS, config=FAULTY)
    assert starts(workspace.run_dir("run"))[1] >= 20, "it has resumed"
    assert_bit_exact(workspace.run_dir("run"), fault_free)


@pytest.mark.slow
def test_a_stop_at_one_host_saves_one_step_for_all(workspace: Workspace) -> None:
    trainers = workspace.start_hosts("run", ENDLESS, hosts=2, config=FAULTY, env=PACED)
    under_way(trainers)
    os.kill(trainers[1].process.pid, signal.SIGTERM)
    codes = [trainer.wait_exit() for trainer in trainers]
    assert codes == [ExitCode.PREEMPTED] * 2, "".join(trainer.printed() for trainer in trainers)
    (exits,) = {(w.exit, w.committed) for w in [trainers[0].end_record()] if w is not None}
    assert exits == (ExitCode.PREEMPTED, True)


@pytest.mark.slow
def test_a_stop_before_the_first_step_ends_all_hosts_at_once(workspace: Workspace) -> None:
    workspace.fresh = True  # So that the stop hits an import.
    never = {"FAULT": "build:1:sleep"}
    trainers = workspace.start_hosts("run", hosts=2, config=FAULTY, env=never)
    trainers[0].wait_phase("import")
    os.kill(trainers[1].process.pid, signal.SIGTERM)
    codes = [trainer.wait_exit() for trainer in trainers]
    assert codes == [ExitCode.PREEMPTED] * 2, "".join(trainer.printed() for trainer in trainers)
    for trainer in trainers:
        assert "SIGTERM on" in trainer.printed()
    assert starts(trainers[0].run_dir) == []


CutOff = tuple[list[TrainingProcess], Callable[[], None]]


@contextlib.contextmanager
def cut_off(workspace: Workspace, folder: Path, *, lost: int) -> Iterator[CutOff]:
    """Yields the supervisors, and a function that disconnects one of them from the rest."""
    start = functools.partial(
        workspace.start_host, "run", *LONG, hosts=HOSTS, config=FAULTY, env=SLOW
    )
    if permitted():
        with network(HOSTS, folder=folder) as net:
            at = f"{net.machines[0].address}:7077"
            yield (
                [start(host=m.host, at=at, through=m.through) for m in net.machines],
                lambda: net.cut(lost),
            )
        return
    at = free_address()
    with Proxy(at) as between:
        addresses = [between.address if host == lost else at for host in range(HOSTS)]
        yield (
            [start(host=host, at=address) for host, address in enumerate(addresses)],
            between.cut,
        )


@pytest.mark.slow
def test_a_host_whose_network_is_cut_is_lost_and_exits(
    workspace: Workspace, tmp_path: Path
) -> None:
    with cut_off(workspace, tmp_path, lost=2) as (trainers, cut):
        for trainer in trainers:
            trainer.attempt = 1
        under_way(trainers)
        cut()
        since = time.monotonic()
        for trainer in trainers[:2]:
            trainer.assert_fails(ExitCode.PEER_LOST, "host 2 (")
        trainers[2].assert_fails(ExitCode.PEER_LOST, "host 0 (")
        assert time.monotonic() - since < LATEST_SECONDS
