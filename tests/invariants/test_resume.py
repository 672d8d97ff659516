"""I4: a run killed with SIGKILL at any moment and resumed is the run that was never killed: same metrics, same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leanroll.config import DistillConfig, RLConfig, to_toml
from tests import distilling
from tests.recipe import reward, save_tiny_model, tiny_recipe

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("control", ["fixed", "hold"])
def test_killed_and_resumed_equals_never_killed(tmp_path: Path, control: str) -> None:
    model = save_tiny_model(tmp_path / "model")
    recipe = tmp_path / "recipe.toml"
    config = tiny_recipe(
        model,
        tmp_path / "unused",
        task__rewards=reward("share_of_liked_ids"),
        train__steps=6,
        train__save_every=2,
        eval__every=3,
        rl__num_mini_batches=2,
        rollout__control=control,
        **({"rollout__target": 0.99, "measure__alpha_every": 1} if control == "hold" else {}),
    )
    recipe.write_text(to_toml(config))
    kill_and_resume(recipe, "--seed", "1")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["rl", "distill"])
def test_killed_in_one_phase_after_the_other(tmp_path: Path, verb: str) -> None:
    """The short form of the 20 rounds of docs/faults.md."""
    recipe = tmp_path / "recipe.toml"
    changes = {"train__steps": 9, "train__save_every": 2, "eval__every": 4, "eval__num_prompts": 2}
    if verb == "rl":
        model = save_tiny_model(tmp_path / "model")
        config: RLConfig | DistillConfig = tiny_recipe(
            model, tmp_path / "unused", rl__prompts_per_step=2, rl__num_mini_batches=2, **changes
        )
    else:
        config = distilling.recipe(distilling.save_pair(tmp_path), tmp_path / "unused", **changes)
    recipe.write_text(to_toml(config))
    kill_and_resume(recipe, "--by-phase", "--kills", "4", "--verb", verb)


def kill_and_resume(recipe: Path, *arguments: str) -> None:
    """Run the script beside this file, in an interpreter with one thread: it forks."""
    work = recipe.parent / "work"
    done = subprocess.run(
        [sys.executable, "-m", "tests.invariants.kill_and_resume", str(recipe), str(work), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no difference" in done.stdout
