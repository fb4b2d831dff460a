"""Elements of HTML and SVG. Only here does text become markup, and all of it is escaped."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable

NOT_PRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
VOID = ("meta",)


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """Returns an element; children that are not Markup are text, and escaped.

    Args:
      tag: its name.
      children: in order.
      attributes: by name, `_` for `-`, and `_` at the end for a word of Python; None: absent.

    >>> element("p", "a < b", element("b", "c"), class_="x")
    '<p class="x">a &lt; b<b>c</b></p>'
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in VOID:
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Markup:
    """Returns children without an element around them; escapes children that are not Markup."""
    return Markup("".join(c if isinstance(c, Markup) else escaped(c) for c in children))


def escaped(text: str) -> str:
    """Returns text for an element or an attribute.

    Control characters and lone surrogates, which no page may contain, are replaced.

    >>> escaped('<script>"')
    '&lt;script&gt;&quot;'
    """
    encodable = text.encode("utf-8", "replace").decode()
    return html.escape(NOT_PRINTABLE.sub("\ufffd", encodable))


def number(value: float) -> str:
    """Returns a finite number with at most two decimals.

    >>> number(3.0), number(2 / 3)
    ('3', '0.67')
    """
    assert math.isfinite(value), value
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def _attribute(value: str | float) -> str:
    return escaped(value) if isinstance(value, str) else number(value)
