"""After a lasting loss spike, training resumes from before its onset without the rows, and ends as
if these rows had been absent.
"""

from __future__ import annotations

import functools
import json
import signal
from pathlib import Path

import pytest

from jaxres.__main__ import main
from jaxres.clock import SystemClock
from jaxres.data import Permutation, sample_ids_at
from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_events, read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunLog, Skip
from tests.promises.trainer import FAULTY, TrainingProcess, Workspace, digest, history, run_history

ROWS = 24
ONSET, LAST, TARGET, STEPS = 23, 25, 20, 40
HARD = [
    int(row) for row in sample_ids_at(Permutation(1800, seed=0), ROWS * (ONSET - 1), 3 * ROWS)[0]
]
LEFT_OUT = (ROWS * (ONSET - 1), ROWS * LAST)
OVERRIDES = (
    "model.target=tests.promises.bad_models:hard",
    f"model.args={json.dumps({'items': HARD})}",
    "checkpoint.save_every_steps=5",
    "checkpoint.keep_last=4",
    "evaluation.every_steps=0",
    "guards.rollback.patience_steps=3",
    "guards.rollback.warmup_steps=10",
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> str:
    """Returns the digest of a run whose log had these skips before it reached the rows."""
    workspace = Workspace(tmp_path_factory.mktemp("skips"), caches)
    begun = workspace.start("skips", *OVERRIDES, "train.steps=5", config=FAULTY)
    assert begun.wait_exit() == ExitCode.DONE, begun.printed()
    run_dir = begun.run_dir
    seq = len(run_log.read_records(run_dir.log))
    log = RunLog(run_dir.log, attempt=1, last_seq=seq, clock=SystemClock())
    log.append(Skip(rows=(LEFT_OUT,), reason="requested by the test"))
    trainer = workspace.start("skips", *OVERRIDES, f"train.steps={STEPS}", config=FAULTY)
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    assert not rolled_back(run_dir)
    return digest(run_dir)


def rolled_back(run_dir: RunDir) -> list[run_log.Rollback]:
    """Returns the rollbacks in the run log."""
    return [record.body for record in run_history(run_dir).rollbacks]  # type: ignore[misc]


def start(workspace: Workspace, *arguments: str) -> TrainingProcess:
    return workspace.start("run", *OVERRIDES, f"train.steps={STEPS}", *arguments, config=FAULTY)


def assert_it_went_back(run_dir: RunDir) -> None:
    (record,) = rolled_back(run_dir)
    assert (record.onset, record.target, record.rows) == (ONSET, TARGET, (LEFT_OUT,))


@pytest.mark.slow
def test_a_run_with_a_lasting_loss_spike_ends_as_if_its_rows_were_absent(
    workspace: Workspace, expected: str
) -> None:
    trainer = start(workspace)
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    assert_it_went_back(trainer.run_dir)
    assert "ROLLBACK: step 25: loss" in trainer.printed()
    assert digest(trainer.run_dir) == expected
    assert [row["step"] for row in history(trainer.run_dir)] == list(range(1, STEPS + 1))


def wrote_rollback(trainer: TrainingProcess) -> bool:
    return bool(run_history(trainer.run_dir).rollbacks)


def in_phase(phase: str, trainer: TrainingProcess) -> bool:
    return trainer.entered(phase)


def has_restarted(trainer: TrainingProcess) -> bool:
    return len(run_history(trainer.run_dir).starts) > 1


def finished_a_step_since(trainer: TrainingProcess) -> bool:
    metrics = read_json_lines(trainer.run_dir.metrics(trainer.attempt))
    return (
        has_restarted(trainer) and metrics[-1]["seq"] == run_history(trainer.run_dir).starts[-1].seq
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        functools.partial(in_phase, "rollback"),
        wrote_rollback,
        functools.partial(in_phase, "restore"),
        has_restarted,
        finished_a_step_since,
    ],
    ids=["decided", "recorded", "restoring", "started", "stepped"],
)
def test_a_run_killed_during_a_rollback_ends_bit_exact(
    workspace: Workspace, expected: str, point: functools.partial[bool]
) -> None:
    trainer = start(workspace)
    trainer.wait(lambda: point(trainer), what="that point of the rollback")
    trainer.kill()
    assert trainer.wait_exit() == -signal.SIGKILL
    again = start(workspace)
    assert again.wait_exit() == ExitCode.DONE, again.printed()
    assert_it_went_back(again.run_dir)
    assert digest(again.run_dir) == expected


@pytest.mark.slow
def test_both_hosts_roll_back_to_the_same_step(workspace: Workspace) -> None:
    trainer = workspace.launched("run", *OVERRIDES, f"train.steps={STEPS}", hosts=2, config=FAULTY)
    assert_it_went_back(trainer.run_dir)
    for host in (0, 1):
        reported = read_events(trainer.run_dir.events(1, host))
        (event,) = [event for event in reported if event["event"] == "rolled_back"]
        assert (event["onset"], event["target"]) == (ONSET, TARGET)


@pytest.mark.slow
def test_more_rollbacks_than_allowed_end_the_run(workspace: Workspace) -> None:
    trainer = workspace.start(
        "run",
        *OVERRIDES,
        f"train.steps={STEPS}",
        "guards.rollback.max_rollbacks=1",
        "model.args=" + json.dumps({"items": HARD + more_hard()}),
        config=FAULTY,
    )
    trainer.assert_fails(ExitCode.DIVERGED, "the run has rolled back 1 times already")
    assert_it_went_back(trainer.run_dir)


FACTOR, FOR = 0.5, 10
LOWER = (f"guards.rollback.rate_factor={FACTOR}", f"guards.rollback.rate_steps={FOR}")


@pytest.mark.slow
def test_the_learning_rate_is_lower_after_a_rollback_also_after_kills(workspace: Workspace) -> None:
    """The run ends like one whose log had the record before it reached those rows."""
    reported = workspace.finish(
        "reported", *OVERRIDES, *LOWER, "train.steps=5", config=FAULTY
    ).run_dir
    seq = len(run_log.read_records(reported.log))
    record = run_log.Rollback(
        onset=ONSET,
        target=5,
        rows=(LEFT_OUT,),
        reason="requested by the test",
        rate_factor=FACTOR,
        rate_steps=FOR,
    )
    RunLog(reported.log, attempt=1, last_seq=seq, clock=SystemClock()).append(record)
    workspace.finish("reported", *OVERRIDES, *LOWER, f"train.steps={STEPS}", config=FAULTY)
    trainer = start(workspace, *LOWER)
    trainer.wait(lambda: finished_a_step_since(trainer), what="a step after the rollback")
    trainer.kill()
    assert trainer.wait_exit() == -signal.SIGKILL
    again = start(workspace, *LOWER)
    assert again.wait_exit() == ExitCode.DONE, again.printed()
    assert_it_went_back(again.run_dir)
    rates = {row["step"]: row["learning_rate"] for row in history(again.run_dir)}
    lower = {step for step, rate in rates.items() if rate == FACTOR * rates[1]}
    assert lower == set(range(ONSET, ONSET + FOR))
    assert digest(again.run_dir) == digest(reported)
    branch = workspace.run_dir("branch")
    words = ["branch", str(again.run_dir.root), "--to", str(branch.root), "--step", "25"]
    assert main(words) == ExitCode.DONE
    goes_on = workspace.command(branch, [str(branch.root)])
    assert goes_on.wait_exit() == ExitCode.DONE, goes_on.printed()
    assert digest(branch) == digest(again.run_dir), "a branch goes on with the lower rate"


@pytest.mark.slow
def test_a_checkpoint_older_than_any_spike_is_kept(workspace: Workspace) -> None:
    """Both newest commits are within the spike when it is detected; an older one is kept."""
    patience, in_a_row = 4, 1
    rows = sample_ids_at(Permutation(1800, seed=0), ROWS * (ONSET - 1), patience * ROWS)[0]
    trainer = workspace.start(
        "run",
        *OVERRIDES,
        f"train.steps={STEPS}",
        "checkpoint.save_every_steps=1",
        "checkpoint.keep_last=2",
        f"guards.rollback.patience_steps={patience}",
        f"guards.max_skips_in_a_row={in_a_row}",
        "model.args=" + json.dumps({"items": [int(row) for row in rows]}),
        config=FAULTY,
    )
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    (record,) = rolled_back(trainer.run_dir)
    assert record.onset == ONSET
    looks_back = (patience - 1) * (1 + in_a_row)
    assert ONSET - 2 * looks_back <= record.target < ONSET


@pytest.mark.slow
def test_a_preemption_notice_during_a_spike_does_not_save_it(
    workspace: Workspace, expected: str
) -> None:
    trainer = start(workspace)
    trainer.wait_step(ONSET + 1)
    trainer.kill(signal.SIGTERM, target="supervisor")
    assert trainer.wait_exit() == ExitCode.PREEMPTED, trainer.printed()
    again = start(workspace)
    assert again.wait_exit() == ExitCode.DONE, again.printed()
    assert_it_went_back(again.run_dir)
    assert digest(again.run_dir) == expected


@pytest.mark.slow
def test_a_rollback_policy_of_warn_only_warns_and_continues(workspace: Workspace) -> None:
    arguments = ("guards.rollback.mode=warn", "train.steps=30")
    trainer = workspace.start("run", *OVERRIDES, *arguments, config=FAULTY)
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    (reported,) = trainer.events_of("guard_warned")
    assert (reported["step"], rolled_back(trainer.run_dir)) == (LAST, [])
    assert "WARNING: step 25: loss" in trainer.printed()
    assert "would roll back to before step 23" in trainer.printed()


def more_hard() -> list[int]:
    """Rows that follow soon after the excluded ones."""
    return [
        int(row) for row in sample_ids_at(Permutation(1800, seed=0), ROWS * (LAST + 4), 3 * ROWS)[0]
    ]
