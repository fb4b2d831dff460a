"""An argument parser that raises UsageError instead of exiting the process."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from jaxres.faults import UsageError
from jaxres.storage.path import RunPath, parse_path


def run_dir_argument(text: str) -> RunPath:
    """Returns the path of an argument, for `add_argument(type=...)`."""
    try:
        return parse_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are exceptions."""

    def __init__(self, **options: Any) -> None:
        """Takes the options of argparse; a shortened flag is an unknown flag."""
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with the message and the command that prints the usage."""
        raise UsageError(f"{self.prog}: {message} (usage: `{self.prog} --help`)")
