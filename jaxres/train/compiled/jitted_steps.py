"""The train step, the evaluation step, the fingerprints: jits, traces, loads or compiles them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxres import config as configs
from jaxres import data
from jaxres.config import RunConfig
from jaxres.engine import (
    device_use,
    evaluate,
    replica_fingerprint,
    schedule,
    sharding_report,
)
from jaxres.engine import mesh as meshes
from jaxres.engine import state as states
from jaxres.engine import step as steps
from jaxres.engine.executable import Signature
from jaxres.engine.invariant_reduction import InvariantReduction
from jaxres.engine.replica_fingerprint import Copies
from jaxres.engine.state import TrainState
from jaxres.faults import ConfigError
from jaxres.runlog.events import Noted
from jaxres.train.checks import oom_advice
from jaxres.train.compiled import compile_cache, xla_options
from jaxres.train.compiled.compile_cache import CompiledStep, StepToCompile
from jaxres.train.components import Components
from jaxres.train.consensus import facts_shape
from jaxres.train.context import AttemptContext

SetMeans = Mapping[str, Mapping[str, float]]
"""Name of a validation set -> means of its loss and metrics."""


def traced_step(parts: Components, *, facts: Any = None, donates: bool = True) -> Any:
    """Jits the train step and returns its trace, which can be lowered for absent devices too.

    Args:
      facts: shape of the flags that the hosts exchange in each step; None with a single host.
      donates: whether the step donates the state, as every run does.
    """
    config = parts.config
    rate = schedule.learning_rate(
        config.optimizer.schedule,
        total_steps=config.train.steps,
    )
    step = steps.make_train_step(
        parts.model,
        parts.tx,
        rate,
        steps.StepSettings(
            clip_norm=config.optimizer.clip_norm,
            microbatches=parts.plan.microbatches,
            spikes=config.guards.spikes,
            loss_scale=configs.loss_scale(config),
            replicate=meshes.replicate(parts.mesh),
            trainable=parts.trainable,
            ema_decay=config.optimizer.ema_decay,
            sources=parts.sources,
            reduction=_reduction(parts),
        ),
    )
    _check_names(config, parts.evaluated_shapes(rows=1))
    signature = _step_signature(parts, facts=facts)
    batch = parts.batch_shapes(rows=parts.rows_per_batch)

    def train_step(state: TrainState, packed: Any, facts: Any, peak_rate: Any) -> Any:
        return step(state, meshes.unpack(packed, batch), facts, peak_rate)

    donated = 0 if donates else ()
    jitted = jax.jit(train_step, donate_argnums=donated, out_shardings=signature.results)
    traced = jitted.trace(*signature.arguments)
    _refuse_ordered_effects(traced, num_devices=parts.mesh.size)
    return traced


def _reduction(parts: Components) -> InvariantReduction | None:
    number = parts.plan.virtual_shards
    return None if number is None else InvariantReduction(parts.mesh, number)


def _refuse_ordered_effects(traced: Any, *, num_devices: int) -> None:
    """Raises ConfigError for effects that JAX can't lower for several devices."""
    ordered = [effect for effect in traced.jaxpr.effects if "Ordered" in type(effect).__name__]
    if ordered and num_devices > 1:
        raise ConfigError(
            "model: its loss has a callback with ordered=True, as in jax.debug.print(...), which "
            f"JAX supports on one device only; here are {num_devices}. Use ordered=False."
        )


def _step_signature(parts: Components, *, facts: Any) -> Signature:
    shapes, mesh = parts.shapes, parts.mesh
    batch = parts.batch_shapes(rows=parts.rows_per_batch)
    return Signature(
        arguments=(shapes, meshes.packed_shapes(batch), facts, schedule.rate_shape(mesh)),
        results=(jax.tree.map(lambda x: x.sharding, shapes), meshes.replicated(mesh)),
    )


@dataclass(frozen=True)
class CompiledSteps:
    """The compiled functions of a run."""

    train: Any
    """The train step, a jax.stages.Compiled."""
    text: str
    """Digest of its lowered text."""
    evaluate: Callable[[Any, evaluate.Listener], SetMeans | None]
    """Evaluates a state."""
    fingerprints: Any = None
    """The fingerprints of the copies of the state; None: off, or no array has a copy."""
    replay: Any = None
    """The fingerprints of all parts of the state, for replays; None: off."""
    rotated_train: Any = None
    """The train step for the rotated devices; None: replays are on the same devices, or off."""
    rotated_replay: Any = None
    """The fingerprints of all parts of a state on the rotated devices."""
    xla_options: str = ""
    """The options of XLA with which they were compiled."""


def compile_alone(parts: Components) -> Any:
    """Compiles the train step of a single host with the options of a run, without the cache."""
    options = xla_options.of(parts, flags=compile_cache.xla_flags_here())
    return xla_options.compile_with(traced_step(parts).lower(), options)


def load_or_compile(
    parts: Components, context: AttemptContext, *, rotated: Components | None = None
) -> CompiledSteps:
    """Loads the steps from the compile cache, or compiles them, before the first step.

    Args:
      rotated: the same on the rotated devices, for replays; None: no replays there.
    """
    config, mesh = parts.config, parts.mesh
    facts = None if context.peers.member.is_alone else facts_shape(mesh)
    rows = parts.plan.rows_at_once  # A whole batch may not fit into memory.
    trace = functools.partial(traced_step, parts, facts=facts)
    to_compile = {"training": StepToCompile(trace, _step_signature(parts, facts=facts))}
    if parts.evaluates:
        trace = functools.partial(traced_evaluation, parts, facts=facts, rows=rows)
        signature = _evaluation_signature(parts, facts=facts, rows=rows)
        to_compile["evaluation"] = StepToCompile(trace, signature)
    to_compile |= _fingerprints(parts)
    if rotated is not None:
        to_compile |= _rotated(rotated, facts=None if facts is None else facts_shape(rotated.mesh))
    batch = {name: str(shape) for name, shape in parts.batch_shapes(rows=rows).items()}
    made_of = compile_cache.cache_key_inputs(
        config,
        vocab_size=parts.dataset.vocab_size,
        batch=batch,
        plan=str(parts.plan),
        mesh=str(mesh.shape),
    )
    options = xla_options.of(parts, flags=compile_cache.xla_flags_here())
    if (note := options.note()) is not None:
        context.emit(Noted(note))
    compiled = compile_cache.get(
        to_compile,
        context,
        devices=list(mesh.devices.flat),
        made_of=made_of,
        section=config.compilation,
        options=options,
        seconds=config.deadlines.compile_seconds,
    )
    needed = sharding_report.step_bytes(compiled["training"].call)
    large = oom_advice.warn_device_memory(config, needed, sharding_report.device_limit(mesh))
    if large is not None:
        context.emit(Noted(large))
    return _compiled_steps(parts, compiled, options.text)


def _compiled_steps(
    parts: Components, compiled: Mapping[str, CompiledStep], options: str
) -> CompiledSteps:
    """Returns the steps, each of which is executed alone when it is first."""
    calls = {name: device_use.alone_at_first(each.call) for name, each in compiled.items()}
    evaluation = calls.get("evaluation")
    return CompiledSteps(
        train=calls["training"],
        text=compiled["training"].text,
        evaluate=_no_evaluation if evaluation is None else _evaluation(parts, evaluation),
        fingerprints=calls.get("fingerprints"),
        replay=calls.get("replay"),
        rotated_train=calls.get("rotated training"),
        rotated_replay=calls.get("rotated replay"),
        xla_options=options,
    )


def _rotated(parts: Components, *, facts: Any) -> dict[str, StepToCompile]:
    """Returns the train step and the fingerprints for the rotated devices."""
    devices = list(parts.mesh.devices.flat)
    train = functools.partial(traced_step, parts, facts=facts)
    fingerprints = functools.partial(traced_fingerprints, parts, with_single=True)
    signature = Signature((parts.shapes,), meshes.replicated(parts.mesh))
    return {
        "rotated training": StepToCompile(train, _step_signature(parts, facts=facts), devices),
        "rotated replay": StepToCompile(fingerprints, signature, devices),
    }


def _fingerprints(parts: Components) -> dict[str, StepToCompile]:
    """Returns the fingerprints that the config asks for, and for which there are copies."""
    section = parts.config.guards.corruption
    signature = Signature((parts.shapes,), meshes.replicated(parts.mesh))
    found = dict[str, StepToCompile]()
    if section is not None and Copies.of(parts.shapes, parts.mesh).any:
        trace = functools.partial(traced_fingerprints, parts)
        found["fingerprints"] = StepToCompile(trace, signature)
    if section is not None and section.replay_every_steps is not None:
        trace = functools.partial(traced_fingerprints, parts, with_single=True)
        found["replay"] = StepToCompile(trace, signature)
    return found


def traced_fingerprints(parts: Components, *, with_single: bool = False) -> Any:
    """Jits the fingerprints of the state and returns their trace."""
    fingerprints = replica_fingerprint.make(parts.shapes, parts.mesh, with_single=with_single)
    jitted = jax.jit(fingerprints, out_shardings=meshes.replicated(parts.mesh))
    return jitted.trace(parts.shapes)


def _evaluation(
    parts: Components, step: Any
) -> Callable[[TrainState, evaluate.Listener], SetMeans | None]:
    """Returns a function that evaluates a state with the compiled evaluation step."""
    evaluation = evaluate.make(
        step,
        parts.dataset.validation,
        metrics=parts.model_metrics,
        rows_per_batch=parts.plan.rows_at_once,
        limit=parts.config.evaluation.batches * parts.plan.num_turns,
        mesh=parts.mesh,
    )

    def evaluate_state(state: TrainState, hosts: evaluate.Listener) -> SetMeans | None:
        params = states.evaluated_params(state, parts.trainable)
        return evaluation(params, state.model_state, hosts)

    return evaluate_state


def traced_evaluation(parts: Components, *, facts: Any, rows: int) -> Any:
    """Jits the evaluation step for `rows` rows and returns its trace; see `traced_step`."""
    signature = _evaluation_signature(parts, facts=facts, rows=rows)
    step = jax.jit(steps.make_eval_step(parts.model), out_shardings=signature.results)
    return step.trace(*signature.arguments)


def _evaluation_signature(parts: Components, *, facts: Any, rows: int) -> Signature:
    mesh = parts.mesh
    mask = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=meshes.batch_sharding(mesh))
    return Signature(
        arguments=(
            states.evaluated_params(parts.shapes, parts.trainable),
            parts.shapes.model_state,
            parts.evaluated_shapes(rows=rows),
            mask,
            facts,
        ),
        results=meshes.replicated(mesh),
    )


def _check_names(config: RunConfig, row: Mapping[str, Any]) -> None:
    """Raises ConfigError if rows lack an array that a model of jaxres reads."""
    if config.model.kind == "custom":
        return
    is_vit = config.model.kind == "vit"
    reads = ("image", "label") if is_vit else data.TOKEN_ROW_KEYS
    missing = [name for name in reads if name not in row]
    if missing:
        remedy = "these arrays" if is_vit else "data.seq_len + 1 token ids, or these arrays"
        raise ConfigError(
            f"data.source: rows have the arrays {', '.join(sorted(row))}, and model.kind="
            f"{config.model.kind} reads {', '.join(reads)}; it lacks "
            f"{', '.join(missing)}. Return {remedy} (docs/data.md, Custom)."
        )


def _no_evaluation(state: Any, hosts: Any) -> SetMeans | None:
    raise AssertionError("the schedule has no evaluation")
