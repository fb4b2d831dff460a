"""The timing of saves does not change the run, and all hosts make the same saves."""

from __future__ import annotations

from typing import Any

import pytest

from jaxres.runlog.paths import RunDir
from tests.promises.trainer import (
    FAULTY,
    MLP,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    run_history,
    starts,
)

BARE = tuple(argument for argument in MLP if "save_every_steps" not in argument)
SLOWLY = {"PACE": "0.005", "HELD": "58"}
"""About 8 steps per second, so that saves end meanwhile; it is killed before its last step."""
WHEN = "checkpoint.when={kind: %s}"


def events(trainer: TrainingProcess, kind: str, host: int = 0) -> list[dict[str, Any]]:
    return [event for event in trainer.events(host) if event["event"] == kind]


@pytest.mark.slow
def test_a_run_with_time_based_saves_is_bit_exact_after_kills(
    workspace: Workspace, fault_free: RunDir
) -> None:
    often = WHEN % "auto, mtbf_hours: 1.0e-5, max_overhead: 1.0"
    trainer = workspace.start("run", often, config=FAULTY, env=SLOWLY)
    trainer.wait(lambda: len(events(trainer, "save_committed")) >= 2, what="two commits")
    trainer.wait(
        lambda: len(events(trainer, "save_interval_chosen")) >= 2,
        what="another choice, after a save was measured",
    )
    trainer.kill()
    assert trainer.wait_exit() == -9
    chosen = events(trainer, "save_interval_chosen")
    assert chosen[0]["stall_seconds"] == 1.0
    measured = chosen[-1]
    assert 0 < measured["stall_seconds"] < measured["seconds"]
    assert measured["write_seconds"] > 0
    assert (measured["failures"], measured["restart_seconds"] > 0) == (0, True)

    again = workspace.finish("run", often, config=FAULTY)
    assert events(again, "save_interval_chosen")[0]["failures"] == 1, "the kill counts"
    assert 0 < starts(again.run_dir)[1] < 60
    assert "saving every" in again.printed()
    assert_bit_exact(again.run_dir, fault_free)


@pytest.mark.slow
def test_hosts_skip_and_start_the_same_saves(workspace: Workspace) -> None:
    """The parts of a save end at different times on each host; host 0 decides for all."""
    common = (*BARE, "train.steps=40", "checkpoint.timeout_seconds=600")
    skipping = (*common, "checkpoint.save_every_steps=1", "checkpoint.busy=skip")
    first = workspace.launched("run", *skipping, hosts=2)
    skipped = [event["step"] for event in events(first, "save_skipped")]
    begun = [event["step"] for event in events(first, "save_started")]
    assert len(skipped) >= 3
    assert not set(skipped) & set(begun)
    assert sorted([*skipped, *begun]) == list(range(1, 41))
    assert {event["step"] for event in events(first, "save_waited")} <= {40}, "the last one waits"
    assert begun == [event["step"] for event in events(first, "save_started", host=1)]
    assert begun[-1] == run_history(first.run_dir).step == 40

    again = (*common, WHEN % "continuous", "train.steps=70")
    second = workspace.launched("run", *again, hosts=2)
    begun = [event["step"] for event in events(second, "save_started")]
    assert len(begun) >= 2
    assert begun == [event["step"] for event in events(second, "save_started", host=1)]
    assert begun == [event["step"] for event in events(second, "save_committed")]
    assert begun[-1] == 70
