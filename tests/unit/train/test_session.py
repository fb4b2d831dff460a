"""The summary at the end of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxres.exit_codes import ExitCode
from jaxres.train import session


def lines(*losses: float | None) -> Any:
    loss = np.array([np.nan if each is None else each for each in losses])
    return SimpleNamespace(step=np.arange(1, len(losses) + 1), loss=loss)


def test_the_curve_of_a_run_whose_loss_is_never_finite_is_a_line_of_text() -> None:
    assert session.loss_curve(lines(None, None)) == (
        "training loss over steps: it is finite at no step"
    )
    assert "training loss over steps" in session.loss_curve(lines(None, 2.0, 1.0))


def test_a_model_without_logits_ends_without_a_text_sample() -> None:
    config = SimpleNamespace(telemetry=SimpleNamespace(sample_tokens=5))
    context = SimpleNamespace(peers=SimpleNamespace(member=SimpleNamespace(leads=False)))
    built = SimpleNamespace(model=SimpleNamespace(logits=None), run=None)
    ended = SimpleNamespace(result=SimpleNamespace(code=ExitCode.DONE))
    parts: Any = (config, context, built, ended)
    assert session._summary(*parts) == ""
