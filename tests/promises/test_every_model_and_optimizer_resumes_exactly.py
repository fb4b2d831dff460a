"""What a model and an optimizer keep is in the state: after SIGKILL a run ends as unbroken."""

from __future__ import annotations

import random

import pytest

from jaxres.checkpoint.read import manifest
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import MLP, Workspace, assert_bit_exact, run_history, starts
from tests.tiers import campaign_but

OWN = (
    *("model={kind: custom, target: 'tests.promises.own_parts:build'}", "evaluation.every_steps=0"),
    *("train.steps=60", "checkpoint.save_every_steps=5", "telemetry.sample_tokens=0"),
)
GPT = (
    *("model.kind=gpt", "model.num_layers=2", "model.d_model=32", "model.num_heads=2"),
    *("train.steps=60", "evaluation.every_steps=0", "checkpoint.save_every_steps=5"),
)
CHAIN = "{kind: custom, target: 'tests.promises.own_parts:chain', args: {decay: 0.5}}"
GROUPS = (
    "[{match: '*norm*', weight_decay: 0.1, learning_rate: 0.003}, {match: embedding, "
    "weight_decay: 0}]"
)
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "batch-statistics": (
        (*OWN, "train.microbatches=2"),
        ("model_state/norm/mean", "model_state/norm/var"),
    ),
    "ema": (
        (*MLP, "train.steps=60", "checkpoint.save_every_steps=5", "optimizer.ema_decay=0.9"),
        ("ema/layers/kernel",),
    ),
    "muon": (
        (*GPT, "optimizer={kind: muon}"),
        ("opt/inner_states/muon/inner_state/0/mu/blocks/attention/query",),
    ),
    "adafactor": (
        (*GPT, "optimizer={kind: adafactor, min_dim_size_to_factor: 16}"),
        ("opt/0/v_row/blocks/attention/query",),
    ),
    "own-optimizer": ((*OWN, f"optimizer={CHAIN}"), ("opt/1/trace/out/kernel",)),
    "lora": (
        (*GPT, "lora.rank=4", "optimizer.ema_decay=0.9"),
        ("opt/mu/lora/blocks/attention/query/a", "ema/lora/blocks/attention/query/b"),
    ),
    "groups-and-frozen": (
        (*GPT, f"optimizer.groups={GROUPS}", "optimizer.freeze=['blocks/attention/*']"),
        ("params/blocks/attention/query",),
    ),
}

IN_CI = ("batch-statistics", "lora")


def kill_and_resume(workspace: Workspace, overrides: tuple[str, ...]) -> RunDir:
    """Trains, kills at a random commit, and trains to the end."""
    first = workspace.start("killed", *overrides, held_after=50)
    first.wait_commit(random.randrange(1, 40))
    first.kill()
    assert first.wait_exit() == -9, first.printed()
    again = workspace.start("killed", *overrides)
    assert again.wait_exit() == 0, again.printed()
    begun, *_, resumed = starts(again.run_dir)
    assert (begun, resumed > 0) == (0, True), "it was not killed between a commit and its end"
    return again.run_dir


@pytest.mark.slow
@pytest.mark.parametrize("case", campaign_but(CASES, *IN_CI))
def test_everything_that_is_trained_or_kept_resumes_exactly(
    workspace: Workspace, case: str
) -> None:
    overrides, kept = CASES[case]
    workspace.finish("unbroken", *overrides)
    run_dir = kill_and_resume(workspace, overrides)
    assert_bit_exact(run_dir, workspace.run_dir("unbroken"))
    commit = run_history(run_dir).newest
    assert commit is not None
    paths = set(manifest.read_arrays((run_dir.root / commit.path).absolute(), commit))
    assert paths >= set(kept), "the run did not have what the case is about"
    if case == "groups-and-frozen":
        assert not [path for path in paths if path.startswith("opt/") and "attention/" in path]
