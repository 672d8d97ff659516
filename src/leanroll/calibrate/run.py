"""A calibration from its settings to its folder: trajectories, search, validation, schedules, speed, tables.

runs/calibration-20260102-030405/
  config.toml, environment.json     as in a training run
  passes/                           alpha of every (schedule, trajectory) measured; makes resuming cheap and exact
  speed/                            speed-up of every schedule measured; kept for resuming, too
  acceptance.parquet                one row per (pass, length bin)
  schedules/<name>-0.90.json        usable as rollout.schedule
  calibration.json                  everything the report shows; `speed` of a target is documented in `rollout_speed.RolloutSpeed`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leanroll.calibrate.fit import Fit, Search
from leanroll.calibrate.passes import PassRunner, Progress, SchedulePass, bin_edges
from leanroll.calibrate.rollout_speed import RolloutSpeed, SpeedMeter
from leanroll.calibrate.search import Ladder, default_budgets
from leanroll.calibrate.shape import fit_beta, length_correlation
from leanroll.calibrate.trajectories import Trajectory
from leanroll.calibrate.validate import continue_sparsely
from leanroll.config import CalibrationConfig
from leanroll.errors import ConfigError
from leanroll.kernels.dispatch import KernelBackend
from leanroll.measure.acceptance import AcceptanceStats, TailSettings, tail
from leanroll.measure.document import paper_acceptance
from leanroll.measure.selection import SparsePlan
from leanroll.models import Policy
from leanroll.models.spec import ModelSpec
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import CALIBRATION, write_json, write_text

PASSES, SCHEDULES, SPEED, TABLE = "passes", "schedules", "speed", "acceptance.parquet"
PAPER_TRAJECTORIES = 2
"""Held-out trajectories on which the paper's reading of alpha is computed beside the exact one."""
UNWANTED = "calibrate.measure_speed is false"
FIT_SHARE = 0.7
"""Of the time budget, after which no new pass begins: the rest is for validation and for measuring speed."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a calibration works with.

    make_engine: an engine for a schedule, to validate with. kv_memory_gib: for keys and values while speed is measured. say: one
    line of text. progress: inside a pass.
    """

    policy: Policy
    backend: KernelBackend
    make_engine: Callable[[BudgetSchedule], RolloutEngine]
    settings: CalibrationConfig
    name: str
    temperature: float
    folder: Path
    say: Callable[[str], None]
    progress: Progress | None = None
    kv_memory_gib: float = 1.0

    @property
    def tail(self) -> TailSettings:
        """How the tail is estimated."""
        return TailSettings(self.settings.quantile, self.settings.confidence)

    @property
    def template(self) -> BudgetSchedule:
        """Everything of the schedules but their pages."""
        s = self.settings
        return BudgetSchedule(
            self.name, s.page_size, s.first_pages, s.last_pages, s.dense_layers, s.bin_pages, scorer=s.scorer,
            quantile=s.quantile,
        )  # fmt: skip

    def run(self, fitting: Sequence[Trajectory], held_out: Sequence[Trajectory]) -> dict[str, Any]:
        """Fit every target, validate, measure speed, write the files; returns what is in calibration.json.

        Raises:
            ConfigError: settings that do not fit the model or the trajectories.
        """
        s = self.settings
        started = time.monotonic()
        ladder = self._ladder(fitting)
        engine_dtype = self.make_engine(self.template).kv_dtype
        runner = PassRunner(
            self.policy, self.policy.spec, self.backend, self.folder / PASSES,
            temperature=self.temperature, kv_dtype=engine_dtype, tail=self.tail,
        )  # fmt: skip
        deadline = started + FIT_SHARE * 60.0 * s.time_budget_min if s.time_budget_min else None
        search = Search(runner, self.template, ladder, fitting, deadline=deadline, say=self.say, progress=self.progress)
        guess = self._guess(ladder)
        fits: list[Fit] = []
        results: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        for target in sorted(s.targets):
            fit = search.fit(target, guess)
            guess = [ladder.pages.index(p) for p in fit.schedule.pages[:-1]]
            result = self._result(fit, ladder, runner)
            if held_out:
                result |= self._validate(fit, runner, held_out, rows)
            fits.append(fit)
            results.append(result)
            self._write_schedule(fit, result)
            self._write(results, rows, search, held_out, started)
        # Last, so that no target's fit waits for another one's timing.
        meter = self._meter(engine_dtype, started) if s.measure_speed else None
        for fit, result in zip(fits, results, strict=True):
            speed = RolloutSpeed(reason=UNWANTED) if meter is None else meter.measure(fit.schedule)
            result["speed"] = speed.as_dict()
            self._write(results, rows, search, held_out, started)
        return self._write(results, rows, search, held_out, started)

    def _meter(self, kv_dtype: torch.dtype, started: float) -> SpeedMeter:
        s = self.settings
        return SpeedMeter(
            self.policy, self.backend.name, kv_dtype, self.kv_memory_gib, s.speed_batch_size, self.folder / SPEED,
            deadline=started + 60.0 * s.time_budget_min if s.time_budget_min else None, say=self.say,
            progress=self.progress,
        )  # fmt: skip

    def _ladder(self, fitting: Sequence[Trajectory]) -> Ladder:
        s = self.settings
        num_bins = s.max_tokens // (s.bin_pages * s.page_size)
        most = num_bins * s.bin_pages
        budgets = s.budgets or default_budgets(most, s.first_pages + s.last_pages)
        if budgets[-1] < most:
            budgets = (*budgets, most)
        edges = bin_edges(replace(self.template, pages=(most,) * (num_bins + 1)))
        coverage = [
            sum(t.prompt_length < edges[i + 1] - 1 and len(t.token_ids) >= edges[i] for t in fitting)
            for i in range(num_bins)
        ]
        ladder = Ladder.of(
            budgets, num_bins=num_bins, bin_pages=s.bin_pages, coverage=coverage, min_trajectories=s.min_trajectories
        )
        if not any(ladder.fittable):
            raise ConfigError(
                f"No length bin of {s.bin_pages * s.page_size} tokens has {s.min_trajectories} trajectories (per bin: {coverage}); "
                "give more or longer texts or prompts, or lower calibrate.min_trajectories, max_tokens or bin_pages."
            )
        for i, fits in enumerate(ladder.fittable):
            if not fits:
                self.say(
                    f"lengths {edges[i]} to {edges[i + 1] - 1}: {coverage[i]} trajectories, fewer than {s.min_trajectories}; "
                    "this bin stays dense"
                )
        return ladder

    def _guess(self, ladder: Ladder) -> list[int]:
        s = self.settings
        if s.warm_start is not None:
            return ladder.rungs_of(BudgetSchedule.load(s.warm_start), s.bin_pages)
        # A sixth of the pages held, which is right within a factor of two for most models and targets.
        wanted = [(i + 1) * s.bin_pages / 6 for i in range(ladder.num_bins)]
        return [next((r for r, p in enumerate(ladder.pages) if p >= w), len(ladder.pages) - 1) for w in wanted]

    def _result(self, fit: Fit, ladder: Ladder, runner: PassRunner) -> dict[str, Any]:
        pages = fit.schedule.pages[:-1]
        drawn = [r[t.prompt_length :] for r, t in zip(fit.final.rates, fit.final.trajectories, strict=True)]
        beta = fit_beta(np.concatenate(drawn))
        correlation = length_correlation(
            drawn, [t.prompt_length + 1 for t in fit.final.trajectories], self.settings.quantile
        )
        exhaustive = len(ladder.pages) * len(fit.final.trajectories)
        # Each rung, each trajectory, at what one scoring took here.
        per_scoring = fit.final.seconds / len(fit.final.trajectories)
        return {
            "target": fit.target,
            "pages": list(pages),
            "dense_bins": [i for i, p in enumerate(pages) if p >= (i + 1) * self.settings.bin_pages - 1],
            "complete": fit.complete,
            "kv_share": trajectory_share(fit.schedule, self.settings.max_tokens),
            "passes": fit.num_passes,
            "scorings": fit.num_scored,
            "exhaustive_scorings": exhaustive,
            "seconds": fit.seconds,
            "exhaustive_seconds": exhaustive * per_scoring,
            "fit": [_stats(b) for b in fit.final.bins[:-1]],
            "beta": None if beta is None else asdict(beta),
            "length_correlation": None if correlation is None else asdict(correlation),
            "histogram": np.histogram(np.concatenate(drawn), bins=np.linspace(0.0, 1.0, 101))[0].tolist(),
        }

    def _validate(
        self, fit: Fit, runner: PassRunner, held_out: Sequence[Trajectory], rows: list[dict[str, Any]]
    ) -> dict[str, Any]:
        s = self.settings
        checked = runner.run(fit.schedule, held_out, progress=self.progress)
        rows += _rows(checked, None, fit.target, "held_out")
        result: dict[str, Any] = {
            "held_out": [_stats(b) for b in checked.bins[:-1]],
            "paper": self._paper(fit.schedule, runner, held_out[:PAPER_TRAJECTORIES]),
        }
        if s.continuations:
            sampled = continue_sparsely(
                self.make_engine(fit.schedule), self.policy, self.backend, held_out, num_tokens=s.continuations,
                num_bins=len(fit.schedule.pages) - 1, temperature=self.temperature, seed=s.seed, tail=self.tail,
            )  # fmt: skip
            rows += [
                _row(b, fit.schedule, i, None, fit.target, "continuation") for i, b in enumerate(sampled.bins[:-1]) if b
            ]
            result["continuations"] = [_stats(b) for b in sampled.bins[:-1]]
        return result

    def _paper(
        self, schedule: BudgetSchedule, runner: PassRunner, trajectories: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Tails of the paper's reading, of its ceiling and of exact alpha, on the same tokens."""
        exact, paper, ceiling = [], [], []
        for t in trajectories:
            dense, sparse = runner.dense_hidden(t), runner.sparse_hidden(schedule, t)
            reading, top = paper_acceptance(
                self.policy, dense[t.prompt_length :], sparse[t.prompt_length :], temperature=self.temperature
            )
            paper.append(reading)
            ceiling.append(top)
            exact.append(runner.run(schedule, [t]).rates[0][t.prompt_length :])
        q = self.settings.quantile
        return {
            name: tail(np.concatenate(x), q) for name, x in (("exact", exact), ("paper", paper), ("ceiling", ceiling))
        }

    def _write_schedule(self, fit: Fit, result: dict[str, Any]) -> None:
        folder = self.folder / SCHEDULES
        folder.mkdir(exist_ok=True)
        name = f"{self.name}-{fit.target:.2f}"
        s = self.settings
        schedule = replace(
            fit.schedule,
            name=name,
            provenance={
                "made_by": "leanroll calibrate",
                "model": self.policy.name,
                "max_tokens": s.max_tokens,
                "trajectories": len(fit.final.trajectories),
                "sources": sorted({Path(t.source).name for t in fit.final.trajectories}),
                "confidence": s.confidence,
                "temperature": self.temperature,
                "complete": fit.complete,
                **({"with_sampler_adapter": True} if self.policy.sampler is not None else {}),
                "dense_bins": result["dense_bins"],
                "tail_per_bin": [None if b is None else round(b["tail"], 4) for b in result["fit"]],
            },
        )
        write_text(folder / f"{name}.json", schedule.to_json() + "\n")

    def _write(
        self,
        results: Sequence[dict[str, Any]],
        rows: Sequence[dict[str, Any]],
        search: Search,
        held_out: Sequence[Trajectory],
        started: float,
    ) -> dict[str, Any]:
        """Everything that is known so far; a broken-off calibration leaves the targets that are done."""
        s = self.settings
        summary = {
            "name": self.name,
            "model": self.policy.name,
            "scorer": s.scorer,
            "quantile": s.quantile,
            "confidence": s.confidence,
            "page_size": s.page_size,
            "bin_pages": s.bin_pages,
            "max_tokens": s.max_tokens,
            "ladder": list(search.ladder.pages),
            "edges": bin_edges(replace(self.template, pages=(s.bin_pages,) * search.ladder.num_bins)),
            "sources": sorted({t.source for t in search.trajectories}),
            "held_out_sources": sorted({t.source for t in held_out}),
            "targets": list(results),
            "targets_missing": sorted(set(s.targets) - {r["target"] for r in results}),
            "passes": [
                {
                    "pages": list(p.schedule.pages[:-1]),
                    "trajectories": len(p.trajectories),
                    "seconds": p.seconds,
                    "bins": [_stats(b) for b in p.bins[:-1]],
                }
                for p in search.history
            ],
            "model_seconds": search.runner.seconds,
            "wall_seconds": time.monotonic() - started,
        }
        write_json(self.folder / CALIBRATION, summary)
        fitted = [row for n, p in enumerate(search.history, start=1) for row in _rows(p, n, None, "fit")]
        _write_table(self.folder / TABLE, [*fitted, *rows])
        return summary


def check_settings(settings: CalibrationConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for settings that do not fit the model, or names that do not exist, before anything is computed."""
    if settings.max_tokens > spec.max_position:
        raise ConfigError(
            f"calibrate.max_tokens is {settings.max_tokens}, but the model's context holds {spec.max_position} tokens; lower it."
        )
    schedule = BudgetSchedule("check", settings.page_size, dense_layers=settings.dense_layers, scorer=settings.scorer)
    if not SparsePlan.of(spec, schedule).sparse_layers:
        raise ConfigError(
            f"calibrate.dense_layers {list(settings.dense_layers)} leave no layer that could be sparse (windowed layers cannot); "
            "name fewer."
        )
    if settings.warm_start is not None:
        BudgetSchedule.load(settings.warm_start)


def trajectory_share(schedule: BudgetSchedule, max_tokens: int) -> float:
    """KV pages read of pages held in sparse layers, over a completion from 1 to max_tokens tokens."""
    lengths = np.arange(1, max_tokens + 1)
    held = -(-lengths // schedule.page_size)
    return float(np.minimum(held, schedule.budgets(lengths)).sum() / held.sum())


def _stats(stats: AcceptanceStats | None) -> dict[str, Any] | None:
    return None if stats is None else asdict(stats)


def _rows(measured: SchedulePass, number: int | None, target: float | None, on: str) -> list[dict[str, Any]]:
    return [
        _row(stats, measured.schedule, i, number, target, on)
        for i, stats in enumerate(measured.bins[:-1])
        if stats is not None
    ]


def _row(
    stats: AcceptanceStats, schedule: BudgetSchedule, index: int, number: int | None, target: float | None, on: str
) -> dict[str, Any]:
    """A row of the table: `pass` counts the passes of the fit; `target` is that of a validated schedule."""
    pages = schedule.pages[index]
    return {"pass": number, "target": target, "measured_on": on, "bin": index, "pages": pages, **asdict(stats)}


def _write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            "The acceptance table needs pyarrow, which is not installed; run `pip install 'leanroll[calibrate]'`."
        ) from error
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(list(rows)), temporary)
    temporary.replace(path)
