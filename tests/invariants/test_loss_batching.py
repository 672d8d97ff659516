"""I5: loss and gradient do not depend on packing, micro-batching or the number of processes.

The truth is one sequence at a time, unpacked, its prompt repeated, through the plain causal context and the whole head.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leanroll.losses.correction import correction
from leanroll.losses.policy import denominators, policy_loss
from leanroll.measure.logprobs import batch_logprobs
from leanroll.measure.packing import pack
from leanroll.measure.selection import SparsePlan
from leanroll.models import CausalContext
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import Prompt, Rollout, RolloutGroup
from tests.assertions import assert_close
from tests.tiny import tiny_policy

LENGTHS = ((12, (9, 1, 24)), (5, (17, 30, 6)), (20, (3, 3, 3)))
ADVANTAGES = torch.tensor([1.0, -0.5, -0.5, 0.3, 0.9, -1.2, 0.1, 0.2, -0.3])
LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")


def make_groups():
    rng = np.random.default_rng(0)
    groups = []
    for index, (prompt, completions) in enumerate(LENGTHS):
        rollouts = tuple(
            Rollout(
                index, i, tuple(rng.integers(3, 200, n).tolist()), tuple((-5.5 + rng.normal(size=n)).tolist()), "stop"
            )
            for i, n in enumerate(completions)
        )
        groups.append(RolloutGroup(Prompt(index, tuple(rng.integers(3, 200, prompt).tolist())), rollouts))
    return groups


GROUPS = make_groups()
ROLLOUTS = [r for g in GROUPS for r in g.rollouts]
OLD = [torch.tensor(r.logprobs) + 0.1 for r in ROLLOUTS]


def loss_of(logprobs, samples, sample_ids, divisors):
    old = torch.cat([OLD[s] for s in samples])
    sampler = torch.cat([torch.tensor(ROLLOUTS[s].logprobs) for s in samples])
    weights = correction(old, sampler, sample_ids, "sequence_truncate", cap=2.0).weights
    ref = old - 0.3
    return policy_loss(
        logprobs,
        old,
        ADVANTAGES,
        divisors,
        sample_ids,
        clip_low=0.5,
        clip_high=3.0,
        beta=0.05,
        weights=weights,
        ref_logprobs=ref,
    )[0]


def divisors_for(loss_type, samples=range(9), **totals):
    lengths = torch.tensor([len(ROLLOUTS[s].token_ids) for s in samples])
    return denominators(loss_type, lengths, max_completion_length=32, **totals)


def gradients(policy):
    found = torch.cat([p.grad.flatten() for p in policy.trainable_parameters().values()])
    policy.model.zero_grad()
    return found


def packed(policy, loss_type, max_tokens, plan=None):
    total = torch.zeros(())
    for batch in pack(GROUPS, max_tokens):
        scores = batch_logprobs(policy, batch, temperature=1.0, plan=plan)
        loss = loss_of(scores.logprobs, batch.samples, batch.sample_ids, divisors_for(loss_type))
        loss.backward()
        total = total + loss.detach()
    return total, gradients(policy)


def one_at_a_time(policy, loss_type):
    total = torch.zeros(())
    sample = 0
    for group in GROUPS:
        for r in group.rollouts:
            ids = torch.tensor([[*group.prompt.token_ids, *r.token_ids]])
            hidden = policy.hidden(ids, torch.arange(ids.shape[1])[None], CausalContext())
            logits = policy.head.logits(hidden[0, len(group.prompt.token_ids) - 1 : -1])
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(r.token_ids)[:, None])[:, 0]
            sample_ids = torch.full((len(r.token_ids),), sample)
            loss = loss_of(logprobs, [sample], sample_ids, divisors_for(loss_type))
            loss.backward()
            total = total + loss.detach()
            sample += 1
    return total, gradients(policy)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_packing_is_one_sequence_at_a_time(family, adapter):
    policy = tiny_policy(family, adapter=adapter)
    loss, gradient = one_at_a_time(policy, "grpo")
    for max_tokens in (45, 80, 500):
        packed_loss, packed_gradient = packed(policy, "grpo", max_tokens)
        assert_close(packed_loss, loss, name=f"loss at {max_tokens}")
        assert_close(packed_gradient, gradient, name=f"gradient at {max_tokens}")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_add_up(loss_type):
    policy = tiny_policy("llama")
    loss, gradient = packed(policy, loss_type, 500)
    for max_tokens in (45, 80):
        other_loss, other_gradient = packed(policy, loss_type, max_tokens)
        assert_close(other_loss, loss)
        assert_close(other_gradient, gradient)


def test_micro_batches_add_up_when_sparse():
    policy = tiny_policy("llama")
    plan = SparsePlan.of(policy.spec, BudgetSchedule("test", 8, 1, 1, dense_layers=(0,), pages=(3,)))
    loss, gradient = packed(policy, "dapo", 500, plan)
    dense_loss, _ = packed(policy, "dapo", 500)
    assert abs(float(loss - dense_loss)) > 1e-3, "the schedule does bite"
    for max_tokens in (45, 80):
        other_loss, other_gradient = packed(policy, "dapo", max_tokens, plan)
        assert_close(other_loss, loss)
        assert_close(other_gradient, gradient)


def test_a_budget_that_covers_the_length_is_dense():
    """I1, through the early exit and, with every page recorded, through the masked attention of sparse layers."""
    policy = tiny_policy("llama")
    loss, gradient = packed(policy, "grpo", 80)
    schedule = BudgetSchedule("test", 8, 1, 1, dense_layers=(0,), pages=(64,))
    covered = packed(policy, "grpo", 80, SparsePlan.of(policy.spec, schedule))
    total = torch.zeros(())
    for batch in pack(GROUPS, 80):
        for sample, r in batch.rollouts.items():
            num_pages = -(-(LENGTHS[r.prompt_index][0] + len(r.token_ids) - 1) // 8)
            pages = np.broadcast_to(np.arange(num_pages, dtype=np.int32), (len(r.token_ids) - 1, 3, 2, num_pages))
            batch.rollouts[sample] = replace(r, pages=pages)
        scores = batch_logprobs(
            policy, batch, temperature=1.0, plan=SparsePlan.of(policy.spec, schedule, recorded=True)
        )
        part = loss_of(scores.logprobs, batch.samples, batch.sample_ids, divisors_for("grpo"))
        part.backward()
        total = total + part.detach()
    for other_loss, other_gradient in (covered, (total, gradients(policy))):
        assert_close(other_loss, loss)
        assert_close(other_gradient, gradient)


def test_gradient_checkpointing_changes_nothing():
    for plan_pages in (None, (3,)):
        policy = tiny_policy("llama", adapter=True)
        plan = None
        if plan_pages is not None:
            plan = SparsePlan.of(policy.spec, BudgetSchedule("test", 8, 1, 1, dense_layers=(0,), pages=plan_pages))
        loss, gradient = packed(policy, "grpo", 80, plan)
        policy.enable_gradient_checkpointing()
        checkpointed_loss, checkpointed_gradient = packed(policy, "grpo", 80, plan)
        assert_close(checkpointed_loss, loss)
        assert_close(checkpointed_gradient, gradient)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_processes_average_to_the_whole(loss_type):
    """Two processes that hold unequal parts, divide totals by two, and average their gradients."""
    policy = tiny_policy("llama")
    whole_loss, whole = packed(policy, loss_type, 500)
    parts = [list(range(6)), list(range(6, 9))]
    tokens = sum(len(r.token_ids) for r in ROLLOUTS)
    total, loss_sum = torch.zeros_like(whole), torch.zeros(())
    for samples in parts:
        divisors = torch.ones(9)
        divisors[samples] = divisors_for(loss_type, samples, num_samples=9 / 2, num_tokens=tokens / 2)
        groups = GROUPS[: len(samples) // 3] if samples[0] == 0 else GROUPS[2:]
        for batch in pack(groups, 500):
            ids = batch.sample_ids + samples[0]
            scores = batch_logprobs(policy, batch, temperature=1.0)
            loss = loss_of(scores.logprobs, [s + samples[0] for s in batch.samples], ids, divisors)
            loss.backward()
            loss_sum = loss_sum + loss.detach() / 2
        total += gradients(policy) / 2
    assert_close(loss_sum, whole_loss)
    assert_close(total, whole)
