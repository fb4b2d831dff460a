"""A GCE VM's metadata server: whether there is one, and one question to it, by long poll.

Whatever is not HTTP 200 is no answer, which is not the answer "nothing": it is asked again. The
address is used rather than the name, so that no resolver can hold anybody up.
(cloud.google.com/compute/docs/metadata/querying-metadata; GoogleCloudPlatform/guest-agent
metadata.go for the long poll.)
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from jaxres.faults import ConfigError

VARIABLE = "GCE_METADATA_HOST"
"""Names another server, as for Google's own libraries; whoever sets it says: this is a VM."""
ADDRESS, PORT = "169.254.169.254", 80
PRODUCT = Path("/sys/class/dmi/id/product_name")
PRODUCTS = ("Google Compute Engine", "Google")
ROOT = "/computeMetadata/v1/"
FLAVOR = ("Metadata-Flavor", "Google")
WAIT_SECONDS = 10
"""How long the server is asked to hold an answer back until the value changes. Google's guest agent
asks for 60; but a connection that has died in silence costs a notice as long, and Spot gives 30."""
ANSWER_SECONDS = 3.0
"""Beyond that, the longest wait for an answer."""
MAX_BYTES = 65536


@dataclass(frozen=True)
class Server:
    """Where metadata are to be had."""

    host: str
    port: int
    is_named: bool
    """Whether the environment names it; else it must say itself that it is Google's."""

    def __str__(self) -> str:
        """Returns host:port."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Answer:
    """The value of a key."""

    text: str
    etag: str | None
    """Names this value in the next question; None: the server does not say."""


@dataclass(frozen=True)
class Unanswered:
    """Nobody knows the value."""

    why: str
    is_absent: bool = False
    """Whether the server has said that there is no such key."""


def find(env: Mapping[str, str], *, product: str) -> Server | None:
    """Returns this machine's metadata server; None: it is no GCE VM.

    >>> find({"GCE_METADATA_HOST": "127.0.0.1:8080"}, product="")
    Server(host='127.0.0.1', port=8080, is_named=True)
    >>> find({}, product="Google Compute Engine")
    Server(host='169.254.169.254', port=80, is_named=False)
    >>> find({}, product="ThinkPad")

    Raises:
      ConfigError: the variable names no server.
    """
    named = env.get(VARIABLE, "").strip()
    if not named:
        is_vm = product.strip() in PRODUCTS
        return Server(ADDRESS, PORT, is_named=False) if is_vm else None
    try:
        parts = urlsplit(named if "//" in named else f"//{named}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ConfigError(
            f"{VARIABLE}={named}: expected HOST or HOST:PORT of a metadata server. Mend it, or "
            "take it out: on a GCE VM the server is found without."
        )
    return Server(host, port or PORT, is_named=True)


def product_name() -> str:
    """Returns what the firmware calls this machine; empty where it does not say."""
    try:
        return PRODUCT.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def ask(server: Server, key: str, *, after: str | None = None) -> Answer | Unanswered:
    """Returns the value of a key, or why it is not known; takes 13 seconds at most.

    Args:
      server: whom to ask.
      key: path below computeMetadata/v1, perhaps with `?alt=json`.
      after: the answer is held back until the value is another than this etag's, or WAIT_SECONDS;
        None: it comes at once.
    """
    path, _, query = key.partition("?")
    words = dict(parse_qsl(query))
    if after is not None:
        words |= {"wait_for_change": "true", "timeout_sec": f"{WAIT_SECONDS}", "last_etag": after}
    url = f"{ROOT}{path}" + (f"?{urlencode(words)}" if words else "")
    seconds = ANSWER_SECONDS + (0 if after is None else WAIT_SECONDS)
    connection = http.client.HTTPConnection(server.host, server.port, timeout=seconds)
    try:
        connection.request("GET", url, headers=dict([FLAVOR]))
        response = connection.getresponse()
        body = response.read(MAX_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        return Unanswered(f"{server}: {type(error).__name__}: {error}")
    finally:
        connection.close()
    if response.status != 200:
        return Unanswered(f"{server}: HTTP {response.status}", is_absent=response.status == 404)
    if not server.is_named and response.headers.get(FLAVOR[0]) != FLAVOR[1]:
        return Unanswered(f"{server}: an answer that is not the metadata server's")
    if len(body) > MAX_BYTES:
        return Unanswered(f"{server}: more than {MAX_BYTES} bytes for {path}")
    return Answer(body.decode("utf-8", "replace").strip(), response.headers.get("ETag"))
