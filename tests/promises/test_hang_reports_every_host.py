"""One of several hosts hangs: each supervisor reports the progress of every host, and the stacks of
every worker are dumped.
"""

from __future__ import annotations

import pytest

from jaxres.exit_codes import ExitCode
from tests.promises.trainer import FAULTY, Workspace

LIMITS = (
    "train.steps=1000000",
    "evaluation.every_steps=0",
    "checkpoint.save_every_steps=1000000",
    "deadlines.step_seconds=15",
)


@pytest.mark.slow
def test_a_hang_is_reported_with_the_progress_and_stacks_of_every_host(
    workspace: Workspace,
) -> None:
    """Host 1 holds the GIL forever in its data thread; host 0 waits in the step."""
    supervisors = workspace.start_hosts(
        "run", *LIMITS, hosts=2, config=FAULTY, env={"FAULT": "row:700:hold:1", "PACE": "0.01"}
    )
    codes = [supervisor.wait_exit() for supervisor in supervisors]
    printed = [supervisor.printed() for supervisor in supervisors]
    assert sorted(codes) == [ExitCode.PEER_LOST, ExitCode.HUNG], printed
    for text in printed:
        assert "no progress for" in text
        assert "is in phase 'train' after step" in text
        assert "in 'train' after step" in text
    stacks = [supervisors[0].run_dir.stacks(1, host) for host in (0, 1)]
    assert " in hold" in stacks[1].read_text(), "by the handler in C"
    assert (
        " in complete_step" in stacks[0].read_text()
        or " in process_completed" in stacks[0].read_text()
    )


@pytest.mark.slow
def test_a_hang_in_the_first_second_of_training_is_detected_within_the_step_limit(
    workspace: Workspace,
) -> None:
    """Supervisors send a heartbeat each second, and a few heartbeats may cover many steps."""
    supervisors = workspace.start_hosts(
        "run", *LIMITS, hosts=2, config=FAULTY, env={"FAULT": "row:200:hold:1", "PACE": "0.001"}
    )
    codes = [supervisor.wait_exit() for supervisor in supervisors]
    printed = [supervisor.printed() for supervisor in supervisors]
    assert sorted(codes) == [ExitCode.PEER_LOST, ExitCode.HUNG], printed
    assert 3 < supervisors[0].steps()[-1] < 20
    assert all("no progress for" in text for text in printed)
