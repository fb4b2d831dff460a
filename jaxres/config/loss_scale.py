"""How gradients that are computed in float16 are kept within its range."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxres.config.section import Section

LEAST, MOST = 1.0, 2.0**24
"""What the factor stays within; the upper bound is that of NVIDIA's Apex (`max_loss_scale`)."""


class LossScaleSection(Section):
    """The backward pass starts from a multiple of the loss. (arXiv 1710.03740, section 3.2)"""

    when: Literal["auto", "always", "never"] = "auto"
    """auto: where model.compute_dtype is float16. A custom model that computes in it needs always.
    """
    first: Annotated[float, Field(ge=LEAST, le=MOST)] = 65536.0
    """Factor of the first step, a power of two. It is halved by each step whose gradient overflows
    (that update is skipped), down to 1. (PyTorch's GradScaler, as the next)"""
    grow_every_steps: Annotated[int, Field(ge=2)] = 2000
    """Steps without an overflow, after which the factor is doubled, up to 2**24."""


def most_back_offs(section: LossScaleSection | None, *, steps: int) -> int:
    """Returns how often the factor can be halved within so many steps.

    >>> most_back_offs(LossScaleSection(), steps=100)
    25
    """
    if section is None:
        return 0
    return int(MOST).bit_length() + steps // section.grow_every_steps
