"""Draws: keyed uniforms, inverse CDF, truncation, and the log-prob of the drawn distribution."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from leanroll.errors import ConfigError
from leanroll.kernels.reference import ReferenceBackend
from leanroll.rollout.sampling import check_sampling, draw, sequence_uniforms, top_logprobs, truncation_support
from leanroll.types import SamplingParams

BACKEND = ReferenceBackend()


def test_uniforms_do_not_depend_on_how_many_are_asked_for():
    long = sequence_uniforms(1, 2, 3, 4, 500)
    assert np.array_equal(sequence_uniforms(1, 2, 3, 4, 7), long[:7])
    assert long.min() >= 0.0
    assert long.max() < 1.0
    assert stats.kstest(long, "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    "other", [(9, 2, 3, 4), (1, 9, 3, 4), (1, 2, 9, 4), (1, 2, 3, 9), (1, 23, 4, 0), (12, 3, 4, 0)]
)
def test_every_part_of_the_key_matters(other):
    assert not np.array_equal(sequence_uniforms(1, 2, 3, 4, 8), sequence_uniforms(*other, 8))


def test_uniforms_are_pinned():
    # A change of the generator would silently change every run that is resumed across versions.
    assert sequence_uniforms(0, 0, 0, 0, 2).tolist() == [0.6679042569227878, 0.3253036084554941]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_drawn_frequencies_match_the_distribution(temperature):
    torch.manual_seed(0)
    logits = torch.randn(1, 12)
    expected = (logits / temperature).softmax(-1)[0].double().numpy()
    uniforms = torch.from_numpy(sequence_uniforms(0, 0, 0, 0, 20_000))
    drawn = draw(logits.expand(20_000, -1), uniforms, SamplingParams(temperature=temperature), BACKEND)
    counts = np.bincount(drawn.token_ids.numpy(), minlength=12)
    assert stats.chisquare(counts, expected / expected.sum() * 20_000).pvalue > 1e-3
    assert torch.allclose(drawn.logprobs, torch.from_numpy(np.log(expected)).float()[drawn.token_ids], atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
    temperature=st.floats(0.2, 3.0),
)
def test_truncation_matches_a_naive_reading(seed, top_k, top_p, min_p, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 40, generator=generator).double() * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    support = truncation_support(logits / temperature, params)[0].numpy()

    probs = (logits / temperature).softmax(-1)[0].numpy()
    kept = list(np.argsort(-probs, kind="stable"))
    if top_k:
        kept = kept[:top_k]
    mass = np.cumsum(probs[kept] / probs[kept].sum())
    assume(top_p == 1.0 or np.abs(mass - top_p).min() > 1e-9)  # otherwise rounding decides
    count = int(np.searchsorted(mass, top_p) + 1) if top_p < 1.0 else len(kept)
    kept = kept[: min(count, len(kept))]
    kept = [i for i in kept if probs[i] >= min_p * probs.max()]
    assert sorted(kept) == np.flatnonzero(support).tolist()


def test_logprob_is_that_of_the_truncated_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    drawn = draw(logits, torch.tensor([0.99], dtype=torch.float64), SamplingParams(top_k=2), BACKEND)
    assert drawn.token_ids.item() == 1
    assert drawn.logprobs.item() == pytest.approx(torch.tensor([2.0, 1.0]).log_softmax(0)[1].item(), abs=1e-6)
    assert drawn.support is not None
    assert drawn.support[0].tolist() == [True, True, False, False]


def test_ties_leave_exactly_k_tokens():
    assert truncation_support(torch.zeros(1, 9), SamplingParams(top_k=3))[0].tolist() == [True] * 3 + [False] * 6


def test_greedy_takes_the_best_and_its_logprob_is_zero():
    drawn = draw(torch.tensor([[0.0, 3.0, 1.0]]), torch.zeros(1).double(), SamplingParams(temperature=0.0), BACKEND)
    assert (drawn.token_ids.item(), drawn.logprobs.item()) == (1, 0.0)


def test_top_logprobs_are_of_the_untruncated_policy():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    ids, values = top_logprobs(logits, 2.0, 2)
    assert ids.tolist() == [[1, 2]]
    assert torch.allclose(values, (logits / 2).log_softmax(-1)[:, [1, 2]])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(temperature=-1), "temperature"),
        (SamplingParams(temperature=1e-40), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(top_k=-1), "top_k"),
        (SamplingParams(top_k=1001), "top_k"),
        (SamplingParams(min_p=1.0), "min_p"),
        (SamplingParams(max_completion_length=0), "max_completion_length"),
        (SamplingParams(stop_strings=("",)), "stop_strings"),
        (SamplingParams(num_top_logprobs=-1), "num_top_logprobs"),
    ],
)
def test_senseless_parameters_are_refused(params, message):
    with pytest.raises(ConfigError, match=message):
        check_sampling(params, vocab_size=1000)
