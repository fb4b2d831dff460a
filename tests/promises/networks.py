"""Hosts with networks of their own, on this machine: namespaces joined by a bridge, cut at will."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.77.0"
IP = "/usr/sbin/ip" if Path("/usr/sbin/ip").exists() else "ip"


@dataclass(frozen=True)
class Machine:
    """A network, host name and /etc/hosts of its own, held open by one sleeping process."""

    host: int
    holder: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """Its IP address."""
        return f"{NETWORK}.{self.host + 1}"

    @property
    def through(self) -> tuple[str, ...]:
        """The words that start a command in it."""
        pid = self.holder.pid
        return ("nsenter", f"--target={pid}", "--net", "--mount", "--uts", f"--wdns={Path.cwd()}")


@dataclass(frozen=True)
class Network:
    """Machines at one bridge, which lies in a namespace too: nothing here touches ours."""

    bridge: subprocess.Popen[bytes]
    machines: tuple[Machine, ...]

    def cut(self, host: int) -> None:
        """Pulls a machine's plug: what is sent is lost, and nobody is told."""
        _in(self.bridge, IP, "link", "set", f"v{host}", "down")


def _in(holder: subprocess.Popen[bytes], *words: str) -> None:
    done = subprocess.run(
        ["nsenter", f"--target={holder.pid}", "--net", "--mount", "--uts", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, (words, done.stdout.decode(errors="replace"))


def _hold(*flags: str) -> subprocess.Popen[bytes]:
    holder = subprocess.Popen(
        ["unshare", *flags, "sh", "-c", "echo ready; exec sleep 3600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert holder.stdout is not None
    said = holder.stdout.readline()
    assert said == b"ready\n", said
    return holder


def permitted() -> bool:
    """Says whether this process may make networks; else a test must cut a connection by proxy."""
    words = ["unshare", "--net", IP, "link", "add", "v0", "type", "veth"]
    with contextlib.suppress(OSError):
        return os.geteuid() == 0 and subprocess.run(words, capture_output=True).returncode == 0
    return False


@contextlib.contextmanager
def network(hosts: int, *, folder: Path) -> Iterator[Network]:
    """Joins so many machines; they and their network vanish at the end."""
    flags = ("--net", "--mount", "--uts", "--propagation=private")
    holders = [_hold(*flags) for _ in range(hosts + 1)]
    try:
        bridge, *others = holders
        machines = tuple(Machine(host, holder) for host, holder in enumerate(others))
        _in(bridge, IP, "link", "add", "bridge0", "type", "bridge")
        _in(bridge, IP, "link", "set", "bridge0", "up")
        names = folder / "hosts"
        lines = [f"{machine.address} machine{machine.host}\n" for machine in machines]
        names.write_text("127.0.0.1 localhost\n" + "".join(lines))
        for machine in machines:
            _join(bridge, machine, names)
        yield Network(bridge, machines)
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def _join(bridge: subprocess.Popen[bytes], machine: Machine, names: Path) -> None:
    end, holder = f"v{machine.host}", machine.holder
    peer = ("peer", "name", "eth0", "netns", str(holder.pid))
    _in(bridge, IP, "link", "add", end, "type", "veth", *peer)
    _in(bridge, IP, "link", "set", end, "master", "bridge0", "up")
    _in(holder, IP, "link", "set", "lo", "up")
    _in(holder, IP, "address", "add", f"{machine.address}/24", "dev", "eth0")
    _in(holder, IP, "link", "set", "eth0", "up")
    _in(holder, "hostname", f"machine{machine.host}")
    _in(holder, "mount", "--bind", str(names), "/etc/hosts")
