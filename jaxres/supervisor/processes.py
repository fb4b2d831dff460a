"""Sees to it that nothing which an attempt has started outlives it: also children of children.

Two nets. Every process of an attempt has its mark in the environment, made of the nonce in the
attempt's claim, so that a later supervisor, too, finds exactly those. And while a supervisor lives,
orphans come to it, so that whatever descends from it after an attempt is a remainder.

What is asked of the kernel: whom it has killed for want of memory, and whom it is to kill.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from jaxres.clock import Clock
from jaxres.faults import Exit, StorageUnavailable
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim
from jaxres.storage import files
from jaxres.storage.path import BucketPath

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent is gone, however that ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(Exit.BUG)


def out_of_memory_kills(root: Path = Path("/")) -> int:
    """Returns how many processes the kernel has killed so far because memory had run out.

    Of this process's cgroup where its counter can be read, else of the whole host; 0 where the
    kernel does not tell.
    """
    for path in [*_counters(root), root / "proc/vmstat"]:
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _counters(root: Path) -> list[Path]:
    """Returns where the counter may be, by version 1 or 2 of cgroups."""
    groups = root / "sys/fs/cgroup"
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, group = line.split(":", 2)
            inside = group.lstrip("/")
            if "memory" in names.split(","):
                found.append(groups / "memory" / inside / "memory.oom_control")
            elif not names:
                found.append(groups / inside / "memory.events")
    return found


MARK = "JAXRES_ATTEMPT"
PR_SET_CHILD_SUBREAPER = 36
GONE_SECONDS = 10.0
"""Longest wait until killed processes are gone: one that hangs in the kernel may never be."""
LOOK_SECONDS = 0.01
MOST_LOOKS, AGAIN_SECONDS = 500, 0.002
"""At a process in the middle of its exec, which has no environment yet; and until the next."""
KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of include/linux/sched.h."""
MOST_AT_ONCE = 100
"""Orphans that are buried at once; the others wait for the next time."""


def adopt_orphans() -> None:
    """From now on, whoever descends from this process and loses its parent becomes its child."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def marked(env: Mapping[str, str], run_dir: RunDir, claim: Claim) -> dict[str, str]:
    """Returns the environment with the attempt's mark."""
    return {**env, MARK: _mark(identity(run_dir), claim)}


def bury(workers: Iterable[int]) -> None:
    """Takes leave of adopted orphans that have ended, so that none stays in the process table.

    Args:
      workers: pids of the children whose ends somebody else waits for.
    """
    waited_for = set(workers)
    for _ in range(MOST_AT_ONCE):
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None and found.si_pid not in waited_for:
                os.waitpid(found.si_pid, os.WNOHANG)
                continue
        return


def identity(run_dir: RunDir) -> str:
    """Returns what stays when a run directory is moved, and is another for its copy."""
    if isinstance(run_dir.root, BucketPath):
        return str(run_dir.root)
    with files.typed_errors(run_dir.root):
        folder = run_dir.root.stat()
    return f"{folder.st_dev}.{folder.st_ino}"


def end(folder: str, claims: Iterable[Claim], *, clock: Clock, spare: Collection[int] = ()) -> int:
    """Ends what attempts have left behind on this machine; returns how many processes there were.

    Only for the owner of the run: none of these attempts may still be at work.

    Args:
      folder: the identity of the run directory.
      claims: of the attempts.
      clock: the supervisor's.
      spare: pids of children that belong to no attempt.

    Raises:
      StorageUnavailable: some can't be ended, since they hang in the kernel.
    """
    marks = {f"{MARK}={_mark(folder, claim)}".encode() for claim in claims}
    killed: set[int] = set()
    until = clock.monotonic() + GONE_SECONDS
    while left := _left(marks, clock).difference(spare):
        if clock.monotonic() > until:
            named = ", ".join(map(str, sorted(left)))
            raise StorageUnavailable(
                f"processes of an earlier attempt are killed and not gone: they hang in the "
                f"kernel (pid {named}), as where storage does not answer. Mend it."
            )
        for pid in left:
            _kill(pid, marks)
        killed |= left
        clock.sleep(LOOK_SECONDS)
    return len(killed)


def _mark(folder: str, claim: Claim) -> str:
    """Returns what tells an attempt from all others, also from those of a copy of the run."""
    return f"{claim.nonce}.{folder}"


def _left(marks: set[bytes], clock: Clock) -> set[int]:
    """Returns those who bear a mark or descend from this process, without the dead."""
    parents = dict[int, int]()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                _bury(int(entry.name), int(parent))
                continue
            parents[int(entry.name)] = int(parent)
    found, unread = set[int](), set(parents)
    for _ in range(MOST_LOOKS):
        looks = {pid: _bears(pid, marks) for pid in unread}
        found |= {pid for pid, bears in looks.items() if bears}
        unread = {pid for pid, bears in looks.items() if bears is None}
        if not unread:
            break
        clock.sleep(AGAIN_SECONDS)
    return found | {pid for pid in parents if _descends(pid, parents)}


def _bury(pid: int, parent: int) -> None:
    """Takes leave of a dead child that was adopted, so that it does not stay in the table."""
    if parent == os.getpid():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _bears(pid: int, marks: set[bytes]) -> bool | None:
    """Says whether a process bears a mark; None: nobody can say, in the middle of its exec."""
    with contextlib.suppress(OSError):
        if words := Path(f"/proc/{pid}/environ").read_bytes():
            return not marks.isdisjoint(words.split(b"\0"))
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, flags, start, end = stat[0], int(stat[6]), int(stat[47]), int(stat[48])
        if state not in "ZX" and not flags & KERNEL_THREAD and (start != end or not end):
            return None  # Without an environment for good it has a place for one, of no size.
    return False


def _descends(pid: int, parents: Mapping[int, int]) -> bool:
    """Whether a process descends from this one, as far as the table of parents tells."""
    for _ in parents:
        pid = parents.get(pid, 0)
        if pid == os.getpid():
            return True
    return False


def _kill(pid: int, marks: set[bytes]) -> None:
    """Kills a process; one that has got its number meanwhile is left alone."""
    with contextlib.suppress(OSError):
        held = os.pidfd_open(pid)
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if _bears(pid, marks) or parent == os.getpid():
                signal.pidfd_send_signal(held, signal.SIGKILL)
        finally:
            os.close(held)
