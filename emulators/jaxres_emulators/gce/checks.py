"""The checks by which the API refuses a creation at once, in its words where they are known.

Where a comment says "words not known" the real text was never seen.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from jaxres_emulators.gce.catalog import (
    FLEX_START,
    GPU_FAMILIES,
    RESERVATION_BOUND,
    SHAPES,
    SPOT,
    STANDARD,
    Catalog,
    Shape,
    region_of,
)
from jaxres_emulators.gce.errors import GceError, invalid, not_found, unknown_field

NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}")
LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")
METADATA_KEY = re.compile(r"[-_a-zA-Z0-9]{1,128}")
MOST_LABELS, MOST_TAGS = 64, 64
MOST_VALUE_BYTES, MOST_METADATA_BYTES = 256 * 1024, 512 * 1024
RUN_SECONDS = (30, 120 * 86400)
FLEX_SECONDS = 7 * 86400
NOTICES = (0, 120)
ACCESS_FIELDS = {"kind", "name", "natIP", "networkTier", "type"}
NIC_TYPES = ("GVNIC", "VIRTIO_NET", "IDPF", "MRDMA", "IRDMA")
RESERVATION_KEY = "compute.googleapis.com/reservation-name"


def check_request_id(text: str | None) -> None:
    if text is None:
        return
    try:
        is_good = uuid.UUID(text).int != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise invalid("requestId", text, "Must be a valid UUID.")


def check_name(name: str, field: str = "resource.name") -> None:
    if not NAME.fullmatch(name):
        pattern = r"'(?:[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)'"
        raise invalid(field, name, f"Must be a match of regex {pattern}")


def check_labels(labels: dict[str, str], field: str = "resource.labels") -> None:
    if len(labels) > MOST_LABELS:
        raise invalid(field, "", f"The number of labels must not exceed {MOST_LABELS}.")
    for key, value in labels.items():
        for word, text, rule in (("key", key, LABEL_KEY), ("value", value, LABEL_VALUE)):
            if not rule.fullmatch(text):
                starts = "must start with a lowercase character, " if word == "key" else ""
                why = (
                    f"Label {word} '{text}' violates format constraints. The {word} {starts}can "
                    "only contain lowercase letters, numeric characters, underscores and dashes. "
                    f"The {word} can be at most 63 characters long. International characters are "
                    "allowed."
                )
                raise invalid(field, "", why)


def check_tags(tags: list[str], field: str) -> None:
    if len(tags) > MOST_TAGS:
        raise invalid(field, "", f"The number of tags must not exceed {MOST_TAGS}.")
    for tag in tags:
        check_name(tag, f"{field}.items[]")


def check_policies(names: list[str], folder: str, catalog: Catalog, region: str) -> None:
    """An instance takes a policy's URL, whole or in part, properties of instances its name."""
    for name in names:
        there, short = name[: name.rfind("/") + 1], name.rpartition("/")[2]
        if not (there.endswith(folder) if folder else there == ""):
            why = "The URL is malformed." if folder else "Must be a name."  # Words not known.
            raise invalid("resource.resourcePolicies", name, why)
        if (region, short) not in catalog.policies:
            raise not_found(f"regions/{region}/resourcePolicies/{short}")


def check_metadata(items: list[dict[str, str]], field: str = "resource.metadata") -> None:
    seen: set[str] = set()
    total = 0
    for one in items:
        key, size = one.get("key", ""), len(one.get("value", "").encode())
        total += len(key) + size
        if not METADATA_KEY.fullmatch(key):
            raise invalid(f"{field}.items[].key", key, "Must be a match of regex '[-_a-zA-Z0-9]*'")
        if key in seen:
            raise invalid(field, "", f"Metadata has duplicate key: {key}.")
        if size > MOST_VALUE_BYTES:
            why = f"Value for key {key} is too large: maximum size {MOST_VALUE_BYTES} bytes."
            raise invalid(f"{field}.items", "", why)
        seen.add(key)
    if total > MOST_METADATA_BYTES:
        raise invalid(field, "", f"Metadata is too large: at most {MOST_METADATA_BYTES} bytes.")


def check_instance(
    wanted: dict[str, Any], *, zone: str, project: str, catalog: Catalog, field: str = "resource"
) -> Shape:
    """Returns the shape of an instance that may be created; machineType is a bare name here."""
    name = wanted.get("machineType", "")
    if name not in catalog.zones[zone]:
        link = f"zones/{zone}/machineTypes/{name}"
        why = f"Machine type with name '{name}' does not exist in zone '{zone}'."
        raise invalid(f"{field}.machineType", link, why)
    shape = SHAPES[name]
    if wanted.get("guestAccelerators") and GPU_FAMILIES.match(name):
        raise invalid(  # Words not known.
            f"{field}.guestAccelerators",
            "",
            f"Accelerators can't be set for machine type '{name}', which comes with its own.",
        )
    check_labels(wanted.get("labels", {}), f"{field}.labels")
    check_metadata(wanted.get("metadata", {}).get("items", []), f"{field}.metadata")
    check_tags(wanted.get("tags", {}).get("items", []), f"{field}.tags")
    _check_disks(wanted, shape, project, catalog, field)
    _check_networks(wanted, zone, shape, catalog, field)
    _check_scheduling(wanted, shape, field)
    _check_reservation(wanted, zone, shape, catalog, field)
    return shape


def check_disk_type(disk: dict[str, Any], folder: str, field: str = "resource") -> None:
    """An instance takes a disk type's URL, whole or in part, properties of instances its name.

    After the reference of disks[].initializeParams.diskType; the words are not known.
    """
    kind = disk.get("initializeParams", {}).get("diskType", "")
    there = kind[: kind.rfind("/") + 1]
    if kind and not (there.endswith(folder) if folder else there == ""):
        where = f"{field}.disks[].initializeParams.diskType"
        raise invalid(where, kind, "The URL is malformed." if folder else "Must be a name.")


def _check_disks(
    wanted: dict[str, Any], shape: Shape, project: str, catalog: Catalog, field: str
) -> None:
    disks = wanted.get("disks", [])
    if not disks or not disks[0].get("boot"):
        raise invalid(f"{field}.disks", "", "Boot disk must be the first disk attached.")
    for number, disk in enumerate(disks):
        init = disk.get("initializeParams", {})
        where = f"{field}.disks[{number}].initializeParams"
        check_labels(init.get("labels", {}), f"{where}.labels")
        image = init.get("sourceImage")
        if image and not catalog.has_image(image, project):
            why = "The referenced image resource cannot be found."
            raise invalid(f"{where}.sourceImage", image, why)
        size = int(init.get("diskSizeGb", 0))
        if image and size and size < (least := catalog.image_size(image, project)):
            why = f"Requested disk size cannot be smaller than the image size ({least} GB)"
            raise invalid(f"{where}.diskSizeGb", size, why)
        if number == 0 and not image and not disk.get("source"):
            why = "Boot disk must have a source specified"
            raise invalid(f"{field}.disks[0]", "", why)
        kind = init.get("diskType", "pd-standard").rpartition("/")[2]
        if shape.is_hyperdisk_only and kind.startswith("pd-"):
            raise GceError(
                400,
                "badRequest",
                f"[{kind}] features and [instance_type: VIRTUAL_MACHINE, machine type: "
                f"{shape.name}] are not compatible for creating instance.",
            )


def _check_networks(
    wanted: dict[str, Any], zone: str, shape: Shape, catalog: Catalog, field: str
) -> None:
    networks = wanted.get("networkInterfaces", [])
    if not networks:
        why = "At least one network interface is required."
        raise invalid(f"{field}.networkInterfaces", "", why)
    for number, one in enumerate(networks):
        link = one.get("subnetwork") or f"regions/{region_of(zone)}/subnetworks/default"
        found = re.search(r"regions/([^/]+)/subnetworks/([^/]+)$", link)
        where = f"{field}.networkInterfaces[{number}].subnetwork"
        for access in one.get("accessConfigs", []):
            for name in access.keys() - ACCESS_FIELDS:
                raise unknown_field(name, f"{field}.networkInterfaces[{number}].accessConfigs[]")
            if access.get("type", "ONE_TO_ONE_NAT") != "ONE_TO_ONE_NAT":  # Words not known.
                kind = f"{field}.networkInterfaces[{number}].accessConfigs[].type"
                raise invalid(kind, access["type"], "Must be ONE_TO_ONE_NAT.")
        if found is None:
            raise invalid(where, link, "The URL is malformed.")
        host = re.search(r"projects/([^/]+)/regions/", link)
        shared = () if host is None else (host[1], found[1], found[2])
        if shared not in catalog.shared_subnetworks and (
            (found[1], found[2]) not in catalog.subnetworks
        ):
            why = "The referenced subnetwork resource cannot be found."
            raise invalid(where, link, why)
        if found[1] != region_of(zone):
            raise invalid(where, link, "Subnetwork must be in the same region as the instance.")
        is_rdma = (host[1] if host else "", found[1], found[2]) in catalog.rdma
        _check_nic_type(one, shape, is_rdma=is_rdma, field=f"{field}.networkInterfaces[{number}]")


def _check_nic_type(one: dict[str, Any], shape: Shape, *, is_rdma: bool, field: str) -> None:
    """A network with the RDMA profile takes interfaces of the type MRDMA only, others do not.

    After cloud.google.com/vpc/docs/rdma-network-profiles; the words are not known.
    """
    kind = one.get("nicType", "")
    if kind not in ("", *NIC_TYPES):
        raise invalid(f"{field}.nicType", kind, f"Must be one of {', '.join(NIC_TYPES)}.")
    if kind == "MRDMA" and not shape.has_rdma:
        why = f"Machine type '{shape.name}' does not support NIC type MRDMA."
        raise invalid(f"{field}.nicType", kind, why)
    if is_rdma and kind != "MRDMA":
        raise invalid(f"{field}.nicType", kind, "The RDMA network accepts NIC type MRDMA only.")
    if kind == "MRDMA" and not is_rdma:
        raise invalid(f"{field}.nicType", kind, "NIC type MRDMA needs an RDMA network.")


def model_of(wanted: dict[str, Any]) -> str:
    """Returns the provisioning model."""
    scheduling = wanted.get("scheduling", {})
    word = scheduling.get("provisioningModel")
    return word or (SPOT if scheduling.get("preemptible") else STANDARD)


def reservation_of(wanted: dict[str, Any]) -> str:
    """Returns the name of the specific reservation; empty: none."""
    affinity = wanted.get("reservationAffinity", {})
    if affinity.get("consumeReservationType") != "SPECIFIC_RESERVATION":
        return ""
    return affinity.get("values", [""])[0]


def _check_reservation(
    wanted: dict[str, Any], zone: str, shape: Shape, catalog: Catalog, field: str
) -> None:
    affinity = wanted.get("reservationAffinity", {})
    if not (name := reservation_of(wanted)):
        return
    if affinity.get("key") != RESERVATION_KEY or len(affinity["values"]) != 1:
        why = f"The key must be {RESERVATION_KEY}, with one value."  # Words not known.
        raise invalid(f"{field}.reservationAffinity", affinity.get("key", ""), why)
    found = catalog.reservations.get((zone, name))
    if found is None:
        raise invalid(
            f"{field}.reservationAffinity", name, f"Specified reservation {name} does not exist."
        )
    if found.machine != shape.name:
        why = "No available resources in specified reservations."
        raise invalid(f"{field}.reservationAffinity", name, why)
    held = {link.rpartition("/")[2] for link in wanted.get("resourcePolicies", [])}
    if held != {*found.policies}:  # Words not known.
        why = "Resource policies must be those of the reservation."
        raise invalid(f"{field}.resourcePolicies", ", ".join(sorted(held)), why)
    if found.status != "READY":
        why = f"Cannot use reservation {name}: it requires reservation to be in READY state."
        raise GceError(412, "conditionNotMet", why)


def seconds_of(duration: dict[str, Any] | None) -> float:
    """Returns a duration in seconds; 0: none."""
    return float((duration or {}).get("seconds", 0)) + (duration or {}).get("nanos", 0) / 1e9


def _check_scheduling(wanted: dict[str, Any], shape: Shape, field: str) -> None:
    scheduling, model = wanted.get("scheduling", {}), model_of(wanted)
    where = f"{field}.scheduling"
    reserved = wanted.get("reservationAffinity", {}).get("consumeReservationType")
    is_reserved = reserved == "SPECIFIC_RESERVATION"
    if model not in shape.models and not (model == STANDARD and is_reserved):  # Words not known.
        why = f"Machine type '{shape.name}' does not support provisioning model '{model}'."
        raise invalid(f"{where}.provisioningModel", model, why)
    if model == RESERVATION_BOUND and not is_reserved:
        why = "Reservation-bound instances must target a specific reservation."
        raise invalid(f"{field}.reservationAffinity", reserved or "", why)
    timeout = scheduling.get("hostErrorTimeoutSeconds")
    if timeout is not None and timeout not in range(90, 331, 30):
        why = "Must be between 90 and 330 with an increment of 30."  # Words not known.
        raise invalid(f"{where}.hostErrorTimeoutSeconds", timeout, why)
    if model == FLEX_START and reserved not in ("NO_RESERVATION", None):
        why = "Flex-start VMs can't consume reservations."  # Words not known.
        raise invalid(f"{field}.reservationAffinity", reserved, why)
    is_terminated = scheduling.get("onHostMaintenance") == "TERMINATE"
    if (shape.gpus or wanted.get("guestAccelerators")) and not is_terminated:
        why = "Instances with guest accelerators do not support live migration."
        raise GceError(400, "badRequest", why)
    if model == SPOT:
        _check_spot(scheduling, where)
    elif scheduling.get("preemptible"):
        why = f"Preemptible instances can't have the provisioning model {model}."
        raise invalid(f"{where}.preemptible", "true", why)
    if model != SPOT and "preemptionNoticeDuration" in scheduling:
        why = "Preemption notice duration is only for Spot VMs."
        raise invalid(f"{where}.preemptionNoticeDuration", "", why)
    _check_end(scheduling, model, where)


def _check_spot(scheduling: dict[str, Any], where: str) -> None:
    for name, good in (
        ("preemptible", True),
        ("automaticRestart", False),
        ("onHostMaintenance", "TERMINATE"),
    ):
        if scheduling.get(name) != good:
            why = f"Must be {_told(good)} for provisioning model SPOT."  # Words not known.
            raise invalid(f"{where}.{name}", _told(scheduling.get(name, "")), why)
    notice = scheduling.get("preemptionNoticeDuration")
    if notice is not None and seconds_of(notice) not in NOTICES:
        why = "Must be 0 or 120 seconds."
        raise invalid(f"{where}.preemptionNoticeDuration", f"{seconds_of(notice):g}s", why)


def _check_end(scheduling: dict[str, Any], model: str, where: str) -> None:
    action, limit = scheduling.get("instanceTerminationAction"), scheduling.get("maxRunDuration")
    if action not in (None, "STOP", "DELETE"):
        raise invalid(f"{where}.instanceTerminationAction", action, "Must be STOP or DELETE.")
    if action and model == STANDARD and not (limit or scheduling.get("terminationTime")):
        why = (
            "You cannot specify a termination action for a VM instance that has the standard "
            "provisioning model without a limit of its run time."
        )
        raise invalid(f"{where}.instanceTerminationAction", action, why)
    if limit is not None:
        most = FLEX_SECONDS if model == FLEX_START else RUN_SECONDS[1]
        seconds = seconds_of(limit)
        if not RUN_SECONDS[0] <= seconds <= most:
            why = f"Must be between {RUN_SECONDS[0]} and {most} seconds."
            raise invalid(f"{where}.maxRunDuration", f"{seconds:g}s", why)
        if action is None:
            why = "Instance termination action must be set together with maxRunDuration."
            raise invalid(f"{where}.instanceTerminationAction", "", why)
    elif model == FLEX_START:
        raise invalid(f"{where}.maxRunDuration", "", "Flex-start VMs need a limit of run time.")


def _told(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
