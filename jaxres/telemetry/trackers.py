"""Experiment trackers: services to which a run's metrics are copied, one class for each."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxres.clock import SystemClock
from jaxres.config.schema.telemetry import MlflowTracker, TrackerSection, WandbTracker
from jaxres.faults import ConfigError

Row = tuple[int, Mapping[str, float]]
"""A step and its values, by the names of their curves."""
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}
ENVIRONMENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Variables of a tracker's process, unless they are set: it retries by itself."""
MAX_METRICS, MAX_PARAMS = 1000, 100
"""Most entries of one request to MLflow. (MLflow's REST API, log-batch)"""
MAX_PARAM_CHARS = 6000


@dataclass(frozen=True)
class Identity:
    """Identity of a run in a tracker; equal for all its attempts between two rollbacks."""

    id: str
    name: str
    group: str
    tags: tuple[str, ...]
    config: Mapping[str, Any]


class Tracker(Protocol):
    """A service that receives the metrics of one run."""

    def open(self, identity: Identity, *, sent_through: int) -> int:
        """Begins or continues the run; returns the newest step that the service has.

        `sent_through` is the newest step that may have been sent, for a service that can't tell.
        """
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Sends rows."""
        ...

    def close(self, *, is_replaced: bool = False) -> None:
        """Waits until all rows are sent; a replaced run is marked as rolled back."""
        ...


def check(section: TrackerSection) -> None:
    """Raises ConfigError if the package of a tracker is not installed."""
    if importlib.util.find_spec(PACKAGES[section.kind]) is None:
        raise ConfigError(
            f"telemetry.trackers: the package {PACKAGES[section.kind]} is not installed. Run "
            "`pip install -e '.[trackers]'` in the checkout of jaxres, or remove the tracker."
        )


def make(section: TrackerSection, folder: Path) -> Tracker:
    """Returns the tracker of a section; `folder` is for files that its package writes."""
    match section:
        case WandbTracker():
            return Wandb(section, folder)
        case MlflowTracker():
            return Mlflow(section)


class Wandb:
    """Weights & Biases; `mode: offline` writes files for `wandb sync`."""

    def __init__(self, section: WandbTracker, folder: Path) -> None:
        self._section, self._folder = section, folder
        self._run: Any = None

    def open(self, identity: Identity, *, sent_through: int) -> int:
        """Begins or resumes the W&B run of this id."""
        wandb: Any = importlib.import_module("wandb")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._section.project,
            entity=self._section.entity,
            mode=self._section.mode,
            id=identity.id,
            name=identity.name,
            group=identity.group,
            tags=identity.tags or None,
            config=dict(identity.config),
            resume="allow" if self._section.mode == "online" else None,
            dir=str(self._folder),
            settings=wandb.Settings(silent=True, console="off", init_timeout=60),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if self._section.mode == "offline":
            return sent_through
        return int(self._run.summary.get("step") or 0) if self._run.resumed else 0

    def log(self, rows: Sequence[Row]) -> None:
        """Sends rows; W&B draws them over their `step`."""
        for step, values in rows:
            self._run.log({"step": step, **values})

    def close(self, *, is_replaced: bool = False) -> None:
        """Ends the W&B run; it can be resumed."""
        if self._run is None:
            return
        if is_replaced:
            self._run.tags = (*(self._run.tags or ()), "rolled back")
        self._run.finish(quiet=True)
        self._run = None


class Mlflow:
    """An MLflow tracking server."""

    def __init__(self, section: MlflowTracker) -> None:
        self._section, self._clock = section, SystemClock()
        self._client: Any = None
        self._run_id = ""

    def open(self, identity: Identity, *, sent_through: int) -> int:
        """Begins the MLflow run, or finds that with the id as the tag `jaxres.id`."""
        mlflow: Any = importlib.import_module("mlflow")
        self._client = client = mlflow.MlflowClient(self._section.tracking_uri)
        found = client.get_experiment_by_name(self._section.experiment)
        experiment = (
            found.experiment_id if found else client.create_experiment(self._section.experiment)
        )
        query = f"tags.`jaxres.id` = '{identity.id}'"
        runs = client.search_runs([experiment], query, max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
            history = client.get_metric_history(self._run_id, "train/loss")
            return max((point.step for point in history), default=0)
        tags = {"jaxres.id": identity.id, "jaxres.group": identity.group}
        tags |= {f"tag.{tag}": "" for tag in identity.tags}
        run = client.create_run(experiment, tags=tags, run_name=identity.name)
        self._run_id = run.info.run_id
        params = [
            mlflow.entities.Param(key, text[:MAX_PARAM_CHARS])
            for key, text in _flat(identity.config)
        ]
        for start in range(0, len(params), MAX_PARAMS):
            client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])
        return 0

    def log(self, rows: Sequence[Row]) -> None:
        """Sends rows, each step's in one request."""
        metric: Any = importlib.import_module("mlflow.entities").Metric
        now, batch = int(1000 * self._clock.wall()), list[Any]()
        for step, values in rows:
            metrics = [metric(name, value, now, step) for name, value in values.items()]
            if batch and len(batch) + len(metrics) > MAX_METRICS:
                self._client.log_batch(self._run_id, metrics=batch)
                batch = []
            batch += metrics
        if batch:
            self._client.log_batch(self._run_id, metrics=batch)

    def close(self, *, is_replaced: bool = False) -> None:
        """Marks the MLflow run as finished; it can be resumed."""
        if not self._run_id:
            return
        if is_replaced:
            self._client.set_tag(self._run_id, "jaxres.rolled_back", "true")
        with contextlib.suppress(Exception):
            self._client.set_terminated(self._run_id, "FINISHED")
        self._run_id = ""


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += _flat(value, f"{name}.")
        else:
            rows.append((name, str(value)))
    return rows


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values that are finite numbers."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
