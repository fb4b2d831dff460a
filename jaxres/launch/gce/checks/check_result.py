"""Result of one check before VMs are requested. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from jaxres.config.errors import Problem, one_line
from jaxres.launch.gce.api.resource_reader import ReadDenied

States = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check."""

    check: str
    state: States
    """failed: VMs would not be created, or not train. warning: they may not."""
    found: str
    remedy: str = ""
    key: str = ""
    """Dotted key of the config that is concerned."""

    def text(self) -> str:
        """Returns the result of the check as text, and the remedy."""
        return f"{self.found}. {self.remedy}" if self.remedy else self.found

    def problem(self) -> Problem:
        """Returns the result as a problem of the config."""
        return Problem(self.key, self.text())


def denied_result(check: str, denied: ReadDenied) -> CheckResult:
    """Returns the warning that a check was not allowed a read."""
    return CheckResult(
        check,
        "warning",
        f"{check} not checked: {denied}",
        "To have it checked, grant this permission (docs/gce-reference.md, Permissions)",
    )


def guard(check: str, results: Iterable[CheckResult]) -> Iterator[CheckResult]:
    """Yields the results of a check; a read that is not allowed ends it with a warning."""
    try:
        yield from results
    except ReadDenied as denied:
        yield denied_result(check, denied)


def table(results: Iterable[CheckResult]) -> list[str]:
    """Returns a table of results: check, state, finding, and below it the remedy.

    >>> table([CheckResult("image", "failed", "there is none", "Give one")])[1:]
    ['image          FAILED   there is none', '                         -> Give one']
    """
    lines = [f"{'check':<14} {'result':<8} what was found"]
    for result in results:
        state = result.state.upper() if result.state == "failed" else result.state
        lines.append(f"{result.check:<14} {state:<8} {one_line(result.found)}")
        if result.remedy:
            lines.append(f"{'':<24} -> {one_line(result.remedy)}")
    return lines
