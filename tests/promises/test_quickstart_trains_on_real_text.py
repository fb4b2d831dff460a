"""The quickstart works: the loss falls on real text, and the summary is readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.promises.trainer import Workspace, history
from tests.tiers import slow_but

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("devices", slow_but([1, 2], 1))
def test_the_quickstart_learns_and_prints_a_summary(workspace: Workspace, devices: int) -> None:
    # Any steps, seed, interval and mesh are valid together on the quickstart (CONTRACT).
    trainer = workspace.finish(
        "quick",
        "train.steps=12",
        "run.seed=3",
        "checkpoint.save_every_steps=5",
        f"mesh.fsdp={devices}",
        "telemetry.sample_tokens=8",
        config=QUICKSTART,
        env={"JAX_NUM_CPU_DEVICES": str(devices)},
    )
    losses = [row["loss"] for row in history(workspace.run_dir("quick"))]
    assert len(losses) == 12
    assert losses[0] > 5
    assert losses[-1] < 4
    printed = trainer.printed()
    for text in ("guarantee: bitwise", "held-out loss", "the model writes:", "training loss over"):
        assert text in printed, printed
    assert "what to try next" in printed
