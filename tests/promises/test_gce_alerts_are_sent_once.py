"""Under `launch gce` each incident reaches a real HTTP server once, over killed launchers."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import launch_events
from jaxres.runlog.event_log import read_json_lines
from tests.promises.cloud import Cloud
from tests.promises.preloaded import Jumping
from tests.promises.test_nonfinite_update_is_masked import ITEMS
from tests.promises.trainer import ROOT, run_history
from tests.unit.telemetry.webhook_server import Hook, served

TARGETS = "alerts.targets=[{kind: generic, url_env: HOOK}]"
HELD_AFTER = 25
"""No attempt makes more steps than these before the gate is open, however slow the machine is."""
DEAD = [500] * 10_000
MASKED = (
    "model.target=tests.promises.bad_models:poisoned",
    f"model.args={json.dumps({'items': ITEMS, 'where': 'gradient'})}",
    "alerts.masked_steps=1",
)
"""Steps 5, 6 and 11 are masked; an alert is sent about the second of them."""


def up(cloud: Cloud, config: Path, hook: Hook, *arguments: str, **env: str) -> Any:
    return cloud.launch(str(config), TARGETS, *MASKED, *arguments, HOOK=hook.url, **env)


def wait_delivered(cloud: Cloud, kind: str, hook: Hook, *, attempt: int) -> None:
    """Waits until the delivery of an incident is on record, so that a kill can't repeat it."""
    found = {"kind": kind, "attempt": attempt}
    cloud.wait(lambda: any(found.items() <= b.items() for b in hook.accepted), of=f"alert {kind}")
    (key,) = {b["id"] for b in hook.accepted if found.items() <= b.items()}

    def is_recorded() -> bool:
        lines = read_json_lines(cloud.run_dir.alerts)
        return any((line["key"], line["state"]) == (key, "delivered") for line in lines)

    cloud.wait(is_recorded, of=f"record of {kind}")


@pytest.mark.campaign
def test_each_incident_is_delivered_once_over_a_killed_launcher_a_dead_server_and_a_clock_jump(
    cloud: Cloud, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    held = {"PACE": "0.02", "FAULT": f"row:{24 * HELD_AFTER}:gate", "GATE": str(gate)}
    config = cloud.config(env=held)
    shutil.copy(ROOT / "tests/promises/bad_models.py", tmp_path / "package/tests/promises")
    clock = Jumping.built(tmp_path)
    with served() as hook:
        first = up(cloud, config, hook)
        cloud.wait_commit(10)
        wait_delivered(cloud, "masked_steps", hook, attempt=1)
        cloud.gce.preempt(cloud.member(0), notice=False)
        wait_delivered(cloud, "preempted", hook, attempt=1)
        cloud.wait_commit(run_history(cloud.run_dir).step + 1)
        hook.statuses[:] = DEAD
        cloud.gce.preempt(cloud.member(0), notice=False)
        tried = {"kind": "preempted", "attempt": 2}
        cloud.wait(
            lambda: any(tried.items() <= body.items() for body in hook.received), of="a failed try"
        )
        first.kill()
        assert first.wait_exit() == -signal.SIGKILL
        assert len(hook.accepted) == 2, "the server was not dead"
        hook.statuses.clear()
        gate.touch()
        clock.jump(3600)
        second = up(cloud, config, hook, **clock.env)
        wait_delivered(cloud, "preempted", hook, attempt=2)
        clock.jump(-86400)
        assert second.wait_exit() == 0, cloud.describe()
        assert ": resuming (" in second.printed()
        sent = [(body["kind"], body["attempt"], body["code"]) for body in hook.accepted]
        assert sent == [
            ("masked_steps", 1, None),
            ("preempted", 1, ExitCode.PREEMPTED),
            ("preempted", 2, ExitCode.PREEMPTED),
            ("finished", 3, 0),
        ], cloud.describe()
        assert len(set(hook.keys)) == len(hook.keys)
        again = up(cloud, config, hook)
        assert again.wait_exit() == 0, cloud.describe()
        assert len(hook.accepted) == len(sent), "a complete run repeats its alerts"
    kinds = [event.kind for event in launch_events.read(cloud.run_dir)]
    assert kinds.count("attempt_ended") == 3
    cloud.assert_nothing_is_left()


@pytest.mark.slow
def test_the_end_is_delivered_although_the_server_is_dead_when_the_launcher_exits(
    cloud: Cloud,
) -> None:
    config = cloud.config()
    with served(*DEAD) as hook:
        arguments = (str(config), TARGETS)
        first = cloud.launch(*arguments, HOOK=hook.url)
        assert first.wait_exit() == 0, f"the job did not end by itself\n{cloud.describe()}"
        assert "1 incidents were not delivered to generic:HOOK" in first.printed()
        hook.statuses.clear()
        second = cloud.launch(*arguments, HOOK=hook.url)
        assert second.wait_exit() == 0, cloud.describe()
        assert [body["kind"] for body in hook.accepted] == ["finished"]
    cloud.assert_nothing_is_left()
