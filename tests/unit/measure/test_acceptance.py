"""Exact acceptance, its bracket, and the summary by length."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leanroll.errors import ConfigError, UserError
from leanroll.measure.acceptance import acceptance, bracket, intersection_acceptance, summarise, top_k_acceptance
from leanroll.measure.selection import SparsePlan
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import Prompt, Rollout, RolloutGroup
from tests.tiny import tiny_policy

SCHEDULE = BudgetSchedule("test", 8, 1, 1, dense_layers=(0,), pages=(3,))


def random_groups(shape=((20, (5, 30)), (7, (1, 41))), seed=0):
    rng = np.random.default_rng(seed)
    groups = []
    for index, (prompt, lengths) in enumerate(shape):
        rollouts = tuple(
            Rollout(index, i, tuple(rng.integers(3, 200, n).tolist()), (-1.0,) * n, "length")
            for i, n in enumerate(lengths)
        )
        groups.append(RolloutGroup(Prompt(index, tuple(rng.integers(3, 200, prompt).tolist())), rollouts))
    return groups


def softmax_pair(seed, vocab, closeness):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, vocab)) * 2
    other = logits + closeness * rng.normal(size=logits.shape)
    return [np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits, other)]


@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(1, 30), st.sampled_from([0.0, 0.3, 3.0]), st.booleans())
def test_bracket_holds_the_exact_rate(seed, vocab, k, closeness, truncating):
    p, q = softmax_pair(seed, vocab, closeness)
    k = min(k, vocab)
    drawn = np.random.default_rng(seed).integers(vocab, size=3)
    top = np.argsort(-q, axis=1)[:, :k]
    rollout = Rollout(
        0,
        0,
        tuple(drawn.tolist()),
        # A truncating sampler reports another distribution's log-prob.
        tuple((np.zeros(3) if truncating else np.log(q[np.arange(3), drawn])).tolist()),
        "stop",
        top_token_ids=top,
        top_logprobs=np.log(np.take_along_axis(q, top, 1)),
        support=(top[0],) * 3 if truncating else None,
    )
    log_p = np.log(np.take_along_axis(p, top, 1))
    low, high = bracket(rollout, log_p, np.log(p[np.arange(3), drawn]))
    exact = np.minimum(p, q).sum(1)
    assert (low <= exact + 1e-6).all()
    assert (exact <= high + 1e-6).all()
    top_p = np.argsort(-p, axis=1)[:, :k]
    paper = intersection_acceptance(top, rollout.top_logprobs, top_p, np.log(np.take_along_axis(p, top_p, 1)))
    assert (paper <= low + 1e-6).all()
    if k == vocab:
        np.testing.assert_allclose(low, exact, rtol=1e-5)
        np.testing.assert_allclose(high, exact, rtol=1e-5)
        np.testing.assert_allclose(paper, exact, rtol=1e-5)


def test_exact_acceptance_is_one_where_the_sampler_is_dense_and_below_elsewhere():
    policy = tiny_policy("llama")
    groups = random_groups()
    sparse = acceptance(policy, groups, SparsePlan.of(policy.spec, SCHEDULE), temperature=1.0, max_tokens=60)
    dense = acceptance(
        policy, groups, SparsePlan.of(policy.spec, BudgetSchedule.dense(8)), temperature=1.0, max_tokens=60
    )
    assert [len(a) for a in sparse] == [5, 30, 1, 41]
    for rates in dense:
        np.testing.assert_allclose(rates, 1.0, atol=1e-5)
    for rates, prompt in zip(sparse, (20, 20, 7, 7), strict=True):
        lengths = prompt + np.arange(len(rates))
        covered = lengths <= 24
        np.testing.assert_allclose(rates[covered], 1.0, atol=1e-5)
        assert (rates[~covered] < 0.9999).all()


def test_top_k_acceptance_brackets_the_engines_own_measure():
    policy = tiny_policy("llama")
    groups = random_groups()
    plan = SparsePlan.of(policy.spec, SCHEDULE)
    exact = acceptance(policy, groups, plan, temperature=1.0, max_tokens=200)
    from leanroll.measure.head import top_logprobs
    from leanroll.measure.logprobs import batch_hidden, score, split_by_sample
    from leanroll.measure.packing import pack

    (batch,) = pack(groups, 200)
    with torch.no_grad():
        hidden = split_by_sample(batch_hidden(policy, batch, plan), batch)
        scores = score(policy, groups, temperature=1.0, max_tokens=200, plan=plan)
    sampled, sample = [], 0
    for group in groups:
        rollouts = []
        for r in group.rollouts:
            ids, logprobs = top_logprobs(hidden[sample], policy.head, 20, 1.0)
            logprobs_q = tuple(scores.logprobs[sample].tolist())
            rollouts.append(
                Rollout(
                    r.prompt_index,
                    r.sample_index,
                    r.token_ids,
                    logprobs_q,
                    "stop",
                    top_token_ids=ids.numpy(),
                    top_logprobs=logprobs.numpy(),
                )
            )
            sample += 1
        sampled.append(RolloutGroup(group.prompt, tuple(rollouts)))
    for bounds, alpha in zip(top_k_acceptance(policy, sampled, temperature=1.0, max_tokens=200), exact, strict=True):
        assert (bounds.low <= alpha + 1e-5).all()
        assert (alpha <= bounds.high + 1e-5).all()
        assert (bounds.paper <= bounds.low + 1e-5).all()
    with pytest.raises(UserError, match="num_top_logprobs > 0"):
        top_k_acceptance(policy, groups, temperature=1.0, max_tokens=200)


def test_summary_by_length():
    rates = [np.array([1.0, 0.2, 0.4, 0.9995]), np.array([1.0, 0.6])]
    summary = summarise(rates, [9, 10], bin_tokens=10, quantile=0.25)
    # Lengths of the tokens after the first: 10, 11, 12 and 11.
    assert (summary.overall.num_tokens, summary.overall.num_rollouts) == (4, 2)
    assert summary.overall.tail == 0.2
    assert summary.overall.mean == pytest.approx((0.2 + 0.4 + 0.9995 + 0.6) / 4)
    assert summary.overall.share_high == 0.25
    assert (summary.overall.tail_low, summary.overall.tail_high) == (0.2, 0.6), "draws of one rollout twice, or both"
    (only,) = summary.bins
    assert (only.low, only.high, only.num_tokens) == (10, 20, 4)
    split = summarise(rates, [9, 10], bin_tokens=12).bins
    assert [(b.low, b.high, b.num_tokens) for b in split] == [(0, 12, 3), (12, 24, 1)]


def test_tail_is_the_quantile_and_draws_are_seeded():
    rng = np.random.default_rng(0)
    rates = [np.concatenate([[1.0], rng.uniform(size=n)]) for n in range(20, 60)]
    a, b, c = (summarise(rates, [5] * 40, bin_tokens=1000, seed=s).overall for s in (0, 0, 1))
    values = np.concatenate([r[1:] for r in rates])
    assert a.tail == np.quantile(values, 0.05, method="inverted_cdf")
    assert a == b
    assert a != c
    assert a.tail_low <= a.tail <= a.tail_high


def test_bad_settings():
    with pytest.raises(ConfigError, match="no tokens"):
        summarise([np.array([1.0])], [3], bin_tokens=10)
    with pytest.raises(ConfigError, match="bin_tokens=0"):
        summarise([np.ones(3)], [3], bin_tokens=0)
