"""Parses a report, and fails where a browser would have to guess."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

from jaxres.operate.report.markup import VOID

NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")
PATH = re.compile(rf"(?:[MLHVhvz]|{NUMBER.pattern}|[ ,])+")
NUMBERS = ("x", "y", "width", "height")
LOADING = ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "formaction")


@dataclass
class Page(HTMLParser):
    """The elements of a page, and texts by the element around them."""

    open_tags: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Checks the attributes of an element."""
        given = {name: value or "" for name, value in attrs}
        assert len(given) == len(attrs), f"{tag}: an attribute is there twice"
        assert tag not in ("script", "link", "iframe", "img", "object", "form"), tag
        assert not set(given) & set(LOADING), f"{tag} loads something: {given}"
        assert not any(name.startswith("on") for name in given), f"{tag} has code: {given}"
        if tag == "path":
            assert PATH.fullmatch(given["d"]), given
        for name in NUMBERS:
            assert name not in given or math.isfinite(float(given[name])), given
        self.tags.append((tag, given))
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Checks that the innermost open element is closed."""
        assert self.open_tags, f"</{tag}> without its begin"
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keeps a text."""
        self.texts.append((self.open_tags[-1] if self.open_tags else "", data))

    def titles(self) -> list[str]:
        """Returns the texts that are shown where the mouse is."""
        return [text for tag, text in self.texts if tag == "title"]

    def of_class(self, tag: str, class_: str) -> list[dict[str, str]]:
        """Returns the attributes of the elements of a class."""
        return [a for t, a in self.tags if t == tag and class_ in a.get("class", "").split()]


def parse(html: str) -> Page:
    """Parses a page; it must be well formed, load nothing, and have finite numbers."""
    page = Page()
    page.feed(html)
    page.close()
    assert page.open_tags == [], "an element is not closed"
    assert "url(" not in html
    assert "@import" not in html
    return page
