"""The collapse alarm of RL: watches the metrics of every step and says in words what goes wrong. Loads no torch.

Sparse rollouts too far from the policy end in a known way: completions shrink, the sampler's KL grows with position, the tail of
the acceptance falls (Sparrow, arXiv 2606.08446); any RL run can lose its entropy or its reward. One number seldom tells a collapse
from noise or from learning, so the signals are judged together:

- A signal is compared with its median over a reference window of steps, which lies before the recent ones and before those past
  the limit.
- Its size is how far it has moved, in multiples of its limit in [alarm]. It is a sign while each of the last `patience` steps is
  past the limit, and their median is further from the reference's than the noise of the reference (median absolute deviations).
- One sign that is `hard` times past its limit, or two signs at once, are an alarm. It is raised when that begins.

Everything is a function of the records so far: a resumed run that reads them again goes on as if it had never stopped.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from leanroll.config import AlarmConfig
from leanroll.config.alarm import MIN_REFERENCE

Record = Mapping[str, Any]

MIN_KL = 1e-3
"""Nats per token; a sampler within this of the policy is not called far from it, however much less that was before."""

_TINY = 1e-6
"""Smallest entropy or length that is told from 0."""
_LARGEST = 99.0
"""Of a logged size: a signal that used to be 0 has none."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A signal that has moved past its limit and stayed there.

    size: how many times past its limit the least of the recent steps is, at least 1. since: the first of those steps. reason: one
    line in words, with both values and what was allowed.
    """

    signal: str
    size: float
    since: int
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step looks like.

    sizes: per judged signal, 0 while it is no more than noise. alarm: whether `signs` together are one; raised: whether it begins
    at this step. last_calm: last step before the signs at which no signal was past its limit, 0 for none.
    """

    sizes: Mapping[str, float]
    signs: tuple[Sign, ...]
    alarm: bool
    raised: bool
    last_calm: int

    def metrics(self) -> dict[str, float]:
        """Names and units: `leanroll.rundir_metrics`."""
        return {f"alarm/{name}": size for name, size in self.sizes.items()} | {"alarm/raised": int(self.raised)}

    def text(self) -> str:
        """The signs in words."""
        return "; ".join(sign.reason for sign in self.signs)

    def to_json(self) -> dict[str, Any]:
        """For diagnosis/ in the run directory."""
        return {"last_calm": self.last_calm, "signs": [asdict(sign) for sign in self.signs]}


@dataclass(slots=True)
class _Series:
    """Values of a signal, at ascending steps; those that were not measured are missing. past_since: first step past the limit,
    while not all recent ones are within it again."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    past_since: int | None = None

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def between(self, first: int, last: int) -> list[float]:
        """Values of steps first … last - 1."""
        return self.values[bisect_left(self.steps, first) : bisect_left(self.steps, last)]


@dataclass(frozen=True, slots=True)
class _Signal:
    """name: of its option's stem in [alarm] and of its metric. words: what it is. of: its value in a record, None where missing;
    show: that value as people write it. direction: of change that counts. scale: what the limit is a multiple of, from reference
    median, its deviation times num_mads, and the reference's median sampler KL."""

    name: str
    words: str
    limit: float
    of: Callable[[Record], float | None]
    show: Callable[[float], float]
    direction: Literal["fall", "rise", "both"]
    scale: Callable[[float, float, float], float]
    allowed: str


class Watcher:
    """The alarm of one run; feed it every record, in order."""

    def __init__(self, config: AlarmConfig) -> None:
        self._config = config
        self._signals = [s for s in _signals(config) if s.limit > 0]
        self._series = {s.name: _Series() for s in self._signals}
        self._kl = _Series()
        self._first: int | None = None
        self._calm: list[int] = []
        self._alarm = False

    def replay(self, records: Iterable[Record]) -> list[tuple[int, Verdict]]:
        """Observe a run's records (step 0, before training, is left out); returns the steps with their verdicts."""
        return [(r["step"], self.observe(r)) for r in records if r["step"] > 0]

    def observe(self, record: Record) -> Verdict:
        """Judge one step by its record and those before it."""
        step = int(record["step"])
        self._first = step if self._first is None else self._first
        if "sampler_kl" in record:
            self._kl.add(step, float(record["sampler_kl"]))
        sizes: dict[str, float] = {}
        signs: list[Sign] = []
        calm = True
        for signal in self._signals:
            value = signal.of(record)
            if value is not None:
                self._series[signal.name].add(step, value)
            judged = self._judge(signal, step)
            if judged is not None:
                sign, newest = judged
                sizes[signal.name] = sign.size
                calm &= newest < 1.0
                if sign.size >= 1.0:
                    signs.append(sign)
        if calm:
            self._calm.append(step)
        before, self._alarm = self._alarm, len(signs) >= 2 or any(s.size >= self._config.hard for s in signs)
        index = bisect_left(self._calm, min((s.since for s in signs), default=step + 1))
        return Verdict(
            sizes, tuple(signs), self._alarm, self._alarm and not before, self._calm[index - 1] if index else 0
        )

    def _judge(self, signal: _Signal, step: int) -> tuple[Sign, float] | None:
        """The lasting sign (size 0 where it is noise), and the size of the newest value alone; None: nothing to compare."""
        config, series = self._config, self._series[signal.name]
        least = min(2, config.patience)
        if len(series.steps) < least or series.steps[-1] <= step - config.window:
            return None
        # What is measured now and then has at least two values among the recent ones: one may be chance.
        start = min(bisect_right(series.steps, step - config.patience), len(series.steps) - least)
        since, recent = series.steps[start], series.values[start:]
        assert self._first is not None
        # Steps past the limit stay out of the reference, or a second sign would come when the first one is forgotten; but what has
        # lasted for a window is becoming the new normal.
        end = since if series.past_since is None else max(min(since, series.past_since), step - config.window)
        low = self._first if config.reference == "start" else end - config.window
        reference = series.between(low, low + config.window)
        if end - self._first < config.window or len(reference) < MIN_REFERENCE:
            return None
        usual = median(reference)
        noise = config.num_mads * median(abs(value - usual) for value in reference)
        kl = self._kl.between(low, low + config.window)
        limit = signal.limit * signal.scale(usual, noise, median(kl) if kl else 0.0)

        def moved(value: float) -> float:
            change = value - usual
            way = {"fall": -change, "rise": change, "both": abs(change)}[signal.direction]
            return max(way, 0.0) / limit if limit > 0 else (math.inf if way > 0 else 0.0)

        sizes = [moved(value) for value in recent]
        if sizes[-1] >= 1.0 and series.past_since is None:
            series.past_since = series.steps[-1]
        elif max(sizes) < 1.0:
            series.past_since = None
        level = median(recent)
        one_way = len({value > usual for value in recent}) == 1
        lasting = min(*sizes, _LARGEST) if one_way and abs(level - usual) > noise else 0.0
        was, now = signal.show(usual), signal.show(level)
        verb = "fell" if level < usual else "rose"
        reason = f"{signal.words} {verb} from {was:.3g} to {now:.3g} (allowed: {signal.allowed}) since step {since}"
        return Sign(signal.name, lasting, since, reason), sizes[-1]


def _signals(config: AlarmConfig) -> tuple[_Signal, ...]:
    def same(value: float) -> float:
        return value

    def factor(name: str, words: str, metric: str, allowed: float) -> _Signal:
        """Compared as logarithms: a factor is a factor, up or down."""
        return _Signal(
            name,
            words,
            math.log(allowed) if allowed else 0.0,
            lambda r: math.log(max(float(r[metric]), _TINY)) if metric in r else None,
            math.exp,
            "both",
            lambda usual, noise, kl: 1.0,
            f"a factor {allowed:g}",
        )

    return (
        factor("length", "mean completion length", "completion_length/mean", config.length_factor),
        _Signal(
            "kl_growth",
            "rise of the sampler's KL from the first positions to the last",
            config.kl_growth,
            lambda r: r.get("mismatch/rise"),
            same,
            "rise",
            lambda usual, noise, kl: max(kl, MIN_KL),
            f"{config.kl_growth:g} times its usual mean more",
        ),
        _Signal(
            "tail",
            "5th percentile of acceptance",
            config.tail_drop,
            lambda r: r.get("alpha/p05"),
            same,
            "fall",
            lambda usual, noise, kl: 1.0,
            f"{config.tail_drop:g} less",
        ),
        factor("entropy", "entropy", "entropy", config.entropy_factor),
        _Signal(
            "reward",
            "mean reward",
            config.reward_drop,
            lambda r: r.get("reward/mean"),
            same,
            "fall",
            # Around 0 a share of the reward means nothing; there its own noise is the measure.
            lambda usual, noise, kl: max(abs(usual), noise),
            f"{config.reward_drop:.0%} less",
        ),
    )
