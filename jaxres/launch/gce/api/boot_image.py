"""The boot image of a job: an image family is resolved once, so that all VMs boot the same image.

A family leads to its newest image, which may have another driver in the middle of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from jaxres.config.schema_gce import GceSection
from jaxres.launch.gce.api.resource_reader import ReadDenied, ResourceReader

FAMILY = re.compile(r"(?:.*projects/([^/]+)/)?global/images/family/([^/]+)")


def resolve(gce: GceSection, reader: ResourceReader, console: Callable[[str], None]) -> str:
    """Returns the image to which the image family of a config leads; empty: no family is named.

    Empty also if the family can't be read, which is printed: each request for VMs then resolves it.

    Raises:
      StorageUnavailable: the service does not answer.
    """
    family = FAMILY.fullmatch(gce.image or "")
    if family is None:
        return ""
    owner, name = family[1] or reader.compute.project, family[2]
    try:
        found = reader.get("ImagesClient", "get_from_family", family=name, project=owner)
    except ReadDenied as denied:
        console(f"{gce.image}: VMs may boot from different images of this family ({denied})")
        return ""
    if found is None:
        return ""  # The request for VMs is refused with the reason.
    return f"projects/{owner}/global/images/{found.name}"


def change(before: str, now: str) -> str:
    """Returns the notice of a changed boot image at a job's restart; empty: nothing has changed.

    >>> change("projects/p/global/images/a-1", "projects/p/global/images/a-2")
    'the boot image is a-2 from now on; it was a-1'
    """
    if not before or not now or before == now:
        return ""
    return f"the boot image is {_name(now)} from now on; it was {_name(before)}"


def _name(image: str) -> str:
    return image.rpartition("/")[2]
