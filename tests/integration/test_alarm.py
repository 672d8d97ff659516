"""The collapse alarm in the trainer: warn, stop, roll back, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leanroll.cli.main import main
from leanroll.config import AlarmConfig, RLConfig, to_dict, to_toml, validate
from leanroll.errors import ConfigError
from leanroll.rundir import RunDir
from leanroll.rundir_metrics import is_timing
from leanroll.train import rl
from tests.recipe import save_tiny_model, tiny_recipe

STEPS, LAST_GOOD = 7, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def collapsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward that the alarm sees is 1, and 0 after step 4."""
    collect = rl.RLTrainer.collect

    def collected(trainer: rl.RLTrainer, step: int) -> Any:
        batch = collect(trainer, step)
        batch.metrics["reward/mean"] = float(step <= LAST_GOOD)
        return batch

    monkeypatch.setattr(rl.RLTrainer, "collect", collected)


def recipe(model: Path, run: Path, **changes: Any) -> RLConfig:
    options: dict[str, Any] = {
        "train__steps": STEPS,
        "train__save_every": 1,
        "train__keep_checkpoints": 0,
        "eval__num_prompts": 0,
        "eval__num_samples": None,
        "rl__prompts_per_step": 2,
        "rollout__max_completion_length": 6,
        "rollout__schedule": "dense",
    }
    # Other signs may come and go by chance in so short a run.
    alarm: dict[str, Any] = {"window": 3, "patience": 2, "length_factor": 0.0, "entropy_factor": 0.0, "kl_growth": 0.0}
    for key, value in changes.items():
        if key.startswith("alarm__"):
            alarm[key.removeprefix("alarm__")] = value
        else:
            options[key] = value
    data = to_dict(tiny_recipe(model, run, **options))
    return validate(RLConfig, data | {"alarm": alarm})


def metrics(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not is_timing(k)} for r in RunDir.open(run).read_metrics()]


@pytest.mark.parametrize(
    ("action", "last_step", "checkpoints"),
    [("warn", STEPS, range(1, 8)), ("stop", 6, range(1, 7)), ("roll_back", 6, range(1, 5))],
)
def test_alarm(model: Path, tmp_path: Path, action: str, last_step: int, checkpoints: range) -> None:
    run = tmp_path / "run"
    config = recipe(model, run, alarm__on_alarm=action)
    summary = rl.run(config, quiet=True)
    assert summary.last_step == last_step
    records = metrics(run)
    assert [r["step"] for r in records if r.get("alarm/raised")] == [6], "two steps after the reward is gone, once"
    assert records[6]["alarm/reward"] == pytest.approx(1 / 0.45)
    assert RunDir.open(run).checkpoint_steps() == list(checkpoints)
    assert (run / "checkpoints" / "latest").resolve().name == f"step-{checkpoints[-1]:06d}"
    if action == "warn":
        assert summary.halted is None
        return
    assert summary.speed is None
    assert "stopped by itself: step 6 may have collapsed: mean reward fell from 1 to 0" in summary.line()
    assert ("Back to step 4." in summary.line()) == (action == "roll_back")
    if action == "stop":  # whoever resumes has seen the alarm: it is not raised again while it lasts
        again = rl.run(config, resume=True, quiet=True)
        assert (again.last_step, again.halted) == (STEPS, None)
    else:  # what led there is repeated, with the same end
        again = rl.run(config, resume=True, quiet=True)
        assert (again.last_step, again.halted) == (6, summary.halted)
        assert metrics(run) == records


def test_a_resumed_run_alarms_as_if_it_had_never_stopped(model: Path, tmp_path: Path) -> None:
    """Cut in the reference, and while the sign builds up."""
    rl.run(recipe(model, tmp_path / "straight"), quiet=True)
    for steps in (3, 5):
        rl.run(recipe(model, tmp_path / "cut", train__steps=steps), resume=steps > 3, quiet=True)
    rl.run(recipe(model, tmp_path / "cut"), resume=True, quiet=True)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "straight")
    assert metrics(tmp_path / "cut")[6]["alarm/raised"] == 1


def test_without_a_checkpoint_to_go_back_to_nothing_is_dropped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDir, "checkpoint_steps", lambda run: [5])
    run = tmp_path / "run"
    summary = rl.run(recipe(model, run, alarm__on_alarm="roll_back"), quiet=True)
    assert "No checkpoint of step 4 or before is left; this step was saved." in summary.line()
    assert (run / "checkpoints" / "step-000006").is_dir()


def test_off_watches_nothing(model: Path, tmp_path: Path) -> None:
    config = tiny_recipe(model, tmp_path / "off", train__steps=1, rollout__schedule="dense")
    rl.run(config.with_values(alarm=AlarmConfig(on_alarm="off")), quiet=True)
    assert not any(name.startswith("alarm/") for r in metrics(tmp_path / "off") for name in r)


def test_the_command_fails_when_it_stops_and_the_reason_is_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanroll.cli.rl.write_page", lambda run, say: None)  # plots take longer than the run
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe(model, tmp_path / "stopped", alarm__on_alarm="stop")))
    assert main(["rl", str(path)]) == 1
    (alarm,) = RunDir.open(tmp_path / "stopped").read_alarms()
    assert (alarm["step"], alarm["last_calm"]) == (6, 4)
    assert alarm["signs"][0]["reason"] == "mean reward fell from 1 to 0 (allowed: 45% less) since step 5"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alarm__on_alarm": "roll_back", "train__save_every": 5}, "expected 1 to alarm.window = 3 steps"),
        (
            {"alarm__on_alarm": "roll_back", "train__keep_checkpoints": 1, "alarm__patience": 4},
            "keep 4 or more, or 0 for all",
        ),
        ({"alarm__tail_drop": 0.2}, "fewer than 3 measurements of acceptance"),
        ({"alarm__tail_drop": 0.2, "measure__alpha_every": 1}, "acceptance is not measured"),
        ({"alarm__length_factor": 0.5}, "expected a factor above 1"),
        ({"alarm__reward_drop": 0.0}, None),
        ({"alarm__reward_drop": 0.0, "alarm__tail_drop": 0.0}, "nothing is watched"),
        ({"alarm__on_alarm": "off"}, r"alarm\.window is set but has no effect"),
    ],
)
def test_refused(model: Path, tmp_path: Path, changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        recipe(model, tmp_path, **changes)
        return
    with pytest.raises(ConfigError, match=message):
        recipe(model, tmp_path, **changes)
