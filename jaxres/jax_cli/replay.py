"""`jaxres replay RUN_DIR --step N [--explain]`: recomputes one step from the nearest checkpoint.

Writes nothing. The state, the rows and the config determine the result of a step, so a step that
was masked or that ended the run can be inspected while an older step is committed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxres import data, faults
from jaxres.config.argparser import Parser, path_argument
from jaxres.data import Batch
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, RunError, UsageError
from jaxres.runlog import metrics, run_log, skip_causes
from jaxres.runlog.event_log import read_events
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, RunHistory
from jaxres.runlog.skip_causes import SkipCause
from jaxres.storage import files
from jaxres.storage.path import is_remote
from jaxres.supervisor.run_config import resolve_run, tell_repeated

if TYPE_CHECKING:
    from jaxres.engine.step import StepMetrics  # jax, which a bad argument must not wait for.

USAGE = "jaxres replay RUN_DIR --step N [--explain] [section.field=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Replays the step and prints the result."""
    try:
        parser = Parser(prog="jaxres replay", usage=USAGE)
        parser.add_argument("run_dir", type=path_argument, metavar="RUN_DIR")
        parser.add_argument("overrides", nargs="*")
        parser.add_argument("--step", type=int, required=True)
        parser.add_argument("--explain", action="store_true")
        options = parser.parse_intermixed_args(arguments)
        tell_repeated(options.overrides)
        replay = StepReplay(RunDir(options.run_dir), step=options.step, overrides=options.overrides)
        for line in replay.lines(explain=options.explain):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except RunError as raised:
        error = faults.by_phase(raised, at_start=True)
        sys.stderr.write(faults.format_exit_message(error.exit_code, str(error)))
        return error.exit_code
    return ExitCode.DONE


def nearest(history: RunHistory, *, step: int, run_dir: RunDir) -> Commit | None:
    """Returns the newest commit before a step; None: replay starts from the initial state.

    Raises:
      ConfigError: there is none, and the run was initialized from other weights.
    """
    older = [commit for commit in history.committed if commit.step < step]
    if not older and history.init is not None:
        raise ConfigError(
            f"{run_dir.root}: no step before {step} is committed, and the run started from other "
            "weights (init_from). Choose a step after the first commit (jaxres checkpoints list)."
        )
    return older[-1] if older else None


@dataclass
class StepReplay:
    """Recomputes a step of a run."""

    run_dir: RunDir
    step: int
    overrides: Sequence[str] = ()
    """Free keys to change, such as data.source.path if the data have moved."""

    def lines(self, *, explain: bool) -> Any:
        """Yields the output lines as they are computed."""
        if self.step < 1:
            raise UsageError(f"--step {self.step}: the first step of a run is 1")
        root = self.run_dir.root
        if not ((is_remote(root) or root.is_dir()) and files.exists(self.run_dir.config)):
            raise UsageError(f"{root}: no run here (no config.yaml). Give a run directory.")
        history = run_log.fold(run_log.read_records(self.run_dir.log))
        commit = nearest(history, step=self.step, run_dir=self.run_dir)
        recorded = [
            row for row in metrics.read_history(self.run_dir, history) if row.step == self.step
        ]
        if not recorded:
            raise ConfigError(
                f"{self.run_dir.root}: the run's history has no step {self.step} (jaxres history)."
            )
        from jaxres.train import replay_step  # jax is needed from here on.

        config = resolve_run(self.run_dir.root, self.overrides)[0].config
        replayed = replay_step.replay_step(
            config, self.run_dir, history, commit, step=self.step, explain=explain
        )
        origin = f"step {commit.step}" if commit else "the initial state"
        yield f"step {self.step}, recomputed from {origin}"
        recorded_cause = None
        if recorded[0].skipped:
            events = read_events(self.run_dir.events(recorded[0].attempt, 0))
            recorded_cause = skip_causes.of_events(events).get(self.step)
        yield from _compare(replayed.measured, recorded[0], replayed.batch, recorded_cause)
        yield from replayed.explained


def _compare(
    measured: StepMetrics, recorded: MetricsLine, batch: Batch, cause: SkipCause | None
) -> list[str]:
    """Returns the lines that compare the recomputed step with the recorded one, and its cause."""
    same = "as recorded" if _same(measured.loss, recorded.loss) else f"recorded: {recorded.loss}"
    lines = [f"loss {measured.loss:.6g} ({same}), gradient norm {measured.grad_norm:.6g}"]
    is_same_batch = data.sample_digest(batch.ids) == recorded.samples
    if not is_same_batch:
        lines.append("the rows differ from those of the run at this step")
    lines += skip_lines(
        measured.skip_cause,
        cause,
        is_skipped=recorded.skipped,
        spike_score=measured.spike_score,
    )
    lines += [
        f"row {row}: sample {int(batch.ids[row])}: loss not finite" for row in measured.bad_rows
    ]
    lines += [f"gradient of {name}: not finite" for name in measured.bad_params]
    return lines


def skip_lines(
    computed: SkipCause | None, recorded: SkipCause | None, *, is_skipped: bool, spike_score: float
) -> list[str]:
    """Returns the lines about a skipped update.

    Args:
      computed: the cause; None: the update of the recomputed step is applied.
      recorded: the cause in the events of the run; None: not recorded.
      is_skipped: whether the run has skipped the update.
      spike_score: deviations by which the gradient norm exceeds the usual.
    """
    lines = []
    if computed is not None:
        why = skip_causes.text(computed)
        lines.append(f"its update was skipped ({why}, score {spike_score:.1f})")
    if is_skipped and recorded != computed:
        lines.append(f"recorded: its update was skipped ({skip_causes.text(recorded)})")
    elif computed is not None and not is_skipped:
        lines.append("recorded: its update was applied")
    return lines


def _same(loss: float, recorded: float | None) -> bool:
    return recorded == loss or (
        recorded is None and json.dumps(loss) in ("NaN", "Infinity", "-Infinity")
    )
