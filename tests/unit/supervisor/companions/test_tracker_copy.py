"""A tracker that can't be reached is told once, also if its first try is the last one."""

from __future__ import annotations

import os

import pytest

from jaxres.config.schema.telemetry import MlflowTracker
from jaxres.supervisor.companions import tracker_copy


class Refusing:
    """A service that refuses each request."""

    def update(self) -> None:
        raise ConnectionError("refused")

    def reset(self) -> None:
        """Nothing was opened."""


def test_a_service_that_fails_only_at_the_end_of_the_run_is_told(monkeypatch, capfd) -> None:
    monkeypatch.setattr("signal.alarm", lambda seconds: None)
    with open(os.devnull) as ended:
        monkeypatch.setattr("sys.stdin", ended)
        assert tracker_copy._follow(Refusing(), MlflowTracker(), every_seconds=5.0) == 1
    said = capfd.readouterr().err
    assert said == "tracker mlflow: ConnectionError: refused; the rest is sent at the next start\n"


@pytest.mark.parametrize("uri", ["http://host:5000", "sqlite:////a/b.db", "databricks", None])
def test_an_address_or_a_database_is_accepted(uri) -> None:
    assert MlflowTracker(tracking_uri=uri).tracking_uri == uri


@pytest.mark.parametrize("uri", ["file:///a/mlruns", "mlruns", "/a/mlruns", ""])
def test_a_folder_into_which_mlflow_writes_nothing_any_more_is_refused(uri) -> None:
    with pytest.raises(ValueError, match="MLflow 3 writes into no folder"):
        MlflowTracker(tracking_uri=uri)
