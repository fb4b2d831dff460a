"""Copies the output of a program, in whole lines, to the terminal and to files of bounded size."""

from __future__ import annotations

import os
import select
from pathlib import Path

from jaxres.storage import files
from jaxres.telemetry import stdio

READ_BYTES = 65536
MOST_LINE_BYTES = 65536
"""A longer line is copied in parts."""
MOST_FILE_BYTES = 16 * 2**20
"""Size of the file of the newest output, and of the file of the output before it."""
TERMINAL_SECONDS = 1.0
"""Longest wait for a terminal that accepts nothing; until it does, it gets no more lines."""


class Lines:
    """Splits a stream into whole lines; a carriage return ends one too, as of a progress bar."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> bytes:
        """Returns the lines that are complete now; a line that is too long counts as one."""
        data = self._rest + data
        end = 1 + max(data.rfind(b"\n"), data.rfind(b"\r"))
        if not end and len(data) > MOST_LINE_BYTES:
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def end(self) -> bytes:
        """Returns the last line of a stream that has ended, as a whole one."""
        rest, self._rest = self._rest, b""
        return rest + b"\n" if rest else b""


class OutputFile:
    """The newest output of a program in one file, and the output before it in a second one.

    A file that can't be written, as on a full disk, does not stop the program.
    """

    def __init__(self, path: Path, older: Path) -> None:
        """Opens the file.

        Args:
          path: the file of the newest output.
          older: the file of the output before it; what was there is deleted.
        """
        self._path, self._older = path, older
        self._descriptor = _open(path)
        self._size = 0
        self._is_failing = False

    def write(self, data: bytes) -> None:
        """Appends whole lines."""
        try:
            if self._size + len(data) > MOST_FILE_BYTES:
                self._rotate()
            _write(self._descriptor, data)
            self._size += len(data)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                stdio.eprint(f"jaxres: {self._path}: output is lost ({error.strerror})\n")
            self._is_failing = True

    def _rotate(self) -> None:
        os.close(self._descriptor)
        self._path.replace(self._older)
        self._descriptor = _open(self._path)
        limit = MOST_FILE_BYTES // 2**20
        note = f"jaxres: {limit} MiB before this are in {self._older.name}; older output is deleted"
        _write(self._descriptor, f"{note}\n".encode())
        self._size = len(note) + 1

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def _open(path: Path) -> int:
    return files.only_files(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


class Terminal:
    """One of this process's own output streams, to which lines are copied without waiting long."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_blocked = False

    def write(self, data: bytes) -> None:
        """Writes whole lines; drops them while nothing reads."""
        for begin in range(0, len(data), select.PIPE_BUF):
            wait = 0.0 if self._is_blocked else TERMINAL_SECONDS
            if not select.select([], [self._descriptor], [], wait)[1]:
                self._is_blocked = True
                return
            self._is_blocked = False
            try:
                os.write(self._descriptor, data[begin : begin + select.PIPE_BUF])
            except OSError:  # The terminal is gone.
                return
