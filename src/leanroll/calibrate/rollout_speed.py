"""How much faster a rollout decodes under a fitted schedule than dense: predicted and measured, on the machine at hand.

Both numbers have one definition: dense over sparse time of all decode steps of a batch that grows together, summed over the
positions from the shortest sequence that can be timed to the last length that was fitted. The prediction sums the cost model's
steps, with a device measured on the spot; the measurement sums timed steps, interpolated between lengths as in `leanroll bench`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leanroll.calibrate.bench import check_work, largest_batch, measure_speed, prediction_device
from leanroll.calibrate.cost import trajectory
from leanroll.calibrate.devices import Device
from leanroll.calibrate.passes import Progress, bin_edges
from leanroll.calibrate.probe import shape_of
from leanroll.calibrate.speed import decode_seconds, shortest_context, typical_length
from leanroll.errors import BackendUnavailable, ConfigError, RolloutError
from leanroll.models import Policy
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import write_json

NUM_STEPS, ROUNDS = 6, 3
MOST_BINS = 4
"""Length bins in whose middle steps are timed; with more bins, an even choice of them."""
SETUP_SECONDS = 30.0
"""Time for measuring the device, for checking that decoding is right, and for the two runs that the estimate comes from."""
MARGIN = 1.25
"""On the estimate of what is left to measure."""
_PILOT_SHARE = 8  # the longer run of the estimate reaches this part of the lengths


@dataclass(frozen=True, slots=True)
class RolloutSpeed:
    """`speed` of a target in calibration.json. Ratios are dense over sparse time, above 1 where sparse is faster.

    batch: sequences decoded together; 0 when that was not settled. prompt_length, max_length: decode steps at lengths
    prompt_length + 1 to max_length count. lengths: tokens that the timed sequences end with.
    predicted: by the cost model; None: not predicted. prediction: what it is for, or why there is none; "": not tried, `reason`
    says why.
    measured: median over rounds, measured_low and measured_high its quartiles; None: not measured, and `reason` says why.
    seconds: that measuring took. rows: one per length, as `leanroll bench` writes them (times in ms).
    """

    batch: int = 0
    prompt_length: int = 0
    max_length: int = 0
    lengths: tuple[int, ...] = ()
    predicted: float | None = None
    prediction: str = ""
    measured: float | None = None
    measured_low: float | None = None
    measured_high: float | None = None
    reason: str | None = None
    seconds: float = 0.0
    rows: tuple[dict[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> RolloutSpeed:
        """What `as_dict` gave, from a JSON file."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**data | {key: tuple(data[key]) for key in ("lengths", "rows")})


@dataclass
class SpeedMeter:
    """Predicts and measures the speed-up of schedules that differ in their pages alone.

    kernel, kv_dtype, kv_memory_gib: as the engine has them. batch_size: sequences decoded together, fewer where the memory holds
    fewer; 0: as many as it holds. folder: results are kept in it, named by what they depend on, so that none is measured twice.
    deadline: time.monotonic() at which measuring must be done; None: whenever. say: receives a line per measurement.
    """

    policy: Policy
    kernel: str
    kv_dtype: torch.dtype
    kv_memory_gib: float
    batch_size: int
    folder: Path
    deadline: float | None = None
    say: Callable[[str], None] = lambda line: None
    progress: Progress | None = None
    _device: tuple[Device | None, str] | None = field(default=None, init=False)

    def measure(self, schedule: BudgetSchedule) -> RolloutSpeed:
        """Both speed-ups of a schedule whose last bin is open; what cannot be had is None, with its reason."""
        lengths = timed_lengths(schedule)
        found = RolloutSpeed(prompt_length=lengths[0], max_length=lengths[-1], lengths=lengths)
        if all(_reads_all(schedule, typical_length(n, NUM_STEPS)) for n in lengths):
            return replace(found, reason="the schedule reads every page, so there is nothing to compare")
        try:
            most = largest_batch(self.policy, schedule, lengths[-1], self.kv_memory_gib, self.kv_dtype)
            found = replace(found, batch=min(self.batch_size or most, most))
            path = self.folder / f"{self._key(schedule, found)}.json"
            if path.is_file():
                return RolloutSpeed.read(path)
            check_work(
                self.policy, schedule, batch=found.batch, lengths=lengths, num_steps=NUM_STEPS, rounds=ROUNDS,
                prompt_length=lengths[0], kv_dtype=self.kv_dtype, kv_memory_gib=self.kv_memory_gib,
            )  # fmt: skip
            late = self._too_late(SETUP_SECONDS)
            if late is not None:
                return replace(found, reason=late)
            found = self._predict(schedule, found)
            late = None if self.deadline is None else self._too_late(self._estimate(schedule, found))
            if late is not None:
                return replace(found, reason=late)
            found = self._time(schedule, found)
        except (ConfigError, BackendUnavailable, RolloutError) as error:
            return replace(found, reason=str(error).rstrip("."))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, found.as_dict())
        return found

    def _key(self, schedule: BudgetSchedule, found: RolloutSpeed) -> str:
        """Hash of everything that a result depends on, as far as it is known here."""
        facts = asdict(replace(schedule, name="", target=None, quantile=None, provenance={})) | {
            "batch": found.batch,
            "lengths": found.lengths,
            "steps": NUM_STEPS,
            "rounds": ROUNDS,
            "kernel": self.kernel,
            "kv_dtype": str(self.kv_dtype),
            "device": str(self.policy.device),
            "threads": torch.get_num_threads(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def _too_late(self, needed: float) -> str | None:
        """Why something that takes `needed` seconds is not begun; None when there is time for it."""
        left = float("inf") if self.deadline is None else self.deadline - time.monotonic()
        return None if needed <= left else f"time budget: about {needed:.0f} s needed, {max(left, 0.0):.0f} s left"

    def _predict(self, schedule: BudgetSchedule, found: RolloutSpeed) -> RolloutSpeed:
        if self._device is None:
            self._device = prediction_device(self.policy, schedule, "auto", kernel=self.kernel, kv_dtype=self.kv_dtype)
        device, note = self._device
        if device is None:
            return replace(found, prediction=note)
        start, end = found.lengths[0], found.lengths[-1]
        whole = trajectory(
            shape_of(self.policy), schedule, device, prompt_length=start,
            completion_lengths=[end - start + 1] * found.batch,
        )  # fmt: skip
        return replace(found, predicted=whole.speedup, prediction=note)

    def _estimate(self, schedule: BudgetSchedule, found: RolloutSpeed) -> float:
        """Seconds that measuring takes: filling the pool and dense steps both grow by a straight line over length."""
        start, end = found.lengths[0], found.lengths[-1]
        far = start + max((end - start) // _PILOT_SHARE, 1)
        near_seconds, far_seconds = (self._pilot(schedule, found.batch, length) for length in (start, far))
        slope = max(far_seconds - near_seconds, 0.0) / (far - start)
        runs = [near_seconds + slope * (length - start) for length in found.lengths]
        return MARGIN * 2 * ROUNDS * sum(runs)

    def _pilot(self, schedule: BudgetSchedule, batch: int, length: int) -> float:
        dense, began = BudgetSchedule.dense(schedule.page_size), time.monotonic()
        decode_seconds(
            self.policy, dense, batch=batch, context=length, num_steps=NUM_STEPS, kernel=self.kernel, kv_dtype=self.kv_dtype
        )  # fmt: skip
        return time.monotonic() - began

    def _time(self, schedule: BudgetSchedule, found: RolloutSpeed) -> RolloutSpeed:
        self.say(f"speed of {schedule.name}: batch {found.batch}, steps at {', '.join(map(str, found.lengths))} tokens")
        began = time.monotonic()
        table = measure_speed(
            self.policy, schedule, batch=found.batch, lengths=found.lengths, num_steps=NUM_STEPS, rounds=ROUNDS,
            kernel=self.kernel, kv_dtype=self.kv_dtype, kv_memory_gib=self.kv_memory_gib,
            device=None if self._device is None else self._device[0], progress=self.progress,
        )  # fmt: skip
        speedup = table.trajectory.speedup
        return replace(
            found,
            measured=speedup.median,
            measured_low=speedup.low,
            measured_high=speedup.high,
            seconds=time.monotonic() - began,
            rows=tuple(row.as_dict() for row in table.rows),
        )


def timed_lengths(schedule: BudgetSchedule) -> tuple[int, ...]:
    """Tokens that the timed sequences end with, for a schedule whose last bin is open.

    The shortest sequence that can be timed, the middles of up to MOST_BINS bins, and the end of the last closed one. Inside a bin
    a step's time is a straight line over length, and it jumps where the budget does: where every bin has its middle, a sum
    interpolated between the middles is that of all steps.
    """
    edges = bin_edges(schedule)[:-1]
    first, last = shortest_context(NUM_STEPS), edges[-1] - 1
    after = first - typical_length(first, NUM_STEPS)  # what a context has beyond the middle of its timed steps
    num_bins = len(edges) - 1
    chosen = {round(i) for i in np.linspace(0, num_bins - 1, min(num_bins, MOST_BINS)).tolist()}
    middles = ((edges[i] + edges[i + 1]) // 2 + after for i in sorted(chosen))
    return (first, *(m for m in middles if first < m < last), last)


def _reads_all(schedule: BudgetSchedule, length: int) -> bool:
    return -(-length // schedule.page_size) <= schedule.budget(length)
