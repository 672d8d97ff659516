"""Median and spread of repeated measurements. Never imports torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and quartiles of repeated measurements, in the unit of what was measured."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """At least one value."""
        low, high = values[0], values[0]
        if len(values) > 1:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, len(values))

    def scaled(self, factor: float) -> Summary:
        """The same in another unit."""
        return Summary(self.median * factor, self.low * factor, self.high * factor, self.count)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}] of {self.count}"

    def as_dict(self, digits: int = 4) -> dict[str, float]:
        """JSON-ready."""
        rounded = {"median": self.median, "q25": self.low, "q75": self.high}
        return {key: round(value, digits) for key, value in rounded.items()} | {"count": self.count}
