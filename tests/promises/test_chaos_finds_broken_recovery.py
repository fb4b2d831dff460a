"""`jaxres chaos run` injects each planned fault, passes a sound run, and names a broken promise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxres.chaos.scenarios import BY_NAME
from jaxres.exit_codes import ExitCode
from jaxres.runlog import attempt_history, run_log
from tests.promises.leftovers import assert_nothing_left
from tests.promises.trainer import FAULTY, PATIENCE_SECONDS, Workspace

pytestmark = pytest.mark.slow
CODE = "tests.promises.hidden_state"


def chaos(workspace: Workspace, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Returns exit code, JSON and output of a `chaos run` of the FAULTY config."""
    result = workspace.root / "result.json"
    command = [str(FAULTY), f"data.cache_dir={workspace.caches}"]
    command += [f"compilation.cache_dir={workspace.caches / 'xla'}", *arguments]
    command += ["--json", str(result), "--to", str(workspace.root / "runs")]
    run_dir = workspace.run_dir("chaos")
    running = workspace.command(run_dir, ["chaos", "run", *command], verb=("jaxres",))
    code, printed = running.wait_exit(3 * PATIENCE_SECONDS), running.printed()
    assert result.exists(), printed
    return code, json.loads(result.read_text()), printed


def test_a_sound_run_recovers_from_a_kill_and_from_damage(workspace: Workspace) -> None:
    names = ("bit-flip", "worker-kill")
    code, result, printed = chaos(workspace, "--only", ",".join(names))
    assert (code, result["held"]) == (0, True), printed
    (run,) = result["runs"]
    assert run["broken"] == []
    assert sorted(fault["scenario"] for fault in run["faults"]) == sorted(names)
    assert all(fault["evidence"] for fault in run["faults"])
    assert all(fault["recovery_seconds"] > 0 for fault in run["faults"])
    run_dir = workspace.run_dir(f"runs/{run['name']}")
    ends = [one.exit for one in attempt_history.read(run_dir, is_alive=False)]
    assert ends[-1] == ExitCode.DONE
    for fault, end in zip(run["faults"], ends[:-1], strict=True):
        assert end in BY_NAME[fault["scenario"]].ends
    damaged = run_log.fold(run_log.read_records(run_dir.log)).quarantined
    assert len(damaged) == 1, "the fault was there, and the log says so"
    assert_nothing_left(run_dir)


def test_hidden_state_breaks_the_promise_of_the_same_bits(workspace: Workspace) -> None:
    target = f"model.target={CODE}:counted_model"
    code, result, printed = chaos(workspace, target, "worker-kill")
    (run,) = result["runs"]
    assert (code, result["held"]) == (1, False), printed
    assert run["faults"][0]["evidence"], "it is not the fault that is missing"
    assert [one["promise"] for one in run["broken"]] == ["same bits"]
    assert f"step {run['faults'][0]['resumed_at'] + 1}, loss" in run["broken"][0]["text"]
    assert "broken: same bits" in printed
