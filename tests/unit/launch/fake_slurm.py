"""Slurm's commands as scripts, for the tests of `launch slurm`."""

from __future__ import annotations

import shlex
from pathlib import Path

from jaxres.launch.slurm import command as slurm
from jaxres.launch.slurm.journal import Journal

JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "6"}


class Commands:
    """Slurm's commands: each prints what a test has set, and its arguments are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, folder / "calls.txt"
        self.named = folder / "named.txt"
        folder.mkdir()

    def set(self, name: str, text: str = "", *, code: int = 0, error: str = "") -> None:
        """Sets what a command answers from now on."""
        answer = f"echo {shlex.quote(error)} >&2; printf %s {shlex.quote(text)}; exit {code}"
        self._write(name, f"{answer}\n")

    def fail_once(self, name: str, error: str, *, then: str) -> None:
        """Sets a command that fails the first time."""
        first = self.folder / f"{name}-failed"
        fails = f"[ -e {first} ] || {{ touch {first}; echo {shlex.quote(error)} >&2; exit 1; }}"
        self._write(name, f"{fails}\nprintf %s {shlex.quote(then)}\n")

    def _write(self, name: str, body: str) -> None:
        path = self.folder / name
        if name == "squeue":  # By name it lists all jobs of a run: none, or what is in a file.
            body = f'case "$*" in *--name=*) cat {self.named} 2>/dev/null; exit 0;; esac\n{body}'
        keep = f'echo "{name} $* cpus=$SRUN_CPUS_PER_TASK" >> {self.kept}'
        path.write_text(f"#!/bin/sh\n{keep}\n{body}")
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        """Returns the arguments of each call of a command."""
        lines = self.kept.read_text().splitlines() if self.kept.exists() else []
        return [line for line in lines if line.split()[0] == name]


def submit(*arguments: str) -> int:
    return slurm.main(["quickstart", "run.dir=run", *arguments], env={})


def journal(kind: type | None = None) -> list:
    entries = Journal(Path("run/slurm")).read()
    return [entry for entry in entries if kind is None or isinstance(entry, kind)]
