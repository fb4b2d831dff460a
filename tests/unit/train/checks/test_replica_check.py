"""The training loop compares the copies of the state; see test_no_bad_state_is_committed.py too."""

from __future__ import annotations

import pytest

from jaxres.checkpoint.memory.tier import MemoryTier
from jaxres.engine.guards import most_severe
from jaxres.engine.replica_fingerprint import Copies
from jaxres.exit_codes import ExitCode
from jaxres.faults import StopRun, fault
from jaxres.runlog.events import CorruptionDetected, GuardWarned
from jaxres.train.checks import replica_check
from jaxres.train.consensus import SingleHostConsensus
from tests.unit.train.test_no_bad_state_is_committed import FLIP, ROWS, STEPS, Device, SimulatedRun
from tests.unit.train.test_no_bad_state_is_committed import replica_check as new_check


def run_with_flip(at_step):
    """A run without faults but one flipped bit, in the update of a step."""
    simulated = SimulatedRun(0)
    simulated.faults = {(at_step - 1) * ROWS: FLIP}
    simulated.chance.random = lambda: 0.5  # No notice; a save takes a while.
    return simulated


def trained(simulated, **parts):
    """The events of an attempt, and how it ended."""
    events = []
    check = new_check(emit=events.append, **parts.pop("check", {}))
    ended = simulated.attempt(emit=events.append, replica_check=check, **parts)
    return events, ended


@pytest.mark.parametrize(("flipped", "found"), [(1, 4), (4, 4), (5, 7), (7, 7), (8, 8), (60, 60)])
def test_a_difference_ends_the_run_at_the_next_comparison_or_save(flipped, found):
    simulated = run_with_flip(flipped)
    events, ended = trained(simulated)
    (event,) = [event for event in events if isinstance(event, CorruptionDetected)]
    assert (event.step, event.devices, event.hosts) == (found, (11,), (0,))
    assert f"step {found}: " in ended.result.reason
    assert "device 11 (chip, host 0)" in ended.result.reason
    assert ended.result.code == ExitCode.UNHEALTHY
    assert simulated.log.history().step == (found - 1) // 4 * 4
    simulated.check_commits()
    events, ended = trained(simulated)
    assert (ended.result.code, ended.progress.step) == (ExitCode.DONE, STEPS)
    assert not [event for event in events if isinstance(event, CorruptionDetected)]


def test_a_state_is_compared_once_a_step():
    simulated, steps = run_with_flip(99), []
    check = new_check(every_steps=4)
    judge = replica_check.ReplicaCheck.judge

    class Counting(replica_check.ReplicaCheck):
        def judge(self, values, *, step):
            steps.append(step)
            return judge(self, values, step=step)

    simulated.attempt(replica_check=Counting(**vars(check)))
    assert steps == list(range(4, STEPS + 1, 4))


def test_in_mode_warn_it_is_reported_and_training_goes_on():
    events, ended = trained(run_with_flip(5), check={"mode": "warn"})
    assert ended.result.code == ExitCode.DONE
    warned = [event for event in events if isinstance(event, GuardWarned)]
    assert [event.step for event in warned][:3] == [7, 8, 12]
    assert "guards.corruption.mode=warn" in warned[0].reason


def test_a_state_in_host_memory_was_compared():
    kept = []

    class Memory(MemoryTier):
        def is_due(self, step):
            return step > 0 and step % 3 == 0

        def save(self, state, progress, **_):
            if self.is_due(progress.step):
                kept.append((progress.step, "flipped" in state["params"]))

    trained(run_with_flip(5), memory=Memory(), check={"every_steps": 50})
    assert kept == [(3, False)]


@pytest.mark.parametrize("is_keeping", [False, True])
def test_a_state_is_left_out_by_all_hosts_while_one_is_writing(monkeypatch, is_keeping):
    monkeypatch.setattr(SingleHostConsensus, "any_host_keeping", lambda self: is_keeping)
    seen = set()

    class Memory(MemoryTier):
        def is_due(self, step):
            return step > 0

        def save(self, state, progress, *, is_busy):
            seen.add(is_busy)

    trained(run_with_flip(5), memory=Memory(), check={"every_steps": 50})
    assert seen == {is_keeping}


def test_a_faulty_device_is_the_cause_of_a_divergence_at_the_same_time():
    simulated = run_with_flip(5)
    simulated.faults |= {(step - 1) * ROWS + 1: "nan" for step in (5, 6, 7)}
    _, ended = trained(simulated, check={"every_steps": 50})
    assert ended.result.code == ExitCode.UNHEALTHY
    stops = [StopRun(fault(name), name) for name in ("diverged", "silent_corruption")]
    assert most_severe(stops).fault.name == "silent_corruption"


def test_the_other_hosts_exit_names_a_host_with_a_suspect():
    check = new_check()
    check = replica_check.ReplicaCheck(
        **vars(check) | {"devices": [Device(0, 0), Device(1, 1), Device(2, 2)]}
    )
    flipped = check.fingerprints(SimulatedState({"flipped": True}))
    on_host = {
        host: replica_check.ReplicaCheck(**vars(check) | {"host": host}).judge(flipped, step=1)
        for host in range(3)
    }
    assert [on_host[host].culprit for host in range(3)] == [1, None, 1]
    assert len({verdict.reason for verdict in on_host.values()}) == 1


class SimulatedState:
    def __init__(self, params):
        self.params = params


@pytest.mark.parametrize(
    ("num_bytes", "says"),
    [
        ({1: 100}, "no array of the state is on more than one device"),
        ({1: 750, 8: 250}, "75.0% of the state (750 B) is on one device only"),
        ({2: 990, 8: 10}, "not which of the two devices"),
        ({4: 990, 8: 10}, None),
    ],
)
def test_what_a_mesh_cannot_detect_is_noted(num_bytes, says):
    kinds = ((),) if set(num_bytes) != {1} else ()
    note = replica_check.undetected(Copies(kinds, groups=((),) * len(kinds), num_bytes=num_bytes))
    assert (note is None) if says is None else (says in note)
