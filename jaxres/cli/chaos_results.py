"""Results of a chaos campaign, kept for each config in data.cache_dir/chaos.

A result belongs to a trajectory, as one of `resume-check`, and has the versions it was found with.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxres import config as configs
from jaxres.cli.resume_results import version_changes, versions_here
from jaxres.config import RunConfig
from jaxres.storage import files

FOLDER = "chaos"
FORMAT = 1
KINDS: tuple[str, ...] = ("node_kill", "partition", "corruption")
"""What the checklist asks for: a killed host, a cut network, a damaged checkpoint."""
Verdict = Literal["passed", "failed", "not run"]
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True, kw_only=True)
class ChaosResult:
    """Result of the newest campaign of a config."""

    format: int = FORMAT
    config: str
    """Name of the config."""
    trajectory: str
    """Its trajectory digest."""
    kinds: Mapping[str, Verdict]
    """Each of KINDS -> whether all promises held in the scenarios of this kind."""
    scenarios: Mapping[str, Verdict]
    """The same by scenario."""
    summary: str
    versions: Mapping[str, str]
    seed: int
    seconds: float

    def fields(self) -> dict[str, Any]:
        """Returns the fields that are written."""
        return dataclasses.asdict(self)


def path_of(config: RunConfig) -> Path:
    """Returns the file of a config's result."""
    folder = config.data.cache_dir.expanduser() / FOLDER
    return folder / f"{configs.digest(config)[:16]}.json"


def store(config: RunConfig, result: ChaosResult) -> Path:
    """Writes the result of a config over an earlier one; returns its file.

    Raises:
      StorageRefused, StorageUnavailable: the cache folder can't be written.
    """
    path = path_of(config)
    files.make_dir(path.parent)
    files.replace(path, json.dumps(result.fields(), indent=1).encode() + b"\n")
    return path


@dataclass(frozen=True)
class ChaosFound:
    """What is known about a config: a verdict for each of KINDS."""

    kinds: Mapping[str, str]
    text: str
    """What the newest campaign says of itself, or why there is none that counts."""


def read(config: RunConfig) -> ChaosFound:
    """Returns what the newest campaign of a config has found; other versions do not count."""
    nothing = dict.fromkeys(KINDS, NOT_RUN)
    try:
        result = json.loads(path_of(config).read_bytes())
        kinds = {kind: str(result["kinds"].get(kind, NOT_RUN)) for kind in KINDS}
        text, changed = str(result["summary"]), version_changes(result["versions"], versions_here())
    except FileNotFoundError:
        return ChaosFound(nothing, "no faults were injected into a run of this config here")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return ChaosFound(nothing, f"{path_of(config)} can't be read ({error!r})")
    if changed:
        return ChaosFound(nothing, f"tested with other versions ({', '.join(changed)})")
    return ChaosFound(kinds, text)
