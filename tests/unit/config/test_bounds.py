"""Every number of a config has a largest value, so that none asks for what no machine has."""

import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Le, Lt
from pydantic.fields import FieldInfo

from jaxres.config import load
from jaxres.config.schema.fields import iter_fields
from jaxres.faults import ConfigError

from .conftest import Write

OWN_CHECK = ("launch.gce.num_hosts",)
"""Numbers that a validator of their own bounds; the table has their rows."""
TOO_LARGE = {
    "deadlines.step_seconds=1e300": "at most 1,000,000,000",
    "checkpoint.timeout_seconds=1e10": "at most 1,000,000,000",
    "restart.backoff_seconds=1e10": "at most 1,000,000,000",
    "launch.max_hours=1e7": "at most 250,000",
    "launch.max_dollars=1e300": "at most 1e+30",
    "model.d_model=1099511627776": "at most 16,777,216",
    "model.num_layers=1000000000": "at most 10,000",
    "model.vocab_size=3000000000": "less than 2,147,483,648",
    "data.seq_len=1099511627776": "at most 16,777,216",
    "train.global_batch_size=4611686018427387904": "at most 16,777,216",
    "train.steps=4611686018427387904": "at most 2,147,483,647",
    "guards.throughput.window_steps=1000000000": "at most 1,000,000",
    "guards.rollback.warmup_steps=1000000000": "at most 1,000,000",
    "mesh.data=1000000000": "at most 16,777,216",
    "run.seed=4294967296": "at most 4,294,967,295",
    "optimizer.learning_rate=1e300": "at most 1e+30",
    "launch.gce.num_hosts=100000": "a whole number from 1 to 10000",
    "launch.gce.num_hosts=1..100000": "a range A..B of such",
    "launch.gce.spares=100000": "at most 10,000",
    "launch.gce.disk_gb=1000000": "at most 65,536",
    "telemetry.sample_tokens=1000000000": "at most 1,000,000",
}


def numbers(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the constraints of each number in the type of a field."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from numbers(inner[0], (*metadata, *inner[1:]))
    elif annotation in (int, float):
        parts = (m.metadata if isinstance(m, FieldInfo) else [m] for m in metadata)
        yield tuple(part for each in parts for part in each)
    elif origin is not None and origin is not Literal:
        kept = () if origin in (tuple, dict) else metadata
        for each in inner:
            yield from numbers(each, kept)


def test_every_number_of_a_config_has_a_largest_value():
    unbounded, count = [], 0
    for field in iter_fields():
        for constraints in numbers(field.info.annotation, tuple(field.info.metadata)):
            count += 1
            if field.key not in OWN_CHECK and not any(isinstance(c, Le | Lt) for c in constraints):
                unbounded.append(field.key)
    assert count > 150, "the types of the fields are not understood"
    assert unbounded == []


def test_a_number_beyond_every_machine_is_refused_with_its_largest_value(write: Write):
    failed = []
    for override, text in TOO_LARGE.items():
        try:
            load(write(), [override])
            failed.append(f"{override}: is accepted")
        except ConfigError as error:
            if override.partition("=")[0] not in str(error) or text not in str(error):
                failed.append(f"{override}: {error}")
    assert failed == []


@pytest.mark.parametrize("override", ["deadlines.step_seconds=1e9", "checkpoint.keep.last=1000000"])
def test_a_number_that_means_never_is_accepted(write: Write, override: str):
    load(write(), [override])
