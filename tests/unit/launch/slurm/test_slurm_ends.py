"""How a job of `launch slurm` ends that Slurm ends: cancelled, at its limit, without its node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from jaxres.launch.slurm import client as slurm_commands
from jaxres.launch.slurm.job import Final, Submitted
from jaxres.launch.slurm.journal import Journal
from tests.unit.launch.fake_slurm import journal


def test_a_job_that_has_waited_while_the_run_ended_does_not_train(commands, trains):
    commands.set("srun")
    Journal(Path("run/slurm")).append(Final(81))
    assert trains() == 81
    assert commands.calls("srun") == []


def test_a_job_that_is_cancelled_while_it_is_submitted_again_is_not(commands, trains, told_to_end):
    commands._write("sinfo", f"printf 'n1 idle\\nn2 down*\\n'; {told_to_end}")
    assert trains() == 75
    assert len(commands.calls("sbatch")) == 1, "it was submitted again"


def test_a_job_that_is_cancelled_while_it_trains_is_not_submitted_again(
    commands, trains, told_to_end
):
    commands._write("srun", told_to_end)
    assert trains() == 0
    assert len(commands.calls("sbatch")) == 1


@pytest.mark.parametrize("when", ["srun", "sinfo"])
def test_a_job_that_its_time_limit_ends_is_continued_all_the_same(
    commands, trains, told_to_end, when
):
    """The training has hung, or its last save takes too long: Slurm ends the job by its limit."""
    commands._write("sinfo", "printf 'n1 idle\\nn2 idle\\n'")
    end = 'case "$*" in *%r) echo "COMPLETING|TimeLimit";; *) echo "RUNNING|59:00|n[1-2]";; esac'
    commands._write("squeue", end)
    commands.set("sbatch", "18")
    commands.set("srun")
    commands._write(when, f"printf 'n1 idle\\nn2 idle\\n'; {told_to_end}")
    trains()
    assert [entry.job for entry in journal(Submitted)] == ["17", "18"]
    assert journal(Final) == []


def test_a_job_that_slurm_has_put_back_in_the_queue_begins_nothing(commands, trains):
    """The node of its process was lost to Slurm, and lives."""
    commands.set("srun")
    commands.set("squeue", "PENDING|UNLIMITED|")
    assert trains() == 75
    assert commands.calls("srun") == []


def test_a_job_of_a_range_watches_the_node_of_its_script_from_another_one(commands, trains):
    commands.set("srun")
    assert trains("--nodes", "1..2", SLURMD_NODENAME="n1") == 0
    training, watch = sorted(commands.calls("srun"), key=lambda call: "--overlap" in call)
    assert "--nodelist=n2 --nodes=1" in watch
    assert "--overlap sh -c" in watch
    assert "jaxres.train" in training


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
