"""Results of `jaxres resume-check`, kept for each config in data.cache_dir/resume-checks.

A result belongs to a trajectory, and says with which versions and devices it was found. `jaxres
doctor` and the first start of a run read it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxres.config import RunConfig
from jaxres.storage import files
from jaxres.train import kept_results
from jaxres.train.checks.device_check import kinds_of
from jaxres.train.kept_results import version_changes, versions_here

FOLDER = "resume-checks"
BITWISE = "bitwise"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class UnequalElement:
    """The first element that differs between the states of two runs after a step."""

    step: int
    array: str
    block: tuple[int, ...]
    """Index of its block in the grid of the content digest."""
    element: tuple[int, ...]
    """Index of the element in the array."""
    bits: tuple[str, str]
    """Its bits in the unbroken and in the other run, in hex."""
    num_arrays: int
    """Number of arrays that differ there."""

    def __str__(self) -> str:
        """Returns the line to print."""
        block, element = (",".join(map(str, index)) for index in (self.block, self.element))
        return (
            f"state after step {self.step}: {self.array}, block [{block}], element [{element}]: "
            f"bits {self.bits[0]} unbroken, {self.bits[1]} here ({self.num_arrays} arrays differ)"
        )


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first difference from the unbroken run."""

    run: str
    step: int
    what: str
    """The field of the step, `state` or `missing`."""
    unbroken: Any
    broken: Any
    attempt: int | None
    """Attempt that has computed the step; None: it is about a state."""
    place: UnequalElement | None
    """None: no committed state of both runs differs."""


@dataclass(frozen=True, kw_only=True)
class BreakResult:
    """One planned break, and its facts in the run log."""

    kind: str
    step: int
    attempt: int | None
    """The attempt that it ended; None, as in the next fields: it did not happen."""
    exit: int | None
    resumed_at: int | None
    """Step from which the next attempt trained."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run, compared with the unbroken one."""

    name: str
    equal: bool
    exit: int
    topology: str | None
    """Topology on which it was resumed; None: the same."""
    breaks: tuple[BreakResult, ...]


@dataclass(frozen=True, kw_only=True)
class ResumeCheckResult:
    """Result of a check of a config: the output of `--json`, which is also kept."""

    format: int = FORMAT
    config: str
    """Name of the config."""
    trajectory: str
    """Its trajectory digest."""
    guarantee: str
    """bitwise, different, or not tested: on the same topology."""
    summary: str
    cause: str
    topologies: Mapping[str, str]
    """Other topology -> bitwise, statistical (equal samples), different or not tested."""
    first_difference: FirstDifference | None
    runs: tuple[RunResult, ...]
    versions: Mapping[str, str]
    devices: str
    steps: int
    seed: int
    overridden: tuple[str, ...]
    """Free keys that the check has set."""
    seconds: float
    date: str
    """Day of the check in UTC, as in 2026-11-26."""

    def fields(self) -> dict[str, Any]:
        """Returns the fields that are written."""
        return dataclasses.asdict(self)


def path_of(config: RunConfig) -> Path:
    """Returns the file of a config's result."""
    return kept_results.path_of(config, FOLDER)


def store(config: RunConfig, result: ResumeCheckResult) -> Path:
    """Writes the result of a config over an earlier one; returns its file.

    Raises:
      StorageRefused, StorageUnavailable: the cache folder can't be written.
    """
    return kept_results.write(path_of(config), result.fields())


@dataclass(frozen=True)
class KnownResume:
    """Known result of resumes of a config."""

    is_good: bool
    """Whether a check has found it bitwise, with the same versions."""
    text: str
    date: str = ""
    """Day of the check; empty: there is none, or an older version of jaxres has made it."""
    devices: str = ""
    """Devices of the check."""


def read(config: RunConfig) -> KnownResume:
    """Returns the result of a config's newest resume check."""
    command = "run `jaxres resume-check` with it"
    try:
        result = json.loads(files.read_whole(path_of(config)))
        before, level, summary = result["versions"], result["guarantee"], result["summary"]
        where = {"date": str(result.get("date", "")), "devices": str(result["devices"])}
        changed = version_changes(before, versions_here())
    except FileNotFoundError:
        return KnownResume(False, f"a resume of this config was never tested here: {command}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return KnownResume(False, f"{path_of(config)} can't be read ({error!r}): {command}")
    if level != BITWISE:
        return KnownResume(
            False, f"{summary} ({path_of(config)}). After a change {command}", **where
        )
    if changed:
        return KnownResume(
            False, f"tested with other versions ({', '.join(changed)}): {command}", **where
        )
    return KnownResume(True, str(summary), **where)


def start_note(found: KnownResume, *, devices: str) -> str:
    """Returns the line of a run's first start: whether a resume of its config was tested.

    Args:
      found: the newest result of the config.
      devices: those of the start, as in Start.computation.

    >>> here = "guarantee: bitwise here"
    >>> found = KnownResume(True, here, date="2026-11-26", devices="1 x cpu cpu")
    >>> start_note(found, devices="8 x cpu cpu on 2 hosts")
    'resume-check: guarantee: bitwise here (2026-11-26, 1 x cpu cpu)'
    >>> start_note(found, devices="1 x gpu H100")
    'resume-check: guarantee: bitwise here (2026-11-26, 1 x cpu cpu); not tested on 1 x gpu H100'
    """
    where = ", ".join(text for text in (found.date, found.devices) if text)
    text = f"resume-check: {found.text}" + (f" ({where})" if where else "")
    is_elsewhere = found.devices and kinds_of(found.devices) != kinds_of(devices)
    return f"{text}; not tested on {devices}" if is_elsewhere else text
