"""The verbs: parses, calls, returns the exit code. Imports no jax for the verbs that only look."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxres.faults import Exit

USAGE = """\
usage: jaxres VERB ...   (also: python -m jaxres VERB ...)

  train CONFIG.yaml|RUN_DIR [section.field=value ...]   start a run, or go on with it
  launch local CONFIG.yaml|RUN_DIR ... --hosts N        the same with N workers on this machine; one
      that falls comes back by itself
  launch gce up CONFIG.yaml|gs://RUN ...                the same on GPU VMs, which it gets,
      replaces and deletes; status, logs, stop, down, init (`jaxres launch gce --help`)
  status RUN_DIR [--json] [--watch]                     how far it is, what happened, what is next;
      exit 0: running, restarting or done; 1: down, the same command goes on; 3: needs a person.
      --watch: looks for 3 s whether it lives, where the clocks of two machines may differ
  history RUN_DIR [--json]                              the one history over all attempts
  history RUN_DIR --attempts [--json]                   why each attempt ended, and what it gained
  checkpoints list RUN_DIR [--json]                     the steps that are committed
  checkpoints prune RUN_DIR [--dry-run] [--json]        drops steps that nothing in checkpoint.keep
      [checkpoint.keep.last=2 ...]                      names; --dry-run: shows which, and bytes
  checkpoints pin|unpin RUN_DIR --step N                keeps a step whatever checkpoint.keep says
  checkpoints digest RUN_DIR [--step N]                 one word for a whole training state
  checkpoints verify RUN_DIR [--step N]                 reads every byte; exit 1 if one has changed
  checkpoints diff RUN_DIR [OTHER_RUN_DIR]              what differs between two states; exit 1 if
      [--step N] [--other-step M] [--json]              anything does
  checkpoints export RUN_DIR [--step N] [--out DIR]     the parameters as a safetensors folder, by
      [--names llama|jaxres] [--dtype float32|bfloat16] default in RUN_DIR/exports (docs/export.md)
      [--max-shard-bytes N] [--json]
  checkpoints import RUN_DIR|FOLDER|FILE [--step N]     reads exports back, or any such folder:
      [--out DIR] [--json]                              whole? equal to the step? for which config?
  replay RUN_DIR --step N [--explain]                   one step again, from the nearest checkpoint:
      which rows and parameters; --explain: where the first number is not finite, by layer and line
  doctor CONFIG.yaml [section.field=value ...]          looks before a run: pass, warn or fail, with
      [--devices N [--hosts H]]                         what to do; for N devices that are not here

`jaxres train --help` lists every config field.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return Exit.DONE if words else Exit.USAGE
    if words[0] == "train":
        from jaxres.supervisor import signals

        signals.hold()
        from jaxres.train import __main__ as train

        train.leave(train.main(words[1:]))
    if words[0] == "replay":
        from jaxres.cli import replay

        return replay.main(words[1:])
    if words[0] == "doctor":
        from jaxres.cli import doctor

        return doctor.main(words[1:], env=os.environ)
    if words[0] == "launch":
        from jaxres.supervisor import signals

        signals.hold()
        from jaxres.launch import __main__ as launch

        launch.leave(launch.main(words[1:]))
    from jaxres.cli import checkpoints as checkpoints_cli
    from jaxres.storage import gcs_client

    os.environ.update(gcs_client.environment(os.environ))
    return checkpoints_cli.main(words, usage=USAGE, env=os.environ)


if __name__ == "__main__":
    sys.exit(main())
