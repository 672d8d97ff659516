"""Rejection by ratio in the trainer: its gradient against a naive one, what it counts, what it logs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leanroll.errors import ConfigError
from leanroll.measure.logprobs import score
from leanroll.models import CausalContext, Policy
from leanroll.rundir import RunDir
from leanroll.train import rl, update
from leanroll.train.update import TrainingGroup
from tests.recipe import save_tiny_model, tiny_recipe

LIMITS = {"geo_mask_low": 0.9, "geo_mask_high": 1.12, "token_veto_high": 1.9, "m2_threshold": 0.05}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def off_policy(policy: Policy, groups: Sequence[TrainingGroup], scale: float) -> list[TrainingGroup]:
    """The same groups as if a sampler with log-probs off by normal noise had drawn them."""
    rng = np.random.default_rng(7)
    old = iter(score(policy, [g.group for g in groups], temperature=1.0, max_tokens=1024).logprobs)

    def moved(group: TrainingGroup) -> TrainingGroup:
        rollouts = []
        for r in group.group.rollouts:
            values = next(old)
            rollouts.append(
                replace(r, logprobs=tuple((values.numpy() - scale * rng.normal(size=len(values))).tolist()))
            )
        return replace(group, group=replace(group.group, rollouts=tuple(rollouts)))

    return [moved(g) for g in groups]


class Spy:
    """Puts `before(policy, groups)` in front of the update of every step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Any) -> None:
        run_update = update.PolicyUpdater.update

        def spied(updater: update.PolicyUpdater, step: int, groups: Sequence[TrainingGroup]) -> dict[str, float]:
            return run_update(updater, step, before(updater._policy, groups))

        monkeypatch.setattr(update.PolicyUpdater, "update", spied)


def naive(policy: Policy, groups: Sequence[TrainingGroup], loss_type: str) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient of one sequence at a time, decisions in plain Python; and the shares that the metrics should say."""
    rollouts = [(g.group.prompt, r, a) for g in groups for r, a in zip(g.group.rollouts, g.advantages, strict=True)]
    old = score(policy, [g.group for g in groups], temperature=1.0, max_tokens=1024).logprobs
    log_ratios = [
        [o - q for o, q in zip(values.tolist(), r.logprobs, strict=True)]
        for (_, r, _), values in zip(rollouts, old, strict=True)
    ]
    kept = []
    for i, values in enumerate(log_ratios):
        mean = math.exp(sum(values) / len(values))
        if LIMITS["geo_mask_low"] <= mean <= LIMITS["geo_mask_high"] and max(values) <= math.log(
            LIMITS["token_veto_high"]
        ):
            kept.append(i)
    left = sorted(((abs(v), i, t) for i in kept for t, v in enumerate(log_ratios[i])), reverse=True)
    outliers = set()
    while left and sum(v**2 for v, _, _ in left) / len(left) > LIMITS["m2_threshold"]:
        _, i, t = left.pop(0)
        outliers.add((i, t))
    tokens = sum(len(log_ratios[i]) for i in kept)
    for i in kept:
        prompt, r, advantage = rollouts[i]
        ids = torch.tensor([[*prompt.token_ids, *r.token_ids]])
        hidden = policy.hidden(ids, torch.arange(ids.shape[1])[None], CausalContext())
        logits = policy.head.logits(hidden[0, len(prompt.token_ids) - 1 : -1])
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(r.token_ids)[:, None])[:, 0]
        weights = torch.tensor(
            [0.0 if (i, t) in outliers else min(math.exp(v), 3.0) for t, v in enumerate(log_ratios[i])]
        )
        divisor = tokens if loss_type == "dapo" else len(rollouts) * len(r.token_ids)
        (-(weights * (logprobs - logprobs.detach()).exp() * float(advantage)).sum() / divisor).backward()
    gradient = torch.cat([p.grad.flatten().clone() for p in policy.trainable_parameters().values()])
    policy.model.zero_grad()
    shares = {
        "rejected_share/completions": 1 - len(kept) / len(rollouts),
        "rejected_share/tokens": 1 - tokens / sum(map(len, log_ratios)),
        "m2/masked_share": len(outliers) / tokens,
        "m2/after": sum(v**2 for v, _, _ in left) / len(left),
        "trained_tokens": tokens,
    }
    return gradient, shares


@pytest.mark.parametrize(("loss_type", "micro_batch_tokens"), [("dapo", 4096), ("dapo", 160), ("grpo", 4096)])
def test_the_gradient_is_the_naive_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str, micro_batch_tokens: int
) -> None:
    """The first moment after one step is (1 - beta1) times the gradient."""
    expected: list[Any] = []

    def before(policy: Policy, groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
        moved = off_policy(policy, groups, 0.3)
        expected.extend(naive(policy, moved, loss_type))
        return moved

    Spy(monkeypatch, before)
    run = tmp_path / "run"
    config = tiny_recipe(
        model, run, train__steps=1, train__micro_batch_tokens=micro_batch_tokens, eval__num_prompts=0, rollout__schedule="dense",
        eval__num_samples=None, optimizer__max_grad_norm=0.0, rl__loss_type=loss_type, measure__bin_tokens=4,
        **{f"rl__{name}": value for name, value in LIMITS.items()},
    )  # fmt: skip
    rl.run(config, quiet=True)
    gradient, shares = expected
    state = torch.load(run / "checkpoints" / "latest" / "trainer.pt", weights_only=True)["optimizer"]["adamw"]["state"]
    found = torch.cat([s["exp_avg"].flatten() for s in state.values()]) / 0.1
    assert gradient.norm() > 0
    assert (found - gradient).norm() < 1e-4 * gradient.norm()

    record = RunDir.open(run).read_metrics()[1]
    assert 0 < shares["rejected_share/completions"] < 1
    assert 0 < shares["m2/masked_share"] < 1
    assert {name: record[name] for name in shares} == pytest.approx(shares, rel=1e-5)
    assert record["m2/before"] > LIMITS["m2_threshold"] >= record["m2/after"]
    assert record["rejected_share/geo_mean"] > 0
    assert record["rejected_share/token_veto"] > 0
    assert record["time/score_s"] > 0, "the pass that the decision takes"
    # Ratios are logged of all tokens, rejected ones included, before the cap.
    counts = [v for k, v in record.items() if k.startswith("mismatch/pos_") and k.endswith("/tokens")]
    assert sum(counts) == pytest.approx(record["trained_tokens"] / (1 - record["rejected_share/tokens"]))
    assert record["ratio/max"] > LIMITS["token_veto_high"]


def test_a_step_that_is_all_rejected_updates_nothing_and_says_why(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spy(monkeypatch, lambda policy, groups: off_policy(policy, groups, 2.0))
    run = tmp_path / "run"
    config = tiny_recipe(
        model, run, train__steps=1, rollout__schedule="dense", eval__num_prompts=0, eval__num_samples=None,
        rl__token_veto_high=1.05, rl__num_iterations=2,
    )  # fmt: skip
    rl.run(config, quiet=True)
    record = RunDir.open(run).read_metrics()[1]
    assert (record["updates"], record["trained_tokens"], record["rejected_share/completions"]) == (0, 0, 1.0)
    assert record["ratio/max"] > 2
    assert record["mismatch/pos_0/tokens"] == record["generated_tokens"]
    assert "loss" not in record
    assert "entropy" not in record


def test_outliers_alone_leave_the_divisor(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that no token meets takes all weights away, and there is no update; the tokens count as trained."""
    Spy(monkeypatch, lambda policy, groups: off_policy(policy, groups, 0.3))
    run = tmp_path / "run"
    config = tiny_recipe(
        model, run, train__steps=1, rollout__schedule="dense", eval__num_prompts=0, eval__num_samples=None, rl__m2_threshold=1e-12,
        rl__importance_sampling_mode="off",
    )  # fmt: skip
    rl.run(config, quiet=True)
    record = RunDir.open(run).read_metrics()[1]
    assert record["m2/masked_share"] == 1.0
    assert "m2/after" not in record
    assert record["updates"] == 0
    assert record["trained_tokens"] == record["generated_tokens"]


def test_bounds_that_do_nothing_are_refused(model: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"rl__geo_mask_high": 2.0, "rl__token_veto_high": 1.5}, r"Put rl\.geo_mask_high nearer to 1"),
        ({"rl__geo_mask_low": 0.4, "rl__token_veto_low": 0.5}, r"Put rl\.geo_mask_low nearer to 1"),
        (
            {"rl__token_veto_low": 0.9, "rl__token_veto_high": 1.1, "rl__m2_threshold": 0.04},
            r"leave no token with a squared log ratio above 0\.0111",
        ),
        ({"rl__token_veto_high": 2.0, "rl__importance_sampling_cap": 3.0}, "rejects completions with such a ratio"),
        ({"rl__geo_mask_low": 1.0}, "less than 1"),
        ({"rl__token_veto_high": 1.0}, "greater than 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            tiny_recipe(model, tmp_path, **changes)
