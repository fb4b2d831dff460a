"""A start with changed code is named on the console, in status and in history, and not bitwise."""

from __future__ import annotations

import json
import re
import signal

import pytest

from jaxres.cli import status
from jaxres.cli.checkpoints import history
from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.runlog.history import start_of
from tests.promises.trainer import MLP, TrainingProcess, Workspace, run_history

MODEL = """
import jax, jax.numpy as jnp

class Bigram:
    def init(self, key):
        return {"table": 0.02 * jax.random.normal(key, (256, 256))}

    def loss(self, params, batch, key):
        log_p = jax.nn.log_softmax(params["table"][batch["tokens_BT"]] * SCALE)
        nll = -jnp.take_along_axis(log_p, batch["targets_BT"][..., None], -1)[..., 0]
        return (nll * batch["weights_BT"]).sum(1), batch["weights_BT"].sum(1)

def build(vocab_size, seq_len):
    return Bigram()
"""


def started(
    workspace: Workspace, *overrides: str, scale: str, comment: str = ""
) -> TrainingProcess:
    """Starts with the model's code as given."""
    (workspace.root / "bigram.py").write_text(MODEL.replace("SCALE", scale) + comment)
    return workspace.start(
        "run",
        *overrides,
        *("model={kind: custom, target: 'bigram:build'}", "telemetry.sample_tokens=0"),
        *("train.steps=1000000", "evaluation.every_steps=0"),
        env={"PYTHONPATH": str(workspace.root)},
    )


def trained(workspace: Workspace, *, scale: str, comment: str = "") -> TrainingProcess:
    """Trains a few steps with the model's code as given."""
    trainer = started(workspace, scale=scale, comment=comment)
    trainer.wait_step(max(trainer.steps(), default=run_history(trainer.run_dir).step) + 2)
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.wait_exit() == ExitCode.PREEMPTED, trainer.printed()
    return trainer


def guarantee(trainer: TrainingProcess) -> str:
    (started,) = trainer.events_of("training_started")
    assert f"guarantee: {started['guarantee']}" in trainer.printed()
    return started["guarantee"]


@pytest.mark.slow
def test_a_model_changed_between_two_attempts_is_named_with_its_first_step(
    workspace: Workspace,
) -> None:
    first = trained(workspace, scale="1.0")
    assert guarantee(first) == "bitwise on this topology"
    same = trained(workspace, scale="1.0", comment="# The computation is the same.\n")
    assert guarantee(same) == "bitwise on this topology"
    step = run_history(same.run_dir).step
    refused = started(workspace, "run.guarantee=bitwise", scale="1.5")
    refused.assert_fails(78, "run.guarantee: bitwise is asked for, and this start would be none")
    assert run_history(same.run_dir).step == step
    changed = trained(workspace, scale="1.5")
    expected = rf"none: program \w{{16}} -> \w{{16}} since step {step} \(attempt 4\)"
    assert re.fullmatch(expected, guarantee(changed)), "other code goes on as if it were the same"
    again = trained(workspace, scale="1.5")
    assert guarantee(again) == guarantee(changed)
    found = run_history(again.run_dir)
    text = status.as_text(status.read_status(again.run_dir, found, clock=SystemClock()))
    assert f"guarantee  {guarantee(changed)}\n" in text
    attempts = history.attempts_text(again.run_dir, found, as_json=True).splitlines()
    levels = [json.loads(line)["guarantee"] for line in attempts]
    own = [guarantee(t) for t in (first, same, changed, again)]
    assert levels == [*own[:2], None, *own[2:]], "the refused attempt has no start"
    assert f"guarantee: {own[2]}" in history.attempts_text(again.run_dir, found, as_json=False)


@pytest.mark.slow
@pytest.mark.parametrize("inline", [False, True])
def test_bitwise_determinism_reaches_xla(workspace: Workspace, inline: bool) -> None:
    """XLA ends a process whose XLA_FLAGS it does not know, so training means that it knows it."""
    arguments = [
        *MLP,
        "train.steps=2",
        "run.determinism=bitwise",
        *(["--inline"] if inline else []),
    ]
    trainer = workspace.start("run", *arguments)
    assert trainer.wait_exit() == 0, trainer.printed()
    (start,) = run_history(trainer.run_dir).starts
    assert start_of(start).computation["xla_flags"] == "--xla_gpu_deterministic_ops=true"
    assert guarantee(trainer) == "bitwise on this topology"


@pytest.mark.slow
def test_options_of_xla_are_recorded_and_a_change_of_them_is_named(workspace: Workspace) -> None:
    arguments = [*MLP, "optimizer.schedule.kind=constant"]
    first = workspace.start("run", *arguments, "train.steps=2")
    assert first.wait_exit() == ExitCode.DONE, first.printed()
    (start,) = run_history(first.run_dir).starts
    assert "xla_options" not in start_of(start).computation, "the profile has none on CPUs"
    options = "{xla_backend_optimization_level: 1, xla_cpu_enable_fast_math: true}"
    resumed = workspace.start(
        *("run", *arguments, "train.steps=4", f"compilation.xla_options={options}"),
        env={"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"},
    )
    assert resumed.wait_exit() == ExitCode.DONE, resumed.printed()
    expected = "xla_options none -> xla_backend_optimization_level=1"
    assert expected in guarantee(resumed), "XLA_FLAGS win"
    assert "XLA_FLAGS has xla_cpu_enable_fast_math, which jaxres does not" in resumed.printed()
    refused = workspace.start("run", *arguments, "compilation.xla_options.xla_no_such=true")
    refused.assert_fails(ExitCode.CONFIG, "xla_options.xla_no_such=true: XLA of jaxlib")


@pytest.mark.slow
def test_a_setting_of_jax_that_changes_at_a_resume_is_named(workspace: Workspace) -> None:
    """Its program is another one, of the same code."""
    first = workspace.start("run", *MLP, "train.steps=2", "optimizer.schedule.kind=constant")
    assert first.wait_exit() == ExitCode.DONE, first.printed()
    assert guarantee(first) == "bitwise on this topology"
    other = {"JAX_THREEFRY_PARTITIONABLE": "0"}
    arguments = [*MLP, "train.steps=4", "optimizer.schedule.kind=constant"]
    resumed = workspace.start("run", *arguments, env=other)
    assert resumed.wait_exit() == ExitCode.DONE, resumed.printed()
    what = "JAX_THREEFRY_PARTITIONABLE default -> False since step 2 (attempt 2)"
    assert guarantee(resumed) == f"statistical: {what}"
    refused = workspace.start("run", *MLP, env={"JAX_DEFAULT_PRNG_IMPL": "rbg"})
    refused.assert_fails(ExitCode.CONFIG, "key: uint32[2], expected uint32[4]", "JAX_DEFAULT_PRNG")
