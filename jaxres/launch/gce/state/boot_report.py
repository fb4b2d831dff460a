"""Reports of startup scripts: why a VM does not come up. Pure.

The startup script of a VM writes its stage, and the error with which the stage failed, as metadata
of an object with the VM's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxres.launch.gce.state.desired_state import BootFailure, VmSpec

BootState = Literal["running", "retrying", "failed", "started"]
STATES: tuple[BootState, ...] = ("running", "retrying", "failed", "started")
NUM_LINES, MAX_LINE = 3, 200
MAX_FAILURES, MAX_LATER_FAILURES = 2, 5
"""After so many boots in a row that fail with the same cause the job ends; the second number holds
once an attempt of the job has ended: then the config is known to work."""


@dataclass(frozen=True)
class BootReport:
    """The newest report of a startup script."""

    stage: str
    state: BootState
    error: str = ""
    """Last line of the stage's output once it has failed."""

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> BootReport | None:
        """Parses the metadata of an object; None: it is not a report of a startup script."""
        states: dict[str | None, BootState] = {state: state for state in STATES}
        state, stage = states.get(metadata.get("state")), metadata.get("stage")
        if state is None or not stage:
            return None
        return cls(stage, state, metadata.get("error", ""))

    def describe(self) -> str:
        """Returns a sentence for the operator.

        >>> BootReport("image", "failed", "denied").describe()
        'its startup script failed in the stage `image`: denied'
        """
        error = f": {self.error}" if self.error else ""
        return {
            "running": f"its startup script is in the stage `{self.stage}`",
            "retrying": f"its startup script retries the stage `{self.stage}`{error}",
            "failed": f"its startup script failed in the stage `{self.stage}`{error}",
            "started": "its startup script has started the agent",
        }[self.state]


@dataclass(frozen=True)
class VmBoot:
    """Known facts about the boot of a VM whose agent has not reported yet."""

    report: BootReport | None = None
    serial: tuple[str, ...] = ()
    """Last lines of its serial port output, once they were read."""

    @property
    def has_failed(self) -> bool:
        """Whether the startup script has exited with an error."""
        return self.report is not None and self.report.state == "failed"

    def describe(self) -> str:
        """Returns the known facts about a VM's boot, for the operator; empty: none."""
        known, error = [], ""
        if self.report is not None:
            known, error = [self.report.describe()], self.report.error
        lines = [line for line in self.serial if not error or error not in line]
        if lines:
            known.append(f"end of its serial port output: {' | '.join(lines)}")
        return "; ".join(known)

    def cause(self) -> str:
        """Returns a cause that is equal for boots that fail for the same reason; empty: unknown.

        >>> VmBoot(BootReport("code", "failed", "curl: (22) in 12 s")).cause()
        'code: curl: (#) in # s'
        """
        error = ""
        if self.report is not None and self.report.state in ("failed", "retrying"):
            error = f"{self.report.stage}: {self.report.error}"
        elif own := [line for line in self.serial if _is_own(line)]:
            error = own[-1]
        elif self.report is not None:
            error = self.report.stage
        return re.sub(r"\b[0-9a-f]*[0-9][0-9a-f]*\b", "#", error)


def _is_own(line: str) -> bool:
    """Returns whether the startup script has written a line of the serial port output."""
    return "jaxres: " in line or "startup-script" in line


def last_lines(output: str) -> tuple[str, ...]:
    r"""Returns the last lines of a serial port output; only the startup script's if it has any.

    >>> last_lines("jaxres: no image\n\nkernel: a bell\n")
    ('jaxres: no image',)
    """
    lines = [line for text in output.splitlines() if (line := " ".join(text.split()))]
    lines = [line for line in lines if _is_own(line)] or lines
    return tuple(line[-MAX_LINE:] for line in lines[-NUM_LINES:])


def next_failure(
    before: BootFailure | None,
    lost: Sequence[VmSpec],
    boots: Mapping[str, VmBoot],
    *,
    now: float,
) -> BootFailure | None:
    """Returns the failure to remember after the loss of VMs. Pure.

    A VM that was requested before the remembered failure belongs to the same round: it does not
    count again.
    """
    for vm in lost:
        cause = boots.get(vm.name, VmBoot()).cause()
        if not cause:
            continue
        if before is None or before.cause != cause:
            before = BootFailure(cause, now)
        elif vm.requested_at > before.at:
            before = replace(before, at=now, times=before.times + 1)
    return before
