"""Between two simulated attempts the launcher's own decider acts on a simulated clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.decide.reconcile import CYCLE_SECONDS
from jaxres.operate.plan.simulated_vms import Answer, Gap, LostVm, SimulatedLauncher, Vms
from jaxres.supervisor.restart_policy import KILLED, GiveUp, Restart
from tests.unit.launch.gce_config import config

GRANTED = Answer(seconds=5.0, report_seconds=20.0)
REFUSED = Answer(seconds=2.0, refused="stockout")
PREEMPTED = LostVm(slot=0, kind="preempted")
BACKOFF = 4.0


def launcher(
    *, first: tuple[Answer, ...] = (), num_hosts: int = 1, **gce: Any
) -> SimulatedLauncher:
    """Returns a launcher whose first attempt runs."""
    settings = config(num_hosts=num_hosts, **gce)
    restart = settings.restart.model_copy(update={"backoff_seconds": BACKOFF, "jitter": 0.0})
    vms = Vms(
        config=settings.model_copy(update={"restart": restart}),
        first=Gap(answers=first),
        before_seconds=60.0,
        usual=GRANTED,
        label="jx",
    )
    return SimulatedLauncher(vms)


def seconds(found: Restart | GiveUp) -> Any:
    assert isinstance(found, Restart), found
    return pytest.approx(found.after_seconds, abs=1e-5)


def test_a_lost_vm_is_replaced_once_it_is_freed_in_the_first_zone_with_capacity() -> None:
    gap = Gap(lost=(PREEMPTED,), freed_seconds=3.0, answers=(REFUSED, GRANTED))
    found = launcher().end_attempt(ExitCode.PREEMPTED, gap, step=10, now=100.0)
    assert seconds(found) == 3.0 + 2.0 + CYCLE_SECONDS + 5.0 + 20.0


def test_a_refused_zone_is_skipped_for_as_long_as_the_launcher_skips_it() -> None:
    """Both zones refuse, so the first one is asked again after its own wait."""
    gap = Gap(lost=(PREEMPTED,), answers=(REFUSED, REFUSED, GRANTED))
    found = launcher().end_attempt(ExitCode.PREEMPTED, gap, step=10, now=100.0)
    assert isinstance(found, Restart)
    assert 300.0 < found.after_seconds < 1.25 * 300.0 + 60.0
    many = launcher(first=(REFUSED, REFUSED, GRANTED))
    later = many.end_attempt(ExitCode.PREEMPTED, Gap(lost=(PREEMPTED,)), step=10, now=1e4)
    assert seconds(later) == CYCLE_SECONDS + 5.0 + 20.0, "the refusals are forgotten by then"


def test_what_took_some_cycles_of_the_real_launcher_takes_as_many() -> None:
    """Its cycle is a second and the time of its work; between two cycles it decides nothing."""
    longer = 1.03
    refused = Answer(seconds=2.0 * longer, refused="stockout")
    granted = Answer(seconds=5.0 * longer, report_seconds=12.0 * longer)
    gap = Gap(lost=(PREEMPTED,), freed_seconds=3.0 * longer, answers=(refused, granted))
    found = launcher().end_attempt(ExitCode.PREEMPTED, gap, step=10, now=100.0)
    assert seconds(found) == (3 + 2 + 1 + 5 + 12) * CYCLE_SECONDS, "not the launcher's cycles"


def test_a_wait_of_the_restart_policy_ends_at_a_cycle_of_the_launcher() -> None:
    """In a run of `launch gce` an attempt after a backoff of 0.1 s began after 1.02 s."""
    settings = launcher().vms
    restart = settings.config.restart.model_copy(update={"backoff_seconds": 2.1})
    config = settings.config.model_copy(update={"restart": restart})
    found = SimulatedLauncher(replace(settings, config=config)).end_attempt(
        KILLED, Gap(), step=10, now=100.0
    )
    assert seconds(found) == 3 * CYCLE_SECONDS, "the launcher looks once a cycle"


def test_a_replacement_that_was_requested_at_the_notice_boots_meanwhile() -> None:
    noticed = replace(PREEMPTED, notice_seconds=15.0)
    gap = Gap(lost=(noticed,), answers=(GRANTED,))
    found = launcher().end_attempt(ExitCode.PREEMPTED, gap, step=10, now=100.0)
    assert seconds(found) == 5.0 + 20.0 - 15.0


def test_a_crash_restarts_on_the_same_vms_after_the_wait_of_the_restart_policy() -> None:
    one = launcher()
    waits = [seconds(one.end_attempt(KILLED, Gap(), step=0, now=100.0 * n)) for n in (1, 2)]
    assert waits == [BACKOFF, 2 * BACKOFF]


def test_a_vm_that_is_lost_after_its_process_has_exited_is_replaced_too() -> None:
    later = Gap(lost=(replace(PREEMPTED, seconds=2.0),))
    found = launcher().end_attempt(ExitCode.PEER_LOST, later, step=10, now=100.0)
    assert seconds(found) == 2.0 + CYCLE_SECONDS + 5.0 + 20.0


def test_an_unhealthy_host_is_replaced_and_the_others_are_kept() -> None:
    lost = LostVm(slot=1, kind="on a host that exited with 82")
    two = launcher(num_hosts=2)
    before = [host.name for host in two.hosts]
    found = two.end_attempt(ExitCode.UNHEALTHY, Gap(lost=(lost,)), step=10, now=100.0)
    assert seconds(found) == CYCLE_SECONDS + 5.0 + 20.0
    after = [host.name for host in two.hosts]
    assert (after[0] == before[0], after[1] in before) == (True, False)


def test_a_job_whose_vms_are_lost_without_a_new_commit_ends_by_the_launchers_own_budget() -> None:
    most = 3
    one = launcher(max_replacements_without_commit=most)
    gap = Gap(lost=(PREEMPTED,))
    ends = [one.end_attempt(ExitCode.PREEMPTED, gap, step=0, now=100.0 * n) for n in range(1, 4)]
    assert all(isinstance(end, Restart) for end in ends)
    end = one.end_attempt(ExitCode.PREEMPTED, gap, step=0, now=400.0)
    assert isinstance(end, GiveUp), "the budget of replacements has no effect"
    assert "launch.gce.max_replacements_without_commit=3" in end.reason
    other = launcher(max_replacements_without_commit=most)
    found = [other.end_attempt(ExitCode.PREEMPTED, gap, step=n, now=100.0 * n) for n in range(1, 9)]
    assert all(isinstance(end, Restart) for end in found), "a new commit starts the count again"


def test_vms_that_are_lost_before_they_report_are_replaced_and_counted() -> None:
    never = Answer(seconds=5.0, report_seconds=20.0, lost_seconds=8.0)
    gap = Gap(lost=(PREEMPTED,), answers=(never, GRANTED))
    found = launcher().end_attempt(ExitCode.PREEMPTED, gap, step=10, now=100.0)
    assert seconds(found) == 2 * CYCLE_SECONDS + 5.0 + 8.0 + 5.0 + 20.0
