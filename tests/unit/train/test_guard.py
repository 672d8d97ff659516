"""The collapse guard with a generator and a scorer of P(EOS) that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from leanroll.config import GuardConfig
from leanroll.rollout.engine import RolloutEngine
from leanroll.train.guard import BASELINE, CollapseGuard
from leanroll.train.progress import RunDisplay
from leanroll.types import Prompt, Rollout, RolloutGroup, SamplingParams

PROMPTS = [Prompt(0, (1, 2)), Prompt(1, (3,))]


class Engine:
    """Always the same completions."""

    def generate(self, prompts: Any, sampling: Any, num_samples: int, **_: Any) -> list[RolloutGroup]:
        return [
            RolloutGroup(p, tuple(Rollout(p.index, i, (5, 6, 2), (-1.0,) * 3, "stop") for i in range(num_samples)))
            for p in prompts
        ]


def made(probability: float, display: RunDisplay, **options: Any) -> CollapseGuard:
    """P(EOS) is `probability` at the last token and 0 elsewhere."""

    def eos_probs(groups: Any) -> list[np.ndarray]:
        return [np.array([0.0, 0.0, probability]) for g in groups for _ in g.rollouts]

    config = GuardConfig(every=1, num_samples=2, **options)
    sampling = SamplingParams(max_completion_length=3)
    return CollapseGuard(config, cast(RolloutEngine, Engine()), PROMPTS, sampling, display, eos_probs)


@pytest.fixture
def display() -> RunDisplay:
    return RunDisplay(5, 1, quiet=True)


def test_alarms_when_stops_become_unlikely(display: RunDisplay, tmp_path: Path) -> None:
    metrics = made(0.6, display).set_baseline(tmp_path)
    assert metrics["probe/eos_prob"] == pytest.approx(0.2)
    for now, options, alarms in (
        (0.16, {}, 0), (0.14, {}, 1), (0.9, {}, 0), (0.0, {}, 1), (0.14, {"max_eos_factor": 5}, 0),
        (0.59, {"max_eos_factor": 1}, 1), (0.6, {"max_eos_factor": 1}, 0),
    ):  # fmt: skip
        guard = made(now, display, **cast(dict[str, Any], options))
        guard.read_baseline(tmp_path)
        found, reasons = guard.check(1)
        assert found["probe/alarms"] == len(reasons) == alarms, (now, options)
        assert found["probe/eos_prob"] == pytest.approx(now / 3)
        assert all(reason.startswith("mean P(EOS) fell from 0.2 to") for reason in reasons)


def test_the_baseline_is_read_as_it_was(display: RunDisplay, tmp_path: Path) -> None:
    """Exact: a fall by a factor just above 1 is an alarm, none is not, after the way through the file."""
    value = 0.1 + 0.2  # no short decimal
    made(value, display).set_baseline(tmp_path)
    same, lower = made(value, display, max_eos_factor=1), made(np.nextafter(value, 0) - 1e-8, display, max_eos_factor=1)
    for guard, alarms in ((same, 0), (lower, 1)):
        guard.read_baseline(tmp_path)
        assert len(guard.check(1)[1]) == alarms


def test_a_baseline_without_p_eos_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    display = RunDisplay(5, 1)
    made(0.6, display).set_baseline(tmp_path)
    data = json.loads((tmp_path / BASELINE).read_text())
    (tmp_path / BASELINE).write_text(json.dumps(data | {"eos_prob": None}))
    guard = made(0.0, display)
    guard.read_baseline(tmp_path)
    assert "without P(EOS); the guard does not compare that" in capfd.readouterr().err.replace("\n", " ")
    assert guard.check(1)[1] == []
