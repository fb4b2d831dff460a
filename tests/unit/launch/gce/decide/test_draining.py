"""A drained host saves and leaves the running attempt, then its VM is replaced; others are kept."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxres.clock import SystemClock
from jaxres.cluster.host_identity import HostIdentity
from jaxres.exit_codes import ExitCode
from jaxres.faults import UsageError
from jaxres.launch.gce.decide import draining, reconcile
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.observed_state import AgentReport, ObservedState, RunLogSummary
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.vm import commands as vm_commands
from jaxres.launch.gce.vm.agent import Agent, LocalAttempt
from jaxres.runlog import faulty_hosts
from jaxres.runlog.faulty_hosts import FaultyHost
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import CONFIG, NAMES, NOW, RUNNING, observed

KEPT, DRAINED = NAMES


def excluded(name: str, *, is_drained: bool) -> FaultyHost:
    return FaultyHost(HostIdentity(name), None, 0, NOW, 0, "noise", ("file",), is_drained)


def seen(*hosts: FaultyHost, **fields: Any) -> ObservedState:
    return replace(observed(**fields), log=RunLogSummary(faulty_hosts=hosts))


def decide(desired: DesiredState, observed: ObservedState) -> reconcile.Transition:
    return reconcile.decide(desired, observed, CONFIG)


def test_a_drained_host_is_told_to_leave_once_and_the_attempt_goes_on_until_it_has() -> None:
    world = seen(excluded(DRAINED, is_drained=True))
    found = decide(RUNNING, world)
    assert found.desired == changed(RUNNING, draining=(DRAINED,)), "an attempt ended without a save"
    assert [DRAINED in line and "noise" in line for line in found.messages] == [True]
    again = decide(found.desired, world)
    assert (again.desired, again.messages) == (found.desired, ())


def test_a_cordoned_vm_trains_on_and_is_replaced_before_the_next_attempt() -> None:
    world = seen(excluded(DRAINED, is_drained=False))
    assert decide(RUNNING, world).desired == RUNNING
    idle = changed(RUNNING, phase="placing", hosts=())
    found = decide(idle, world).desired
    assert (KEPT in found.names, DRAINED in found.names) == (True, False)
    assert found.failures.replacements.times == 1, "it used no budget"


def test_after_the_save_the_drained_vm_is_replaced_and_the_others_are_kept() -> None:
    world = seen(excluded(DRAINED, is_drained=True))
    leaving = decide(RUNNING, world).desired
    number = leaving.attempt.number
    ended = {n: AgentReport("ended", "b", number, 75, "SIGTERM: saved") for n in NAMES}
    first = decide(leaving, replace(world, reports=ended)).desired
    assert (first.phase, first.attempt.draining) == ("placing", ())
    assert (first.history[-1].code, first.history[-1].planned) == (ExitCode.PREEMPTED, "drain")
    noticed = {**ended, KEPT: replace(ended[KEPT], notice="instance/preempted")}
    both = decide(leaving, replace(world, reports=noticed)).desired
    assert both.history[-1].planned == "", "the VM was preempted"
    second = decide(first, replace(world, reports=ended)).desired
    assert (KEPT in second.names, DRAINED in second.names) == (True, False)
    assert [count.kind for count in second.failures.replacements.losses] == ["excluded by hand"]


def test_a_host_that_is_taken_back_is_not_told_to_leave() -> None:
    leaving = changed(RUNNING, draining=(DRAINED,))
    assert decide(leaving, seen()).desired.attempt.draining == ()


def test_a_drain_is_done_once_the_vm_is_deleted_and_the_next_attempt_runs() -> None:
    gone = replace(RUNNING, vms=(RUNNING.vms[0],))
    assert not draining.is_done(RUNNING, DRAINED)
    assert not draining.is_done(replace(gone, phase="placing"), DRAINED)
    assert not draining.is_done(replace(gone, deleting=(RUNNING.vms[1],)), DRAINED)
    assert draining.is_done(gone, DRAINED)
    assert draining.is_done(replace(RUNNING, phase="ended"), DRAINED)


class Recorder:
    """A process that records its signals."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def send_signal(self, number: int) -> None:
        self.received.append(number)


def test_the_agent_of_a_drained_vm_requests_one_save(tmp_path: Path) -> None:
    process: Any = Recorder()
    paths = LaunchPaths(GcsPath("bkt", "run"))
    agent = Agent(paths, name=DRAINED, folder=tmp_path, clock=SystemClock())
    agent._local = LocalAttempt(RUNNING.attempt.number, process, tmp_path / "output")
    for state in (RUNNING, changed(RUNNING, draining=(KEPT,))):
        agent._follow(state, {})
        assert process.received == [], "another VM is drained"
    for _ in range(3):
        agent._follow(changed(RUNNING, draining=(DRAINED,)), {})
    assert process.received == [signal.SIGHUP], "the save is requested once"


@pytest.mark.parametrize("is_drained", [False, True])
def test_a_cordon_is_an_exclusion_of_the_run_and_is_taken_back(
    tmp_path: Path, is_drained: bool
) -> None:
    run_dir, clock = RunDir(tmp_path), SystemClock()
    words: dict[str, Any] = {"reason": "noise", "clock": clock}
    if is_drained:
        for _ in range(2):
            vm_commands.request_drain(run_dir, RUNNING, DRAINED, **words)
    else:
        vm_commands.cordon(run_dir, RUNNING, DRAINED, **words)
    (host,) = faulty_hosts.read(run_dir, ())
    assert (host.name, host.reason, host.is_drained) == (DRAINED, "noise", is_drained)
    assert list(vm_commands.excluded(RUNNING, [host])) == [DRAINED]
    with pytest.raises(UsageError, match="is cordoned already"):
        vm_commands.cordon(run_dir, RUNNING, DRAINED, **words)
    vm_commands.uncordon(run_dir, RUNNING, DRAINED)
    assert faulty_hosts.read(run_dir, ()) == ()
    with pytest.raises(UsageError, match="is not cordoned"):
        vm_commands.uncordon(run_dir, RUNNING, DRAINED)


def test_a_cordoned_vm_may_be_drained_later_and_one_command_takes_it_back(tmp_path: Path) -> None:
    run_dir, words = RunDir(tmp_path), {"reason": "noise", "clock": SystemClock()}
    vm_commands.cordon(run_dir, RUNNING, DRAINED, **words)
    vm_commands.request_drain(run_dir, RUNNING, DRAINED, **words)
    hosts = faulty_hosts.read(run_dir, ())
    assert vm_commands.excluded(RUNNING, hosts)[DRAINED].is_drained
    assert list(draining.to_drain(RUNNING, seen(*hosts))) == [DRAINED]
    vm_commands.uncordon(run_dir, RUNNING, DRAINED)
    assert faulty_hosts.read(run_dir, ()) == ()


def test_the_status_shows_cordoned_and_drained_vms() -> None:
    hosts = [excluded(KEPT, is_drained=False), excluded(DRAINED, is_drained=True)]
    leaving = changed(RUNNING, draining=(DRAINED,))
    lines = vm_commands.excluded_lines(leaving, vm_commands.excluded(RUNNING, hosts))
    assert lines == [
        f"  {KEPT}: is cordoned (noise): replaced before the next attempt",
        f"  {DRAINED}: is drained (noise): the attempt saves, then it is replaced",
    ]
    gone = replace(RUNNING, vms=RUNNING.vms[:1])
    assert list(vm_commands.excluded(gone, hosts)) == [KEPT], "a VM that is replaced is shown"


def test_an_unknown_vm_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"jx-0009: the job has no such VM.*{KEPT}, {DRAINED}"):
        vm_commands.cordon(RunDir(tmp_path), RUNNING, "jx-0009", reason="", clock=SystemClock())
    assert vm_commands.find_vm(RUNNING, None).name == KEPT
    assert vm_commands.find_vm(RUNNING, DRAINED).name == DRAINED
