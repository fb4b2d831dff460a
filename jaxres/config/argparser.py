"""An argument parser that raises UsageError instead of exiting the process."""

from __future__ import annotations

import argparse
from typing import NoReturn

from jaxres.faults import UsageError


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are exceptions."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with the message and the command that prints the usage."""
        raise UsageError(f"{self.prog}: {message} (usage: `{self.prog} --help`)")
