"""Compiled programs on their way between two hosts of an attempt, under a key of the attempt.

A program is machine code, so each byte is checked before a host uses it. The request has a random
challenge; the answer has an HMAC of the challenge, the names, the sizes and the SHA-256 digests of
the programs. So an answer is useless for another request, and to a host without the key. The
programs are not encrypted (docs/security.md). Every wait has a limit, which grows with the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import socketserver
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeGuard, TypeVar

import pydantic_core

from jaxres.clock import Clock
from jaxres.cluster.authentication import MIN_CHARACTERS, Secret
from jaxres.cluster.authentication import VARIABLE as SECRET_VARIABLE
from jaxres.cluster.limited_server import LimitedServer
from jaxres.faults import UsageError

VARIABLE = "JAXRES_PROGRAMS_KEY"
"""Environment variable of a worker with the key of the attempt, which it removes."""
GIVEN = "JAXRES_PROGRAMS_SECRET"
"""Environment variable of a supervisor with a secret for programs alone, which `launch gce` sets on
its VMs: if it differs between them, they compile, where another secret of the run ends them."""
ONE_FOLDER = "the workers of one supervisor have one folder of programs"
PUBLIC_SECRET = (
    "readers of the bucket or mount have the secret of this run, and must not be able to send "
    f"programs: set the same {SECRET_VARIABLE} (32 characters or more) on all hosts"
)
CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 10.0
"""Longest time for which a connection may carry nothing, and for request and head of an answer."""
LEAST_SECONDS = 30.0
SLOWEST_BYTES_PER_SECOND = 10e6
"""A transfer may last LEAST_SECONDS, and as long as its bytes take at this rate."""
MAX_BYTES = 16 << 30
"""Largest size of all programs of a request."""
MAX_LINE_BYTES = 65536
CHUNK_BYTES = 1 << 20
MAX_STRANGERS = 64
POLL_SECONDS = 0.05
_HEX = re.compile("[0-9a-f]{64}")
T = TypeVar("T")


class TransferFailed(Exception):
    """No program was received; the message is the reason."""


@dataclass(frozen=True)
class AttemptKey:
    """The key under which the hosts of an attempt send each other programs."""

    key: bytes = field(default=b"", repr=False)
    refusal: str = ONE_FOLDER
    """Why this host neither sends nor takes programs; "": it does."""


def variables(
    secret: Secret | None, nonce: str, *, num_hosts: int, given: str = ""
) -> dict[str, str]:
    """Returns the variable for the worker of an attempt; empty where no secret is private.

    Args:
      secret: that of the run; None: one supervisor has all workers.
      nonce: that of the attempt's claim.
      num_hosts: number of workers of the attempt.
      given: the value of GIVEN, which is used instead of the secret of the run; empty: not set.

    Raises:
      UsageError: the given secret is too short.
    """
    if secret is None or num_hosts == 1:
        return {}
    if given and len(given) < MIN_CHARACTERS:
        raise UsageError(f"{GIVEN}: expected at least {MIN_CHARACTERS} characters")
    if not (given or secret.is_private):
        return {VARIABLE: ""}
    own = given.encode("utf-8", "surrogateescape") or secret.key
    return {VARIABLE: hmac.digest(own, f"jaxres programs {nonce}".encode(), "sha256").hex()}


def take_key(env: MutableMapping[str, str]) -> AttemptKey:
    """Takes the key of the attempt out of the environment."""
    given = env.pop(VARIABLE, None)
    if given is None:
        return AttemptKey()
    return AttemptKey(bytes.fromhex(given), "") if given else AttemptKey(refusal=PUBLIC_SECRET)


def request(names: Sequence[str], challenge: str, *, key: bytes) -> bytes:
    """Returns the line by which a host asks for programs."""
    fields = {"names": list(names), "challenge": challenge}
    return _line({**fields, "proof": _proof(key, "request", fields)})


def requested(line: bytes, *, key: bytes) -> tuple[list[str], str]:
    """Returns the names and the challenge of a request.

    Raises:
      TransferFailed: it is no request, or its sender does not have the key.
    """
    found = _fields(line)
    names, challenge = found.get("names"), found.get("challenge")
    if not _is_list_of(names, str) or not _is_hex(challenge):
        raise TransferFailed(f"not a request: {line[:40]!r}")
    _check_proof(found, key, "request", {"names": names, "challenge": challenge})
    return names, challenge


def head(names: Sequence[str], challenge: str, programs: Sequence[bytes], *, key: bytes) -> bytes:
    """Returns the line before the programs of an answer, which has their sizes and digests."""
    fields = {
        "sizes": [len(program) for program in programs],
        "digests": [hashlib.sha256(program).hexdigest() for program in programs],
    }
    bound = {**fields, "names": list(names), "challenge": challenge}
    return _line({**fields, "proof": _proof(key, "answer", bound)})


def announced(
    line: bytes, names: Sequence[str], challenge: str, *, key: bytes
) -> list[tuple[int, str]]:
    """Returns size and digest of each program that an answer announces.

    Raises:
      TransferFailed: it is no answer to this request by a host that has the key.
    """
    found = _fields(line)
    sizes, digests = found.get("sizes"), found.get("digests")
    if not _is_list_of(sizes, int) or not _is_list_of(digests, str):
        raise TransferFailed(f"not an answer: {line[:40]!r}")
    fields = {"sizes": sizes, "digests": digests, "names": list(names), "challenge": challenge}
    _check_proof(found, key, "answer", fields)
    if len(sizes) != len(names) or len(digests) != len(names):
        raise TransferFailed(f"it sends {len(sizes)} programs instead of {len(names)}")
    if min(sizes) < 0 or sum(sizes) > MAX_BYTES:
        raise TransferFailed(f"it sends {sum(sizes)} bytes, more than {MAX_BYTES}")
    return list(zip(sizes, digests, strict=True))


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _fields(line: bytes) -> dict[str, Any]:
    try:
        found = pydantic_core.from_json(line)
    except ValueError as error:
        raise TransferFailed(f"not JSON: {line[:40]!r}") from error
    if not isinstance(found, dict):
        raise TransferFailed(f"not an object: {line[:40]!r}")
    return found


def _is_list_of(value: Any, kind: type[T]) -> TypeGuard[list[T]]:
    return isinstance(value, list) and len(value) > 0 and all(type(each) is kind for each in value)


def _is_hex(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _proof(key: bytes, role: str, fields: Mapping[str, Any]) -> str:
    text = json.dumps([f"jaxres programs {role}", fields], sort_keys=True)
    return hmac.digest(key, text.encode(), "sha256").hex()


def _check_proof(
    found: Mapping[str, Any], key: bytes, role: str, fields: Mapping[str, Any]
) -> None:
    given = found.get("proof")
    if not _is_hex(given) or not hmac.compare_digest(given, _proof(key, role, fields)):
        raise TransferFailed("its sender does not have the key of this attempt, or has changed it")


class ProgramServer:
    """Sends programs to the hosts of the attempt, in threads of its own, until it is closed."""

    def __init__(self, programs: Mapping[str, bytes], *, address: str, key: bytes) -> None:
        """Listens at once, at a free port.

        Args:
          programs: by name.
          address: this host's IP address.
          key: that of the attempt.

        Raises:
          OSError: it can't listen.
        """
        self._server = _RequestServer(address, programs, key)
        literal = f"[{address}]" if ":" in address else address
        self.address = f"{literal}:{self._server.server_address[1]}"
        """host:port for the other hosts."""

    def __enter__(self) -> ProgramServer:
        serve = self._server.serve_forever
        name = "jaxres-programs"
        threading.Thread(target=serve, args=(POLL_SECONDS,), name=name, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _RequestServer(LimitedServer):
    def __init__(self, address: str, programs: Mapping[str, bytes], key: bytes) -> None:
        super().__init__(
            (address, 0), _Answer, max_connections=MAX_STRANGERS, seconds=SILENCE_SECONDS
        )
        self.programs, self.key = programs, key


class _Answer(socketserver.StreamRequestHandler):
    timeout = SILENCE_SECONDS

    def handle(self) -> None:
        """Answers one request; closes the connection of a client without the key."""
        assert isinstance(self.server, _RequestServer)
        programs, key = self.server.programs, self.server.key
        names, challenge = requested(self.rfile.readline(MAX_LINE_BYTES), key=key)
        contents = [programs[name] for name in names]
        self.server.exempt(self.connection)
        self.wfile.write(head(names, challenge, contents, key=key))
        for content in contents:
            for begin in range(0, len(content), CHUNK_BYTES):  # The limit is that of each write.
                self.wfile.write(memoryview(content)[begin : begin + CHUNK_BYTES])


def fetch(
    address: str,
    names: Sequence[str],
    *,
    key: bytes,
    num_takers: int,
    most_seconds: float,
    clock: Clock,
) -> list[bytes]:
    """Returns programs that another host has sent, each with the digest that it has announced.

    Args:
      address: host:port of its ProgramServer.
      names: of the programs.
      key: that of the attempt.
      num_takers: number of hosts that ask the same host at the same time.
      most_seconds: longest transfer, whatever its size.
      clock: measures the limits.

    Raises:
      TransferFailed: it could not be reached, was too slow, or sent something else.
    """
    end = clock.monotonic() + most_seconds
    try:
        host, _, port = address.rpartition(":")
        literal = str(ipaddress.ip_address(host.strip("[]")))  # A name server may not answer.
        with socket.create_connection((literal, int(port)), CONNECT_SECONDS) as connected:
            stream = _Stream(connected, clock, end=end)
            stream.limit(SILENCE_SECONDS)
            challenge = secrets.token_hex(32)
            connected.sendall(request(names, challenge, key=key))
            items = announced(stream.read_line(), names, challenge, key=key)
            total = sum(size for size, _ in items)
            stream.limit(LEAST_SECONDS + total * num_takers / SLOWEST_BYTES_PER_SECOND)
            return [_checked(stream.read(size), digest) for size, digest in items]
    except (OSError, ValueError, MemoryError) as error:
        raise TransferFailed(str(error) or type(error).__name__) from error


def _checked(program: bytes, digest: str) -> bytes:
    if hashlib.sha256(program).hexdigest() != digest:
        raise TransferFailed("the bytes that came do not match their digest")
    return program


class _Stream:
    """The bytes that a connection receives, within limits of time for a silence and for all."""

    def __init__(self, connected: socket.socket, clock: Clock, *, end: float) -> None:
        self._socket, self._clock = connected, clock
        self._unread = b""
        self._end = self._until = end

    def limit(self, seconds: float) -> None:
        """Sets the time within which all further bytes must come."""
        self._until = min(self._clock.monotonic() + seconds, self._end)

    def read_line(self) -> bytes:
        """Returns the bytes up to the end of the line."""
        while b"\n" not in self._unread:
            if len(self._unread) > MAX_LINE_BYTES:
                raise TransferFailed(f"a line of more than {MAX_LINE_BYTES} bytes")
            self._unread += self._receive(4096)
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def read(self, size: int) -> bytes:
        """Returns exactly so many bytes."""
        content = bytearray(self._unread[:size])
        self._unread = self._unread[size:]
        while len(content) < size:
            content += self._receive(min(CHUNK_BYTES, size - len(content)))
        return bytes(content)

    def _receive(self, size: int) -> bytes:
        left = self._until - self._clock.monotonic()
        if left <= 0:
            raise TransferFailed("it did not send all in time")
        self._socket.settimeout(min(SILENCE_SECONDS, left))
        try:
            data = self._socket.recv(size)
        except TimeoutError:
            raise TransferFailed("it sent nothing more in time") from None
        if not data:
            raise TransferFailed("it closed the connection")
        return data
