"""Diagnostics of a diverged run: the last steps, gradient norms by parameter, rows of the data.

They are written into the attempt's folder, which no restore reads. A failed write does not change
how the run ends.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxres.engine.state import Progress, TrainState, to_plain
from jaxres.exit_codes import ExitCode
from jaxres.faults import RunError, StopRun
from jaxres.runlog.events import Noted
from jaxres.storage import files
from jaxres.train.components import CompletedStep, Trainer

REPORT = "report.json"


def diagnose(
    run: Trainer,
    stop: StopRun,
    recent: Iterable[CompletedStep],
    state: TrainState,
    progress: Progress,
) -> StopRun:
    """Writes the diagnostics if the run has diverged; returns the stop with their path."""
    bundle = run.diagnostics
    if stop.fault.exit != ExitCode.DIVERGED or bundle.what == "none":
        return stop
    member = run.peers.member
    try:
        files.make_dir(bundle.folder)
        if member.leads:
            facts = report(stop, recent, progress, params=run.metrics_layout.params)
            files.replace(bundle.folder / REPORT, json.dumps(facts, indent=1).encode())
        if bundle.what == "state":
            path = bundle.folder / f"state-host{member.host:03d}.npz"
            files.replace(path, _packed(to_plain(state)))
    except (RunError, OSError) as error:
        run.emit(Noted(f"the diagnostics could not be written: {error}"))
        return stop
    text = f"{stop.reason} Diagnostics of the last steps: {bundle.folder}"
    return dataclasses.replace(stop, reason=text)


def report(
    stop: StopRun, recent: Iterable[CompletedStep], progress: Progress, *, params: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the report as JSON values; non-finite numbers are strings: "nan", "-inf"."""
    facts = {
        "reason": stop.reason,
        "step": progress.step,
        "guards": progress.guards,
        "steps": [_step(completed, params) for completed in recent],
    }
    return _plain(facts)


def _step(completed: CompletedStep, params: tuple[str, ...]) -> dict[str, Any]:
    norms = np.sqrt(completed.measured.square_norms).tolist()
    return {
        "metrics": dataclasses.asdict(completed.line),
        "spike_score": completed.measured.spike_score,
        "state_is_finite": completed.measured.state_is_finite,
        "rows": completed.rows,
        "samples": completed.ids.tolist(),
        "bad_rows": completed.measured.bad_rows,
        "grad_norms": dict(zip(params, norms, strict=True)),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _packed(state: dict[str, Any]) -> bytes:
    """Returns an .npz of this process's shards: `path[first index of each dim]` -> array."""
    arrays = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                begins = ",".join(str(part.start or 0) for part in shard.index)
                arrays[f"{name}[{begins}]"] = np.asarray(shard.data)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()
