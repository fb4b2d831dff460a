"""The `jaxres` command: dispatches to the subcommands; read-only ones run without jax."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxres.exit_codes import ExitCode

USAGE = """\
usage: jaxres COMMAND ...   (also: python -m jaxres COMMAND ...)

  train CONFIG.yaml|RUN_DIR [section.field=value ...]   start a run, or resume it
  launch local CONFIG.yaml|RUN_DIR ... --hosts N        the same with N workers on this machine;
      restarts them after a failure
  launch gce up CONFIG.yaml|gs://RUN ...                the same on GPU VMs, which it creates,
      replaces and deletes; status, logs, stop, down, init (`jaxres launch gce --help`)
  status RUN_DIR [--json] [--watch]                     progress, recent events, what to do next;
      exit 0: running, restarting or done; 1: down, the same command resumes it; 3: needs a person.
      --watch: checks for 3 s that it is alive, in case the clocks of two machines differ
  history RUN_DIR [--json]                              the metrics of every step, over all attempts
  history RUN_DIR --attempts [--json]                   why each attempt ended, and its progress
  checkpoints list RUN_DIR [--json]                     the committed steps
  checkpoints prune RUN_DIR [--dry-run] [--json]        deletes steps that checkpoint.keep does not
      [checkpoint.keep.last=2 ...]                      keep; --dry-run: shows which, and bytes
  checkpoints pin|unpin RUN_DIR --step N                keeps a step regardless of checkpoint.keep
  checkpoints digest RUN_DIR [--step N]                 the digest of a whole training state
  checkpoints verify RUN_DIR [--step N]                 reads every byte; exit 1 if one has changed
  checkpoints adopt RUN_DIR [--yes]                     rebuilds a lost or old log/ from the copies
                                                        in the checkpoints; --yes: does it
  checkpoints diff RUN_DIR [OTHER_RUN_DIR]              what differs between two states; exit 1 if
      [--step N] [--other-step M] [--json]              anything does
  checkpoints export RUN_DIR [--step N] [--out DIR]     the parameters as a safetensors folder, by
      [--names llama|jaxres] [--dtype float32|bfloat16] default in RUN_DIR/exports (docs/weights.md)
      [--max-shard-bytes N] [--json]
  checkpoints import RUN_DIR|FOLDER|FILE [--step N]     reads exports back, or any such folder:
      [--out DIR] [--json]                              valid? equal to the step? for which config?
  replay RUN_DIR --step N [--explain]                   recomputes a step from the nearest
      [section.field=value ...]                         checkpoint; --explain: the first
      non-finite number, by row, layer and source line
  data verify CONFIG.yaml|RUN_DIR                       reads every byte of the data; exit 1 if
      [section.field=value ...]                         one has changed, with file and block
  doctor CONFIG.yaml [section.field=value ...]          checks before a run: pass, warn or fail,
      [--devices N [--hosts H]]                         and what to do; also for N devices elsewhere

`jaxres train --help` lists every config field.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return ExitCode.DONE if args else ExitCode.USAGE
    if args[0] == "train":
        from jaxres.supervisor import signals

        signals.block()
        from jaxres.train import __main__ as train

        train.hard_exit(train.main(args[1:]))
    if args[0] == "replay":
        from jaxres.cli import replay

        return replay.main(args[1:])
    if args[0] == "doctor":
        from jaxres.cli import doctor

        return doctor.main(args[1:], env=os.environ)
    if args[0] == "launch":
        from jaxres.supervisor import signals

        signals.block()
        from jaxres.launch import __main__ as launch

        launch.hard_exit(launch.main(args[1:]))
    from jaxres.storage import gcs_client

    os.environ.update(gcs_client.library_environment(os.environ))
    if args[0] == "data":
        from jaxres.cli import data

        return data.main(args[1:])
    from jaxres.cli import checkpoints as checkpoints_cli

    return checkpoints_cli.main(args, usage=USAGE, env=os.environ)


if __name__ == "__main__":
    sys.exit(main())
