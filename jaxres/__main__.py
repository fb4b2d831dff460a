"""The `jaxres` command: dispatches to the subcommands; read-only ones run without jax."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from jaxres import __version__, faults
from jaxres.exit_codes import SIGNAL_BASE, ExitCode, exit_name
from jaxres.faults import RunError, UsageError
from jaxres.secret_values import redact_words
from jaxres.telemetry import stdio

USAGE = """\
usage: jaxres COMMAND ...   (also: python -m jaxres COMMAND ...)

  train CONFIG.yaml|RUN_DIR [section.field=value ...]   start a run, or resume it
  launch local CONFIG.yaml|RUN_DIR ... --hosts N        the same with N workers on this machine;
      restarts them after a failure
  launch gce up CONFIG.yaml|gs://RUN ...                the same on GPU VMs, which it creates,
      replaces and deletes; status, logs, stop, down, init (`jaxres launch gce --help`)
  launch slurm|k8s|sky CONFIG.yaml ...                  the same as a job of Slurm, Kubernetes or
      SkyPilot (`jaxres launch slurm --help`)
  status RUN_DIR ... [--json] [--watch]                 progress, recent events, what to do next;
      exit 0: running, restarting or done; 1: down, the same command resumes it; 3: needs a person.
      --watch: checks for 3 s (in a bucket 15 s) that it is alive, whatever its time stamps
  history RUN_DIR [--json]                              the metrics of every step, over all attempts
  history RUN_DIR --attempts [--json]                   why each attempt ended, and its progress
  report RUN_DIR [--out FILE.html] [--json]             where the time went (goodput), and what each
      [--compare RUN_DIR]                               interruption has cost; in a page with
                                                        charts, next to another run
  hosts RUN_DIR [--json]                                hosts that the run leaves out, since their
      [--forget HOST | --exclude HOST [--reason TEXT]]  hardware has failed, and slow ones
  runs [FOLDER] [--tag TAG] [--json]                    a line for each run in a folder
  compare RUN_DIR RUN_DIR ... [--json]                  configs, losses at equal steps, and speed
  branch RUN_DIR --to DIR [--step N|best]               a new run that begins with a step of this
      [section.field=value ...]                         one, with another learning rate, for example
  sweep CONFIG.yaml --grid section.field=A,B ...        a run for each combination; the same command
      [--parallel N] [--to FOLDER]                      goes on with an interrupted sweep
  sample RUN_DIR|FOLDER [--prompt TEXT] [--tokens N]    text with which the model continues a prompt
      [--temperature T] [--samples N] [--step N|best]
  evaluate RUN_DIR|FOLDER [--set NAME] [--json]         losses of the validation sets, or scores of
      [--task FILE.jsonl] [--limit N] [--step N|best]   tasks: multiple choice, perplexity
  checkpoints list RUN_DIR [--json]                     the committed steps
  checkpoints prune RUN_DIR [--dry-run] [--json]        deletes steps that checkpoint.keep does not
      [checkpoint.keep.last=2 ...]                      keep; --dry-run: shows which, and bytes
  checkpoints pin|unpin RUN_DIR --step N                keeps a step regardless of checkpoint.keep
  checkpoints digest RUN_DIR [--step N]                 the digest of a whole training state
  checkpoints verify RUN_DIR [--step N]                 reads every byte; exit 1 if one has changed
  checkpoints adopt RUN_DIR [--yes]                     rebuilds a lost or old log/ from the copies
                                                        in the checkpoints; --yes: does it
  checkpoints replicate RUN_DIR TO [--follow] [--json]  copies the committed steps and the log to a
      [--max-mb-per-second N]                           second place, verified, to resume from there
  checkpoints diff RUN_DIR [OTHER_RUN_DIR]              what differs between two states; exit 1 if
      [--step N] [--other-step M] [--json]              anything does
  checkpoints export RUN_DIR [--step N|best]            the parameters as a safetensors folder, by
      [--out DIR] [--names huggingface|jaxres] [--json] default in RUN_DIR/exports (docs/weights.md)
      [--dtype float32|bfloat16] [--max-shard-bytes N]
  checkpoints import RUN_DIR|FOLDER|FILE [--step N]     reads exports back, or any such folder:
      [--out DIR] [--json]                              valid? equal to the step? for which config?
  replay RUN_DIR --step N [--explain]                   recomputes a step from the nearest
      [section.field=value ...]                         checkpoint; --explain: the first
      non-finite number, by row, layer and source line
  data build|show|inspect CONFIG.yaml|RUN_DIR           tokenises once; prints rows as the model
      [section.field=value ...]                         gets them; counts documents and tokens
  data verify CONFIG.yaml|RUN_DIR                       reads every byte of the data; exit 1 if
      [section.field=value ...]                         one has changed, with file and block
  doctor CONFIG.yaml [section.field=value ...]          checks before a run: pass, warn or fail,
      [--devices N [--hosts H]] [--all] [--json]        and what to do; also for N devices elsewhere
      [--send-test-alert]                               (docs/prove.md)
  resume-check CONFIG.yaml [section.field=value ...]    a short unbroken run against broken ones, in
      [--steps N] [--breaks K] [--repeat R] [--seed S]  a folder of their own: equal bit for bit?
      [--topology HxD ...] [--to FOLDER] [--keep] [--json]
  chaos list                                            faults that it can inject into a run
  chaos run [CONFIG.yaml] [SCENARIO ...] [--seed S]     injects them into short runs of a config, in
      [--faults N] [--minutes M] [--only A,B] ...       a folder of their own; exit 0: all promises
      [--max-recovery-seconds R] [--json FILE]          held (docs/prove.md)
  plan [CONFIG.yaml] [--gpus N] [--from RUN_DIR] ...    failures, save interval, goodput and cost of
      [--json]                                          a job, of each measure (docs/planning.md)

CONFIG.yaml may be the name of a built-in config, such as quickstart.
`jaxres train --help` lists every config field, `jaxres --version` the versions.
"""


TRACEBACK = "JAXRES_TRACEBACK"
"""Environment variable: any value makes a command print the traceback of an unexpected error."""
OWN_MODULE = {
    **dict.fromkeys(("evaluate", "plan", "replay", "sample"), False),
    **dict.fromkeys(("branch", "chaos", "data", "doctor", "resume-check", "sweep"), True),
}
"""Commands that are a module of that name; whether it takes the environment."""
USING_JAX = ("doctor", "evaluate", "replay", "sample")
"""Those of jaxres/jax_cli; all others are in jaxres/cli."""
VERBS = (
    *("train", "launch", "status", "history", "report", "hosts", "runs", "compare", "checkpoints"),
    *OWN_MODULE,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    An error of a command that does not train is one message, never a traceback.
    """
    args = list(sys.argv[1:] if arguments is None else arguments)
    stdio.open_closed()
    if args[:1] == ["train"] or args[:1] == ["launch"]:
        _train_or_launch(args)
    try:
        with stdio.escaping():
            code = _run(args)
            sys.stdout.flush()
        return code
    except RunError as end:
        stdio.eprint(faults.format_exit_message(end.exit_code, str(end)))
        return end.exit_code
    except BrokenPipeError:  # The reader of the output has exited, as in `jaxres history | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit.
        return SIGNAL_BASE + signal.SIGPIPE
    except KeyboardInterrupt:
        return SIGNAL_BASE + signal.SIGINT
    except Exception as error:  # noqa: BLE001 - the edge of every command that does not train.
        return _report_bug(args, error)


def _report_bug(args: Sequence[str], error: Exception) -> int:
    from jaxres.config.errors import one_line
    from jaxres.storage import files
    from jaxres.supervisor.jax_settings import backend_error
    from jaxres.train.checks.oom_advice import is_oom

    if os.environ.get(TRACEBACK):
        traceback.print_exc()
    if (failure := files.untyped_failure(error)) is not None:
        stdio.eprint(faults.format_exit_message(failure.exit_code, str(failure)))
        return failure.exit_code
    if is_oom(error):
        text = one_line(f"jaxres {args[0]}: not enough memory; ask for less at once ({error})")
        stdio.eprint(faults.format_exit_message(ExitCode.OUT_OF_MEMORY, text))
        return ExitCode.OUT_OF_MEMORY
    end = backend_error(error, os.environ)
    if end is not None:
        stdio.eprint(faults.format_exit_message(end.exit_code, str(end)))
        return end.exit_code
    what = one_line(f"jaxres {' '.join(args[:2])}: {type(error).__name__}: {error}")
    hint = f"This is a bug in jaxres; set {TRACEBACK}=1 for the traceback"
    stdio.eprint(f"{what}. {hint} (exit {exit_name(ExitCode.BUG)})\n")
    return ExitCode.BUG


def _train_or_launch(args: Sequence[str]) -> NoReturn:
    from jaxres.host import signals

    signals.block()  # Before all other imports: a signal during them waits for `main`.
    from jaxres.supervisor.attempt_runner import hard_exit

    if args[0] == "train":
        from jaxres.train import __main__ as train

        main = functools.partial(train.main, is_command=True)
    else:
        from jaxres.launch.__main__ import main
    stdio.install_safe_stdio(escapes="--inline" not in args)  # There custom code prints as well.
    hard_exit(main(args[1:]))


def _run(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return ExitCode.DONE if args else ExitCode.USAGE
    verb = args[0]
    if verb == "--version":
        names = ("jax", "flax", "orbax-checkpoint")
        others = [f"{name} {importlib.metadata.version(name)}" for name in names]
        python = f"Python {platform.python_version()}"
        sys.stdout.write(f"{', '.join([f'jaxres {__version__}', *others, python])}\n")
        return ExitCode.DONE
    if verb not in VERBS:
        from jaxres.config.errors import did_you_mean

        hint, known = did_you_mean(verb, VERBS), ", ".join(VERBS)
        raise UsageError(f"{redact_words(verb)!r}: unknown command{hint} (commands: {known})")
    from jaxres.storage import gcs_client, home

    home.ensure(os.environ)
    os.environ.update(gcs_client.library_environment(os.environ))
    if verb in ("runs", "compare"):
        from jaxres.cli import runs

        return runs.main(args)
    if verb in USING_JAX:
        from jaxres.supervisor import jax_settings

        jax_settings.check(os.environ)
    if verb in OWN_MODULE:
        folder = "jaxres.jax_cli" if verb in USING_JAX else "jaxres.cli"
        command = importlib.import_module(f"{folder}.{verb.replace('-', '_')}")
        return command.main(args[1:], **({"env": os.environ} if OWN_MODULE[verb] else {}))
    from jaxres.cli.checkpoints import command as checkpoints_cli

    return checkpoints_cli.main(args, usage=USAGE, env=os.environ)


if __name__ == "__main__":
    sys.exit(main())
