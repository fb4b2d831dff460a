"""Base class and shared field types of all configuration sections."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError

from jaxres.storage.path import SCHEME, RunPath, is_address, is_path, parse_path, run_root

OTHER_FORM = "other_form"
"""Type of pydantic's error for text that has not the form of its field."""


def form(pattern: str, words: str) -> AfterValidator:
    """Declares text that matches a pattern as a whole; `words` describe it in messages."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if compiled.fullmatch(value):
            return value
        raise PydanticCustomError(OTHER_FORM, "must be {words}", {"words": words})

    return AfterValidator(check)


Fraction = Annotated[float, Field(ge=0, le=1)]
MOST_COUNT = 10**12
"""Largest number of steps, rows or tries: at a step a millisecond they take 30 years."""
MOST_FLOAT = 1e30
"""Largest number of any other kind: computations have it in float32."""
PositiveInt = Annotated[int, Field(gt=0, le=MOST_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST_COUNT)]
PositiveFloat = Annotated[float, Field(gt=0, le=MOST_FLOAT)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MOST_FLOAT)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A seed: JAX's PRNG key has only the lower 32 bits of a larger one."""
Window = Annotated[int, Field(ge=2, le=1_000_000)]
"""Number of steps whose values are kept in memory."""
Dimension = Annotated[int, Field(gt=0, le=2**24)]
"""Size of a dimension of an array, or the number of rows of a batch."""
VocabSize = Annotated[int, Field(gt=0, lt=2**31)]
"""Number of tokens; ids are int32 on the devices."""
Layers = Annotated[int, Field(gt=0, le=10_000)]
"""Number of layers, each of which may be traced on its own."""
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""A duration of at most 31 years: no clock and no timer of the system has many more."""
NonNegativeSeconds = Annotated[float, Field(ge=0, le=1e9)]
MOST_HOURS = 250_000
Hours = Annotated[float, Field(gt=0, le=MOST_HOURS)]
NonNegativeHours = Annotated[float, Field(ge=0, le=MOST_HOURS)]
Minutes = Annotated[float, Field(gt=0, le=15_000_000)]
NonNegativeMinutes = Annotated[float, Field(ge=0, le=15_000_000)]


def _parse_folder(value: Any) -> RunPath:
    if is_path(value):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("path_type", "must be a path")
    try:
        return parse_path(value)
    except ValueError as error:
        raise PydanticCustomError("place", "{message}", {"message": str(error)}) from error


Folder = Annotated[RunPath, PlainValidator(_parse_folder), PlainSerializer(str, when_used="json")]
"""A local path, or a folder in a bucket."""


def _local(path: Path) -> Path:
    if is_address(str(path)):
        raise PydanticCustomError("place", "must be a local path, not a URL")
    return path


LocalPath = Annotated[Path, AfterValidator(_local)]
"""A local path; a URL would be a folder of its name below the working directory."""


def _local_or_bucket(text: str) -> str:
    if is_address(text) and not text.startswith(SCHEME):
        raise PydanticCustomError("place", "must be a local path or gs://BUCKET/FOLDER")
    return text


PathPattern = Annotated[str, AfterValidator(_local_or_bucket)]
"""Text of a local path or glob, or of a folder in a bucket."""


def _parse_run_root(value: Any) -> RunPath:
    try:
        return run_root(_parse_folder(value))
    except ValueError as error:
        raise PydanticCustomError("place", "{message}", {"message": str(error)}) from error


RunRoot = Annotated[
    RunPath, PlainValidator(_parse_run_root), PlainSerializer(str, when_used="json")
]
"""The normal form of a run directory's path."""


def free(default: Any, **constraints: Any) -> Any:
    """Declares a field that may change at any restart because it does not change the trajectory."""
    return Field(default, json_schema_extra={"free": True}, **constraints)


def later(default: Any, **constraints: Any) -> Any:
    """Declares a trajectory key that older trajectory digests lack: its default is not in them."""
    return Field(default, json_schema_extra={"later": True}, **constraints)


def content_path() -> Any:
    """Declares the path of content whose fingerprint is recorded: a free field without a default.

    The content belongs to the trajectory, its path does not: what is read there is compared with
    the recorded fingerprint before training continues.
    """
    return Field(json_schema_extra={"free": True, "content_path": True})


class Section(BaseModel):
    """Base of all sections: frozen, strict types, finite numbers, no unknown keys.

    Validators are built at the first use (`defer_build`): one of the whole config, instead of one
    of each section, its inner ones included.
    """

    model_config = ConfigDict(
        defer_build=True,
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
    )
