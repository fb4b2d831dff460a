"""Authenticates two supervisors to each other by the secret of their run, before any message.

Both sides send a random challenge. The connecting side proves first that it holds the secret, by an
HMAC-SHA256 (the standard library's) of both challenges and of its role; the accepting side then
proves the same for its own role. So a proof is useless on another connection (replay) and when sent
back to its sender (reflection), and an unknown client of the port receives only a random number.
`multiprocessing.connection` has a similar handshake; on Python 3.11 it uses MD5, does not bind the
direction, and blocks.

The messages after the handshake are neither encrypted nor signed (docs/security.md).
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from jaxres.clock import Clock
from jaxres.cluster.messages import VERSION, ProtocolError, parse_fields
from jaxres.faults import ConfigError, StorageRefused, StorageUnavailable, UsageError, command_line
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote

VARIABLE = "JAXRES_SECRET"
"""Environment variable with the secret, for runs whose directory must not contain it."""
MIN_CHARACTERS = 32
"""Shortest secret accepted from a user: a short one could be guessed from a recorded handshake."""
SECRET_BYTES = 32
MAX_LINE_BYTES = 512
"""Longest line that is read from a side that is not authenticated."""
APPEAR_SECONDS = 30.0
"""Longest wait until a secret that another host has created can be read; NFS caches names."""
RETRY_SECONDS = 0.2

MOUNTS = Path("/proc/self/mountinfo")
"""The mounts of this process (Linux, proc_pid_mountinfo(5))."""

_CHALLENGE, _PROOF, _REFUSED = "challenge", "proof", "refused"
_HEX = re.compile("[0-9a-f]{64}")
_OTHER_SECRET = "the two sides hold different secrets"


@dataclass(frozen=True)
class Secret:
    """The shared secret of a job's hosts."""

    key: bytes = field(repr=False)
    source: str
    """File or variable that this host has read it from, for messages."""
    is_private: bool = True
    """Whether only this account can read it; false in a bucket, which has readers of its own."""


class NotAuthenticatedError(ValueError):
    """The other side violates the handshake protocol, or has a different secret."""

    def __init__(self, reason: str, *, is_other_secret: bool = False) -> None:
        super().__init__(reason)
        self.is_other_secret = is_other_secret


class Handshake:
    """One side of the handshake, without a socket: takes received lines, returns bytes to send."""

    def __init__(self, secret: Secret, *, accepts: bool) -> None:
        self._secret = secret
        self._accepts = accepts
        self._own_challenge = secrets.token_bytes(SECRET_BYTES)
        self._other_challenge: bytes | None = None
        self.is_done = False
        """Whether the other side has proven that it has the secret."""

    @property
    def opening(self) -> bytes:
        """The first line, which each side sends immediately."""
        return _line(_CHALLENGE, self._own_challenge.hex())

    @property
    def refusal(self) -> bytes:
        """The line that the accepting side sends after a wrong proof; it sends no other reason."""
        return _line(_REFUSED, _OTHER_SECRET) if self._accepts else b""

    def receive(self, line: bytes) -> bytes:
        """Processes the next line of the other side and returns the bytes to send.

        Raises:
          NotAuthenticatedError: the connection must be closed.
        """
        kind, text = _parse(line)
        if kind == _REFUSED and not self._accepts:
            raise NotAuthenticatedError(_OTHER_SECRET, is_other_secret=True)
        if _HEX.fullmatch(text) is None:
            raise NotAuthenticatedError(f"not a {kind}: {text[:40]!r}")
        if kind == _CHALLENGE and self._other_challenge is None:
            self._other_challenge = bytes.fromhex(text)
            return b"" if self._accepts else _line(_PROOF, self._proof(accepts=False))
        if kind != _PROOF or self._other_challenge is None or self.is_done:
            raise NotAuthenticatedError(f"a {kind} at this point of the handshake")
        if not hmac.compare_digest(text, self._proof(accepts=not self._accepts)):
            raise NotAuthenticatedError(_OTHER_SECRET, is_other_secret=True)
        self.is_done = True
        return _line(_PROOF, self._proof(accepts=True)) if self._accepts else b""

    def _proof(self, *, accepts: bool) -> str:
        """Returns the proof that the side with this role must send."""
        assert self._other_challenge is not None
        role = b"jaxres accepting side" if accepts else b"jaxres connecting side"
        challenges = [self._own_challenge, self._other_challenge]
        if not self._accepts:
            challenges.reverse()  # The accepting side's challenge comes first on both sides.
        return hmac.digest(self._secret.key, b"".join([role, *challenges]), "sha256").hex()


def _line(kind: str, text: str) -> bytes:
    return json.dumps({"jaxres": VERSION, kind: text}).encode() + b"\n"


def _parse(line: bytes) -> tuple[str, str]:
    """Returns the kind and the text of a handshake line."""
    if len(line) > MAX_LINE_BYTES:
        raise NotAuthenticatedError(f"a line of more than {MAX_LINE_BYTES} bytes: {line[:40]!r}")
    try:
        fields = parse_fields(line)
    except ProtocolError as error:
        raise NotAuthenticatedError(str(error)) from error
    for kind in (_CHALLENGE, _PROOF, _REFUSED):
        if isinstance(text := fields.get(kind), str):
            return kind, text
    raise NotAuthenticatedError(f"not a handshake message: {line[:40]!r}")


def load_secret(path: RunPath, *, given: str, clock: Clock) -> Secret:
    """Returns the secret of a run: the given one, else the secret in the run directory.

    The first host creates the file in the run directory.

    Args:
      given: the value of JAXRES_SECRET; empty: not set.
      clock: for the wait until a secret that another host has created can be read.

    Raises:
      UsageError: the given secret is too short.
      ConfigError: other users may access the file, or its content is not a secret.
      StorageUnavailable: the file was created but can't be read.
    """
    if given := given.strip():
        if len(given) < MIN_CHARACTERS:
            raise UsageError(
                f"{VARIABLE}: has {len(given)} characters, expected at least {MIN_CHARACTERS}, the "
                "same on all hosts, such as the output of `openssl rand -hex 32`"
            )
        return Secret(given.encode("utf-8", "surrogateescape"), f"the variable {VARIABLE}")
    text = _read_or_create(path, clock=clock).decode("ascii", "replace").strip()
    if not is_remote(path):
        _refuse_open_permissions(path)
    if _HEX.fullmatch(text) is None:
        raise ConfigError(
            f"{path}: expected the secret of this run, {2 * SECRET_BYTES} hexadecimal digits. "
            "Delete the file while no host of this run is up; the next start creates it again."
        )
    is_private = not (is_remote(path) or _is_on_fuse(path, MOUNTS.read_text()))
    return Secret(bytes.fromhex(text), str(path), is_private)


def _is_on_fuse(path: Path, mounts: str) -> bool:
    """Returns whether a file is on a FUSE mount, whose server may let others read it.

    A mounted bucket (gcsfuse, s3fs) shows the permissions that the mount has set.

    Args:
      path: the file.
      mounts: content of MOUNTS.
    """
    with files.typed_errors(path):
        device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found = [line.partition(" - ")[2] for line in mounts.splitlines() if line.split()[2] == number]
    return any(kind.startswith("fuse") for kind in found)


def _read_or_create(path: RunPath, *, clock: Clock) -> bytes:
    until = clock.monotonic() + APPEAR_SECONDS
    while (data := _read(path)) is None:
        if clock.monotonic() > until:
            raise StorageUnavailable(
                f"{path}: the secret of this run was created by this host or another one, but "
                f"can't be read after {APPEAR_SECONDS:.0f} s. Rerun the same command."
            )
        files.make_dir(path.parent)
        text = secrets.token_hex(SECRET_BYTES)
        if not files.create(path, f"{text}\n".encode(), mode=0o600):
            clock.sleep(RETRY_SECONDS)
    return data


def _read(path: RunPath) -> bytes | None:
    try:
        return files.read(path)
    except (ConfigError, StorageRefused) as error:
        raise type(error)(
            f"{error} Only the owner of the file may read the secret of a run: run all hosts as "
            f"one user, or set the same {VARIABLE} on all of them."
        ) from error


def _refuse_open_permissions(path: Path) -> None:
    with files.typed_errors(path):
        mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        close = command_line("chmod 600", path)
        raise ConfigError(
            f"{path}: the secret of this run has permissions {mode:04o}, so other users can access "
            f"it. Run `{close}`; if other users may have read it, delete it instead, while no host "
            f"of this run is up. On a mount without permissions, set the same {VARIABLE} (32 "
            "characters or more) on all hosts."
        )


def other_secret_message(address: object, secret: Secret) -> str:
    """Returns the error message of a host whose secret differs from host 0's."""
    return (
        f"{address}: host 0 there has a different secret than this host, whose secret comes from "
        f"{secret.source}. Is it the same shared directory? Either run.dir is not shared by all "
        "hosts (put it on a mount that all hosts have, under the same path), or "
        f"{VARIABLE} differs between hosts, or host 0 of another job has this address."
    )
