"""A measured figure beside its bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal


class CannotMeasure(Exception):
    """Something that a measurement needs is not there; the text says what to do."""


@dataclass(frozen=True)
class Figure:
    """``limit`` None: there was nothing to compare with; ``whose`` limit it is, if not our own."""

    what: str
    measured: float
    sign: Literal["<", "<=", "=", ">="]
    limit: float | None
    unit: str = ""
    whose: str = ""

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        match self.sign:
            case "<":
                return self.measured < self.limit
            case "<=":
                return self.measured <= self.limit
            case "=":
                return self.measured == self.limit
            case ">=":
                return self.measured >= self.limit

    @property
    def bound(self) -> str:
        limit = "?" if self.limit is None else _short(self.limit)
        whose = f"({self.whose})" if self.whose else ""
        return " ".join(filter(None, (self.sign, limit, self.unit, whose)))

    @property
    def verdict(self) -> str:
        return {None: "not compared", True: "met", False: "MISSED"}[self.met]


def print_figures(figures: Sequence[Figure]) -> None:
    width = max(len(figure.what) for figure in figures)
    bounds = max(len(figure.bound) for figure in figures)
    for figure in figures:
        measured = f"{_short(figure.measured)} {figure.unit}".rstrip()
        print(
            f"{figure.what:{width}}  bound {figure.bound:{bounds}}  "
            f"measured {measured:18} {figure.verdict}",
            flush=True,
        )


def as_json(figures: Sequence[Figure]) -> list[dict[str, object]]:
    return [
        {
            "what": figure.what,
            "bound": figure.bound,
            "measured": round(figure.measured, 3),
            "unit": figure.unit,
            "met": figure.met,
        }
        for figure in figures
    ]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of them do not exceed; ``values`` is not empty."""
    return sorted(values)[ceil(len(values) * percent / 100) - 1]


def _short(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"
