"""What every section of the configuration is made of: frozen, strict, and some plain types."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


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
