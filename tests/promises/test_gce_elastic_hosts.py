"""A job with a range of hosts trains through stockouts, on 4, 2, 4, 2 and 4; no bit changes."""

from __future__ import annotations

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import launch_events
from tests.promises.cloud import Cloud
from tests.promises.trainer import FAULTY, Workspace, assert_bit_exact, run_history, starts

COMMON = ("train.reduction=invariant", "evaluation.every_steps=0")
MANY = "train.steps=100000"
"""So many that a restart with more hosts pays at any time; the job is stopped."""

SHRUNK = "trains on with 2 of 4 hosts"


@pytest.mark.slow
def test_survivors_of_two_stockouts_train_on_and_each_sample_is_used_once(
    cloud: Cloud, workspace: Workspace
) -> None:
    config = cloud.config(num_hosts="2..4", env={"PACE": "0.01"}, max_backoff_minutes=0)
    launcher = cloud.up(config, MANY, *COMMON)
    for attempt in (1, 3):
        cloud.wait(lambda n=attempt: len(claims(cloud)) == n, of=f"attempt {attempt}")
        cloud.wait_commit(run_history(cloud.run_dir).step + 20)
        cloud.gce.stockout()
        kept, lost = [[cloud.member(n) for n in pair] for pair in ((0, 1), (2, 3))]
        for name in lost:
            cloud.gce.preempt(name, notice=False)
        num_shrunk = attempt // 2 + 1
        cloud.wait(lambda n=num_shrunk: launcher.printed().count(SHRUNK) == n, of="fewer hosts")
        cloud.gce.restock()
        shrunk = f"attempt {attempt + 1} on {', '.join(kept)}\n"
        cloud.wait(lambda text=shrunk: text in launcher.printed(), of="attempt of the survivors")
        grown = f"attempt {attempt + 2} on {', '.join(kept)}, "
        cloud.wait(lambda text=grown: text in launcher.printed(), of="attempt with all hosts")
    cloud.wait(lambda: len(claims(cloud)) == 5, of="attempt 5")
    cloud.wait_commit(run_history(cloud.run_dir).step + 10)
    assert cloud.launch(str(cloud.run), verb="stop").wait_exit() == 0, cloud.describe()
    assert launcher.wait_exit() == ExitCode.STOPPED, cloud.describe()

    assert claims(cloud) == [4, 2, 4, 2, 4], cloud.describe()
    events = [event.kind for event in launch_events.read(cloud.run_dir)]
    changes = [kind for kind in events if kind in ("shrunk", "grown")]
    assert changes == ["shrunk", "grown", "shrunk", "grown"]
    assert launcher.printed().count("1-a: stockout: ") >= 2, "there was no stockout"
    desired = cloud.desired_state()
    assert desired is not None
    grew = [desired.history[1], desired.history[3]]
    assert [outcome.code for outcome in grew] == [ExitCode.PREEMPTED] * 2, desired.history
    begun = starts(cloud.run_dir)
    assert [begun[2], begun[4]] == [outcome.step_after for outcome in grew], "steps were lost"
    steps = run_history(cloud.run_dir).step
    workspace.finish("unbroken", f"train.steps={steps}", *COMMON, config=FAULTY)
    assert_bit_exact(cloud.run_dir, workspace.run_dir("unbroken"))
    cloud.assert_nothing_is_left()


def claims(cloud: Cloud) -> list[int]:
    """Returns the number of hosts of each attempt."""
    return [claim.num_hosts for claim in run_history(cloud.run_dir).claims]
