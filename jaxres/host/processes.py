"""Kills all processes that an attempt has left behind, also grandchildren; Linux process helpers.

Leftovers are found in two ways. Every process of an attempt carries a tag in its environment, made
of the nonce in the attempt's claim, so that a later supervisor finds exactly these processes. And a
supervisor is a subreaper: orphans become its children, so every descendant that is left after an
attempt is a leftover. This second way is not used where it may adopt processes of others.

Also here: the kernel's count of out-of-memory kills, the memory of this machine, and the
parent-death signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import signal
import subprocess
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from jaxres.clock import Clock
from jaxres.exit_codes import ExitCode
from jaxres.faults import StorageUnavailable
from jaxres.host.proc_stat import read_proc_stat
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim
from jaxres.storage import files

PR_SET_PDEATHSIG = 1


def kill_me_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel signal this process when its parent is gone, however the parent ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(ExitCode.BUG)


def start_command(
    command: Sequence[str], *, output: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a command in a process group of its own, which gets SIGTERM if this process dies."""
    with open(output, "ab", opener=files.only_files) as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=dict(env),
            process_group=0,
            preexec_fn=functools.partial(kill_me_with_parent, os.getpid(), signal.SIGTERM),
        )


_sessions: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()
"""Processes of `start_session`: their exit codes are not for `reap`."""
_starting = threading.Lock()
"""Held while one is started, since it may end before it is among them."""


def start_session(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Starts a process that leads a session, so that a Ctrl-C in the terminal does not reach it.

    Args:
      stdin, stdout: as of subprocess.Popen.

    Raises:
      OSError: it can't be started.
    """
    with _starting:
        process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, start_new_session=True, env=dict(env)
        )
        _sessions.add(process)
    return process


def kill_session(process: subprocess.Popen[bytes], *, seconds: float | None = None) -> None:
    """Kills a process that leads a session, with its children, unless it has ended.

    Args:
      seconds: longest wait; one that hangs in storage or a driver is left behind. None: no limit.
    """
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def name_process(name: str) -> None:
    """Gives this process the name that `ps -o comm`, `pgrep` and the kernel's messages show.

    Args:
      name: at most 15 bytes; the kernel truncates longer names.
    """
    Path("/proc/self/comm").write_text(name)


def oom_kill_count(root: Path = Path("/")) -> int:
    """Returns the number of processes that the kernel has killed so far for lack of memory.

    Counts this process's cgroup if its counter is readable, else the whole host; 0 if neither is
    readable.
    """
    for path in [*_counters(root), root / "proc/vmstat"]:
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def memory_bytes(root: Path = Path("/")) -> int:
    """Returns the memory of this machine, or the limit of this process's cgroup if it is less."""
    return min([_meminfo_bytes(root, "MemTotal"), *(limit for limit, _ in _limits(root))])


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the memory that this machine has left, or this process's cgroup if that is less."""
    left = [_meminfo_bytes(root, "MemAvailable")]
    for limit, stat in _limits(root):
        with contextlib.suppress(OSError, ValueError):
            left.append(limit - _unreclaimable_bytes(stat))
    return max(0, min(left))


def _meminfo_bytes(root: Path, name: str) -> int:
    text = (root / "proc/meminfo").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None, f"the kernel always reports {name}"
    return int(found[1]) * 1024


def _limits(root: Path) -> list[tuple[int, Path]]:
    """Returns the memory limits of this process's cgroups, and the files of their usage."""
    limits: list[tuple[int, Path]] = []
    for path in _counters(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # No limit is "max".
                limits.append(
                    (int(path.with_name(name).read_text()), path.with_name("memory.stat"))
                )
    return limits


def _unreclaimable_bytes(stat: Path) -> int:
    """Returns a cgroup's memory but for its file cache, which the kernel frees when necessary."""
    rows = (line.split() for line in stat.read_text().splitlines())
    names = ("anon", "rss", "shmem")  # rss: version 1.
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in names)


def _counters(root: Path) -> list[Path]:
    """Returns the files that may hold the counter, for version 1 or 2 of cgroups."""
    cgroups = root / "sys/fs/cgroup"
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, group = line.split(":", 2)
            inside = group.lstrip("/")
            if "memory" in names.split(","):
                paths.append(cgroups / "memory" / inside / "memory.oom_control")
            elif not names:
                paths.append(cgroups / inside / "memory.events")
    return paths


TAG_VARIABLE = "JAXRES_ATTEMPT"
PR_SET_CHILD_SUBREAPER = 36
KILL_WAIT_SECONDS = 10.0
"""Longest wait for killed processes to disappear; one that hangs in the kernel may never do so."""
POLL_SECONDS = 0.01
MAX_EXEC_POLLS, EXEC_POLL_SECONDS = 500, 0.002
"""Polls of a process in the middle of its exec, which has no environment yet."""
KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of include/linux/sched.h."""
MAX_REAPED = 100
"""Most zombie processes that one call reaps; the others wait for the next call."""


def become_subreaper() -> bool:
    """Makes this process the new parent of every descendant whose own parent exits.

    Returns:
      Whether all descendants that this process will ever have are its own. They are not if it
      already has children, which a shell has started before it was replaced by this process
      (`exec`), or if it is process 1 of a container, which adopts every orphan there. Such
      descendants must not be killed.
    """
    owns_descendants = os.getpid() != 1 and not _children()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    return owns_descendants


def _children() -> set[int]:
    """Returns the pids of this process's children."""
    children = set[int]()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and read_proc_stat(int(entry.name)).parent == os.getpid():
                children.add(int(entry.name))
    return children


def tag_env(env: Mapping[str, str], run_dir: RunDir, claim: Claim) -> dict[str, str]:
    """Returns the environment with the attempt's tag."""
    return {**env, TAG_VARIABLE: _tag(run_dir_id(run_dir), claim)}


def reap(child_pids: Iterable[int]) -> None:
    """Reaps adopted zombie processes, so that none stays in the process table.

    Args:
      child_pids: pids of the children that other code waits for; these are not reaped, as those of
        `start_session` are not.
    """
    if not _starting.acquire(blocking=False):
        return  # The next tick does it.
    try:
        # Those that have ended keep their exit code; left as zombies they would hide others.
        running = {process.pid for process in list(_sessions) if process.poll() is None}
        _reap_except(running.union(child_pids))
    finally:
        _starting.release()


def _reap_except(waited_for: Collection[int]) -> None:
    for _ in range(MAX_REAPED):
        with contextlib.suppress(ChildProcessError):
            exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if exited is not None and exited.si_pid not in waited_for:
                os.waitpid(exited.si_pid, os.WNOHANG)
                continue
        return


def run_dir_id(run_dir: RunDir) -> str:
    """Returns the identity of a run directory: unchanged by a move, different for a copy."""
    return files.identity(run_dir.root)


def kill_leftovers(
    folder: str,
    claims: Iterable[Claim],
    *,
    clock: Clock,
    keep: Collection[int] = (),
    adopts: bool = False,
) -> int:
    """Kills the processes that attempts have left behind on this machine; returns their number.

    Only the holder of the run lock may call this: none of these attempts may still run.

    Args:
      folder: the identity of the run directory (`run_dir_id`).
      keep: pids of children that belong to no attempt; neither they nor their own descendants are
        killed.
      adopts: whether every descendant of this process is a leftover too, as `become_subreaper` has
        returned.

    Raises:
      StorageUnavailable: some can't be killed, because they hang in the kernel.
    """
    tags = {f"{TAG_VARIABLE}={_tag(folder, claim)}".encode() for claim in claims}
    killed: set[int] = set()
    until = clock.monotonic() + KILL_WAIT_SECONDS
    while left := _find_leftovers(tags, clock, keep=keep, adopts=adopts):
        if clock.monotonic() > until:
            pids = ", ".join(map(str, sorted(left)))
            raise StorageUnavailable(
                f"processes of an earlier attempt were killed and still exist: they hang in the "
                f"kernel (pid {pids}), as when storage does not answer. Repair the storage."
            )
        for pid in left:
            _kill(pid, tags)
        killed |= left
        clock.sleep(POLL_SECONDS)
    return len(killed)


def _tag(folder: str, claim: Claim) -> str:
    """Returns the tag of an attempt, unique also among the attempts of a copy of the run."""
    return f"{claim.nonce}.{folder}"


def _find_leftovers(
    tags: set[bytes], clock: Clock, *, keep: Collection[int], adopts: bool
) -> set[int]:
    """Returns the pids that carry a tag, or descend from this process; reaps zombie children."""
    parents = dict[int, int]()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            stat = read_proc_stat(int(entry.name))
            if stat.state in "ZX":
                _reap_child(int(entry.name), stat.parent)
                continue
            parents[int(entry.name)] = stat.parent
    tagged, unread = set[int](), set(parents)
    for _ in range(MAX_EXEC_POLLS):
        has_tag = {pid: _has_tag(pid, tags) for pid in unread}
        tagged |= {pid for pid, is_tagged in has_tag.items() if is_tagged}
        unread = {pid for pid, is_tagged in has_tag.items() if is_tagged is None}
        if not unread:
            break
        clock.sleep(EXEC_POLL_SECONDS)
    found = tagged | {pid for pid in parents if adopts and _descends(pid, parents, (os.getpid(),))}
    return {pid for pid in found if not _descends(pid, parents, keep)}


def _reap_child(pid: int, parent: int) -> None:
    """Reaps a zombie process if it is a child of this process."""
    if parent == os.getpid():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _has_tag(pid: int, tags: set[bytes]) -> bool | None:
    """Whether a process carries a tag; None: unknown, because it is in the middle of its exec."""
    with contextlib.suppress(OSError):
        if environ := Path(f"/proc/{pid}/environ").read_bytes():
            return not tags.isdisjoint(environ.split(b"\0"))
        stat = read_proc_stat(pid)
        is_process = stat.state not in "ZX" and not stat.flags & KERNEL_THREAD
        if is_process and (stat.env_start != stat.env_end or not stat.env_end):
            return None  # A process that never gets an environment has env_start == env_end > 0.
    return False


def _descends(pid: int, parents: Mapping[int, int], roots: Collection[int]) -> bool:
    """Whether a process is one of these or descends from one, by the table of parents."""
    for _ in range(len(parents) + 1):
        if pid in roots:
            return True
        pid = parents.get(pid, 0)
    return False


def _kill(pid: int, tags: set[bytes]) -> None:
    """Kills a leftover; does nothing if its pid was given to another process meanwhile."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if _has_tag(pid, tags) or read_proc_stat(pid).parent == os.getpid():
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
