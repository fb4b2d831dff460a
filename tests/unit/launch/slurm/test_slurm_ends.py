"""How a job of `launch slurm` ends that Slurm ends: cancelled, at its limit, without its node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from jaxres.launch.slurm import client as slurm_commands
from jaxres.launch.slurm.client import ScriptWatch
from jaxres.launch.slurm.job import Final, Submitted
from jaxres.launch.slurm.journal import Journal
from tests.unit.launch.fake_slurm import journal
from tests.waiting import has_ended, wait_until

SRUN = """\
mkfifo end
{ exec 4< end; echo > ready; read -r line <&4; echo > cancelled; } &
echo $! > second
exec 3> end
until [ -s ready ]; do :; done
echo watching
exec sleep 1000
"""
"""As srun: a second process of it cancels the step when it sees that the first one has ended."""


def test_a_job_that_has_waited_while_the_run_ended_does_not_train(commands, trains):
    commands.set("srun")
    Journal(Path("run/slurm")).append(Final(81))
    assert trains() == 81
    assert commands.calls("srun") == []


def _set_state(commands, state: str, reason: str) -> None:
    """Sets what squeue says of the job once it was told to end."""
    now = f"{state}|{state}|{reason}"
    answer = f'case "$*" in *%r) echo "{now}";; *) echo "RUNNING|59:00|n[1-2]";; esac'
    commands._write("squeue", answer)


def test_a_job_that_is_cancelled_while_it_is_submitted_again_is_not(commands, trains, told_to_end):
    _set_state(commands, "COMPLETING", "None")
    commands._write("sinfo", f"printf 'n1 idle\\nn2 down*\\n'; {told_to_end}")
    assert trains() == 75
    assert len(commands.calls("sbatch")) == 1, "it was submitted again"


def test_a_job_that_is_cancelled_while_it_trains_is_not_submitted_again(
    commands, trains, told_to_end
):
    _set_state(commands, "COMPLETING", "None")
    commands._write("srun", told_to_end)
    assert trains() == 0
    assert len(commands.calls("sbatch")) == 1


@pytest.mark.parametrize(
    ("state", "reason", "printed"),
    [
        ("COMPLETING", "TimeLimit", "time limit is reached"),
        ("RUNNING", "None", "did not come from Slurm"),
    ],
)
@pytest.mark.parametrize("when", ["srun", "sinfo"])
def test_a_job_that_its_time_limit_or_its_node_ends_is_continued_all_the_same(
    commands, trains, told_to_end, capsys, when, state, reason, printed
):
    """The training has hung, or its last save takes too long: Slurm ends the job by its limit.

    A node that is rebooted in order sends SIGTERM to all processes, and Slurm does not know yet.
    """
    commands._write("sinfo", "printf 'n1 idle\\nn2 idle\\n'")
    _set_state(commands, state, reason)
    commands.set("sbatch", "18")
    commands.set("srun")
    commands._write(when, f"printf 'n1 idle\\nn2 idle\\n'; {told_to_end}")
    trains()
    assert [entry.job for entry in journal(Submitted)] == ["17", "18"]
    assert journal(Final) == []
    assert printed in capsys.readouterr().err


def test_a_job_that_slurm_has_put_back_in_the_queue_begins_nothing(commands, trains):
    """The node of its process was lost to Slurm, and lives."""
    commands.set("srun")
    commands.set("squeue", "PENDING|UNLIMITED|")
    assert trains() == 75
    assert commands.calls("srun") == []


def test_a_job_of_a_range_watches_the_node_of_its_script_from_another_one(commands, trains):
    begun = f"grep -q jaxres-watch {commands.kept}"
    commands._write("srun", f"for _ in $(seq 1000); do {begun} && break; done")
    assert trains("--nodes", "1..2", SLURMD_NODENAME="n1") == 0
    training, watch = sorted(commands.calls("srun"), key=lambda call: "--overlap" in call)
    assert "--nodelist=n2 --nodes=1" in watch
    assert "--overlap --job-name=jaxres-watch sh -c" in watch
    assert "jaxres.train" in training


def test_the_step_that_watches_is_not_cancelled_by_the_death_of_its_srun(commands):
    """On a node that dies in steps, or shuts down in order, srun dies before its second process."""
    commands._write("srun", SRUN)
    with ScriptWatch(job="17", node="n1", output=Path("out.txt")) as watch:
        watch.ensure_started(["n1", "n2"])
        second = int(wait_until(lambda: Path("second").exists() and Path("second").read_text()))
        wait_until(lambda: has_ended(second), "end of srun's second process")
    assert Path("ready").exists()
    assert not Path("cancelled").exists(), "srun's death has cancelled the step"


def test_a_step_that_watches_is_started_again_if_it_has_ended_or_lost_its_node(commands):
    commands.set("srun", "watching\n")
    with ScriptWatch(job="17", node="n1", output=Path("out.txt")) as watch:
        for rows, nodes, begun in [
            ("", "n1 n2", 1),
            ("batch|n1\njaxres-watch|n2\n", "n1 n2", 1),
            ("batch|n1\njaxres-watch|n2\n", "n1 n3", 2),
            ("batch|n1\n", "n1 n3", 3),
        ]:
            commands.set("squeue", rows)
            watch.ensure_started(nodes.split())
            wait_until(lambda: watch._starting.poll() is not None, "end of srun")
            assert len(commands.calls("srun")) == begun
    assert "--steps --jobs=17" in commands.calls("squeue")[0]


@pytest.mark.parametrize(
    ("states", "names", "requeued"),
    [
        (["RUNNING n[1-3]", "RUNNING n[2-3]"], "n2\nn3\n", True),
        (["RUNNING n[1-3]", "COMPLETING n3"], "n3\n", False),
        (["RUNNING n[1-3]", "RUNNING n1"], "n1\n", False),
        (["RUNNING n[1-3]", "RUNNING n2"], "", False),
    ],
)
def test_a_job_whose_script_has_lost_its_node_is_put_back_in_the_queue(
    commands, states, names, requeued
):
    """By a step on another node. A job that ends has fewer and fewer nodes, and stays ended."""
    first, second = states
    been = commands.folder / "been"
    commands._write(
        "squeue", f"[ -e {been} ] && echo '{second}' || {{ touch {been}; echo '{first}'; }}"
    )
    answers = (
        f"case \"$*\" in *hostnames*'[1-3]'*) printf 'n1\\nn2\\n';; *) printf '{names}';; esac"
    )
    commands._write("scontrol", answers)
    commands._write("sleep", f'[ "$(grep -c "^sleep" {commands.kept})" -lt 5 ]')
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "17"}
    subprocess.run(["sh", "-c", slurm_commands.WATCH, "sh", "n1", "out.txt"], env=env, check=False)
    calls = [call for call in commands.calls("scontrol") if "requeue" in call]
    assert calls == (["scontrol requeue 17 cpus="] if requeued else [])
    assert requeued == Path("out.txt").exists()
