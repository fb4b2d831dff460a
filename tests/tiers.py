"""What of a test's cases is in the five-minute tier, and what only CI runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Returns the cases as parameters, all slow but these."""
    cases = list(cases)
    assert all(case in cases for case in fast), f"{fast}: not among {cases}"
    return [case if case in fast else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
