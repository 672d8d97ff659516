"""The page that `leanroll rl` leaves in the run directory, however the run ends."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from leanroll.cli.main import main
from leanroll.cli.training import EXIT_INTERRUPTED
from leanroll.config import to_toml
from leanroll.train import rl
from tests.recipe import poison_loss, save_tiny_model, tiny_recipe

pytest.importorskip("matplotlib")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Three steps without evaluation, into tmp_path/run."""
    model = save_tiny_model(tmp_path / "model")
    config = tiny_recipe(model, tmp_path / "run", eval__num_prompts=0, eval__num_samples=None, measure__bin_tokens=8)
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(config))
    return path


def steps_shown(page: Path) -> int:
    (steps,) = re.findall(r"<td>steps</td><td[^>]*></td><td[^>]*>(\d+)</td>", page.read_text(encoding="utf-8"))
    return int(steps)


def test_after_ctrl_c_and_after_resuming(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    collect = rl.RLTrainer.collect

    def pressing_ctrl_c(trainer: rl.RLTrainer, step: int) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return collect(trainer, step)

    page = tmp_path / "run" / "report.html"
    with monkeypatch.context() as patch:
        patch.setattr(rl.RLTrainer, "collect", pressing_ctrl_c)
        assert main(["rl", str(recipe)]) == EXIT_INTERRUPTED
    assert steps_shown(page) == 1
    assert main(["rl", str(tmp_path / "run"), "--resume"]) == 0
    assert steps_shown(page) == 3
    text = page.read_text(encoding="utf-8")
    for title in ("Reward", "Tail acceptance by length", "Sampler KL by position", "Importance ratio by position"):
        assert f'<img alt="{title}" src="data:image/png;base64,' in text
    assert capfd.readouterr().err.splitlines()[-1].endswith(str(tmp_path / "run")), "the closing line comes last"


def test_without_matplotlib_a_notice(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["rl", str(recipe), "--train.steps", "1"]) == 0
    assert not (tmp_path / "run" / "report.html").exists()
    (notice,) = (line for line in capfd.readouterr().err.splitlines() if "report.html" in line)
    assert "pip install 'leanroll[report]'" in notice


def test_of_a_run_that_fails(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_loss(monkeypatch, call=2)
    assert main(["rl", str(recipe)]) == 1
    assert steps_shown(tmp_path / "run" / "report.html") == 1
