"""Error responses, with the messages of the Compute API."""

from __future__ import annotations

import json
from typing import Any

STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    412: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
BY_REASON = {
    "rateLimitExceeded": (403, "Rate Limit Exceeded"),
    "quotaExceeded": (403, "Quota 'CPUS' exceeded.  Limit: 24.0 in region us-central1."),
    "forbidden": (403, "Forbidden"),
    "resourceNotReady": (400, "The resource is not ready"),
    "backendError": (503, "Backend Error"),
}
"""Names that a rule may give instead of a status."""


class GceError(Exception):
    """An error response."""

    def __init__(self, status: int, reason: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.more = status, reason, message, more

    def body(self) -> bytes:
        if self.reason in STATUS.values():  # A service newer than the Compute API.
            error = {"code": self.status, "message": self.message, "status": self.reason}
            return json.dumps({"error": error | self.more}).encode()
        domain = "usageLimits" if self.reason in ("accessNotConfigured",) else "global"
        one = {"message": self.message, "domain": domain, "reason": self.reason}
        error: dict[str, Any] = {"code": self.status, "message": self.message, "errors": [one]}
        if self.reason in ("accessNotConfigured", "required"):
            error["status"] = STATUS[self.status]
        return json.dumps({"error": error | self.more}).encode()


def invalid(field: str, value: object, why: str) -> GceError:
    return GceError(400, "invalid", f"Invalid value for field '{field}': '{value}'. {why}")


def not_found(what: str) -> GceError:
    return GceError(404, "notFound", f"The resource '{what}' was not found")


def exists(what: str) -> GceError:
    return GceError(409, "alreadyExists", f"The resource '{what}' already exists")


def no_permission(permission: str, what: str) -> GceError:
    return GceError(403, "forbidden", f"Required '{permission}' permission for '{what}'")


def no_token() -> GceError:
    why = (
        "Request is missing required authentication credential. Expected OAuth 2 access token, "
        "login cookie or other valid authentication credential."
    )
    return GceError(401, "required", why)


def unknown_field(name: str, where: str) -> GceError:
    why = f"Invalid JSON payload received. Unknown name \"{name}\" at '{where}': Cannot find field."
    return GceError(400, "badRequest", why)


def api_disabled(
    number: str,
    *,
    name: str = "Compute Engine API",
    host: str = "compute.googleapis.com",
    reason: str = "accessNotConfigured",
) -> GceError:
    link = f"https://console.developers.google.com/apis/api/{host}/overview"
    message = (
        f"{name} has not been used in project {number} before or it is disabled. "
        f"Enable it by visiting {link}?project={number} then retry. If you enabled this API "
        "recently, wait a few minutes for the action to propagate to our systems and retry."
    )
    detail = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "SERVICE_DISABLED",
        "domain": "googleapis.com",
        "metadata": {"service": host, "consumer": f"projects/{number}"},
    }
    return GceError(403, reason, message, details=[detail])


def by_word(word: str) -> GceError:
    """Returns the answer that a rule asks for: a status, or a reason.

    >>> by_word("503").reason, by_word("rateLimitExceeded").status
    ('backendError', 403)
    """
    if word in BY_REASON:
        status, message = BY_REASON[word]
        return GceError(status, word, message)
    reasons = {"429": "rateLimitExceeded", "503": "backendError", "500": "internalError"}
    return GceError(int(word), reasons.get(word, "backendError"), "requested by the test")
