"""With train.reduction=invariant a run ends with the same bits on any number of devices and hosts.

Also if it is killed and goes on with others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres.runlog.guarantee import BITWISE_ANYWHERE, guarantee_level
from jaxres.runlog.run_log import start_of
from tests.promises.trainer import (
    FAULTY,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    run_history,
    starts,
)

STEPS = 48
COMMON = (
    f"train.steps={STEPS}",
    "train.reduction=invariant",
    "train.microbatches=3",
    "optimizer.clip_norm=0.5",
    "checkpoint.save_every_steps=8",
    "evaluation.every_steps=0",
)
MLP = "model={kind: mlp, vocab_size: 64}"
GPT = (
    "model={kind: gpt, num_layers: 2, d_model: 64, num_heads: 2, vocab_size: 64, dropout: 0.1, "
    "compute_dtype: float32}"
)
STEPS_BEFORE_THE_GATE = 20
ROWS = 24


def train(
    workspace: Workspace, name: str, hosts: int, devices: int, *arguments: str, gate: Path | None
) -> TrainingProcess:
    """Trains on hosts x devices; with a gate each host waits for a row after some steps."""
    env = {"JAX_NUM_CPU_DEVICES": str(devices), "NPROC": "2"}
    if gate is not None:
        row = STEPS_BEFORE_THE_GATE * ROWS // hosts
        env |= {"FAULT": f"row:{row}:gate", "GATE": str(gate)}
    return workspace.launch(name, *COMMON, *arguments, hosts=hosts, config=FAULTY, env=env)


def finished(workspace: Workspace, name: str, hosts: int, devices: int, *arguments: str) -> None:
    trainer = train(workspace, name, hosts, devices, *arguments, gate=None)
    assert trainer.wait_exit() == 0, trainer.printed()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "killed"),
    [
        (MLP, [(2, 2, "mesh.fsdp=2")]),
        pytest.param(
            GPT,
            [(2, 2, "mesh.fsdp=2"), (1, 8, "mesh.fsdp=4"), (4, 1, "mesh.data=4")],
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["mlp", "gpt"],
)
def test_a_run_killed_and_resumed_on_other_hosts_and_devices_ends_bit_exact(
    workspace: Workspace, tmp_path: Path, model: str, killed: list[tuple[int, int, str]]
) -> None:
    committed = 0
    for hosts, devices, mesh in killed:
        trainer = train(
            workspace, "broken", hosts, devices, model, mesh, gate=tmp_path / "never opened"
        )
        trainer.wait_commit(committed + 8)
        trainer.kill()
        assert trainer.wait_exit() == -9, trainer.printed()
        committed = run_history(trainer.run_dir).step
    finished(workspace, "broken", 1, 4, model)
    finished(workspace, "one", 1, 1, model)

    broken, one = workspace.run_dir("broken"), workspace.run_dir("one")
    used = [start_of(record).devices for record in run_history(broken).starts]
    assert used == [*((n,) * hosts for hosts, n, _ in killed), (4,)], "not the topologies meant"
    begun = starts(broken)
    assert begun[0] == 0, begun
    assert begun == sorted(set(begun)), "nothing was resumed"
    assert_bit_exact(broken, one)
    assert guarantee_level(run_history(broken).starts) == BITWISE_ANYWHERE
