"""`jaxres runs` and `jaxres compare`: runs side by side. They do not import jax."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from jaxres import config as configs
from jaxres.cli import status
from jaxres.clock import Clock, SystemClock
from jaxres.config.argparser import Parser
from jaxres.config.errors import show
from jaxres.exit_codes import ExitCode
from jaxres.faults import RunError, UsageError
from jaxres.operate.report import number_text
from jaxres.runlog import evaluations, metrics, metrics_columns, run_log
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.metrics_columns import MetricsColumns
from jaxres.runlog.paths import RunDir
from jaxres.secret_values import redact
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote, parse_path
from jaxres.supervisor import run_config

DEPTH = 4
"""Levels of folders below the given one in which run directories are looked for."""
MOST_SHOWN = 1e9
"""A larger loss is drawn as this one: plotext computes with differences, and labels need room."""
NUM_STEPS = 10
"""Steps at which losses are compared."""


@dataclass(frozen=True)
class RunRow:
    """One run in the list."""

    run: str
    """Its directory."""
    name: str | None
    tags: tuple[str, ...]
    state: str
    """As `jaxres status` says it; "unreadable" with the reason in `problem`."""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    heldout_loss: float | None = None
    """Newest loss of the first validation set."""
    tokens_per_second: float | None = None
    """Over the time of the surviving steps."""
    train_seconds: float | None = None
    """Time of the surviving steps."""
    last_time: float | None = None
    """Time of the last record in its log, in seconds since 1970."""
    problem: str | None = None


def main(arguments: Sequence[str], *, clock: Clock | None = None) -> int:
    """Runs `runs` or `compare`, the first argument, and returns its exit code."""
    verb, *words = arguments
    parser = Parser(prog=f"jaxres {verb}")
    parser.add_argument("--json", action="store_true")
    if verb == "runs":
        parser.add_argument("folder", nargs="?", default="runs", metavar="FOLDER")
        parser.add_argument("--tag", action="append", default=[], metavar="TAG")
    else:
        parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
        parser.add_argument("--plot", action="store_true")
    try:
        options = parser.parse_args(words)
    except SystemExit as end:
        return int(end.code or 0) and ExitCode.USAGE
    if verb == "runs":
        rows = read_rows(_path(options.folder), clock=clock or SystemClock())
        rows = [row for row in rows if set(options.tag) <= set(row.tags)]
        text = rows_as_json(rows) if options.json else rows_as_text(rows)
    else:
        if len(options.runs) < 2:
            raise UsageError("compare takes two run directories or more")
        run_dirs = [RunDir(_path(text)) for text in options.runs]
        compared = compare(run_dirs)
        text = json.dumps(compared) + "\n" if options.json else compared_as_text(compared)
        if options.plot and not options.json:
            text += "\n" + plot([_read(run_dir)[1] for run_dir in run_dirs])
    sys.stdout.write(text)
    return ExitCode.DONE


def _path(text: str) -> RunPath:
    try:
        return parse_path(os.path.expanduser(text))
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from error


def read_rows(folder: RunPath, *, clock: Clock) -> list[RunRow]:
    """Returns a row for each run directory in a folder and below it, the newest last.

    Raises:
      UsageError: the folder does not exist.
    """
    if not is_remote(folder) and not folder.is_dir():
        raise UsageError(f"{folder}: no such folder. Give the folder that has your runs.")
    rows = [_row(RunDir(root), clock=clock) for root in run_dirs(folder)]
    return sorted(rows, key=lambda row: (row.last_time or 0.0, row.run))


def run_dirs(folder: RunPath, *, depth: int = DEPTH) -> list[RunPath]:
    """Returns the run directories in a folder (itself, or up to `depth` levels below it)."""
    names = files.list_names(folder)
    if "config.yaml" in names and ("log" in names or is_remote(folder)):
        return [folder]
    if depth == 0:
        return []
    return [
        root
        for name in names
        if not name.startswith(".") and files.is_dir(folder / name)
        for root in run_dirs(folder / name, depth=depth - 1)
    ]


def _row(run_dir: RunDir, *, clock: Clock) -> RunRow:
    where = str(run_dir.root)
    try:
        records = run_log.read_records(run_dir.log)
        config = run_config.newest_config(run_dir)
        history = run_log.fold(records)
        state = status.read_status(run_dir, history, clock=clock)
        lines = metrics_columns.read_history(run_dir, history)
    except RunError as error:
        return RunRow(where, None, (), "unreadable", problem=str(error))
    seconds = float(lines.step_seconds.sum())
    losses = {} if state.evaluation is None else state.evaluation["losses"]
    return RunRow(
        run=where,
        name=config.run.name,
        tags=config.run.tags,
        state=state.outlook.state,
        step=None if state.newest is None else state.newest.step,
        steps=state.steps or config.last_step,
        loss=None if state.newest is None else state.newest.loss,
        heldout_loss=next(iter(losses.values()), None),
        tokens_per_second=_tokens(lines) / seconds if seconds else None,
        train_seconds=seconds or None,
        last_time=records[-1].time if records else None,
    )


def _tokens(lines: MetricsColumns) -> float:
    """Returns the tokens of these steps; for the first step an estimate from the others."""
    if len(lines) < 2:
        return float(lines.tokens.sum())
    between = int(lines.tokens[-1] - lines.tokens[0])
    return between * len(lines) / (len(lines) - 1)


def rows_as_json(rows: Sequence[RunRow]) -> str:
    """Returns one JSON object a run and line."""
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def rows_as_text(rows: Sequence[RunRow]) -> str:
    """Returns a table with a line for each run, or says that there are none."""
    if not rows:
        return "no runs here\n"
    head = ("run", "state", "step", "loss", "held-out", "tokens/s", "trained", "last record")
    table: list[Sequence[str]] = [head]
    for row in rows:
        name = row.run if row.name is None else f"{row.run} ({row.name})"
        tags = "".join(f" #{tag}" for tag in row.tags)
        last = "" if row.steps is None else f" of {row.steps:,}"
        step = "-" if row.step is None else f"{row.step:,}{last}"
        cells = (_number(row.loss), _number(row.heldout_loss))
        rate = "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        trained = "-" if row.train_seconds is None else number_text.duration(row.train_seconds)
        table.append((name + tags, row.state, step, *cells, rate, trained, _time(row.last_time)))
    problems = "".join(f"{row.run}: {row.problem}\n" for row in rows if row.problem)
    return _table(table) + problems


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "".join(f"{line}\n" for line in lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def compare(run_dirs: Sequence[RunDir]) -> dict[str, Any]:
    """Returns the differences between runs: config, losses at equal steps, speed.

    Raises:
      UsageError: a directory holds no run.
    """
    read = [_read(run_dir) for run_dir in run_dirs]
    by_step = [{line.step: line for line in lines} for _, lines, _ in read]
    names = [str(run_dir.root) for run_dir in run_dirs]
    losses = [
        {"step": step, "loss": [steps[step].loss for steps in by_step]}
        for step in spread(sorted(set.intersection(*map(set, by_step))))
    ]
    seconds = [sum(line.step_seconds for line in lines) for _, lines, _ in read]
    return {
        "runs": names,
        "config": differences([config for config, _, _ in read]),
        "losses": losses,
        "heldout": _heldout([losses for _, _, losses in read]),
        "last_step": [lines[-1].step if lines else None for _, lines, _ in read],
        "last_loss": [lines[-1].loss if lines else None for _, lines, _ in read],
        "tokens_per_second": [
            _tokens(metrics_columns.of_lines(lines)) / time if time else None
            for (_, lines, _), time in zip(read, seconds, strict=True)
        ],
        "train_seconds": seconds,
    }


def _read(
    run_dir: RunDir,
) -> tuple[configs.RunConfig, list[MetricsLine], dict[int, Mapping[str, float]]]:
    """Returns config, metrics, and step -> loss of each validation set of a run."""
    records = run_log.read_records(run_dir.log)
    if not records:
        raise UsageError(f"{run_dir.root}: no run here (no log/). Give a run directory.")
    lines = metrics.read_history(run_dir, run_log.fold(records))
    found = evaluations.read(run_dir, {line.attempt for line in lines})
    losses = {
        line.step: found[line.attempt, line.step].get("losses", {})
        for line in lines
        if (line.attempt, line.step) in found
    }
    return run_config.newest_config(run_dir), lines, losses


def differences(config: Sequence[configs.RunConfig]) -> list[dict[str, Any]]:
    """Returns the keys in which configs differ, with the value of each; trajectory keys first."""
    first, *others = config
    changed = {key for other in others for key, _, _ in configs.diff(first, other)}
    flat = [_flat(one.model_dump(mode="json")) for one in config]
    keys = [key for one in flat for key in one if key != "run.dir"]
    rows = [
        {
            "key": key,
            "values": [redact(one.get(key), key.rpartition(".")[2]) for one in flat],
            "trajectory": key in changed,
        }
        for key in dict.fromkeys(keys)
        if len({json.dumps(one.get(key), sort_keys=True) for one in flat}) > 1
    ]
    return sorted(rows, key=lambda row: not row["trajectory"])


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def spread(steps: Sequence[int], *, count: int = NUM_STEPS) -> list[int]:
    """Returns at most `count` of the steps, evenly spread, with the last one.

    >>> spread(range(1, 101), count=4)
    [25, 50, 75, 100]
    """
    if len(steps) <= count:
        return list(steps)
    return [steps[(index * len(steps)) // count - 1] for index in range(1, count + 1)]


def _heldout(runs: Sequence[Mapping[int, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Returns the losses of each validation set at the steps at which all runs have them."""
    rows = []
    for name in dict.fromkeys(name for run in runs for losses in run.values() for name in losses):
        steps = [{step for step, losses in run.items() if name in losses} for run in runs]
        for step in spread(sorted(set.intersection(*steps))):
            losses = [run[step][name] for run in runs]
            rows.append({"set": name, "step": step, "loss": losses})
    return rows


def plot(runs: Sequence[Sequence[MetricsLine]], *, width: int = 76, height: int = 18) -> str:
    """Returns the training losses of all runs as a chart of text."""
    import plotext  # Slow to import.

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    for number, lines in enumerate(runs, start=1):
        points = [
            (line.step, max(-MOST_SHOWN, min(loss, MOST_SHOWN)))
            for line in lines
            if (loss := line.loss) is not None and math.isfinite(loss)
        ]
        if points:
            steps, losses = zip(*points, strict=True)
            marker = "braille" if number == 1 else str(number)[-1]
            plotext.plot(steps, losses, marker=marker, label=f"[{number}]")
    plotext.title("training loss over steps")
    return plotext.uncolorize(plotext.build()) + "\n"


def compared_as_text(compared: Mapping[str, Any]) -> str:
    """Returns tables of the differences, the losses and the speed."""
    names = [f"[{number}]" for number in range(1, len(compared["runs"]) + 1)]
    texts = [f"{name} {run}\n" for name, run in zip(names, compared["runs"], strict=True)]
    rows = [
        (row["key"] + ("" if row["trajectory"] else " (free)"), *map(show, row["values"]))
        for row in compared["config"]
    ]
    texts.append("\n" + (_table([("config", *names), *rows]) if rows else "configs are equal\n"))
    losses = [(f"step {row['step']:,}", *map(_number, row["loss"])) for row in compared["losses"]]
    texts.append("\n" + _table([("training loss", *names), *losses]))
    if not losses:
        texts.append("no step in common\n")
    heldout = [
        (f"{row['set']} at step {row['step']:,}", *map(_number, row["loss"]))
        for row in compared["heldout"]
    ]
    if heldout:
        texts.append("\n" + _table([("held-out loss", *names), *heldout]))
    speed = ["-" if rate is None else f"{rate:,.0f}" for rate in compared["tokens_per_second"]]
    last = [
        "-" if step is None else f"{_number(loss)} at {step:,}"
        for step, loss in zip(compared["last_step"], compared["last_loss"], strict=True)
    ]
    times = map(number_text.duration, compared["train_seconds"])
    rest = [("last loss", *last), ("tokens/s", *speed), ("trained", *times)]
    return "".join(texts) + "\n" + _table([("", *names), *rest])
