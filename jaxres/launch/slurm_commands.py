"""Slurm's commands: their answers, and whether one that fails may succeed later."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jaxres.faults import ConfigError, StorageUnavailable

CALL_SECONDS = 60.0
ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT"
"""States of a job that Slurm does not start again."""
_DOWN = re.compile(r"down|fail|error|unk|drain|\*$")
"""States of a node on which no process is started; `*`: it does not answer the controller."""
_OUTAGE = re.compile(
    "contact slurm|communication|timed out|zero bytes|standby mode|authentication|munge"
    "|temporarily|connection refused|not connected|connection reset"
    "|message (send|receive)|credential",
    re.IGNORECASE,
)
"""Messages of Slurm's commands, not about the request: the same command may succeed later."""


def call(*command: str) -> str:
    """Returns what a command of Slurm prints.

    Raises:
      ConfigError: it is not installed, or refuses.
      StorageUnavailable: Slurm's controller does not answer.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CALL_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError(
            f"{command[0]}: not found. Run this on a machine where Slurm's commands are installed."
        ) from error
    except OSError as error:
        raise ConfigError(f"{command[0]} can't be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise StorageUnavailable(
            f"{command[0]} has not answered in {CALL_SECONDS:.0f} s"
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        if _OUTAGE.search(said):
            raise StorageUnavailable(f"{command[0]}: Slurm's controller does not answer: {said}")
        raise ConfigError(f"{shlex.join(command)}: {said}")
    return done.stdout.strip()


def submit(script: Path, options: Sequence[str]) -> str:
    """Submits a job's script; returns the number of the job."""
    printed = call("sbatch", "--parsable", *options, str(script))
    found = re.search(r"^([0-9]+)(;.*)?$", printed, re.MULTILINE | re.ASCII)
    if found is None:
        raise ConfigError(
            f"sbatch --parsable has printed no number of a job, but {printed[:200]!r}. If squeue "
            "has the job, cancel it"
        )
    return found[1]


def state(job: str, columns: str = "%T") -> str | None:
    """Returns what squeue says of a job that has not ended; None: it has, or is unknown."""
    try:
        found = call("squeue", "--noheader", f"--jobs={job}", f"--format=%T|{columns}")
    except ConfigError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    first, _, rest = found.partition("\n")[0].partition("|")
    return rest if first and first not in ENDED.split() else None


def node_names(hosts: str) -> tuple[str, ...]:
    """Returns the names of a list of nodes such as n[1-3]."""
    return tuple(call("scontrol", "show", "hostnames", hosts).split())


def is_preempted(job: str) -> bool:
    """Returns whether Slurm has begun to end a running job for another one.

    With a GraceTime it tells only the tasks; the time limit that squeue prints stays what it was.
    """
    asked = ("squeue", "--noheader", f"--jobs={job}", "--Format=PreemptTime")
    return call(*asked)[:1].isdigit()


def nodes_down(nodes: Sequence[str]) -> set[str]:
    """Returns the nodes that Slurm itself does not use any more."""
    rows = call("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T")
    found = (row.split() for row in rows.splitlines())
    return {name for name, state in found if _DOWN.search(state.lower())}


def nodes_without_daemon(nodes: Sequence[str]) -> set[str]:
    """Returns the nodes of this job on which srun can't start a process.

    The controller finds that a node does not answer only after minutes (SlurmdTimeout).
    """
    flags = [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}"]
    flags += ["--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=0", "--wait=0"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["srun", *flags, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CALL_SECONDS,
            check=False,
        )
        return set(re.findall(r"failed on node ([^\s:]+):", done.stderr))
    return set()
