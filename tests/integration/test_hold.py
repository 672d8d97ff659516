"""`rollout.control = "hold"` end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from leanroll.config import RLConfig
from leanroll.errors import ConfigError, TrainingDiverged
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import RunDir
from leanroll.rundir_metrics import is_timing
from leanroll.train import rl
from tests.recipe import poison_loss, save_tiny_model, tiny_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def recipe(model: Path, run: Path, **changes: Any) -> RLConfig:
    """Budgets that are far too small for the target, on sequences of some 90 to 120 tokens."""
    schedule = model / "tight.json"
    content = {"page_size": 8, "bin_pages": 4, "pages": [4] * 8, "dense_layers": [0], "scorer": "mean"}
    schedule.write_text(json.dumps(content))
    options = {
        "rollout__schedule": str(schedule), "rollout__control": "hold", "rollout__target": 0.98, "train__steps": 4,
        "rollout__max_completion_length": 24, "measure__alpha_every": None, "measure__alpha_trajectories": 16,
        "eval__num_prompts": 0, "eval__num_samples": None, "train__save_every": 2,
    }  # fmt: skip
    return tiny_recipe(model, run, **(options | changes))


def records(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not is_timing(k)} for r in RunDir.open(run).read_metrics()]


def budgets(record: dict[str, Any], name: str = "pages") -> list[int]:
    return [v for k, v in record.items() if k.startswith("control/bin_") and k.endswith(f"/{name}")]


def test_raises_what_is_too_small_and_goes_on_after_a_stop(model: Path, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    config = recipe(model, straight)
    summary = rl.run(config, quiet=True)
    first, *_, last = records(straight)[1:]
    assert first["alpha/p05"] < 0.95
    assert set(budgets(first)) == {6}, "the lowest rung"
    assert first["control/raised"] > 0
    assert max(budgets(last)) > 6
    assert last["kv_share_read"] > first["kv_share_read"] + 0.1, "the engine reads what the controller says"
    assert last["alpha/p05"] > 0.97
    assert all("alpha/p05" in r for r in records(straight)[1:]), "measured in every step"
    for before, after in zip(records(straight)[1:], records(straight)[2:], strict=False):
        moved = {k: v for k, v in before.items() if k.endswith("/next_pages")}
        assert len(moved) == before["control/raised"] + before["control/lowered"]
        assert all(after[k.replace("next_pages", "pages")] == v for k, v in moved.items())
        assert budgets(after) == sorted(budgets(after))
    held = BudgetSchedule.load(straight / "held-schedule.json")
    assert (held.target, held.provenance["after_step"]) == (0.98, 4)
    assert list(held.pages[: len(budgets(last))]) == [
        last.get(k.replace("/pages", "/next_pages"), v) for k, v in last.items() if k.endswith("/pages")
    ]
    assert BudgetSchedule.load(straight / "schedule.json").pages == (4,) * 8, "the recipe's stays"
    assert f"KV read {last['kv_share_read']:.2f}" in summary.line()

    stopped = tmp_path / "stopped"
    rl.run(recipe(model, stopped, train__steps=2), quiet=True)
    (stopped / "held-schedule.json").write_text("lost")
    rl.run(recipe(model, stopped), resume=True, quiet=True)
    assert records(stopped) == records(straight)
    assert BudgetSchedule.load(stopped / "held-schedule.json").pages == held.pages
    states = [torch.load(run / "checkpoints/latest/trainer.pt", weights_only=True) for run in (straight, stopped)]
    one, other = (state["control"] for state in states)
    assert all(torch.equal(a.pop("rows"), b.pop("rows")) for a, b in zip(one["bins"], other["bins"], strict=True))
    assert one == other


def test_a_step_that_fails_leaves_the_state_of_the_one_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        poison_loss(patch, call=2)
        with pytest.raises(TrainingDiverged):
            rl.run(recipe(model, run, train__steps=2, train__save_every=0), quiet=True)
    state = torch.load(run / "checkpoints/latest/trainer.pt", weights_only=True)
    assert state["control"]["last_step"] == 1
    assert json.loads((run / "held-schedule.json").read_text())["provenance"]["after_step"] == 1


def test_the_engine_takes_other_budgets_only(model: Path, tmp_path: Path) -> None:
    trainer = rl.RLTrainer(recipe(model, tmp_path / "run"), BudgetSchedule.load(model / "tight.json"), _display())
    schedule = trainer.engine.schedule
    for other in (BudgetSchedule.dense(8), BudgetSchedule("x", page_size=8, bin_pages=4, pages=schedule.pages)):
        with pytest.raises(ConfigError, match="more than its budgets"):
            trainer.engine.use_schedule(other)


def _display() -> Any:
    return rl.RunDisplay(1, 1, quiet=True)
