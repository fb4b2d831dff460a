"""Is Young's and Daly's save interval the best one, in real runs with real kills?

    python -m tools.experiments.save_interval

Time is CPU time of the training processes, so that other jobs on the machine change little. Exits 1
if the measured useful share at Daly's interval is not above that at a quarter and at four times it,
or if a simulation finds another multiple to be the best.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.experiments import save_interval_simulation as simulation
from tools.experiments.save_interval_simulation import MULTIPLES, SaveCosts
from tools.experiments.training_process import ROOT, TrainingProcess, committed_steps, write_result

FOLDER = ROOT / "experiments" / "save_interval"
CONFIG = FOLDER / "run.yaml"
MTBF_SECONDS = 6.0
"""CPU seconds of training between kills; start-up does not count, it is the same for all."""
KILLS = 5
SEED = 0
CALIBRATIONS = 2
STEP_FOLDER = re.compile(r"\d+-\d+")


@dataclass
class Setting:
    """One run directory with its way to save, and its figures over all attempts."""

    name: str
    when: tuple[str, ...]
    run_dir: Path
    asked_steps: int | None = None
    """Steps between saves, where saves go by steps."""
    saves: int = 0
    steps: list[int] = field(default_factory=list)
    """Steps finished after the first of each attempt, whether or not they were committed."""
    committed: list[int] = field(default_factory=list)
    """Of these, the steps that were committed when the kill came."""
    seconds: list[float] = field(default_factory=list)
    """CPU time of each attempt, from its first step to the kill."""
    wall_seconds: list[float] = field(default_factory=list)

    def train_and_kill(self, gap: float) -> None:
        """Trains for `gap` CPU seconds from the first step, then sends SIGKILL."""
        cache = self.run_dir.parent / "cache"
        caches = (f"data.cache_dir={cache}", f"compilation.cache_dir={cache / 'xla'}")
        process = TrainingProcess(CONFIG, run_dir=self.run_dir, overrides=(*self.when, *caches))
        process.wait_step(0)
        began, wall_began = process.cpu_seconds(), time.monotonic()
        found = self._folders()
        before, seconds = len(found), 0.0
        while seconds < gap:
            time.sleep(0.01)
            found |= self._folders()
            seconds = process.cpu_seconds() - began
        process.kill()
        steps, newest = process.steps(), max([0, *committed_steps(self.run_dir)])
        self.steps.append(steps[-1] - steps[0])
        self.committed.append(max(0, newest - steps[0]))
        self.seconds.append(seconds)
        self.wall_seconds.append(time.monotonic() - wall_began)
        self.saves += len(found) - before
        print(f"{self.name}: {gap=:.1f} {steps[0]}-{steps[-1]}, committed {newest}", flush=True)

    def _folders(self) -> set[str]:
        folder = self.run_dir / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        return {name for name in names if STEP_FOLDER.fullmatch(name)}


def main() -> int:
    """Calibrates, trains all settings in turns, simulates, and writes results/results.json."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="save-interval-") as name:
        costs, step_seconds = _calibrate(Path(name))
        settings = _settings(Path(name), costs=costs, step_seconds=step_seconds)
        chance = random.Random(SEED)
        for _ in range(KILLS):
            gap = chance.expovariate(1 / MTBF_SECONDS)
            for setting in settings:
                setting.train_and_kill(gap)
    result = _result(settings, costs=costs, step_seconds=step_seconds)
    result["seconds"] = round(time.monotonic() - began)
    write_result(FOLDER / "results" / "results.json", result)
    print(json.dumps(result, indent=2))
    return 0 if result["holds"] else 1


def _calibrate(folder: Path) -> tuple[SaveCosts, float]:
    """Measures the cost of a save: runs without saves and with one after another, in turns."""
    without = Setting("without", (), folder / "calibrate-without")
    always = Setting("always", ("checkpoint.when.kind=continuous",), folder / "calibrate-always")
    for _ in range(CALIBRATIONS):
        without.train_and_kill(MTBF_SECONDS)
        always.train_and_kill(MTBF_SECONDS)
    step_seconds = sum(without.seconds) / sum(without.steps)
    lost = sum(always.seconds) - sum(always.steps) * step_seconds
    write_seconds = sum(always.seconds) / always.saves
    stall_seconds = min(max(lost / always.saves, step_seconds), write_seconds)
    print(f"a save: {stall_seconds=:.3f} {write_seconds=:.3f} {step_seconds=:.4f}", flush=True)
    return SaveCosts(stall_seconds, write_seconds), step_seconds


def _settings(folder: Path, *, costs: SaveCosts, step_seconds: float) -> list[Setting]:
    best = simulation.daly(costs, mtbf_seconds=MTBF_SECONDS)
    found = []
    for multiple in MULTIPLES:
        # Of an interval, the stall is not spent on steps.
        steps = max(1, round((multiple * best - costs.stall_seconds) / step_seconds))
        when = (f"checkpoint.save_every_steps={steps}",)
        found.append(Setting(f"{multiple:g}", when, folder / f"times-{multiple:g}", steps))
    auto = (
        "checkpoint.when.kind=auto",
        f"checkpoint.when.mtbf_hours={MTBF_SECONDS / 3600}",
        "checkpoint.when.max_overhead=1",
    )
    return [*found, Setting("auto", auto, folder / "auto")]


def _result(settings: list[Setting], *, costs: SaveCosts, step_seconds: float) -> dict[str, Any]:
    rows = {row.name: _row(row, costs=costs, step_seconds=step_seconds) for row in settings}
    simulated = simulation.table(costs, mtbf_seconds=MTBF_SECONDS)
    best = max(map("{:g}".format, MULTIPLES), key=lambda name: simulated["daly"][name])
    share = {name: row["useful_share"] for name, row in rows.items()}
    return {
        "claim": "Daly's interval loses less time than a quarter of it and than four times it",
        "holds": best == "1" and share["1"] > max(share["0.25"], share["4"]),
        "mtbf_cpu_seconds": MTBF_SECONDS,
        "gaps_cpu_seconds": [round(gap, 2) for gap in settings[0].seconds],
        "costs_cpu_seconds": {
            "stall": round(costs.stall_seconds, 3),
            "write": round(costs.write_seconds, 3),
            "step": round(step_seconds, 4),
        },
        "measured": rows,
        "simulated_with_the_measured_costs": simulated,
        "simulated_5_minutes_12_hours": simulation.table(
            simulation.TEXTBOOK, mtbf_seconds=simulation.TEXTBOOK_MTBF_SECONDS
        ),
    }


def _row(setting: Setting, *, costs: SaveCosts, step_seconds: float) -> dict[str, Any]:
    """Returns the measured results of a setting and the share simulated under the same kills."""
    seconds, saves = sum(setting.seconds), max(1, setting.saves)
    interval = seconds / saves
    if setting.asked_steps is not None:
        interval = setting.asked_steps * step_seconds + costs.stall_seconds
    expected = simulation.useful_share(setting.seconds, interval=interval, costs=costs)
    return {
        "every_steps": setting.asked_steps,
        "steps_between_saves": round(sum(setting.steps) / saves, 1),
        "saves": setting.saves,
        "lost_to_saves": round(1 - sum(setting.steps) * step_seconds / seconds, 3),
        "lost_to_kills": round(
            (sum(setting.steps) - sum(setting.committed)) * step_seconds / seconds, 3
        ),
        "useful_share": round(sum(setting.committed) * step_seconds / seconds, 3),
        "simulated_same_kills": round(expected, 3),
        "wall_seconds": round(sum(setting.wall_seconds), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
