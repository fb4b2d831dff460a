"""What a person needs who looks why a run has diverged: the last steps, norms by parameter, rows.

It lies in the attempt's folder, where no restore looks. A disk that does not take it changes
nothing about the end.
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
from jaxres.faults import Exit, Stop, TypedEnd
from jaxres.runlog.events import Noted
from jaxres.storage import files
from jaxres.train.components import Recent, Run

REPORT = "report.json"


def diagnose(
    run: Run, stop: Stop, recent: Iterable[Recent], state: TrainState, progress: Progress
) -> Stop:
    """Writes the bundle if the run ends as diverged, and returns the stop, with where it lies."""
    bundle = run.diagnostics
    if stop.fault.exit != Exit.DIVERGED or bundle.what == "none":
        return stop
    member = run.peers.member
    try:
        files.make_dir(bundle.folder)
        if member.leads:
            facts = report(stop, recent, progress, params=run.form.params)
            files.replace(bundle.folder / REPORT, json.dumps(facts, indent=1).encode())
        if bundle.what == "state":
            path = bundle.folder / f"state-host{member.host:03d}.npz"
            files.replace(path, _packed(to_plain(state)))
    except (TypedEnd, OSError) as error:
        run.emit(Noted(f"the diagnostics could not be written: {error}"))
        return stop
    text = f"{stop.reason} What was seen last: {bundle.folder}"
    return dataclasses.replace(stop, reason=text)


def report(
    stop: Stop, recent: Iterable[Recent], progress: Progress, *, params: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the facts as JSON has them; numbers that are not finite are words: "nan", "-inf"."""
    facts = {
        "reason": stop.reason,
        "step": progress.step,
        "guards": progress.guards,
        "steps": [_step(one, params) for one in recent],
    }
    return _plain(facts)


def _step(one: Recent, params: tuple[str, ...]) -> dict[str, Any]:
    norms = np.sqrt(one.measured.square_norms).tolist()
    return {
        "metrics": dataclasses.asdict(one.line),
        "spike_score": one.measured.spike_score,
        "state_is_finite": one.measured.state_is_finite,
        "rows": one.rows,
        "samples": one.ids.tolist(),
        "bad_rows": one.measured.bad_rows,
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
    """Returns an .npz of what this process holds: `path[first index of each dim]` -> numbers."""
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                begins = ",".join(str(part.start or 0) for part in shard.index)
                found[f"{name}[{begins}]"] = np.asarray(shard.data)
    file = io.BytesIO()
    np.savez(file, **found)
    return file.getvalue()
