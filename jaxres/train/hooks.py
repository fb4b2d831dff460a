"""Hooks: the user's functions that look at the run every so many steps. They change no bit of it.

A hook gets arrays of the device, which can't be written to, in dicts of its own. One that fails is
a warning; one that takes longer than its limit is a warning too, and is not called again in this
attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxres.config.schema.training import HookSection
from jaxres.engine.state import TrainState
from jaxres.models.target import check_call, load_target
from jaxres.runlog.events import Emit, Noted, PhaseChanged
from jaxres.runlog.metrics import MetricsLine
from jaxres.secret_values import redact_text
from jaxres.storage.path import RunPath
from jaxres.storage.timeouts import CallTimeout, call_with_timeout


@dataclass(frozen=True)
class HookContext:
    """Argument of a hook, after a completed step."""

    step: int
    params: Mapping[str, Any]
    """The parameters that are evaluated: averaged, if the run does so. On several hosts each one
    has only its parts of split arrays."""
    model_state: Any
    """Arrays that are no parameters, such as batch statistics; None: there are none."""
    metrics: Mapping[str, Any]
    """The step's line of metrics.jsonl."""
    run_dir: RunPath
    host: int
    """Number of this host; a hook is called on each."""


@dataclass
class Hook:
    """One configured hook."""

    section: HookSection
    function: Callable[..., object]
    is_on: bool = True


def load(sections: Sequence[HookSection]) -> list[Hook]:
    """Imports the functions of the configured hooks.

    Raises:
      ConfigError: one does not exist or can't be called.
    """
    return [
        Hook(section, _function_of(section, key=f"hooks[{number}]"))
        for number, section in enumerate(sections)
    ]


class Hooks:
    """The hooks of an attempt."""

    def __init__(
        self,
        hooks: Sequence[Hook] = (),
        *,
        params_of: Callable[[TrainState], Mapping[str, Any]] = lambda state: state.params,
        emit: Emit = lambda event: None,
        run_dir: RunPath | None = None,
        host: int = 0,
    ) -> None:
        """Calls none yet; `load` returns the hooks of a config."""
        self._hooks = hooks
        self._params_of, self._emit, self._run_dir, self._host = params_of, emit, run_dir, host
        self._called = 0
        """Newest step that they were called for."""

    def begin(self, step: int) -> None:
        """Sets the step that training continues from, for which hooks are not called again."""
        self._called = step

    def are_due(self, step: int) -> bool:
        """Returns whether a hook is to be called after a step, or would be if it were not off.

        It may be off on this host alone, and all hosts must wait for the same step.
        """
        return step > self._called and bool(self._of_step(step))

    def _of_step(self, step: int) -> list[Hook]:
        return [hook for hook in self._hooks if step % hook.section.every_steps == 0]

    def call(self, state: TrainState, line: MetricsLine) -> None:
        """Calls the hooks that are due after the step of this line, with the state after it."""
        self._called = line.step
        for hook in self._of_step(line.step):
            if not hook.is_on:
                continue
            name, seconds = hook.section.target, hook.section.timeout_seconds
            context = self._context(state, line)
            self._emit(PhaseChanged("hook", name))
            try:
                error = call_with_timeout(
                    lambda hook=hook, context=context: _error_of(hook, context),
                    seconds=seconds,
                    name="hook",
                )
            except CallTimeout:
                hook.is_on = False
                self._warn(
                    name, line.step, f"took longer than {seconds:g} s; it is off from now on"
                )
                continue
            if error is not None:
                self._warn(name, line.step, f"{type(error).__name__}: {error}")
        self._emit(PhaseChanged("train"))

    def _context(self, state: TrainState, line: MetricsLine) -> HookContext:
        """Returns the context of one hook's call; a change of its dicts changes nothing else."""
        assert self._run_dir is not None
        params, model_state = jax.tree.map(lambda x: x, (self._params_of(state), state.model_state))
        return HookContext(line.step, params, model_state, line.fields(), self._run_dir, self._host)

    def _warn(self, name: str, step: int, text: str) -> None:
        note = f"WARNING: hook {name} at step {step}: {text}; training goes on"
        self._emit(Noted(redact_text(note)))


def _function_of(section: HookSection, *, key: str) -> Callable[..., object]:
    function = load_target(section.target, key=key)
    check_call(function, section.target, ("run",), section.args, key=key)
    return function


def _error_of(hook: Hook, context: HookContext) -> BaseException | None:
    """Calls a hook and returns its exception: a KeyboardInterrupt of its own is no Ctrl-C."""
    try:
        hook.function(context, **hook.section.args)
    except BaseException as error:  # noqa: BLE001 - the user's code.
        return error
    return None
