"""Programs: digests of their files, and commands that work with jaxres's trainer only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from jaxres.config.errors import Problem
from jaxres.config.schema.program import ProgramSection
from jaxres.config.schema.run_config import RunConfig
from jaxres.faults import UsageError

CHUNK_BYTES = 2**20


def require_trainer(config: RunConfig, command: str) -> None:
    """Raises UsageError if the config runs a program, with which a command can do nothing."""
    if config.program is not None:
        raise UsageError(
            f"{command}: this config runs a program (`program`), whose model, data and steps "
            "jaxres does not know. The command works with jaxres's own trainer only."
        )


def with_digests(config: RunConfig) -> tuple[RunConfig, list[Problem]]:
    """Returns the config with the digest of each file of its program, and the problems of these.

    Digests that the config has already are kept: `changes` compares them before the program runs.
    """
    section = config.program
    if section is None or not section.files or section.files_sha256:
        return config, []
    digests, problems = {}, []
    for path in section.files:
        digest = digest_of(section.cwd / path)
        if digest is None:
            problems.append(_unreadable(section, path))
        else:
            digests[str(path)] = digest
    filled = section.model_copy(update={"files_sha256": digests})
    return config.model_copy(update={"program": filled}), problems


def changes(section: ProgramSection) -> Iterator[Problem]:
    """Yields a problem for each file whose content is not the recorded one."""
    for path in section.files:
        recorded, now = section.files_sha256.get(str(path)), digest_of(section.cwd / path)
        if now is None:
            yield _unreadable(section, path)
        elif now != recorded:
            yield Problem(
                "program.files",
                f"{path} has changed: recorded sha256 {recorded}, now {now}. To go on with this "
                "run, restore the file; to start a new run with it, give another run.dir, and the "
                "config file instead of the run directory",
            )


def digest_of(path: Path) -> str | None:
    """Returns the SHA-256 (hex) of a regular file; None: it can't be read as one."""
    found = hashlib.sha256()
    try:
        if not path.expanduser().is_file():
            return None
        with open(path.expanduser(), "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                found.update(chunk)
    except (OSError, RuntimeError):  # RuntimeError: no such home folder.
        return None
    return found.hexdigest()


def _unreadable(section: ProgramSection, path: Path) -> Problem:
    where = section.cwd / path
    text = f"{where}: no such file, or it can't be read; relative paths start at program.cwd"
    return Problem("program.files", text)
