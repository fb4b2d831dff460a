"""One POST to a webhook, within a time limit; errors never show the URL, which may be secret."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

WAIT_SECONDS = 5.0
"""Timeout of each socket operation."""
TOTAL_SECONDS = 15.0
"""Timeout of the whole request, also if the server sends slowly."""
RETRYABLE = (408, 425, 429)
"""Status codes besides 5xx after which the same request may succeed later."""
MAX_RETRY_AFTER_SECONDS = 300.0
"""Longest accepted Retry-After."""


@dataclass(frozen=True)
class PostResult:
    """Outcome of a request."""

    is_delivered: bool
    may_be_repeated: bool
    """Whether the same request may succeed later."""
    description: str
    """Description for messages; never shows the URL."""
    wait_seconds: float = 0.0
    """Delay before a retry that the server asked for (Retry-After)."""


def is_url(text: str) -> bool:
    """Returns whether a text is a URL that can be posted to.

    >>> is_url("https://host/path"), is_url("hooks.slack.com/x"), is_url("https://a b/")
    (True, False, False)
    """
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in ("https", "http")
            and bool(parts.hostname)
            and parts.port != 0
            and parts.username is None
            and text.isascii()
            and not any(c.isspace() or not c.isprintable() for c in text)
        )
    except ValueError:
        return False


def post(url: str, body: dict[str, Any], *, key: str) -> PostResult:
    """Posts JSON; follows no redirect, because that would send the secret to another server."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        tls = ssl.create_default_context()
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=WAIT_SECONDS, context=tls
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=WAIT_SECONDS)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {
        "Content-Type": "application/json",
        "Idempotency-Key": key,
        "User-Agent": "jaxres",
        "Connection": "close",
    }
    timer = threading.Timer(TOTAL_SECONDS, _abort, [connection])
    timer.daemon = True
    timer.start()
    try:
        connection.request("POST", target, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        return _result_of(response.status, response.headers.get("Retry-After"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return PostResult(False, True, _error_name(error))
    finally:
        timer.cancel()
        connection.close()


def _abort(connection: http.client.HTTPConnection) -> None:
    """Aborts a request from another thread: a blocked read returns with EOF or an error."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _result_of(status: int, retry_after: str | None) -> PostResult:
    if 200 <= status < 300:
        return PostResult(True, False, f"answered {status}")
    if status >= 500 or status in RETRYABLE:
        wait = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
        return PostResult(False, True, f"answered {status}", min(wait, MAX_RETRY_AFTER_SECONDS))
    redirect = ", a redirect, which is not followed" if 300 <= status < 400 else ""
    return PostResult(False, False, f"answered {status}{redirect}")


def _error_name(error: Exception) -> str:
    """Returns the name of an error without its message, which may hold the URL."""
    number = error.errno if isinstance(error, OSError) else None
    is_system_error = number is not None and not isinstance(error, ssl.SSLError)
    return f"{type(error).__name__}" + (f" {number}" if is_system_error else "")
