"""Status and history show how real attempts ended, killed ones included; scripts can act on it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

from jaxres.cli.checkpoints import command as checkpoints_cli
from tests.promises.trainer import FAULTY, PACED, TrainingProcess, Workspace


def reported(trainer: TrainingProcess, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Returns the exit code and the JSON of a command on the trainer's run directory."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = checkpoints_cli.main(
            [arguments[0], str(trainer.run_dir.root), *arguments[1:], "--json"], usage=""
        )
    return code, [json.loads(line) for line in out.getvalue().splitlines()]


def test_history_shows_killed_attempts_and_their_steps(workspace: Workspace) -> None:
    trainer = workspace.start("run", config=FAULTY, env=PACED | {"HELD": "16"})
    trainer.wait_step(13)
    trainer.wait_commit(10)
    code, (status,) = reported(trainer, "status")
    assert (code, status["state"], status["attempts"][-1]["cause"]) == (0, "running", "running")
    (host,) = status["hosts"]
    assert (host["host"], host["step"] >= 13) == (0, True)
    assert host["phase"] in ("train", "wait for data"), "it is held before it saves step 20"
    trainer.kill()
    assert trainer.wait_exit() == -9
    code, (status,) = reported(trainer, "status", "--watch")
    assert (code, status["state"], status["attempts"][-1]["cause"]) == (1, "down", "killed")

    trainer = workspace.start("run", config=FAULTY, env=PACED | {"HELD": "16"})
    trainer.wait_commit(20)
    trainer.kill(target="worker")
    assert trainer.wait_exit() == 137
    trainer = workspace.finish("run", config=FAULTY)
    code, (status,) = reported(trainer, "status")
    assert (code, status["state"]) == (0, "done")

    code, (first, second, third) = reported(trainer, "history", "--attempts")
    assert code == 0
    assert [one["cause"] for one in (first, second, third)] == [
        "killed",
        "signal 9 (SIGKILL)",
        "DONE",
    ]
    assert "SIGKILL" in second["reason"]
    assert first["start_step"] == 0
    assert second["start_step"] == first["committed_step"] == first["steps_kept"]
    assert third["start_step"] == second["committed_step"]
    assert third["finished_step"] == third["committed_step"] == 60
    kept = first["steps_kept"] + second["steps_kept"] + third["steps_kept"]
    assert kept == 60, "what is kept is the run"
    assert first["steps_gained"] >= 13
    for one in (first, second, third):
        phases = one["phase_seconds"]
        assert {"import", "build", "train"} <= set(phases)
        assert 0 < sum(phases.values()) <= one["end"] - one["start"] + 1.0
    assert third["phase_seconds"]["restore"] > 0
