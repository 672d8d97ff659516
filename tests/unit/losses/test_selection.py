"""Token selection against sorts of Python lists: what is chosen, what it weighs under each normaliser, and errors."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from leanroll.errors import ConfigError, UserError
from leanroll.losses.distill import Normalizer, token_weights
from leanroll.losses.selection import (
    Selection,
    TokenStatistics,
    needs_num_tokens,
    needs_statistics,
    no_teacher_loss,
    token_factors,
)
from leanroll.rollout.sampling import sequence_uniforms
from tests.assertions import assert_close

KINDS = get_args(Selection)
NORMALIZERS = get_args(Normalizer)
CHOOSING = [kind for kind in KINDS if kind not in ("all", "increasing", "equal_weight_full")]
RANKED = {
    "top_reverse_kl": lambda s: s.reverse_kl,
    "top_forward_kl": lambda s: s.forward_kl,
    "top_student_entropy": lambda s: s.student_entropy,
    "top_teacher_entropy": lambda s: s.teacher_entropy,
    "top_kl_times_student_entropy": lambda s: s.reverse_kl * s.student_entropy,
    "top_kl_times_teacher_entropy": lambda s: s.reverse_kl * s.teacher_entropy,
}


def statistics_of(length, seed, ties=True):
    """Values of a few levels, so that ties are common, or all different."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 4, (4, length)).astype(np.float32) if ties else rng.random((4, length))
    return TokenStatistics(*rows)


def choose(kind, num_tokens, lengths, masks=None, seed=0, ties=True):
    """All inputs that any kind may need, and N where the kind has one."""
    return token_factors(
        kind,
        num_tokens if needs_num_tokens(kind) else None,
        lengths,
        masks=masks,
        statistics=[statistics_of(length, index, ties) for index, length in enumerate(lengths)],
        keys=[(3, index // 2, index % 2) for index in range(len(lengths))],
        seed=seed,
    )


def weights_of(chosen, normalizer):
    """Per trajectory float64 [T]."""
    per_trajectory = token_weights(torch.from_numpy(chosen.lengths), normalizer).double().numpy()
    return [factor * weight for factor, weight in zip(chosen.factors, per_trajectory, strict=True)]


@st.composite
def batches(draw):
    """Lengths, and a mask for each or None."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    if draw(st.booleans()):
        return lengths, None
    return lengths, [
        np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), dtype=bool) for length in lengths
    ]


def candidates_of(lengths, masks):
    """Per trajectory the positions that may be chosen."""
    return [[t for t in range(length) if masks is None or masks[index][t]] for index, length in enumerate(lengths)]


NUM_TOKENS = st.integers(1, 14)
ANY_KIND = st.sampled_from(KINDS)


@given(kind=st.sampled_from(CHOOSING), num_tokens=NUM_TOKENS, batch=batches())
def test_exactly_n_tokens_or_all_allowed_ones_have_factor_one(kind, num_tokens, batch):
    lengths, masks = batch
    chosen = choose(kind, num_tokens, lengths, masks)
    for index, candidates in enumerate(candidates_of(lengths, masks)):
        factor, count = chosen.factors[index], min(num_tokens, len(candidates))
        assert factor.shape == (lengths[index],)
        assert factor.dtype == np.float32
        assert sorted(factor) == [0.0] * (lengths[index] - count) + [1.0] * count
        assert set(np.flatnonzero(factor)) <= set(candidates)
        assert chosen.lengths[index] == count
    assert chosen.lengths.dtype == np.int64


@given(kind=st.sampled_from(["all", "equal_weight_full", "increasing"]), num_tokens=NUM_TOKENS, batch=batches())
def test_the_other_kinds_take_all_allowed_tokens_and_no_other(kind, num_tokens, batch):
    lengths, masks = batch
    chosen = choose(kind, num_tokens, lengths, masks)
    for index, candidates in enumerate(candidates_of(lengths, masks)):
        factor, size = chosen.factors[index], len(candidates)
        assert np.flatnonzero(factor).tolist() == candidates
        assert chosen.lengths[index] == (min(num_tokens, size) if kind == "equal_weight_full" else size)
        if kind != "increasing":
            assert set(factor[candidates]) <= {1.0}
        elif size:
            # A line through the origin, one step before the first token, and of mean 1.
            np.testing.assert_allclose(np.diff(factor[candidates], prepend=0.0), factor[candidates[0]], rtol=1e-5)
            assert factor[candidates].mean() == pytest.approx(1.0, rel=1e-6)


@given(num_tokens=NUM_TOKENS, batch=batches())
def test_prefix_suffix_and_middle_are_blocks_of_the_allowed_tokens(num_tokens, batch):
    lengths, masks = batch
    for kind in ("prefix", "suffix", "middle"):
        chosen = choose(kind, num_tokens, lengths, masks)
        for candidates, factor in zip(candidates_of(lengths, masks), chosen.factors, strict=True):
            positions = np.flatnonzero(factor).tolist()
            ahead = [t for t in candidates if positions and t < positions[0]]
            behind = [t for t in candidates if positions and t > positions[-1]]
            if not positions:
                assert not candidates
                continue
            assert ahead + positions + behind == candidates, "no gaps"
            if kind == "prefix":
                assert not ahead
            elif kind == "suffix":
                assert not behind
            else:
                assert len(behind) - len(ahead) in (0, 1), "as many tokens before as after, one fewer if that is odd"


@given(kind=st.sampled_from(sorted(RANKED)), num_tokens=NUM_TOKENS, batch=batches(), ties=st.booleans())
def test_top_kinds_take_what_a_sort_takes_and_the_earlier_of_equals(kind, num_tokens, batch, ties):
    lengths, masks = batch
    chosen = choose(kind, num_tokens, lengths, masks, ties=ties)
    for index, candidates in enumerate(candidates_of(lengths, masks)):
        values = RANKED[kind](statistics_of(lengths[index], index, ties))
        expected = sorted(candidates, key=lambda t: (-values[t], t))[:num_tokens]
        assert np.flatnonzero(chosen.factors[index]).tolist() == sorted(expected)


def test_each_top_kind_ranks_by_another_statistic():
    picks = {kind: tuple(np.flatnonzero(choose(kind, 8, [60], ties=False).factors[0])) for kind in RANKED}
    assert len(set(picks.values())) == len(RANKED)
    assert set(RANKED) == {kind for kind in KINDS if needs_statistics(kind)}


def test_products_are_taken_in_float64():
    """In float32 both products overflow to the same infinity, and the earlier token would win."""
    big = np.array([1e30, 2e30], dtype=np.float32)
    statistics = [TokenStatistics(big, big, big, big)]
    for kind in ("top_kl_times_student_entropy", "top_kl_times_teacher_entropy"):
        assert token_factors(kind, 1, [2], statistics=statistics).factors[0].tolist() == [0.0, 1.0]


@given(kind=ANY_KIND, num_tokens=NUM_TOKENS, batch=batches(), seed=st.integers(0, 3))
def test_a_trajectory_is_chosen_from_alike_in_every_batch_and_call(kind, num_tokens, batch, seed):
    lengths, masks = batch
    together = choose(kind, num_tokens, lengths, masks, seed)
    for index, length in enumerate(lengths):
        alone = token_factors(
            kind,
            num_tokens if needs_num_tokens(kind) else None,
            [length],
            masks=None if masks is None else [masks[index]],
            statistics=[statistics_of(length, index)],
            keys=[(3, index // 2, index % 2)],
            seed=seed,
        )
        np.testing.assert_array_equal(alone.factors[0], together.factors[index])
        assert alone.lengths.tolist() == [together.lengths[index]]


@given(kind=ANY_KIND, num_tokens=NUM_TOKENS, batch=batches())
def test_a_masked_token_is_as_if_it_were_not_there(kind, num_tokens, batch):
    """But for `random`, where a position keeps its number."""
    lengths, masks = batch
    assume(masks is not None and kind != "random")
    n = num_tokens if needs_num_tokens(kind) else None
    rows = [statistics_of(length, index) for index, length in enumerate(lengths)]
    names = TokenStatistics.__dataclass_fields__
    poisoned = [
        TokenStatistics(*(np.where(mask, getattr(row, name), np.nan) for name in names))
        for row, mask in zip(rows, masks, strict=True)
    ]
    cut = [
        TokenStatistics(*(getattr(row, name)[mask] for name in names)) for row, mask in zip(rows, masks, strict=True)
    ]
    masked = token_factors(kind, n, lengths, masks=masks, statistics=poisoned)
    without = token_factors(kind, n, [int(mask.sum()) for mask in masks], statistics=cut)
    assert masked.lengths.tolist() == without.lengths.tolist()
    for mask, factor, expected in zip(masks, masked.factors, without.factors, strict=True):
        np.testing.assert_array_equal(factor[mask], expected)
        assert not factor[~mask].any()


# Random positions.


def random_positions(num_tokens, length, key, seed=0):
    chosen = token_factors("random", num_tokens, [length], keys=[key], seed=seed)
    return tuple(np.flatnonzero(chosen.factors[0]).tolist())


def test_random_positions_are_keyed_by_seed_step_prompt_and_sample():
    keys = [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (1, 0, 2), (12, 0, 2), (1, 20, 2), (2, 1, 0)]
    positions = {random_positions(20, 200, key) for key in keys} | {random_positions(20, 200, keys[0], seed=1)}
    assert len(positions) == len(keys) + 1
    assert random_positions(20, 200, keys[0]) in positions


@given(fewer=st.integers(1, 10), more=st.integers(1, 10), length=st.integers(1, 15), sample=st.integers(0, 20))
def test_a_larger_n_adds_random_positions_and_keeps_the_others(fewer, more, length, sample):
    assume(fewer <= more)
    key = (0, 0, sample)
    assert set(random_positions(fewer, length, key)) <= set(random_positions(more, length, key))


@given(num_tokens=NUM_TOKENS, length=st.integers(0, 12), tail=st.integers(0, 5), sample=st.integers(0, 20))
def test_random_positions_ignore_a_masked_tail(num_tokens, length, tail, sample):
    """Whether a stop token is there and masked, or not there, the same of the other tokens are chosen."""
    mask = np.arange(length + tail) < length
    chosen = token_factors("random", num_tokens, [length + tail], masks=[mask], keys=[(0, 0, sample)])
    assert tuple(np.flatnonzero(chosen.factors[0])) == random_positions(num_tokens, length, (0, 0, sample))


def test_each_position_is_as_likely_as_the_others():
    trials, length, num_tokens = 4000, 10, 3
    counts = np.zeros(length)
    for sample in range(trials):
        counts[list(random_positions(num_tokens, length, (0, 0, sample)))] += 1
    share = num_tokens / length
    assert np.abs(counts - trials * share).max() < 4.5 * math.sqrt(trials * share * (1 - share))


def test_random_positions_do_not_depend_on_the_numbers_that_drew_the_tokens():
    """With the sampler's own numbers those at the chosen positions would average near 0.05 or 0.95, not 0.5."""
    drawn = []
    for sample in range(300):
        uniforms = sequence_uniforms(0, 5, 7, sample, 100)
        drawn += uniforms[list(random_positions(10, 100, (5, 7, sample)))].tolist()
    assert np.mean(drawn) == pytest.approx(0.5, abs=5 / math.sqrt(12 * len(drawn)))


# Weights.


@given(num_tokens=NUM_TOKENS, batch=batches())
def test_a_prefix_as_long_as_the_trajectories_is_all(num_tokens, batch):
    lengths, masks = batch
    longest = max(len(candidates) for candidates in candidates_of(lengths, masks))
    every = choose("all", None, lengths, masks)
    same = choose("prefix", longest + num_tokens, lengths, masks)
    np.testing.assert_array_equal(np.concatenate(same.factors), np.concatenate(every.factors))
    assert same.lengths.tolist() == every.lengths.tolist()


@given(kind=ANY_KIND, num_tokens=NUM_TOKENS, batch=batches(), normalizer=st.sampled_from(NORMALIZERS))
def test_the_weights_of_a_trajectory_add_up_as_documented(kind, num_tokens, batch, normalizer):
    lengths, masks = batch
    sizes = np.array([len(candidates) for candidates in candidates_of(lengths, masks)])
    assume(sizes.any())
    counted = sizes if kind in ("all", "increasing") else np.minimum(sizes, num_tokens)
    sums = np.array([weight.sum() for weight in weights_of(choose(kind, num_tokens, lengths, masks), normalizer)])
    num_samples = len(lengths)
    if kind == "equal_weight_full":
        each = {
            "trajectory_mean": sizes / np.maximum(counted, 1) / num_samples,
            "token_mean": sizes / counted.sum(),
            "sum": sizes / num_samples,
        }
    else:
        each = {
            "trajectory_mean": (sizes > 0) / num_samples,
            "token_mean": counted / counted.sum(),
            "sum": counted / num_samples,
        }
        if normalizer == "token_mean" or (normalizer == "trajectory_mean" and sizes.all()):
            assert sums.sum() == pytest.approx(1.0, rel=1e-5)
    np.testing.assert_allclose(sums, each[normalizer], rtol=1e-5)


@given(num_tokens=NUM_TOKENS, batch=batches(), normalizer=st.sampled_from(NORMALIZERS))
def test_equal_weight_full_weighs_every_token_as_the_prefix_does(num_tokens, batch, normalizer):
    lengths, masks = batch
    candidates = candidates_of(lengths, masks)
    assume(any(candidates))
    full = weights_of(choose("equal_weight_full", num_tokens, lengths, masks), normalizer)
    prefix = weights_of(choose("prefix", num_tokens, lengths, masks), normalizer)
    for allowed, every, first in zip(candidates, full, prefix, strict=True):
        np.testing.assert_array_equal(every[allowed[:num_tokens]], first[allowed[:num_tokens]])
        assert len(set(every[allowed])) <= 1


@given(num_tokens=NUM_TOKENS, batch=batches(), normalizer=st.sampled_from(NORMALIZERS))
def test_prefix_weighs_as_rollouts_stopped_after_n_tokens(num_tokens, batch, normalizer):
    lengths, _ = batch
    assume(any(lengths))
    stopped = [min(num_tokens, length) for length in lengths]
    prefix = weights_of(choose("prefix", num_tokens, lengths), normalizer)
    early = weights_of(choose("all", None, stopped), normalizer)
    for length, masked, cut in zip(stopped, prefix, early, strict=True):
        np.testing.assert_array_equal(masked[:length], cut)
        assert not masked[length:].any()


@pytest.mark.parametrize(
    ("kind", "normalizer", "a", "b"),
    [
        ("all", "trajectory_mean", [1 / 8] * 4, 1 / 2),
        ("all", "token_mean", [1 / 5] * 4, 1 / 5),
        ("all", "sum", [1 / 2] * 4, 1 / 2),
        ("prefix", "trajectory_mean", [1 / 4, 1 / 4, 0, 0], 1 / 2),
        ("prefix", "token_mean", [1 / 3, 1 / 3, 0, 0], 1 / 3),
        ("prefix", "sum", [1 / 2, 1 / 2, 0, 0], 1 / 2),
        ("suffix", "trajectory_mean", [0, 0, 1 / 4, 1 / 4], 1 / 2),
        ("equal_weight_full", "trajectory_mean", [1 / 4] * 4, 1 / 2),
        ("equal_weight_full", "token_mean", [1 / 3] * 4, 1 / 3),
        ("equal_weight_full", "sum", [1 / 2] * 4, 1 / 2),
        ("increasing", "trajectory_mean", [0.05, 0.1, 0.15, 0.2], 0.5),
        ("increasing", "token_mean", [0.08, 0.16, 0.24, 0.32], 0.2),
        ("increasing", "sum", [0.2, 0.4, 0.6, 0.8], 0.5),
    ],
)
def test_the_worked_example_of_the_module(kind, normalizer, a, b):
    weights = weights_of(choose(kind, 2, [4, 1]), normalizer)
    np.testing.assert_allclose(weights[0], a, rtol=1e-6)
    np.testing.assert_allclose(weights[1], [b], rtol=1e-6)


# Errors.


@pytest.mark.parametrize("kind", KINDS)
def test_n_is_wanted_where_the_kind_has_one_and_refused_elsewhere(kind):
    wrong = [None, 0, -3] if needs_num_tokens(kind) else [5, 0]
    for num_tokens in wrong:
        with pytest.raises(ConfigError, match=f"num_tokens is {num_tokens} .*{kind}"):
            token_factors(kind, num_tokens, [3], statistics=[statistics_of(3, 0)], keys=[(0, 0, 0)])
    assert needs_num_tokens(kind) == (kind not in ("all", "increasing"))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("top_reverse_kl", {}, "got none"),
        ("random", {}, "no keys"),
        ("random", {"keys": [(0, 0, 0)]}, "1 keys for 2"),
        ("top_reverse_kl", {"statistics": [statistics_of(3, 0)]}, "1 statistics for 2"),
        (
            "top_reverse_kl",
            {"statistics": [statistics_of(3, 0), statistics_of(3, 0)]},
            "3 tokens for trajectory 1 of 2",
        ),
        ("prefix", {"masks": [np.ones(3, bool)]}, "1 masks for 2"),
        ("prefix", {"masks": [np.ones(3, bool), np.ones(3, bool)]}, r"trajectory 1 .*\(3,\); expected bool \[2\]"),
        ("prefix", {"masks": [np.ones(3, bool), np.array([0, 1])]}, "trajectory 1 is int64"),
    ],
)
def test_inputs_that_do_not_fit(kind, options, message):
    with pytest.raises(UserError, match=message):
        token_factors(kind, 1, [3, 2], **options)


def test_other_errors_of_the_user():
    with pytest.raises(ConfigError, match="'first'; expected one of all, prefix"):
        token_factors("first", 1, [3])
    with pytest.raises(UserError, match=r"\[3, -1\]"):
        token_factors("prefix", 1, [3, -1])
    with pytest.raises(UserError, match=r"expected \[T\] each"):
        TokenStatistics(np.zeros(3), np.zeros(3), np.zeros(2), np.zeros(3))
    with pytest.raises(UserError, match=r"expected \[T\] each"):
        TokenStatistics(*np.zeros((4, 3, 2)))
    values = np.array([1.0, np.nan, 2.0])
    broken = [TokenStatistics(values, np.ones(3), np.ones(3), np.ones(3))]
    with pytest.raises(UserError, match="reverse_kl · teacher_entropy, which is NaN for 1 of 3 tokens of trajectory 0"):
        token_factors("top_kl_times_teacher_entropy", 1, [3], statistics=broken)
    assert token_factors("top_forward_kl", 1, [3], statistics=broken).factors[0].tolist() == [1.0, 0.0, 0.0]


# Without a teacher.


def test_no_teacher_pushes_down_the_tokens_below_the_threshold_alone():
    probabilities = torch.tensor([0.05, 0.1, 0.5, 0.01], dtype=torch.float64)
    logprobs = probabilities.log().requires_grad_()
    weights = torch.tensor([0.5, 0.25, 0.25, 2.0], dtype=torch.float64, requires_grad=True)
    loss = no_teacher_loss(logprobs, weights, threshold=0.1, advantage=-3.0)
    assert_close(loss, torch.tensor([1.5 * math.log(0.05), 0, 0, 6 * math.log(0.01)], dtype=torch.float64))
    loss.sum().backward()
    assert_close(logprobs.grad, torch.tensor([1.5, 0, 0, 6], dtype=torch.float64))
    assert weights.grad is None


def test_no_teacher_step_lowers_an_unlikely_token_and_no_other():
    logits = torch.tensor([[0.0, 2.0, -1.0], [0.0, 2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([2, 1])  # probabilities 0.04 and 0.84
    before = logits.log_softmax(-1)[[0, 1], tokens]
    no_teacher_loss(before, torch.full((2,), 0.5), threshold=0.1, advantage=-1.0).sum().backward()
    assert logits.grad.abs().max() <= 0.5
    after = (logits - 0.1 * logits.grad).log_softmax(-1)[[0, 1], tokens]
    assert after[0] < before[0]
    assert after[1] == before[1]


def test_no_teacher_gradient_equals_differences():
    logprobs = torch.tensor([-0.1, -1.0, -3.0, -7.0], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 0.5, 0.3, 0.2], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: no_teacher_loss(x, weights, threshold=0.2, advantage=-0.7), (logprobs,))


def test_no_teacher_threshold_of_one_takes_all_but_certain_tokens():
    loss = no_teacher_loss(torch.tensor([0.0, -1e-3, -2.0]), torch.ones(3), threshold=1.0, advantage=-1.0)
    assert_close(loss, torch.tensor([0.0, -1e-3, -2.0]))


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0.0},
        {"threshold": 1.5},
        {"threshold": math.nan},
        {"advantage": 0.0},
        {"advantage": 1.0},
        {"advantage": -math.inf},
        {"advantage": math.nan},
    ],
)
def test_no_teacher_options_out_of_range(options):
    (name, value), *_ = options.items()
    with pytest.raises(ConfigError, match=f"no-teacher {name} is {value}"):
        no_teacher_loss(torch.zeros(2), torch.zeros(2), **({"threshold": 0.1, "advantage": -1.0} | options))


@pytest.mark.parametrize("shapes", [((2,), (3,)), ((2,), ()), ((2, 1), (2, 1))])
def test_no_teacher_shapes(shapes):
    with pytest.raises(UserError, match=r"expected \[R\] twice"):
        no_teacher_loss(*(torch.zeros(shape) for shape in shapes), threshold=0.1, advantage=-1.0)
