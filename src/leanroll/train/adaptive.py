"""How many tokens a rollout needs is not known before: a controller that moves N while a student is distilled.

The head is what every N generates, the first `adapt.min_num_tokens` positions. At each probe of the collapse guard, whose full
completions the teacher scores:

    an alarm                                            → shrink: N / factor
    the head has been learned, and beyond N there is
    more left to learn than in the head                 → extend: N · factor
    anything else                                       → stay

"Learned" compares the head's KL in the last `window` training steps with that in the first ones; "more left" compares both parts of
the same probe completions. No extension comes within `calm_steps` of a shrink, so that N does not swing between a collapse and its
cause. The state follows from the metrics of the steps so far, so that a resumed run reads it back from metrics.jsonl.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from leanroll.config import AdaptConfig

HEAD_KL, HEAD_SHARE = "adapt/head_kl", "adapt/head_share"
PROBE_HEAD_KL, PROBE_TAIL_KL, MOVE = "adapt/probe_head_kl", "adapt/probe_tail_kl", "adapt/move"
ALARMS = "probe/alarms"


@dataclass(frozen=True, slots=True)
class ProbeKl:
    """Mean KL per token of a probe's completions, nats.

    head: at the first adapt.min_num_tokens positions. tail: from position N on; None where no completion is longer than N.
    """

    head: float
    tail: float | None

    def metrics(self) -> dict[str, float]:
        """As they are written to metrics.jsonl."""
        return {PROBE_HEAD_KL: self.head} | ({} if self.tail is None else {PROBE_TAIL_KL: self.tail})


@dataclass(frozen=True, slots=True)
class Decision:
    """What a probe led to.

    move: 1 extended, -1 shrunk, 0 stayed. num_tokens: N from the next step on. reason: why, in words. head_share: the head's KL in
    the last steps, as a share of that in the first ones; None before there are enough of them.
    """

    move: int
    num_tokens: int
    reason: str
    head_share: float | None

    def metrics(self) -> dict[str, float]:
        """As they are written to metrics.jsonl."""
        return {MOVE: self.move} | ({} if self.head_share is None else {HEAD_SHARE: self.head_share})


class NumTokensController:
    """num_tokens: N of the next step."""

    def __init__(self, config: AdaptConfig, num_tokens: int) -> None:
        """num_tokens: N of the first step."""
        self._config = config
        self.num_tokens = num_tokens
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=config.window)
        self._num_observed = 0
        self._shrunk_at: int | None = None

    def observe(self, head_kl: float) -> None:
        """The head's mean KL in the completions of a training step, nats."""
        if len(self._first) < self._config.window:
            self._first.append(head_kl)
        self._last.append(head_kl)
        self._num_observed += 1

    def decide(self, step: int, probe: ProbeKl, num_alarms: int) -> Decision:
        """Move N after the probe of a step, whose own head has been observed."""
        share = self._head_share()
        move, reason = (-1, f"alarms of the guard: {num_alarms}") if num_alarms else self._extend(step, probe, share)
        if move < 0:
            self._shrunk_at = step
        before, self.num_tokens = self.num_tokens, self._moved(move)
        if self.num_tokens == before and move:
            end = "adapt.min_num_tokens" if move < 0 else "adapt.max_num_tokens"
            return Decision(0, before, f"{reason}, but N is at {end} already", share)
        return Decision(move, self.num_tokens, reason, share)

    def replay(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Follow the metrics of a run so far, in order, from its first step."""
        for record in records:
            if HEAD_KL in record:
                self.observe(record[HEAD_KL])
            if MOVE in record:
                probe = ProbeKl(record[PROBE_HEAD_KL], record.get(PROBE_TAIL_KL))
                self.decide(record["step"], probe, int(record[ALARMS]))

    def _extend(self, step: int, probe: ProbeKl, share: float | None) -> tuple[int, str]:
        """1 or 0, and why."""
        config = self._config
        if self._shrunk_at is not None and step - self._shrunk_at < config.calm_steps:
            return 0, f"N shrank {step - self._shrunk_at} steps ago, less than adapt.calm_steps = {config.calm_steps}"
        if share is None:
            return 0, f"fewer than 2 · {config.window} steps to compare (adapt.window)"
        if share > config.extend_below:
            return (
                0,
                f"the head's KL is at {share:.2f} of its start, above adapt.extend_below = {config.extend_below:g}",
            )
        if probe.tail is None:
            return 0, f"no probe completion goes beyond N = {self.num_tokens}"
        least = config.tail_factor * probe.head
        if not probe.tail > least:
            return (
                0,
                f"the KL beyond N is {probe.tail:.3f}, no more than {least:.3f} (adapt.tail_factor times the head's)",
            )
        return 1, (
            f"the head's KL is at {share:.2f} of its start, and beyond N it is {probe.tail:.3f}, more than {least:.3f} "
            "(adapt.tail_factor times the head's)"
        )

    def _head_share(self) -> float | None:
        window = self._config.window
        # The two windows never share a step: a share of noise with itself says nothing.
        if self._num_observed < 2 * window:
            return None
        first, last = math.fsum(self._first) / window, math.fsum(self._last) / window
        return last / first if first > 0 else 1.0

    def _moved(self, move: int) -> int:
        config, now = self._config, self.num_tokens
        if move > 0:
            return min(config.max_num_tokens, max(now + 1, round(now * config.factor)))
        return max(config.min_num_tokens, min(now - 1, round(now / config.factor))) if move else now
