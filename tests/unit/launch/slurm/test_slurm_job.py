"""What a Slurm job does next, for every exit code; its script; its journal."""

from __future__ import annotations

import subprocess

import pytest

from jaxres.config import RunConfig
from jaxres.exit_codes import ROWS, ExitCode, RestartRule
from jaxres.launch.slurm import job as slurm_job
from jaxres.launch.slurm.job import (
    Allocation,
    Begun,
    End,
    Ended,
    Final,
    JobOptions,
    Resubmit,
    Submitted,
    Train,
)
from jaxres.runlog.attempt_result import AttemptOutcome
from jaxres.runlog.run_log import AttemptEnded, Commit, Record
from jaxres.supervisor.restart_policy import KILLED
from tests.unit.runlog.example_records import CLAIM

CONFIG = RunConfig.model_validate(
    {"data": {"source": {"kind": "text", "path": "x"}}, "train": {"steps": 9}}
)
NODES = ("n1", "n2", "n3")
PAIR = Allocation(NODES[:2], (2,))


def outcome(code, *, culprit=None, before=0, after=0):
    return AttemptOutcome(code, "why", before, after, culprit)


def decide(*history, allocation=PAIR, is_first=False):
    return slurm_job.decide(history, allocation, CONFIG, is_first=is_first, seed=1)


def records(*bodies):
    """Each body with the number of its attempt."""
    return [
        Record(seq=seq, attempt=attempt, time=float(seq), body=body)
        for seq, (attempt, body) in enumerate(bodies, 1)
    ]


@pytest.mark.parametrize(
    "code",
    [0, ExitCode.STOPPED, ExitCode.CONFIG, ExitCode.DIVERGED, ExitCode.UNRESTORABLE],
)
def test_what_another_attempt_cannot_change_ends_the_job_with_its_code(code):
    assert decide(outcome(code)) == End(code, "why")


@pytest.mark.parametrize(
    "code",
    [ExitCode.BUG, ExitCode.STORAGE, ExitCode.PREEMPTED, ExitCode.PEER_LOST, ExitCode.HUNG, KILLED],
)
def test_what_another_attempt_may_change_is_tried_in_the_same_job(code):
    decision = decide(outcome(code, after=10))
    assert isinstance(decision, Train)
    assert decision.nodes == PAIR.nodes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_of_the_exit_code_table_has_its_consequence(row):
    decision = decide(outcome(row.code, after=10))
    if row.restart is RestartRule.NEVER:
        assert decision == End(row.code, "why")
    else:
        assert isinstance(decision, Train)


@pytest.mark.parametrize("code", [ExitCode.BUG, ExitCode.PREEMPTED, ExitCode.STORAGE, KILLED])
def test_attempts_without_a_commit_end_the_job(code):
    decision = decide(*[outcome(code)] * 100)
    assert isinstance(decision, End)
    assert decision.exit == ExitCode.NO_PROGRESS


def test_a_node_that_two_failures_name_is_excluded_from_the_next_job():
    named = outcome(ExitCode.HUNG, culprit="n2", after=5)
    again = outcome(ExitCode.PEER_LOST, culprit="n2", before=5, after=5)
    assert isinstance(decide(named), Train)
    decision = decide(named, again)
    assert isinstance(decision, Resubmit)
    assert decision.exclude == ("n2",)
    later = outcome(ExitCode.PREEMPTED, before=5, after=50)
    assert isinstance(decide(named, again, later), Resubmit), "it is forgotten after a commit"


def test_a_job_with_more_nodes_than_it_needs_goes_on_without_a_faulty_one():
    allocation = Allocation(NODES, (2, 3), left_out=frozenset({"n2"}))
    decision = decide(outcome(ExitCode.UNHEALTHY), allocation=allocation)
    assert isinstance(decision, Train)
    assert decision.nodes == ("n1", "n3")
    too_few = Allocation(NODES[:2], (2,), left_out=frozenset({"n2"}))
    decision = decide(outcome(ExitCode.UNHEALTHY), allocation=too_few)
    assert isinstance(decision, Resubmit)
    assert decision.exclude == ("n2",)


def test_only_numbers_of_nodes_that_the_mesh_allows_are_used():
    decision = decide(allocation=Allocation(NODES, (1, 2, 4)), is_first=True)
    assert decision == Train(("n1", "n2"), 0.0, "the first attempt")


@pytest.mark.parametrize(("left", "kind"), [(None, Train), (100.0, Resubmit), (3600.0, Train)])
def test_a_job_near_its_limit_is_submitted_again(left, kind):
    allocation = Allocation(NODES[:2], (2,), seconds_left=left)
    assert isinstance(decide(outcome(ExitCode.PREEMPTED, after=9), allocation=allocation), kind)


@pytest.mark.parametrize(("left", "kind"), [(340.0, Resubmit), (380.0, Train)])
def test_no_attempt_begins_in_a_job_whose_signal_has_been_sent(left, kind):
    allocation = Allocation(NODES[:2], (2,), seconds_left=left, signal_seconds=300)
    assert isinstance(decide(outcome(ExitCode.PREEMPTED, after=9), allocation=allocation), kind)


@pytest.mark.parametrize("is_first", [False, True])
def test_no_attempt_begins_in_a_job_that_slurm_ends_for_another_one(is_first):
    allocation = Allocation(NODES[:2], (2,), seconds_left=3600.0, is_preempted=True)
    history = outcome(ExitCode.PREEMPTED, after=9)
    decision = decide(history, allocation=allocation, is_first=is_first)
    assert isinstance(decision, Resubmit)
    assert decision.exclude == ()
    assert decide(outcome(0), allocation=allocation) == End(0, "why")


def test_jobs_that_begin_no_attempt_are_submitted_again_within_a_budget():
    few = Allocation(NODES[:2], (2,), left_out=frozenset({"n2"}))
    limit = CONFIG.restart.max_attempts_without_commit

    def decision(idle):
        return slurm_job.decide((), few, CONFIG, is_first=True, seed=1, idle_jobs=idle)

    assert isinstance(decision(limit - 1), Resubmit)
    end = decision(limit)
    assert isinstance(end, End)
    assert end.exit == ExitCode.NO_PROGRESS
    assert f"no attempt has begun in {limit} jobs in a row" in end.reason
    assert "1 of the job's nodes are usable, 2 are needed" in end.reason


def test_a_job_that_has_begun_an_attempt_resets_the_budget_of_those_that_have_not():
    nodes, log = ("n1", "n2"), records((1, CLAIM))
    trained = [Submitted("1"), Begun(0, 0, nodes), Ended(75)]
    idle = [Submitted("2"), Submitted("3"), Begun(1, 0, nodes), Ended(1)]
    assert slurm_job.idle_jobs([], log) == 0
    assert slurm_job.idle_jobs(trained, log) == 0
    assert slurm_job.idle_jobs([*trained, *idle], log) == 2
    assert slurm_job.idle_jobs([*idle, *trained], log) == 0
    assert slurm_job.idle_jobs([*trained, *idle, Final(84), Submitted("4")], log) == 1


def test_a_short_job_trains_at_least_once():
    allocation = Allocation(NODES[:2], (2,), seconds_left=50.0)
    assert isinstance(decide(allocation=allocation, is_first=True), Train)


def test_outcomes_are_those_of_the_run_log():
    log = records(
        (1, CLAIM),
        (1, Commit(step=10, path="p", manifest="m", bytes=1)),
        (1, AttemptEnded(exit=80, reason="hung", committed=False, culprit=1)),
        (2, CLAIM),
    )
    journal = [
        Submitted("7"),
        Begun(0, 0, ("n1", "n2")),
        Ended(80),
        Begun(1, 10, ("n1", "n3")),
        Submitted("8"),
        Begun(2, 10, ("n1", "n3")),
        Ended(78),
    ]
    first, second, third = slurm_job.outcomes(journal, log)
    assert (first.code, first.culprit, first.step_before, first.step_after) == (80, "n2", 0, 10)
    assert (second.code, second.culprit, second.attempt) == (KILLED, None, 2)
    assert (third.code, third.attempt) == (78, 0)
    assert slurm_job.outcomes([*journal, Final(78)], log) == ()


def test_the_script_is_a_valid_one_with_the_options_of_the_job():
    options = JobOptions(
        name="jaxres-x",
        least=2,
        most=4,
        partitions=("a", "b"),
        time="24:00:00",
        sbatch=("--gpus-per-node=8",),
        setup="source venv/bin/activate",
    )
    text = slurm_job.script(
        options,
        output="/s/job-%j.txt",
        file="/s/config.yaml",
        config="a: 1\n",
        command="python -m x 'a b'",
    )
    assert subprocess.run(["bash", "-n"], input=text.encode()).returncode == 0
    lines = text.splitlines()
    wanted = ["--nodes=2-4", "--requeue", "--dependency=singleton", "--signal=TERM@300"]
    wanted += ["--partition=a,b", "--time=24:00:00", "--no-kill", "--gpus-per-node=8"]
    assert [f"#SBATCH {option}" in lines for option in wanted] == [True] * len(wanted)
    assert "--ntasks" not in text, "of a range of nodes Slurm would give the least number"
    assert lines[-5:] == [
        "source venv/bin/activate",
        "(umask 077; cat > /s/config.yaml) <<'END_OF_CONFIG'",
        "a: 1",
        "END_OF_CONFIG",
        "exec python -m x 'a b'",
    ]


def test_a_job_with_a_fixed_number_of_nodes_ends_with_a_lost_node_and_is_requeued():
    options = JobOptions(name="x", least=2, most=2)
    text = slurm_job.script(options, output="o", file="f", config="", command="c")
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --ntasks-per-node=1\n" in text
    assert "--no-kill" not in text


def test_variables_that_filter_or_override_are_removed():
    """With SQUEUE_STATES=RUNNING a job that waits would be unknown, and be submitted again."""
    filters = ["SQUEUE_STATES", "SINFO_PARTITION", "SCANCEL_STATE", "SLURM_TIME_FORMAT"]
    filters += ["SBATCH_JOB_NAME", "SBATCH_WAIT"]
    kept = ["SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_ACCOUNT", "SBATCH_TIMELIMIT", "PATH"]
    of_a_job = ["SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SLURM_NTASKS"]
    names = [*filters, *kept, *of_a_job]
    removed = slurm_job.misleading_variables(names, ["a.yaml", "--nodes", "2"])
    assert removed == sorted([*filters, *of_a_job])
    assert slurm_job.misleading_variables(names, ["job", "a.yaml"]) == sorted(filters)
    asked = slurm_job.misleading_variables(names, ["a.yaml", "--time", "9:00"])
    assert "SBATCH_TIMELIMIT" in asked
