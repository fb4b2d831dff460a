"""Promises of the words after giving up: a remedy for the cause, and the end of the right log."""

import json
import os
import signal

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import paths, run_log
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.events import EVENTS
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from jaxres.supervisor.failure_report import (
    MAX_UPLOAD_BYTES,
    failure_text,
    supervision_started,
    upload_artifacts,
)
from jaxres.supervisor.restart_policy import Restart, RestartHistory, RestartPolicy
from tests.unit.launch.gce_config import config


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.attempt(3).mkdir(parents=True)
    for path in (run_dir.output(3, 1), run_dir.stacks(3, 1), run_dir.traceback(3, 1)):
        path.write_text("".join(f"{path.name} {number}\n" for number in range(50)))
    run_dir.output(3, 0).write_text("of another host\n")
    return run_dir


@pytest.mark.parametrize(
    ("cause", "log", "remedy"),
    [
        (ExitCode.BUG, "traceback-host001.txt", "fix what the traceback shows"),
        (ExitCode.HUNG, "stacks-host001.txt", "deadlines"),
        (128 + signal.SIGKILL, "output-host001.txt", "dmesg"),
        (128 + signal.SIGABRT, "output-host001.txt", ""),
        (ExitCode.PEER_LOST, "output-host001.txt", "network"),
    ],
)
def test_the_report_shows_the_last_lines_of_the_culprits_log(run_dir, cause, log, remedy):
    ended = AttemptResult(cause, "why", committed=False, culprit=1)
    text = failure_text(run_dir, 3, ended, code=ExitCode.NO_PROGRESS)
    assert remedy in text
    assert f"the last 20 of 50 lines of {run_dir.attempt(3) / log}:" in text
    assert text.endswith(f"  {log} 49\n")
    assert f"{log} 29\n" not in text


def test_a_crash_shows_the_stack_of_the_thread_that_crashed(run_dir):
    ended = AttemptResult(128 + signal.SIGSEGV, "why", committed=False, culprit=1)
    text = failure_text(run_dir, 3, ended, code=ExitCode.NO_PROGRESS)
    name = "stacks-host001.txt"
    assert f"the first 20 of 50 lines of {run_dir.attempt(3) / name}:\n  {name} 0\n" in text
    assert text.endswith(f"  {name} 19\n")


def test_a_missing_log_is_not_mentioned(run_dir):
    ended = AttemptResult(128 + signal.SIGKILL, "why", committed=False, culprit=2)
    assert "lines of" not in failure_text(run_dir, 3, ended, code=ExitCode.NO_PROGRESS)


@pytest.mark.parametrize("code", [ExitCode.CONFIG, ExitCode.DIVERGED, ExitCode.FENCED])
def test_a_message_with_a_remedy_gets_no_second_one(run_dir, code):
    assert failure_text(run_dir, 3, AttemptResult(code, "why", committed=False), code=code) == ""


def test_the_start_of_a_supervisor_is_an_event_also_with_a_job_on_vms_in_its_config():
    loaded = config(launch={"max_hours": 3.0}, package="/code")
    policy = RestartPolicy(loaded.restart, loaded.launch, num_hosts=(1, 2), began=0.0, seed=1)
    history, first = run_log.fold([]), Restart(0.0, frozenset(), "")
    event, _ = supervision_started(history, policy, RestartHistory(), first)
    written = json.loads(json.dumps(EVENTS.encode(event)))
    assert written["policy"]["max_hours"] == 3.0
    assert "gce" not in written["policy"]


def test_the_end_of_a_large_output_is_uploaded_and_what_is_no_file_is_left_out(
    gcs_bucket, monkeypatch, tmp_path
):
    monkeypatch.setattr(paths, "SCRATCH", tmp_path)
    run_dir = RunDir(GcsPath(gcs_bucket, "run"))
    output = run_dir.output(2, 0)
    output.parent.mkdir(parents=True)
    with output.open("wb") as file:
        file.truncate(2**40)  # Sparse: far more than fits into memory.
        file.seek(0, os.SEEK_END)
        file.write(b"the end")
    os.mkfifo(output.with_name("pipe"))
    (output.with_name("device")).symlink_to("/dev/null")
    upload_artifacts(run_dir, 2)
    assert files.list_names(run_dir.attempt(2)) == [output.name]
    data = files.read(run_dir.attempt(2) / output.name)
    assert (len(data), data[-7:]) == (MAX_UPLOAD_BYTES, b"the end")
