"""Runs one part of tools/gpu/check.py: `run_part.py MODULE PART FOLDER FIGURES.json`.

A part is a function of a folder that returns figures, or yields some after each measurement: what
it has yielded is kept if it fails or hangs later.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path


def main(module: str, part: str, folder: Path, figures: Path) -> None:
    """Calls MODULE.PART(FOLDER) and writes its returned or yielded figures."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = getattr(importlib.import_module(module), part)(folder)
    found: dict[str, object] = {}
    for some in [made] if isinstance(made, Mapping) else made:
        found |= some
        written = figures.with_suffix(".new")
        written.write_text(json.dumps(found, default=str))
        written.replace(figures)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
