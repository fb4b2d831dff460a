"""`jaxres data verify CONFIG.yaml|RUN_DIR`: verifies every byte of a data set. Needs no jax."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxres import config as configs
from jaxres import faults
from jaxres.data.verify import DataReport, verify_data
from jaxres.exit_codes import ExitCode
from jaxres.faults import RunError, UsageError
from jaxres.runlog import run_log
from jaxres.runlog.run_log import RunHistory
from jaxres.storage.path import is_remote
from jaxres.supervisor.run_config import parse_target, resolve_run

USAGE = "usage: jaxres data verify CONFIG.yaml|RUN_DIR [section.field=value ...]"
DAMAGED = 1
"""Exit code of `data verify` if the data are damaged, absent, or not those of the run."""


def main(arguments: Sequence[str]) -> int:
    """Prints what was verified, or each problem; returns the exit code."""
    try:
        if arguments[:1] != ["verify"]:
            if arguments[:1] in (["--help"], ["-h"]):
                sys.stdout.write(f"{USAGE}\n")
                return ExitCode.DONE
            given = " ".join(arguments[:1]) or "nothing"
            raise UsageError(f"jaxres data: expected verify, got {given} ({USAGE})")
        target, overrides = parse_target(arguments[1:], command="jaxres data")
        if is_remote(target) or target.is_dir():
            loaded, run_dir = resolve_run(target, overrides)
            history = run_log.fold(run_log.read_records(run_dir.log))
        else:
            loaded, history = configs.load(target, overrides), RunHistory()
        problems, text = as_text(verify_data(loaded.config.data), history)
    except RunError as error:
        sys.stderr.write(faults.format_exit_message(error.exit_code, str(error)))
        return error.exit_code
    sys.stdout.write(text)
    return DAMAGED if problems else ExitCode.DONE


def as_text(report: DataReport, history: RunHistory) -> tuple[int, str]:
    """Returns the number of problems, and the lines to print."""
    problems = list(report.problems)
    if history.newest is not None and report.fingerprint not in (None, history.dataset):
        problems.append(
            f"the run was started with the fingerprint {history.dataset}: these are other data"
        )
    if problems:
        return len(problems), "".join(f"not valid: {problem}\n" for problem in problems)
    return 0, f"valid: {report.verified}\n"
