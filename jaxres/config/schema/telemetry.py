"""Schema of the console output, TensorBoard, trackers and metrics for Prometheus."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from jaxres.config.schema.base import Seconds, Section, form, free


class WandbTracker(Section):
    """Experiment tracker: Weights & Biases; the key is in the environment or in ~/.netrc."""

    kind: Literal["wandb"] = "wandb"
    project: Annotated[str, Field(min_length=1)] = free(...)
    """Project of the run."""
    entity: str | None = free(None)
    """Team or user; null: the account's default."""
    mode: Literal["online", "offline"] = free("online")
    """offline: writes files in RUN_DIR/trackers/wandb for `wandb sync`."""
    every_seconds: Seconds = free(5.0)
    """Seconds between two looks at the run's files."""


TrackingUri = Annotated[
    str,
    form(
        r"databricks|(?!file:)[a-z][a-z0-9+.-]*://.+",
        "an address such as http://HOST:5000, or a database such as sqlite:////shared/mlflow.db "
        "(MLflow 3 writes into no folder)",
    ),
]


class MlflowTracker(Section):
    """Experiment tracker: an MLflow tracking server."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: TrackingUri | None = free(None)
    """Address, as in http://HOST:5000; null: the variable MLFLOW_TRACKING_URI."""
    experiment: Annotated[str, Field(min_length=1)] = free("jaxres")
    """Experiment of the run; it is made if it does not exist."""
    every_seconds: Seconds = free(5.0)
    """Seconds between two looks at the run's files."""


TrackerSection = Annotated[WandbTracker | MlflowTracker, Field(discriminator="kind")]


def _listening(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("must be HOST:PORT, as 127.0.0.1:19400, 0.0.0.0:19400 or [::1]:19400")
    return text


class PrometheusSection(Section):
    """Exporter of metrics for Prometheus in each supervisor, and in a launcher of VMs."""

    address: Annotated[str, AfterValidator(_listening)] = free("127.0.0.1:19400")
    """Address HOST:PORT on which /metrics is served to everyone who can connect."""
    launcher_address: Annotated[str, AfterValidator(_listening)] | None = free(None)
    """The same of `launch gce up`, which waits for VMs while no supervisor runs; null: none."""


class TelemetrySection(Section):
    """Console output, TensorBoard, trackers, metrics for Prometheus and the text sample."""

    log_every_seconds: Seconds = free(10.0)
    """Seconds between plain progress lines if the output is not a terminal."""
    tensorboard: bool = free(False)
    """Whether to write RUN_DIR/tensorboard; needs `pip install -e '.[tensorboard]'`.

    In a bucket the files are updated every minute and at the end."""
    trackers: tuple[TrackerSection, ...] = free(())
    """Experiment trackers that get the metrics, as in [{kind: wandb, project: mine}]."""
    prometheus: PrometheusSection | None = free(None)
    """Exporter of metrics for Prometheus, in each supervisor; null: none."""
    sample_prompt: str = free("def ")
    """Prompt of the text sample at the end of the run."""
    sample_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = free(0)
    """Tokens of the text sample at the end of the run; 0: no sample."""
