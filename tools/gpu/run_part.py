"""Runs one part of tools/gpu/check.py: `run_part.py MODULE PART FOLDER FIGURES.json`."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path


def main(module: str, part: str, folder: Path, figures: Path) -> None:
    """Calls MODULE.PART(FOLDER) and writes what it returns."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = getattr(importlib.import_module(module), part)(folder)
    figures.write_text(json.dumps(found))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
