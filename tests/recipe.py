"""Small recipes on tiny random models, for tests of the trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leanroll.config import RLConfig, validate
from leanroll.losses import policy
from leanroll.train import update
from tests.tiny import tiny_model, tiny_tokenizer

HERE = Path(__file__).parent
SCHEDULE = {"page_size": 8, "bin_pages": 4, "pages": [6, 8], "dense_layers": [0], "scorer": "softmax"}


def save_tiny_model(folder: Path) -> Path:
    """A tiny Llama with its tokenizer, as a folder that `model.name` takes."""
    model = tiny_model("llama", num_hidden_layers=3, initializer_range=0.1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def reward(name: str) -> list[dict[str, Any]]:
    """`task.rewards` with one function of tests/rewards.py."""
    return [{"function": f"{HERE / 'rewards.py'}:{name}"}]


def tiny_recipe(model: Path, run_dir: Path, **changes: Any) -> RLConfig:
    """Sparse rollouts on the reference kernel, LoRA, four groups of four; `changes` are dotted keys with __ for the dot."""
    schedule = model / "schedule.json"
    if not schedule.exists():
        schedule.write_text(json.dumps(SCHEDULE))
    data: dict[str, Any] = {
        "name": "tiny",
        "model": {"name": str(model), "dtype": "float32", "device": "cpu"},
        "adapter": {"r": 8, "alpha": 16.0},
        "sampler_adapter": {},
        "task": {"rewards": reward("share_of_liked_ids"), "reward_workers": 0},
        "rollout": {
            "schedule": str(schedule),
            "kernel": "reference",
            "max_completion_length": 12,
            "kv_memory_gib": 0.1,
        },
        "rl": {"prompts_per_step": 4, "num_generations": 4},
        "optimizer": {"learning_rate": 0.01},
        "train": {"steps": 3, "micro_batch_tokens": 1024, "run_dir": str(run_dir)},
        "measure": {"alpha_every": 2, "alpha_trajectories": 4, "bin_tokens": 64},
        "eval": {"num_prompts": 8, "num_samples": 2},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        data[section][field] = value
        if value is None:
            del data[section][field]
    return validate(RLConfig, data)


def poison_loss(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Make the loss of one micro-batch, counted from 1, NaN."""
    calls = 0

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        loss, sums = policy.policy_loss(*args, **kwargs)
        return (loss * float("nan") if calls == call else loss), sums

    monkeypatch.setattr(update, "policy_loss", poisoned)
