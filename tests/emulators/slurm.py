"""A real Slurm cluster of this machine: Debian's `slurm-wlm` with a controller and a few nodes.

All daemons are processes of this machine, with ports and folders of their own. It needs root, as
Slurm's daemons do.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from jaxres.host.proc_stat import read_proc_stat
from tests.waiting import SURE_SECONDS, has_ended, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=60
MinJobAge=300
FirstJobId={first}
SchedulerParameters=requeue_delay=1,sched_interval=1,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP GraceTime={grace}
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=closed Nodes={names} State=DOWN
"""
GRACE_SECONDS = 3600
"""From the SIGTERM of a preemption by a job of the partition `urgent` to the end of the job."""


def missing() -> str:
    """Returns why no cluster can be started here; empty: one can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{absent[0]} is not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


@dataclass
class SlurmCluster:
    """The running daemons."""

    root: Path
    names: tuple[str, ...]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """Environment in which Slurm's commands find this cluster."""
        return {"SLURM_CONF": str(self.root / "slurm.conf")}

    def start(self, name: str, *command: str) -> None:
        """Starts a daemon."""
        with (self.root / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def start_node(self, name: str) -> None:
        """Starts the daemon of a node."""
        self.start(name, "slurmd", "-D", "-N", name, "-f", str(self.root / "slurm.conf"))

    def kill_node(self, name: str) -> None:
        """Kills the daemon of a node, and all that it has started there, as a power cut does."""
        self.daemons[name].kill()
        self.daemons[name].wait()
        _kill(_on_node(self, name))

    def kill_node_in_steps(self, name: str) -> None:
        """As `kill_node`, but a second process of srun lives longer, and cancels srun's step."""
        self.daemons[name].kill()
        self.daemons[name].wait()
        seconds = {pid: found for pid in _on_node(self, name) if (found := _srun_above(pid))}
        _kill(set(seconds.values()))
        wait_until(lambda: all(map(has_ended, seconds)), "ends of the second processes")
        _kill(_on_node(self, name))

    def shut_down_node(self, name: str) -> None:
        """Sends SIGTERM to all processes of a node, as a reboot in order does before SIGKILL."""
        self.daemons[name].terminate()
        _signal(_on_node(self, name), signal.SIGTERM)

    def call(self, *command: str) -> str:
        """Returns the output of a command of Slurm."""
        env = {**os.environ, **self.env}
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=SURE_SECONDS
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Returns the state of a job, such as RUNNING."""
        fields = self.call("scontrol", "show", "job", job).split()
        return next(text for text in fields if text.startswith("JobState=")).partition("=")[2]

    def jobs(self) -> list[str]:
        """Returns the numbers of the jobs that wait or run."""
        return self.call("squeue", "--noheader", "--format=%i").split()

    def preempt(self, released: Path) -> str:
        """Submits a job that takes all nodes from the others until a file is there."""
        wait = f"--wrap=until test -e {released}; do sleep 0.1; done"
        urgent = ["--partition=urgent", "--exclusive", f"--nodes={len(self.names)}", wait]
        return self.call("sbatch", "--parsable", "--output=/dev/null", *urgent)

    def start_waiting(self) -> None:
        """Starts the jobs that wait for their begin time, a few seconds from now.

        Slurm delays a job that it has put back in the queue by two minutes. It may not begin in the
        second in which its last start was ended: a node refuses the credential, and the job fails.
        """
        for row in self.call("squeue", "--noheader", "--format=%i %t %S %r").splitlines():
            job, state, begin, reason = row.split(maxsplit=3)
            if (state, reason) != ("PD", "BeginTime") or begin == "N/A":
                continue
            if datetime.fromisoformat(begin) - datetime.now() > timedelta(seconds=30):
                self.call("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def log(self) -> str:
        """Returns the end of the controller's log."""
        return (self.root / "slurmctld.log").read_text()[-4000:]


def _on_node(cluster: SlurmCluster, name: str) -> set[int]:
    """Returns the pids of what runs on a node: the tasks, by their environment, and their parents,
    which are Slurm's step daemons."""
    marks = {f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={cluster.env['SLURM_CONF']}".encode()}
    found = set[int]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if marks <= set((path / "environ").read_bytes().split(b"\0")):
                parent = read_proc_stat(path.name).parent
                found.add(int(path.name))
                if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"slurmstepd"):
                    found.add(parent)
        except OSError:
            continue
    return found


def _srun_above(pid: int) -> int | None:
    """Returns the srun whose second process this is, if it is one."""
    with suppress(OSError):
        parent = read_proc_stat(pid).parent
        names = [Path(f"/proc/{number}/comm").read_text().strip() for number in (pid, parent)]
        return parent if names == ["srun", "srun"] else None
    return None


def _kill(pids: set[int]) -> None:
    _signal(pids, signal.SIGKILL)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def cluster(root: Path, *, nodes: int = 3) -> Iterator[SlurmCluster]:
    """Starts a cluster in a folder, and ends it with all its jobs."""
    root.chmod(0o755)
    names = tuple(f"n{number}" for number in range(1, nodes + 1))
    host = socket.gethostname().partition(".")[0]
    rows = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={_free_port()} CPUs=2 "
        "RealMemory=2000 State=UNKNOWN"
        for name in names
    ]
    config = CONFIG.format(
        host=host,
        port=_free_port(),
        first=random.randint(1, 60000),  # The ports of its runs follow from it.
        root=root,
        nodes="\n".join(rows),
        names=",".join(names),
        grace=GRACE_SECONDS,
    )
    (root / "slurm.conf").write_text(config)
    (root / "munge.key").write_bytes(os.urandom(1024))
    (root / "munge.key").chmod(0o400)
    (root / "state").mkdir()
    found = SlurmCluster(root, names)
    try:
        paths = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        paths |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        flags = [f"--{flag}={root / name}" for flag, name in paths.items()]
        found.start("munged", "munged", "--foreground", "--force", *flags)
        _wait(lambda: (root / "munge.socket").exists(), "munged", found)
        found.start("slurmctld", "slurmctld", "-D", "-f", str(root / "slurm.conf"))
        for name in names:
            found.start_node(name)
        ready = f"{nodes} idle"
        _wait(lambda: ready in _sinfo(found), "idle nodes", found)
        yield found
    finally:
        _end(found)


def _sinfo(found: SlurmCluster) -> str:
    command = ["sinfo", "--noheader", "--partition=main", "--format=%D %T"]
    env = {**os.environ, **found.env}
    return subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=SURE_SECONDS
    ).stdout


def _wait(condition, what: str, found: SlurmCluster) -> None:
    wait_until(condition, lambda: f"{what}: {_outputs(found)}")


def _outputs(found: SlurmCluster) -> str:
    return "\n".join(path.read_text()[-500:] for path in found.root.glob("*.out"))


def _end(found: SlurmCluster) -> None:
    env = {**os.environ, **found.env}
    cancel = ["scancel", "--full", "--signal=KILL", "--user=root"]
    subprocess.run(cancel, capture_output=True, env=env, timeout=SURE_SECONDS)
    for name in found.names:
        _kill(_on_node(found, name))
    for daemon in found.daemons.values():
        daemon.kill()
        daemon.wait()


if __name__ == "__main__":
    with cluster(Path(sys.argv[1])) as started:
        sys.stdout.write(f"export SLURM_CONF={started.root}/slurm.conf\n")
        sys.stdout.flush()
        signal.pause()
