"""Which process of which run is killed when: a pure function of the seed.

A run has a number. Its plan depends on the seed, the number and the places alone, so that a longer
campaign begins with the runs of a shorter one, and one run can be replayed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STEPS = 60
RUN_SEEDS = (0, 1)
LEAST_KILLS, MOST_KILLS = 5, 10
"""Kills that are planned for one run."""
LAYOUTS = {(1, "disk"): 6, (2, "disk"): 2, (1, "bucket"): 3, (2, "bucket"): 1}
"""Hosts and storage of a run -> weight."""
TARGETS = {"worker": 5, "supervisor": 3, "both": 2, "fork server": 1}
"""Process -> weight. `both`: the worker and at once its supervisor; `fork server`: it and at once
the worker, which then has to be restarted without it."""
MOST_WRITES = 40
"""Largest number of a bucket's write request, counted from the kill before, at which one hits."""


@dataclass(frozen=True)
class Place:
    """Where in the life of an attempt a kill hits."""

    meaning: str
    weight: int = 1
    storages: tuple[str, ...] = ("disk", "bucket")
    point: str = ""
    """The file operation that is not done any more; empty: the place is no operation."""
    delay_seconds: float = 0.0
    """Longest delay of the kill after the place was seen."""


def _point(meaning: str, point: str) -> Place:
    return Place(f"right before {meaning}", storages=("disk",), point=point)


DISK = ("disk",)
PLACES = {
    "any time": Place("uniform in the time that the attempt is expected to take", 12),
    "start-up": Place("uniform in the time before the first step is expected", 3),
    "compile": Place("while a step is compiled, in a run without compiled steps", 2, DISK, "", 0.5),
    "restore": Place("while a checkpoint is restored", 2, DISK, "", 0.1),
    "first step": Place("after the first step of an attempt", 1, DISK, "", 0.1),
    "evaluation": Place("during an evaluation", 2, DISK, "", 0.1),
    "save": Place("while a save has a directory and no commit record", 2, delay_seconds=0.05),
    "end of run": Place("after the last step", 2, DISK, "", 0.3),
    "between attempts": Place("the worker, and its supervisor when it restarts it", 3),
    "write request": Place("a write to the bucket, without or after its effect", 8, ("bucket",)),
    "save: directory made": _point("the directory of a save is made", "directory made"),
    "save: step renamed": _point("a written step gets its name", "step renamed"),
    "save: progress": _point("the position in the data is written", "facts"),
    "save: manifest": _point("the manifest is written", "manifest"),
    "save: commit": _point("the commit record is written", "commit"),
    "prune: record": _point("the record of pruned steps is written", "prune"),
    "prune: trash": _point("a pruned step is renamed", "trash"),
    "prune: bytes": _point("a file of a pruned step is deleted", "bytes"),
}


@dataclass(frozen=True)
class Kill:
    """A planned SIGKILL."""

    place: str
    target: str
    host: int = 0
    """Host of the worker."""
    fraction: float = 0.0
    """Of the expected time, or of the longest delay after the place was seen."""
    count: int = 1
    """Which file operation or write request of the attempt."""
    is_after: bool = False
    """Whether a write request has its effect before the kill; else it has none."""


@dataclass(frozen=True)
class RunPlan:
    """A planned run."""

    number: int
    hosts: int
    storage: str
    run_seed: int
    kills: tuple[Kill, ...]

    @property
    def is_cold(self) -> bool:
        """Whether the run must find no compiled steps of other runs."""
        return any(kill.place == "compile" for kill in self.kills)


def plan_run(seed: int, number: int, only: Sequence[str] = ()) -> RunPlan:
    """Returns the plan of a run.

    Args:
      seed: of the campaign.
      number: of the run, from 0.
      only: places; empty: all.

    >>> plan_run(0, 7) == plan_run(0, 7), plan_run(0, 7) == plan_run(1, 7)
    (True, False)
    """
    names = tuple(only) or tuple(PLACES)
    chance = random.Random(f"kills-{seed}-{number}")
    layouts = {
        layout: weight
        for layout, weight in LAYOUTS.items()
        if any(layout[1] in PLACES[name].storages for name in names)
    }
    hosts, storage = chance.choices(list(layouts), list(layouts.values()))[0]
    names = tuple(name for name in names if storage in PLACES[name].storages)
    weights = [PLACES[name].weight for name in names]
    run_seed = chance.choice(RUN_SEEDS)
    chosen = chance.choices(names, weights, k=chance.randint(LEAST_KILLS, MOST_KILLS))
    # Only an attempt of which no other has completed the compilation compiles.
    chosen.sort(key=lambda name: name != "compile")
    kills = tuple(_kill(name, chance, hosts) for name in chosen)
    return RunPlan(number, hosts, storage, run_seed, kills)


def _kill(name: str, chance: random.Random, hosts: int) -> Kill:
    place = PLACES[name]
    target = chance.choices(list(TARGETS), list(TARGETS.values()))[0]
    host, fraction, is_after = chance.randrange(hosts), chance.random(), chance.random() < 0.5
    if place.point:
        return Kill(name, "worker", count=chance.choice((1, 1, 2, 3)))
    if name == "between attempts":
        target = "both"
    if target == "fork server" and name != "any time":
        target = "worker"
    if name == "write request":
        count = chance.randint(1, MOST_WRITES)
        return Kill(name, target, host, count=count, is_after=is_after)
    return Kill(name, target, host, round(fraction, 4))


def schedule(seed: int, *, kills: int, only: Sequence[str] = ()) -> Iterator[RunPlan]:
    """Yields runs until so many kills are planned."""
    number, planned = 0, 0
    while planned < kills:
        run = plan_run(seed, number, only)
        yield run
        number, planned = number + 1, planned + len(run.kills)
