"""Reads the docstrings below the fields of sections from their source.

Pydantic can do this when a class is made (`use_attribute_docstrings`); that would be a quarter of
the import of the config in every process, and only `--help` shows them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Mapping

from jaxres.config.schema.base import Section


@functools.cache
def of_section(section: type[Section]) -> Mapping[str, str]:
    """Returns the docstring of each field by name, inherited fields included."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            found.update(_of_class(base))
    return found


def _of_class(section: type[Section]) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef), section
    found: dict[str, str] = {}
    for field, text in itertools.pairwise(definition.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = inspect.cleandoc(text.value.value)
    return found
