"""Cache of compiled programs: loads the compiled steps of an earlier attempt, else compiles them.

A program is stored as soon as it is compiled, in a folder that only this account can use, by every
host for its machine. All hosts load programs of the same compilation, or none does: of two
compilations of the same program, each may choose other kernels. Hosts that lack a program get it
from one that has it (ADR 107). No error of the cache ends a run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge  # No public function checks without creating a backend.
from jax.experimental.compilation_cache import compilation_cache

from jaxres import config as configs
from jaxres.clock import Clock, SystemClock
from jaxres.cluster import program_transfer
from jaxres.cluster.compatibility import host_list
from jaxres.cluster.connection import own_address
from jaxres.cluster.program_transfer import AttemptKey, ProgramServer, TransferFailed
from jaxres.config import RunConfig
from jaxres.config.schema.run_config import CompileSection
from jaxres.engine import executable
from jaxres.engine.executable import Signature, Unusable
from jaxres.faults import ConfigError, RunError
from jaxres.runlog.events import (
    CompiledStepsLoaded,
    CompiledStepsReceived,
    Emit,
    Noted,
    PhaseChanged,
    StepsCompiled,
)
from jaxres.runlog.guarantee import xla_flags
from jaxres.secret_values import without_rotatable
from jaxres.storage import files
from jaxres.train.compiled import program_offers
from jaxres.train.compiled.program_offers import Offer, Transfer
from jaxres.train.compiled.xla_options import XlaOptions, compile_with
from jaxres.train.context import AttemptContext

PACKAGE = Path(__file__).parents[2]
SECTIONS_NOT_COMPILED = (
    *("alerts", "checkpoint", "compilation", "deadlines"),
    *("hosts", "launch", "restart", "telemetry"),
)
"""Sections of the config that no compiled step depends on."""
NOTHING = "-"
"""Message of a host that has no address or no failure; the store of JAX may refuse an empty one."""
Trace = Callable[[], Any]
"""Returns a jax.stages.Traced."""


def cache_key_inputs(config: RunConfig, **others: Any) -> dict[str, Any] | None:
    """Returns the inputs that determine the compiled steps; None: only their lowered text does.

    None if custom code is a part of the steps, or if this package's source has changed since it was
    imported.
    """
    own = own_sources()
    if own is None or "custom" in (config.model.kind, config.optimizer.kind):
        return None
    dumped = without_rotatable(config.model_dump(mode="json"))
    for key in ("dir", "name", "tags", "guarantee"):
        dumped["run"].pop(key)
    if all(group.learning_rate is None for group in config.optimizer.groups):
        dumped["optimizer"].pop("learning_rate")  # An input; with groups, rates are relative to it.
    dumped["train"]["steps"] = configs.horizon_steps(config)
    dumped["guards"].pop("corruption")  # How often copies are compared is no part of a program.
    sections = {name: part for name, part in dumped.items() if name not in SECTIONS_NOT_COMPILED}
    return {"sources": own, "config": sections, **others}


@functools.cache
def own_sources(folder: str = "") -> str | None:
    """Returns the digest of this package's source, or of one folder of it; None: it has changed."""
    since, now = import_times(SystemClock())
    return executable.sources(PACKAGE / folder, since=since, now=now)


def remember_sources() -> None:
    """Digests this package's source now, for all processes that are forked from this one."""
    for folder in ("", "data", "engine", "models"):
        own_sources(folder)


def import_times(clock: Clock) -> tuple[float, float]:
    """Returns when this process started, before its imports, and the time, by the wall clock."""
    return process_start(clock), clock.wall()


def process_start(clock: Clock) -> float:
    """Returns when this process started, by the wall clock."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = float(Path("/proc/uptime").read_text().split()[0])
    return clock.wall() - (since_boot - ticks / os.sysconf("SC_CLK_TCK"))


def use_compilation_cache(folder: Path) -> None:
    """Makes JAX cache compiled programs in `folder`, including ones that compile fast.

    Raises:
      ConfigError: other accounts can use the folder.
    """
    files.make_private_dir(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def environment_here() -> Mapping[str, str]:
    """Returns the environment of this process, in which JAX has read its settings."""
    return os.environ


def take_programs_key() -> AttemptKey:
    """Takes the key under which the hosts send each other programs out of the environment."""
    return program_transfer.take_key(os.environ)


def xla_flags_here() -> str:
    """Returns the XLA_FLAGS of this process."""
    return os.environ.get("XLA_FLAGS", "")


def set_determinism(determinism: str) -> None:
    """Adds the flags of `run.determinism` to XLA_FLAGS, which XLA reads at its first use.

    Raises:
      ConfigError: XLA was used before, as in a notebook, without the flags.
    """
    flags = xla_flags(xla_flags_here(), determinism=determinism)
    if flags == xla_flags_here():
        return
    if xla_bridge.backends_are_initialized():
        raise ConfigError(
            f"run.determinism is {determinism}, and this process has used JAX without it. Restart "
            f"the process (the notebook's kernel), or set XLA_FLAGS={flags!r} before JAX is used."
        )
    os.environ["XLA_FLAGS"] = flags


def configure_jax(section: CompileSection, emit: Emit) -> None:
    """Makes JAX use its cache for programs besides the steps, unless others can use the folder."""
    if section.cache_dir is None:
        return
    try:
        use_compilation_cache(section.cache_dir.expanduser() / "jax")
    except RunError as error:
        emit(Noted(f"JAX's compilation cache is not used: {error}"))


def programs_folder(section: CompileSection) -> Path | None:
    """Returns the folder of compiled steps; None: no steps are stored."""
    if section.cache_dir is None or not section.keep_programs:
        return None
    return section.cache_dir.expanduser() / "programs"


@dataclass(frozen=True)
class StepToCompile:
    """A step that can be traced and compiled."""

    trace: Trace
    signature: Signature
    devices: Sequence[Any] | None = None
    """Devices in their order in the program; None: the mesh's devices, in its order."""


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
        self.devices = step.devices
        self._trace = step.trace
        self._here = here
        self._made_of = made_of

    @functools.cached_property
    def lowered(self) -> Any:
        """The jax.stages.Lowered."""
        return self._trace().lower()

    @functools.cached_property
    def text(self) -> str:
        """Digest of the lowered text, which has all constants and no file names."""
        return hashlib.sha256(self.lowered.as_text().encode()).hexdigest()

    @functools.cached_property
    def text_key(self) -> str:
        """The key made of lowered text, call signature and name.

        An argument that is None is not in the text, but is a part of the call signature. Two steps
        of a run may have the same text.
        """
        call = [str(self.lowered.in_tree), str(self.lowered.out_tree)]
        inputs = {"text": self.text, "call": call, "name": self.name}
        return executable.key({**self._here, **inputs})

    @functools.cached_property
    def key(self) -> str:
        """The key that needs no trace, where there is one."""
        if self._made_of is None:
            return self.text_key
        return executable.key({**self._here, "made_of": self._made_of, "name": self.name})


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step and where it comes from."""

    call: Any
    """The jax.stages.Compiled."""
    text: str
    """Digest of the lowered text."""
    compilation: str
    """Random name of the compilation, the same on all hosts."""
    data: bytes | None = None
    """Content of its file; None: it can't be stored."""


def get(
    steps: Mapping[str, StepToCompile],
    context: AttemptContext,
    *,
    devices: Sequence[Any],
    made_of: Mapping[str, Any] | None,
    section: CompileSection,
    options: XlaOptions,
    seconds: float,
) -> dict[str, CompiledStep]:
    """Returns the compiled steps by name.

    Args:
      devices: devices of the mesh, in its order.
      made_of: what determines the lowered text; None: only the text itself does.
      section: where programs are stored, and how many.
      seconds: how long the hosts wait for each other.
    """
    begun = context.clock.monotonic()
    # Computing a key may trace the step, so this phase has the time limit of compilation.
    context.emit(PhaseChanged("compile", "looking for compiled steps of an earlier attempt"))
    programs = [
        Program(
            name,
            step,
            executable.here(step.devices or devices, environment=os.environ)
            | {"xla_options": options.text},
            made_of,
        )
        for name, step in steps.items()
    ]
    folder = programs_folder(section)
    if folder is None:
        why, compiled = "compilation.keep_programs=0, or compilation.cache_dir=null", {}
        for program in programs:
            context.emit(PhaseChanged("compile", f"{program.name} step"))
            call = compile_with(program.lowered, options)
            compiled[program.name] = CompiledStep(call, program.text, "")
        context.emit(StepsCompiled(why, context.clock.monotonic() - begun))
        return compiled
    most = section.keep_programs
    cache = _Cache(context, folder, devices, options, most=most, seconds=seconds)
    found, why = cache.load({program.key: program for program in programs}, "steps")
    if found is not None:
        context.emit(CompiledStepsLoaded(tuple(found), context.clock.monotonic() - begun))
        return found
    compiled = {program.name: cache.load_by_text_or_compile(program) for program in programs}
    cache.store(programs, compiled)
    context.emit(StepsCompiled(why, context.clock.monotonic() - begun))
    return compiled


class _Cache:
    """The folder of compiled steps of this account on this machine, in agreement of all hosts."""

    def __init__(
        self,
        context: AttemptContext,
        folder: Path,
        devices: Sequence[Any],
        options: XlaOptions,
        *,
        most: int,
        seconds: float,
    ) -> None:
        self._context, self._folder, self._devices = context, folder, devices
        self._options, self._most, self._seconds = options, most, seconds

    def load(
        self, programs: Mapping[str, Program], topic: str
    ) -> tuple[dict[str, CompiledStep] | None, str]:
        """Returns the programs under their keys, of one compilation on all hosts.

        Hosts that have them send them to the others. If that is impossible, or fails on a host,
        returns None and the reason on all hosts.
        """
        found, why = self._load_here(programs)
        if self._context.peers.member.is_alone:
            return found, why
        offer = Offer(
            tuple(programs),
            () if found is None else tuple(step.compilation for step in found.values()),
            self._context.programs_key.refusal,
        )
        decided = program_offers.decide(self._all(topic, offer.encode()))
        if isinstance(decided, str):
            return None, f"{why}; {decided}" if why else decided
        if not decided.takers:
            return found, ""
        return self._transfer(programs, topic, decided, found)

    def _all(self, topic: str, message: str) -> Mapping[int, str]:
        """Returns the message of every host."""
        peers = self._context.peers  # No topic is a folder of another: `poll` reads all below it.
        peers.publish(topic, message)
        peers.barrier(topic, seconds=self._seconds)
        return peers.poll(topic)

    def _transfer(
        self,
        programs: Mapping[str, Program],
        topic: str,
        transfer: Transfer,
        found: dict[str, CompiledStep] | None,
    ) -> tuple[dict[str, CompiledStep] | None, str]:
        """Sends the programs to the hosts that lack them; see `load`."""
        context, host = self._context, self._context.peers.member.host
        doing = f"{host_list(transfer.sources)} -> {host_list(transfer.takers)}"
        context.emit(PhaseChanged("compile", f"sending compiled steps: {doing}"))
        with contextlib.ExitStack() as stack:
            address = ""
            if host in transfer.sources and found is not None:
                address = self._serve(dict(zip(programs, found.values(), strict=True)), stack)
            addresses = self._all(f"{topic}-at", address or NOTHING)
            why = ""
            if host in transfer.takers:
                try:
                    found = self._take(programs, transfer, addresses)
                except (TransferFailed, Unusable) as error:
                    why = f"host {transfer.source_of(host)} could not send them: {error}"
                    context.emit(Noted(f"the steps are compiled: {why}"))
            results = self._all(f"{topic}-taken", why or NOTHING)
        for other, reason in results.items():
            if reason != NOTHING:
                return None, why or f"host {other} could not take them: {reason}"
        return found, ""

    def _serve(self, steps: Mapping[str, CompiledStep], stack: contextlib.ExitStack) -> str:
        """Sends programs on request until the stack is closed; returns the address, "" if none."""
        coordinator = self._context.claim.coordinator
        assert coordinator is not None
        contents = {key: step.data for key, step in steps.items() if step.data is not None}
        try:
            server = ProgramServer(
                contents,
                address=own_address(coordinator),
                key=self._context.programs_key.key,
            )
        except OSError as error:
            self._context.emit(Noted(f"the compiled steps can't be sent to other hosts: {error}"))
            return ""
        return stack.enter_context(server).address

    def _take(
        self, programs: Mapping[str, Program], transfer: Transfer, addresses: Mapping[int, str]
    ) -> dict[str, CompiledStep]:
        """Returns the programs that another host sends; they are stored here too if possible.

        Raises:
          TransferFailed: they were not sent, or are of another compilation.
          Unusable: they can't be loaded here.
        """
        context, begun = self._context, self._context.clock.monotonic()
        source = transfer.source_of(context.peers.member.host)
        if addresses.get(source, NOTHING) == NOTHING:
            raise TransferFailed("it can't listen")
        contents = program_transfer.fetch(
            addresses[source],
            list(programs),
            key=context.programs_key.key,
            num_takers=transfer.num_takers,
            most_seconds=self._seconds / 2,
            clock=context.clock,
        )
        taken = dict[str, CompiledStep]()
        for data, (key, program), compilation in zip(
            contents, programs.items(), transfer.compilations, strict=True
        ):
            call = executable.load(data, program.signature, program.devices or self._devices)
            facts = executable.facts_of(data)
            if facts["compilation"] != compilation:
                raise TransferFailed(f"compilation {facts['compilation']} instead of {compilation}")
            taken[program.name] = CompiledStep(call, **facts, data=data)
            self._keep([key], program.name, data)
        seconds = context.clock.monotonic() - begun
        size_bytes = sum(map(len, contents))
        context.emit(CompiledStepsReceived(tuple(taken), source, size_bytes, seconds))
        return taken

    def _keep(self, keys: Iterable[str], name: str, data: bytes) -> None:
        """Stores a program under keys; a failure is an event."""
        try:
            for key in keys:
                executable.keep(self._folder, key, data, most=self._most)
        except (Unusable, RunError, OSError) as error:
            self._context.emit(Noted(f"the compiled {name} step is not stored: {error}"))

    def _load_here(
        self, programs: Mapping[str, Program]
    ) -> tuple[dict[str, CompiledStep] | None, str]:
        found = dict[str, CompiledStep]()
        for key, program in programs.items():
            try:
                data = executable.read(self._folder, key)
                if data is None:
                    return None, "none is stored for these devices, libraries and settings"
                devices = program.devices or self._devices
                call = executable.load(data, program.signature, devices)
            except Unusable as error:
                why = f"{executable.file_of(self._folder, key)}: {error}"
                self._context.emit(Noted(f"the steps are compiled again: {why}"))
                return None, why
            found[program.name] = CompiledStep(call, **executable.facts_of(data), data=data)
        return found, ""

    def load_by_text_or_compile(self, program: Program) -> CompiledStep:
        """Returns a program of the same lowered text, or compiles it; `store` stores it."""
        context, name = self._context, program.name
        context.emit(PhaseChanged("compile", f"{name} step"))
        # On another host the keys may differ, so only a single host may leave this out.
        if program.key != program.text_key or not context.peers.member.is_alone:
            found, _ = self.load({program.text_key: program}, f"text/{name}")
            if found is not None:
                return found[name]
        compilation = context.peers.broadcast(
            f"compilation/{name}", lambda: secrets.token_hex(8), seconds=self._seconds
        )
        with _without_jax_cache():
            call = compile_with(program.lowered, self._options)
        facts, data = {"text": program.text, "compilation": compilation}, None
        try:
            data = executable.dump(call, program.signature, facts)
        except Unusable as error:
            context.emit(Noted(f"the compiled {name} step is not stored: {error}"))
        return CompiledStep(call, **facts, data=data)

    def store(self, programs: Sequence[Program], compiled: Mapping[str, CompiledStep]) -> None:
        """Stores the programs under both keys.

        Host 0 writes first; another host writes only what it does not find, on its own disk.
        """
        peers = self._context.peers
        if not peers.member.leads:
            peers.barrier("stored", seconds=self._seconds)
        for program in programs:
            step = compiled[program.name]
            if step.data is None:
                continue
            keys = {program.key, program.text_key}
            if not peers.member.leads:
                keys = {key for key in keys if not self._has(key, step.compilation)}
            self._keep(keys, program.name, step.data)
        if peers.member.leads:
            peers.barrier("stored", seconds=self._seconds)

    def _has(self, key: str, compilation: str) -> bool:
        """Returns whether the file of a key is of a compilation."""
        try:
            data = executable.read(self._folder, key)
            return data is not None and executable.facts_of(data)["compilation"] == compilation
        except (Unusable, ValueError, KeyError, TypeError):
            return False  # A file of another format, or a damaged one.


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
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
