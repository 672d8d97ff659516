"""I8: the sampler adapter never touches the dense policy. I2 and I1, with such an adapter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from leanroll.config import OptimizerConfig, SamplerAdapterConfig
from leanroll.measure.acceptance import acceptance
from leanroll.measure.document import document_acceptance
from leanroll.measure.logprobs import score
from leanroll.measure.selection import SparsePlan
from leanroll.models import LoraSpec, Policy
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.train.sampler_adapter import SamplerAdapterTrainer
from leanroll.types import Prompt, RolloutGroup, SamplingParams
from tests.assertions import assert_close
from tests.tiny import tiny_policy

SCHEDULE = BudgetSchedule("test", 8, 1, 1, dense_layers=(0,), pages=(3,))
SAMPLING = SamplingParams(max_completion_length=24, seed=3, ignore_stop=True)
PROMPTS = [Prompt(i, tuple(np.random.default_rng(i).integers(3, 200, n).tolist())) for i, n in enumerate((4, 13, 22))]


def generate(policy: Policy, schedule: BudgetSchedule, kernel: str = "reference", num: int = 1) -> list[RolloutGroup]:
    engine = RolloutEngine(policy, schedule, kv_memory_gib=0.05, kernel=kernel)
    return engine.generate(PROMPTS, SAMPLING, num)


def train(policy: Policy, groups: list[RolloutGroup], steps: int = 1) -> None:
    config = SamplerAdapterConfig(r=4, learning_rate=0.05)
    trainer = SamplerAdapterTrainer(
        policy,
        SparsePlan.of(policy.spec, SCHEDULE),
        Accelerator(cpu=True),
        config,
        OptimizerConfig(),
        temperature=1.0,
        max_tokens=200,
    )
    for step in range(steps):
        assert trainer.update(step, groups, trainer.targets(groups))["sampler_adapter/grad_norm"] > 0


def policy_gradient(policy: Policy, groups: list[RolloutGroup]) -> dict[str, Tensor]:
    scores = score(policy, groups, temperature=1.0, max_tokens=200, with_entropy=False, grad=True)
    torch.cat(list(scores.logprobs)).sum().backward()
    found = {n: p.grad.clone() for n, p in policy.trainable_parameters().items() if p.grad is not None}
    policy.model.zero_grad()
    return found


@pytest.mark.parametrize(("adapter", "checkpointing"), [(False, False), (True, True)], ids=["all-weights", "lora"])
def test_i8_the_dense_policy_is_the_same_to_the_bit(adapter: bool, checkpointing: bool) -> None:
    policy = tiny_policy("llama", adapter=adapter)
    dense = generate(policy, BudgetSchedule.dense(8))
    scores = score(policy, dense, temperature=1.0, max_tokens=200).logprobs
    if checkpointing:
        policy.enable_gradient_checkpointing()
    gradient = policy_gradient(policy, dense)
    weights = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    trainable = list(policy.trainable_parameters())

    policy.add_sampler(LoraSpec(r=4, alpha=8.0))
    before = generate(policy, SCHEDULE)
    train(policy, before, steps=2)
    after = generate(policy, SCHEDULE)
    assert [r.logprobs for g in after for r in g.rollouts] != [r.logprobs for g in before for r in g.rollouts]

    again = generate(policy, BudgetSchedule.dense(8))
    assert [(r.token_ids, r.logprobs) for g in again for r in g.rollouts] == [
        (r.token_ids, r.logprobs) for g in dense for r in g.rollouts
    ]
    now = score(policy, dense, temperature=1.0, max_tokens=200).logprobs
    assert all(torch.equal(a, b) for a, b in zip(now, scores, strict=True))
    assert list(policy.trainable_parameters()) == trainable
    assert all(torch.equal(p, weights[n]) for n, p in policy.model.named_parameters())
    assert all(torch.equal(g, gradient[n]) for n, g in policy_gradient(policy, dense).items())


@pytest.mark.parametrize(("adapter", "kernel"), [(False, "cpu"), (True, "cpu"), (True, "reference")])
def test_i2_decoding_is_rescoring_with_the_adapter(adapter: bool, kernel: str) -> None:
    """Prompts of different lengths: some sequences of a step read every page, others do not."""
    policy = tiny_policy("qwen3", adapter=adapter)
    policy.add_sampler(LoraSpec(r=4, alpha=8.0))
    train(policy, generate(policy, SCHEDULE), steps=2)
    groups = generate(policy, SCHEDULE, kernel)
    plan = SparsePlan.of(policy.spec, SCHEDULE)
    drawn = [torch.tensor(r.logprobs) for g in groups for r in g.rollouts]
    scored = score(policy, groups, temperature=1.0, max_tokens=200, plan=plan).logprobs
    assert policy.sampler is not None
    with policy.sampler.disabled():
        without = score(policy, groups, temperature=1.0, max_tokens=200, plan=plan).logprobs
    for a, b, c in zip(drawn, scored, without, strict=True):
        assert_close(a, b)
        assert float((a - c).abs().max()) > 1e-2, "the adapter has an effect"


def test_i1_where_every_page_is_read_the_adapter_is_off() -> None:
    policy = tiny_policy("llama", adapter=True)
    policy.add_sampler(LoraSpec(r=4, alpha=8.0))
    groups = generate(policy, SCHEDULE)
    train(policy, groups)
    plan = SparsePlan.of(policy.spec, SCHEDULE)
    for alpha, length in zip(
        acceptance(policy, groups, plan, temperature=1.0, max_tokens=200),
        [len(g.prompt.token_ids) for g in groups for _ in g.rollouts],
        strict=True,
    ):
        exact = max(1, 3 * 8 + 1 - length)  # up to 3 pages; and the first token
        assert alpha[:exact] == pytest.approx(1.0, abs=1e-5)
        assert (alpha[exact:] < 1 - 1e-4).any()
    covered = BudgetSchedule("covered", 8, 1, 1, dense_layers=(0,), pages=(64,))
    one, other = generate(policy, covered), generate(policy, BudgetSchedule.dense(8))
    assert [r.token_ids for g in one for r in g.rollouts] == [r.token_ids for g in other for r in g.rollouts]


def test_a_document_is_scored_as_a_completion_is() -> None:
    policy = tiny_policy("llama", adapter=True)
    policy.add_sampler(LoraSpec(r=4, alpha=8.0))
    groups = generate(policy, SCHEDULE)
    train(policy, groups, steps=2)
    plan = SparsePlan.of(policy.spec, SCHEDULE)
    rates = acceptance(policy, groups, plan, temperature=1.0, max_tokens=200)
    backend = RolloutEngine(policy, SCHEDULE, kv_memory_gib=0.05, kernel="reference").backend
    for group, alpha in zip(groups, rates, strict=True):
        length = len(group.prompt.token_ids)
        ids = (*group.prompt.token_ids, *group.rollouts[0].token_ids[:-1])
        found = document_acceptance(policy, ids, backend, plan, temperature=1.0, prompt_length=length)
        assert found[length - 1 :] == pytest.approx(alpha, abs=1e-5)
