"""Real mounts in a private mount namespace: full and read-only disks that vanish with the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import SURE_SECONDS

PAGE_BYTES = 4096


def entered(prefix: Sequence[str]) -> int | None:
    """Returns the pid whose mounts a command prefix enters, if that is all that it does.

    >>> entered(["nsenter", "--target=7", "--mount", "--wdns=/tmp"]), entered(["nohup"])
    (7, None)
    """
    match prefix:
        case ["nsenter", target, "--mount", folder] if folder.startswith("--wdns="):
            return int(target.removeprefix("--target="))
    return None


@dataclass(frozen=True)
class Namespace:
    """A private mount namespace, held open by one sleeping process.

    `through` is the command prefix that enters it; `seen_from_here` is the path by which this
    process, which stays outside, reads the mounts inside.
    """

    holder: subprocess.Popen[bytes]
    through: tuple[str, ...]

    @classmethod
    def open(cls) -> Namespace:
        """Creates a namespace, as root or as user namespace root; fails instead of skipping."""
        ways = ((), ("--map-root-user",)) if os.geteuid() == 0 else (("--map-root-user",),)
        complaints = []
        for way in ways:
            arguments = ["unshare", "--mount", "--propagation=private", *way]
            holder = subprocess.Popen(
                [*arguments, "sh", "-c", "echo ready; exec sleep 3600"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            assert holder.stdout is not None
            printed = holder.stdout.readline()
            if printed == b"ready\n":
                user = ("--user", "--preserve-credentials") if way else ()
                target = (f"--target={holder.pid}", "--mount", f"--wdns={Path.cwd()}")
                found = cls(holder, ("nsenter", *user, *target))
                trial = found.run("mount", "-t", "tmpfs", "none", "/mnt")
                if trial.returncode == 0:
                    found.run("umount", "/mnt")
                    return found
                printed = trial.stdout
                found.close()
            complaints.append(printed.decode(errors="replace").strip())
            holder.wait()
        raise AssertionError(
            "these tests need a mount namespace (root, or user namespaces that may mount): "
            + "; ".join(complaints)
        )

    def close(self) -> None:
        """Ends the namespace; its mounts go with it once its processes have ended."""
        self.holder.kill()
        self.holder.wait()
        assert self.holder.stdout is not None
        self.holder.stdout.close()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Runs a command inside."""
        return subprocess.run(
            [*self.through, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SURE_SECONDS,
        )

    def mount(self, folder: Path, *, size_bytes: int) -> None:
        """Mounts an empty tmpfs of a size on a folder."""
        self._do("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder))

    def unmount(self, folder: Path) -> None:
        """Takes away the newest mount on a folder, although processes may use files of it."""
        self._do("umount", "--lazy", str(folder))

    def remount(self, folder: Path, options: str) -> None:
        """Changes a mount, as by `ro` or `size=64m`."""
        self._do("mount", "-o", f"remount,{options}", str(folder))

    def fill(self, folder: Path, *, but_bytes: int = 0) -> Path:
        """Writes a file that leaves so much space on the folder's disk; the test deletes it."""
        ballast = self.seen_from_here(folder) / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            # Page by page, because other processes write there too.
            while shutil.disk_usage(ballast.parent).free > but_bytes:
                file.write(bytes(PAGE_BYTES))
        assert shutil.disk_usage(ballast.parent).free <= but_bytes
        return ballast

    def seen_from_here(self, folder: Path) -> Path:
        """Returns the path by which a process outside reads a folder inside."""
        return Path(f"/proc/{self.holder.pid}/root{folder}")

    def _do(self, *arguments: str) -> None:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout.decode()
