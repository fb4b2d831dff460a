"""Resume benchmark: 100 steps, SIGKILL at step 56, resumed and compared bit for bit.

    python -m tools.experiments.resume_at_step_56

Exits 1 if a resumed run differs from the unbroken run in one bit.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.experiments.training_process import (
    ROOT,
    TrainingProcess,
    committed_steps,
    jaxres,
    write_result,
)

FOLDER = ROOT / "experiments" / "resume_at_step_56"
CONFIG = FOLDER / "run.yaml"
STEPS = 100
KILL_STEP = 56
SAVE_STEP = 50
SEEDS = (0, 1, 2)
MAX_DELAY_SECONDS = {"at step 56": 0.1, "during a save": 0.15}
"""The kill comes a random part of this after the step is reported, or after the save has begun."""
SAVE_EVERY_STEPS = {"at step 56": 50, "during a save": 25}
TRIES = 5
"""How often a kill during a save is tried, until it comes before the commit."""
NOT_COMPARED = ("attempt", "step_seconds", "busy_seconds", "usual_step_seconds")
"""Facts of the history that depend on the clock."""


@dataclass(frozen=True)
class Resumed:
    """One run that was killed and resumed, compared with the unbroken run of the same seed."""

    seed: int
    kill: str
    delay_seconds: float
    last_reported_step: int
    resumed_from_step: int
    lost_steps: int
    seconds_to_first_step: float
    """From the start of the second process until its first step is reported."""
    steps_compared: int
    largest_loss_difference: float
    history_equal: bool
    """Loss, gradient norm, learning rate, tokens and sample ids of all steps, bit for bit."""
    digest: str
    digest_equal: bool


def main() -> int:
    """Runs all seeds and writes results/results.json."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="resume-at-step-56-") as folder:
        found = [resumed for seed in SEEDS for resumed in _run_seed(seed, folder=Path(folder))]
    holds = all(resumed.history_equal and resumed.digest_equal for resumed in found)
    result = {
        "claim": "a run killed with SIGKILL and resumed equals the unbroken run bit for bit",
        "holds": holds,
        "seconds": round(time.monotonic() - began),
        "runs": [asdict(resumed) for resumed in found],
    }
    write_result(FOLDER / "results" / "results.json", result)
    print("the claim holds" if holds else "THE CLAIM DOES NOT HOLD")
    return 0 if holds else 1


def _run_seed(seed: int, *, folder: Path) -> list[Resumed]:
    unbroken = folder / f"unbroken-{seed}"
    _start(unbroken, seed=seed, save_every_steps=50).finish()
    chance = random.Random(seed)
    found = []
    for kill in MAX_DELAY_SECONDS:
        found.append(_kill_and_resume(unbroken, seed=seed, kill=kill, chance=chance))
        print(json.dumps(asdict(found[-1])), flush=True)
    return found


def _start(run_dir: Path, *, seed: int, save_every_steps: int) -> TrainingProcess:
    overrides = (
        f"run.seed={seed}",
        f"checkpoint.save_every_steps={save_every_steps}",
        f"data.cache_dir={run_dir.parent / 'cache'}",
        f"compilation.cache_dir={run_dir.parent / 'cache' / 'xla'}",
    )
    return TrainingProcess(CONFIG, run_dir=run_dir, overrides=overrides)


def _kill_and_resume(unbroken: Path, *, seed: int, kill: str, chance: random.Random) -> Resumed:
    for _ in range(TRIES):
        broken = unbroken.with_name(f"{kill.replace(' ', '-')}-{seed}-{chance.randrange(10**6)}")
        delay = chance.uniform(0, MAX_DELAY_SECONDS[kill])
        first = _start(broken, seed=seed, save_every_steps=SAVE_EVERY_STEPS[kill])
        _wait_moment(first, kill=kill)
        time.sleep(delay)
        first.kill()
        if kill == "at step 56" or SAVE_STEP not in committed_steps(broken):
            break
    else:
        raise RuntimeError(f"in {TRIES} tries no kill came before the commit")
    second = _start(broken, seed=seed, save_every_steps=SAVE_EVERY_STEPS[kill])
    seconds = second.wait_step(0)
    second.finish()
    last, resumed_from = first.steps()[-1], second.steps()[0] - 1
    return Resumed(
        seed=seed,
        kill=kill,
        delay_seconds=round(delay, 4),
        last_reported_step=last,
        resumed_from_step=resumed_from,
        lost_steps=last - resumed_from,
        seconds_to_first_step=round(seconds, 2),
        **_compare(broken, unbroken=unbroken),
    )


def _wait_moment(process: TrainingProcess, *, kill: str) -> None:
    if kill == "at step 56":
        process.wait_step(KILL_STEP)
        return
    process.wait_step(SAVE_STEP - 1)
    known = _names(process.run_dir)
    process.wait(lambda: _names(process.run_dir) - known, what="a save being written")


def _names(run_dir: Path) -> set[str]:
    folder = run_dir / "checkpoints"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def _compare(broken: Path, *, unbroken: Path) -> dict[str, Any]:
    there, here = _history(unbroken), _history(broken)
    steps = list(range(1, STEPS + 1))
    complete = [row["step"] for row in there] == steps == [row["step"] for row in here]
    digest, expected = (
        jaxres("checkpoints", "digest", str(run)).strip() for run in (broken, unbroken)
    )
    return {
        "steps_compared": len(here),
        "largest_loss_difference": max(
            abs(a["loss"] - b["loss"]) for a, b in zip(there, here, strict=True)
        ),
        "history_equal": complete and here == there,
        "digest": digest,
        "digest_equal": digest == expected,
    }


def _history(run_dir: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, jaxres("history", str(run_dir), "--json").splitlines())
    return [{key: row[key] for key in row if key not in NOT_COMPARED} for row in rows]


if __name__ == "__main__":
    sys.exit(main())
