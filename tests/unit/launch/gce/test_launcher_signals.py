"""A launcher that a signal ends says what goes on without it, whatever code the signal interrupts.

The controller is the real one, in a simulated cloud; the signal is a real one.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.faults import PreemptedError, StoppedError
from jaxres.host import signals
from jaxres.launch.gce import command as gce
from jaxres.launch.gce.log_follower import LogFollower
from jaxres.launch.gce.state import lease_wait
from jaxres.launch.gce.state.desired_state import PendingCreate, VmSpec
from jaxres.launch.gce.state.observed_state import CreateFailed
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.vm.instance_spec import Machine
from jaxres.storage.path import GcsPath
from tests.unit.launch.gce.test_controller_cycles import NO_FAULTS, STEPS, job
from tests.unit.launch.gce.test_simulated_cloud import leader_of
from tests.unit.launch.simulated_cloud import SimulatedCloud


@dataclass
class InterruptedCloud(SimulatedCloud):
    """The first creation is interrupted by a signal, as in a library that handles the error."""

    number: signal.Signals = signal.SIGINT
    handled: str = "raised"

    def create(
        self, creation: PendingCreate, vms: Sequence[VmSpec], machine: Machine
    ) -> str | CreateFailed:
        try:
            signal.raise_signal(self.number)
        except (StoppedError, PreemptedError) as stop:
            if self.handled == "replaced":
                raise ValueError("an error of the library") from stop
            if self.handled == "raised":
                raise
        return super().create(creation, vms, machine)


@pytest.fixture
def stops() -> Iterator[None]:
    """Stop signals raise in this process, as in a launcher, until the end of the test."""
    with signals.restored():
        signals.forget_stops()
        signals.raise_on_stop()
        yield
    signals.forget_stops()


@pytest.mark.usefixtures("stops")
@pytest.mark.parametrize("handled", ["raised", "replaced", "swallowed"])
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 128 + signal.SIGINT), (signal.SIGTERM, ExitCode.PREEMPTED)],
)
def test_a_signal_ends_the_launcher_and_not_the_job(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
    handled: str,
) -> None:
    paths = LaunchPaths(GcsPath("bkt", "run"))
    cloud = InterruptedCloud(0, STEPS, paths, NO_FAULTS, number=number, handled=handled)
    cloud.patch(monkeypatch)
    leader = leader_of(cloud, job(hosts=1), lambda line: None)
    assert leader is not None
    assert gce._run_controller(leader) == code
    assert "the VMs and the training continue and cost money" in "".join(capfd.readouterr())
    desired = cloud.desired()
    assert desired is not None
    assert desired.phase == "placing", "the job has ended"


class InterruptedClock:
    """The first wait is interrupted by a Ctrl-C that a library swallows; there is no second."""

    def __init__(self, cloud: SimulatedCloud) -> None:
        self.monotonic, self.wall = cloud.monotonic, cloud.wall
        self.waits = 0

    def sleep(self, seconds: float) -> None:
        self.waits += 1
        assert self.waits == 1, "the signal is lost"
        with contextlib.suppress(StoppedError):
            signal.raise_signal(signal.SIGINT)


def follow_output(paths: LaunchPaths, clock: InterruptedClock) -> object:
    return LogFollower(paths, clock=clock).follow(vm=None)


def await_drain(paths: LaunchPaths, clock: InterruptedClock) -> object:
    return gce._await_drain(paths, job(hosts=1), "jx-0000", env={}, clock=clock)


def await_end(paths: LaunchPaths, clock: InterruptedClock) -> object:
    return gce._request_end("stop", paths.run, job(hosts=1), env={}, clock=clock)


def await_lease(paths: LaunchPaths, clock: InterruptedClock) -> object:
    lease = lease_wait.new_lease(paths, job(hosts=1), print)
    found = {"waits": True, "desired": None, "may_be_led": True}
    return lease_wait.acquire(lease, paths.run, clock, console=print, **found)


@pytest.mark.usefixtures("stops")
@pytest.mark.parametrize("wait", [follow_output, await_drain, await_end, await_lease])
def test_a_command_that_waits_for_another_launcher_ends_at_a_signal_that_was_swallowed(
    monkeypatch: pytest.MonkeyPatch, wait: Callable[[LaunchPaths, InterruptedClock], object]
) -> None:
    paths = LaunchPaths(GcsPath("bkt", "run"))
    cloud = SimulatedCloud(0, STEPS, paths, NO_FAULTS)
    cloud.patch(monkeypatch)
    assert leader_of(cloud, job(hosts=1), lambda line: None) is not None, "no launcher leads"
    monkeypatch.setattr(gce.vm_commands, "is_excluded", lambda *_, **__: True)
    clock = InterruptedClock(cloud)
    with pytest.raises(StoppedError):
        wait(paths, clock)
    assert clock.waits == 1, "the signal has not arrived in a wait"
