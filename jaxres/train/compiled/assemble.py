"""Makes the components of a trainer for a mesh, which may be abstract: computes nothing yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxres import config as configs
from jaxres import models
from jaxres.checkpoint.state_arrays import array_infos
from jaxres.config import RunConfig
from jaxres.data import Dataset
from jaxres.engine import mesh as meshes
from jaxres.engine import mesh_plan, optimizer
from jaxres.engine import state as states
from jaxres.engine.mesh_plan import MeshPlan
from jaxres.engine.state import TrainState
from jaxres.engine.trainable import Trainable
from jaxres.faults import ConfigError
from jaxres.models import Model
from jaxres.models.interface import anywhere
from jaxres.runlog import guarantee
from jaxres.train.compiled import compile_cache
from jaxres.train.components import Components


def devices_here(config: RunConfig) -> tuple[MeshPlan, Mesh, str | None]:
    """Returns the mesh plan, the mesh of this job's devices, and a warning if the plan is slow.

    Raises:
      ConfigError: the number of devices does not fit the config.
    """
    devices = jax.devices()
    plan = mesh_plan.plan(
        config.mesh,
        config.train,
        config.model,
        num_devices=len(devices),
        num_hosts=jax.process_count(),
    )
    slow = mesh_plan.crosses_hosts(plan, devices_per_host=jax.local_device_count())
    return plan, meshes.build(config.mesh, devices=devices), slow


def components(
    config: RunConfig, dataset: Dataset, *, plan: MeshPlan, mesh: Mesh, platform: str
) -> Components:
    """Returns the components for a mesh, which may be abstract; computes nothing yet."""
    flags = guarantee.xla_flags(compile_cache.xla_flags_here(), determinism=config.run.determinism)
    model = models.build(
        config.model,
        vocab_size=dataset.vocab_size,
        seq_len=config.data.seq_len,
        platform=platform,
        keep_rows=meshes.pin_batch_dim(mesh) if plan.virtual_shards is None else anywhere,
        adapters=config.lora,
        deterministic=guarantee.takes_deterministic_kernels(flags),
    )
    tx = optimizer.build(config.optimizer, axes=model.axes)
    trainable = optimizer.trainable(config.optimizer, model.axes)
    shapes, init = _initializer(model, tx, trainable, mesh, config)
    _check_classes(config, dataset)
    return Components(config, dataset, plan, mesh, model, tx, trainable, shapes, init)


def state_shapes(
    config: RunConfig, *, vocab_size: int | None, mesh: Mesh, platform: str
) -> tuple[TrainState, Model]:
    """Returns the state's shapes with shardings, and the model; needs no data set."""
    model = models.build(
        config.model,
        vocab_size=vocab_size,
        seq_len=config.data.seq_len,
        platform=platform,
        adapters=config.lora,
    )
    tx = optimizer.build(config.optimizer, axes=model.axes)
    trainable = optimizer.trainable(config.optimizer, model.axes)
    return _initializer(model, tx, trainable, mesh, config)[0], model


def _check_classes(config: RunConfig, dataset: Dataset) -> None:
    if config.model.kind == "vit" and len(dataset.classes) > config.model.num_classes:
        raise ConfigError(
            f"model.num_classes: the data has {len(dataset.classes)} classes "
            f"({', '.join(dataset.classes[:5])}, ...), the model {config.model.num_classes}."
        )


def _initializer(
    model: Model, tx: Any, trainable: Trainable, mesh: Mesh, config: RunConfig
) -> tuple[TrainState, Callable[[], TrainState]]:
    """Returns the state's shapes with shardings, and a function that creates it sharded.

    Raises:
      ConfigError: an array can't be stored.
    """

    def init() -> TrainState:
        return states.init(
            model,
            tx,
            seed=config.run.seed,
            loss_scale=configs.loss_scale(config),
            trainable=trainable,
            ema_decay=config.optimizer.ema_decay,
        )

    bare = jax.eval_shape(init)
    try:
        array_infos(states.to_plain(bare))  # Raises for what no checkpoint can store.
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from error
    shardings = states.shardings(bare, model, mesh)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), bare, shardings
    )
    jitted = jax.jit(init, out_shardings=shardings, compiler_options=states.INIT_OPTIONS)
    return shapes, jitted
