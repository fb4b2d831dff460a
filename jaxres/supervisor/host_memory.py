"""A supervisor's handling of its run's states in host memory (checkpoint/memory/tier.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode, RestartRule, exit_row
from jaxres.host.proc_stat import process_exists, process_id
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim
from jaxres.storage import memory_folder
from jaxres.storage.memory_folder import Owner


def prepare(run_dir: RunDir, config: RunConfig, claims: Sequence[Claim]) -> None:
    """Deletes states that this attempt can't use, and says in its folder whose states it has.

    They are in another place (`checkpoint.memory.folder`), or this attempt has no such tier, or
    they are of the same run in a run directory that a copy of it has replaced.
    """
    section = config.checkpoint.memory
    base = None if section is None else section.folder
    if base is not None:
        memory_folder.record(base, places=run_dir.memory_places)
    memory_folder.delete_others(run_dir.root, base, places=run_dir.memory_places)
    process = process_id(os.getpid())
    if claims and process is not None:
        owner = Owner(str(run_dir.root), claims[0].nonce, process)
        memory_folder.delete_replaced(
            run_dir.root,
            owner,
            places=run_dir.memory_places,
            has_ended=lambda other: process_exists(other) is False,
        )
        if base is not None:
            memory_folder.mark(run_dir.root, base, owner)


def delete(run_dir: RunDir, config: RunConfig) -> None:
    """Deletes the states in host memory."""
    section = config.checkpoint.memory
    memory_folder.delete(
        run_dir.root, memory_folder.SHARED_MEMORY if section is None else section.folder
    )


def delete_at_end(run_dir: RunDir, config: RunConfig, ended: AttemptResult) -> None:
    """Deletes the states in host memory, unless the next start needs them after a failure.

    A fenced process leaves them to the process that owns the run.
    """
    is_final = ended.committed or exit_row(ended.code).restart is RestartRule.NEVER
    if is_final and ended.code != ExitCode.FENCED:
        delete(run_dir, config)
