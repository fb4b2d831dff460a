"""The launcher: `python -m jaxres.launch local|gce|slurm|k8s|sky ...`; no jax."""

from __future__ import annotations

from jaxres.host import signals

if __name__ == "__main__":
    signals.block()  # First of all: a signal during the other imports waits for `main`.

import os
import sys
from collections.abc import Sequence

from jaxres import config as configs
from jaxres.exit_codes import ExitCode
from jaxres.faults import UsageError
from jaxres.storage import gcs_client, home
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.attempt_runner import hard_exit
from jaxres.telemetry import stdio


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if any(argument in ("-h", "--help") for argument in arguments):
        from jaxres.launch import local
        from jaxres.launch.gce import command as gce
        from jaxres.launch.k8s import command as k8s
        from jaxres.launch.sky import command as sky
        from jaxres.launch.slurm import command as slurm

        short = {"slurm": slurm.USAGE, "k8s": k8s.USAGE, "sky": sky.USAGE}
        if arguments[0] in short:  # No key of a config is about them.
            keys = "The keys of a config: `python -m jaxres.train --help`"
            sys.stdout.write(f"{short[arguments[0]]}\n{keys}\n")
            return ExitCode.DONE
        usage = gce.USAGE if arguments[0] == "gce" else local.USAGE
        sys.stdout.write(usage + "\n" + configs.describe() + "\n")
        return ExitCode.DONE
    os.environ.update(gcs_client.library_environment(os.environ))
    return attempt_runner.run_with_exit_code(lambda: _launch(arguments))


def _launch(arguments: Sequence[str]) -> int:
    home.ensure(os.environ)
    if arguments[:1] == ["agent"]:  # Internal: only the startup script of a VM runs it.
        from jaxres.launch.gce.vm import agent as vm_agent

        return vm_agent.main(arguments[1:], env=os.environ)
    # An agent needs none of them.
    from jaxres.launch import local
    from jaxres.launch.gce import command as gce
    from jaxres.launch.k8s import command as k8s
    from jaxres.launch.sky import command as sky
    from jaxres.launch.slurm import command as slurm
    from jaxres.launch.slurm import job as slurm_job

    if arguments[:1] == ["gce"]:
        return gce.main(arguments[1:], env=os.environ)
    if arguments[:1] == ["slurm"]:
        for name in slurm_job.misleading_variables(os.environ, arguments[1:]):
            del os.environ[name]
        return slurm.main(arguments[1:], env=os.environ)
    if arguments[:1] == ["k8s"]:
        return k8s.main(arguments[1:], env=os.environ)
    if arguments[:1] == ["sky"]:
        return sky.main(arguments[1:], env=os.environ)
    if arguments[:1] != ["local"]:
        given = f"got {arguments[0]}" if arguments else "got nothing"
        raise UsageError(
            f"expected where to launch: local, gce, slurm, k8s or sky ({given}; usage: `python -m "
            "jaxres.launch --help`)"
        )
    return local.launch(local.parse(arguments[1:]), env=os.environ)


if __name__ == "__main__":
    stdio.install_safe_stdio(escapes=True)
    hard_exit(main(sys.argv[1:]))
