"""`jaxres chaos run` injects each planned fault, passes a sound run, and names a broken promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.operate.chaos.scenarios import BY_NAME, KILLED
from jaxres.runlog import attempt_history, run_log
from jaxres.runlog.event_log import read_events
from tests.promises.leftovers import assert_nothing_left
from tests.promises.trainer import FAULTY, TINY, Workspace
from tests.waiting import SURE_SECONDS

pytestmark = pytest.mark.slow
SMALL = ("model.kind=mlp", "optimizer.schedule.kind=constant", "evaluation.every_steps=0")
"""Overrides of TINY: it compiles in a third of the time, and a save is larger than the logs."""
CODE = "tests.promises.hidden_state"


def chaos(
    workspace: Workspace, *arguments: str, config: Path = FAULTY, devices: int = 1
) -> tuple[int, dict[str, Any], str]:
    """Returns exit code, JSON and output of a `chaos run`."""
    result = workspace.root / "result.json"
    command = [str(config), f"data.cache_dir={workspace.caches}"]
    command += [f"compilation.cache_dir={workspace.caches / 'xla'}", *arguments]
    command += ["--json", str(result), "--to", str(workspace.root / "runs")]
    run_dir = workspace.run_dir("chaos")
    env = {"JAX_NUM_CPU_DEVICES": str(devices)}
    running = workspace.command(run_dir, ["chaos", "run", *command], verb=("jaxres",), env=env)
    code, printed = running.wait_exit(3 * SURE_SECONDS), running.printed()
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


def exits(workspace: Workspace, run: dict[str, Any]) -> list[int | None]:
    run_dir = workspace.run_dir(f"runs/{run['name']}")
    assert_nothing_left(run_dir)
    return [one.exit for one in attempt_history.read(run_dir, is_alive=False)]


@pytest.mark.campaign
def test_a_zombie_and_a_lost_log_end_in_the_same_bits(workspace: Workspace) -> None:
    code, result, printed = chaos(workspace, "--only", "zombie,lost-log")
    assert (code, result["held"]) == (0, True), printed
    (run,) = result["runs"]
    assert all(fault["evidence"] for fault in run["faults"])
    ends = exits(workspace, run)
    assert ends[-1] == ExitCode.DONE
    assert ends.count(ExitCode.STOPPED) == 1, "`checkpoints adopt` is an attempt of its own"
    assert ends.count(None) == 2, "of the zombie, and of the attempt whose record was lost"
    output = (workspace.root / "runs" / f"{run['name']}.txt").read_text()
    assert f"exit {ExitCode.FENCED.value} " in output
    assert f"exit {ExitCode.UNRESTORABLE.value} " in output


def test_storage_that_refuses_a_save_ends_no_attempt(workspace: Workspace) -> None:
    """The workers are held until a save has failed or got through, so no limit of time counts."""
    code, result, printed = chaos(workspace, *SMALL, "full-disk", config=TINY)
    assert (code, result["held"]) == (0, True), printed
    (run,) = result["runs"]
    (fault,) = run["faults"]
    assert exits(workspace, run) == [ExitCode.DONE]
    found = run_log.fold(run_log.read_records(workspace.run_dir(f"runs/{run['name']}").log))
    assert fault["step"] not in {commit.step for commit in found.committed}
    assert fault["step"] + 3 in {commit.step for commit in found.committed}


@pytest.mark.campaign
def test_a_bucket_that_is_away_ends_no_attempt(workspace: Workspace) -> None:
    code, result, printed = chaos(workspace, "storage-outage")
    assert (code, result["held"]) == (0, True), printed
    (run,) = result["runs"]
    (away,) = run["faults"]
    assert "for every request" in away["evidence"]
    assert away["repeated_steps"] == 0


@pytest.mark.campaign
def test_hidden_state_breaks_the_promise_of_the_same_bits(workspace: Workspace) -> None:
    target = f"model.target={CODE}:counted_model"
    code, result, printed = chaos(workspace, target, "worker-kill")
    (run,) = result["runs"]
    assert (code, result["held"]) == (1, False), printed
    assert run["faults"][0]["evidence"], "it is not the fault that is missing"
    assert [one["promise"] for one in run["broken"]] == ["same bits"]
    assert f"step {run['faults'][0]['resumed_at'] + 1}, loss" in run["broken"][0]["text"]
    assert "broken: same bits" in printed


@pytest.mark.campaign
def test_a_cut_and_a_lost_host_end_every_supervisor_and_the_next_start_is_bit_exact(
    workspace: Workspace,
) -> None:
    code, result, printed = chaos(workspace, "partition", "peer-lost", "--hosts", "2")
    assert (code, result["held"]) == (0, True), printed
    (run,) = result["runs"]
    by_name = {fault["scenario"]: fault for fault in run["faults"]}
    assert "bytes lost" in by_name["partition"]["evidence"]
    assert "SIGKILL to the supervisor of host" in by_name["peer-lost"]["evidence"]
    ends = exits(workspace, run)
    assert ends[-1] == ExitCode.DONE
    assert ExitCode.PEER_LOST in ends
    assert result["kinds"]["partition"] == "passed"


ENDS = {
    "nan-step": [KILLED],
    "flipped-copy": [ExitCode.UNHEALTHY],
    "nan-state": [ExitCode.DIVERGED],
    "crash-loop": [KILLED, KILLED, KILLED],
    "bad-config": [ExitCode.PREEMPTED],
    "missing-device": [ExitCode.PREEMPTED, ExitCode.UNHEALTHY],
    "out-of-memory": [ExitCode.OUT_OF_MEMORY, ExitCode.OUT_OF_MEMORY],
    "unhealthy-device": [ExitCode.UNHEALTHY],
    "failed-preflight": [ExitCode.PREEMPTED, ExitCode.UNHEALTHY],
}
"""Scenario -> how the attempts before the last one end."""


def assert_held(workspace: Workspace, *names: str, devices: int = 1) -> dict[str, list[int | None]]:
    """Injects faults, each into a run of its own; returns the exits of each run's attempts."""
    code, result, printed = chaos(workspace, "--only", ",".join(names), devices=devices)
    assert (code, result["held"]) == (0, True), printed
    assert len(result["runs"]) == len(names)
    for run in result["runs"]:
        (fault,) = run["faults"]
        assert fault["evidence"], printed
    return {run["faults"][0]["scenario"]: exits(workspace, run) for run in result["runs"]}


def test_nothing_of_a_masked_step_or_of_a_flipped_bit_is_kept(workspace: Workspace) -> None:
    ends = assert_held(workspace, "nan-step", "flipped-copy", devices=2)
    assert ends == {name: [*ENDS[name], ExitCode.DONE] for name in ("nan-step", "flipped-copy")}


@pytest.mark.campaign
def test_a_run_that_was_refused_or_given_up_ends_in_the_same_bits(workspace: Workspace) -> None:
    names = ("bad-config", "missing-device", "nan-state", "crash-loop")
    ends = assert_held(workspace, *names, devices=2)
    assert ends == {name: [*ENDS[name], ExitCode.DONE] for name in names}


def test_memory_that_runs_out_and_a_faulty_gpu_end_the_run_with_their_codes(
    workspace: Workspace,
) -> None:
    names = ("out-of-memory", "unhealthy-device")
    ends = assert_held(workspace, *names)
    assert ends == {name: [*ENDS[name], ExitCode.DONE] for name in names}
    (lacking,) = (name for name in ("run-1", "run-2") if len(attempts(workspace, name)) == 3)
    printed = (workspace.root / "runs" / f"{lacking}.txt").read_text()
    assert "out of memory: RESOURCE_EXHAUSTED" in printed, "it is the error of XLA"
    (sick,) = {"run-1", "run-2"} - {lacking}
    first, second = attempts(workspace, sick)
    assert second.start_step == first.finished_step, "it was saved, and is resumed from there"


def attempts(workspace: Workspace, name: str) -> list[attempt_history.AttemptSummary]:
    return attempt_history.read(workspace.run_dir(f"runs/{name}"), is_alive=False)


@pytest.mark.campaign
def test_a_device_that_fails_its_test_keeps_the_run_from_training(workspace: Workspace) -> None:
    name = "failed-preflight"
    assert assert_held(workspace, name) == {name: [*ENDS[name], ExitCode.DONE]}
    _, refused, _ = attempts(workspace, "run-1")
    assert refused.start_step is None
    printed = (workspace.root / "runs" / "run-1.txt").read_text()
    assert "a product of float32 matrices is wrong" in printed, "it is the test that has failed"
    assert "hardware.preflight=quick: passed in" in printed, "also after the repair"


@pytest.mark.campaign
def test_a_slow_host_alone_is_named_and_the_run_ends_in_the_same_bits(workspace: Workspace) -> None:
    code, result, printed = chaos(workspace, "straggler", "--hosts", "2")
    assert (code, result["held"]) == (0, True), printed
    (run,) = result["runs"]
    (fault,) = run["faults"]
    assert "s longer for each step from 33 on" in fault["evidence"]
    assert exits(workspace, run) == [ExitCode.DONE]
    events = read_events(workspace.run_dir(f"runs/{run['name']}").events(1, 0))
    (found,) = (event for event in events if event["event"] == "straggler_found")
    assert (found["host"], found["cause"]) == (fault["host"], "host")
    assert found["step"] > fault["step"]


def test_a_scenario_that_the_devices_do_not_fit_is_refused(workspace: Workspace) -> None:
    run_dir = workspace.run_dir("chaos")
    command = ["chaos", "run", str(FAULTY), "missing-device", f"data.cache_dir={workspace.caches}"]
    command += [f"compilation.cache_dir={workspace.caches / 'xla'}"]
    env = {"JAX_NUM_CPU_DEVICES": "1"}
    running = workspace.command(run_dir, command, verb=("jaxres",), env=env)
    running.assert_fails(ExitCode.USAGE, "missing-device: not applicable", "JAX_NUM_CPU_DEVICES=2")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("vm-lost", "launcher-kill"), marks=pytest.mark.campaign),
        ("stockout", "launch-state-lost"),
    ],
)
def test_vms_and_their_launcher_are_lost_and_the_run_ends_in_the_same_bits(
    workspace: Workspace, names: tuple[str, str]
) -> None:
    code, result, printed = chaos(workspace, *names)
    assert (code, result["held"]) == (0, True), printed
    (run,) = result["runs"]
    assert {fault["scenario"] for fault in run["faults"]} == {*names}
    evidence = {fault["scenario"]: fault["evidence"] for fault in run["faults"]}
    repeated = {fault["scenario"]: fault["repeated_steps"] for fault in run["faults"]}
    if "launcher-kill" in names:
        assert "SIGKILL to the launcher; epoch 1 became 2" in evidence["launcher-kill"]
        assert "is gone without a notice" in evidence["vm-lost"]
        assert repeated["launcher-kill"] == 0
    else:
        assert "is gone without a notice" in evidence["stockout"]
        assert "the desired state was deleted while" in evidence["launch-state-lost"]
    assert all(0 <= steps <= result["save_every_steps"] for steps in repeated.values())
