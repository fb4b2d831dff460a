"""A host that becomes slow is named within 50 steps, with its cause, and alerted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxres.runlog.event_log import read_json_lines
from tests.promises.trainer import FAULTY, TrainingProcess, Workspace
from tests.unit.telemetry.webhook_server import served

STEPS, WINDOW, WITHIN, FACTOR = 120, 10, 50, 8
"""FACTOR is relative to the rows before, with the work of their steps, on this machine."""
ROWS_A_STEP = 12
OVERRIDES = (
    f"train.steps={STEPS}",
    "checkpoint.save_every_steps=1000",
    "evaluation.every_steps=0",
)
GUARD = (
    "guards.throughput.min_seconds=0",
    f"guards.throughput.window_steps={WINDOW}",
    "guards.throughput.drop=0.5",
    "guards.throughput.probe=on",
)
"""Other processes of this machine halve no throughput for two windows, as a rule."""
TARGETS = "alerts.targets=[{kind: generic, url_env: HOOK, kinds: [straggler, throughput_dropped]}]"
PACE = "0.002"
"""Seconds a row: the data are what each host waits for."""


@pytest.mark.slow
def test_a_host_with_slow_data_is_named_within_50_steps_and_alerted(workspace: Workspace) -> None:
    onset = 65
    with served() as hook:
        env = {"PACE": PACE, "SLOW": f"1:{onset * ROWS_A_STEP}:{FACTOR}", "HOOK": hook.url}
        trainer = workspace.launch(
            *("run", *OVERRIDES, *GUARD, TARGETS),
            hosts=2,
            config=FAULTY,
            restart=True,
            env=env,
        )
        assert trainer.wait_exit() == 0, trainer.printed()
        reports = named(trainer, "straggler_found")
        assert reports, "host 1 is not named"
        found = reports[0]
        assert (found["cause"], found["devices"]) == ("data", [])
        assert onset < found["step"] <= onset + WITHIN
        assert [event["cause"] for event in named(trainer, "throughput_dropped")] == ["data"]
        incidents = {(body["kind"], body["host"]) for body in hook.accepted}
    assert {("straggler", 1), ("throughput_dropped", 1)} <= incidents
    assert f"step {found['step']}: {found['reason']}" in trainer.printed()
    assert trainer.events_of("straggler_found", host=1) == [], "one host reports"


@pytest.mark.slow
def test_a_host_that_is_stopped_most_of_the_time_is_the_cause_until_it_runs_again(
    workspace: Workspace,
) -> None:
    env = {"PACE": PACE}
    steps = "train.steps=1000000"
    trainer = workspace.launch("run", *OVERRIDES, steps, *GUARD, hosts=2, config=FAULTY, env=env)
    trainer.wait_step(70)
    usual = read_json_lines(trainer.run_dir.metrics(1))[-1]["usual_step_seconds"]
    with stopped_most_of_the_time(trainer.workers()[1], usual_step_seconds=usual):
        trainer.wait(
            lambda: bool(named(trainer, "throughput_dropped") or named(trainer, "straggler_found")),
            what="report that names host 1",
        )
    trainer.wait(
        lambda: bool(
            trainer.events_of("throughput_recovered") or named(trainer, "straggler_recovered")
        ),
        what="recovery",
    )
    trainer.kill()
    trainer.wait_exit()


def named(trainer: TrainingProcess, kind: str) -> list[dict[str, Any]]:
    """Returns the reports of host 1."""
    return [event for event in trainer.events_of(kind) if event["host"] == 1]


@contextlib.contextmanager
def stopped_most_of_the_time(pid: int, *, usual_step_seconds: float) -> Iterator[None]:
    """Stops a process for most of the time: it reads one or two rows between two stops.

    Its 12 rows a step take at least four times as long then as they usually do on this machine.
    """
    ends, stop_seconds = threading.Event(), max(0.04, 4 / 6 * usual_step_seconds)

    def run() -> None:
        while not ends.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stop_seconds)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.002)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
