"""`leanroll distill --suite` end to end on a tiny model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanroll.cli import suite as suite_verb
from leanroll.cli.main import main
from leanroll.config import load_suite, to_toml, validate
from leanroll.config.recipes import DistillConfig
from leanroll.rundir import RunDir
from leanroll.rundir_metrics import is_timing
from leanroll.tasks.metrics import paired_difference
from leanroll.train import distill
from tests.recipe import reward, save_tiny_model

ARMS = """
reference = "short"
seeds = [1, 2]
base = "base.toml"
[[arms]]
name = "long"
overrides = { "distill.num_tokens" = 8 }
[[arms]]
name = "short"
"""


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("student"))


def written(student: Path, folder: Path, text: str = ARMS) -> Path:
    """A suite file beside its base recipe; the suite's folder is `out` beside them."""
    base = validate(
        DistillConfig,
        {
            "model": {"name": str(student), "dtype": "float32", "device": "cpu"},
            "adapter": {"r": 8, "alpha": 16.0},
            "teacher": {"system_prompt": "Be brief.", "preflight_prompts": 4, "min_margin": -1.0},
            "task": {"rewards": reward("share_of_liked_ids"), "reward_workers": 0},
            "rollout": {"kernel": "reference", "max_completion_length": 8, "kv_memory_gib": 0.1},
            "distill": {"prompts_per_step": 4, "num_tokens": 4},
            "optimizer": {"learning_rate": 0.01},
            "train": {"steps": 2, "micro_batch_tokens": 1024, "seed": 7, "run_dir": "elsewhere"},
            "eval": {"num_prompts": 4, "num_samples": 1, "every": 1},
        },
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.toml").write_text(to_toml(base))
    path = folder / "suite.toml"
    path.write_text(f"run_dir = '{folder / 'out'}'\n{text}")
    return path


def metrics(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not is_timing(k)} for r in RunDir.open(run).read_metrics()]


def rewards(run: Path, step: int) -> np.ndarray:
    rows = json.loads(RunDir.open(run).eval_path(step).read_text())["per_prompt"]
    return np.array([np.mean(row["rewards"]) for row in rows])


@pytest.fixture(scope="module")
def finished(student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a suite that has run; compared at no time at all, too."""
    path = written(student, tmp_path_factory.mktemp("suite"), f"compare_at_seconds = 1e-6\n{ARMS}")
    assert main(["distill", "--suite", str(path)]) == 0
    return path


def test_compares_the_last_step_in_pairs(finished: Path) -> None:
    out = finished.parent / "out"
    result = json.loads((out / "suite.json").read_text())
    long, short = result["arms"]
    last = {name: np.stack([rewards(out / f"{name}-seed{seed}", 2) for seed in (1, 2)]) for name in ("long", "short")}
    assert long["reward"]["mean"] == pytest.approx(last["long"].mean(), abs=1e-6)
    assert long["reward_by_seed"] == pytest.approx(last["long"].mean(axis=1), abs=1e-6)
    expected = paired_difference(last["long"].mean(axis=0), last["short"].mean(axis=0))
    assert [long["difference"][k] for k in ("mean", "low", "high")] == pytest.approx(
        [expected.mean, expected.low, expected.high], abs=1e-6
    )
    assert short["difference"] is None
    records = [r for seed in (1, 2) for r in metrics(out / f"long-seed{seed}")[1:]]
    assert long["generated_tokens"] == sum(r["generated_tokens"] for r in records) // 2
    assert long["trained_tokens"] > short["trained_tokens"] > 0
    assert (long["steps"], result["num_prompts"], result["seeds"]) == (2, 4, [1, 2])
    assert result["teacher"] is not None
    at_start = long["at_seconds"]
    assert at_start["steps"] == [0, 0], "no training fits"
    assert at_start["reward"]["mean"] == pytest.approx(result["before"], abs=1e-6)
    assert at_start["difference"]["mean"] == 0
    page = (out / "suite.md").read_text()
    assert f"| long | {long['reward']['mean']:.3f} |" in page
    assert "| short | " in page
    assert "## After 1e-06 seconds of training" in page
    assert (out / "long-seed1" / "config.toml").is_file()


def test_a_run_of_a_suite_is_that_run_alone(finished: Path, tmp_path: Path) -> None:
    run = load_suite(finished).runs[-1]
    config = run.config.model_copy(
        update={"train": run.config.train.model_copy(update={"run_dir": str(tmp_path / "x")})}
    )
    distill.run(config, quiet=True)
    assert metrics(tmp_path / "x") == metrics(run.path)


def test_student_and_teacher_are_evaluated_before_training_once(finished: Path) -> None:
    runs = [RunDir.open(finished.parent / "out" / f"{arm}-seed{seed}") for seed in (1, 2) for arm in ("long", "short")]
    assert ["time/eval_s" in run.read_metrics()[0] for run in runs] == [True, False, False, False]
    for run in runs[1:]:
        for name in ("step-000000.json", "teacher.json"):
            assert json.loads((run.path / "eval" / name).read_text()) == json.loads(
                (runs[0].path / "eval" / name).read_text()
            )
        assert run.read_metrics()[0]["eval/teacher/margin"] == runs[0].read_metrics()[0]["eval/teacher/margin"]


def test_finished_runs_are_kept(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distill, "run", None)
    assert main(["distill", "--suite", str(finished)]) == 0
    captured = capfd.readouterr()
    assert "4 of 4 runs are finished" in captured.err
    assert "after the last step" in captured.out
    assert main(["distill", "--suite", str(finished), "--optimizer.learning_rate", "0.02"]) == 2
    assert "optimizer.learning_rate: 0.01 → 0.02" in capfd.readouterr().err
    assert main(["distill", "--suite", str(finished), "--train.steps", "1"]) == 2
    assert "train.steps: 2 → 1" in capfd.readouterr().err


def test_interrupted_and_given_again(
    student: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the first step of a run, then in the last step of it, then not at all."""
    path = written(student, tmp_path, ARMS.replace("[1, 2]", "[1]"))
    collect = distill.DistillTrainer.collect
    press_at = 1

    def pressed(trainer: distill.DistillTrainer, step: int) -> Any:
        if step == press_at:
            os.kill(os.getpid(), signal.SIGINT)
        return collect(trainer, step)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(distill.DistillTrainer, "collect", pressed)
        assert main(["distill", "--suite", str(path)]) == 130
        assert RunDir.open(out / "long-seed1").checkpoint_steps() == [1]
        press_at = 2
        assert main(["distill", "--suite", str(path)]) == 130
        assert RunDir.open(out / "long-seed1").checkpoint_steps()[-1] == 2
    assert "the same command goes on" in capfd.readouterr().err
    assert [p.name for p in out.iterdir() if p.is_dir()] == ["long-seed1"], "the next run was not begun"
    assert not (out / "suite.json").exists()
    assert main(["distill", "--suite", str(path)]) == 0
    assert metrics(out / "long-seed1") == metrics(finished.parent / "out" / "long-seed1")
    ours, theirs = (json.loads((p / "suite.json").read_text()) for p in (out, finished.parent / "out"))
    assert [a["reward_by_seed"] for a in ours["arms"]] == [a["reward_by_seed"][:1] for a in theirs["arms"]]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (ARMS.replace("num_tokens", "num_token"), [], "did you mean distill.num_tokens"),
        (ARMS.replace('"short"', '"long"'), [], "several arms"),
        (ARMS.replace('reference = "short"', 'reference = "x"'), [], "which is no arm"),
        (ARMS + "overrides = { task.few_shot = 'x' }", [], "not evaluated alike"),
        (ARMS + "overrides = { eval.num_prompts = 3 }", [], "not evaluated alike"),
        (ARMS, ["--resume"], "--resume has no effect beside --suite"),
        (ARMS, ["recipe.toml"], "'recipe.toml' has no effect beside --suite"),
        (ARMS, ["--distill.num_tokens", "2"], "but arm long of"),
    ],
)
def test_mistakes_cost_no_training(
    text: str, arguments: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = written(Path("nowhere"), tmp_path, text)
    assert main(["distill", "--suite", str(path), *arguments]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else(
    finished: Path, student: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = written(student, tmp_path)
    run = finished.parent / "out" / "long-seed1"
    assert main(["distill", "--suite", str(path), "--train.run_dir", str(run)]) == 2
    assert "directory of a single run" in capfd.readouterr().err
    (tmp_path / "out" / "short-seed2").mkdir(parents=True)
    (tmp_path / "out" / "short-seed2" / "notes.txt").write_text("mine")
    assert main(["distill", "--suite", str(path)]) == 2
    assert "No run in" in capfd.readouterr().err
    assert not (tmp_path / "out" / "long-seed1").exists()


def test_prompts_are_resampled_with_all_their_seeds() -> None:
    values = np.array([[0.0, 1.0, np.nan], [1.0, 0.0, np.nan]])
    assert suite_verb.over_prompts(values).low == suite_verb.over_prompts(values).high == 0.5
    assert suite_verb.over_prompts(np.array([[0.0, 1.0], [0.0, 1.0]])).low == 0.0


def test_the_evaluation_below_a_time() -> None:
    reward = np.zeros(1)
    seconds = np.array([2.0, 2.0, 2.0, 2.0])
    record = suite_verb.RunRecord((0,), {0: reward, 2: reward, 4: reward}, seconds, 0, 0, None)
    assert [record.step_at(s) for s in (1.0, 3.9, 4.0, 7.9, 8.0, 99.0)] == [0, 0, 2, 2, 4, 4]
