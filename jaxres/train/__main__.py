"""The door: `python -m jaxres.train CONFIG.yaml|RUN_DIR [section.field=value ...]`; no jax.

Runs one worker behind a supervisor that answers signals at once and turns the worker's end into the
exit code. `--inline` runs the worker in this process: same codes, no deadlines.
"""

from __future__ import annotations

from jaxres.supervise import signals

if __name__ == "__main__":
    signals.hold()  # First of all: a signal during the other imports waits for `main`.

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxres import config as configs
from jaxres import screen
from jaxres.beat import Leaving
from jaxres.faults import Exit, UsageError
from jaxres.hosts import ALONE
from jaxres.supervise import opening
from jaxres.supervise.opening import Opened, leave
from jaxres.supervise.supervisor import Ended
from jaxres.train import memory

USAGE = """\
usage: python -m jaxres.train CONFIG.yaml [section.field=value ...]   start a run, or go on with it
       python -m jaxres.train RUN_DIR [section.field=value ...]       go on with a recorded run

The same command starts a run and resumes it, also after kill -9, from the newest committed step.
Ctrl-C or `touch RUN_DIR/stop`: save and stop (76); SIGTERM: save and stop (75); a second one ends
at once. `touch RUN_DIR/save`: one extra checkpoint. `kill -USR1`: stacks of all threads.
--inline: train in this very process, for debuggers and notebooks; no deadlines.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if any(word in ("-h", "--help") for word in arguments):
        sys.stdout.write(USAGE + "\n" + configs.describe() + "\n")
        return Exit.DONE
    return opening.answered(lambda: _train(*_parse(arguments)))


def _parse(arguments: Sequence[str]) -> tuple[Path, list[str], bool]:
    inline = "--inline" in arguments
    arguments = [word for word in arguments if word != "--inline"]
    words = [word for word in arguments if "=" not in word]
    overrides = [word for word in arguments if "=" in word]
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise UsageError(f"{unknown[0]}: unknown flag\n{USAGE}")
    if len(words) != 1:
        given = "nothing" if not words else " ".join(words)
        raise UsageError(f"expected one config file or run directory, got {given}\n{USAGE}")
    return Path(words[0]), overrides, inline


def _train(target: Path, overrides: Sequence[str], inline: bool) -> int:
    if inline:
        threads = len(os.sched_getaffinity(0))
        return opening.attempt(target, overrides, run=_inline, env=os.environ, threads=threads)
    run = functools.partial(opening.behind_a_door, env=os.environ, advise=memory.host_advice)
    return opening.attempt(target, overrides, run=run, env=os.environ)


def _inline(opened: Opened) -> Ended:
    """Trains in this process, for debuggers and notebooks."""
    run_dir, log, claim = opened.run_dir, opened.log, opened.claim
    os.environ["NPROC"] = str(claim.threads)
    from jaxres.train import worker
    from jaxres.train.requests import Requests

    with Requests(alone=True) as requests:
        worker.catch_bugs(
            run_dir,
            claim.attempt,
            ALONE,
            tell=lambda leaving: opening.put_down(log, leaving),
            say=screen.tell,
        )
        early = "before the first finished step"
        requests.before_early_end(
            lambda exit: opening.put_down(log, Leaving(exit, early, committed=False))
        )
        leaving = worker.work(opened.config, run_dir, log, claim, requests=requests)
    on_record = leaving.exit != Exit.FENCED
    said = leaving.exit != Exit.DONE
    return Ended(leaving.exit, leaving.reason, leaving.committed, on_record, to_be_said=said)


if __name__ == "__main__":
    screen.never_fail()
    leave(main(sys.argv[1:]))
