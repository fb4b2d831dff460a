"""Result of one check of `jaxres doctor`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail", "n/a"]


@dataclass(frozen=True)
class Check:
    """Result of one check: its name, the finding and, unless it passed, the remedy."""

    status: Status
    name: str
    detail: str
    remedy: str = ""
    """Empty: there is nothing to do, or the detail says it."""

    def __str__(self) -> str:
        """Returns the line to print."""
        return self.line(width=8)

    def line(self, *, width: int) -> str:
        """Returns the line to print.

        >>> Check("warn", "seed", "it is odd", "Set run.seed=2").line(width=6)
        'warn  seed    it is odd. Set run.seed=2'
        """
        text = f"{self.detail}. {self.remedy}" if self.remedy else self.detail
        return f"{self.status:<4}  {self.name:<{width}}  {text}"

    def fields(self) -> dict[str, str]:
        """Returns the fields that `--json` prints."""
        return {
            "name": self.name,
            "status": self.status,
            "detail": self.detail,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class ItemResult:
    """Result of an item of the checklist; its name is the item's."""

    status: Status
    detail: str
    remedy: str = ""


def ok(detail: str) -> ItemResult:
    """Returns a passed item."""
    return ItemResult("pass", detail)


def warn(detail: str, remedy: str) -> ItemResult:
    """Returns an item that a long run should not be started with."""
    return ItemResult("warn", detail, remedy)


def fail(detail: str, remedy: str) -> ItemResult:
    """Returns an item with which a start is refused, or nothing works."""
    return ItemResult("fail", detail, remedy)


def not_applicable(detail: str) -> ItemResult:
    """Returns an item that says nothing about this run here."""
    return ItemResult("n/a", detail)
