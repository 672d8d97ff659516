"""A small distillation recipe on a pair of tiny random models, for tests of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leanroll.config import DistillConfig, validate
from leanroll.models import LoraSpec
from leanroll.rundir import RunDir
from leanroll.rundir_metrics import is_timing
from leanroll.train import distill
from tests.recipe import reward, save_tiny_model
from tests.tiny import tiny_model, tiny_tokenizer

QUICK: dict[str, Any] = {"eval__num_prompts": 0, "eval__num_samples": None, "teacher__evaluate": None}
"""Changes of a recipe: nothing is evaluated."""


def save_pair(folder: Path) -> tuple[Path, Path]:
    """A student, and a teacher of another architecture and size with the same tokenizer."""
    student, teacher = folder / "student", folder / "teacher"
    save_tiny_model(student)
    tiny_model("qwen3", num_hidden_layers=2, seed=7, initializer_range=0.1, vocab_size=320).save_pretrained(teacher)
    tiny_tokenizer().save_pretrained(teacher)
    return student, teacher


def recipe(models: tuple[Path, Path], run_dir: Path, **changes: Any) -> DistillConfig:
    """Dense rollouts of at most 6 tokens, LoRA; `changes` are dotted keys with __ for the dot."""
    data: dict[str, Any] = {
        "name": "tiny",
        "model": {"name": str(models[0]), "dtype": "float32", "device": "cpu"},
        "adapter": {"r": 8, "alpha": 16.0},
        "teacher": {"model": str(models[1]), "evaluate": False, "preflight_prompts": 4, "max_dropped_mass": 0.5},
        "task": {"rewards": reward("share_of_liked_ids"), "reward_workers": 0},
        "rollout": {"kernel": "reference", "max_completion_length": 12, "kv_memory_gib": 0.1},
        "distill": {"prompts_per_step": 4, "num_tokens": 6, "bin_tokens": 4},
        "guard": {},
        "adapt": {},
        "optimizer": {"learning_rate": 0.01},
        "train": {"steps": 3, "micro_batch_tokens": 1024, "run_dir": str(run_dir)},
        "eval": {"num_prompts": 4, "num_samples": 1},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        data[section][field] = value
        if value is None:
            data[section].pop(field, None)
    return validate(DistillConfig, data)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    records = RunDir.open(run_dir).read_metrics()
    return [{k: v for k, v in record.items() if not is_timing(k)} for record in records]


def killed_in_step(killed: int, config: DistillConfig) -> None:
    """Run it up to the middle of a step, the last checkpoint some steps back."""
    collect = distill.DistillTrainer.collect

    def dying(trainer: distill.DistillTrainer, step: int) -> Any:
        if step == killed:
            raise KeyboardInterrupt
        return collect(trainer, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill.DistillTrainer, "collect", dying)
        with pytest.raises(KeyboardInterrupt):
            distill.run(config, quiet=True)


def distill_adapter() -> LoraSpec:
    return LoraSpec(r=8, alpha=16.0)
