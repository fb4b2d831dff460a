"""Words on the command line: a wrong one is a typed end, not argparse's own."""

from __future__ import annotations

import argparse
from typing import NoReturn

from jaxres.faults import UsageError


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        """Raises what is wrong, with the usage below it."""
        raise UsageError(f"{message}\n{self.format_usage()}")
