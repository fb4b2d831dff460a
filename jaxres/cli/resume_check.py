"""`jaxres resume-check`: an unbroken short run of a config against runs that are broken.

The runs are real: `launch local` in a temporary folder, real signals. The run directory of the
config is not touched. The result is kept for `jaxres doctor` (resume_results.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from jaxres import config as configs
from jaxres import faults
from jaxres.checkpoint import diff
from jaxres.clock import Clock, SystemClock
from jaxres.config import Loaded
from jaxres.config.argparser import Parser, local_path_argument
from jaxres.exit_codes import ExitCode, exit_name
from jaxres.faults import RunError, UsageError
from jaxres.operate import resume_verdict
from jaxres.operate.chaos.short_runs import (
    HANG_SECONDS,
    Runner,
    Topology,
    report_failed,
    run_folder,
    shortened,
)
from jaxres.operate.resume_verdict import NAMES, Break, RunComparison, RunFacts, Verdict
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit
from jaxres.storage.path import RunPath
from jaxres.supervisor.run_config import tell_repeated
from jaxres.train import kept_results, resume_results
from jaxres.train.resume_results import (
    BreakResult,
    FirstDifference,
    ResumeCheckResult,
    RunResult,
    UnequalElement,
)

USAGE = (
    "jaxres resume-check CONFIG.yaml [section.field=value ...] [--steps N] [--breaks K] "
    "[--repeat R] [--seed S] [--topology HxD ...] [--to FOLDER] [--keep] [--json]"
)
DIFFERENT = 1
"""Exit code if a broken run differs, or if no run could be broken."""
UNBROKEN = "unbroken"
"""Name of the run with which the others are compared."""
SAVES = 4
"""Saves of the short run."""
MAX_STEPS, MAX_BREAKS = 100_000, 100


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs the check; returns 0 if all runs are equal bit for bit, 1 if not, 78 for bad input."""
    try:
        options = _parse(arguments)
        tell_repeated(options.overrides)
        loaded = configs.load(options.config, options.overrides)
        configs.require_trainer(loaded.config, "jaxres resume-check")
        with run_folder(options.to, keep=options.keep, prefix="jaxres-resume-check-") as folder:
            check = ResumeCheck(loaded, options, folder, env=env, clock=SystemClock())
            return check.run()
    except RunError as raised:
        error = faults.by_phase(raised, at_start=True)
        sys.stderr.write(faults.format_exit_message(error.exit_code, str(error)))
        return error.exit_code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="jaxres resume-check", usage=USAGE)
    parser.add_argument("config", type=local_path_argument, metavar="CONFIG")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--breaks", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--topology", type=_topology, action="append", default=[], metavar="HxD")
    parser.add_argument("--to", metavar="FOLDER")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    for name, least, most in (("breaks", 1, MAX_BREAKS), ("repeat", 1, 1000), ("seed", 0, 2**63)):
        if not least <= getattr(options, name) <= most:
            parser.error(f"--{name} {getattr(options, name)}: expected {least} to {most:,}")
    if not options.breaks < options.steps <= MAX_STEPS:
        parser.error(
            f"--steps {options.steps}: expected more than --breaks ({options.breaks}), "
            f"and at most {MAX_STEPS:,}"
        )
    if any(word.startswith("run.dir=") for word in options.overrides):
        raise UsageError("run.dir: the check has run directories of its own; --to chooses where")
    return options


def _topology(text: str) -> Topology:
    """Parses H or HxD."""
    hosts, is_given, devices = text.partition("x")
    numbers = [hosts, devices] if is_given else [hosts]
    if not all(n.isascii() and n.isdigit() and 1 <= int(n) <= 100_000 for n in numbers):
        raise argparse.ArgumentTypeError(f"{text}: expected hosts x devices of each, as in 2x4")
    return Topology(*map(int, numbers))


class ResumeCheck:
    """One check: its runs, its verdict and its output."""

    def __init__(
        self,
        loaded: Loaded,
        options: argparse.Namespace,
        folder: Path,
        *,
        env: Mapping[str, str],
        clock: Clock,
    ) -> None:
        self._loaded, self._options, self._clock = loaded, options, clock
        self._save_every = max(1, options.steps // SAVES)
        self._extra = shortened(
            loaded.config,
            steps=options.steps,
            save_every=self._save_every,
            breaks=options.breaks,
        )
        overrides = [*options.overrides, *self._extra]
        self._short = configs.load(options.config, overrides).config
        _require_same_trajectory(loaded, self._short)
        self._runner = Runner(options.config, overrides, folder, self._save_every, env, clock)
        self._started = clock.monotonic()

    def run(self) -> int:
        """Runs everything, prints and stores the result; returns the exit code."""
        try:
            return self._run()
        finally:
            self._runner.stop()

    def _run(self) -> int:
        options = self._options
        self._say(
            f"{self._loaded.name}: {options.steps} steps of {self._loaded.config.train.steps:,}, "
            f"a save every {self._save_every}; runs in {self._runner.folder}"
        )
        self._say(_row("run", "broken after", "resumed at", "result"))
        reference = self._runner.unbroken(UNBROKEN)
        if reference.exit != ExitCode.DONE:
            return report_failed(
                reference, command="resume-check", run="unbroken run", otherwise=DIFFERENT
            )
        self._say(_row(UNBROKEN, "-", "-", _size_text(reference)))
        compared = [self._broken(reference, f"broken-{n + 1}", n) for n in range(options.repeat)]
        again, rows_differ = None, False
        if any(one.mismatch is not None or one.run.exit for one in compared):
            again = self._compare(reference, self._runner.unbroken("unbroken-again"))
            rows_differ = not again.is_equal and self._runner.rows_differ()
        verdict = resume_verdict.decide(reference, again, compared, rows_differ=rows_differ)
        elsewhere = [] if verdict.level != "bitwise" else self._topologies(reference)
        return self._report(reference, verdict, [*compared, *elsewhere])

    def _broken(self, reference: RunFacts, name: str, round_: int) -> RunComparison:
        options = self._options
        breaks = resume_verdict.plan_breaks(
            steps=options.steps,
            breaks=options.breaks,
            seed=options.seed,
            round_=round_,
            first=max(1, min(self._save_every + 1, options.steps - options.breaks)),
        )
        return self._compare(reference, self._runner.broken(name, breaks))

    def _topologies(self, reference: RunFacts) -> list[RunComparison]:
        """Resumes a run after a notice in its middle on each other topology."""
        planned = (Break("notice", max(1, self._options.steps // 2)),)
        return [
            self._compare(reference, self._runner.broken(f"on-{topology}", planned, then=topology))
            for topology in self._options.topology
        ]

    def _compare(self, reference: RunFacts, run: RunFacts) -> RunComparison:
        found = resume_verdict.compare(reference, run)
        self._say("\n".join(_table_rows(found)))
        is_done = found.is_equal and not self._options.keep and self._options.to is None
        if is_done:  # Its checkpoints may be large.
            shutil.rmtree(str(self._runner.run_dir(run.name).root), ignore_errors=True)
        return found

    def _say(self, text: str) -> None:
        if not self._options.json:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def _report(
        self, reference: RunFacts, verdict: Verdict, compared: Sequence[RunComparison]
    ) -> int:
        culprit = verdict.culprit or next((one for one in compared if not one.is_equal), None)
        levels = {
            one.run.topology: resume_verdict.topology_level(reference, one)
            for one in compared
            if one.run.topology
        }
        cause = verdict.cause
        if not cause and culprit is not None:
            cause = resume_verdict.cause_of_resume(culprit)
        result = ResumeCheckResult(
            config=self._loaded.name,
            trajectory=configs.digest(self._loaded.config),
            guarantee=verdict.level,
            summary=_summary(verdict, levels),
            cause=cause,
            topologies=levels,
            first_difference=self._first_difference(culprit),
            runs=tuple(map(_run_result, compared)),
            versions=kept_results.versions_here(),
            devices=_devices(self._runner.run_dir(reference.name)),
            steps=self._options.steps,
            seed=self._options.seed,
            overridden=tuple(self._extra),
            seconds=round(self._clock.monotonic() - self._started, 1),
            date=_today(self._clock),
        )
        stored = kept_results.kept(lambda: resume_results.store(self._loaded.config, result))
        if self._options.json:
            sys.stdout.write(json.dumps(result.fields()) + "\n")
        else:
            self._print(result, stored)
        is_good = verdict.level == "bitwise" and all(one.is_equal for one in compared)
        return ExitCode.DONE if is_good else DIFFERENT

    def _print(self, result: ResumeCheckResult, stored: str) -> None:
        self._say(f"\n{result.summary}")
        if (found := result.first_difference) is not None:
            self._say(
                f"first difference, {found.run}: step {found.step}, {found.what}: "
                f"{found.unbroken} unbroken, {found.broken} here"
            )
            nowhere = "in no committed state of both runs does an array differ"
            self._say(nowhere if found.place is None else str(found.place))
        if result.cause:
            self._say(f"likely cause: {result.cause}")
        self._say(f"overridden, trajectory unchanged: {' '.join(result.overridden)}")
        self._say(f"to find a hang fast: deadlines.hook_seconds={HANG_SECONDS:g}")
        self._say(f"{result.seconds} s on {result.devices}; {stored}")
        if self._options.keep or self._options.to is not None:
            self._say(f"the runs are in {self._runner.folder}")

    def _first_difference(self, culprit: RunComparison | None) -> FirstDifference | None:
        if culprit is None or culprit.mismatch is None:
            return None
        found = culprit.mismatch
        return FirstDifference(
            run=culprit.run.name,
            step=found.step,
            what=found.what,
            unbroken=found.a,
            broken=found.b,
            attempt=found.attempt,
            place=self._locate(culprit),
        )

    def _locate(self, culprit: RunComparison) -> UnequalElement | None:
        """Returns the first array that differs in the first committed state that does."""
        a, b = (_committed(self._runner.run_dir(n)) for n in (UNBROKEN, culprit.run.name))
        for step in sorted(a.keys() & b.keys()):
            found = [array for array in diff.diff(a[step], b[step]).arrays if array.difference]
            found.sort(key=lambda array: not array.path.startswith("params/"))
            if found and (where := found[0].difference) is not None:
                return UnequalElement(
                    step=step,
                    array=found[0].path,
                    block=where.first_block,
                    element=where.first,
                    bits=where.first_bits,
                    num_arrays=len(found),
                )
        return None


def _committed(run_dir: RunDir) -> dict[int, tuple[RunPath, Commit]]:
    """Returns step -> directory and record of every committed step."""
    history = run_log.fold(run_log.read_records(run_dir.log))
    return {commit.step: (run_dir.root / commit.path, commit) for commit in history.committed}


def _require_same_trajectory(loaded: Loaded, short: configs.RunConfig) -> None:
    changes = configs.diff(loaded.config, short)
    assert configs.digest(loaded.config) == configs.digest(short), changes


def _devices(run_dir: RunDir) -> str:
    starts = run_log.fold(run_log.read_records(run_dir.log)).starts
    return run_log.start_of(starts[-1]).computation.get("devices", "") if starts else ""


def _today(clock: Clock) -> str:
    return datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y-%m-%d")


def _table_rows(found: RunComparison) -> list[str]:
    """Returns the rows of a run in the table: one for each break, the last with the result."""
    happened = {b: resumed for b, _, resumed in resume_verdict.breaks_that_happened(found.run)}
    cells: list[tuple[str, str]] = []
    for planned in found.run.breaks:
        resumed = happened.get(planned)
        where = f" on {found.run.topology}" if found.run.topology else ""
        at = "did not happen" if resumed is None else f"step {resumed.start_step}{where}"
        cells.append((f"step {planned.step} by {NAMES[planned.kind]}", at))
    cells = cells or [("-", "-")]
    names = [found.run.name] + [""] * (len(cells) - 1)
    results = [""] * (len(cells) - 1) + [_result_text(found)]
    return [
        _row(name, *pair, result) for name, pair, result in zip(names, cells, results, strict=True)
    ]


def _row(name: str, broken: str, resumed: str, result: str) -> str:
    return f"{name:<16}{broken:<22}{resumed:<18}{result}".rstrip()


def _result_text(found: RunComparison) -> str:
    if found.mismatch is not None:
        return f"differs at step {found.mismatch.step} ({found.mismatch.what})"
    if found.run.exit != ExitCode.DONE:
        return f"ended with {exit_name(found.run.exit)}"
    if found.unproven:
        return "not all breaks happened"
    return f"equal: {_size_text(found.run)}"


def _size_text(run: RunFacts) -> str:
    return f"{len(run.rows)} computed steps, {len(run.digests)} states"


def _summary(verdict: Verdict, levels: Mapping[str, str]) -> str:
    if verdict.level == "not tested":
        return "guarantee: not tested; no verdict"
    if verdict.level == "different":
        return "guarantee: none; a resumed run is not reproducible"
    elsewhere = "".join(f"; on {topology}: {level}" for topology, level in levels.items())
    return f"guarantee: bitwise here; a resumed run equals an unbroken one{elsewhere}"


def _run_result(found: RunComparison) -> RunResult:
    happened = {
        planned: (ended, resumed)
        for planned, ended, resumed in resume_verdict.breaks_that_happened(found.run)
    }
    breaks: list[BreakResult] = []
    for planned in found.run.breaks:
        ended, resumed = happened.get(planned, (None, None))
        breaks.append(
            BreakResult(
                kind=planned.kind,
                step=planned.step,
                attempt=None if ended is None else ended.attempt,
                exit=None if ended is None else ended.exit,
                resumed_at=None if resumed is None else resumed.start_step,
            )
        )
    return RunResult(
        name=found.run.name,
        equal=found.is_equal,
        exit=found.run.exit,
        topology=found.run.topology or None,
        breaks=tuple(breaks),
    )
