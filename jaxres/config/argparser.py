"""An argument parser that raises UsageError instead of exiting the process."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

from jaxres.faults import ConfigError, UsageError
from jaxres.secret_values import redact_text, redact_words
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_address, normalized, parse_path


def path_argument(text: str) -> RunPath:
    """Returns the normal form of a path among the arguments; raises ConfigError if it is none."""
    try:
        return normalized(parse_path(os.path.expanduser(text)))
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}") from error


def local_path_argument(text: str) -> Path:
    """Returns a path among the arguments; raises ArgumentTypeError for a URL."""
    if is_address(text):
        raise argparse.ArgumentTypeError(f"{redact_text(text)}: must be a local path, not a URL")
    return Path(text)


def require_writable(flag: str, path: RunPath | None) -> None:
    """Creates the folder of a path among the arguments, and tries to create a file in it.

    Args:
      flag: name of the argument, for the message.
      path: what a command is going to write; None, and an object of a bucket, are not checked.

    Raises:
      UsageError: nothing can be created there. No run is the cause, and none is to be restored.
      StorageUnavailable: the disk is full or fails.
    """
    if not isinstance(path, Path):
        return
    folder = path.absolute()
    try:
        if not folder.is_dir():
            folder = folder.parent
        files.try_to_create_in(folder)
    except OSError as error:
        files.raise_failure(error, path)
        raise UsageError(
            f"{flag} {path}: can't be written: nothing can be created in {folder} "
            f"({error.strerror}). Give another path."
        ) from error


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are exceptions."""

    def __init__(self, **options: Any) -> None:
        """Takes the options of argparse; a shortened flag is an unknown flag."""
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with the message and the command that prints the usage."""
        raise UsageError(f"{self.prog}: {redact_words(message)} (usage: `{self.prog} --help`)")
