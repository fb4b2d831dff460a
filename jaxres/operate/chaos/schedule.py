"""Which faults are injected into which run, after which step, on which host. Pure.

The schedule is a function of the seed, the scenarios, the length of the runs and the number of
hosts alone, so that a seed replays it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxres.operate.chaos.scenarios import BY_NAME, Place

STEPS = 12
SAVE_EVERY = 3
"""Steps of each run, and between two saves."""


@dataclass(frozen=True)
class ScheduledFault:
    """A planned fault."""

    scenario: str
    step: int
    """The step after which it is injected."""
    host: int = 0
    """The worker that gets the signal, where a worker does."""


@dataclass(frozen=True)
class PlannedRun:
    """A run and its faults, ascending by step."""

    name: str
    faults: tuple[ScheduledFault, ...]

    @property
    def place(self) -> Place:
        """Where its run directory is: all its scenarios ask for the same."""
        return BY_NAME[self.faults[0].scenario].place if self.faults else "disk"

    @property
    def has_fake_gpus(self) -> bool:
        """Whether a fake of NVIDIA's library is in it."""
        return any(BY_NAME[fault.scenario].has_fake_gpus for fault in self.faults)


def plan(
    names: Sequence[str], *, seed: int, faults: int, hosts: int = 1, steps: int = STEPS
) -> tuple[PlannedRun, ...]:
    """Returns runs with so many faults in all; every scenario once before one comes again.

    Args:
      names: scenarios.
      seed: chooses order, pairs, steps and hosts.
      faults: number of faults.
      hosts: number of workers.
      steps: number of steps of each run; a save is made every SAVE_EVERY steps.

    >>> [[f.scenario for f in r.faults] for r in plan(["notice", "hang"], seed=0, faults=3)]
    [['hang'], ['notice'], ['hang']]
    """
    chance, found, left = random.Random(f"chaos-{seed}"), list[PlannedRun](), faults
    for group in _groups(names, chance):
        if left <= 0:
            break
        chosen = group[:left]
        left -= len(chosen)
        name = f"run-{len(found) + 1}"
        found.append(PlannedRun(name, _place(chosen, chance, steps=steps, hosts=hosts)))
    return tuple(found)


def plan_run(
    name: str, group: Sequence[str], *, seed: int, hosts: int = 1, steps: int = STEPS
) -> PlannedRun:
    """Returns one run with these scenarios, in this order; they must be able to share a run.

    >>> [fault.scenario for fault in plan_run("x", ["notice", "stop"], seed=0).faults]
    ['notice', 'stop']
    """
    chance = random.Random(f"chaos-{seed}-{name}")
    return PlannedRun(name, _place(group, chance, steps=steps, hosts=hosts))


def _groups(names: Sequence[str], chance: random.Random) -> Iterator[list[str]]:
    """Yields the scenarios of each run without an end: pairs of one place, or one that is alone."""
    while True:
        order = sorted(names)
        chance.shuffle(order)
        waiting: dict[Place, list[str]] = {}
        for name in order:
            if BY_NAME[name].is_alone:
                yield [name]
                continue
            group = waiting.setdefault(BY_NAME[name].place, [])
            group.append(name)
            if len(group) == 2:
                yield waiting.pop(BY_NAME[name].place)
        yield from waiting.values()


def _place(
    group: Sequence[str], chance: random.Random, *, steps: int, hosts: int
) -> tuple[ScheduledFault, ...]:
    """Returns the faults of a run, each in a part of its own, all after the first save.

    Several hosts agree on a stop in the next step: after the last but one nothing is left to train.
    """
    first, end = SAVE_EVERY + 1, steps if hosts == 1 else steps - 1
    size = end - first
    placed: list[ScheduledFault] = []
    for number, name in enumerate(group):
        start, stop = (first + part * size // len(group) for part in (number, number + 1))
        possible = range(start, stop)
        if BY_NAME[name].at_save:
            possible = [step for step in possible if step % SAVE_EVERY == 0]
        if BY_NAME[name].after_save:
            possible = [step for step in possible if step % SAVE_EVERY == 1]
        if (step := BY_NAME[name].at_step) is not None:
            possible = [step]
        host = chance.randrange(hosts)
        host = 0 if BY_NAME[name].at_save else host  # Host 0 makes the commits.
        placed.append(ScheduledFault(name, chance.choice(possible), host))
    return tuple(placed)
