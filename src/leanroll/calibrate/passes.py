"""Measuring passes: a schedule on trajectories, with every result on disk.

A result is a file named by what it depends on (schedule, trajectory, temperature), so that an interrupted calibration that starts
again repeats nothing and comes to the same decisions.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leanroll.calibrate.search import BinEstimate
from leanroll.calibrate.trajectories import Trajectory
from leanroll.kernels.dispatch import KernelBackend
from leanroll.measure.acceptance import AcceptanceStats, TailSettings, tail_stats
from leanroll.measure.document import document_acceptance, document_hidden, first_sparse_position
from leanroll.measure.logprobs import ScoringPolicy
from leanroll.measure.selection import HasWindows, SparsePlan
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import atomic_file

Progress = Callable[[int, int, str], None]
"""Called as (trajectories done, trajectories at most, note)."""


@dataclass(frozen=True, slots=True)
class SchedulePass:
    """What one schedule did on some trajectories.

    rates: float32 [T] per trajectory, alpha at every position. bins: statistics per length bin, None without tokens.
    seconds: model time of these results, those that were on disk before included.
    """

    schedule: BudgetSchedule
    trajectories: tuple[Trajectory, ...]
    rates: tuple[np.ndarray, ...]
    bins: tuple[AcceptanceStats | None, ...]
    seconds: float

    def estimates(self, budgets: Sequence[int]) -> list[BinEstimate | None]:
        """The bins as the search takes them; every budget of the schedule's closed bins is one of `budgets`."""
        rungs = {pages: rung for rung, pages in enumerate(budgets)}
        return [
            None
            if stats is None
            else BinEstimate(rungs[pages], stats.tail, stats.tail_low, stats.tail_high, stats.num_rollouts)
            for pages, stats in zip(self.schedule.pages[:-1], self.bins, strict=False)
        ]


def bin_edges(schedule: BudgetSchedule) -> list[int]:
    """First length of every bin, and one past what a closed last bin would hold: len(pages) + 1 numbers."""
    size, width = schedule.page_size, schedule.bin_pages
    # ceil(L / S) // width = i for the first time at L = (i * width - 1) * S + 1.
    return [1, *((i * width - 1) * size + 1 for i in range(1, len(schedule.pages) + 1))]


class PassRunner:
    """Measures schedules on trajectories with one policy.

    Args:
        policy: scored densely and sparsely. kv_dtype: of the engine's cache.
        folder: results are kept in it. temperature: of both distributions.
    """

    def __init__(
        self,
        policy: ScoringPolicy,
        spec: HasWindows,
        backend: KernelBackend,
        folder: Path,
        *,
        temperature: float = 1.0,
        kv_dtype: torch.dtype | None = None,
        tail: TailSettings | None = None,
    ) -> None:
        self._policy, self._spec, self._backend, self._folder = policy, spec, backend, folder
        self._temperature, self._kv_dtype, self._tail = temperature, kv_dtype, tail or TailSettings()
        self._dense: dict[str, Tensor] = {}
        self.seconds = 0.0
        """Model time of everything measured or found on disk by this runner."""
        self.num_scored = 0
        """Sparse scorings of a trajectory so far."""
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def quantile(self) -> float:
        """Of alpha over tokens, that is fitted."""
        return self._tail.quantile

    def run(
        self,
        schedule: BudgetSchedule,
        trajectories: Sequence[Trajectory],
        *,
        enough: Callable[[SchedulePass], bool] | None = None,
        check_from: int = 1,
        progress: Progress | None = None,
    ) -> SchedulePass:
        """Measure a schedule, one trajectory after the other.

        enough: asked after every trajectory from number `check_from` on; True ends the pass early.
        """
        plan = SparsePlan.of(self._spec, schedule, kv_dtype=self._kv_dtype)
        rates: list[np.ndarray] = []
        seconds = 0.0
        result: SchedulePass | None = None
        for number, trajectory in enumerate(trajectories, start=1):
            if progress is not None:
                progress(number - 1, len(trajectories), trajectory.source)
            alpha, spent = self._alpha(plan, trajectory)
            rates.append(alpha)
            seconds += spent
            if number == len(trajectories) or (enough is not None and number >= check_from):
                done = tuple(trajectories[:number])
                result = SchedulePass(schedule, done, tuple(rates), self._bins(schedule, done, rates), seconds)
                if enough is not None and number >= check_from and enough(result):
                    break
        assert result is not None, "a pass needs trajectories"
        return result

    def dense_hidden(self, trajectory: Trajectory) -> Tensor:
        """Final hidden states [T, H] of the dense policy, computed once."""
        if trajectory.key not in self._dense:
            start = time.perf_counter()
            self._dense[trajectory.key] = document_hidden(self._policy, trajectory.token_ids, self._backend)
            self.seconds += time.perf_counter() - start
        return self._dense[trajectory.key]

    def sparse_hidden(self, schedule: BudgetSchedule, trajectory: Trajectory) -> Tensor:
        """Final hidden states [T, H] of sparse decoding."""
        plan = SparsePlan.of(self._spec, schedule, kv_dtype=self._kv_dtype)
        return document_hidden(self._policy, trajectory.token_ids, self._backend, plan, trajectory.prompt_length)

    def _alpha(self, plan: SparsePlan, trajectory: Trajectory) -> tuple[np.ndarray, float]:
        path = self._folder / f"{_plan_key(plan, self._temperature)}-{trajectory.key}.npz"
        self.num_scored += 1
        if path.is_file():
            with np.load(path) as data:
                alpha, seconds = data["alpha"], float(data["seconds"])
        else:
            length = len(trajectory.token_ids)
            sparse = first_sparse_position(length, plan, trajectory.prompt_length) < length
            dense = self.dense_hidden(trajectory) if sparse else torch.empty(0)
            start = time.perf_counter()
            alpha = document_acceptance(
                self._policy,
                trajectory.token_ids,
                self._backend,
                plan,
                temperature=self._temperature,
                prompt_length=trajectory.prompt_length,
                dense_hidden=dense,
            )
            seconds = time.perf_counter() - start
            with atomic_file(path, "wb") as file:
                np.savez_compressed(file, alpha=alpha, seconds=seconds)
        self.seconds += seconds
        return alpha, seconds

    def _bins(
        self, schedule: BudgetSchedule, trajectories: Sequence[Trajectory], rates: Sequence[np.ndarray]
    ) -> tuple[AcceptanceStats | None, ...]:
        """Tokens drawn by decode steps, binned as the schedule looks budgets up."""
        values, owners, lengths = [], [], []
        for number, (trajectory, alpha) in enumerate(zip(trajectories, rates, strict=True)):
            # The token after position t is drawn with t + 1 tokens in the cache; inside a prompt nothing is drawn.
            total = np.arange(1, len(alpha) + 1)
            drawn = total > trajectory.prompt_length
            values.append(alpha[drawn])
            lengths.append(total[drawn])
            owners.append(np.full(int(drawn.sum()), number))
        return stats_by_bin(schedule, values, lengths, owners, self._tail)


def stats_by_bin(
    schedule: BudgetSchedule,
    values: Sequence[np.ndarray],
    lengths: Sequence[np.ndarray],
    owners: Sequence[np.ndarray],
    tail: TailSettings,
) -> tuple[AcceptanceStats | None, ...]:
    """Statistics per length bin of a schedule, None where a bin has no tokens.

    values, lengths, owners: parts of any number; per token its alpha, the tokens in the cache, and whose it is.
    """
    alpha, total, owner = np.concatenate(values).astype(np.float64), np.concatenate(lengths), np.concatenate(owners)
    bins, edges = schedule.bins(total), bin_edges(schedule)
    return tuple(
        tail_stats(alpha[bins == i], owner[bins == i], edges[i], edges[i + 1], tail) if (bins == i).any() else None
        for i in range(len(schedule.pages))
    )


def _plan_key(plan: SparsePlan, temperature: float) -> str:
    """Hash of everything a plan's results depend on."""
    schedule = replace(plan.schedule, name="", target=None, quantile=None, provenance={})
    facts = asdict(schedule) | {"kv_dtype": str(plan.kv_dtype), "scorer": plan.scorer, "temperature": temperature}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
