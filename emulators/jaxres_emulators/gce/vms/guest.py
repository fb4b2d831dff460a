"""Inside of a VM: its processes, in a separate session, and its metadata server."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from jaxres_emulators.gce.vms import keeper
from jaxres_emulators.metadata import MetadataServer

MARK = "GCE_EMULATOR"
VM_MARK = "GCE_EMULATOR_VM"
MOST_OUTPUT_BYTES = 1 << 20


class Guest:
    """Runs from the boot to power off."""

    def __init__(
        self,
        *,
        folder: Path,
        mark: str,
        number: str,
        ip: str,
        values: Mapping[str, str],
        env: Mapping[str, str],
        gpus: int | None = None,
    ) -> None:
        self.folder, self.output = folder, folder / "serial.log"
        self.mark = f"{VM_MARK}={mark}.{number}"
        """Environment variables of its processes."""
        self.metadata = MetadataServer(host=ip)
        self.metadata.values.update(values)
        self.metadata.__enter__()
        host = self.metadata.address
        mine = {
            MARK: mark,
            VM_MARK: f"{mark}.{number}",
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "GCE_METADATA_HOST": host,
            "GCE_METADATA_IP": host,
            "GCE_METADATA_ROOT": host,
        }
        # This machine is a VM now, even if a test has said otherwise.
        self._env = {k: v for k, v in os.environ.items() if k != "NO_GCE_CHECK"} | {**env} | mine
        self._env["PATH"] = f"{folder / 'bin'}{os.pathsep}{self._env.get('PATH', os.defpath)}"
        self._started: list[subprocess.Popen[bytes]] = []
        for name in ("home", "tmp", "bin"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._power_off = folder / "power_off_requested"
        self._power_off.unlink(missing_ok=True)
        for name in ("poweroff", "shutdown", "halt", "reboot"):  # Never this machine's.
            program = folder / "bin" / name
            program.write_text(f"#!/bin/sh\n: > {shlex.quote(str(self._power_off))}\n")
            program.chmod(0o755)
        if gpus:
            self._install_driver(gpus)

    def _install_driver(self, gpus: int) -> None:
        """Writes the part of nvidia-smi that lists GPUs, in its format."""
        program = self.folder / "bin" / "nvidia-smi"
        lines = "".join(f"echo 'GPU {n}: Emulated (UUID: GPU-{n})'\n" for n in range(gpus))
        program.write_text(f'#!/bin/sh\n[ "$*" = -L ] || exit 1\n{lines}')
        program.chmod(0o755)

    def run(self, name: str) -> None:
        """Runs one of the scripts in the VM's metadata, if it is there; its output is the VM's."""
        script = self.metadata.values.get(f"instance/attributes/{name}")
        if script is None:
            return
        path = self.folder / name
        path.write_text(script)
        with open(self.output, "ab") as output:
            # What the first line names runs it, as on a VM; but the file itself is not executed: a
            # child of another thread may still hold it open for writing (ETXTBSY).
            first = script.partition("\n")[0]
            words = shlex.split(first[2:]) if first.startswith("#!") else ["/bin/bash"]
            process = subprocess.Popen(
                [*words, str(path)],
                cwd=self.folder / "home",
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._started.append(process)

    def pids(self) -> list[int]:
        """Returns its processes."""
        self.reap()
        return keeper.marked(self.mark)

    def reap(self) -> None:
        for process in self._started:
            process.poll()

    @property
    def is_powering_off(self) -> bool:
        """Whether one of its processes has called poweroff."""
        return self._power_off.exists()

    def ask_to_end(self) -> None:
        """Emulates the power button: SIGTERM to all processes; runs the shutdown script."""
        keeper.send(self.mark, signal.SIGTERM)
        self.run("shutdown-script")

    def kill(self) -> None:
        """Kills all processes and stops the metadata server."""
        keeper.kill(self.mark)
        for process in self._started:
            process.wait(timeout=10)
        self._started.clear()
        if not self.metadata.closed.is_set():
            self.metadata.__exit__(None, None, None)

    def attributes(self, items: Mapping[str, str]) -> None:
        """Replaces the VM's metadata; completes long polls for it."""
        server, folder = self.metadata, "instance/attributes/"
        with server.changed:
            for key in [key for key in server.values if key.startswith(folder)]:
                del server.values[key]
            server.values.update({f"{folder}{key}": value for key, value in items.items()})
            server.changed.notify_all()


def output_of(folder: Path) -> str:
    """Returns the end of a VM's output, also of a deleted one."""
    path = folder / "serial.log"
    if not path.exists():
        return ""
    return path.read_bytes()[-MOST_OUTPUT_BYTES:].decode("utf-8", "replace")
