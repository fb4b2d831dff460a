"""The Cloud Billing Catalog API: `services.skus.list`.

After cloud.google.com/billing/docs/reference/rest/v1/services.skus/list; the words of errors are
those of Google's APIs in general.
"""

from __future__ import annotations

from typing import Any

from jaxres_emulators.gce.calls.api import NUMBER, Api, ComputeRequest
from jaxres_emulators.gce.errors import GceError, api_disabled

CALL = "services.skus.list"
COMPUTE_ENGINE = "6F81-5844-456A"
PARAMETERS = {"startTime", "endTime", "currencyCode", "pageSize", "pageToken"}


def list_skus(api: Api, request: ComputeRequest) -> dict[str, Any]:
    """Returns a page of SKUs."""
    billing = api.catalog.billing
    if not billing.is_enabled:
        raise api_disabled(
            NUMBER,
            name="Cloud Billing API",
            host="cloudbilling.googleapis.com",
            reason="PERMISSION_DENIED",
        )
    for name in request.query.keys() - PARAMETERS:
        why = (
            f'Invalid JSON payload received. Unknown name "{name}": Cannot bind query parameter. '
            f"Field '{name}' could not be found in request message."
        )
        raise GceError(400, "INVALID_ARGUMENT", why)
    if request.words["service"] != COMPUTE_ENGINE:
        raise GceError(404, "NOT_FOUND", "Requested entity was not found.")
    if request.query.get("currencyCode", "USD") != "USD":  # Others are not emulated.
        raise GceError(400, "INVALID_ARGUMENT", "Request contains an invalid argument.")
    size = min(_number(request.query.get("pageSize", "0")) or 5000, billing.page_size)
    start = _number(request.query.get("pageToken", "").removeprefix("page-") or "0")
    if start > len(billing.skus):
        raise GceError(400, "INVALID_ARGUMENT", "Request contains an invalid argument.")
    end = start + size
    return {
        "skus": billing.skus[start:end],
        "nextPageToken": f"page-{end}" if end < len(billing.skus) else "",
    }


def _number(text: str) -> int:
    if not text.isdecimal():
        raise GceError(400, "INVALID_ARGUMENT", "Request contains an invalid argument.")
    return int(text)
