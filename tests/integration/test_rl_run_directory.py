"""Run directories of `leanroll rl`: what resuming refuses and allows, locks, and runs killed at the very start."""

from __future__ import annotations

from pathlib import Path

import pytest

from leanroll.cli.main import main
from leanroll.config import to_toml
from leanroll.errors import ConfigError, ResumeError, RunDirInUse
from leanroll.rundir import RunDir
from leanroll.rundir_lock import run_lock
from leanroll.tasks.rewards import RewardRunner
from leanroll.train import rl, session
from tests.recipe import save_tiny_model, tiny_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _refuse(*_: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_resume_refuses_what_would_change_the_run(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rl.run(tiny_recipe(model, run, train__steps=1), quiet=True)
    with pytest.raises(ResumeError, match=r"rl\.num_generations: 4 → 2"):
        rl.run(tiny_recipe(model, run, train__steps=1, rl__num_generations=2), resume=True, quiet=True)
    with pytest.raises(ConfigError, match="not empty"):
        rl.run(tiny_recipe(model, run, train__steps=1), quiet=True)
    with pytest.raises(ResumeError, match="No run in"):
        rl.run(tiny_recipe(model, tmp_path / "nowhere", train__steps=1), resume=True, quiet=True)
    assert not (tmp_path / "nowhere").exists()
    summary = rl.run(tiny_recipe(model, run, train__steps=2), resume=True, quiet=True)
    assert summary.last_step == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "write_text", _refuse)  # root could write to a read-only folder
        with pytest.raises(ResumeError, match="cannot be written"):
            rl.run(tiny_recipe(model, run, train__steps=3), resume=True, quiet=True)
    schedule = model / "schedule.json"
    text = schedule.read_text()
    try:
        schedule.write_text(text.replace("[6, 8]", "[6, 9]"))
        with pytest.raises(ResumeError, match=r"content of rollout\.schedule"):
            rl.run(tiny_recipe(model, run, train__steps=3), resume=True, quiet=True)
        with pytest.raises(ResumeError, match=r"content of rollout\.schedule 'dense'"):
            rl.run(tiny_recipe(model, run, train__steps=3, rollout__schedule="dense"), resume=True, quiet=True)
        moved = schedule.rename(tmp_path / "moved.json")
        moved.write_text(text)
        summary = rl.run(tiny_recipe(model, run, train__steps=3, rollout__schedule=str(moved)), resume=True, quiet=True)
        assert summary.last_step == 3, "the same schedule under another name is the same run"
    finally:
        schedule.write_text(text)


def test_one_process_trains_in_a_run_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A new run and a resumed one hold the lock to the end; whoever comes second changes nothing and exits with 2."""
    run = tmp_path / "run"
    refused = 0

    def evaluate(trainer: rl.RLTrainer, step: int) -> dict[str, float]:
        nonlocal refused
        before = RunDir.open(run).config_path.read_text()
        with pytest.raises(RunDirInUse, match=rf"'{run}' is in use by process \d+ on"):
            rl.run(tiny_recipe(model, run, train__steps=9), resume=True, quiet=True)
        assert main(["rl", str(run), "--resume", "--train.steps", "9"]) == 2
        assert "is in use by process" in capfd.readouterr().err
        assert RunDir.open(run).config_path.read_text() == before
        refused += 1
        return {}

    monkeypatch.setattr(rl.RLTrainer, "evaluate", evaluate)
    rl.run(tiny_recipe(model, run, train__steps=1), quiet=True)
    assert refused == 2, "before the first and after the last step"
    rl.run(tiny_recipe(model, run, train__steps=2), resume=True, quiet=True)
    assert refused == 3
    with run_lock(run):
        pass


def test_two_new_runs_in_one_directory(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found it free before they read their model."""
    run = tmp_path / "run"
    start = RewardRunner.start

    def slow(rewards: RewardRunner) -> None:
        start(rewards)
        other.__enter__()

    other = run_lock(run)
    monkeypatch.setattr(RewardRunner, "start", slow)
    with pytest.raises(RunDirInUse):
        rl.run(tiny_recipe(model, run), quiet=True)
    other.__exit__(None, None, None)
    assert RunDir.is_unstarted(run)


def test_resume_of_a_run_killed_before_it_had_a_recipe(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with run_lock(run):
        (run / "rollouts").mkdir()
    changes = {"train__steps": 1, "eval__num_prompts": 0, "eval__num_samples": None}
    (tmp_path / "recipe.toml").write_text(to_toml(tiny_recipe(model, run, **changes)))
    assert main(["rl", str(tmp_path / "recipe.toml"), "--resume"]) == 0
    assert f"{run} holds no run yet; starting from the beginning." in capfd.readouterr().err
    assert [record["step"] for record in RunDir.open(run).read_metrics()] == [0, 1]

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(ResumeError, match="No run in"):
        rl.run(tiny_recipe(model, foreign, **changes), resume=True, quiet=True)
    assert [entry.name for entry in foreign.iterdir()] == ["notes.txt"]
