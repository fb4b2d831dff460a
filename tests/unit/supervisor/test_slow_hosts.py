"""A host that has held up an attempt for too long is proposed, or left out at the next start."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxres.clock import SystemClock
from jaxres.cluster.host_identity import HostIdentity
from jaxres.config.schema.training import ThroughputSection
from jaxres.exit_codes import ExitCode
from jaxres.faults import UnhealthyHost
from jaxres.runlog import faulty_hosts
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import attempt_runner, host_exclusion, slow_hosts
from jaxres.supervisor.slow_hosts import Cost, beyond_budget, costs
from tests.unit.runlog.example_records import CLAIM

MACHINES = {0: HostIdentity("vm-0"), 1: HostIdentity("vm-1"), 2: HostIdentity("vm-2")}
THREE = dataclasses.replace(CLAIM, num_hosts=3)
ACT = ThroughputSection(exclude="next_start")


def found(at: float, host: int, *devices: int, ratio: float = 2.0) -> dict[str, Any]:
    """An event: a host, or devices of it, take `ratio` times as long as the others."""
    event = {"event": "straggler_found", "host": host, "devices": devices, "ratio": ratio}
    return {"time": 0.0, "monotonic": at, **event, "reason": f"host {host} is slow"}


def recovered(at: float, host: int, *devices: int) -> dict[str, Any]:
    event = {"event": "straggler_recovered", "host": host, "devices": devices}
    return {"time": 0.0, "monotonic": at, **event}


def other(at: float) -> dict[str, Any]:
    return {"time": 0.0, "monotonic": at, "event": "commit"}


def test_a_slow_host_costs_the_time_by_which_the_others_wait_for_it():
    events = [other(0), found(100, 1, ratio=2.0), other(150), other(200)]
    assert costs(events) == [Cost(1, 50.0, "host 1 is slow")]
    assert costs([]) == costs([other(0), other(9)]) == []


def test_slow_devices_of_a_host_cost_what_the_slowest_of_them_does():
    events = [found(0, 1, 4, ratio=2.0), found(50, 1, 5, ratio=4.0), recovered(100, 1, 5)]
    assert costs([*events, other(150)]) == [Cost(1, 25.0 + 37.5 + 25.0, "host 1 is slow")]


def test_a_host_that_has_recovered_is_not_left_out_whatever_it_has_cost():
    events = [found(0, 1), found(0, 2, ratio=4.0), recovered(9000, 1), other(9010)]
    assert [cost.host for cost in costs(events)] == [2]


def test_the_costliest_host_beyond_the_budget_is_left_out_and_no_other():
    both = costs([found(0, 1), found(0, 2, ratio=4.0), other(1000)])
    assert [(cost.host, cost.seconds) for cost in both] == [(2, 750.0), (1, 500.0)]
    assert beyond_budget(both, budget_seconds=600.0, num_hosts=3) == both[0]
    assert beyond_budget(both, budget_seconds=750.0, num_hosts=3) is None
    assert beyond_budget(both, budget_seconds=1.0, num_hosts=1) is None, "the only host"
    assert beyond_budget([], budget_seconds=1.0, num_hosts=3) is None


def review(
    tmp_path: Path, section: ThroughputSection, *, minutes: int = 80, **changes: Any
) -> str | None:
    """Returns the message after an attempt in which host 1 was twice as slow for some minutes."""
    run_dir = RunDir(tmp_path)
    path = Path(str(run_dir.events(THREE.attempt, 0)))
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [found(0, 1), other(900), other(60 * minutes)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"machines": MACHINES, "claim": THREE} | changes
    return slow_hosts.review(run_dir, given["claim"], section, machines=given["machines"], now=5.0)


def excluded(tmp_path: Path) -> list[str]:
    return [host.name for host in faulty_hosts.read(RunDir(tmp_path))]


def test_by_default_a_slow_host_is_proposed_only(tmp_path: Path):
    told = review(tmp_path, ThroughputSection())
    assert told is not None
    assert "host 1 has cost the attempt 40.0 minutes (more than 30): " in told
    assert told.endswith(f"jaxres hosts {tmp_path} --exclude vm-1")
    assert excluded(tmp_path) == [], "a default leaves a host out"
    assert review(tmp_path, ThroughputSection(), minutes=60) is None, "within the budget"
    assert review(tmp_path, ThroughputSection(exclude="off")) is None


def test_if_the_config_says_so_the_next_start_leaves_the_host_out(tmp_path: Path):
    here = MACHINES | {1: HostIdentity(socket.gethostname())}
    told = review(tmp_path, ACT, machines=here)
    assert told is not None
    assert "is left out from the next start on" in told
    assert excluded(tmp_path) == [socket.gethostname()]
    with pytest.raises(UnhealthyHost, match=r"host 1 has cost the attempt 40\.0 minutes"):
        host_exclusion.on_this_machine(RunDir(tmp_path), [], env={})
    assert review(tmp_path, ACT, machines=here) is None, "it is left out already"


def test_a_slot_and_a_machine_without_a_name_are_never_left_out(tmp_path: Path):
    slots = dataclasses.replace(THREE, slots=(0, 2, 3))
    told = review(tmp_path, ACT, claim=slots)
    assert told is not None
    assert told.endswith("--exclude vm-1:2")
    told = review(tmp_path, ACT, machines=MACHINES | {1: HostIdentity()})
    assert told is not None
    assert "set JAXRES_HOST_NAME to its name" in told
    assert excluded(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "recorded", "expected"),
    [
        (ExitCode.PREEMPTED, True, {0: "leader", 1: "vm-1", 2: "vm-2"}),
        (ExitCode.DONE, True, None),
        (ExitCode.FENCED, False, None),
    ],
)
def test_the_attempt_of_each_leader_is_reviewed_at_its_end_unless_the_run_is_done(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    code: ExitCode,
    recorded: bool,
    expected: dict[int, str] | None,
):
    reviewed = list[Any]()

    def noted(run_dir: RunDir, claim: Any, section: Any, *, machines: Any, now: float) -> None:
        reviewed.append((section, {host: machine.name for host, machine in machines.items()}))

    ended = AttemptResult(code, "its reason", is_recorded=recorded)
    monkeypatch.setattr(slow_hosts, "review", noted)
    monkeypatch.setattr(attempt_runner, "supervise", lambda *_, **__: ended)
    monkeypatch.setattr(attempt_runner, "upload_artifacts", lambda *_: None)
    monkeypatch.setattr(attempt_runner, "worker_env", lambda *_, **__: {})
    links = {host: SimpleNamespace(identity=MACHINES[host]) for host in (1, 2)}
    opened: Any = SimpleNamespace(
        config=SimpleNamespace(
            guards=SimpleNamespace(throughput=ACT), alerts=None, deadlines=None, program=None
        ),
        run_dir=RunDir(tmp_path),
        claim=dataclasses.replace(THREE, coordinator="at"),
        hosts=(0,),
        secret=None,
        last_seq=1,
    )
    services: Any = SimpleNamespace(
        clock=SystemClock(), peers=SimpleNamespace(links=links), run_lock=object()
    )
    env = {"JAXRES_HOST_NAME": "leader"}
    attempt_runner.run_local_workers(opened, services, env=env, advise=lambda *_: "")
    assert reviewed == ([] if expected is None else [(ACT, expected)])
