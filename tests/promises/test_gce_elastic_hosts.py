"""A job with a range of hosts trains through stockouts, on 4, 2 and 4 hosts; no bit changes."""

from __future__ import annotations

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import attempt_history, launch_events
from tests.promises.cloud import Cloud
from tests.promises.trainer import FAULTY, Workspace, assert_bit_exact, run_history, starts
from tests.tiers import campaign_but

COMMON = ("train.reduction=invariant", "evaluation.every_steps=0")
MANY = "train.steps=100000"
"""So many that a restart with more hosts pays at any time; the job is stopped."""

SHRUNK = "trains on with 2 of 4 hosts"


@pytest.mark.slow
@pytest.mark.parametrize("stockouts", campaign_but([1, 2], 1))
def test_survivors_of_stockouts_train_on_and_each_sample_is_used_once(
    cloud: Cloud, workspace: Workspace, stockouts: int
) -> None:
    config = cloud.config(num_hosts="2..4", env={"PACE": "0.01"}, max_backoff_minutes=0)
    launcher = cloud.up(config, MANY, *COMMON)
    for attempt in range(1, 2 * stockouts, 2):
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
    cloud.wait(lambda: len(claims(cloud)) == 1 + 2 * stockouts, of="the last attempt")
    cloud.wait_commit(run_history(cloud.run_dir).step + 10)
    assert cloud.launch(str(cloud.run), verb="stop").wait_exit() == 0, cloud.describe()
    assert launcher.wait_exit() == ExitCode.STOPPED, cloud.describe()

    assert claims(cloud) == [4, *stockouts * [2, 4]], cloud.describe()
    events = [event.kind for event in launch_events.read(cloud.run_dir)]
    changes = [kind for kind in events if kind in ("shrunk", "grown")]
    assert changes == stockouts * ["shrunk", "grown"]
    assert launcher.printed().count("1-a: stockout: ") >= stockouts, "there was no stockout"
    desired = cloud.desired_state()
    assert desired is not None
    grew = desired.history[1::2]
    assert [one.code for one in grew] == stockouts * [ExitCode.PREEMPTED], desired.history
    assert [one.planned for one in grew] == stockouts * ["grow"], desired.history
    causes = [one.cause for one in attempt_history.read(cloud.run_dir, is_alive=False)]
    assert causes[1::2] == stockouts * ["planned grow"], causes
    begun = starts(cloud.run_dir)[2::2]
    assert begun == [outcome.step_after for outcome in grew], "steps were lost"
    steps = run_history(cloud.run_dir).step
    workspace.finish("unbroken", f"train.steps={steps}", *COMMON, config=FAULTY)
    assert_bit_exact(cloud.run_dir, workspace.run_dir("unbroken"))
    cloud.assert_nothing_is_left()


def claims(cloud: Cloud) -> list[int]:
    """Returns the number of hosts of each attempt."""
    return [claim.num_hosts for claim in run_history(cloud.run_dir).claims]
