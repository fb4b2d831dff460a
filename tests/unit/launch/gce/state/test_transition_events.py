"""The launcher's events are written with its decisions, each once, whichever launcher is killed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from jaxres.launch.gce import status as gce_status
from jaxres.launch.gce.state import transition_events
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.observed_state import AgentReport, CreateFailed
from jaxres.launch.gce.state.state_object import encode_state
from jaxres.runlog import launch_events
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.paths import RunDir
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import (
    CREATING,
    NAMES,
    NOW,
    READY,
    RUNNING,
    START,
    ZONE,
    listed,
    next_state,
    observed,
)
from tests.unit.launch.gce_config import OPTION


def kinds(desired: DesiredState) -> list[str]:
    return [event.kind for event in desired.events.newest]


def test_a_request_and_its_result_are_recorded_with_the_decision() -> None:
    asked = next_state(START, observed(vms={}, reports={}))
    (event,) = asked.events.newest
    assert (event.kind, event.zone, event.time) == ("vms_requested", ZONE, NOW)
    assert event.vms == tuple(vm.name for vm in asked.vms)
    assert kinds(next_state(CREATING, observed(creation=True))) == ["vms_created"]
    full = observed(vms={}, reports={}, creation=CreateFailed("stockout", "no VMs"))
    (event,) = next_state(CREATING, full).events.newest
    assert (event.kind, event.cause, event.reason) == ("request_failed", "stockout", "no VMs")


def test_a_start_has_the_first_reports_of_new_vms_only() -> None:
    old, new = READY.vms
    mixed = replace(READY, vms=(replace(old, trained_from=NOW - 90.0), new))
    found = next_state(mixed, observed(first_reports={new.name: NOW - 30.0}))
    assert kinds(found) == ["agent_reported", "attempt_started"]
    assert (found.events.newest[0].vms, found.events.newest[0].time) == ((new.name,), NOW - 30.0)
    assert all(vm.trained_from for vm in found.vms)
    price = len(found.vms) * OPTION["dollars_per_hour"]
    assert found.events.newest[-1].dollars_per_hour == price > OPTION["dollars_per_hour"]


def test_a_loss_has_its_cause_and_the_last_sign_of_life() -> None:
    gone = {"silent": {NAMES[0]: 1.0, NAMES[1]: 46.0}, "looked_up": {NAMES[1]: None}}
    found = next_state(RUNNING, observed(**gone))
    ended, lost = found.events.newest[:2]
    assert (ended.kind, ended.cause) == ("attempt_ended", str(int(ExitCode.PREEMPTED)))
    assert (lost.kind, lost.vms, lost.cause) == ("vm_lost", NAMES[1:], "silent")
    assert (ended.since, lost.since) == (NOW - 46.0, NOW - 46.0)


def test_a_decision_that_changes_nothing_has_no_event() -> None:
    reports = {name: AgentReport("running", "b", 3) for name in NAMES}
    assert next_state(RUNNING, observed(reports=reports)) == RUNNING


def grown(number: int) -> DesiredState:
    events = tuple(LaunchEvent(n, "vms_requested", NOW + n) for n in range(number))
    return changed(READY, id="ab12", num_events=number, events=events)


def test_an_event_that_a_killed_launcher_has_stored_is_read_once(tmp_path: Path) -> None:
    desired, run_dir = grown(transition_events.STORED_TOGETHER + 3), RunDir(tmp_path)
    stored = transition_events.to_store(desired)
    later = grown(transition_events.STORED_TOGETHER + 9)
    assert stored == transition_events.to_store(later), "the next launcher writes another object"
    assert transition_events.to_store(grown(transition_events.STORED_TOGETHER - 1)) == ()
    folder = tmp_path / "launch" / "events"
    folder.mkdir(parents=True)
    state = tmp_path / "launch" / "desired_state.json"
    state.write_bytes(encode_state(desired))
    before = launch_events.read(run_dir)
    (folder / f"{desired.id}-{stored[0].number:08d}.jsonl").write_bytes(
        launch_events.encode(stored) + b'{"kind": "cut'
    )
    assert launch_events.read(run_dir) == before == list(desired.events.newest)
    kept = transition_events.without_stored(desired, before=stored[-1].number + 1)
    assert (len(kept.events.newest), kept.events.count) == (3, desired.events.count)
    state.write_bytes(encode_state(kept))
    assert launch_events.read(run_dir) == before
    state.write_text("{")
    told: list[str] = []
    assert launch_events.read(run_dir, warn=told.append) == list(stored)
    assert len(told) == 1
    assert told[0].startswith(f"{state}: is damaged")
    with pytest.raises(ConfigError, match="is damaged"):
        launch_events.read(run_dir)


def test_numbers_continue_after_a_move() -> None:
    kept = transition_events.without_stored(grown(20), before=16)
    found = next_state(kept, observed(vms=listed(*NAMES)))
    assert [event.number for event in found.events.newest[4:]] == [20, 21, 22]
    assert found.events.count == 23


def test_an_event_of_an_unknown_kind_is_kept_and_a_line_without_a_time_is_not(
    tmp_path: Path,
) -> None:
    line = {"number": 1, "kind": "of a newer version", "time": NOW, "more": 2}
    text = json.dumps({"id": "a", "events": [line, {"number": 2, "kind": "vm_lost"}]})
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "desired_state.json").write_text(text)
    found = launch_events.read(RunDir(tmp_path))
    assert [event.kind for event in found] == ["of a newer version"]


@pytest.mark.parametrize("name", ["time", "since"])
@pytest.mark.parametrize("value", [1e308, math.nan, math.inf])
def test_an_event_of_the_launcher_with_a_damaged_time_is_left_out(
    name: str, value: float, tmp_path: Path
) -> None:
    line = {"number": 1, "kind": "vm_lost", "time": NOW, "since": NOW}
    text = json.dumps({"id": "a", "events": [line | {name: value}, line | {"number": 2}]})
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "desired_state.json").write_text(text)
    assert [event.number for event in launch_events.read(RunDir(tmp_path))] == [2]


def test_status_has_the_seconds_of_the_newest_recovery() -> None:
    asked = next_state(RUNNING, observed(events={NAMES[1]: "compute.instances.hostError"}))
    found = gce_status.newest_recovery(asked.events.newest, now=NOW + 20.0)
    assert found == {"detection": 1.0, "capacity_wait": 20.0}
    assert gce_status.newest_recovery((), now=NOW) == {}
