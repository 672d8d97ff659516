"""Options of `leanroll rl` together: held budgets, a sampler adapter, rejection by ratio, the alarm that goes back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leanroll.config import AlarmConfig, RLConfig
from leanroll.measure.alarm import Sign, Verdict, Watcher
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import HELD_SCHEDULE, RunDir
from leanroll.rundir_metrics import is_timing
from leanroll.train import rl
from tests.recipe import save_tiny_model, tiny_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def recipe(model: Path, run: Path, **changes: Any) -> RLConfig:
    """Budgets that are far too small for the target, so that they move from the first step on."""
    schedule = model / "tight.json"
    content = {"page_size": 8, "bin_pages": 4, "pages": [4] * 8, "dense_layers": [0], "scorer": "mean"}
    schedule.write_text(json.dumps(content))
    options = {
        "rollout__schedule": str(schedule), "rollout__control": "hold", "rollout__target": 0.98, "train__steps": 3,
        "rollout__max_completion_length": 12, "measure__alpha_every": None, "rl__prompts_per_step": 2,
        "rl__num_generations": 4, "eval__num_prompts": 0, "eval__num_samples": None, "train__save_every": 1,
        "train__keep_checkpoints": 0,
    }  # fmt: skip
    return tiny_recipe(model, run, **(options | changes))


def records(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not is_timing(k)} for r in RunDir.open(run).read_metrics()]


def held(run: Path) -> BudgetSchedule:
    return BudgetSchedule.load(run / HELD_SCHEDULE)


def in_step(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """The step stops where its adapters are updated already and its budgets are about to move."""
    observe = rl.HeldSchedule.observe

    def observed(schedule: rl.HeldSchedule, step: int, *rest: Any) -> Any:
        if step == number:
            raise error
        return observe(schedule, step, *rest)

    monkeypatch.setattr(rl.HeldSchedule, "observe", observed)


def test_held_budgets_sampler_adapter_and_rejection_go_on_exactly(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    options: dict[str, Any] = {
        "sampler_adapter__r": 4,
        "sampler_adapter__learning_rate": 0.01,
        "rl__geo_mask_low": 0.9,
        "rl__geo_mask_high": 1.1,
        "rl__m2_threshold": 0.05,
        "train__steps": 2,
        "rollout__max_pages": 8,  # or the last step would read every page, and the adapter rest
    }
    rl.run(recipe(model, straight, **options), quiet=True)
    with monkeypatch.context() as patch:
        in_step(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            rl.run(recipe(model, killed, **options), quiet=True)
    rl.run(recipe(model, killed, **options), resume=True, quiet=True)
    assert records(killed) == records(straight)
    known = set.intersection(*(set(r) for r in records(killed)[1:]))
    assert {"sampler_adapter/kl", "control/raised", "rejected_share/tokens"} <= known, "all of it is at work"
    assert held(killed) == held(straight)
    assert held(straight).provenance["with_sampler_adapter"] is True
    one, other = (torch.load(r / "checkpoints/latest/trainer.pt", weights_only=True) for r in (straight, killed))
    for masters in (lambda s: s["optimizer"]["masters"], lambda s: s["sampler_adapter"]["optimizer"]["masters"]):
        assert all(torch.equal(masters(other)[name], m) for name, m in masters(one).items())


@pytest.mark.parametrize("last_calm", [1, 0])
def test_budgets_go_back_with_the_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_calm: int
) -> None:
    """Back to step 1, and to before training."""
    observe = Watcher.observe

    def alarming(watcher: Watcher, record: Any) -> Verdict:
        if record["step"] < 3:
            return observe(watcher, record)
        return Verdict({}, (Sign("reward", 1.0, 3, "mean reward fell"),), True, True, last_calm)

    monkeypatch.setattr(Watcher, "observe", alarming)
    run = tmp_path / "run"
    config = recipe(model, run).with_values(alarm=AlarmConfig(on_alarm="roll_back"))
    summary = rl.run(config, quiet=True)
    assert f"Back to step {last_calm}." in summary.line()
    then = [v for k, v in records(run)[last_calm + 1].items() if k.startswith("control/bin_") and k.endswith("/pages")]
    assert list(held(run).pages[: len(then)]) == then, "what the step after sampled with"
    assert held(run).provenance["after_step"] == last_calm
    assert any(k.endswith("/next_pages") for r in records(run)[1:] for k in r), "budgets moved"


def test_processes_compare_the_sampler_adapter_too(model: Path, tmp_path: Path) -> None:
    config = recipe(model, tmp_path / "run", sampler_adapter__r=4)
    trainer = rl.RLTrainer(config, BudgetSchedule.load(model / "tight.json"), rl.RunDisplay(1, 1, quiet=True))
    before = trainer.checksum()
    assert trainer.policy.sampler is not None
    with torch.no_grad():
        trainer.policy.sampler.b[0] += 0.01
    assert trainer.checksum() != before


def test_a_schedule_made_for_a_sampler_adapter_is_not_used_without_one_in_silence(model: Path, tmp_path: Path) -> None:
    schedule = replace(
        BudgetSchedule("s", page_size=8, bin_pages=4, pages=(4,)), provenance={"with_sampler_adapter": True}
    )
    said: list[str] = []
    display = rl.RunDisplay(1, 1, quiet=True)
    display.say = said.append  # type: ignore[method-assign]
    for changes in ({}, {"sampler_adapter__r": 4}):
        rl.RLTrainer(recipe(model, tmp_path / "run", **changes), schedule, display)
        assert ["its budgets are too small" in line for line in said] == ([] if changes else [True])
        said.clear()
