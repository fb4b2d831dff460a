"""The trajectory of a configuration: its keys, its digest, and comparison with another.

The digest has three definitions (docs/adr/0025). The first one contains the paths of content whose
fingerprint is recorded, and both earlier ones contain the secrets in arguments; they only name run
directories that exist already.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxres import secret_values
from jaxres.config.errors import one_line, show
from jaxres.config.schema.data import CustomSource, MixtureSource, Source, single_sources
from jaxres.config.schema.fields import is_content_path, is_free, is_later, iter_fields
from jaxres.config.schema.model import GptModel
from jaxres.config.schema.program import ProgramSection
from jaxres.config.schema.run_config import RunConfig, Section
from jaxres.config.schema.training import LossScaleSection, RollbackSection
from jaxres.faults import ConfigError
from jaxres.storage.path import SCHEME, RunPath, run_root

S = TypeVar("S", bound=Section)

Change = tuple[str, Any, Any]
"""(dotted key, recorded value, given value); ABSENT on a side without the key."""

ABSENT = "(absent)"
HORIZON = "optimizer.schedule.horizon_steps"
STEPS = "train.steps"
MIXTURE_PART = re.compile(r"^data\.source\.sources\[\d+\]\.source\.")


def horizon_steps(config: RunConfig) -> int | None:
    """Returns the steps that the schedule spans; None if the learning rate is constant."""
    schedule = config.optimizer.schedule
    warms_up_by_fraction = schedule.warmup_fraction and schedule.warmup_steps is None
    if not schedule.ends_at_horizon and not warms_up_by_fraction:
        return None
    return schedule.horizon_steps or config.train.steps


def loss_scale(config: RunConfig) -> LossScaleSection | None:
    """Returns the settings of the loss scale; None if the loss is not scaled."""
    section, model = config.train.loss_scale, config.model
    computes_in_float16 = isinstance(model, GptModel) and model.compute_dtype == "float16"
    is_scaled = section.when == "always" or (section.when == "auto" and computes_in_float16)
    return section if is_scaled else None


def trajectory(
    config: RunConfig, *, with_paths: bool = False, with_secrets: bool = False
) -> dict[str, Any]:
    """Returns the trajectory keys, nested and plain.

    `with_paths`, `with_secrets`: by the first definition, by the first and the second one.

    `train.steps` is left out. If the learning rate depends on it, it is the schedule's horizon. So
    a run of 1000 steps has the trajectory of a run of 2000 whose schedule spans 1000. That of a
    program is its command and the digests of its files.
    """
    if config.program is not None:
        return _of_program(config.program)
    data = _with_defaults(config, with_paths=with_paths, with_secrets=with_secrets)
    if data["guards"]["rollback"] == _rate_after_rollbacks(None):
        data["guards"].pop("rollback")
    spikes = data["guards"]["spikes"]
    if spikes is not None and spikes["mode"] == "act":
        spikes.pop("mode")
    if data["data"]["packing"] == "concat":
        data["data"].pop("packing")
    if data["train"]["loss_scale"] is None:
        data["train"].pop("loss_scale")
    _drop_later_defaults(config, data)
    return data


def _of_program(section: ProgramSection) -> dict[str, Any]:
    return {"program": {"command": list(section.command), "files": dict(section.files_sha256)}}


def _drop_later_defaults(section: Section, dumped: dict[str, Any]) -> None:
    for key, info in type(section).model_fields.items():
        value = getattr(section, key)
        if is_later(info) and value == info.default:
            dumped.pop(key, None)
        elif isinstance(value, Section) and key in dumped:
            _drop_later_defaults(value, dumped[key])


def _with_defaults(
    config: RunConfig, *, with_paths: bool = False, with_secrets: bool = False
) -> dict[str, Any]:
    """Returns all trajectory keys, also keys that older digests lack, for comparison."""
    if config.program is not None:
        return _of_program(config.program)
    data = _not_free(config, config.model_dump(mode="json"), with_paths=with_paths)
    if not with_paths:
        _drop_path_args(data["data"]["source"], config.data.source)
    data["guards"]["rollback"] = _rate_after_rollbacks(config.guards.rollback)
    data["train"].pop("steps")
    scale = loss_scale(config)  # `when` only turns it on.
    data["train"]["loss_scale"] = None if scale is None else scale.model_dump(exclude={"when"})
    if data["init_from"] == {"kind": "seed"}:  # Keeps digests from before the key.
        data.pop("init_from")
    schedule = data["optimizer"]["schedule"]
    schedule.pop("horizon_steps")
    horizon = horizon_steps(config)
    if horizon is not None:
        schedule["horizon_steps"] = horizon
    return data if with_secrets else _without_secrets(data)


def _without_secrets(data: Any) -> Any:
    """Drops the values in `args` that are surely secrets: another token reads the same rows."""
    if isinstance(data, Mapping):
        return {
            key: secret_values.without_rotatable(part) if key == "args" else _without_secrets(part)
            for key, part in data.items()
        }
    return [_without_secrets(part) for part in data] if isinstance(data, list) else data


def _drop_path_args(dumped: dict[str, Any], source: Source) -> None:
    """Drops the arguments of custom sources that their own fingerprints cover."""
    if isinstance(source, MixtureSource):
        for part, dumped_part in zip(source.sources, dumped["sources"], strict=True):
            _drop_path_args(dumped_part["source"], part.source)
    elif isinstance(source, CustomSource):
        for name in source.path_args:
            dumped["args"].pop(name, None)


def _path_args(config: RunConfig) -> set[str]:
    """Returns the keys of the arguments of custom sources that their own fingerprints cover."""
    return {
        f"{key}.args.{name}"
        for key, source in single_sources(config.data.source).items()
        if isinstance(source, CustomSource)
        for name in source.path_args
    }


def _rate_after_rollbacks(section: RollbackSection | None) -> dict[str, Any]:
    """Returns the section's trajectory keys; the defaults if no rate is lowered."""
    if section is None or section.rate_factor == 1.0:
        section = RollbackSection()
    return {"rate_factor": section.rate_factor, "rate_steps": section.rate_steps}


def _not_free(section: Section, dumped: dict[str, Any], *, with_paths: bool) -> dict[str, Any]:
    """Returns the dumped fields that are not free, without sections whose fields are all free."""
    kept: dict[str, Any] = {}
    for key, info in type(section).model_fields.items():
        value, plain = getattr(section, key), dumped[key]
        below = plain
        if isinstance(value, Section):
            below = _not_free(value, plain, with_paths=with_paths)
        elif isinstance(value, tuple):
            below = [
                _not_free(item, dumped, with_paths=with_paths)
                if isinstance(item, Section)
                else dumped
                for item, dumped in zip(value, plain, strict=True)
            ]
        is_empty_section = isinstance(value, Section) and not below
        is_kept = not is_free(info) or (with_paths and is_content_path(info))
        if is_kept and not is_empty_section:
            kept[key] = below
    return kept


def digest(config: RunConfig, *, with_paths: bool = False, with_secrets: bool = False) -> str:
    """Returns the SHA-256 (hex) over the trajectory as canonical JSON."""
    text = json.dumps(
        trajectory(config, with_paths=with_paths, with_secrets=with_secrets),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def digests(config: RunConfig) -> tuple[str, str, str]:
    """Returns the digest of a trajectory, last, after the digests of earlier definitions."""
    first = digest(config, with_paths=True, with_secrets=True)
    return first, digest(config, with_secrets=True), digest(config)


def run_dirs(config: RunConfig, name: str) -> tuple[RunPath, ...]:
    """Returns the run directory, after the directories that earlier digest definitions name.

    It is the configured one, or runs/<name>-<first 8 of the digest>. The first one that exists
    is the run's directory; if none does, the last one is.

    Raises:
      ConfigError: no checkpoint can be saved there, because of the path.
    """
    if config.run.dir is not None:
        return (config.run.dir,)
    try:
        names = dict.fromkeys(f"{name}-{text[:8]}" for text in digests(config))
        return tuple(run_root(Path("runs") / text) for text in names)
    except ValueError as error:
        raise ConfigError(f"run.dir: {error}, or set run.dir=...") from error


def diff(recorded: RunConfig, given: RunConfig) -> list[Change]:
    """Returns the trajectory keys in which the two differ, under the names that the user writes.

    Values that are secrets are not in the result.
    """
    changes = _shown(_changes(_with_defaults(recorded), _with_defaults(given)))
    covered = _path_args(given)
    return [_as_written(change, recorded, given) for change in changes if change[0] not in covered]


def _shown(changes: Sequence[Change]) -> list[Change]:
    """Returns changes without secrets."""
    return [
        (key, *(secret_values.redact(value, _last(key)) for value in values))
        for key, *values in changes
    ]


def _last(key: str) -> str:
    """Returns the last name of a dotted key, which may end with the number of an item."""
    return key.rpartition(".")[2].partition("[")[0]


def changed_secrets(recorded: RunConfig, given: RunConfig) -> list[str]:
    """Returns the keys outside of the trajectory whose values have changed and are secrets."""
    fixed = {key for key, _, _ in diff(recorded, given)}
    changes = _changes(recorded.model_dump(mode="json"), given.model_dump(mode="json"))
    return [
        key
        for key, *values in changes
        if key not in fixed and any(secret_values.contains(value, _last(key)) for value in values)
    ]


def _as_written(change: Change, recorded: RunConfig, given: RunConfig) -> Change:
    """Renames the horizon to train.steps if that is its only source."""
    both = (recorded.optimizer.schedule.horizon_steps, given.optimizer.schedule.horizon_steps)
    if change[0] == HORIZON and both == (None, None):
        return (STEPS, recorded.train.steps, given.train.steps)
    return change


def with_absolute_paths(section: S) -> S:
    """Returns the section with relative paths of content below the working directory made absolute.

    A run may be resumed from another working directory. Paths that begin with `~` or have
    `{stdlib}` mean the same place everywhere, and stay as they are.
    """
    changed: dict[str, Any] = {}
    for key, info in type(section).model_fields.items():
        value = getattr(section, key)
        if is_content_path(info):
            changed[key] = _absolute(value)
        elif isinstance(value, Section):
            changed[key] = with_absolute_paths(value)
        elif isinstance(value, tuple):
            changed[key] = tuple(
                with_absolute_paths(item) if isinstance(item, Section) else item for item in value
            )
    return section.model_copy(update=changed)


def _absolute(path: RunPath | str) -> RunPath | str:
    text = str(path)
    if text.startswith((SCHEME, "~", "/")) or "{" in text:
        return path
    absolute = Path.cwd() / text
    return str(absolute) if isinstance(path, str) else absolute


def free_changes(recorded: RunConfig, given: RunConfig) -> list[Change]:
    """Returns the free keys in which the two differ, except run.dir; without secrets."""
    fixed = {key for key, _, _ in diff(recorded, given)} | {"run.dir"}
    old, new = with_absolute_paths(recorded), with_absolute_paths(given)
    changes = _shown(_changes(old.model_dump(mode="json"), new.model_dump(mode="json")))
    return [change for change in changes if change[0] not in fixed]


def moved_content(recorded: RunConfig, given: RunConfig) -> list[Change]:
    """Returns the changed paths of content whose fingerprint is recorded; pure.

    The content behind them must be compared before anything is said about the run.
    """
    paths, args = (
        {leaf.key for leaf in iter_fields() if is_content_path(leaf.info)},
        _path_args(given),
    )
    return [
        change
        for change in free_changes(recorded, given)
        if change[0] in args or MIXTURE_PART.sub("data.source.", change[0]) in paths
    ]


def _changes(
    recorded: Mapping[str, Any], given: Mapping[str, Any], prefix: str = ""
) -> list[Change]:
    """Compares two nested dicts; if `kind` differs, keys that only one side has are not listed."""
    changes: list[Change] = []
    other_kind = recorded.get("kind") != given.get("kind")
    keys = list(recorded) + [key for key in given if key not in recorded]
    for key in keys:
        a, b = recorded.get(key, ABSENT), given.get(key, ABSENT)
        if json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True):
            continue
        if other_kind and (a is ABSENT or b is ABSENT):
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            changes += _changes(a, b, f"{prefix}{key}.")
        elif _are_sections(a) and _are_sections(b) and len(a) == len(b):
            for number, (one, other) in enumerate(zip(a, b, strict=True)):
                changes += _changes(one, other, f"{prefix}{key}[{number}].")
        else:
            changes.append((f"{prefix}{key}", a, b))
    return changes


def _are_sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def check_same(
    recorded: RunConfig,
    given: RunConfig,
    run_dir: RunPath | str,
    *,
    origins: Mapping[str, str] | None = None,
) -> None:
    """Raises ConfigError with every difference and the remedy if the trajectories differ.

    `origins` has the locations of the given values; with it the message names them.
    """
    changes = diff(recorded, given)
    if not changes:
        return
    locations = [_origin(key, origins or {}) for key, _, _ in changes]
    lines = [f"{run_dir}: this run was started with another trajectory (exit 78)"]
    for (key, old, new), location in zip(changes, locations, strict=True):
        source = f" ({location})" if location else ""
        lines.append(one_line(f"  {key}: recorded {_show(old)}, given {_show(new)}{source}"))
    is_override = all(location == "command line" for location in locations)
    remedy = "drop the override" if is_override else "give the values it was started with"
    plural = "s" if is_override and len(changes) > 1 else ""
    lines.append(
        f"To resume that run, {remedy}{plural}; to start a new run, change run.dir or leave it out."
    )
    if any(key == STEPS for key, _, _ in changes):
        lines.append(
            f"The learning rate depends on train.steps. To train longer in that run, add "
            f"{HORIZON}={recorded.train.steps}: after that step the rate stays at its final value."
        )
    raise ConfigError("\n".join(lines))


def _origin(key: str, origins: Mapping[str, str]) -> str:
    if key.startswith("program.files."):
        key = "program.files"
    # The items of a list are given together.
    default = origins.get(key.partition("[")[0], "default" if origins else "")
    location = origins.get(key, default)
    return "command line" if location.startswith("command line") else location


def _show(value: Any) -> str:
    return value if value is ABSENT else show(value)
