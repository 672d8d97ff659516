"""Teacher-forced scoring by the decode kernels, against the differentiable scorer: the two share only the selection of pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leanroll.errors import UserError
from leanroll.kernels.dispatch import get_backend
from leanroll.measure.acceptance import acceptance
from leanroll.measure.document import (
    DocumentContext,
    Prefix,
    continuation_acceptance,
    document_acceptance,
    document_hidden,
    first_sparse_position,
    paper_acceptance,
)
from leanroll.measure.selection import SparsePlan
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import Prompt, Rollout, RolloutGroup
from tests.tiny import tiny_policy

SCHEDULE = BudgetSchedule("test", 8, 1, 1, dense_layers=(0,), bin_pages=5, pages=(3, 4, 5), scorer="softmax")
IDS = tuple(np.random.default_rng(0).integers(3, 200, 110).tolist())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("prompt_length", [1, 37, 70])
def test_alpha_is_that_of_the_differentiable_scorer(family: str, kernel: str, prompt_length: int) -> None:
    policy = tiny_policy(family)
    plan = SparsePlan.of(policy.spec, SCHEDULE)
    rollout = Rollout(0, 0, IDS[prompt_length:], (-1.0,) * (len(IDS) - prompt_length), "length")
    group = RolloutGroup(Prompt(0, IDS[:prompt_length]), (rollout,))
    (expected,) = acceptance(policy, [group], plan, temperature=0.9, max_tokens=200)
    alpha = document_acceptance(policy, IDS, get_backend(kernel), plan, temperature=0.9, prompt_length=prompt_length)
    assert alpha.shape == (110,)
    # The token after position t is token t + 1; the scorer has no rate for the one after the last.
    np.testing.assert_allclose(alpha[prompt_length - 1 : -1], expected, atol=2e-5)
    assert alpha[prompt_length:].min() < 0.99
    assert (alpha[:prompt_length] == 1.0).all()


@pytest.mark.parametrize("scorer", ["mean", "softmax"])
def test_dense_is_dense(scorer: str) -> None:
    policy, backend = tiny_policy("llama"), get_backend()
    everything = BudgetSchedule("all", 8, 1, 1, dense_layers=(), pages=(14,), scorer=scorer)
    plan = SparsePlan.of(policy.spec, everything)
    assert first_sparse_position(len(IDS), plan) == len(IDS)
    assert (document_acceptance(policy, IDS, backend, plan, temperature=1.0) == 1.0).all()
    # Also when the kernels do the work: a budget of all pages, reached through the sparse path.
    almost = SparsePlan.of(policy.spec, BudgetSchedule("almost", 8, 1, 1, dense_layers=(), pages=(13,), scorer=scorer))
    alpha = document_acceptance(policy, IDS, backend, almost, temperature=1.0)
    first = first_sparse_position(len(IDS), almost)
    assert 0 < first < len(IDS)
    assert (alpha[:first] == 1.0).all()


def test_continuation_equals_the_whole() -> None:
    policy, backend = tiny_policy("qwen3"), get_backend()
    plan = SparsePlan.of(policy.spec, SCHEDULE)
    prefix = Prefix()
    hidden = document_hidden(policy, IDS, backend, keep=prefix)
    start = 61
    again = document_hidden(policy, IDS, backend, num_prefix=start, prefix=prefix)
    torch.testing.assert_close(again, hidden[start:], rtol=1e-4, atol=1e-4)
    completion = IDS[start:]
    alpha = continuation_acceptance(policy, IDS[:start], prefix, completion, backend, plan, temperature=1.0)
    whole = document_acceptance(policy, IDS, backend, plan, temperature=1.0, prompt_length=start)
    np.testing.assert_allclose(alpha, whole[start:-1], atol=2e-5)
    assert len(alpha) == len(completion) - 1


def test_paper_reading_is_a_lower_bound_with_a_ceiling() -> None:
    policy, backend = tiny_policy("llama"), get_backend()
    plan = SparsePlan.of(policy.spec, SCHEDULE)
    dense, sparse = document_hidden(policy, IDS, backend), document_hidden(policy, IDS, backend, plan)
    exact = document_acceptance(policy, IDS, backend, plan, temperature=1.0, dense_hidden=dense)
    paper, ceiling = paper_acceptance(policy, dense, sparse, temperature=1.0)
    assert (paper <= exact + 1e-5).all()
    assert (paper <= ceiling + 1e-5).all()
    assert ceiling.max() < 1.0
    same, top = paper_acceptance(policy, dense, dense, temperature=1.0)
    np.testing.assert_allclose(same, top, atol=1e-6)


def test_refuses_another_sequence() -> None:
    context = DocumentContext(10, None, get_backend())
    q = torch.zeros(1, 4, 11, 16)
    with pytest.raises(UserError, match="exactly these tokens"):
        context.attend(q, q, q, None)  # type: ignore[arg-type]
