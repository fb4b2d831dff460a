"""Checks of a program before its command starts: its files, working directory and executable."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxres.config import programs
from jaxres.config.errors import Problem
from jaxres.config.schema.program import ProgramSection


def search_path(section: ProgramSection, env: Mapping[str, str]) -> str:
    """Returns the PATH of a program: `python` in it is the Python that runs jaxres.

    A PATH in program.env is taken as it is.
    """
    if "PATH" in section.env:
        return section.env["PATH"]
    return os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])


def problems(section: ProgramSection, env: Mapping[str, str]) -> Iterator[Problem]:
    """Yields what makes it impossible to start a program, or to go on with it."""
    folder = section.cwd.expanduser()
    if not folder.is_dir():
        yield Problem("program.cwd", f"{section.cwd}: no such folder; create it, or give another")
        return
    yield from programs.changes(section)
    name = section.command[0]
    if "/" in name:
        path = folder / name
        if not path.is_file():
            text = f"{path}: no such file; give the path from program.cwd, or a name on PATH"
            yield Problem("program.command", text)
        elif not os.access(path, os.X_OK):
            text = f"{path} can't be executed; run `chmod +x {path}`, or name its interpreter first"
            yield Problem("program.command", text)
    elif shutil.which(name, path=search_path(section, env)) is None:
        text = f"{name}: no such program on PATH; install it, or give its path"
        yield Problem("program.command", text)
