"""One run of tools/campaign: killed at chosen places, it ends as the unbroken one."""

from __future__ import annotations

import dataclasses

import pytest

from tests.promises.trainer import Workspace
from tools.campaign.killed_run import Execution, unbroken
from tools.campaign.plan import Kill, RunPlan
from tools.campaign.verdict import judge

KILLS = (
    Kill("save: commit", "worker"),
    Kill("prune: bytes", "worker"),
    Kill("between attempts", "both", fraction=0.5),
    Kill("first step", "supervisor"),
)


@pytest.mark.slow
def test_a_run_killed_at_chosen_places_ends_bit_exact_and_leaves_nothing(
    workspace: Workspace,
) -> None:
    plan = RunPlan(0, 1, "disk", 0, KILLS)
    reference, timing = unbroken(workspace, plan, "unbroken")
    seen, landed = Execution(workspace, plan, timing).execute()
    assert [kill.place for kill in landed] == [kill.place for kill in KILLS]
    assert judge(reference, seen) == ()
    assert len(seen.run.attempts) > len(KILLS)
    assert max(attempt.start_step or 0 for attempt in seen.run.attempts) >= 6, "nothing restored"
    wrong = dataclasses.replace(reference, digests=dict.fromkeys(reference.digests, "other"))
    assert judge(wrong, seen), "the verdict sees no other state"
