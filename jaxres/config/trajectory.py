"""What belongs to the trajectory, its digest, and whether two configurations share one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxres.config.errors import one_line, show
from jaxres.config.schema import GptModel, RunConfig, Section
from jaxres.config.schema_fields import is_free
from jaxres.config.schema_training import ConstantSchedule, LossScaleSection, RollbackSection
from jaxres.faults import ConfigError
from jaxres.storage.path import Place

Change = tuple[str, Any, Any]
"""(dotted key, value there, value here); ABSENT on a side that has no such key."""

ABSENT = "(absent)"
HORIZON = "optimizer.schedule.horizon_steps"
STEPS = "train.steps"


def horizon_steps(config: RunConfig) -> int | None:
    """Returns the steps that the schedule spans; None where the rate does not depend on them."""
    schedule = config.optimizer.schedule
    if isinstance(schedule, ConstantSchedule) and not schedule.warmup_fraction:
        return None
    return schedule.horizon_steps or config.train.steps


def loss_scale(config: RunConfig) -> LossScaleSection | None:
    """Returns how the loss is scaled; None where it is not."""
    section, model = config.train.loss_scale, config.model
    computes_in_float16 = isinstance(model, GptModel) and model.compute_dtype == "float16"
    is_wanted = section.when == "always" or (section.when == "auto" and computes_in_float16)
    return section if is_wanted else None


def trajectory(config: RunConfig) -> dict[str, Any]:
    """Returns the trajectory keys, nested and plain.

    `train.steps` is left out; where the rate depends on it, it is in the schedule's horizon. So a
    run of 1000 steps has the trajectory of a run of 2000 whose schedule spans 1000.
    """
    data = _with_defaults(config)
    if data["guards"]["rollback"] == _rate_after_rollbacks(None):
        data["guards"].pop("rollback")
    spikes = data["guards"]["spikes"]
    if spikes is not None and spikes["mode"] == "act":
        spikes.pop("mode")
    if data["train"]["loss_scale"] is None:
        data["train"].pop("loss_scale")
    return data


def _with_defaults(config: RunConfig) -> dict[str, Any]:
    """Returns the trajectory keys with those that old digests do not have, to be compared."""
    data = _bound(config, config.model_dump(mode="json"))
    data["guards"]["rollback"] = _rate_after_rollbacks(config.guards.rollback)
    data["train"].pop("steps")
    scale = loss_scale(config)  # Which of the two ways it is asked for changes nothing.
    data["train"]["loss_scale"] = None if scale is None else scale.model_dump(exclude={"when"})
    if data["init_from"] == {"kind": "seed"}:  # As before there was a choice: old digests stand.
        data.pop("init_from")
    schedule = data["optimizer"]["schedule"]
    schedule.pop("horizon_steps")
    horizon = horizon_steps(config)
    if horizon is not None:
        schedule["horizon_steps"] = horizon
    return data


def _rate_after_rollbacks(section: RollbackSection | None) -> dict[str, Any]:
    """Returns what of the section is no free key; the defaults where no rate is lowered."""
    if section is None or section.rate_factor == 1.0:
        section = RollbackSection()
    return {"rate_factor": section.rate_factor, "rate_steps": section.rate_steps}


def _bound(section: Section, dumped: dict[str, Any]) -> dict[str, Any]:
    """Returns the dumped fields that are not free; sections of free fields only disappear."""
    kept: dict[str, Any] = {}
    for key, info in type(section).model_fields.items():
        value, plain = getattr(section, key), dumped[key]
        below = _bound(value, plain) if isinstance(value, Section) else plain
        is_empty_section = isinstance(value, Section) and not below
        if not is_free(info) and not is_empty_section:
            kept[key] = below
    return kept


def digest(config: RunConfig) -> str:
    """Returns the SHA-256 (hex) over the trajectory as canonical JSON."""
    text = json.dumps(
        trajectory(config),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def run_dir(config: RunConfig, name: str) -> Place:
    """Returns the run directory: the configured one, or runs/<name>-<first 8 of the digest>."""
    return config.run.dir or Path("runs") / f"{name}-{digest(config)[:8]}"


def diff(recorded: RunConfig, given: RunConfig) -> list[Change]:
    """Returns the trajectory keys in which the two differ, as the user writes them."""
    changes = _changes(_with_defaults(recorded), _with_defaults(given))
    return [_as_written(change, recorded, given) for change in changes]


def _as_written(change: Change, recorded: RunConfig, given: RunConfig) -> Change:
    """Names train.steps where that is the horizon's only source."""
    both = (recorded.optimizer.schedule.horizon_steps, given.optimizer.schedule.horizon_steps)
    if change[0] == HORIZON and both == (None, None):
        return (STEPS, recorded.train.steps, given.train.steps)
    return change


def free_changes(recorded: RunConfig, given: RunConfig) -> list[Change]:
    """Returns the keys in which the two differ and which may; run.dir, the place, is left out."""
    bound = {key for key, _, _ in diff(recorded, given)} | {"run.dir"}
    changes = _changes(recorded.model_dump(mode="json"), given.model_dump(mode="json"))
    return [change for change in changes if change[0] not in bound]


def _changes(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[Change]:
    """Compares two nested dicts; where the kind differs, it alone tells about keys of one side."""
    changes: list[Change] = []
    other_kind = there.get("kind") != here.get("kind")
    keys = list(there) + [key for key in here if key not in there]
    for key in keys:
        a, b = there.get(key, ABSENT), here.get(key, ABSENT)
        if json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True):
            continue
        if other_kind and (a is ABSENT or b is ABSENT):
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            changes += _changes(a, b, f"{prefix}{key}.")
        else:
            changes.append((f"{prefix}{key}", a, b))
    return changes


def check_same(
    recorded: RunConfig,
    given: RunConfig,
    run_dir: Place | str,
    *,
    origins: Mapping[str, str] | None = None,
) -> None:
    """Raises ConfigError with every difference and the remedy if the trajectories differ.

    `origins` are those of the given configuration; with them the message says where it came from.
    """
    changes = diff(recorded, given)
    if not changes:
        return
    places = [_origin(key, origins or {}) for key, _, _ in changes]
    lines = [f"{run_dir}: this run was started with another trajectory (exit 78)"]
    for (key, there, here), place in zip(changes, places, strict=True):
        source = f" ({place})" if place else ""
        lines.append(one_line(f"  {key}: {_show(there)} there, {_show(here)} here{source}"))
    is_override = all(place == "command line" for place in places)
    what = "drop the override" if is_override else "give the values it was started with"
    plural = "s" if is_override and len(changes) > 1 else ""
    lines.append(
        f"To go on with that run {what}{plural}; "
        "to start a new one change run.dir, or leave it out."
    )
    if any(key == STEPS for key, _, _ in changes):
        lines.append(
            f"The learning rate depends on train.steps. To train longer in that run add "
            f"{HORIZON}={recorded.train.steps}: after that step the rate stays at its final value."
        )
    raise ConfigError("\n".join(lines))


def _origin(key: str, origins: Mapping[str, str]) -> str:
    place = origins.get(key, "default" if origins else "")
    return "command line" if place.startswith("command line") else place


def _show(value: Any) -> str:
    return value if value is ABSENT else show(value)
