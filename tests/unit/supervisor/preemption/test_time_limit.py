"""The time limit of a job: where it is read, and what follows from it."""

from __future__ import annotations

import pytest

from jaxres.clock import SystemClock
from jaxres.config.schema.supervision import PreemptionSection
from jaxres.faults import UsageError
from jaxres.runlog.events import Noted
from jaxres.runlog.supervisor_events import PreemptionNoticeReceived
from jaxres.supervisor.preemption import notices as preemption
from jaxres.supervisor.preemption import time_limit
from jaxres.supervisor.preemption.notices import PreemptionNotice, SaveTimings
from jaxres.supervisor.preemption.time_limit import TimeLimit, Unknown
from jaxres.supervisor.preemption.watcher import PreemptionWatcher

WALL = 1_800_000_000.0
SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
END = {"SLURM_JOB_END_TIME": "1800000500"}


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Puts a `squeue` into the path; returns a function that sets what it prints."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def answers(text, *, code=0):
        path = tmp_path / "squeue"
        path.write_text(
            f'#!/bin/sh\n[ "$*" = "--noheader --jobs=7 --format=%L" ] || exit 3\n'
            f"echo '{text}'\nexit {code}\n"
        )
        path.chmod(0o755)

    return answers


@pytest.mark.parametrize(
    ("env", "answer", "expected"),
    [
        ({}, "5:00", None),
        (SLURM, "1-00:00:10", TimeLimit(86410.0, "squeue")),
        (SLURM | END, "5:00", TimeLimit(300.0, "squeue")),
        ({"SLURM_JOB_ID": "7"}, "0:09", TimeLimit(9.0, "squeue")),
        (SLURM | END, "UNLIMITED", None),
        (SLURM | END, "INVALID", TimeLimit(500.0, "SLURM_JOB_END_TIME")),
        (SLURM | {"SLURM_PROCID": "1"} | END, "5:00", None),
        (SLURM | {"JAXRES_DEADLINE": "+60"}, "5:00", TimeLimit(60.0, "JAXRES_DEADLINE")),
        (SLURM | {"JAXRES_DEADLINE": "1800000060"}, "5:00", TimeLimit(60.0, "JAXRES_DEADLINE")),
        (SLURM | {"JAXRES_DEADLINE": "none"}, "5:00", None),
        (SLURM | {"JAXRES_DEADLINE": ""}, "5:00", TimeLimit(300.0, "squeue")),
    ],
)
def test_the_time_limit_is_that_of_the_variable_or_of_slurm(squeue, env, answer, expected):
    squeue(answer)
    assert time_limit.find(env, wall=WALL) == expected


def test_an_unanswered_question_is_reported_and_stops_nothing(squeue):
    squeue("no controller", code=1)
    found = time_limit.find(SLURM, wall=WALL)
    assert isinstance(found, Unknown)
    assert "no controller" in found.reason
    assert "JAXRES_DEADLINE" in found.reason


def test_slurm_without_its_commands_uses_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert time_limit.find(SLURM | END, wall=WALL) == TimeLimit(500.0, "SLURM_JOB_END_TIME")
    assert isinstance(time_limit.find(SLURM, wall=WALL), Unknown)


@pytest.mark.parametrize("text", ["soon", "60", "-60", "+", "+1e3", "2027-01-15T08:00:00Z"])
def test_an_invalid_deadline_is_refused(text):
    with pytest.raises(UsageError, match="JAXRES_DEADLINE"):
        time_limit.find({"JAXRES_DEADLINE": text}, wall=WALL)


def watching(**env):
    section = PreemptionSection(metadata="off")
    return PreemptionWatcher(section, env=env, clock=SystemClock(), product="")


def test_the_watcher_reports_the_limit_once_and_keeps_it_in_force(squeue):
    squeue("10:00")
    with watching(**SLURM) as watcher:
        _, event = watcher.poll()
        assert event == PreemptionNoticeReceived("squeue", "this job reaches its time limit", 600.0)
        assert watcher.poll() == []
        notice = watcher.most_urgent()
        assert notice is not None
        assert notice.is_time_limit
    squeue("none")
    with watching(**SLURM) as watcher:
        _, event = watcher.poll()
        assert isinstance(event, Noted)
        assert watcher.most_urgent() is None


def action(total, *, left, **measured):
    notice = PreemptionNotice("squeue", "words", 0.0, total, is_time_limit=True)
    facts = SaveTimings(**measured)
    return preemption.decide(notice, facts, now=total - left, margin_seconds=5.0).action


def test_a_job_trains_until_the_last_safe_moment_before_its_limit():
    for total in (60.0, 3600.0, 86400.0):
        assert action(total, left=25.1, write_seconds=10.0) == "continue"
        assert action(total, left=25.0, write_seconds=10.0) == "save"


def test_no_save_begins_that_cannot_end_before_the_limit():
    assert action(3600.0, left=15.0, write_seconds=10.0) == "save"
    assert action(3600.0, left=14.9, write_seconds=10.0) == "exit"
    assert action(3600.0, left=35.0, write_seconds=10.0, writing_seconds=0.0) == "save"
    assert action(3600.0, left=24.0, write_seconds=10.0, writing_seconds=0.0) == "exit"


def test_a_short_job_without_a_measured_save_trains_for_most_of_its_time():
    assert action(600.0, left=600.0) == "continue"
    assert action(600.0, left=126.0) == "continue"
    assert action(600.0, left=125.0) == "save"
    assert action(86400.0, left=606.0) == "continue"
    assert action(86400.0, left=605.0) == "save"
