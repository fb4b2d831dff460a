"""The `filter` of lists: comparisons, AND, OR, NOT, parentheses; and pages of the matches.

After cloud.google.com/compute/docs/reference/rest/v1/instances/list; a subset: no functions, no
wildcards but a * at an end of a word.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from jaxres_emulators.gce.errors import invalid

_TOKEN = re.compile(
    r"""\s*(?:(?P<word>"(?:[^"\\]|\\.)*"|'[^']*'|[^\s()=!:<>"']+)|(?P<sign>!=|>=|<=|[=:<>()]))"""
)
_WORDS = {"eq": "eq", "ne": "ne"}
MOST_RESULTS = 500
Key = Callable[[dict[str, Any]], list[str]]

Test = Callable[[dict[str, Any]], bool]


def parse(text: str) -> Test:
    """Returns the predicate of a filter: whether it matches a resource.

    >>> wanted = parse('(labels.run = "a") AND (status != TERMINATED)')
    >>> wanted({"labels": {"run": "a"}, "status": "RUNNING"})
    True
    >>> wanted({"labels": {"run": "b"}, "status": "RUNNING"})
    False
    """
    if not text.strip():
        return lambda _: True
    tokens, at = [], 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if found is None:
            raise invalid("filter", text, "Invalid list filter expression.")
        tokens.append((found["sign"] or "", found["word"] or ""))
        at = found.end()
    return _Parser(text, tokens).whole()


class _Parser:
    def __init__(self, text: str, tokens: list[tuple[str, str]]) -> None:
        self._text, self._tokens, self._at = text, tokens, 0

    def whole(self) -> Test:
        test = self._any()
        if self._at != len(self._tokens):
            raise self._wrong()
        return test

    def _wrong(self) -> Exception:
        return invalid("filter", self._text, "Invalid list filter expression.")

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("", "")

    def _take(self) -> tuple[str, str]:
        token = self._next()
        if token == ("", ""):
            raise self._wrong()
        self._at += 1
        return token

    def _any(self) -> Test:
        parts = [self._all()]
        while self._next()[1] == "OR":
            self._take()
            parts.append(self._all())
        return lambda one: any(part(one) for part in parts)

    def _all(self) -> Test:
        parts = [self._one()]
        while (token := self._next()) not in (("", ""), (")", "")) and token[1] != "OR":
            if token[1] == "AND":
                self._take()
            parts.append(self._one())
        return lambda one: all(part(one) for part in parts)

    def _one(self) -> Test:
        sign, word = self._take()
        if sign == "(":
            inside = self._any()
            if self._take()[0] != ")":
                raise self._wrong()
            return inside
        if word == "NOT":
            inside = self._one()
            return lambda one: not inside(one)
        if sign:
            raise self._wrong()
        if word.startswith("-"):
            inside = self._compared(word[1:])
            return lambda one: not inside(one)
        return self._compared(word)

    def _compared(self, name: str) -> Test:
        sign, word = self._take()
        sign = sign or _WORDS.get(word, "")
        is_sign, word = self._take()
        if sign in ("", "(", ")") or is_sign:
            raise self._wrong()
        return lambda one: _holds(_field(one, name), sign, _plain(word))


def _plain(word: str) -> str:
    return word[1:-1].replace('\\"', '"') if word[:1] in ("'", '"') else word


def _field(one: dict[str, Any], name: str) -> Any:
    at: Any = one
    parts = name.split(".")
    while parts and isinstance(at, dict):
        # A label's key may have been quoted, and may hold no dot.
        at = at.get(_plain(parts.pop(0)))
    return at if not parts else None


def _holds(found: Any, sign: str, value: str) -> bool:
    text = "" if found is None else _told(found)
    match sign:
        case "=":
            return found is not None and _matches(text, value)
        case "!=":
            return not _matches(text, value)
        case ":" if value == "*":
            return found not in (None, {}, [])
        case ":":
            inside = found if isinstance(found, list | dict) else [found]
            return any(value.strip("*").lower() in _told(part).lower() for part in inside)
        case "eq":
            return re.fullmatch(value, text) is not None
        case "ne":
            return re.fullmatch(value, text) is None
    return {
        ">": text > value,
        "<": text < value,
        ">=": text >= value,
        "<=": text <= value,
    }[sign]


def _matches(text: str, value: str) -> bool:
    """Says whether it is the value; URLs also by their end, as names are given for them."""
    if value.endswith("*"):
        return text.startswith(value[:-1])
    return text == value or ("/" in text and text.endswith(f"/{value}"))


def _told(found: Any) -> str:
    return str(found).lower() if isinstance(found, bool) else str(found)


def page(
    items: Iterable[dict[str, Any]], query: dict[str, str], *, key: Key | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """Returns a page of the items that match the query, and the token of the next page.

    Args:
      items: in their order.
      query: of the call.
      key: by which they are in order, if some may go while a client turns pages.
    """
    most = int(query.get("maxResults", MOST_RESULTS))
    if not 0 <= most <= MOST_RESULTS:
        why = "Value must be between 0 and 500, inclusive."
        raise invalid("maxResults", most, why)
    wanted = parse(query.get("filter", ""))
    found = [one for one in items if wanted(one)]
    if query.get("orderBy") == "creationTimestamp desc":
        found.reverse()
    start = 0
    if token := query.get("pageToken"):
        try:
            last = json.loads(base64.b64decode(token))
        except ValueError:
            raise invalid("pageToken", token, "Invalid page token.") from None
        start = last if key is None else sum(key(one) <= last for one in found)
    end = start + (most or MOST_RESULTS)
    if end >= len(found):
        return found[start:], None
    last = end if key is None else key(found[end - 1])
    return found[start:end], base64.b64encode(json.dumps(last).encode()).decode()
