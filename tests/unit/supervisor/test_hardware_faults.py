"""What follows a fault of the hardware: real processes without jax, and a fake NVML library."""

import json
import os
import signal

import pytest

from jaxres.runlog import faulty_hosts
from jaxres.runlog.event_log import read_events
from jaxres.runlog.run_log import Record
from jaxres.supervisor.process.spawn import LEAVE
from tests.tiers import slow_but
from tests.unit.runlog.example_records import CLAIM
from tests.unit.supervisor.test_supervisor import supervisors

SAVES = {"on_stop": [75, 0.0], "saves": [0.1, False]}
LOST, ROW = "0.lost 15", "0.remap_pending 1"


@pytest.fixture
def start(tmp_path, gpus):
    with supervisors(tmp_path) as start:
        yield lambda *parts, limits=None, **health: start(
            *parts,
            env=gpus.env | {"HEALTH": json.dumps({"poll_seconds": 0.05} | health)},
            **(limits or {}),
        )


def found(supervisor):
    events = read_events(supervisor.run_dir.host_supervisor_events(1, 0))
    return [(e["kind"], e["action"]) for e in events if e["event"] == "hardware_fault_found"]


def watched(supervisor):
    """Waits until the GPUs are watched and the workers have made steps."""
    supervisor.wait_steps()
    events = supervisor.run_dir.host_supervisor_events(1, 0)
    supervisor.wait(
        lambda: any(e["event"] == "health_watch_started" for e in read_events(events)), "a watch"
    )


def stopped_after_a_warning(supervisor):
    """Stops it once a fault is found and steps were made after that; returns how it has ended."""
    supervisor.wait(lambda: found(supervisor), "a fault")
    step = int((supervisor.folder / "step-0").read_text())
    supervisor.wait_steps(step + 5)
    supervisor.process.send_signal(signal.SIGTERM)
    return supervisor.ended()


@pytest.mark.parametrize("num_hosts", slow_but([1, 2], 2))
def test_a_fault_that_leaves_a_good_state_saves_and_the_end_is_unhealthy(start, gpus, num_hosts):
    supervisor = start(*[SAVES] * num_hosts)
    watched(supervisor)
    gpus.set(ROW)
    ended = supervisor.ended()
    assert (ended["code"], ended["requested"], ended["committed"]) == (82, 82, True)
    assert ended["culprit"] in range(num_hosts)
    assert (
        "GPU 0 (Fake H100, GPU-0): the remapping of a row of memory is pending" in (ended["reason"])
    )
    assert supervisor.signalled(signal.SIGTERM) == list(range(num_hosts))
    assert found(supervisor) == [("row_remap", "save")]


@pytest.mark.parametrize("num_hosts", slow_but([1, 2], 2))
def test_a_fault_that_may_have_changed_the_state_kills_the_workers_at_once(start, gpus, num_hosts):
    supervisor = start(*[SAVES] * num_hosts)
    watched(supervisor)
    gpus.set(LOST)
    ended = supervisor.ended()
    assert (ended["code"], ended["requested"], ended["committed"]) == (82, 82, False)
    asked = [supervisor.signalled(number) for number in (signal.SIGTERM, LEAVE)]
    assert asked == [[], []], "a save was requested"
    assert "GPU 0 (Fake H100, GPU-0): the driver has lost it" in ended["reason"]
    assert found(supervisor) == [("lost", "leave")]


def test_a_fault_before_the_first_step_ends_the_attempt_without_a_save(start, gpus):
    gpus.set(ROW)
    supervisor = start({"steps": 0})
    ended = supervisor.ended()
    assert (ended["code"], ended["committed"]) == (82, False)
    assert found(supervisor) == [("row_remap", "leave")]


def test_a_crash_while_the_save_is_requested_counts_as_the_hardwares(start, gpus):
    supervisor = start({"on_stop": [70, 0.0]})
    watched(supervisor)
    gpus.set(ROW)
    ended = supervisor.ended()
    assert (ended["code"], "stop 0" in ended["reason"]) == (82, True)


@pytest.mark.slow
def test_a_fault_is_recorded_although_the_supervisor_is_killed_during_the_save(start, gpus):
    supervisor = start({"on_stop": [75, None]})
    run_dir = supervisor.run_dir
    (run_dir.log / "00000001.json").write_bytes(Record(1, 1, 0.0, CLAIM).encode())
    watched(supervisor)
    gpus.set(ROW)
    supervisor.wait(lambda: supervisor.signalled(signal.SIGTERM) == [0], "a save")
    supervisor.wait(lambda: faulty_hosts.read(run_dir), "a record")  # A thread writes it.
    supervisor.process.kill()
    (faulty,) = faulty_hosts.read(run_dir)
    assert (faulty.identity.name, faulty.slot, faulty.attempt) == (os.uname().nodename, None, 1)
    assert "the remapping of a row of memory is pending" in faulty.reason


@pytest.mark.slow
def test_a_hang_while_the_save_is_requested_counts_as_the_hardwares(start, gpus):
    supervisor = start({"on_stop": [75, None]}, limits={"save_seconds": 1.0})
    watched(supervisor)
    gpus.set(ROW)
    ended = supervisor.ended()
    assert (ended["code"], "no progress" in ended["reason"]) == (82, True)
    assert supervisor.signalled(signal.SIGTERM) == [0]


@pytest.mark.slow
def test_a_warning_is_printed_once_and_ends_nothing(start, gpus):
    supervisor = start(SAVES, lost="warn")
    watched(supervisor)
    gpus.set(LOST)
    ended = stopped_after_a_warning(supervisor)
    assert (ended["code"], ended["requested"]) == (75, 75)
    assert found(supervisor) == [("lost", "warn")]
    assert supervisor.printed().count("the driver has lost it") == 1
    assert "training continues" in supervisor.printed()


@pytest.mark.slow
def test_a_hung_library_is_a_warning_and_training_continues(start, gpus):
    supervisor = start(SAVES, answer_seconds=0.2)
    watched(supervisor)
    gpus.set("hang nvmlDeviceGetPowerUsage")
    ended = stopped_after_a_warning(supervisor)
    assert (ended["code"], found(supervisor)) == (75, [("silent", "warn")])


@pytest.mark.slow
def test_a_fault_while_a_stop_is_in_progress_ends_a_save_only_if_the_state_may_be_wrong(
    start, gpus
):
    supervisor = start({"on_stop": [75, None]})
    watched(supervisor)
    supervisor.process.send_signal(signal.SIGTERM)
    supervisor.wait(lambda: supervisor.signalled(signal.SIGTERM), "the order")
    gpus.set(ROW)
    supervisor.wait(lambda: found(supervisor), "a fault")
    supervisor.open_gate()
    ended = supervisor.ended()
    assert (ended["code"], ended["requested"], found(supervisor)) == (
        *(75, 75),
        [("row_remap", "save")],
    )
