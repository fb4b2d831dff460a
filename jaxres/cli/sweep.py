"""`jaxres sweep`: a run for each combination of values, a few at a time. It does not import jax.

Each run is `python -m jaxres.train` with a run directory of its own, so the same command goes on
with a sweep that was interrupted: runs that are done end at once, the others resume.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxres import config as configs
from jaxres.cli import runs
from jaxres.clock import Clock, SystemClock
from jaxres.config.argparser import Parser, local_path_argument
from jaxres.exit_codes import ExitCode, exit_name
from jaxres.faults import ConfigError, UsageError
from jaxres.host import signals
from jaxres.host.processes import start_command
from jaxres.supervisor.run_config import tell_repeated

POLL_SECONDS = 0.1
MAX_NAME = 190
"""Most letters of a name before its digest; run.name may have 200, a folder 255 bytes."""
FAILED = 1
"""Exit code if a run has failed."""


@dataclass
class SweepPoint:
    """One combination of values."""

    name: str
    overrides: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None


@dataclass
class Sweep:
    """The runs of a sweep."""

    config: Path
    points: list[SweepPoint]
    parallel: int
    env: Mapping[str, str]
    clock: Clock = field(default_factory=SystemClock)
    stop: signal.Signals | None = None
    """Newest signal that asked to stop."""
    received: list[signal.Signals] = field(default_factory=list)
    """Signals that were not passed on yet to the runs; a run gets each once."""

    def run(self) -> int:
        """Runs all points; returns the exit code."""
        handled = {signal.SIGINT, signal.SIGTERM}.intersection(signals.handled())
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            self._run_all()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.stop is not None:
            return ExitCode.STOPPED if self.stop == signal.SIGINT else ExitCode.PREEMPTED
        return ExitCode.DONE if all(point.code == 0 for point in self.points) else FAILED

    def _on_signal(self, number: int, _: Any) -> None:
        self.stop = signal.Signals(number)
        self.received.append(self.stop)  # A run that is being started has no process yet.

    def _run_all(self) -> None:
        waiting, running = list(self.points), list[SweepPoint]()
        while running or (waiting and self.stop is None):
            while waiting and len(running) < self.parallel and self.stop is None:
                running.append(self._start(waiting.pop(0)))
            self.clock.sleep(POLL_SECONDS)
            signals = [self.received.pop(0) for _ in list(self.received)]
            for point in list(running):
                assert point.process is not None
                for number in signals:
                    point.process.send_signal(number)
                point.code = point.process.poll()
                if point.code is not None:
                    running.remove(point)
                    _say(f"{point.name}: exit {exit_name(point.code)}")

    def _start(self, point: SweepPoint) -> SweepPoint:
        output = point.folder.with_name(f"{point.folder.name}.txt")
        _say(f"{point.name}: starts; its output is in {output}")
        command = [sys.executable, "-m", "jaxres.train", str(self.config), *point.overrides]
        command += [f"run.dir={point.folder}", f"run.name={point.name}"]
        point.process = start_command(command, output=output, env=self.env)
        return point


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs the command and returns its exit code."""
    parser = Parser(prog="jaxres sweep")
    parser.add_argument("config", metavar="CONFIG.yaml", type=local_path_argument)
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument("--grid", nargs="+", required=True, metavar="section.field=A,B")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--to", metavar="FOLDER", help="default: runs/sweep-CONFIG")
    try:
        options = parser.parse_intermixed_args(list(arguments))
    except SystemExit as end:
        return int(end.code or 0) and ExitCode.USAGE
    if options.parallel < 1:
        raise UsageError("--parallel must be at least 1")
    if "://" in (to := options.to or f"runs/sweep-{options.config.stem}"):
        raise UsageError(f"--to {to}: a sweep runs on this machine; give a folder of a disk")
    folder = Path(to).expanduser().absolute()
    tell_repeated(options.overrides)
    points = points_of(options.grid, options.overrides, folder)
    _check(options.config, points)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: the folder can't be made ({error.strerror}).") from error
    _say(f"{len(points)} runs in {folder}, {options.parallel} at a time")
    code = Sweep(options.config, points, options.parallel, env).run()
    _say("\n" + runs.rows_as_text(runs.read_rows(folder, clock=SystemClock())).rstrip())
    if code == FAILED:
        failed = [f"{p.name} ({exit_name(p.code or 0)})" for p in points if p.code]
        _say(f"failed: {', '.join(failed)}. The same command tries them again.")
    return code


def _check(config: Path, points: Sequence[SweepPoint]) -> None:
    """Loads the configs of all points. Raises UsageError if two are equal."""
    seen: dict[str, SweepPoint] = {}
    for point in points:
        loaded = configs.load(config, point.overrides).config
        same = seen.setdefault(configs.dump_yaml(loaded), point)
        if same is not point:
            names = same.name if same.name == point.name else f"{same.name}, {point.name}"
            raise UsageError(f"--grid: a combination is there twice: {names}")


def points_of(grid: Sequence[str], overrides: Sequence[str], folder: Path) -> list[SweepPoint]:
    """Returns the combinations of `section.field=A,B` arguments, each with a folder of its own.

    Raises:
      UsageError: an argument is not of this form, or names a key twice, or one of the sweep's own.
    """
    keys, choices = list[str](), list[list[str]]()
    for text in grid:
        key, equals, values = text.partition("=")
        if not equals or not key or not values or key in keys:
            raise UsageError(f"--grid {text}: give section.field=A,B, each key once")
        if key in ("run", "run.dir", "run.name"):
            raise UsageError(f"--grid {text}: the sweep itself sets run.dir and run.name")
        keys.append(key)
        choices.append(split_values(values))
    lasts = [key.rpartition(".")[2] for key in keys]
    short = lasts if len(set(lasts)) == len(lasts) else keys
    combinations = list(itertools.product(*choices))
    names = ["_".join(f"{k}-{v}" for k, v in zip(short, c, strict=True)) for c in combinations]
    return [
        SweepPoint(
            name if name.isprintable() and len(name) <= MAX_NAME else place,
            [*overrides, *(f"{k}={v}" for k, v in zip(keys, c, strict=True))],
            folder / place,
        )
        for name, place, c in zip(names, _places(names), combinations, strict=True)
    ]


def _places(names: Sequence[str]) -> list[str]:
    """Returns a folder name for each run; a digest shortens long names and separates equal ones."""
    plain = [re.sub(r"[^A-Za-z0-9._+-]", "-", name) for name in names]
    counts = Counter(place.lower() for place in plain)  # Some disks ignore upper case.
    digests = [
        hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:8] for name in names
    ]
    outputs = {f"{place.lower()}.txt" for place in plain}  # Files beside the folders.
    return [
        place
        if len(place) <= MAX_NAME and counts[place.lower()] == 1 and place.lower() not in outputs
        else f"{place[:MAX_NAME]}-{digest}"
        for place, digest in zip(plain, digests, strict=True)
    ]


def split_values(text: str) -> list[str]:
    """Splits at commas that are not in brackets, braces or quotes.

    >>> split_values("1e-3,[a, b],{x: 1, y: 2}")
    ['1e-3', '[a, b]', '{x: 1, y: 2}']
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
