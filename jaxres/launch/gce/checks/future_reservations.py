"""Reservations that are delivered later: when they begin and end, which options wait for them.

A future reservation, also one in calendar mode, creates its reservation when it is approved or when
it begins. VMs can't use the reservation before, and in calendar mode they are deleted at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jaxres.config.schema.gce import GceSection, ReservationOption
from jaxres.launch.gce.api.resource_reader import ReadDenied, ResourceReader
from jaxres.launch.gce.state.capacity_options import Backoff

FAILED = ("CANCELLED", "DECLINED", "FAILED")


@dataclass(frozen=True)
class FutureReservation:
    """A future reservation that delivers a reservation."""

    name: str
    status: str
    """Its procurement status."""
    begins: float
    """Seconds since the epoch; 0: unknown."""
    ends: float
    """When its reservation is deleted; 0: unknown, or by hand."""
    deletes_vms: bool
    """Whether VMs that use the reservation are deleted at its end (calendar mode)."""
    count: int
    machine_type: str

    @property
    def has_failed(self) -> bool:
        """Whether it delivers nothing."""
        return self.status in FAILED

    def describe(self) -> str:
        """Returns status, number and type of VMs, and the time, for the operator."""
        until = f" to {describe_time(self.ends)}" if self.ends else ""
        begins = describe_time(self.begins) if self.begins else "an unknown time"
        text = f"{self.name} ({self.status}): {self.count} x {self.machine_type}, {begins}{until}"
        return f"{text}, when its VMs are deleted" if self.ends and self.deletes_vms else text


def find(reader: ResourceReader, owner: str, zone: str, name: str) -> FutureReservation | None:
    """Returns the future reservation that delivers a reservation; None: there is none.

    None also where the account may not list them.
    """
    try:
        listed = reader.list("FutureReservationsClient", project=owner, zone=zone)
    except ReadDenied:
        return None
    for one in listed or ():
        made = [link.rpartition("/")[2] for link in one.status.auto_created_reservations]
        if name in (one.reservation_name, *made):
            return _read(one)
    return None


def not_begun(gce: GceSection, reader: ResourceReader, *, now: float) -> tuple[Backoff, ...]:
    """Returns backoffs of the zones whose reservation begins later."""
    found = []
    for number, zone, future in _futures(gce, reader):
        if future.begins > now and not future.has_failed:
            found.append(Backoff(number, zone, future.begins, 0, "not_begun"))
    return tuple(found)


def _futures(
    gce: GceSection, reader: ResourceReader
) -> Iterator[tuple[int, str, FutureReservation]]:
    """Yields zones of reservation options whose reservation is not READY, if it is delivered."""
    for number, option in enumerate(gce.capacity_options):
        if not isinstance(option, ReservationOption):
            continue
        owner, name = split(option.reservation, reader.compute.project)
        for zone in option.zones:
            try:
                known = reader.get("ReservationsClient", zone=zone, reservation=name, project=owner)
            except ReadDenied:
                continue
            if known is not None and known.status == "READY":
                continue
            if (future := find(reader, owner, zone, name)) is not None:
                yield number, zone, future


def split(reservation: str, project: str) -> tuple[str, str]:
    """Returns the project and the name of a reservation.

    >>> split("projects/other/reservations/r", "mine")
    ('other', 'r')
    """
    parts = reservation.split("/")
    return (parts[1] if parts[0] == "projects" else project), parts[-1]


def _read(found: Any) -> FutureReservation:
    window, sku = found.time_window, found.specific_sku_properties
    begins, ends = _seconds(window.start_time), _seconds(window.end_time)
    if begins and not ends and window.duration.seconds:
        ends = begins + window.duration.seconds
    is_calendar = found.reservation_mode == "CALENDAR"
    is_deleted = is_calendar or found.auto_delete_auto_created_reservations
    machine_type = sku.instance_properties.machine_type
    status = found.status.procurement_status
    count = sku.total_count
    name, ends = found.name, ends if is_deleted else 0.0
    return FutureReservation(name, status, begins, ends, is_calendar, count, machine_type)


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def describe_time(seconds: float) -> str:
    """Returns a time as it is printed.

    >>> describe_time(0.0)
    '1970-01-01 00:00 UTC'
    """
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
