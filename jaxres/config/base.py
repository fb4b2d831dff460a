"""What every section of the configuration is made of: frozen, strict, and some plain types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError

from jaxres.storage.path import BucketPath, Place, place

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


def _placed(value: Any) -> Place:
    if isinstance(value, Path | BucketPath):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("path_type", "must be a path")
    try:
        return place(value)
    except ValueError as error:
        raise PydanticCustomError("place", "{words}", {"words": str(error)}) from error


Folder = Annotated[Place, PlainValidator(_placed), PlainSerializer(str, when_used="json")]
"""A local path, or a place in a bucket."""


def free(default: Any, **constraints: Any) -> Any:
    """Declares a field that may change at any restart because it does not change the trajectory."""
    return Field(default, json_schema_extra={"free": True}, **constraints)


class Section(BaseModel):
    """Settings shared by all sections: frozen, strict, finite, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
