"""Results of a chaos campaign, kept for each config in data.cache_dir/chaos.

A result belongs to a trajectory, as one of `resume-check`, and has the versions it was found with.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from jaxres.config import RunConfig
from jaxres.operate.chaos.scenarios import ChecklistKind
from jaxres.storage import files
from jaxres.train import kept_results
from jaxres.train.kept_results import version_changes, versions_here

FOLDER = "chaos"
FORMAT = 1
Verdict = Literal["passed", "failed", "not run"]
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
KINDS: tuple[ChecklistKind, ...] = get_args(ChecklistKind)


@dataclass(frozen=True, kw_only=True)
class ChaosResult:
    """Result of a campaign: the output of `chaos run --json`, which is also kept for a config."""

    format: int = FORMAT
    config: str
    """Name of the config."""
    trajectory: str
    """Its trajectory digest."""
    versions: Mapping[str, str]
    seed: int
    hosts: int
    steps: int
    """Steps of each run."""
    save_every_steps: int
    seconds: float
    held: bool
    """Whether every fault has happened and every promise held."""
    summary: str
    kinds: Mapping[ChecklistKind, Verdict]
    """Each of KINDS -> whether all promises held in the runs with its scenarios, in this campaign
    or in an earlier one with these versions."""
    runs: tuple[dict[str, Any], ...]
    """Fields of each run: its name, exit, faults and broken promises."""

    def fields(self) -> dict[str, Any]:
        """Returns the fields that are written."""
        return dataclasses.asdict(self)


def kinds_of(
    runs: Iterable[tuple[Iterable[ChecklistKind | None], bool]],
    before: Mapping[ChecklistKind, Verdict],
) -> dict[ChecklistKind, Verdict]:
    """Returns the verdict of each of KINDS.

    Args:
      runs: the kinds of each run's scenarios, and whether all promises held in it.
      before: verdicts of earlier campaigns, for kinds that these runs do not have.
    """
    found: dict[ChecklistKind, Verdict] = {}
    for kinds, held in runs:
        for kind in kinds:
            if kind is not None and found.get(kind) != FAILED:
                found[kind] = PASSED if held else FAILED
    return {kind: found.get(kind, before.get(kind, NOT_RUN)) for kind in KINDS}


def path_of(config: RunConfig) -> Path:
    """Returns the file of a config's result."""
    return kept_results.path_of(config, FOLDER)


def store(config: RunConfig, result: ChaosResult) -> Path:
    """Writes the result of a config over an earlier one; returns its file.

    Raises:
      StorageRefused, StorageUnavailable: the cache folder can't be written.
    """
    return kept_results.write(path_of(config), result.fields())


@dataclass(frozen=True)
class ChaosFound:
    """Known results of a config: a verdict for each of KINDS."""

    kinds: Mapping[ChecklistKind, Verdict]
    text: str
    """Summary of the newest campaign, or the reason why none counts."""


def read(config: RunConfig) -> ChaosFound:
    """Returns the results of the config's newest campaign; other versions do not count."""
    nothing: dict[ChecklistKind, Verdict] = dict.fromkeys(KINDS, NOT_RUN)
    try:
        result = json.loads(files.read_whole(path_of(config)))
        kinds: dict[ChecklistKind, Verdict] = {
            kind: _verdict(result["kinds"].get(kind)) for kind in KINDS
        }
        text, changed = str(result["summary"]), version_changes(result["versions"], versions_here())
    except FileNotFoundError:
        return ChaosFound(nothing, "no faults were injected into a run of this config here")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return ChaosFound(nothing, f"{path_of(config)} can't be read ({error!r})")
    if changed:
        return ChaosFound(nothing, f"tested with other versions ({', '.join(changed)})")
    return ChaosFound(kinds, text)


def _verdict(value: Any) -> Verdict:
    return value if value in (PASSED, FAILED) else NOT_RUN
