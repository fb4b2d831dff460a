"""Hosts with separate networks on this machine: network namespaces joined by a bridge."""

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
class SimulatedHost:
    """Namespaces with a network, host name and /etc/hosts, held open by one sleeping process."""

    host: int
    holder: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """Its IP address."""
        return f"{NETWORK}.{self.host + 1}"

    @property
    def through(self) -> tuple[str, ...]:
        """Command prefix that enters the namespaces."""
        pid = self.holder.pid
        return ("nsenter", f"--target={pid}", "--net", "--mount", "--uts", f"--wdns={Path.cwd()}")


@dataclass(frozen=True)
class Network:
    """Machines on one bridge, all in separate namespaces: the real network is not affected."""

    bridge: subprocess.Popen[bytes]
    machines: tuple[SimulatedHost, ...]

    def cut(self, host: int) -> None:
        """Disconnects a machine: its packets are lost without an error."""
        _in(self.bridge, IP, "link", "set", f"v{host}", "down")


def _in(holder: subprocess.Popen[bytes], *arguments: str) -> None:
    done = subprocess.run(
        ["nsenter", f"--target={holder.pid}", "--net", "--mount", "--uts", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, (arguments, done.stdout.decode(errors="replace"))


def _hold(*flags: str) -> subprocess.Popen[bytes]:
    holder = subprocess.Popen(
        ["unshare", *flags, "sh", "-c", "echo ready; exec sleep 3600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert holder.stdout is not None
    printed = holder.stdout.readline()
    assert printed == b"ready\n", printed
    return holder


def permitted() -> bool:
    """Returns whether this process may create networks; otherwise tests use a proxy."""
    arguments = ["unshare", "--net", IP, "link", "add", "v0", "type", "veth"]
    with contextlib.suppress(OSError):
        return os.geteuid() == 0 and subprocess.run(arguments, capture_output=True).returncode == 0
    return False


@contextlib.contextmanager
def network(hosts: int, *, folder: Path) -> Iterator[Network]:
    """Connects so many machines; removes them and their network at the end."""
    flags = ("--net", "--mount", "--uts", "--propagation=private")
    holders = [_hold(*flags) for _ in range(hosts + 1)]
    try:
        bridge, *others = holders
        machines = tuple(SimulatedHost(host, holder) for host, holder in enumerate(others))
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


def _join(bridge: subprocess.Popen[bytes], machine: SimulatedHost, names: Path) -> None:
    end, holder = f"v{machine.host}", machine.holder
    peer = ("peer", "name", "eth0", "netns", str(holder.pid))
    _in(bridge, IP, "link", "add", end, "type", "veth", *peer)
    _in(bridge, IP, "link", "set", end, "master", "bridge0", "up")
    _in(holder, IP, "link", "set", "lo", "up")
    _in(holder, IP, "address", "add", f"{machine.address}/24", "dev", "eth0")
    _in(holder, IP, "link", "set", "eth0", "up")
    _in(holder, "hostname", f"machine{machine.host}")
    _in(holder, "mount", "--bind", str(names), "/etc/hosts")
