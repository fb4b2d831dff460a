"""The journal of a run's Slurm jobs: facts that outlive one job, in a shared folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jaxres.faults import ConfigError
from jaxres.launch.slurm import client as slurm_commands
from jaxres.launch.slurm.job import ENTRIES, Entry, Submitted
from jaxres.runlog.event_log import read_json_lines
from jaxres.storage import files


@dataclass(frozen=True)
class Journal:
    """The shared folder of a run's jobs: script, output, and the journal."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "journal.jsonl"

    def read(self) -> list[Entry]:
        """Returns the entries; a line that a killed process has cut is left out."""
        entries = list[Entry]()
        for fields in read_json_lines(self.path):
            with suppress(ValueError):
                entries.append(ENTRIES.decode(fields))
        return entries

    def append(self, entry: Entry) -> None:
        """Appends an entry, durably."""
        with files.typed_errors(self.path), self.path.open("a") as file:
            file.write(f"\n{json.dumps(ENTRIES.encode(entry))}\n")
            file.flush()
            os.fsync(file.fileno())

    def submit(self, options: Sequence[str]) -> str:
        """Submits the job's script; returns the number of the job."""
        try:
            job = slurm_commands.submit(self.folder / "job.sh", options)
        except ConfigError as error:
            if not any(option.startswith("--exclude=") for option in options):
                raise
            forget = "`python -m jaxres hosts RUN_DIR --forget NODE` takes a node again"
            raise ConfigError(f"{error}. Nodes are left out: {forget}") from error
        self.append(Submitted(job))
        return job

    def jobs(self) -> list[str]:
        """Returns the numbers of all jobs, in the order of their submission."""
        return [entry.job for entry in self.read() if isinstance(entry, Submitted)]

    def newest_job(self) -> str | None:
        """Returns the number of the job that was submitted last."""
        return next(reversed(self.jobs()), None)
