"""The streamed head against the naive one: values, gradients, supports, chunk sizes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanroll.errors import ConfigError, UserError
from leanroll.measure.head import Support, acceptance_rates, gather_logprobs, token_logprobs, top_logprobs
from leanroll.models.head import LmHead
from tests.assertions import assert_close
from tests.heads import DoubleHead


def make(rows=7, hidden=5, vocab=11, dtype=torch.float32, head=LmHead, bias=True, seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, hidden, generator=g, dtype=torch.float64).to(dtype)
    b = torch.randn(vocab, generator=g, dtype=torch.float64).to(dtype) if bias else None
    h = torch.randn(rows, hidden, generator=g, dtype=torch.float64).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=g)
    return h, head(weight, b, **options), targets


def naive(h, head, targets, temperature, allowed=None):
    logits = head.logits(h) / temperature
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    logprobs = logits.log_softmax(-1)
    p = logprobs.exp()
    entropy = -torch.where(p > 0, p * logprobs, 0.0).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 9),
    chunk=st.integers(1, 10),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    softcap=st.sampled_from([0.0, 3.0]),
    scale=st.sampled_from([1.0, 0.25]),
    bias=st.booleans(),
    train_head=st.booleans(),
)
def test_values_and_gradients_equal_the_naive_head(rows, chunk, temperature, softcap, scale, bias, train_head):
    h, head, targets = make(rows=rows, bias=bias, softcap=softcap, scale=scale)
    leaves = [h] + ([head.weight] + ([head.bias] if bias else []) if train_head else [])
    for leaf in leaves:
        leaf.requires_grad_()
    g = torch.linspace(-1.0, 2.0, rows)

    expected, entropy = naive(h, head, targets, temperature)
    wanted = torch.autograd.grad((expected * g).sum(), leaves)
    actual = token_logprobs(h, head, targets, temperature, with_entropy=True, chunk_rows=chunk)
    got = torch.autograd.grad((actual.logprobs * g).sum(), leaves)

    assert_close(actual.logprobs, expected, name="log-probs")
    assert_close(actual.entropy, entropy, name="entropy")
    assert not actual.entropy.requires_grad
    for a, e in zip(got, wanted, strict=True):
        assert_close(a, e, name="gradient")


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("truncated", [False, True])
def test_gradcheck_in_float64(train_head, softcap, truncated):
    h, head, targets = make(rows=5, dtype=torch.float64, head=DoubleHead, softcap=softcap, scale=0.7)
    support = (
        Support.of([np.array([int(t), 1, 2]) if i % 2 else None for i, t in enumerate(targets)]) if truncated else None
    )

    def f(h, w, b):
        return token_logprobs(h, DoubleHead(w, b, softcap, 0.7), targets, 0.8, support=support, chunk_rows=2).logprobs

    leaves = (h.requires_grad_(), head.weight.requires_grad_(train_head), head.bias.requires_grad_(train_head))
    assert torch.autograd.gradcheck(f, leaves)


def test_support_renormalises_its_rows_only():
    h, head, targets = make(rows=4)
    kept = [None, np.array([targets[1], 3, 5]), None, np.array([targets[3]])]
    allowed = torch.ones(4, 11, dtype=torch.bool)
    for r in (1, 3):
        allowed[r] = False
        allowed[r, torch.as_tensor(kept[r])] = True
    expected, entropy = naive(h, head, targets, 0.9, allowed)
    for chunk in (1, 3, 4):
        actual = token_logprobs(h, head, targets, 0.9, with_entropy=True, support=Support.of(kept), chunk_rows=chunk)
        assert_close(actual.logprobs, expected)
        assert_close(actual.entropy, entropy)
    assert float(actual.logprobs[3]) == 0.0


def test_bfloat16_log_probs_are_those_of_lm_head_logits_and_not_rounded():
    h, head, targets = make(rows=64, hidden=32, vocab=500, dtype=torch.bfloat16, bias=False)
    expected, _ = naive(h, head, targets, 1.0)
    actual = token_logprobs(h, head, targets, 1.0).logprobs
    assert actual.dtype == torch.float32
    assert_close(actual, expected, torch.float32)


def test_bfloat16_gradient_is_within_a_rounding_of_float32():
    h, head, targets = make(rows=64, hidden=32, vocab=500, dtype=torch.bfloat16, bias=False)
    wide = h.float().requires_grad_()
    naive(wide, LmHead(head.weight.float()), targets, 1.0)[0].sum().backward()
    for train_head in (False, True):
        head.weight.requires_grad_(train_head)
        narrow = h.clone().requires_grad_()
        token_logprobs(narrow, head, targets, 1.0, chunk_rows=16).logprobs.sum().backward()
        assert_close(narrow.grad, wide.grad, torch.bfloat16)


def test_gather_and_top_are_the_full_distribution():
    h, head, _ = make(rows=6, softcap=3.0)
    full = (head.logits(h) / 0.7).log_softmax(-1)
    ids = torch.randint(11, (6, 4), generator=torch.Generator().manual_seed(1))
    assert_close(gather_logprobs(h, head, ids, 0.7, chunk_rows=4), full.gather(1, ids))
    top_ids, top = top_logprobs(h, head, 3, 0.7, chunk_rows=4)
    assert torch.equal(top_ids, full.topk(3).indices)
    assert_close(top, full.topk(3).values)


def test_acceptance_is_the_overlap_of_both_distributions():
    h, head, _ = make(rows=6)
    other, head_q, _ = make(rows=6, seed=1)
    p, q = (head.logits(h) / 0.7).softmax(-1), (head_q.logits(other) / 0.7).softmax(-1)
    actual = acceptance_rates(h, head, other, head_q, 0.7, chunk_rows=4)
    assert_close(actual, torch.minimum(p, q).sum(-1))
    assert_close(actual, 1.0 - 0.5 * (p - q).abs().sum(-1))
    assert_close(acceptance_rates(h, head, h, head, 1.0), torch.ones(6))


def test_bad_input_says_what_to_do():
    h, head, targets = make()
    with pytest.raises(ConfigError, match=r"temperature is 0.0.*positive"):
        token_logprobs(h, head, targets, 0.0)
    with pytest.raises(UserError, match=r"\(7, 5\).*\(3,\)"):
        token_logprobs(h, head, targets[:3], 1.0)
