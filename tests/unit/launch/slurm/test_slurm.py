"""The commands of `launch slurm`, and the process of its job, with Slurm's commands as scripts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxres.config import load
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Fenced, RunError, StorageUnavailable, UsageError
from jaxres.launch.slurm import client as slurm_commands
from jaxres.launch.slurm import command as slurm
from jaxres.launch.slurm.job import Begun, Ended, Final, Submitted
from jaxres.launch.slurm.journal import Journal
from jaxres.runlog import faulty_hosts
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from tests.unit.launch.fake_slurm import journal, submit

NO_CONTROLLER = "Unable to contact slurm controller (connect failure)"
UNKNOWN = "slurm_load_jobs error: Invalid job id specified"


def test_a_submission_names_the_job_and_where_its_output_is(commands, capsys):
    assert submit("--nodes", "2") == 0
    assert journal() == [Submitted("17")]
    printed = capsys.readouterr().out
    root = Path("run").resolve()
    assert f"job 17 is submitted (2 nodes); its output: {root}/slurm/job-17.txt" in printed
    assert f"slurm status {root}" in printed
    assert "--nodes=2" in Path("run/slurm/job.sh").read_text()


def test_the_script_of_a_job_is_for_its_owner_only(commands):
    """It has the config, which may have a token."""
    assert submit("--nodes", "2", "hooks=[{target: 'a:b', args: {token: opensesame1}}]") == 0
    script = Path("run/slurm/job.sh")
    assert "opensesame1" in script.read_text()
    assert script.stat().st_mode & 0o77 == 0


def test_a_job_trains_with_the_config_of_its_submission(commands, capsys):
    """What is done to the file while the job waits or runs is for the next submission."""
    submit("--nodes", "2", "--dry-run", "train.steps=33")
    script = Path("job.sh")
    script.write_text(capsys.readouterr().out.replace(sys.executable, "echo"))
    Path("run/slurm").mkdir(parents=True)
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=True)
    config, root = Path("run/slurm/config.yaml").resolve(), Path("run").resolve()
    assert done.stdout.startswith(f"-m jaxres.launch slurm job {config} run.dir={root} --nodes=2")
    assert config.stat().st_mode & 0o77 == 0
    assert load(config, [f"run.dir={root}"]).config.train.steps == 33


@pytest.mark.parametrize(
    ("partition", "waits"), [("", True), ("small", True), ("small,big", False)]
)
def test_a_submission_says_how_many_nodes_there_are_if_they_are_too_few(
    commands, capsys, partition, waits
):
    commands.set("sinfo", "main*|3\nsmall|1\nbig|2\nbig|4\n")
    submit("--nodes", "5", *([f"--partition={partition}"] if partition else []))
    assert ("the job waits until there are so many" in capsys.readouterr().out) == waits


def test_a_dry_run_prints_the_script_and_leaves_nothing(commands, capsys):
    assert submit("--nodes", "2", "--dry-run") == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=jaxres-run-")
    assert not Path("run").exists()
    assert commands.calls("sbatch") == []


def test_a_job_whose_submission_was_not_answered_is_found_by_its_name(commands, capsys):
    commands.set("sbatch", code=1, error="Socket timed out on send/recv operation")
    with pytest.raises(StorageUnavailable):
        submit("--nodes", "2")
    assert journal() == []
    commands.set("sbatch", "18")
    commands.named.write_text("17|PENDING\n")
    with pytest.raises(Fenced, match="job 17 of this run is PENDING"):
        submit("--nodes", "2")


def test_stop_finds_a_job_whose_submission_was_not_answered(commands, capsys):
    commands.set("sbatch", code=1, error="Socket timed out on send/recv operation")
    with pytest.raises(StorageUnavailable):
        submit("--nodes", "2")
    with pytest.raises(UsageError, match="no job of `launch slurm` was submitted"):
        slurm.main(["stop", "run"], env={})
    commands.named.write_text("17|PENDING\n")
    commands.set("squeue", "PENDING|PENDING")
    commands.set("scancel")
    assert slurm.main(["stop", "run"], env={}) == 0
    assert commands.calls("scancel") == ["scancel 17 cpus="]


@pytest.mark.parametrize(
    ("printed", "job"), [("17\n", "17"), ("17;cluster\n", "17"), ("Welcome, 3 news\n17\n", "17")]
)
def test_the_number_of_a_job_is_read_from_what_sbatch_prints(commands, printed, job):
    commands.set("sbatch", printed)
    submit("--nodes", "2")
    assert journal() == [Submitted(job)]


@pytest.mark.parametrize("printed", ["", "Submitted batch job", "seventeen\n"])
def test_an_sbatch_that_prints_no_number_is_named_and_journals_nothing(commands, printed):
    commands.set("sbatch", printed)
    with pytest.raises(ConfigError, match="no number of a job"):
        submit("--nodes", "2")
    assert journal() == []


def test_what_a_command_prints_need_not_be_text(commands):
    commands._write("sbatch", r"printf 'gr\374n' >&2; exit 1")
    with pytest.raises(ConfigError, match="gr"):
        submit("--nodes", "2")


def test_a_command_that_can_not_be_started_is_named(commands, monkeypatch):
    monkeypatch.setenv("PATH", str(commands.folder))
    (commands.folder / "sbatch").write_text("not a program")
    with pytest.raises(ConfigError, match="sbatch can't be started"):
        submit("--nodes", "2")


def test_hints_can_be_typed_where_the_folder_was_given(commands, capsys):
    assert submit("--nodes", "2", "--folder", "jobs", "run.dir=my run") == 0
    printed = capsys.readouterr().out
    command = re.search("`python -m jaxres.launch slurm (status .*)` shows", printed)
    assert slurm.main(shlex.split(command[1]), env={}) == 0


def test_the_job_s_own_process_gets_the_flags_that_were_given(commands, capsys):
    """Also where a value is the name of the config."""
    flags = ["--nodes", "2", "--partition", "quickstart", "--sbatch=--mem=0", "--folder", "jobs"]
    submit(*flags, "--setup", "run.dir=run", "--dry-run")
    command = capsys.readouterr().out.splitlines()[-1]
    arguments = shlex.split(command.partition(" slurm job ")[2])
    again = slurm._parse(arguments)
    assert again.job.partitions == ("quickstart",)
    assert again.job.sbatch == ("--mem=0",)
    assert again.job.setup == "run.dir=run"
    assert again.folder == str(Path("jobs").resolve())


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUE_HOLD", "STOPPED"])
def test_a_run_has_one_job_at_a_time(commands, state):
    submit("--nodes", "2")
    commands.set("squeue", f"{state}|{state}")
    with pytest.raises(Fenced, match=f"job 17 of this run is {state}.*scancel 17"):
        submit("--nodes", "2")
    assert len(commands.calls("sbatch")) == 1


@pytest.mark.parametrize("state", [*slurm_commands.ENDED.split(), ""])
def test_a_job_that_has_ended_can_be_submitted_again(commands, state):
    submit("--nodes", "2")
    commands.set("squeue", f"{state}|{state}" if state else "")
    assert submit("--nodes", "2") == 0


def test_a_job_that_slurm_has_forgotten_can_be_submitted_again(commands):
    submit("--nodes", "2")
    commands.set("squeue", code=1, error=UNKNOWN)
    assert submit("--nodes", "2") == 0


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (NO_CONTROLLER, StorageUnavailable, "Slurm's controller does not answer: Unable"),
        ("sbatch: error: invalid partition specified: x", ConfigError, "partition specified: x"),
    ],
)
def test_what_sbatch_refuses_is_one_message(commands, error, kind, text):
    commands.set("sbatch", code=1, error=error)
    with pytest.raises(kind, match=text):
        submit("--nodes", "2", "--partition", "x")
    assert journal() == []


def test_a_machine_without_slurm_is_named(commands, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"squeue: not found.*where Slurm's commands are"):
        submit("--nodes", "2")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--nodes: on how many nodes"),
        (["--nodes", "0"], "--nodes 0"),
        (["--nodes", "3..2"], "--nodes 3..2"),
        (["--nodes", "two"], "--nodes two"),
        (["--nodes", "2", "--signal-seconds", "0"], "--signal-seconds 0"),
        (["--nodes", "2", "--signal-seconds", "99999"], "from 1 to 65535"),
        (["--nodes", "2", "--setup", "a\nb"], "--setup 'a"),
        (["--nodes", "2", "--sbatch=--mem=0\nrm"], "--sbatch '--mem=0"),
        (["--nodes", "2", "--folder", "a b"], "does not take this name"),
        (["--nodes", "2", "--nope"], "--nope: unknown flag"),
        (["--nodes", "2", "--partition", "a b"], "--partition 'a b': expected no blanks"),
        (["--nodes", "2", "--time", "1:00 --mem=0"], "--time '1:00 --mem=0'"),
        (["--nodes", "2", "--sbatch=--array=0-3"], "--sbatch=--array=0-3: the script"),
        (["--nodes", "2", "--sbatch=-J x"], "--sbatch=-J x: the script"),
        (["--nodes", "2", "--sbatch=--nodes=9"], "--sbatch=--nodes=9: the script"),
        (["--nodes", "2", "--sbatch=--arr=0-3"], "--sbatch=--arr=0-3: the script"),
        (["--nodes", "2", "--sbatch=--mem=0 -a 0-3"], "--sbatch=--mem=0 -a 0-3: the script"),
        (["--nodes", "2", "--sbatch=--clusters=b"], "--sbatch=--clusters=b: the script"),
        (["--nodes", "2", "--sbatch=gpus=8"], "--sbatch=gpus=8: expected an option, as"),
        (["--nodes", "1..9999999999"], "--nodes 1..9999999999|--nodes 9999999999"),
        (["--nodes", "1..100001"], "--nodes 100001: expected a whole number from 1 to 100000"),
        (["--nodes", 5000 * "9"], "--nodes 999"),
        (["--nodes", "2", "--time", "5"], "--time 5: the run saves and ends 300 s before"),
        (["--nodes", "2", "--folder", "a#b"], "does not take this name"),
    ],
)
def test_bad_arguments_are_one_clear_error(commands, arguments, text):
    with pytest.raises(UsageError, match=text):
        submit(*arguments)
    assert commands.calls("sbatch") == []


@pytest.mark.parametrize(
    "option", ["--mem=0", "--comment=a - b", "-A lab", "--exclusive", "--exclude=n1", "-x n1"]
)
def test_other_options_of_sbatch_are_in_the_script(commands, capsys, option):
    assert submit("--nodes", "2", f"--sbatch={option}", "--dry-run") == 0
    assert f"#SBATCH {option}\n" in capsys.readouterr().out


def test_a_config_whose_name_is_too_long_is_one_clear_error(commands):
    with pytest.raises(RunError, match="aaa"):
        slurm.main([300 * "a", "--nodes", "2"], env={})


def test_of_two_submissions_at_the_same_time_one_stays(commands):
    commands.set("scancel")
    commands.set("sbatch", "17")
    commands._write("sbatch", f"printf '16|PENDING\\n17|PENDING\\n' > {commands.named}; echo 17")
    with pytest.raises(Fenced, match="job 16 of this run was submitted at the same time"):
        submit("--nodes", "2")
    assert commands.calls("scancel") == ["scancel 17 cpus="]
    assert journal() == [Submitted("17"), Submitted("16")]


def test_nodes_that_have_failed_are_not_asked_for_by_the_first_job(commands):
    """Without those that this Slurm does not know: the run began elsewhere."""
    commands.set("sinfo", "n1\nn2\n")
    run_dir = RunDir(Path("run").resolve())
    for name in ("n2", "vm-7"):
        faulty_hosts.exclude(run_dir, name, slot=None, reason="", now=0.0)
    submit("--nodes", "2")
    assert "--exclude=n2 " in commands.calls("sbatch")[-1]


def test_jobs_and_nodes_of_hidden_partitions_are_seen(commands, trains):
    commands.set("srun")
    assert trains() == 0
    asked = commands.calls("squeue") + commands.calls("sinfo")
    assert asked
    assert all("--all" in call for call in asked)


def test_a_run_in_a_bucket_needs_a_folder_for_the_output():
    run_dir = RunDir(GcsPath("bucket", "run"))
    with pytest.raises(UsageError, match="--folder /shared/jobs/first"):
        slurm._journal(run_dir, None)
    assert slurm._journal(run_dir, "/shared/jobs").folder == Path("/shared/jobs")


def test_gpus_that_the_mesh_can_not_use_are_refused_before_the_job_waits(commands):
    gpus = "--sbatch=--gpus-per-node=8"
    with pytest.raises(ConfigError, match="does not make 16 device"):
        submit("--nodes", "2", gpus, "mesh.data=3")
    with pytest.raises(ConfigError, match="mesh"):
        submit("--nodes", "2..3", gpus, "mesh.data=3")
    assert submit("--nodes", "1..2", gpus, "mesh.data=8", "--dry-run") == 0


def test_status_names_state_nodes_and_output(commands, capsys):
    submit("--nodes", "2")
    commands.set("squeue", "RUNNING|RUNNING|None|n[1-2]|59:10|main")
    assert slurm.main(["status", "run"], env={}) == 0
    printed = capsys.readouterr().out
    assert "job 17: RUNNING, partition main, on n[1-2], 59:10 left" in printed
    assert "attempt 0, committed step 0" in printed
    commands.set("squeue", "PENDING|PENDING|Priority||1:00:00|main")
    slurm.main(["status", "run"], env={})
    assert "job 17: PENDING, partition main, waits (Priority)" in capsys.readouterr().out
    commands.set("squeue", code=1, error=UNKNOWN)
    slurm.main(["status", "run"], env={})
    printed = capsys.readouterr().out
    assert "job 17: not in the queue; `sacct --jobs=17` may say why" in printed
    assert "nothing submits it again; `python -m jaxres.launch slurm /" in printed
    Journal(Path("run/slurm")).append(Final(81))
    slurm.main(["status", "run"], env={})
    assert "job 17: ended (81 DIVERGED)" in capsys.readouterr().out


def test_logs_prints_the_end_of_the_newest_output(commands, capsys):
    submit("--nodes", "2")
    with pytest.raises(UsageError, match=r"job-17.txt: not there yet"):
        slurm.main(["logs", "run"], env={})
    Path("run/slurm/job-17.txt").write_text("".join(f"line {n}\n" for n in range(100)))
    capsys.readouterr()
    assert slurm.main(["logs", "run"], env={}) == 0
    assert capsys.readouterr().out.splitlines() == [f"line {n}" for n in range(60, 100)]
    Journal(Path("run/slurm")).append(Submitted("18"))
    assert slurm.main(["logs", "run"], env={}) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "job-18.txt: not there yet; the end of the job before it" in first
    assert lines[-1] == "line 99"


def test_stop_asks_a_running_job_to_save_and_cancels_one_that_waits(commands, capsys):
    submit("--nodes", "2")
    commands.set("scancel")
    commands.set("squeue", "RUNNING|RUNNING")
    assert slurm.main(["stop", "run"], env={}) == 0
    assert Path("run/stop").exists()
    assert commands.calls("scancel") == []
    commands.set("squeue", "PENDING|PENDING")
    slurm.main(["stop", "run"], env={})
    assert commands.calls("scancel") == ["scancel 17 cpus="]
    commands.set("squeue", "COMPLETED|COMPLETED")
    slurm.main(["stop", "run"], env={})
    assert "job 17 has ended already" in capsys.readouterr().out


def test_stop_ends_a_job_that_the_journal_does_not_have_too(commands, capsys):
    submit("--nodes", "2")
    commands.set("scancel")
    commands.set("squeue", "RUNNING|RUNNING")
    commands.named.write_text("17|RUNNING\n18|PENDING\n")
    assert slurm.main(["stop", "run"], env={}) == 0
    assert Path("run/stop").exists()
    assert commands.calls("scancel") == ["scancel 18 cpus="]


# The process of a job.


def test_an_attempt_gets_all_nodes_and_the_cpus_of_the_job(commands, trains):
    commands.set("srun")
    assert trains() == 0
    assert journal() == [Submitted("17"), Begun(0, 0, ("n1", "n2")), Ended(0), Final(0)]
    (call,) = commands.calls("srun")
    assert "--nodelist=n1,n2 --nodes=2 --ntasks=2 --ntasks-per-node=1" in call
    assert call.endswith("cpus=6"), "srun takes them from no variable of sbatch"
    assert "--immediate=300" in call, "a step before that never ends would be waited for"


@pytest.mark.parametrize(
    ("address", "given", "told"),
    [
        ("10.0.0.7", {}, "10.0.0.7:62466"),
        ("fd00::7", {}, "[fd00::7]:62466"),
        ("n1", {}, ""),
        ("10.0.0.7", {"JAXRES_COORDINATOR": "mine:5"}, "mine:5"),
    ],
)
def test_hosts_meet_at_the_address_that_slurm_has_of_the_first_node(
    commands, trains, monkeypatch, address, given, told
):
    """The name of a node need not resolve: Slurm reaches it by NodeAddr."""
    monkeypatch.delenv("JAXRES_COORDINATOR", raising=False)
    names = f'[ "$2" = node ] && echo "NodeName=$4 NodeAddr={address} Port=6818" || echo n1 n2'
    commands._write("scontrol", f"{names}\n")
    commands._write("srun", f'printf %s "$JAXRES_COORDINATOR" > {commands.folder}/told\n')
    assert trains(**given) == 0
    assert (commands.folder / "told").read_text() == told


def test_an_attempt_in_a_job_that_has_lost_a_node_does_not_wait_for_the_step_before(
    commands, trains
):
    commands.set("srun")
    names = '[ "$3" = "n[1-3]" ] && echo n1 n2 n3 || echo n1 n3'
    commands._write("scontrol", f"{names}\n")
    commands.set("squeue", "RUNNING|59:00|n[1,3]")
    assert trains(SLURM_JOB_NODELIST="n[1-3]") == 0
    (call,) = commands.calls("srun")
    assert "--nodelist=n1,n3 --nodes=2" in call
    assert "--overlap" in call


@pytest.mark.parametrize("name", ["squeue", "sinfo"])
def test_a_controller_that_does_not_answer_is_asked_again(commands, trains, name):
    answers = {"squeue": "RUNNING|59:00|n[1-2]", "sinfo": "n1 idle\nn2 idle\n"}
    commands.set("srun")
    commands.fail_once(name, NO_CONTROLLER, then=answers[name])
    assert trains() == 0
    assert journal()[-1] == Final(0)


def test_a_controller_that_never_answers_ends_the_job_within_its_budget(commands, trains):
    commands.set("sinfo", code=1, error=NO_CONTROLLER)
    with pytest.raises(StorageUnavailable):
        trains("restart.max_storage_attempts=2")
    assert len([call for call in commands.calls("sinfo") if "--Node" in call]) == 3
    assert journal(Final) == [], "another job may go on"


def test_a_job_that_is_preempted_is_submitted_again_and_begins_no_attempt(commands, trains):
    commands.set("squeue", "2026-11-26T07:12:05")
    commands.fail_once("sbatch", NO_CONTROLLER, then="18")
    commands.set("srun")
    assert trains() == 0
    assert commands.calls("srun") == []
    assert "--begin=now+0" in commands.calls("sbatch")[-1]
    assert [entry.job for entry in journal(Submitted)] == ["17", "18"]
    assert journal(Final) == []


def test_a_job_that_was_asked_to_stop_while_it_was_preempted_is_not_submitted_again(
    commands, trains
):
    commands.set("squeue", "2026-11-26T07:12:05")
    commands.set("sbatch", "18")
    Path("run/stop").touch()
    assert trains() == ExitCode.STOPPED
    assert journal()[-1] == Final(ExitCode.STOPPED)
    assert [entry.job for entry in journal(Submitted)] == ["17"]
    assert not Path("run/stop").exists(), "the next submission trains"


def test_a_job_without_a_node_that_is_down_is_submitted_again_without_it(commands, trains):
    commands.set("sinfo", "n1 idle\nn2 down*\n")
    commands.set("sbatch", "18")
    assert trains() == 0
    assert "--exclude=n2" in commands.calls("sbatch")[-1]


def test_a_job_that_slurm_does_not_take_again_gives_the_next_one_the_full_budget(commands, trains):
    commands.set("sinfo", "n1 idle\nn2 down*\n")
    commands.set("sbatch", code=1, error="Requested node configuration is not available")
    with pytest.raises(ConfigError, match="node configuration") as refused:
        trains()
    assert isinstance(refused.value, RunError)
    assert journal()[-1] == Final(refused.value.exit_code)


@pytest.mark.parametrize(
    "error",
    [
        "Zero Bytes were transmitted or received",
        "Slurm backup controller in standby mode",
        "Protocol authentication error",
        "Socket timed out on send/recv operation",
        "slurm_receive_msg: Connection refused",
    ],
)
def test_an_outage_of_any_kind_is_asked_again(commands, trains, error):
    commands.set("srun")
    commands.fail_once("sinfo", f"slurm_load_node error: {error}", then="n1 idle\nn2 idle\n")
    assert trains() == 0


def test_a_job_that_was_submitted_again_without_an_answer_is_not_submitted_twice(commands, trains):
    commands.set("sinfo", "n1 idle\nn2 down*\n")
    times_out = "Socket timed out on send/recv operation"
    commands._write("sbatch", f"echo '18|PENDING' > {commands.named}; echo {times_out} >&2; exit 1")
    assert trains() == 0
    assert [entry.job for entry in journal(Submitted)] == ["17", "18"]
    assert len(commands.calls("sbatch")) == 2, "the first submission, and the one without an answer"


def test_nodes_that_the_operator_excludes_stay_out_of_the_next_job(commands, trains):
    commands.set("sinfo", "n1 idle\nn2 down*\n")
    commands.set("sbatch", "18")
    assert trains("--sbatch=--exclude=n[7-9]") == 0
    assert "--exclude=n2,n[7-9]" in commands.calls("sbatch")[-1]


def test_a_refusal_without_nodes_that_are_left_out_names_how_to_take_them_again(commands, trains):
    commands.set("sinfo", "n1 idle\nn2 down*\n")
    commands.set("sbatch", code=1, error="Requested node configuration is not available")
    with pytest.raises(ConfigError, match="hosts RUN_DIR --forget NODE"):
        trains("--sbatch=--exclude=n[7-9]")


def test_a_banner_that_a_cluster_prints_before_an_answer_is_skipped(commands, trains):
    commands.set("srun")
    commands.set("sinfo", "Welcome to the cluster\nn1 idle\nn2 idle\n")
    commands.set("squeue", "Welcome to the cluster\nRUNNING|59:00|n[1-2]\n")
    assert trains() == 0
    with pytest.raises(Fenced, match="job 17 of this run is"):
        submit("--nodes", "2")


def test_a_command_that_a_signal_ends_is_asked_again(commands, trains):
    commands.set("srun")
    killed = commands.folder / "killed"
    ends = f"[ -e {killed} ] || {{ touch {killed}; kill -9 $$; }}"
    commands._write("sinfo", f"{ends}\nprintf 'n1 idle\\nn2 idle\\n'")
    assert trains() == 0


def test_all_that_the_script_has_set_reaches_the_tasks(commands, trains):
    """With `sbatch --export=NONE` srun hands on nothing else: no line of --setup."""
    commands.set("srun")
    assert trains() == 0
    assert "--export=ALL" in commands.calls("srun")[-1]


def test_a_node_whose_daemon_does_not_answer_is_left_out_before_slurm_knows(commands, trains):
    """The controller takes a node for up until SlurmdTimeout, five minutes by default."""
    failed = "srun: error: Task launch for StepId=17.0 failed on node n2: Communication failure"
    commands.set("srun", code=233, error=failed)
    commands.set("sbatch", "18")
    assert trains() == 0
    assert (
        journal()[1:]
        == [Submitted("17"), Begun(0, 0, ("n1", "n2")), Ended(233), Submitted("18")][1:]
    )
    assert "--exclude=n2" in commands.calls("sbatch")[-1]
    begins, probe = commands.calls("srun")
    assert "jaxres.train" in begins
    assert "--overlap" in probe
    assert probe.endswith("true cpus=")


def test_a_run_that_can_not_be_read_at_the_start_of_a_job_is_asked_for_again(
    commands, trains, monkeypatch
):
    commands.set("srun")
    resolve, failures = slurm.resolve_run, [StorageUnavailable("the bucket does not answer")]

    def once(*arguments):
        if failures:
            raise failures.pop()
        return resolve(*arguments)

    monkeypatch.setattr(slurm, "resolve_run", once)
    assert trains() == 0
    assert failures == []
    assert journal()[-1] == Final(0)


def test_a_journal_that_can_not_be_written_for_a_while_costs_no_attempt(
    commands, trains, monkeypatch
):
    commands.set("srun")
    append, failures = Journal.append, 3 * [StorageUnavailable("no space left")]

    def fails(journal, entry):
        if failures and isinstance(entry, Begun | Ended | Final):
            raise failures.pop()
        append(journal, entry)

    monkeypatch.setattr(Journal, "append", fails)
    assert trains() == 0
    assert journal() == [Submitted("17"), Begun(0, 0, ("n1", "n2")), Ended(0), Final(0)]
