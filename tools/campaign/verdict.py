"""Which promises a killed run has broken, compared with the unbroken run. Pure."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxres.exit_codes import SIGNAL_BASE, ExitCode, exit_name
from jaxres.operate import resume_verdict
from jaxres.operate.resume_verdict import RunFacts
from jaxres.runlog.records import Commit, Quarantine, Record, Start

ENDS = (None, SIGNAL_BASE + signal.SIGKILL, ExitCode.DONE)
"""How an attempt may end: no record, the signal, or the end of the run."""


@dataclass(frozen=True)
class KilledFacts:
    """Facts about a killed run."""

    run: RunFacts
    records: Sequence[Record]
    """The run log."""
    seen_digests: Mapping[int, str]
    """Committed step -> content digest, as it was when a process was killed."""
    damaged: tuple[str, ...] = ()
    """Damage that a verification of the committed steps has found at the end."""
    left: tuple[str, ...] = ()
    """Leftovers of the run."""
    problem: str = ""
    """Why it was given up."""


def judge(reference: RunFacts, facts: KilledFacts) -> tuple[str, ...]:
    """Returns the promises that did not hold, one text for each."""
    return tuple(_broken(reference, facts))


def _broken(reference: RunFacts, facts: KilledFacts) -> Iterator[str]:
    if facts.problem:
        yield f"given up: {facts.problem}"
    run = dataclasses.replace(facts.run, digests={**facts.seen_digests, **facts.run.digests})
    last = max(reference.digests)
    # Pruned steps have no digest any more.
    shared = {s: d for s, d in reference.digests.items() if s in run.digests or s == last}
    if run.exit != ExitCode.DONE:
        yield f"the run ended with {exit_name(run.exit)}: {run.message}"
    compared = resume_verdict.compare(dataclasses.replace(reference, digests=shared), run)
    if (found := compared.mismatch) is not None:
        yield f"step {found.step}, {found.what}: {found.a} unbroken, {found.b} killed"
    for step in sorted(facts.seen_digests):
        now = facts.run.digests.get(step)
        if now is not None and now != facts.seen_digests[step]:
            yield f"step {step} was committed with another digest before"
    for attempt in run.attempts:
        if attempt.exit not in ENDS:
            assert attempt.exit is not None
            yield f"attempt {attempt.attempt} ended with {exit_name(attempt.exit)}"
    yield from wrong_starts(facts.records)
    yield from facts.damaged
    yield from (f"left behind: {what}" for what in facts.left)


def wrong_starts(records: Sequence[Record]) -> Iterator[str]:
    """Yields starts from another step than the newest committed one, and damaged steps."""
    newest = 0
    for record in records:
        match record.body:
            case Commit(step=step):
                newest = step
            case Start(step=step) if step != newest:
                yield f"attempt {record.attempt} started at step {step}, committed was {newest}"
            case Quarantine(step=step, evidence=evidence):
                yield f"attempt {record.attempt} found step {step} damaged: {evidence}"
            case _:
                pass
