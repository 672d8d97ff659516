"""`train.trackers`: what reaches them is what metrics.jsonl holds, and a missing package is the user's error."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from accelerate.utils import LoggerType

from leanroll.config.training import Tracker
from leanroll.errors import ConfigError
from leanroll.rundir import RunDir
from leanroll.train import rl, trainer
from tests.recipe import save_tiny_model, tiny_recipe

TRACKERS = get_args(Tracker)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def events(folder: Path) -> dict[int, dict[str, float]]:
    """step → tag → value of the newest event file below a folder, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    found: dict[int, dict[str, float]] = {}
    accumulator = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    accumulator.Reload()
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            found.setdefault(event.step, {})[tag] = event.value
    return found


def as_float32(records: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """What TensorBoard can hold of metrics.jsonl."""
    return {r["step"]: {k: float(np.float32(v)) for k, v in r.items() if k != "step"} for r in records}


def test_tensorboard_shows_what_the_metrics_file_holds(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    rl.run(tiny_recipe(model, run, train__steps=2, train__trackers=["tensorboard"]), quiet=True)
    records = as_float32(RunDir.open(run).read_metrics())
    assert sorted(records) == [0, 1, 2]
    assert events(run / "tiny") == records

    rl.run(tiny_recipe(model, run, train__steps=3, train__trackers=["tensorboard"]), resume=True, quiet=True)
    records = as_float32(RunDir.open(run).read_metrics())
    assert sorted(records) == [0, 1, 2, 3]
    assert events(run / "tiny") == records


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    others = [LoggerType(other) for other in TRACKERS if other != name]
    monkeypatch.setattr(trainer, "get_available_trackers", lambda: others)
    with pytest.raises(
        ConfigError, match=rf"names {name}, which is not installed; run `pip install 'leanroll\[trackers\]'`"
    ):
        rl.run(tiny_recipe(model, tmp_path / "run", train__trackers=list(TRACKERS)), quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_extra_that_the_error_names_has_every_tracker() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    extra = project["project"]["optional-dependencies"]["trackers"]
    assert sorted(requirement.partition(">")[0] for requirement in extra) == sorted(TRACKERS)
