"""Guarantee level of a run: whether it is bitwise equal to an uninterrupted run. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jaxres.runlog.history import start_of
from jaxres.runlog.records import Record

BITWISE = "bitwise on this topology"
BITWISE_ANYWHERE = "bitwise on any number of devices"
"""With train.reduction=invariant, on CPUs; on GPUs the compiled step depends on their number."""
BITWISE_LEVELS = (BITWISE, BITWISE_ANYWHERE)
REDUCTION, INVARIANT = "reduction", "invariant"
"""Entry of Start.computation, and its value, of a run whose bits no topology changes."""
UNKNOWN = "unknown"
"""Value of a digest that can't be computed, such as of code that changed after its import."""
PROGRAM, MODEL_CODE, DATA_CODE = "program", "model code", "data code"
CODE = (PROGRAM, MODEL_CODE, DATA_CODE)
"""Digests of the lowered train step, and of the source of model and data, in Start.computation."""
SEVERAL_KINDS = " + "
"""Separates the kinds of devices in the entry `devices`, if a job has several."""
DETERMINISTIC_OPS = "--xla_gpu_deterministic_ops"
"""XLA's flag for kernels with equal bits in every execution. It also stops the timing of kernels,
so that equal machines choose equal ones (openxla.org/xla/determinism)."""
EXCLUDES_OTHERS = "--xla_gpu_exclude_nondeterministic_ops"
"""XLA's flag for such kernels too, which times them nevertheless."""
LOWERING = (
    *("devices", "mesh", "microbatches", "attention", "remat", "scan_layers", "loss_blocks"),
    *("jax", "jaxlib"),
)
"""Entries of Start.computation on which the lowered text of the same code depends, besides the
settings of JAX."""
XLA_OPTIONS = "xla_options"
"""Entry of options of XLA that a run sets for its compiled steps, which is there if it sets any."""
SETTING = "JAX_"
"""Beginning of the entries of settings of JAX, which are there unless they have their defaults."""


def xla_flags(given: str, *, determinism: str) -> str:
    """Returns XLA_FLAGS for the setting `run.determinism`.

    Args:
      given: the value in the environment, or "".
      determinism: the setting. `fast` leaves the value as it is.

    >>> xla_flags("--xla_dump_to=d", determinism="bitwise")
    '--xla_dump_to=d --xla_gpu_deterministic_ops=true'
    """
    if determinism == "fast" or _is_on(DETERMINISTIC_OPS, given):
        return given
    return f"{given} {DETERMINISTIC_OPS}=true".lstrip()


def takes_deterministic_kernels(flags: str) -> bool:
    """Returns whether XLA takes only kernels with equal bits in every execution.

    >>> takes_deterministic_kernels("--xla_gpu_exclude_nondeterministic_ops=true")
    True
    >>> takes_deterministic_kernels("")
    False
    """
    return any(_is_on(flag, flags) for flag in (DETERMINISTIC_OPS, EXCLUDES_OTHERS))


def _is_on(name: str, flags: str) -> bool:
    """Returns whether XLA takes a flag as on: the last one counts, and one without value is on."""
    values = [
        flag.removeprefix(name).removeprefix("=").lower()
        for flag in flags.split()
        if flag.partition("=")[0] == name
    ]
    return values[-1:] in (["true"], ["1"], [""])


def guarantee_level(starts: Sequence[Record]) -> str:
    """Returns the level of the newest start and, unless it is bitwise, the changes since when.

    `none`: the code has changed. `unknown`: an older version of jaxres has recorded no digest of
    the code. `statistical`: the same computation, with other rounding. Programs are compared where
    the devices and JAX are the same; elsewhere the source of the model is.

    Args:
      starts: the start records of the run, oldest first.
    """
    now = start_of(starts[-1]).computation
    earlier = [(record, start_of(record).computation) for record in starts[:-1]]
    changes = _changes(now, earlier)
    unrecorded = sorted({record.attempt for record, was in earlier if _lacks_code(was)})
    if _lacks_code(now):
        unrecorded.append(starts[-1].attempt)
    if any(name in CODE for name, _ in changes):
        return f"none: {_text(changes, starts)}"
    if unrecorded:
        attempts = f"attempt {unrecorded[0]}"
        if len(unrecorded) > 1:
            attempts = f"{len(unrecorded)} attempts ({unrecorded[0]} to {unrecorded[-1]})"
        text = f"unknown: the code of {attempts} is not recorded"
        return f"{text}; {_text(changes, starts)}" if changes else text
    if changes:
        return f"statistical: {_text(changes, starts)}"
    if SEVERAL_KINDS in now.get("devices", ""):
        return f"statistical: devices of several kinds compute: {now['devices']}"
    if " gpu " in now.get("devices", "") and not _is_on(
        DETERMINISTIC_OPS, now.get("xla_flags", "")
    ):
        return (
            "statistical: GPU kernels may add in any order; for bitwise set run.determinism=bitwise"
        )
    is_anywhere = now.get(REDUCTION) == INVARIANT and " cpu " in now.get("devices", "")
    return BITWISE_ANYWHERE if is_anywhere else BITWISE


def is_at_least(level: str, least: str) -> bool:
    """Returns whether a level is as good as the least one of `run.guarantee`.

    >>> is_at_least("statistical: jax differs", "statistical"), is_at_least("none: x", "bitwise")
    (True, False)
    """
    good = {
        "bitwise": BITWISE_LEVELS,
        "statistical": (*BITWISE_LEVELS, "statistical"),
        "any": ("",),
    }
    return level.startswith(good[least])


def _lacks_code(computation: Mapping[str, str]) -> bool:
    return any(computation.get(name, UNKNOWN) == UNKNOWN for name in CODE)


def _changes(
    now: Mapping[str, str], earlier: Sequence[tuple[Record, Mapping[str, str]]]
) -> dict[tuple[str, int], list[str]]:
    """Returns the earlier values that differ from now, by entry and number of the first start."""
    names = {*now, *(name for _, was in earlier for name in was)}
    changes: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        values = [_compared(name, computation) for computation in [*(w for _, w in earlier), now]]
        differing = [
            value
            for value, (_, was) in zip(values, earlier, strict=False)
            if value != values[-1] and _is_comparable(name, was, now)
        ]
        if differing:
            first = _first_change(name, values, [*(was for _, was in earlier), now])
            changes[name, first] = list(dict.fromkeys(differing))
    return changes


def _first_change(
    name: str, values: Sequence[str], computations: Sequence[Mapping[str, str]]
) -> int:
    """Returns the number of the first start with another value than one before it."""
    seen: dict[tuple[str, ...], str] = {}
    for number, (value, computation) in enumerate(zip(values, computations, strict=True)):
        group = _lowering(computation) if name == PROGRAM else ()
        if value != UNKNOWN and seen.setdefault(group, value) != value:
            return number
    raise AssertionError(f"{name} has not changed")


def _compared(name: str, computation: Mapping[str, str]) -> str:
    """Returns the part of an entry that decides bits: of invariant runs not the topology."""
    value = computation.get(name, _missing(name))
    if computation.get(REDUCTION) != INVARIANT or name not in ("devices", "mesh"):
        return value
    return "" if name == "mesh" else re.sub(r"^\d+ x | on \d+ hosts$", "", value)


def _missing(name: str) -> str:
    if name.startswith(SETTING):
        return "default"
    if name == XLA_OPTIONS:
        return "none"
    return UNKNOWN if name in CODE else "not recorded"


def _lowering(computation: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the entries on which the lowered text of unchanged code depends."""
    settings = [name for name in sorted(computation) if name.startswith(SETTING)]
    return tuple(f"{name}={computation.get(name)}" for name in (*LOWERING, *settings))


def _is_comparable(name: str, was: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Returns whether different values of an entry say that something has changed."""
    if name in CODE and UNKNOWN in (was.get(name, UNKNOWN), now.get(name, UNKNOWN)):
        return False
    same = _lowering(was) == _lowering(now)
    return {PROGRAM: same, MODEL_CODE: not same}.get(name, True)


def _text(changes: Mapping[tuple[str, int], Sequence[str]], starts: Sequence[Record]) -> str:
    """Returns the changes as text; changes with the same first start are together."""
    now = start_of(starts[-1]).computation
    groups: dict[int, list[str]] = {}
    for (name, first), was in sorted(changes.items(), key=lambda item: item[0][1]):
        value = f"{' and '.join(was)} -> {_compared(name, now)}"
        groups.setdefault(first, []).append(f"{name} {value}")
    return "; ".join(
        f"{', '.join(texts)} since step {start_of(starts[first]).step} "
        f"(attempt {starts[first].attempt})"
        for first, texts in groups.items()
    )
