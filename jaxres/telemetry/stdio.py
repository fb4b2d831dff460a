"""Standard output and error: they are open, write errors are ignored, characters are escaped.

Every write to a closed terminal, or to a file on a full disk, fails. Such an error must not end a
run, which may be saving its last step.

Texts of other hosts, of records, logs and file names may hold control characters, which a terminal
executes: it would show another text, or set its title or clipboard. jaxres prints none itself, so
all of them are escaped where its texts leave the process. So are characters that the encoding of a
stream does not have, as in a locale of Latin-1.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from jaxres.faults import StorageUnavailable
from jaxres.secret_values import redact_text


def _escapes() -> dict[int, str]:
    controls = [*range(0x20), *range(0x7F, 0xA0)]  # C0, DEL and C1.
    lines = [0x2028, 0x2029]
    bidi = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    kept = {ord("\n"), ord("\t")}
    return {n: ascii(chr(n))[1:-1] for n in [*controls, *lines, *bidi] if n not in kept}


_ESCAPES = _escapes()


def escaped(text: str) -> str:
    r"""Returns a text without control characters, except newlines and tabs, as Python escapes.

    >>> escaped("a\x1b]52;c;aGk=\x07\tb\r\u202e\n")
    'a\\x1b]52;c;aGk=\\x07\tb\\r\\u202e\n'
    """
    return text.translate(_ESCAPES)


class SafeStream:
    """A text stream that escapes control characters and drops output on an OSError."""

    def __init__(self, stream: TextIO, *, escapes: bool = True, drops: bool = True) -> None:
        """Wraps a stream.

        Args:
          stream: the stream to write to.
          escapes: whether control characters are escaped; not where custom code prints.
          drops: whether output is dropped on an OSError; otherwise it is StorageUnavailable, or
            BrokenPipeError if the reader of the output has exited.
        """
        self._stream = stream
        self._escapes = escapes
        self._drops = drops

    @property
    def encoding(self) -> str:
        """Encoding of the wrapped stream."""
        return self._stream.encoding

    def write(self, text: str, /) -> int:
        """Writes the text; drops it on an error."""
        with self._errors():
            self._stream.write(escaped(text) if self._escapes else text)
        return len(text)

    def flush(self) -> None:
        """Flushes the wrapped stream."""
        with self._errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Drops an OSError of the stream, or raises it with what it is: it names no file."""
        try:
            yield
        except OSError as error:
            if self._drops:
                return
            if isinstance(error, BrokenPipeError):
                raise
            names = {"<stdout>": "standard output", "<stderr>": "standard error"}
            name = names.get(getattr(self._stream, "name", ""), "the output")
            raise StorageUnavailable(
                f"{name}: can't be written ({error.strerror}). "
                "Send the output to another place, or free space where it goes, then rerun the "
                "same command."
            ) from error

    def isatty(self) -> bool:
        """Returns whether the wrapped stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Returns the file descriptor of the wrapped stream."""
        return self._stream.fileno()

    def writelines(self, lines: Iterable[str], /) -> None:
        """Writes several texts."""
        for line in lines:
            self.write(line)

    def close(self) -> None:
        """Flushes only: a library that closes its log stream must not end the process's output."""
        self.flush()

    def __getattr__(self, name: str) -> Any:
        """Returns any other attribute of the wrapped stream, such as `buffer`, for custom code."""
        return getattr(self._stream, name)


def open_closed() -> None:
    """Opens standard streams that are closed, and lets all of them write every character.

    Without it the next file or socket that this process opens would have the number of standard
    output or error, and get what this process and its children print.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # The lowest number that is free.
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def install_safe_stdio(*, escapes: bool) -> None:
    """Replaces this process's standard output and error by safe streams.

    Args:
      escapes: whether control characters are escaped; false where custom code prints as well.
    """
    open_closed()
    streams = (SafeStream(stream, escapes=escapes) for stream in (sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = streams  # type: ignore[assignment]


@contextlib.contextmanager
def escaping() -> Iterator[None]:
    """Escapes control characters in all that the block prints; write errors are raised."""
    before = sys.stdout, sys.stderr
    streams = (SafeStream(stream, drops=False) for stream in before)
    sys.stdout, sys.stderr = streams  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def eprint(text: str) -> None:
    """Writes to standard error, without secrets that are known by their form, and flushes."""
    stream = SafeStream(sys.stderr)
    stream.write(redact_text(text))
    stream.flush()


def warn(text: str) -> None:
    """Writes a warning to standard error."""
    eprint(f"WARNING: {text}\n")


def write_result(text: str) -> None:
    """Writes the text for which a command is called, such as a manifest, to standard output.

    Raises:
      StorageUnavailable: it can't be written as a whole.
    """
    before = sys.stdout
    wrapped = before._stream if isinstance(before, SafeStream) else before
    stream = SafeStream(wrapped, drops=False)
    with contextlib.suppress(BrokenPipeError):  # The reader has what it wants.
        stream.write(text)
        stream.flush()


def flush() -> None:
    """Flushes standard output and error."""
    SafeStream(sys.stdout).flush()
    SafeStream(sys.stderr).flush()


def format_bytes(number: float) -> str:
    """Returns a number of bytes in the largest fitting unit.

    >>> format_bytes(0), format_bytes(1023), format_bytes(1536), format_bytes(3 * 2**40)
    ('0 B', '1023 B', '1.5 KiB', '3.0 TiB')
    """
    if number < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:.1f} TiB"
