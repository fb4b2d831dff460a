"""A real systemd as the first process of namespaces of its own: nothing outside sees it.

It runs units of a private /run only, in a cgroup of its own; all files but those of the test are
read-only. Everything ends with it, and it ends with the test's process.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import SURE_SECONDS

SYSTEMD = next(
    (path for path in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd") if Path(path).exists()),
    None,
)
TARGET = "jaxres-test.target"
UNIT_PATH = "/run/systemd/system"
USER_RUN = "/run/user/0"
USER_ENV = {"XDG_RUNTIME_DIR": USER_RUN, "PATH": "/usr/bin:/bin"}
"""Environment of programs that call the user's systemd."""
CGROUP = "jaxres-test-"
"""Beginning of the names of the cgroups; the process id of the test follows."""
UNITS = {
    **dict.fromkeys(
        (TARGET, "sysinit.target", "basic.target", "shutdown.target", "network-online.target"),
        "[Unit]\nDefaultDependencies=no\n",
    ),
    "docker.service": "[Service]\nExecStart=/bin/sleep infinity\n",
}
"""All units that exist, in the place of those of this machine."""
BOOT = r"""set -eu
for folder in "$@"; do mount --bind "$folder" "$folder"; done
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs none /run
mkdir -p /run/systemd/system
cp "$units"/* /run/systemd/system
cp -r "$config" /run/systemd/system.conf.d
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -o remount,bind,ro /
exec setpriv --bounding-set=-sys_time,-sys_module,-sys_rawio,-syslog,-mknod \
  env -i container=jaxres PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_UNIT_PATH=/run/systemd/system \
  "$systemd" --system --unit="$target" --log-target=console --show-status=no
"""


@dataclass(frozen=True)
class Systemd:
    """The systemd, and the command prefix that enters its namespaces."""

    pid: int
    """Its process id outside."""
    output: Path

    @property
    def through(self) -> tuple[str, ...]:
        """Command prefix that enters its namespaces and its cgroup namespace."""
        flags = ("--mount", "--pid", "--ipc", "--uts", "--cgroup")
        return ("nsenter", f"--target={self.pid}", *flags)

    def run(
        self, *arguments: str, env: Mapping[str, str] | None = None, seconds: float = SURE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command inside."""
        return subprocess.run(
            [*self.through, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            timeout=seconds,
        )

    def start_user_manager(self) -> None:
        """Starts root's own systemd, for `systemctl --user`; logind would start it at a login."""
        script = f'mkdir -p {USER_RUN} && exec "$0" --user --unit={TARGET} --log-target=console'
        env = f"--property=Environment=XDG_RUNTIME_DIR={USER_RUN} SYSTEMD_UNIT_PATH={UNIT_PATH}"
        command = ("systemd-run", "--property=Delegate=yes", env, "sh", "-c", script, str(SYSTEMD))
        assert self.run(*command).returncode == 0
        until = time.monotonic() + SURE_SECONDS
        while self.run("systemctl", "--user", "is-active", TARGET, env=USER_ENV).returncode:
            assert time.monotonic() < until, "the user's systemd does not answer"
            time.sleep(0.05)

    def show(
        self,
        unit: str,
        *names: str,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Returns properties of a unit."""
        names_flag = f"--property={','.join(names)}"
        done = self.run("systemctl", *flags, "show", names_flag, unit, env=env)
        assert done.returncode == 0, done.stdout
        return dict(line.split("=", 1) for line in done.stdout.splitlines())


def obstacle() -> str | None:
    """Returns why no systemd can be booted here; None: it can."""
    missing = [name for name in ("unshare", "nsenter", "setpriv", "systemctl") if _lacks(name)]
    if SYSTEMD is None or missing:
        return f"systemd or its tools are missing: {missing or 'systemd'}"
    if os.geteuid() != 0:
        return "a systemd of its own needs root"
    if (cgroups := _cgroup2()) is None:
        return "no cgroup2 is mounted"
    trial = cgroups / f"jaxres-trial-{os.getpid()}"
    flags = ("--mount", "--pid", "--ipc", "--uts", "--cgroup", "--fork", "--propagation=private")
    mounts = "mount -t cgroup2 none /sys/fs/cgroup && mount -t tmpfs none /run"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        return f"no cgroup can be made: {error}"
    done = subprocess.run(["unshare", *flags, "sh", "-c", mounts], capture_output=True, text=True)
    return None if done.returncode == 0 else f"no namespace of its own: {done.stderr.strip()}"


def _lacks(name: str) -> bool:
    return shutil.which(name) is None


def _cgroup2() -> Path | None:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)


@contextlib.contextmanager
def booted(
    root: Path, *, writable: Sequence[Path] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Systemd]:
    """Boots a systemd; ends it, and every process of it, at the end.

    Args:
      root: the folder of the test.
      writable: further folders that are not read-only inside.
      environment: variables of all services.
    """
    units, config, output = root / "units", root / "system.conf.d", root / "systemd.txt"
    units.mkdir()
    config.mkdir()
    for name, text in UNITS.items():
        (units / name).write_text(text)
    words = " ".join(f'"{name}={value}"' for name, value in (environment or {}).items())
    (config / "environment.conf").write_text(f"[Manager]\nDefaultEnvironment={words}\n")
    mounted = _cgroup2()
    assert mounted is not None
    cgroup = mounted / f"{CGROUP}{os.getpid()}"
    for leftover in mounted.glob(f"{CGROUP}*"):  # Of a test that was killed.
        with contextlib.suppress(OSError):  # Those with processes stay.
            _remove_now(leftover)
    cgroup.mkdir()
    holder = _boot(cgroup, [root, *writable], units, config, output)
    try:
        yield _wait(holder, output)
    finally:
        for pid in _children(holder.pid):  # Its death ends every process of its namespace.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        holder.kill()
        holder.wait()
        _remove(cgroup)


def _boot(
    cgroup: Path, folders: Sequence[Path], units: Path, config: Path, output: Path
) -> subprocess.Popen[bytes]:
    flags = "--mount --pid --ipc --uts --cgroup --fork --kill-child --mount-proc"
    names = shlex.join(map(str, folders))
    enter = f"echo $$ > {shlex.quote(str(cgroup / 'cgroup.procs'))}"
    unshare = f"exec unshare --propagation=private {flags} sh -c {shlex.quote(BOOT)} boot {names}"
    values = {"units": str(units), "config": str(config), "systemd": str(SYSTEMD)}
    with output.open("wb") as file:
        return subprocess.Popen(
            # No function that runs between fork and exec: this process may have threads of jax.
            ["setpriv", "--pdeathsig", "KILL", "sh", "-euc", f"{enter}; {unshare}"],
            env={**os.environ, **values, "target": TARGET},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def _children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _wait(holder: subprocess.Popen[bytes], output: Path) -> Systemd:
    """Waits until systemd answers."""
    until = time.monotonic() + SURE_SECONDS
    while True:
        for pid in _children(holder.pid):
            found = Systemd(pid, output)
            state = found.run("systemctl", "is-active", TARGET).stdout.strip()
            if state == "active":
                return found
        assert holder.poll() is None, output.read_text()
        assert time.monotonic() < until, output.read_text()
        time.sleep(0.05)


def _remove(cgroup: Path) -> None:
    """Removes an empty cgroup; its processes may still be leaving it."""
    until = time.monotonic() + SURE_SECONDS
    while cgroup.exists():
        with contextlib.suppress(OSError):
            _remove_now(cgroup)
        assert time.monotonic() < until, f"{cgroup} can't be removed"
        time.sleep(0.05)


def _remove_now(cgroup: Path) -> None:
    for folder, _, _ in os.walk(cgroup, topdown=False):
        os.rmdir(folder)
