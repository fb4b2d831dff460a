"""`jaxres chaos`: injects faults into short runs of a config; which promises held?

The runs are real: `launch local` in a temporary folder, real signals, real damage. The run
directory of the config is not touched.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxres import config as configs
from jaxres import faults
from jaxres.clock import Clock, SystemClock
from jaxres.config import Loaded, builtin_configs
from jaxres.config.argparser import Parser, local_path_argument, require_writable
from jaxres.config.errors import did_you_mean
from jaxres.exit_codes import ExitCode
from jaxres.faults import RunError, UsageError
from jaxres.operate.chaos import (
    emulated_bucket,
    emulated_vms,
    emulators,
    fake_gpus,
    job_devices,
    job_network,
    verdict,
)
from jaxres.operate.chaos import results as chaos_results
from jaxres.operate.chaos.faults import state as state_faults
from jaxres.operate.chaos.results import ChaosResult
from jaxres.operate.chaos.runs import FaultyRun
from jaxres.operate.chaos.scenarios import ALL, BY_NAME, DEFAULT, ChecklistKind, Scenario
from jaxres.operate.chaos.schedule import SAVE_EVERY, STEPS, PlannedRun, plan
from jaxres.operate.chaos.short_runs import Runner, Topology, report_failed, run_folder, shortened
from jaxres.operate.chaos.verdict import Broken, ChaosFacts, Outcome
from jaxres.operate.resume_verdict import RunFacts
from jaxres.secret_values import redact_words
from jaxres.train import kept_results
from jaxres.train.chaos_hooks import array_edit_hook
from jaxres.train.kept_results import versions_here

USAGE = (
    "jaxres chaos list\n"
    "       jaxres chaos run [CONFIG.yaml] [SCENARIO ...] [section.field=value ...] "
    "[--only SCENARIO,...] [--all] [--seed S] [--faults N] [--minutes M] [--hosts H] "
    "[--max-recovery-seconds R] [--json FILE] [--to FOLDER] [--keep]"
)
BROKEN = 1
"""Exit code if a promise did not hold, or if a fault did not happen."""
ORACLE = "oracle"
"""Name of the run without faults."""
DEFAULT_CONFIG = "quickstart"
MAX_FAULTS, MAX_HOSTS = 10_000, 64


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs the command; returns 0 if all promises held, 1 if not, 64 or 78 for bad input."""
    try:
        options = _parse(arguments)
        if options.verb == "list":
            sys.stdout.write(_list())
            return ExitCode.DONE
        loaded = configs.load(options.config, options.overrides)
        configs.require_trainer(loaded.config, "jaxres chaos")
        with run_folder(options.to, keep=options.keep, prefix="jaxres-chaos-") as folder:
            return Chaos(loaded, options, folder, env=env, clock=SystemClock()).run()
    except RunError as raised:
        error = faults.by_phase(raised, at_start=True)
        sys.stderr.write(faults.format_exit_message(error.exit_code, str(error)))
        return error.exit_code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="jaxres chaos", usage=USAGE)
    parser.add_argument("verb", choices=("list", "run"))
    parser.add_argument("words", nargs="*", metavar="[CONFIG] [SCENARIO ...] [key=value ...]")
    parser.add_argument("--only", metavar="SCENARIO,...")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--max-recovery-seconds", type=float)
    parser.add_argument("--json", type=local_path_argument, metavar="FILE")
    parser.add_argument("--to", metavar="FOLDER")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    for name, least, most in (
        ("seed", 0, 2**63),
        ("faults", 1, MAX_FAULTS),
        ("hosts", 1, MAX_HOSTS),
    ):
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            parser.error(f"--{name} {value}: expected {least} to {most:,}")
    for name in ("minutes", "max_recovery_seconds"):
        value = getattr(options, name)
        if value is not None and not (0 < value < math.inf):
            parser.error(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    if options.minutes is not None and options.faults is not None:
        parser.error("--minutes and --faults: give one of them")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: its folder does not exist")
    require_writable("--json", options.json)
    _sort_words(options)
    return options


def _sort_words(options: argparse.Namespace) -> None:
    """Sorts the words into the config, its overrides and scenarios.

    Raises:
      UsageError: a word is none of these.
    """
    options.overrides = [word for word in options.words if "=" in word]
    names = [word for word in options.words if word in BY_NAME]
    others = [w for w in options.words if w not in (*options.overrides, *names)]
    misspelt = [w for w in others if not _is_config(w) and did_you_mean(w, list(BY_NAME))]
    if len(others) > 1 or misspelt or (options.verb == "list" and options.words):
        hint = did_you_mean(others[-1], list(BY_NAME)) if others else ""
        shown = redact_words((others or options.words)[-1])
        raise UsageError(f"{shown!r}: not a scenario{hint}; `jaxres chaos list`")
    for name in (options.only or "").split(",") if options.only is not None else ():
        if name not in BY_NAME:
            hint = did_you_mean(name, list(BY_NAME))
            raise UsageError(f"--only {name!r}: no such scenario{hint}; see `jaxres chaos list`")
        names.append(name)
    options.config = Path(others[0] if others else DEFAULT_CONFIG)
    if names and options.all:
        raise UsageError("--all: give it or names of scenarios")
    options.are_named = bool(names)
    options.scenarios = tuple(dict.fromkeys(names)) or (tuple(BY_NAME) if options.all else DEFAULT)
    if any(word.startswith("run.dir=") for word in options.overrides):
        raise UsageError("run.dir: the runs have directories of their own; --to chooses where")


def _is_config(word: str) -> bool:
    return Path(word).exists() or word in builtin_configs.names()


def _list() -> str:
    """Returns a line for each scenario; the scenarios of the default schedule come first."""
    width = max(len(one.name) for one in ALL) + 2
    lines = {one.name: f"{one.name:<{width}}{one.injects}: {one.promise}\n" for one in ALL}
    default = "".join(lines[one.name] for one in ALL if one.is_default)
    others = "".join(lines[one.name] for one in ALL if not one.is_default)
    return f"In the default schedule:\n{default}\nBy name, or with --all:\n{others}"


class Chaos:
    """The runs of one command, their verdicts and its output."""

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
        extra = shortened(loaded.config, steps=STEPS, save_every=SAVE_EVERY, breaks=len(ALL))
        self._overrides = [*options.overrides, *extra]
        short = configs.load(options.config, self._overrides).config
        assert configs.digest(short) == configs.digest(loaded.config), "free keys only"
        self._runner = Runner(options.config, self._overrides, folder, SAVE_EVERY, env, clock)
        self._topology = Topology(options.hosts)
        self._started = clock.monotonic()
        self._own: dict[str, RunFacts] = {}
        """Scenario -> its run without faults, if it has its own."""

    def run(self) -> int:
        """Runs everything and prints the result; returns the exit code."""
        try:
            return self._run()
        finally:
            self._runner.stop()

    def _run(self) -> int:
        options = self._options
        names = self._applicable(options.scenarios, self._why_no_place)
        _say(
            f"{self._loaded.name}: seed {options.seed}, {STEPS} steps a run, a save every "
            f"{SAVE_EVERY}, {self._topology} worker(s); runs in {self._runner.folder}"
        )
        _say(_row("run", "fault", "after", "resumed at", "again", "recovery"))
        reference = self._runner.unbroken(ORACLE, self._topology)
        if reference.exit != ExitCode.DONE:
            return _report_oracle(reference)
        _say(_row(ORACLE, "-", "-", "-", "-", "-"))
        devices = job_devices.read(self._runner.run_dir(ORACLE))
        names = self._applicable(names, lambda one: job_devices.why_not(one, devices))
        count = len(names) if options.faults is None else options.faults
        count = MAX_FAULTS if options.minutes is not None else count
        runs = plan(names, seed=options.seed, faults=count, hosts=options.hosts)
        judged: list[tuple[ChaosFacts, tuple[Broken, ...]]] = []
        for planned in runs:
            if judged and self._is_time_over():
                break
            compared = self._compared_with(planned, reference)
            if compared.exit != ExitCode.DONE:
                return _report_oracle(compared)
            judged.append(self._judge(compared, planned))
        return self._report(judged)

    def _compared_with(self, planned: PlannedRun, reference: RunFacts) -> RunFacts:
        """Returns the run without faults that a run is compared with; it may have its own."""
        name = planned.faults[0].scenario
        if not BY_NAME[name].has_own_oracle:
            return reference
        if name not in self._own:
            extra = BY_NAME[name].settings
            self._own[name] = self._runner.unbroken(f"{ORACLE}-{name}", self._topology, extra=extra)
            _say(_row(ORACLE, name, "-", "-", "-", "-"))
        return self._own[name]

    def _why_no_place(self, scenario: Scenario) -> str:
        """Returns why this config can't have the runs of a scenario; empty: it can."""
        if scenario.is_emulated and (reason := emulators.why_not()):
            return reason
        if scenario.min_hosts > self._options.hosts:
            return f"needs --hosts {scenario.min_hosts} or more: a host is slow beside others"
        if scenario.has_fake_gpus:
            return fake_gpus.why_not(self._runner.env)
        if scenario.place == "bucket":
            return emulated_bucket.why_not(self._loaded.config)
        if scenario.place == "hosts":
            return job_network.why_not(self._options.hosts)
        if scenario.place == "vms":
            return emulated_vms.why_not(self._loaded.config)
        if array_edit_hook.TARGET in "".join(scenario.settings):
            return state_faults.why_not(self._loaded.config)
        return ""

    def _applicable(
        self, names: Sequence[str], why_not: Callable[[Scenario], str]
    ) -> tuple[str, ...]:
        """Returns the scenarios to use, and prints why the others are left out.

        Raises:
          UsageError: one that the command names is not applicable, or none is.
        """
        omitted = {name: reason for name in names if (reason := why_not(BY_NAME[name]))}
        if omitted and (self._options.are_named or len(omitted) == len(names)):
            name, reason = next(iter(omitted.items()))
            raise UsageError(f"{name}: not applicable: {reason}")
        for name, reason in omitted.items():
            _say(f"{name}: not applicable: {reason}")
        return tuple(name for name in names if name not in omitted)

    def _is_time_over(self) -> bool:
        minutes = self._options.minutes
        return minutes is not None and self._clock.monotonic() - self._started > 60 * minutes

    def _judge(
        self, reference: RunFacts, planned: PlannedRun
    ) -> tuple[ChaosFacts, tuple[Broken, ...]]:
        facts = FaultyRun(self._runner, planned, self._topology).execute()
        limit = self._options.max_recovery_seconds
        broken = verdict.judge(reference, facts, save_every=SAVE_EVERY, max_recovery_seconds=limit)
        _say("\n".join([*_table_rows(facts), *(f"  {b.promise}: {b.text}" for b in broken)]))
        return facts, broken

    def _report(self, judged: Sequence[tuple[ChaosFacts, tuple[Broken, ...]]]) -> int:
        options = self._options
        happened = [one for facts, _ in judged for one in verdict.outcomes(facts)]
        broken = sorted({b.promise for _, found in judged for b in found})
        is_good = verdict.is_good([found for _, found in judged])
        seconds = round(self._clock.monotonic() - self._started, 1)
        summary = "all promises held" if is_good else f"broken: {', '.join(broken)}"
        _say(f"\n{len(happened)} fault(s) in {len(judged)} run(s), {seconds} s: {summary}")
        for one in happened:
            if one.injection.fault.scenario == "region-loss":
                _say(f"region-loss: RPO {one.repeated} steps, RTO {_seconds(one)}")
        if not is_good and not (options.keep or options.to):
            _say("to keep the runs: --to FOLDER")
        before = chaos_results.read(self._loaded.config).kinds
        result = ChaosResult(
            config=self._loaded.name,
            trajectory=configs.digest(self._loaded.config),
            versions=versions_here(),
            seed=options.seed,
            hosts=options.hosts,
            steps=STEPS,
            save_every_steps=SAVE_EVERY,
            seconds=seconds,
            held=is_good,
            summary=f"{len(happened)} fault(s), {summary}",
            kinds=chaos_results.kinds_of(map(_kinds, judged), before),
            runs=tuple(run_fields(facts, found) for facts, found in judged),
        )
        _say(kept_results.kept(lambda: chaos_results.store(self._loaded.config, result)))
        if options.json is not None:
            kept_results.write(options.json, result.fields())
        return ExitCode.DONE if is_good else BROKEN


def _report_oracle(failed: RunFacts) -> int:
    return report_failed(failed, command="chaos", run="run without faults", otherwise=BROKEN)


def _kinds(
    judged: tuple[ChaosFacts, tuple[Broken, ...]],
) -> tuple[Sequence[ChecklistKind | None], bool]:
    facts, broken = judged
    scenarios = [BY_NAME[fault.scenario] for fault in facts.planned.faults]
    kinds: list[ChecklistKind | None] = [one.checklist_kind for one in scenarios]
    return kinds, not broken


def run_fields(facts: ChaosFacts, broken: Sequence[Broken]) -> dict[str, Any]:
    """Returns the fields of a run in the output of `--json`."""
    followed = {one.injection.fault: one for one in verdict.outcomes(facts)}
    injections = {one.fault: one for one in facts.injections}
    return {
        "name": facts.planned.name,
        "exit": facts.run.exit,
        "faults": [
            {
                **dataclasses.asdict(fault),
                "evidence": injections[fault].evidence if fault in injections else "",
                "recovery_seconds": one.injection.recovery_seconds if one else None,
                "resumed_at": one.resumed.start_step if one and one.resumed else None,
                "repeated_steps": one.repeated if one else None,
            }
            for fault in facts.planned.faults
            for one in (followed.get(fault),)
        ],
        "broken": [dataclasses.asdict(one) for one in broken],
    }


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _table_rows(facts: ChaosFacts) -> list[str]:
    """Returns a row for each planned fault of a run."""
    followed = {one.injection.fault: one for one in verdict.outcomes(facts)}
    rows: list[str] = []
    for number, fault in enumerate(facts.planned.faults):
        name = "" if number else facts.planned.name
        cells = [name, fault.scenario, f"step {fault.step}"]
        one = followed.get(fault)
        if one is None:
            rows.append(_row(*cells, "not injected", "-", "-"))
            continue
        start = "not resumed" if one.resumed is None else f"step {one.resumed.start_step}"
        again = "-" if one.repeated is None else str(one.repeated)
        rows.append(_row(*cells, start, again, _seconds(one)))
    return rows


def _seconds(one: Outcome) -> str:
    seconds = one.injection.recovery_seconds
    return "-" if seconds is None else f"{seconds:.1f} s"


def _row(*cells: str) -> str:
    widths = (10, 18, 10, 14, 7, 0)
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
