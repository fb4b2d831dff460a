"""One POST to a webhook, within a time limit; what goes wrong is said without a word of the URL."""

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
"""Longest wait for the socket at any one point."""
WHOLE_SECONDS = 15.0
"""Longest time for a whole request, however slowly the other side dribbles."""
AGAIN = (408, 425, 429)
"""With 5xx: answers after which the same request may succeed later."""
LONGEST_WAIT_ASKED = 300.0


@dataclass(frozen=True)
class Answer:
    """How a request went."""

    is_delivered: bool
    may_be_repeated: bool
    """Whether the same request may succeed later."""
    words: str
    """For a person; tells nothing of the address."""
    wait_seconds: float = 0.0
    """How long the other side wants to be left alone."""


def is_url(text: str) -> bool:
    """Says whether a text is an address that can be posted to.

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


def post(url: str, body: dict[str, Any], *, key: str) -> Answer:
    """Posts JSON; follows no redirect, since the secret would go along."""
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
    ends = threading.Timer(WHOLE_SECONDS, _cut, [connection])
    ends.daemon = True
    ends.start()
    try:
        connection.request("POST", target, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        return _answer(response.status, response.headers.get("Retry-After"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(False, True, _words(error))
    finally:
        ends.cancel()
        connection.close()


def _cut(connection: http.client.HTTPConnection) -> None:
    """Ends a request from outside: whoever reads from the socket then gets an end or an error."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _answer(status: int, retry_after: str | None) -> Answer:
    if 200 <= status < 300:
        return Answer(True, False, f"answered {status}")
    if status >= 500 or status in AGAIN:
        asked = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
        return Answer(False, True, f"answered {status}", min(asked, LONGEST_WAIT_ASKED))
    redirect = ", a redirect, which is not followed" if 300 <= status < 400 else ""
    return Answer(False, False, f"answered {status}{redirect}")


def _words(error: Exception) -> str:
    """Names an error without its own words, which may hold the address."""
    number = error.errno if isinstance(error, OSError) else None
    is_systems = number is not None and not isinstance(error, ssl.SSLError)
    return f"{type(error).__name__}" + (f" {number}" if is_systems else "")
