"""Training of the sampler's adapter: values and gradients against a naive loss, and what it must leave alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from leanroll.config import OptimizerConfig, SamplerAdapterConfig
from leanroll.errors import ConfigError, ModelError, TrainingDiverged
from leanroll.losses.tail import TailWeighting, tail_weights
from leanroll.measure.acceptance import acceptance
from leanroll.measure.logprobs import batch_hidden
from leanroll.measure.packing import pack
from leanroll.measure.selection import SparsePlan, tokens_past_dense
from leanroll.models import LoraSpec, Policy
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.train.optim import MasterAdamW
from leanroll.train.sampler_adapter import PolicyTerms, SamplerAdapterTrainer, train_sampler_adapter
from leanroll.types import Prompt, Rollout, RolloutGroup
from tests.assertions import assert_close
from tests.tiny import tiny_policy

SCHEDULE = BudgetSchedule("test", 8, 1, 1, dense_layers=(0,), pages=(3,))
TEMPERATURE = 0.8
LENGTHS = ((12, (9, 1, 24)), (5, (17, 30, 6)), (20, (3, 12)))
Gradients = dict[str, Tensor]


def make_groups() -> list[RolloutGroup]:
    rng = np.random.default_rng(0)
    groups = []
    for index, (prompt, completions) in enumerate(LENGTHS):
        rollouts = tuple(
            Rollout(
                index,
                i,
                tuple(rng.integers(3, 200, n).tolist()),
                tuple((-5.5 + 0.3 * rng.normal(size=n)).tolist()),
                "length" if n == 24 else "stop",
            )
            for i, n in enumerate(completions)
        )
        groups.append(RolloutGroup(Prompt(index, tuple(rng.integers(3, 200, prompt).tolist())), rollouts))
    return groups


GROUPS = make_groups()
ROLLOUTS = [(g.prompt, r) for g in GROUPS for r in g.rollouts]
TERMS = PolicyTerms(
    advantages=torch.tensor([1.0, -0.5, -0.5, 0.3, 0.9, -1.2, 0.1, 0.2]),
    divisors=torch.full((8,), 70.0),
    clip_low=0.2,
    clip_high=0.3,
    delta=None,
    mask_truncated=True,
)


def make_policy(adapter: bool = True, **options: Any) -> Policy:
    policy = tiny_policy("llama", adapter=adapter, **options)
    sampler = policy.add_sampler(LoraSpec(r=3, alpha=6.0, seed=1))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for b in sampler.b:
            b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    return policy


def make_trainer(policy: Policy, max_tokens: int = 80, **options: Any) -> SamplerAdapterTrainer:
    config = SamplerAdapterConfig(**{"r": 3, "kl_weight": 0.7, "ppo_weight": 0.4, **options})
    return SamplerAdapterTrainer(
        policy,
        SparsePlan.of(policy.spec, SCHEDULE),
        Accelerator(cpu=True),
        config,
        OptimizerConfig(),
        temperature=TEMPERATURE,
        max_tokens=max_tokens,
    )


def move(policy: Policy) -> None:
    """An update of the policy itself, head included where it is trained."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> Callable[[SamplerAdapterTrainer, Policy], Gradients]:
    """Function: the gradient of one update, after which targets are those from before `move`."""
    found: Gradients = {}
    step = MasterAdamW.step

    def spy(optimizer: MasterAdamW, **options: Any) -> None:
        found.update({n: m.grad.clone() for n, m in optimizer.masters.items() if m.grad is not None})
        step(optimizer, **options)

    def run(trainer: SamplerAdapterTrainer, policy: Policy, terms: PolicyTerms | None = TERMS) -> Gradients:
        found.clear()
        targets = trainer.targets(GROUPS)
        move(policy)
        trainer.metrics = trainer.update(1, GROUPS, targets, terms)  # type: ignore[attr-defined]
        return dict(found)

    monkeypatch.setattr(MasterAdamW, "step", spy)
    return run


def naive(policy: Policy, weighting: TailWeighting, share: float) -> tuple[dict[str, float], Gradients]:
    """Every sequence by itself, the whole vocabulary at once, autograd."""
    assert policy.sampler is not None
    plan = SparsePlan.of(policy.spec, SCHEDULE)

    def logits(group: RolloutGroup, plan: SparsePlan | None) -> Tensor:
        (batch,) = pack([group], 500)
        return policy.head.logits(batch_hidden(policy, batch, plan)) / TEMPERATURE

    alone = [RolloutGroup(prompt, (rollout,)) for prompt, rollout in ROLLOUTS]
    with torch.no_grad():
        log_q = [logits(g, None).log_softmax(-1) for g in alone]
    move(policy)
    counts = [tokens_past_dense(plan, len(p.token_ids), len(r.token_ids)) for p, r in ROLLOUTS]
    log_p = [logits(g, plan).log_softmax(-1) for g in alone]
    kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(log_p, log_q, strict=True)])
    pairs = zip(log_p, log_q, strict=True)
    alpha = torch.cat([torch.minimum(p.exp(), q.exp()).sum(-1) for p, q in pairs]).detach().numpy()
    flat = np.concatenate(counts)
    weights = torch.from_numpy(tail_weights(flat, weighting, alpha, share=share)).float()
    loss = 0.7 * (weights * kl).sum()
    for sample, (p, (_, rollout)) in enumerate(zip(log_p, ROLLOUTS, strict=True)):
        if rollout.finish_reason == "length" or not counts[sample].any():
            continue
        ratio = (p.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0] - torch.tensor(rollout.logprobs)).exp()
        advantage = TERMS.advantages[sample]
        part = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        loss = loss + 0.4 * part.sum() / 70.0
    names = policy.sampler.trainable_parameters()
    found = torch.autograd.grad(loss, list(names.values()))
    values = {"loss": float(loss.detach()), "kl": float(kl.detach()[torch.from_numpy(flat)].mean())}
    return values, dict(zip(names, found, strict=True))


@pytest.mark.parametrize(("weighting", "share"), [("none", 0.05), ("cvar", 0.3), ("one_minus_alpha", 0.05)])
def test_value_and_gradient_are_the_naive_ones(gradients: Any, weighting: TailWeighting, share: float) -> None:
    values, expected = naive(make_policy(), weighting, share)
    options = {"tail_weighting": weighting, "tail_share": share}
    for max_tokens, checkpointed in ((80, False), (45, True)):
        policy = make_policy()
        if checkpointed:
            policy.enable_gradient_checkpointing()
        trainer = make_trainer(policy, max_tokens, **options)
        got = gradients(trainer, policy)
        assert trainer.metrics["sampler_adapter/loss"] == pytest.approx(values["loss"], rel=1e-4)  # type: ignore[attr-defined]
        assert trainer.metrics["sampler_adapter/kl"] == pytest.approx(values["kl"], rel=1e-4)  # type: ignore[attr-defined]
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_close(got[name], gradient, name=f"{name} at {max_tokens}", scale=1e-3)


def test_all_weights_trained_the_target_keeps_the_old_head(gradients: Any) -> None:
    _, expected = naive(make_policy(adapter=False), "none", 0.05)
    policy = make_policy(adapter=False)
    got = gradients(make_trainer(policy), policy)
    for name, gradient in expected.items():
        assert_close(got[name], gradient, name=name, scale=1e-3)
    assert all(p.grad is None for p in policy.model.parameters())
    assert len(policy.trainable_parameters()) == len(list(policy.model.parameters()))


@pytest.mark.parametrize("weighting", ["none", "cvar", "one_minus_alpha"])
def test_micro_batches_add_up(gradients: Any, weighting: str) -> None:
    """I5."""
    runs = []
    for max_tokens in (45, 500):
        policy = make_policy()
        runs.append(gradients(make_trainer(policy, max_tokens, tail_weighting=weighting), policy))
    for name, gradient in runs[0].items():
        assert_close(gradient, runs[1][name], name=name, scale=1e-3)


def test_the_policy_loss_can_be_left_out(gradients: Any) -> None:
    results = []
    for terms, weight in ((None, 0.4), (TERMS, 0.0)):
        policy = make_policy()
        trainer = make_trainer(policy, ppo_weight=weight)
        results.append(gradients(trainer, policy, terms))
        assert "sampler_adapter/policy_loss" not in trainer.metrics  # type: ignore[attr-defined]
    assert all(torch.equal(g, results[1][name]) for name, g in results[0].items())


def test_state_restores_exactly() -> None:
    first, second = make_policy(), make_policy()
    trainers = [make_trainer(p) for p in (first, second)]
    trainers[0].update(1, GROUPS, trainers[0].targets(GROUPS), TERMS)
    trainers[1].load_state_dict(copy.deepcopy(trainers[0].state_dict()))
    records = [t.update(2, GROUPS, t.targets(GROUPS), TERMS) for t in trainers]
    assert records[0] == records[1]
    assert first.sampler is not None
    assert second.sampler is not None
    assert all(torch.equal(a, b) for a, b in zip(first.sampler.parameters(), second.sampler.parameters(), strict=True))


def test_nothing_sparse_is_no_update() -> None:
    policy = make_policy()
    trainer = make_trainer(policy)
    short = [RolloutGroup(Prompt(0, (5, 6, 7)), (Rollout(0, 0, (8, 9), (-1.0, -1.0), "stop"),))]
    assert trainer.update(1, short, trainer.targets(short)) == {}
    assert policy.version == 0


def test_a_loss_that_is_not_finite_stops() -> None:
    policy = make_policy()
    assert policy.sampler is not None
    trainer = make_trainer(policy)
    before = [p.detach().clone() for p in policy.sampler.parameters()]
    targets = trainer.targets(GROUPS)
    targets.states[2][-1] = float("nan")
    with pytest.raises(TrainingDiverged, match="sampler adapter: the loss is nan"):
        trainer.update(3, GROUPS, targets)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.sampler.parameters(), strict=True))
    assert policy.version == 0


def test_training_raises_the_tail() -> None:
    policy = tiny_policy("llama", adapter=True)
    policy.add_sampler(LoraSpec(r=8, alpha=16.0))
    plan = SparsePlan.of(policy.spec, SCHEDULE)

    def tail() -> float:
        rates = acceptance(policy, GROUPS, plan, temperature=1.0, max_tokens=500)
        return float(np.quantile(np.concatenate(rates), 0.05))

    before, seen = tail(), []
    config = SamplerAdapterConfig(r=8, learning_rate=0.01)
    records = train_sampler_adapter(
        policy, GROUPS, plan, config=config, steps=8, groups_per_step=3, after_step=lambda step, _: seen.append(step)
    )
    assert seen == list(range(1, 9))
    assert records[-1]["sampler_adapter/kl"] < 0.6 * records[0]["sampler_adapter/kl"]
    assert tail() > before + 0.05
    assert policy.sampler is not None
    with policy.sampler.disabled():
        assert tail() == before


def test_bad_input() -> None:
    policy = tiny_policy("llama")
    plan = SparsePlan.of(policy.spec, SCHEDULE)
    config = SamplerAdapterConfig(r=3)
    with pytest.raises(ModelError, match="no sampler adapter"):
        make_trainer(policy)
    policy.add_sampler(LoraSpec(r=3))
    dense = SparsePlan.of(policy.spec, BudgetSchedule.dense())
    with pytest.raises(ConfigError, match="no effect with the schedule 'dense'"):
        SamplerAdapterTrainer(
            policy, dense, Accelerator(cpu=True), config, OptimizerConfig(), temperature=1.0, max_tokens=80
        )
    with pytest.raises(ConfigError, match="0 groups"):
        train_sampler_adapter(policy, [], plan, config=config, steps=1)
    with pytest.raises(ConfigError, match="No token of the 1 groups attends sparsely"):
        train_sampler_adapter(
            policy,
            [RolloutGroup(Prompt(0, (5,)), (Rollout(0, 0, (8, 9), (-1.0, -1.0), "stop"),))],
            plan,
            config=config,
            steps=1,
        )
