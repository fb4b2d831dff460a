"""Runs every ordered pair of chaos scenarios in one run, and judges it as `jaxres chaos run` does.

    python tools/campaign/pairs.py --minutes 10     the next slice of all pairs
    ... --seed 1                                    other steps and hosts, in another order
    ... --only worker-kill,notice                   pairs of these scenarios
    ... --part 1/2                                  each second pair; 2/2 may run at the same time
    ... --run 12                                    one pair again, recorded or not

A slice goes on where the last one ended: what pairs.jsonl has is not repeated. Scenarios that need
a run of their own or two workers have no pair, nor has one on a disk with one in a bucket. Exit 0:
every promise held.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from jaxres import config as configs  # noqa: E402 (the tree of this file)
from jaxres.cli.chaos import run_fields  # noqa: E402
from jaxres.clock import SystemClock  # noqa: E402
from jaxres.exit_codes import ExitCode  # noqa: E402
from jaxres.operate.chaos import verdict  # noqa: E402
from jaxres.operate.chaos.runs import FaultyRun  # noqa: E402
from jaxres.operate.chaos.scenarios import ALL, BY_NAME, Scenario  # noqa: E402
from jaxres.operate.chaos.schedule import SAVE_EVERY, STEPS, PlannedRun, plan_run  # noqa: E402
from jaxres.operate.chaos.short_runs import HERE as ONE_WORKER  # noqa: E402
from jaxres.operate.chaos.short_runs import Runner, shortened  # noqa: E402
from jaxres.operate.resume_verdict import RunFacts  # noqa: E402
from tools.campaign import results  # noqa: E402
from tools.campaign.kills import CACHES, HERE, commit_of, cpu_seconds  # noqa: E402

CONFIG = ROOT / "tests" / "promises" / "tiny.yaml"
RECORD = "pairs.jsonl"


@dataclass(frozen=True)
class Pair:
    """A planned run with two faults."""

    number: int
    first: str
    second: str

    def planned(self, seed: int) -> PlannedRun:
        """Returns the run; its steps depend on seed and number."""
        return plan_run(f"pair-{self.number}", (self.first, self.second), seed=seed)


def all_pairs(seed: int, only: Sequence[str] = ()) -> list[Pair]:
    """Returns every ordered pair of two scenarios that can share a run, in an order by the seed.

    >>> len(all_pairs(0)), all_pairs(0) == all_pairs(0), all_pairs(0) == all_pairs(1)
    (108, True, False)
    """
    shared = [one.name for one in ALL if _is_shared(one) and (not only or one.name in only)]
    pairs = [
        (a, b)
        for a, b in itertools.permutations(sorted(shared), 2)
        if BY_NAME[a].place == BY_NAME[b].place
    ]
    random.Random(f"pairs-{seed}").shuffle(pairs)
    return [Pair(number, a, b) for number, (a, b) in enumerate(pairs)]


def _is_shared(scenario: Scenario) -> bool:
    return not scenario.is_alone and scenario.place != "hosts"  # Those need two workers.


def main(arguments: Sequence[str]) -> int:
    """Carries out a slice; 0: every promise held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after these")
    parser.add_argument("--only", default="", metavar="SCENARIO,...")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N", help="each N-th pair")
    parser.add_argument("--run", type=int, help="this pair alone; it is not recorded")
    parser.add_argument("--to", type=Path, default=HERE, help=f"folder of {RECORD} and README.md")
    options = parser.parse_args(arguments)
    only = tuple(filter(None, options.only.split(",")))
    if unknown := set(only) - set(BY_NAME):
        parser.error(f"unknown scenario: {', '.join(sorted(unknown))}")
    pairs, record = all_pairs(options.seed, only), options.to / RECORD
    done = {tuple(line["pair"]) for line in results.read(record) if line["seed"] == options.seed}
    left = [pair for pair in pairs if (pair.first, pair.second) not in done]
    which, parts = options.part
    left = [pair for pair in left if pair.number % parts == which - 1]
    folder = Path(tempfile.mkdtemp(prefix="jaxres-pairs-"))
    if options.run is not None:
        left, record = pairs[options.run : options.run + 1], folder / RECORD
    one = Slice(folder, record, options.seed, only, commit_of())
    until, is_good = time.monotonic() + 60 * options.minutes, True
    for pair in left:
        if time.monotonic() < until:
            is_good = one.run(pair) and is_good
    if options.run is None and (options.to / "README.md").exists():
        results.write_pairs(options.to / "README.md", results.read(record), len(all_pairs(0)))
    if is_good:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_good else 1


def part(text: str) -> tuple[int, int]:
    """Returns which part of how many.

    >>> part("2/3")
    (2, 3)
    """
    which, parts = map(int, text.split("/"))
    if not 1 <= which <= parts:
        raise ValueError(text)
    return which, parts


class Slice:
    """One call of the command."""

    def __init__(
        self, folder: Path, record: Path, seed: int, only: tuple[str, ...], commit: str
    ) -> None:
        self._folder, self._record, self._seed, self._only = folder, record, seed, only
        self._commit = commit
        caches = [f"data.cache_dir={CACHES}", f"compilation.cache_dir={CACHES / 'xla'}"]
        config = configs.load(CONFIG, caches).config
        extra = shortened(config, steps=STEPS, save_every=SAVE_EVERY, breaks=len(ALL))
        self._runner = Runner(
            CONFIG, [*caches, *extra], folder, SAVE_EVERY, dict(os.environ), SystemClock()
        )
        self._reference: RunFacts | None = None

    def _oracle(self) -> RunFacts:
        """Returns the run without faults."""
        if self._reference is None:
            self._reference = self._runner.unbroken("oracle", ONE_WORKER)
            if self._reference.exit != ExitCode.DONE:
                raise RuntimeError(f"the run without faults failed:\n{self._reference.message}")
        return self._reference

    def run(self, pair: Pair) -> bool:
        """Carries out a pair, judges and records it; returns whether every promise held."""
        reference, began, cpu = self._oracle(), time.monotonic(), cpu_seconds()
        try:
            facts = FaultyRun(self._runner, pair.planned(self._seed), ONE_WORKER).execute()
        finally:
            self._runner.stop()
        broken = verdict.judge(reference, facts, save_every=SAVE_EVERY)
        texts = [f"{one.promise}: {one.text}" for one in broken]
        line = {
            "commit": self._commit,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "seed": self._seed,
            "run": pair.number,
            "only": list(self._only),
            "pair": [pair.first, pair.second],
            "faults": run_fields(facts, broken)["faults"],
            "attempts": len(facts.run.attempts),
            "seconds": round(time.monotonic() - began, 1),
            # Without workers whose supervisor was killed: init has reaped them.
            "cpu_seconds": round(cpu_seconds() - cpu, 2),
            "outcome": texts or results.HELD,
        }
        results.append(self._record, line)
        is_good = not texts
        state = results.HELD if is_good else "BROKEN"
        texts = [
            f"{pair.number}: {pair.first}, {pair.second}: {line['seconds']} s: {state}",
            *texts,
        ]
        print("\n  ".join(texts), flush=True)
        if is_good:
            root = self._runner.run_dir(f"pair-{pair.number}").local
            shutil.rmtree(root, ignore_errors=True)
        return is_good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
