"""The worker process of a program; no jax.

The supervisor starts it as `python -m jaxres.program RUN_DIR --attempt N ...`, in place of the
worker of the trainer and with the same arguments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxres import config as configs
from jaxres.cluster.host_group import HostRank
from jaxres.host.processes import kill_me_with_parent, name_process
from jaxres.program.worker import HostAttempt, run_program
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.paths import RunDir
from jaxres.telemetry import stdio
from jaxres.telemetry.heartbeat import exit_message, write_now
from jaxres.train.worker import exit_on_crash, options_of, process_name


def main(arguments: Sequence[str]) -> int:
    """Runs the worker process under a supervisor."""
    options = options_of(arguments)
    kill_me_with_parent(options.parent)
    name_process(process_name(options.host))
    run_dir = RunDir(options.run_dir)
    member = HostRank(options.host, options.num_hosts, options.coordinator)

    def record(result: AttemptResult) -> None:
        write_now(options.status_fd, exit_message(result))

    exit_on_crash(run_dir, options.attempt, member, record=record)
    recorded = run_dir.attempt(options.attempt) / "config.yaml"
    config = configs.load_recorded(recorded).config
    assert config.program is not None, recorded
    attempt = HostAttempt(run_dir, options.attempt, member, config, config.program)
    result = run_program(attempt, report_fd=options.status_fd, env=os.environ)
    record(result)
    return result.code


if __name__ == "__main__":
    stdio.install_safe_stdio(escapes=False)
    code = main(sys.argv[1:])
    stdio.flush()
    os._exit(code)
