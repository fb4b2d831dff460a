"""The compiled steps of an attempt: loaded where an earlier one has kept them, else compiled.

Every host loads what the lead has kept for all, or none does. What is compiled is kept at once: in
the run, and in the cache of compiled programs for the first starts of other runs. Nothing here ends
a run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxres import config as configs
from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig
from jaxres.engine import executable
from jaxres.engine.executable import Unusable
from jaxres.faults import TypedEnd
from jaxres.runlog.events import Noted, PhaseChanged, StepsCompiled, StepsLoaded
from jaxres.train.context import Seat

PACKAGE = Path(__file__).parents[1]
NO_PART_OF_IT = (
    *("alerts", "checkpoint", "compilation", "deadlines"),
    *("hosts", "launch", "restart", "telemetry"),
)
"""Sections of the config that no step depends on."""
MOST_IN_CACHE = 64
"""Programs in the cache that runs share."""
Trace = Callable[[], Any]
"""Returns a jax.stages.Traced."""


def made_of(config: RunConfig, **others: Any) -> dict[str, Any] | None:
    """Returns what the steps are made of, or None where only their lowered text can tell.

    That is so where somebody else's code is a part of them, or this package's has changed since it
    was imported.
    """
    own = _sources()
    if own is None or config.model.kind == "custom":
        return None
    dumped = config.model_dump(mode="json")
    dumped["run"].pop("dir")
    dumped["train"]["steps"] = configs.horizon_steps(config)
    sections = {name: part for name, part in dumped.items() if name not in NO_PART_OF_IT}
    return {"sources": own, "config": sections, **others}


@functools.cache
def _sources() -> str | None:
    return executable.sources(PACKAGE, since=_began(SystemClock()))


def remember_sources() -> None:
    """Looks at this package's code now, for all processes that are forked from this one."""
    _sources()


def _began(clock: Clock) -> float:
    """Returns when this process began, by the wall clock."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = float(Path("/proc/uptime").read_text().split()[0])
    return clock.wall() - (since_boot - ticks / os.sysconf("SC_CLK_TCK"))


def use_compilation_cache(folder: str) -> None:
    """Keeps compiled programs in `folder`, also the ones that compile fast."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


class Program:
    """A program to be had; traced and lowered once, and only where that is needed."""

    def __init__(
        self, name: str, trace: Trace, here: Mapping[str, Any], made_of: Mapping[str, Any] | None
    ) -> None:
        self.name = name
        self._trace = trace
        self._here = here
        self._made_of = made_of

    @functools.cached_property
    def lowered(self) -> Any:
        """The jax.stages.Lowered."""
        return self._trace().lower()

    @functools.cached_property
    def text_key(self) -> str:
        """The key by its lowered text and how it is called, which is the same for all runs.

        An argument that is None is no part of the text, and yet of the call.
        """
        text = hashlib.sha256(self.lowered.as_text().encode()).hexdigest()
        call = [str(self.lowered.in_tree), str(self.lowered.out_tree)]
        return executable.key({**self._here, "text": text, "call": call})

    @functools.cached_property
    def key(self) -> str:
        """The key in the run's folder."""
        if self._made_of is None:
            return self.text_key
        return executable.key({**self._here, "made_of": self._made_of, "name": self.name})


def get(
    traces: Mapping[str, Trace],
    seat: Seat,
    *,
    devices: Sequence[Any],
    made_of: Mapping[str, Any] | None,
    most: int,
    cache_dir: Path | None,
    seconds: float,
) -> dict[str, Any]:
    """Returns the compiled programs by name.

    Args:
      traces: by name, what is to be compiled.
      seat: whose folder keeps them.
      devices: of the mesh, in its order.
      made_of: what decides their text; None: only the text itself tells.
      most: how many the run's folder keeps; 0: none, and none is loaded.
      cache_dir: where runs share what they compile; None: they don't.
      seconds: how long the hosts wait for each other.
    """
    begun = seat.clock.monotonic()
    # A key may be the lowered text: then tracing begins here, and has compilation's time limit.
    seat.emit(PhaseChanged("compile", "looking for the steps of an earlier attempt"))
    here = executable.here(devices, environment=os.environ)
    programs = [Program(name, trace, here, made_of) for name, trace in traces.items()]
    found, why = None, "compilation.keep_programs=0"
    if most:
        found, why = _loaded(seat, programs, devices)
        found, why = _agreed(seat, programs, found, why, seconds=seconds)
    if found is not None:
        seat.emit(StepsLoaded(tuple(found), seat.clock.monotonic() - begun))
        return found
    compiled: dict[str, Any] = {}
    for program in programs:
        seat.emit(PhaseChanged("compile", f"{program.name} step"))
        if most:
            compiled[program.name] = _kept(seat, program, devices, most=most, cache_dir=cache_dir)
        else:
            compiled[program.name] = program.lowered.compile()
    seat.emit(StepsCompiled(why, seat.clock.monotonic() - begun))
    return compiled


def _loaded(
    seat: Seat, programs: Sequence[Program], devices: Sequence[Any]
) -> tuple[dict[str, Any] | None, str]:
    """Returns what the run has kept, or None and why there is none."""
    folder, found = seat.run_dir.compiled, dict[str, Any]()
    for program in programs:
        try:
            data = executable.read(folder, program.key)
            if data is None:
                return None, "none is kept for these devices, libraries and settings"
            found[program.name] = executable.load(data, devices)
        except Unusable as error:
            why = f"{executable.file_of(folder, program.key)}: {error}"
            seat.emit(Noted(f"the steps are compiled anew: {why}"))
            return None, why
    return found, ""


def _agreed(
    seat: Seat,
    programs: Sequence[Program],
    found: dict[str, Any] | None,
    why: str,
    *,
    seconds: float,
) -> tuple[dict[str, Any] | None, str]:
    """Returns what was found if every host has found it: on a GPU others may have other bits."""
    word = "+".join(program.key for program in programs)
    seat.peers.tell("steps", "none" if found is None else word)
    seat.peers.meet("steps", seconds=seconds)
    without = [told for told in seat.peers.told("steps") if not told.endswith(f": {word}")]
    if found is not None and without:
        return None, f"{without[0].partition(':')[0]} could not load the same"
    return found, why


def _kept(
    seat: Seat, program: Program, devices: Sequence[Any], *, most: int, cache_dir: Path | None
) -> Any:
    """Returns a program from the shared cache, or compiled; keeps it for those who come."""
    shared = None if cache_dir is None else cache_dir.expanduser() / "steps"
    data, compiled = _shared(shared, program, devices)
    try:
        if compiled is None:
            with _own_files():
                compiled = program.lowered.compile()
            data = executable.dump(compiled)
            if shared is not None:
                executable.keep(shared, program.text_key, data, most=MOST_IN_CACHE)
        assert data is not None
        if seat.peers.member.leads:
            executable.keep(seat.run_dir.compiled, program.key, data, most=most)
    except (Unusable, TypedEnd, OSError) as error:
        seat.emit(Noted(f"the compiled {program.name} step is not kept: {error}"))
    return compiled


def _shared(
    folder: Path | None, program: Program, devices: Sequence[Any]
) -> tuple[bytes | None, Any]:
    """Returns a program that some run has compiled here, as a file and loaded, or two Nones."""
    if folder is not None:
        with contextlib.suppress(Unusable):
            data = executable.read(folder, program.text_key)
            if data is not None:
                return data, executable.load(data, devices)
    return None, None


@contextlib.contextmanager
def _own_files() -> Iterator[None]:
    """Compiles without JAX's cache: what it gives back can't be made a file of again.

    jax 0.10.2 on CPU: such a program is written without an error, and later it fails at its first
    call ("Function ... not found").
    """
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # It looks at the setting only once.
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
