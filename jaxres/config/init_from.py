"""Where the parameters of a new run come from: the seed, another run, or a safetensors folder."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from jaxres.config.section import Folder, Section


class FromSeed(Section):
    kind: Literal["seed"] = "seed"
    """Fresh parameters, drawn from run.seed."""


class FromWeights(Section):
    path: Folder
    """Where the parameters are."""
    allow_missing: tuple[str, ...] = ()
    """Patterns of arrays here (`params/head`, `params/blocks/*`) that may stay fresh."""
    allow_extra: tuple[str, ...] = ()
    """Patterns of arrays there, by their names there, that may be left out."""
    allow_changed: tuple[str, ...] = ()
    """Settings of the model (`rope_theta`, `norm_eps`) that may be others than there."""
    rename: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it.
    """Names there, whole or up to a `.` or `/`, and by what they are replaced before the search."""
    cast: Literal["exact", "rounding"] = "exact"
    """exact: types whose numbers all fit float32; rounding: float64 too."""


class FromRun(FromWeights):
    kind: Literal["run"] = "run"
    path: Folder
    """Run directory whose parameters are taken; also gs://BUCKET/FOLDER."""
    at_step: PositiveInt | None = None
    """Committed step; null: the newest one at the first start."""


class FromSafetensors(FromWeights):
    kind: Literal["safetensors"] = "safetensors"
    path: Folder
    """Folder with one safetensors file, or several and their index; or one file."""


InitFrom = Annotated[FromSeed | FromRun | FromSafetensors, Field(discriminator="kind")]
