"""Slurm's commands: their answers, and whether one that fails may succeed later."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from jaxres.faults import ConfigError, RunError, StorageUnavailable
from jaxres.host import signals
from jaxres.storage import threads
from jaxres.supervisor.attempt_runner import RESTART_VARIABLE

CALL_SECONDS = 60.0
POLL_SECONDS = 0.5
TIME_LIMIT = "TimeLimit"
"""Reason that squeue prints of a job that its time limit ends."""
WATCH_STEP = "jaxres-watch"
"""Name of the step of `ScriptWatch`."""
WATCH = """\
echo watching
exec > /dev/null 2>&1
while sleep 30; do
  found=$(squeue --noheader --all --jobs="$SLURM_JOB_ID" --format='%T %N') || continue
  [ "${found%% *}" = RUNNING ] || continue
  nodes=$(scontrol show hostnames "${found#* }") && [ -n "$nodes" ] || continue
  printf '%s\\n' "$nodes" | grep -qxF -- "$1" && continue
  echo "jaxres: node $1, on which the job's script ran, is lost: back in the queue" >> "$2"
  scontrol requeue "$SLURM_JOB_ID" && exit
done"""
"""Shell script of `ScriptWatch`; its arguments: the node, and the output of the job."""
_BUSY = (errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.ESTALE, errno.ETXTBSY)
ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT"
"""States of a job that Slurm does not start again."""
_DOWN = re.compile(r"down|fail|error|unk|drain|\*$")
"""States of a node on which no process is started; `*`: it does not answer the controller."""
_OUTAGE = re.compile(
    "contact slurm|communication|timed out|zero bytes|standby mode|authentication|munge"
    "|temporarily|connection refused|not connected|connection reset"
    "|message (send|receive)|unexpected message|credential|no route to host|unreachable"
    "|unable to resolve|shutting down|presently disabled|cannot allocate memory|stale file handle",
    re.IGNORECASE,
)
"""Messages of Slurm's commands, not about the request: the same command may succeed later."""


def call(*command: str) -> str:
    """Returns the output of a command of Slurm.

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
        end = StorageUnavailable if error.errno in _BUSY else ConfigError
        raise end(f"{command[0]} can't be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise StorageUnavailable(
            f"{command[0]} has not answered in {CALL_SECONDS:.0f} s"
        ) from error
    if done.returncode < 0:
        raise StorageUnavailable(f"{command[0]} was ended by signal {-done.returncode}")
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
    """Returns squeue's columns for a job; None: the job has ended, or is unknown."""
    try:
        found = call("squeue", "--noheader", "--all", f"--jobs={job}", f"--format=%T|{columns}")
    except ConfigError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    row = next((line for line in found.splitlines() if "|" in line), "")  # Without a banner.
    first, _, rest = row.partition("|")
    return rest if first and first not in ENDED.split() else None


def node_names(hosts: str) -> tuple[str, ...]:
    """Returns the names of a list of nodes such as n[1-3]."""
    return tuple(call("scontrol", "show", "hostnames", hosts).split())


def is_preempted(job: str) -> bool:
    """Returns whether Slurm has begun to end a running job for another one.

    With a GraceTime it tells only the tasks; the time limit that squeue prints stays what it was.
    """
    asked = ("squeue", "--noheader", "--all", f"--jobs={job}", "--Format=PreemptTime")
    return any(line[:1].isdigit() for line in call(*asked).splitlines())


def nodes_down(nodes: Sequence[str]) -> set[str]:
    """Returns the nodes that Slurm itself does not use any more."""
    asked = ("sinfo", "--noheader", "--all", "--Node", f"--nodes={','.join(nodes)}")
    found = (row.split() for row in call(*asked, "--format=%N %T").splitlines())
    return {row[0] for row in found if len(row) == 2 and _DOWN.search(row[1].lower())}


def known_nodes() -> set[str]:
    """Returns the names of all nodes; `--exclude` with another one is refused."""
    return set(call("sinfo", "--noheader", "--all", "--Node", "--format=%N").split())


def nodes_of(partitions: Sequence[str]) -> int:
    """Returns the number of nodes of the largest of some partitions; none: of the default one."""
    found: dict[str, int] = {}
    for line in call("sinfo", "--noheader", "--all", "--format=%P|%D").splitlines():
        name, bar, number = line.partition("|")
        if bar and number.strip().isdecimal():
            found[name] = found.get(name, 0) + int(number)
    is_default = not partitions
    return max(
        (
            n
            for name, n in found.items()
            if name.removesuffix("*") in partitions or (is_default and name.endswith("*"))
        ),
        default=0,
    )


def node_address(node: str) -> str:
    """Returns the address of a node in Slurm's configuration if it is not its name; else empty."""
    found = re.search(r"\bNodeAddr=(\S+)", call("scontrol", "show", "node", "--oneliner", node))
    return "" if found is None or found[1] in (node, "(null)") else found[1]


def step_flags(nodes: Sequence[str]) -> list[str]:
    """Returns the flags of srun for one task on each of these nodes of this job."""
    flags = [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}"]
    flags += ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]
    return [*flags, "--export=ALL"]  # Else only what sbatch --export names, and no --setup.


def nodes_without_daemon(nodes: Sequence[str]) -> set[str]:
    """Returns the nodes of this job on which srun can't start a process.

    The controller finds that a node does not answer only after minutes (SlurmdTimeout).
    """
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["srun", *step_flags(nodes), "--overlap", "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CALL_SECONDS,
            check=False,
        )
        return set(re.findall(r"failed on node ([^\s:]+):", done.stderr))
    return set()


class ScriptWatch:
    """A step on another node that puts the job back in the queue if the script's node is lost.

    With --no-kill Slurm keeps such a job with the nodes that are left, and nothing runs on them
    until its time limit. A second process of srun cancels the step when srun dies before it, and
    so does srun at SIGTERM: both are killed as soon as the step runs, which goes on without them.
    """

    def __init__(self, *, job: str, node: str, output: Path) -> None:
        self._job, self._arguments = job, (node, str(output))
        self._starting: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ScriptWatch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._starting is not None and self._starting.poll() is None:
            self._starting.kill()  # Slurm ends the step with the job.
            self._starting.wait()

    def ensure_started(self, nodes: Sequence[str]) -> None:
        """Starts the step on the last of these nodes, unless it runs on one of them.

        Args:
          nodes: usable nodes of the job; with none but the script's, Slurm ends the job itself.
        """
        others = [node for node in nodes if node != self._arguments[0]]
        if not others or self._is_running(others):
            return
        command = ["sh", "-c", WATCH, "sh", *self._arguments]
        flags = [*step_flags(others[-1:]), "--overlap", f"--job-name={WATCH_STEP}"]
        self._starting = subprocess.Popen(
            ["srun", *flags, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        threads.spawn_thread("watch-step", partial(_leave_step, self._starting), daemon=True)

    def _is_running(self, nodes: Sequence[str]) -> bool:
        if self._starting is None or self._starting.poll() is None:
            return self._starting is not None
        asked = ("squeue", "--noheader", "--all", "--steps", f"--jobs={self._job}")
        with suppress(RunError):
            rows = call(*asked, "--format=%j|%N").splitlines()
            return any(f"{WATCH_STEP}|{node}" in rows for node in nodes)
        return True  # Asked again before the next attempt.


def _leave_step(srun: subprocess.Popen[bytes]) -> None:
    """Kills srun and its second process once the step has printed a line."""
    assert srun.stdout is not None
    with srun.stdout as printed:
        if printed.readline():
            with suppress(ProcessLookupError):
                # Stopped first: the second process must not see that the first one is dead.
                os.killpg(srun.pid, signal.SIGSTOP)
                os.killpg(srun.pid, signal.SIGKILL)
    srun.wait()


def run_step(
    command: Sequence[str],
    is_restart: bool,
    wakeup: int,
    env: Mapping[str, str],
    *,
    on_stop: Callable[[], None],
) -> tuple[int, bool]:
    """Trains one attempt on nodes; returns srun's exit code, and whether this job was told to end.

    Slurm signals the tasks itself, so no signal is passed on: a second one would end them at once.
    `on_stop` is called when this job is told to end, while the tasks may still run.
    """
    own = {**env, RESTART_VARIABLE: "1" if is_restart else "0"}
    if cpus := env.get("SLURM_CPUS_PER_TASK"):  # srun does not take it over from sbatch.
        own["SRUN_CPUS_PER_TASK"] = cpus
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=own, process_group=0)
    is_stopped = False
    while not is_stopped and process.poll() is None:
        is_stopped = signals.wait_for_stop(wakeup, POLL_SECONDS)
    is_stopped |= signals.wait_for_stop(wakeup, 0.0)
    if is_stopped:
        on_stop()
    code = process.wait()
    return (128 - code if code < 0 else code), is_stopped
