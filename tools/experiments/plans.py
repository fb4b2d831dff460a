"""Plans of jobs by `jaxres plan --json`, for the experiments that are arithmetic or simulation."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.experiments.training_process import ROOT, jaxres, write_result


def planned(*words: object) -> dict[str, Any]:
    """Returns the plan of a job."""
    return json.loads(jaxres("plan", *map(str, words), "--json"))


def rounded(value: Any, digits: int = 4) -> Any:
    """Returns a value with all of its numbers rounded, at any depth."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, Mapping):
        return {name: rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value


def write(name: str, result: Mapping[str, Any]) -> int:
    """Writes and prints the result of an experiment; returns 1 if its claim does not hold."""
    folder: Path = ROOT / "experiments" / name
    write_result(folder / "results" / "results.json", dict(result))
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0 if result["holds"] else 1
