"""Hosts that later attempts leave out: of failed hardware, from the log, or excluded by hand.

A host is taken again once its faults are forgotten by `jaxres hosts RUN_DIR --forget HOST`. That
writes a file for each of the faults, named after the claim of the attempt that met it (and after
the host, if several had a fault in it), so that a fault after it counts again. `--exclude HOST`
writes a file with a name of its own, which is forgotten in the same way. Neither needs a claim, so
both work while the run trains.

Host 0 alone writes the log. If its supervisor is killed before it has recorded the fault of another
host, that host's own report is what is left: a file named after the claim and the host.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from jaxres.cluster.host_identity import HostIdentity
from jaxres.faults import ConfigError, warn_or_raise
from jaxres.runlog import run_log
from jaxres.runlog.event_log import is_seconds
from jaxres.runlog.history import in_force
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Claim, HostFault, Record
from jaxres.storage import files
from jaxres.storage.checksummed_json import decode_checksummed, encode_checksummed
from jaxres.storage.path import RunPath

EXCLUSION_FORMAT = 1
REPORT_FORMAT = 1
T = TypeVar("T")


@dataclass(frozen=True)
class FaultyHost:
    """A host that is left out: its hardware has failed, or it was excluded by hand."""

    identity: HostIdentity
    slot: int | None
    """Slot of the worker under `launch local`; None: the whole machine."""
    count: int
    """Number of attempts in which it has failed; 0: it was excluded by hand."""
    since: float
    """Time of the first of these faults, for display only."""
    attempt: int
    """The newest of these attempts."""
    reason: str
    """The fault of that attempt."""
    nonces: tuple[str, ...]
    """Names of these faults, as `forget` writes them; if excluded by hand, of that file."""
    is_drained: bool = False
    """Whether an attempt that trains on it saves and ends, so that it is replaced now."""

    @property
    def is_excluded(self) -> bool:
        """Whether it was excluded by hand."""
        return self.count == 0

    @property
    def name(self) -> str:
        """Name of the host for `--forget`."""
        return host_name(self.identity, self.slot)

    def __str__(self) -> str:
        """Returns the host and its fault, for a message."""
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M UTC")
        if self.is_excluded:
            return f"{self.name} (excluded by hand since {since}: {self.reason})"
        times = f"{self.count} times" if self.count > 1 else "once"
        newest = f"in attempt {self.attempt}: {self.reason}"
        return f"{self.name} (failed {times} since {since}; {newest})"


def host_name(identity: HostIdentity, slot: int | None) -> str:
    """Returns the name of a host, or of one slot of `launch local` on it.

    >>> host_name(HostIdentity("node17"), 3)
    'node17:3'
    """
    return identity.name if slot is None else f"{identity.name}:{slot}"


@dataclass(frozen=True)
class Report:
    """A fault that a host's own supervisor, which does not write the log, has reported."""

    name: str
    """Name of its file: the nonce of the claim of the attempt, and the number of the host."""
    time: float
    fault: HostFault

    @property
    def nonce(self) -> str:
        """Nonce of the claim of the attempt."""
        return self.name.rpartition("-")[0]


def faulty_hosts(
    records: Sequence[Record],
    *,
    forgotten: Iterable[str] = (),
    reports: Iterable[Report] = (),
) -> tuple[FaultyHost, ...]:
    """Returns the hosts with a fault that is not forgotten, by their first fault; pure.

    Faults that a fenced process has recorded do not count. The order is that of the records: the
    clocks of hosts may jump. A fault that is in the log and in a report counts once.

    Args:
      forgotten: names of faults that are forgotten; the nonce of an attempt: all of that one.
      reports: what hosts have reported themselves; those of attempts of another run do not count.
    """
    ignored = frozenset(forgotten)
    found: dict[tuple[str, str, int | None], FaultyHost] = {}
    faults = list(_faults(records, reports))
    hosts = Counter(nonce for nonce, _ in {(nonce, _key(body)) for _, nonce, _, body in faults})
    for attempt, nonce, time, body in faults:
        identity = HostIdentity(body.host, body.instance, body.physical_host)
        before = found.get(key := _key(body))
        name = nonce if hosts[nonce] == 1 else _fault_name(nonce, key)
        if not ignored.isdisjoint((nonce, name)) or (before is not None and name in before.nonces):
            continue
        since = time if before is None else before.since
        earlier = () if before is None else before.nonces
        found[key] = FaultyHost(
            identity=identity,
            slot=body.slot,
            count=len(earlier) + 1,
            since=since,
            attempt=max(attempt, 0 if before is None else before.attempt),
            reason=body.reason,
            nonces=(*earlier, name),
        )
    return tuple(found.values())


def _faults(
    records: Sequence[Record], reports: Iterable[Report]
) -> Iterator[tuple[int, str, float, HostFault]]:
    """Yields attempt, nonce or name, time and fault: of the log first, then reported ones."""
    nonces, logged = dict[int, str](), set[tuple[str, Any]]()
    for record in in_force(records):
        match record.body:
            case Claim(nonce=nonce):
                nonces[record.attempt] = nonce
            case HostFault() as fault:
                nonce = nonces.get(record.attempt, "")
                logged.add((nonce, _key(fault)))
                yield record.attempt, nonce, record.time, fault
            case _:
                pass
    attempts = {nonce: attempt for attempt, nonce in nonces.items()}
    for report in reports:
        attempt = attempts.get(report.nonce)
        if attempt is not None and (report.nonce, _key(report.fault)) not in logged:
            yield attempt, report.name, report.time, report.fault


def _key(fault: HostFault) -> tuple[str, str, int | None]:
    return fault.host, fault.instance, fault.slot


def _fault_name(nonce: str, key: tuple[str, str, int | None]) -> str:
    """Returns the name of the fault of one host in an attempt with faults of several."""
    return f"{nonce}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"


def matching(hosts: Iterable[FaultyHost], identity: HostIdentity) -> list[FaultyHost]:
    """Returns the faulty hosts that a machine is, or that were on the same physical host."""
    return [host for host in hosts if _is_same(host.identity, identity)]


def _is_same(faulty: HostIdentity, other: HostIdentity) -> bool:
    if faulty.physical_host and faulty.physical_host == other.physical_host:
        return True
    is_other_vm = faulty.instance and other.instance and faulty.instance != other.instance
    return bool(faulty.name) and faulty.name == other.name and not is_other_vm


def forgotten(run_dir: RunDir) -> frozenset[str]:
    """Returns the names of the faults that are forgotten; see `faulty_hosts`."""
    return frozenset(files.list_names(run_dir.forgotten_faults))


def read(
    run_dir: RunDir,
    records: Sequence[Record] | None = None,
    *,
    warn: Callable[[str], None] | None = None,
) -> tuple[FaultyHost, ...]:
    """Returns the hosts of a run that are left out.

    Args:
      records: its log if that was read already.
      warn: gets the path and the cause of each file that can't be understood, and leaves out no
        host.

    Raises:
      ConfigError: there is such a file, and no `warn`.
    """
    known = run_log.read_records(run_dir.log) if records is None else records
    excluded, reports = excluded_hosts(run_dir, warn=warn), read_reports(run_dir, warn=warn)
    if not excluded and not faulty_hosts(known, reports=reports):
        return ()
    ignored = forgotten(run_dir)
    by_hand = [host for host in excluded if not ignored.issuperset(host.nonces)]
    return (*faulty_hosts(known, forgotten=ignored, reports=reports), *by_hand)


def read_reports(run_dir: RunDir, *, warn: Callable[[str], None] | None = None) -> list[Report]:
    """Returns the faults that hosts have reported themselves; `warn`: see `read`."""

    def report(name: str, fields: dict[str, Any]) -> Report:
        return Report(name, fields["time"], HostFault(**fields["fault"]))

    found = _decoded(run_dir.reported_faults, report, number=REPORT_FORMAT, warn=warn)
    return sorted(found, key=lambda report: report.time)


def _decoded(
    folder: RunPath,
    build: Callable[[str, dict[str, Any]], T],
    *,
    number: int,
    warn: Callable[[str], None] | None,
) -> Iterator[T]:
    """Yields what `build` makes of the name and fields of each file; `warn` gets the others."""
    names = sorted(files.list_names(folder))
    contents = files.read_all([folder / name for name in names])
    for name, data in zip(names, contents, strict=True):
        try:
            fields = decode_checksummed(data or b"", number=number)
            if not is_seconds(fields["time"]):
                raise ValueError("its time is none")
            found = build(name, fields)
        except (ValueError, KeyError, TypeError) as error:
            text = (
                f"{folder / name}: can't be understood ({error}), so the host that it is about is "
                "used. Exclude that host again (jaxres hosts RUN_DIR --exclude HOST), and remove "
                "the file."
            )
            warn_or_raise(ConfigError(text), warn)
            continue
        yield found


def report(run_dir: RunDir, fault: HostFault, *, claim: Claim, host: int, now: float) -> None:
    """Stores the fault that a host's own supervisor has found, durably."""
    fields = {"format": REPORT_FORMAT, "time": now, "fault": asdict(fault)}
    files.make_dir(run_dir.reported_faults)
    files.create(run_dir.reported_faults / f"{claim.nonce}-{host}", encode_checksummed(fields))


def excluded_hosts(
    run_dir: RunDir, *, warn: Callable[[str], None] | None = None
) -> tuple[FaultyHost, ...]:
    """Returns the hosts that were excluded by hand, even if they are used again since then.

    A file that can't be understood excludes no host; `warn`: see `read`.
    """

    def excluded(name: str, fields: dict[str, Any]) -> FaultyHost:
        return FaultyHost(
            identity=HostIdentity(fields["host"]),
            slot=fields["slot"],
            count=0,
            since=fields["time"],
            attempt=0,
            reason=fields["reason"],
            nonces=(name,),
            is_drained=fields.get("drain", False),
        )

    found = _decoded(run_dir.excluded_hosts, excluded, number=EXCLUSION_FORMAT, warn=warn)
    return tuple(sorted(found, key=lambda host: host.since))


def exclude(
    run_dir: RunDir,
    host: str,
    *,
    slot: int | None,
    reason: str,
    now: float,
    is_drained: bool = False,
) -> None:
    """Excludes a host from the next start on, durably.

    Args:
      host: name of the machine.
      slot: slot of the worker under `launch local`; None: the whole machine.
      is_drained: whether an attempt that trains on it saves and ends; only `launch gce` does so.
    """
    fields = {"format": EXCLUSION_FORMAT, "host": host, "slot": slot, "time": now, "reason": reason}
    fields |= {"drain": True} if is_drained else {}
    files.make_dir(run_dir.excluded_hosts)
    files.create(run_dir.excluded_hosts / secrets.token_hex(8), encode_checksummed(fields))


def forget(run_dir: RunDir, host: FaultyHost) -> None:
    """Forgets the faults of a host so far, durably; takes effect at the next start."""
    files.make_dir(run_dir.forgotten_faults)
    for nonce in host.nonces:
        files.create(run_dir.forgotten_faults / nonce, b"")
