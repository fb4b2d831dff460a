"""Cache of compiled programs: loads the compiled steps of an earlier attempt, else compiles them.

All hosts load the programs that host 0 has stored in the run directory, or none does. A compiled
program is stored at once: in the run directory, and in a cache that runs share. No error of the
cache ends a run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxres import config as configs
from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig
from jaxres.engine import executable
from jaxres.engine.executable import Signature, Unusable
from jaxres.faults import RunError
from jaxres.runlog.events import CompiledStepsLoaded, Noted, PhaseChanged, StepsCompiled
from jaxres.train.context import AttemptContext

PACKAGE = Path(__file__).parents[1]
SECTIONS_NOT_COMPILED = (
    *("alerts", "checkpoint", "compilation", "deadlines"),
    *("hosts", "launch", "restart", "telemetry"),
)
"""Sections of the config that no compiled step depends on."""
MAX_CACHED_PROGRAMS = 64
"""Largest number of programs in the cache that runs share."""
Trace = Callable[[], Any]
"""Returns a jax.stages.Traced."""


def cache_key_inputs(config: RunConfig, **others: Any) -> dict[str, Any] | None:
    """Returns what determines the compiled steps; None: only their lowered text does.

    None if custom code is a part of the steps, or if this package's source has changed since it was
    imported.
    """
    own = _sources()
    if own is None or config.model.kind == "custom":
        return None
    dumped = config.model_dump(mode="json")
    dumped["run"].pop("dir")
    dumped["train"]["steps"] = configs.horizon_steps(config)
    sections = {name: part for name, part in dumped.items() if name not in SECTIONS_NOT_COMPILED}
    return {"sources": own, "config": sections, **others}


@functools.cache
def _sources() -> str | None:
    return executable.sources(PACKAGE, since=_began(SystemClock()))


def remember_sources() -> None:
    """Digests this package's source now, for all processes that are forked from this one."""
    _sources()


def _began(clock: Clock) -> float:
    """Returns when this process started, by the wall clock."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = float(Path("/proc/uptime").read_text().split()[0])
    return clock.wall() - (since_boot - ticks / os.sysconf("SC_CLK_TCK"))


def use_compilation_cache(folder: str) -> None:
    """Makes JAX cache compiled programs in `folder`, including ones that compile fast."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@dataclass(frozen=True)
class StepToCompile:
    """A step that can be traced and compiled."""

    trace: Trace
    signature: Signature


class Program:
    """A step and its cache keys; traced and lowered at most once, on first use."""

    def __init__(
        self,
        name: str,
        step: StepToCompile,
        here: Mapping[str, Any],
        made_of: Mapping[str, Any] | None,
    ) -> None:
        self.name = name
        self.signature = step.signature
        self._trace = step.trace
        self._here = here
        self._made_of = made_of

    @functools.cached_property
    def lowered(self) -> Any:
        """The jax.stages.Lowered."""
        return self._trace().lower()

    @functools.cached_property
    def text_key(self) -> str:
        """The key in the shared cache: lowered text and call signature, equal for all runs.

        An argument that is None is not in the text, but is a part of the call signature.
        """
        text = hashlib.sha256(self.lowered.as_text().encode()).hexdigest()
        call = [str(self.lowered.in_tree), str(self.lowered.out_tree)]
        return executable.key({**self._here, "text": text, "call": call})

    @functools.cached_property
    def key(self) -> str:
        """The key in the run directory."""
        if self._made_of is None:
            return self.text_key
        return executable.key({**self._here, "made_of": self._made_of, "name": self.name})


def get(
    steps: Mapping[str, StepToCompile],
    context: AttemptContext,
    *,
    devices: Sequence[Any],
    made_of: Mapping[str, Any] | None,
    most: int,
    cache_dir: Path | None,
    seconds: float,
) -> dict[str, Any]:
    """Returns the compiled programs by name.

    Args:
      steps: the steps to compile, by name.
      context: context of the attempt, whose run directory stores the programs.
      devices: devices of the mesh, in its order.
      made_of: what determines the lowered text; None: only the text itself does.
      most: how many programs the run directory keeps; 0: none, and none is loaded.
      cache_dir: cache that runs share; None: no such cache.
      seconds: how long the hosts wait for each other.
    """
    begun = context.clock.monotonic()
    # Computing a key may trace the step, so this phase has the time limit of compilation.
    context.emit(PhaseChanged("compile", "looking for compiled steps of an earlier attempt"))
    here = executable.here(devices, environment=os.environ)
    programs = [Program(name, step, here, made_of) for name, step in steps.items()]
    found, why = None, "compilation.keep_programs=0"
    if most:
        found, why = _loaded(context, programs, devices)
        found, why = _agreed(context, programs, found, why, seconds=seconds)
    if found is not None:
        context.emit(CompiledStepsLoaded(tuple(found), context.clock.monotonic() - begun))
        return found
    compiled: dict[str, Any] = {}
    for program in programs:
        context.emit(PhaseChanged("compile", f"{program.name} step"))
        if most:
            compiled[program.name] = _kept(
                context, program, devices, most=most, cache_dir=cache_dir
            )
        else:
            compiled[program.name] = program.lowered.compile()
    context.emit(StepsCompiled(why, context.clock.monotonic() - begun))
    return compiled


def _loaded(
    context: AttemptContext, programs: Sequence[Program], devices: Sequence[Any]
) -> tuple[dict[str, Any] | None, str]:
    """Returns the programs in the run directory, or None and the reason."""
    folder, found = context.run_dir.compiled, dict[str, Any]()
    for program in programs:
        try:
            data = executable.read(folder, program.key)
            if data is None:
                return None, "none is stored for these devices, libraries and settings"
            found[program.name] = executable.load(data, program.signature, devices)
        except Unusable as error:
            why = f"{executable.file_of(folder, program.key)}: {error}"
            context.emit(Noted(f"the steps are compiled again: {why}"))
            return None, why
    return found, ""


def _agreed(
    context: AttemptContext,
    programs: Sequence[Program],
    found: dict[str, Any] | None,
    why: str,
    *,
    seconds: float,
) -> tuple[dict[str, Any] | None, str]:
    """Returns what was found if every host found the same; other programs may give other bits."""
    keys = "+".join(program.key for program in programs)
    context.peers.publish("steps", "none" if found is None else keys)
    context.peers.barrier("steps", seconds=seconds)
    without = [text for text in context.peers.poll("steps") if not text.endswith(f": {keys}")]
    if found is not None and without:
        return None, f"{without[0].partition(':')[0]} could not load the same"
    return found, why


def _kept(
    context: AttemptContext,
    program: Program,
    devices: Sequence[Any],
    *,
    most: int,
    cache_dir: Path | None,
) -> Any:
    """Returns a program from the shared cache, or compiles it; stores it for later attempts."""
    shared = None if cache_dir is None else cache_dir.expanduser() / "steps"
    data, compiled = _shared(shared, program, devices)
    try:
        if compiled is None:
            with _own_files():
                compiled = program.lowered.compile()
            data = executable.dump(compiled, program.signature)
            if shared is not None:
                executable.keep(shared, program.text_key, data, most=MAX_CACHED_PROGRAMS)
        assert data is not None
        if context.peers.member.leads:
            executable.keep(context.run_dir.compiled, program.key, data, most=most)
    except (Unusable, RunError, OSError) as error:
        context.emit(Noted(f"the compiled {program.name} step is not stored: {error}"))
    return compiled


def _shared(
    folder: Path | None, program: Program, devices: Sequence[Any]
) -> tuple[bytes | None, Any]:
    """Returns a program from the shared cache, serialized and loaded, or two Nones."""
    if folder is not None:
        with contextlib.suppress(Unusable):
            data = executable.read(folder, program.text_key)
            if data is not None:
                return data, executable.load(data, program.signature, devices)
    return None, None


@contextlib.contextmanager
def _own_files() -> Iterator[None]:
    """Turns JAX's own compilation cache off: a program loaded from it can't be serialized again.

    jax 0.10.2 on CPU: such a program is serialized without an error, and fails at its first call
    after it is loaded ("Function ... not found").
    """
    if not executable.can_be_kept():
        yield  # JAX's cache is then the only one.
        return
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads the setting only once.
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
