"""The tiers: what the test command, CI (a share of it) and only a campaign run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Returns the cases as parameters, all slow but these."""
    cases = list(cases)
    assert all(case in cases for case in fast), f"{fast}: not among {cases}"
    return [case if case in fast else _marked(case, pytest.mark.slow) for case in cases]


def campaign(cases: Iterable[Any]) -> list[Any]:
    """Returns the cases as parameters that only a campaign runs."""
    return [_marked(case, pytest.mark.campaign) for case in cases]


def campaign_but(cases: Iterable[Any], *others: Any) -> list[Any]:
    """Returns the cases as parameters; only a campaign runs them all, CI these others."""
    cases = list(cases)
    assert all(case in cases for case in others), f"{others}: not among {cases}"
    return [*others, *campaign(case for case in cases if case not in others)]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=mark)
