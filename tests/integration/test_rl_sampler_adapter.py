"""`leanroll rl` with a sampler adapter, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from leanroll.config import read_resolved
from leanroll.config.recipes import RLConfig
from leanroll.errors import ConfigError, UserError
from leanroll.models import LoraSpec, load_policy
from leanroll.rundir import RunDir
from leanroll.rundir_metrics import is_timing
from leanroll.train import rl
from tests.recipe import save_tiny_model, tiny_recipe

OPTIONS = {
    "sampler_adapter__r": 4,
    "sampler_adapter__learning_rate": 0.01,
    "sampler_adapter__tail_weighting": "one_minus_alpha",
    "rollout__max_completion_length": 8,
    "rl__prompts_per_step": 2,
    "measure__alpha_every": 2,
    "measure__alpha_trajectories": 2,
    "eval__num_prompts": 0,
    "eval__num_samples": None,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def recipe(model: Path, run: Path, **changes: Any) -> RLConfig:
    schedule = model / "few.json"
    schedule.write_text(json.dumps({"page_size": 8, "pages": [3], "dense_layers": [0], "scorer": "softmax"}))
    return tiny_recipe(model, run, **{"rollout__schedule": str(schedule), **OPTIONS, **changes})


def final(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    records = [{k: v for k, v in r.items() if not is_timing(k)} for r in RunDir.open(run).read_metrics()]
    return records, torch.load(run / "checkpoints" / "latest" / "trainer.pt", weights_only=True)


def test_trains_both_adapters_and_resumes_exactly(model: Path, tmp_path: Path) -> None:
    rl.run(recipe(model, tmp_path / "whole", train__steps=2), quiet=True)
    records, state = final(tmp_path / "whole")
    timed = RunDir.open(tmp_path / "whole").read_metrics()
    for record in timed[1:]:
        assert {
            "sampler_adapter/kl", "sampler_adapter/loss", "sampler_adapter/grad_norm", "sampler_adapter/policy_loss",
            "sampler_adapter/alpha_p05", "time/sampler_s",
        } <= record.keys()  # fmt: skip
        assert record["updates"] == 1
    assert state["sampler_adapter"]["num_updates"] == 2
    assert state["policy_version"] == 4, "each update of either changes what is sampled"
    assert read_resolved(RLConfig, tmp_path / "whole" / "config.toml").sampler_adapter.r == 4

    rl.run(recipe(model, tmp_path / "parts", train__steps=1), quiet=True)
    rl.run(recipe(model, tmp_path / "parts", train__steps=2), resume=True, quiet=True)
    resumed, resumed_state = final(tmp_path / "parts")
    assert resumed == records
    for name, master in state["sampler_adapter"]["optimizer"]["masters"].items():
        assert torch.equal(resumed_state["sampler_adapter"]["optimizer"]["masters"][name], master)
    for name, master in state["optimizer"]["masters"].items():
        assert torch.equal(resumed_state["optimizer"]["masters"][name], master)

    saved = tmp_path / "whole" / "checkpoints" / "latest" / "sampler"
    policy = load_policy(tmp_path / "whole" / "checkpoints" / "latest" / "policy", dtype="float32")
    sampler = policy.add_sampler(LoraSpec(path=saved))
    masters = state["sampler_adapter"]["optimizer"]["masters"]
    assert all(torch.equal(p, masters[n]) for n, p in sampler.trainable_parameters().items())


def test_refuses_what_has_no_effect(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"sampler_adapter is set but has no effect, because rollout.schedule is 'dense'"
    ):
        recipe(model, tmp_path, rollout__schedule="dense")
    dense = tmp_path / "dense.json"
    dense.write_text(json.dumps({"page_size": 8, "pages": [2**30], "dense_layers": []}))
    with pytest.raises(ConfigError, match="reads every page"):
        rl.run(recipe(model, tmp_path / "run", rollout__schedule=str(dense)), quiet=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"sampler_adapter.kl_weight is set but has no effect"):
        tiny_recipe(model, tmp_path, sampler_adapter__kl_weight=2.0)
    with pytest.raises(UserError, match="both 0, so nothing would be trained"):
        recipe(
            model,
            tmp_path,
            sampler_adapter__kl_weight=0.0,
            sampler_adapter__ppo_weight=0.0,
            sampler_adapter__tail_weighting=None,
        )
    with pytest.raises(UserError, match=r"tail_share is set but has no effect"):
        recipe(model, tmp_path, sampler_adapter__tail_share=0.1)
    with pytest.raises(UserError, match="has its own rank"):
        recipe(model, tmp_path, sampler_adapter__path="somewhere")
