"""Which promises held in a run with injected faults, compared with a run without. Pure.

A fault counts only if it was seen to happen, and if the run log has an attempt that ended by it and
a later one that trained. A fault that did not happen is a failure, never a pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxres.exit_codes import ExitCode, exit_name
from jaxres.operate import resume_verdict
from jaxres.operate.chaos import time_account
from jaxres.operate.chaos.scenarios import BY_NAME
from jaxres.operate.chaos.schedule import PlannedRun, ScheduledFault
from jaxres.operate.chaos.time_account import TimeAccount
from jaxres.operate.resume_verdict import AttemptFacts, RunFacts
from jaxres.runlog.metrics import MetricsLine

PROMISES = {
    "injected": "each planned fault has happened",
    "ends": "the run reaches its last step",
    "same bits": "every step and every committed state is that of the run without faults",
    "each sample once": "the history has each step and each batch of samples once, by count",
    "causes": "each attempt but the last was ended by an injected fault, by the run log",
    "bounded loss": "no more steps are computed again than the scenario allows",
    "damage found": "damaged steps, and no others, are recorded and never restored",
    "accounted": "the report has each second of the run once, and each fault as one incident",
    "scenario": "what the scenario itself promises (`jaxres chaos list`)",
    "recovery time": "the run trains again within --max-recovery-seconds",
    "whole lines": "no line of a log is lost after a torn one",
    "nothing left": "no process, port, temporary file, unfinished save or shared memory is left",
}
"""Name -> meaning of each promise that is checked in every run."""


@dataclass(frozen=True)
class Injection:
    """An injected fault, as observed from outside."""

    fault: ScheduledFault
    evidence: str = ""
    """How it is known that the fault has happened; empty: it has not."""
    problem: str = ""
    """Why it has not happened."""
    recovery_seconds: float | None = None
    """From the fault to the first step that the run has finished since; None: unknown."""
    damaged_step: int | None = None
    """The step whose checkpoint was damaged."""
    ended_attempts: int = 1
    """How many attempts it has ended one after the other, if it ends one."""
    unkept: str = ""
    """Violation of the scenario's own promise; empty: it held."""


@dataclass(frozen=True)
class ChaosFacts:
    """Facts about one run with faults."""

    planned: PlannedRun
    run: RunFacts
    injections: tuple[Injection, ...]
    """In the order of the planned faults; the later ones are missing if the run has ended."""
    quarantined: frozenset[int] = frozenset()
    """Steps that the run log records as damaged."""
    uncommitted: frozenset[int] = frozenset()
    """Steps whose save a fault has made fail."""
    altered: tuple[tuple[int, int], ...] = ()
    """Number of a start record, and the step after which a fault has changed the state: the later
    steps of its segment are not those of the run without faults, and none of them may be kept."""
    other_samples: Mapping[int, str] = field(default_factory=dict)
    """Step -> digest of the samples that it must have instead of the oracle's, since a fault has
    made the run leave rows out: of these steps nothing else is compared."""
    merged_lines: tuple[str, ...] = ()
    """Files in which a torn line was continued by another one."""
    kept: tuple[MetricsLine, ...] = ()
    """The steps of the kept history, without steps that were trained again."""
    left: tuple[str, ...] = ()
    """Leftovers of the run."""
    account: TimeAccount | None = None
    """The run's report; None: it could not be read, or the run log had no claim."""


@dataclass(frozen=True)
class Broken:
    """A promise that did not hold."""

    promise: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """Consequences of a fault."""

    injection: Injection
    ended: AttemptFacts | None
    """The attempt that it ended, or in which it was; of several, the last."""
    resumed: AttemptFacts | None
    """The next attempt, or the same if the fault ends none; None: it has not trained."""
    earlier: tuple[AttemptFacts, ...] = ()
    """Other attempts that it ended, before."""

    @property
    def repeated(self) -> int | None:
        """Steps that were finished before the fault and not kept; None: the run has not resumed."""
        if self.resumed is None or self.resumed.start_step is None or self.ended is None:
            return None
        if self.resumed == self.ended:
            return 0
        reached = max(self.injection.fault.step, self.ended.finished_step or 0)
        return reached - self.resumed.start_step


def _ends_attempt(injection: Injection) -> bool:
    """Returns whether a fault ends an attempt; faults of storage may end none."""
    scenario = BY_NAME.get(injection.fault.scenario)
    return scenario is None or bool(scenario.ends)


def outcomes(facts: ChaosFacts) -> tuple[Outcome, ...]:
    """Returns each fault that has happened, with the attempts before and after it, in order."""
    happened = [injection for injection in facts.injections if injection.evidence]
    attempts = [*facts.run.attempts, *[None] * (len(happened) + 1)]
    found: list[Outcome] = []
    number = 0
    for injection in happened:
        first = number
        number += injection.ended_attempts if _ends_attempt(injection) else 0
        *earlier, ended = attempts[first : max(number, first + 1)] or [None]
        resumed = attempts[number] if number < len(attempts) else None
        is_training = resumed is not None and resumed.start_step is not None
        before = tuple(one for one in earlier if one is not None)
        found.append(Outcome(injection, ended, resumed if is_training else None, before))
    return tuple(found)


def judge(
    reference: RunFacts,
    facts: ChaosFacts,
    *,
    save_every: int,
    max_recovery_seconds: float | None = None,
) -> tuple[Broken, ...]:
    """Returns the promises that did not hold in a run, in the order of PROMISES.

    Args:
      facts: the run with faults.
      save_every: steps between two saves.
      max_recovery_seconds: limit of a recovery; None: there is none.
    """
    found = [
        *_not_injected(facts),
        *_differences(reference, facts),
        *_samples(reference, facts),
        *_causes(facts),
        *_losses(facts, save_every),
        *_damage(facts),
        *_account(facts),
        *_own_promises(facts),
        *_recoveries(facts, max_recovery_seconds),
        *(Broken("whole lines", f"{name}: the next line is lost") for name in facts.merged_lines),
        *(Broken("nothing left", what) for what in facts.left),
    ]
    order = {name: number for number, name in enumerate(PROMISES)}
    return tuple(sorted(found, key=lambda broken: order[broken.promise]))


def _not_injected(facts: ChaosFacts) -> Iterator[Broken]:
    done = {one.fault: one for one in facts.injections}
    for fault in facts.planned.faults:
        one = done.get(fault)
        if one is None or not one.evidence:
            why = one.problem if one else "the run had ended before"
            yield Broken("injected", f"{fault.scenario} after step {fault.step}: {why}")
    if not facts.planned.faults:
        yield Broken("injected", "no fault was planned")


def _differences(reference: RunFacts, facts: ChaosFacts) -> Iterator[Broken]:
    run = facts.run
    if run.exit != ExitCode.DONE:
        yield Broken("ends", f"{exit_name(run.exit)}: {run.message}")
    until = min(facts.other_samples, default=math.inf)
    changed = dict(facts.altered)
    digests = {
        step: digest
        for step, digest in reference.digests.items()
        if step not in facts.uncommitted and step < until
    }
    steps = tuple(row for row in reference.rows if row.step < until)
    rows = tuple(r for r in run.rows if r.step <= changed.get(r.seq, r.step) and r.step < until)
    found = resume_verdict.compare(
        dataclasses.replace(reference, digests=digests, rows=steps),
        dataclasses.replace(run, rows=rows),
    )
    later = {step for step in reference.digests if step >= until}
    if run.exit == ExitCode.DONE and (lost := sorted(later - run.digests.keys())):
        yield Broken("same bits", f"steps {lost} are not committed")
    if kept := [r.step for r in facts.kept if r.step > changed.get(r.seq, r.step)]:
        yield Broken("same bits", f"steps {kept} of a state that a fault has changed are kept")
    if (mismatch := found.mismatch) is not None:
        cause = resume_verdict.cause_of_resume(found)
        text = f"step {mismatch.step}, {mismatch.what}: {mismatch.a} without faults, {mismatch.b}"
        yield Broken("same bits", f"{text} here; {cause}")


def _samples(reference: RunFacts, facts: ChaosFacts) -> Iterator[Broken]:
    """Counts the batches of the history: no comparison step by step finds a doubled one."""
    if facts.run.exit != ExitCode.DONE:
        return  # What is missing is reported as the end of the run.
    steps = Counter(row.step for row in facts.kept)
    if doubled := sorted(step for step, count in steps.items() if count > 1):
        yield Broken("each sample once", f"steps {doubled} are in the history more than once")
    others = facts.other_samples
    wrong = [row.step for row in facts.kept if others.get(row.step, row.samples) != row.samples]
    if wrong:
        text = f"step {wrong[0]} has other samples than those that are left"
        yield Broken("each sample once", text)
    wanted = Counter(others.get(row.step, row.samples) for row in reference.rows)
    found = Counter(row.samples for row in facts.kept)
    missing, more = (wanted - found).total(), (found - wanted).total()
    if missing or more:
        text = f"{missing} batch(es) of samples are missing in the history, {more} are too many"
        yield Broken("each sample once", text)


def _ended(one: Outcome) -> tuple[AttemptFacts, ...]:
    """Returns the attempts that a fault has ended, in order."""
    if one.ended is None or not _ends_attempt(one.injection):
        return ()
    return (*one.earlier, one.ended)


def _causes(facts: ChaosFacts) -> Iterator[Broken]:
    happened = outcomes(facts)
    for one in happened:
        name, ended = one.injection.fault.scenario, _ended(one)
        if one.ended is None:
            yield Broken("causes", f"{name}: the run log has no attempt that it ended")
        elif wrong := [a for a in ended if a.exit not in BY_NAME[name].ends]:
            yield Broken("causes", f"attempt {wrong[0].attempt}: {_end(wrong[0])} after {name}")
        elif one.resumed is None:
            yield Broken("causes", f"{name}: the next attempt has not trained")
    ends = sum(len(_ended(one)) for one in happened)
    for extra in facts.run.attempts[ends + 1 :]:
        yield Broken("causes", f"attempt {extra.attempt} was not caused by a fault")
    if facts.run.attempts and facts.run.attempts[-1].exit != ExitCode.DONE:
        yield Broken("causes", f"the last attempt: {_end(facts.run.attempts[-1])}")


def _end(attempt: AttemptFacts) -> str:
    return "no stop record" if attempt.exit is None else exit_name(attempt.exit)


def _losses(facts: ChaosFacts, save_every: int) -> Iterator[Broken]:
    for one in outcomes(facts):
        name = one.injection.fault.scenario
        allowed = BY_NAME[name].lost_intervals * save_every
        if one.repeated is not None and one.repeated > allowed:
            yield Broken("bounded loss", f"{name}: {one.repeated} steps again, at most {allowed}")


def _damage(facts: ChaosFacts) -> Iterator[Broken]:
    damaged: set[int] = set()
    for one in outcomes(facts):
        step, name = one.injection.damaged_step, one.injection.fault.scenario
        if step is None:
            continue
        damaged.add(step)
        if step not in facts.quarantined:
            yield Broken("damage found", f"{name}: the log does not record that step {step} is")
        start = None if one.resumed is None else one.resumed.start_step
        if start is not None and start >= step:
            yield Broken("damage found", f"{name}: step {start} was restored, damaged is {step}")
    for step in sorted(facts.quarantined - damaged):
        yield Broken("damage found", f"step {step} is recorded as damaged, and no fault was there")


def _account(facts: ChaosFacts) -> Iterator[Broken]:
    if facts.account is None:
        yield Broken("accounted", "the run has no report")
        return
    ended: list[tuple[str, AttemptFacts, frozenset[int | None]]] = []
    resumed: list[int | None] = []
    for one in outcomes(facts):
        name = one.injection.fault.scenario
        attempts = _ended(one)
        ended += [(name, attempt, BY_NAME[name].ends) for attempt in attempts]
        resumed += [attempt.start_step for attempt in attempts[1:]]
        if attempts:
            resumed.append(None if one.resumed is None else one.resumed.start_step)
    for text in time_account.differences(facts.account, facts.run.rows, ended, resumed):
        yield Broken("accounted", text)


def _own_promises(facts: ChaosFacts) -> Iterator[Broken]:
    for one in facts.injections:
        if one.unkept:
            yield Broken("scenario", f"{one.fault.scenario}: {one.unkept}")


def _recoveries(facts: ChaosFacts, limit: float | None) -> Iterator[Broken]:
    for one in outcomes(facts) if limit is not None else ():
        seconds, name = one.injection.recovery_seconds, one.injection.fault.scenario
        if seconds is None:
            yield Broken("recovery time", f"{name}: the run has not trained since")
        elif limit is not None and seconds > limit:
            yield Broken("recovery time", f"{name}: {seconds:.1f} s, at most {limit:g}")


def is_good(verdicts: Sequence[Sequence[Broken]]) -> bool:
    """Returns whether there was a run and every promise held in each."""
    return bool(verdicts) and not any(verdicts)
