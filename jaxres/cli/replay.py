"""`jaxres replay RUN_DIR --step N [--explain]`: one step again, from the nearest checkpoint.

Nothing is written. What a step computes follows from the state, the rows and the config alone, so a
step that was masked, or that ended the run, can be looked at as long as an older one is committed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxres import config as configs
from jaxres import data, faults
from jaxres.config.argparser import Parser
from jaxres.data import Batch
from jaxres.faults import ConfigError, Exit, TypedEnd, UsageError
from jaxres.runlog import metrics, run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Line
from jaxres.storage import files
from jaxres.storage.path import place

USAGE = "jaxres replay RUN_DIR --step N [--explain]"


def main(words: Sequence[str]) -> int:
    """Replays the step and prints what came of it."""
    try:
        parser = Parser(prog="jaxres replay", usage=USAGE)
        parser.add_argument("run_dir", type=place, metavar="RUN_DIR")
        parser.add_argument("--step", type=int, required=True)
        parser.add_argument("--explain", action="store_true")
        options = parser.parse_args(words)
        replay = Replay(RunDir(options.run_dir), step=options.step)
        for line in replay.lines(explain=options.explain):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except TypedEnd as end:
        sys.stderr.write(faults.message(end.exit, str(end)))
        return end.exit
    return Exit.DONE


def nearest(line: Line, *, step: int, run_dir: RunDir) -> Commit | None:
    """Returns the newest committed step before a step; None: the run's beginning.

    Raises:
      ConfigError: there is none, and the beginning is not in the config.
    """
    found = [commit for commit in line.committed if commit.step < step]
    if not found and line.init is not None:
        raise ConfigError(
            f"{run_dir.root}: no step before {step} is committed, and the run began with other "
            "weights (init_from). Choose a step after the first commit (jaxres checkpoints list)."
        )
    return found[-1] if found else None


@dataclass
class Replay:
    """A run's step, to be computed again."""

    run_dir: RunDir
    step: int

    def lines(self, *, explain: bool) -> Any:
        """Yields what there is to tell, as it is found."""
        if self.step < 1 or not files.exists(self.run_dir.config):
            raise UsageError(f"{self.run_dir.root}: no run there, or no step {self.step}.")
        line = run_log.fold(run_log.read_records(self.run_dir.log))
        commit = nearest(line, step=self.step, run_dir=self.run_dir)
        told = [row for row in metrics.read_history(self.run_dir, line) if row.step == self.step]
        if not told:
            raise ConfigError(
                f"{self.run_dir.root}: the run's history has no step {self.step} (jaxres history)."
            )
        from jaxres.train import replay_step  # jax is needed from here on.

        config = configs.load_recorded(self.run_dir.config, ()).config
        found = replay_step.compute(
            config, self.run_dir, line, commit, step=self.step, explain=explain
        )
        yield f"step {self.step}, again from {f'step {commit.step}' if commit else 'the beginning'}"
        yield from _compared(found.measured, told[0], found.batch, config.guards.spikes)
        yield from found.explained


def _compared(measured: Any, told: Any, batch: Batch, spikes: Any) -> list[str]:
    """Returns what was computed, held against what the run has recorded."""
    same = "as recorded" if _same(measured.loss, told.loss) else f"recorded: {told.loss}"
    lines = [f"loss {measured.loss:.6g} ({same}), gradient norm {measured.grad_norm:.6g}"]
    is_same_batch = data.sample_digest(batch.ids) == told.samples
    if not is_same_batch:
        lines.append("these are not the rows that the run had at that step")
    if not measured.applied:
        why = "" if measured.bad_rows or measured.bad_params else " for its norm"
        lines.append(f"its update was not applied{why} (score {measured.spike_score:.1f})")
    lines += [
        f"row {row}: sample {int(batch.ids[row])}: loss not finite" for row in measured.bad_rows
    ]
    lines += [f"gradient of {name}: not finite" for name in measured.bad_params]
    return lines


def _same(one: float, other: float | None) -> bool:
    return other == one or (other is None and json.dumps(one) in ("NaN", "Infinity", "-Infinity"))
