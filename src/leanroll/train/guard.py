"""The collapse guard: now and then a few full-length completions, compared with those of the start.

Early-stopped training never sees the end of a completion, so what happens there (endless repetition, no stop) shows up in no
other metric of a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from leanroll.config import GuardConfig
from leanroll.errors import ResumeError, RolloutError
from leanroll.measure.collapse import BoxedStats, CollapseLimits, CollapseReport, LengthStats, compare
from leanroll.rollout.engine import RolloutEngine
from leanroll.rundir import write_json
from leanroll.rundir_storage import storing
from leanroll.train.progress import RunDisplay
from leanroll.types import Prompt, RolloutGroup, SamplingParams

BASELINE = "probe-baseline.json"
"""In the run's folder eval/: the report on the completions before training."""


class CollapseGuard:
    """Probes of one run. The draws are the same in every probe, so two probes of one policy agree.

    last_calm: step of the last probe without an alarm. groups: completions of the last probe, one group per prompt.
    """

    def __init__(
        self,
        config: GuardConfig,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        display: RunDisplay,
        eos_probs: Callable[[Sequence[RolloutGroup]], Sequence[np.ndarray]],
    ) -> None:
        """prompts: what is probed. sampling: as in training, but for the full length. eos_probs: P(EOS) [T] of the policy as it is
        now, per rollout of the flattened groups (`measure.stops`)."""
        self._config, self._engine, self._prompts, self._display = config, engine, prompts, display
        self._eos_probs = eos_probs
        self._sampling = replace(sampling, seed=sampling.seed + 1)  # not the completions that a step trains on
        self._baseline: CollapseReport | None = None
        self.last_calm = 0
        self.groups: list[RolloutGroup] = []

    def set_baseline(self, folder: Path | None) -> dict[str, float]:
        """Probe the policy before training and remember the report in the run's folder eval/ (None: another process writes it);
        returns metrics."""
        self._baseline = self._probe()
        if folder is not None:
            with storing(folder / BASELINE):
                write_json(folder / BASELINE, asdict(self._baseline))
        return metrics_of(self._baseline)

    def read_baseline(self, folder: Path) -> None:
        """Of a resumed run. Raises ResumeError when it is not there or not readable."""
        path = folder / BASELINE
        try:
            self._baseline = _read(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResumeError(
                f"{path}, with the probe of the start, cannot be read ({error}); the guard has nothing to compare with. Restore "
                "the file, or start a new run."
            ) from error
        if self._baseline.eos_prob is None:
            self._display.say(
                f"note: {path} is of an older version, without P(EOS); the guard does not compare that in this run."
            )

    def is_due(self, step: int) -> bool:
        return step % self._config.every == 0

    def check(self, step: int) -> tuple[dict[str, float], list[str]]:
        """Probe the policy after `step`; returns metrics, and what is wrong in words (nothing: a calm probe)."""
        assert self._baseline is not None
        report = self._probe()
        limits = CollapseLimits(
            cap_rate=self._config.max_cap_rise,
            periodic_tail=self._config.max_loop_rise,
            repeated=self._config.max_repeat_rise,
            length_factor=self._config.max_length_factor,
            eos_factor=self._config.max_eos_factor,
        )
        alarms = [alarm.reason for alarm in compare(self._baseline, report, limits)]
        if not alarms:
            self.last_calm = step
        return metrics_of(report) | {"probe/alarms": len(alarms)}, alarms

    def _probe(self) -> CollapseReport:
        total = len(self._prompts) * self._config.num_samples
        with self._display.phase("probe", total=total):
            self.groups = self._engine.generate(
                self._prompts, self._sampling, self._config.num_samples, progress=self._display.show_rollout
            )
        rollouts = [r for g in self.groups for r in g.rollouts]
        if not rollouts:
            raise RolloutError(
                f"No probe completion could be generated. First reason: {self.groups[0].failures[0].reason} Lower "
                "rollout.max_completion_length, or turn the guard off."
            )
        with self._display.phase("probe"):
            eos_probs = self._eos_probs(self.groups)
        return CollapseReport.of(rollouts, self._sampling.max_completion_length, eos_probs=eos_probs)


def metrics_of(report: CollapseReport) -> dict[str, float]:
    """Names and units: `leanroll.rundir_metrics`."""
    metrics = {
        "probe/cap_rate": report.cap_rate,
        "probe/loop_share": report.periodic_tail,
        "probe/repeated_share": report.repeated,
        "probe/length_p10": report.lengths.p10,
        "probe/length_p50": report.lengths.p50,
        "probe/length_p90": report.lengths.p90,
    }
    if report.distinct_2 is not None:
        metrics["probe/distinct_2"] = report.distinct_2
    if report.eos_prob is not None:
        metrics["probe/eos_prob"] = report.eos_prob
    return metrics


def _read(data: dict[str, Any]) -> CollapseReport:
    boxed = data["boxed"]
    return CollapseReport(
        **{
            **data,
            "lengths": LengthStats(**data["lengths"]),
            "boxed": None if boxed is None else BoxedStats(**boxed),
        }
    )
