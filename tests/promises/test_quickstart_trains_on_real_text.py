"""The quickstart works: the loss falls on real text, and the summary is readable."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.promises.trainer import Workspace, event_files, history
from tests.tiers import campaign

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, *campaign([2])])
def test_the_quickstart_learns_and_prints_a_summary(workspace: Workspace, devices: int) -> None:
    # Any steps, seed, interval and mesh are valid together on the quickstart (CONTRACT).
    trainer = workspace.finish(
        "quick",
        "train.steps=12",
        "run.seed=3",
        "checkpoint.save_every_steps=5",
        f"mesh.fsdp={devices}",
        "telemetry.sample_tokens=8",
        "telemetry.tensorboard=true",
        config=QUICKSTART,
        env={"JAX_NUM_CPU_DEVICES": str(devices)},
    )
    losses = [row["loss"] for row in history(workspace.run_dir("quick"))]
    assert len(losses) == 12
    assert losses[0] > 5
    assert losses[-1] < 4
    printed = trainer.printed()
    for text in (
        "guarantee: bitwise",
        "resume-check: ",
        "held-out loss",
        "the model writes:",
        "training loss over",
    ):
        assert text in printed, printed
    assert "what to try next" in printed
    (sample,) = trainer.events_of("sample_written")
    (written,) = event_files(trainer.run_dir).Tensors("sample")
    assert (written.step, sample["step"]) == (12, 12)
    shown = written.tensor_proto.string_val[0].decode()
    assert shown.startswith("    def ")  # The prompt, as a block of code.
    assert shown == textwrap.indent(sample["text"], "    ", lambda line: True)
