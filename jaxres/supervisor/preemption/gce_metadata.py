"""Client of the GCE metadata server: detects the server, and reads one key by long poll.

A response other than HTTP 200 is no value, which differs from an empty value: the request is
repeated. The server's IP address is used, so that no name resolver can delay a request.
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
"""Names another metadata server, as for Google's libraries; if it is set, this machine is a VM."""
ADDRESS, PORT = "169.254.169.254", 80
PRODUCT = Path("/sys/class/dmi/id/product_name")
PRODUCTS = ("Google Compute Engine", "Google")
ROOT = "/computeMetadata/v1/"
FLAVOR = ("Metadata-Flavor", "Google")
WAIT_SECONDS = 10
"""Longest time for which the server delays a response until the value changes. Google's guest agent
uses 60; but a dead connection delays a notice by this time, and Spot VMs have 30 s of notice."""
RESPONSE_SECONDS = 3.0
"""Longest wait for a response, in addition to WAIT_SECONDS."""
MAX_BYTES = 65536


@dataclass(frozen=True)
class Server:
    """Address of a metadata server."""

    host: str
    port: int
    is_named: bool
    """Whether the environment names it; otherwise its responses must have Google's header."""

    def __str__(self) -> str:
        """Returns host:port."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Response:
    """A response with the value of a key."""

    text: str
    etag: str | None
    """Identifies this value in the next request; None: the server has sent none."""


@dataclass(frozen=True)
class NoResponse:
    """A failed request: the value is unknown."""

    why: str
    is_absent: bool = False
    """Whether the server has responded that the key does not exist."""


def detect(env: Mapping[str, str], *, product: str) -> Server | None:
    """Returns this machine's metadata server; None: this machine is no GCE VM.

    >>> detect({"GCE_METADATA_HOST": "127.0.0.1:8080"}, product="")
    Server(host='127.0.0.1', port=8080, is_named=True)
    >>> detect({}, product="Google Compute Engine")
    Server(host='169.254.169.254', port=80, is_named=False)
    >>> detect({}, product="ThinkPad")

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
            f"{VARIABLE}={named}: expected HOST or HOST:PORT of a metadata server. Fix it, or "
            "unset it: on a GCE VM the server is found without it."
        )
    return Server(host, port or PORT, is_named=True)


def product_name() -> str:
    """Returns the product name in this machine's firmware; empty if it can not be read."""
    try:
        return PRODUCT.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def get(server: Server, key: str, *, after: str | None = None) -> Response | NoResponse:
    """Requests the value of a key; returns the reason if that fails. Takes 13 seconds at most.

    Args:
      server: the metadata server.
      key: path below computeMetadata/v1, perhaps with `?alt=json`.
      after: the server delays its response until the value differs from this etag's, at most
        WAIT_SECONDS; None: it responds at once.
    """
    path, _, query = key.partition("?")
    parameters = dict(parse_qsl(query))
    if after is not None:
        parameters |= {
            "wait_for_change": "true",
            "timeout_sec": f"{WAIT_SECONDS}",
            "last_etag": after,
        }
    url = f"{ROOT}{path}" + (f"?{urlencode(parameters)}" if parameters else "")
    seconds = RESPONSE_SECONDS + (0 if after is None else WAIT_SECONDS)
    connection = http.client.HTTPConnection(server.host, server.port, timeout=seconds)
    try:
        connection.request("GET", url, headers=dict([FLAVOR]))
        response = connection.getresponse()
        body = response.read(MAX_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        return NoResponse(f"{server}: {type(error).__name__}: {error}")
    finally:
        connection.close()
    if response.status != 200:
        return NoResponse(f"{server}: HTTP {response.status}", is_absent=response.status == 404)
    if not server.is_named and response.headers.get(FLAVOR[0]) != FLAVOR[1]:
        return NoResponse(f"{server}: the response is not from a metadata server")
    if len(body) > MAX_BYTES:
        return NoResponse(f"{server}: more than {MAX_BYTES} bytes for {path}")
    return Response(body.decode("utf-8", "replace").strip(), response.headers.get("ETag"))
