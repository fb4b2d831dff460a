"""What an error of the Compute API means. Pure.

The same cause comes as an answer's reason or as the code of a failed operation, and a failed
bulkInsert puts VM_MIN_COUNT_NOT_REACHED before it; so the whole set of words counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxres.launch.ladder import Trouble
from jaxres.launch.sight import Refused

STOCKOUT = {
    "ZONE_RESOURCE_POOL_EXHAUSTED",
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
    "RESOURCE_POOL_EXHAUSTED",
    "STOCKOUT",
    "INSUFFICIENTCAPACITY",
    "RESOURCE_EXHAUSTED",
}
QUOTA = {"QUOTA_EXCEEDED", "QUOTAEXCEEDED", "LIMIT_EXCEEDED"}
RATE = {"RATELIMITEXCEEDED", "USERRATELIMITEXCEEDED", "RATE_LIMIT_EXCEEDED"}
EXISTS = {"RESOURCE_ALREADY_EXISTS", "ALREADYEXISTS"}
FORBIDDEN = {"FORBIDDEN", "PERMISSIONS_ERROR", "ACCESSNOTCONFIGURED", "SERVICE_DISABLED"}
NOT_YET = {"RESOURCENOTREADY", "RESOURCE_NOT_READY"}
"""A 400 that passes: something that the request names is still being made or changed."""
SHORT = "VM_MIN_COUNT_NOT_REACHED"
REMEDIES = {
    "stockout": "the zone has no capacity now",
    "quota": "ask for more quota, or add a rung of another kind or region",
}


def trouble(codes: Iterable[str], message: str, status: int | None) -> Refused:
    """Returns what the reasons of an answer, or the codes of an operation, mean.

    >>> trouble(["VM_MIN_COUNT_NOT_REACHED", "STOCKOUT"], "no VMs", 503).trouble
    'stockout'
    """
    words = {code.upper() for code in codes}
    text = f"{', '.join(sorted(words)) or status}: {message.partition(chr(10))[0]}"[:500]
    return Refused(_kind(words, message.lower(), status), text)


def _kind(words: set[str], message: str, status: int | None) -> Trouble:
    if words & RATE or status == 429:
        return "rate_limit"
    if words & QUOTA:
        return "quota"
    if words & EXISTS or status == 409:
        return "exists"
    if words & FORBIDDEN:
        return "refused"
    if "preempt" in message and "UNSUPPORTED_OPERATION" in words:
        return "preempted"
    if words & STOCKOUT or words == {SHORT}:
        return "stockout"
    if _names_no_machine_type(message):
        return "wrong_zone"
    if words & NOT_YET:
        return "passing"
    if status is not None and 400 <= status < 500 and status != 408:
        return "refused"
    return "passing"


def _names_no_machine_type(message: str) -> bool:
    """Whether the zone does not have the machine type, or is none itself."""
    is_absent = "does not exist in zone" in message or "not found" in message
    of_machine = "machinetype" in message.replace(" ", "").replace("_", "")
    of_zone = "/zones/" in message and message.count("/") < 6
    return is_absent and (of_machine or of_zone)


def is_about_notice(message: str) -> bool:
    """Whether the API refuses the notice of preemption that is asked for."""
    return "preemptionnotice" in message.replace("_", "").lower()
