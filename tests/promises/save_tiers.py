"""Tiers beside the durable place, for tests whose promises hold with each of them."""

from __future__ import annotations

from jaxres.runlog.paths import RunDir
from jaxres.storage.memory_folder import memory_folder
from tests.promises.test_a_replica_is_a_run_elsewhere import assert_valid, committed
from tests.promises.test_memory_tier_restores_after_a_kill import MEMORY, begins
from tests.promises.trainer import Workspace

TIERS = ("durable", "memory", "replica")
"""The durable place alone, with states in host memory, or with a replica."""


def overrides(tier: str, workspace: Workspace) -> tuple[str, ...]:
    """Returns the config of a run with a tier.

    With states in memory each attempt begins so late that it needs more saves.
    """
    return {
        "durable": (),
        "memory": (MEMORY, "checkpoint.save_every_steps=4"),
        "replica": (f"checkpoint.replica.path={workspace.run_dir('replica').root}",),
    }[tier]


def assert_tier_held(tier: str, workspace: Workspace, run_dir: RunDir) -> None:
    """Asserts that restarts of a complete run have used the tier, and what it holds at its end."""
    used = {used for _, used in begins(run_dir)}
    assert used == ({None, "memory"} if tier == "memory" else {None})
    assert not memory_folder(run_dir.root).exists(), "a run that is done takes no memory"
    if tier == "replica":
        assert assert_valid(workspace.run_dir("replica"), run_dir) == committed(run_dir)
