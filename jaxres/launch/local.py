"""All workers of a job on this machine, behind one door."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxres.faults import UsageError
from jaxres.supervise import opening
from jaxres.supervise.meeting import behind_one_door
from jaxres.train import memory

USAGE = """\
usage: python -m jaxres.launch local CONFIG.yaml|RUN_DIR [section.field=value ...]
           --hosts N [--devices-per-host K]

Trains with N workers on this machine, each with the part of one host, behind one door: it starts
the run or goes on with it. The first worker that is lost ends all; the message names it. Signals
and request files as for `python -m jaxres.train`, for all workers together.
--hosts N: number of workers, at least 1.
--devices-per-host K: virtual CPU devices of each worker (JAX_NUM_CPU_DEVICES).
"""
FLAGS = ("--hosts", "--devices-per-host")


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    target: Path
    overrides: tuple[str, ...]
    num_hosts: int
    devices_per_host: int | None
    """None: as JAX has it."""


def parse(arguments: Sequence[str]) -> Asked:
    """Reads the words after `local`.

    Raises:
      UsageError: unknown flags, bad numbers, or not exactly one config file or run directory.
    """
    numbers: dict[str, int] = {}
    words: list[str] = []
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            numbers[flag] = _count(flag, value if equals else next(rest, ""))
        else:
            words.append(word)
    overrides = tuple(word for word in words if "=" in word)
    targets = [word for word in words if "=" not in word]
    unknown = [word for word in targets if word.startswith("-")]
    if unknown:
        raise UsageError(f"{unknown[0]}: unknown flag\n{USAGE}")
    if len(targets) != 1:
        given = " ".join(targets) or "nothing"
        raise UsageError(f"expected one config file or run directory, got {given}\n{USAGE}")
    if "--hosts" not in numbers:
        raise UsageError(f"--hosts: how many workers?\n{USAGE}")
    devices = numbers.get("--devices-per-host")
    return Asked(Path(targets[0]), overrides, numbers["--hosts"], devices)


def _count(flag: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) >= 1):
        raise UsageError(f"{flag} {value}: expected a whole number, at least 1\n{USAGE}")
    return int(value)


def launch(asked: Asked, *, env: Mapping[str, str]) -> int:
    """Trains, and returns the exit code of the whole job."""
    if asked.devices_per_host is not None:
        env = {**env, "JAX_NUM_CPU_DEVICES": str(asked.devices_per_host)}
    run = functools.partial(opening.behind_a_door, env=env, advise=memory.host_advice)
    meet = functools.partial(behind_one_door, num_hosts=asked.num_hosts)
    return opening.attempt(asked.target, asked.overrides, run=run, env=env, meet=meet)
