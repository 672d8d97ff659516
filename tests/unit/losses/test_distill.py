"""The fused divergence against full logits and autograd: values, gradients, by-products, memory, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanroll.errors import ConfigError, UserError
from leanroll.losses.distill import divergence, token_weights
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.models import CausalContext
from leanroll.models.head import LmHead
from tests.assertions import assert_close
from tests.heads import DoubleHead, LargestTensor
from tests.tiny import tiny_policy

KINDS = [("reverse_kl", None), ("forward_kl", None), ("jsd", 0.1), ("jsd", 0.7)]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def naive(log_p, log_q, kind, beta=None):
    """[n, C] twice → [n], straight from the definitions."""
    if kind == "reverse_kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if kind == "forward_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    return beta * naive(log_q, log_m, "reverse_kl") + (1 - beta) * naive(log_p, log_m, "reverse_kl")


@settings(max_examples=40)
@given(
    rows=st.integers(0, 9),
    chunk=st.integers(1, 10),
    kind=st.sampled_from(KINDS),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    softcap=st.sampled_from([0.0, 3.0]),
    scale=st.sampled_from([1.0, 0.25]),
    bias=st.booleans(),
    train_head=st.booleans(),
)
def test_values_and_gradients_equal_full_logits(rows, chunk, kind, temperature, softcap, scale, bias, train_head):
    h, t = random(rows, 5), random(rows, 8, seed=1)
    head = LmHead(random(11, 5, seed=2), random(11, seed=3) if bias else None, softcap, scale)
    teacher = LmHead(random(11, 8, seed=4), None, 5.0)
    leaves = [h] + ([head.weight] + ([head.bias] if bias else []) if train_head else [])
    for leaf in leaves:
        leaf.requires_grad_()
    weights = torch.linspace(-1.0, 2.0, rows)

    log_p = (head.logits(h) / temperature).log_softmax(-1)
    log_q = (teacher.logits(t) / temperature).log_softmax(-1)
    expected = weights * naive(log_p, log_q, *kind)
    wanted = torch.autograd.grad(expected.sum(), leaves)
    actual = divergence(
        h, head, t, teacher, weights=weights, kind=kind[0], beta=kind[1], kl_temperature=temperature, chunk_rows=chunk
    )
    got = torch.autograd.grad(actual.loss.sum(), leaves)

    assert_close(actual.loss, expected, name="loss", scale=1.0)
    for a, e in zip(got, wanted, strict=True):
        assert_close(a, e, name="gradient", scale=0.1)


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_gradcheck_in_float64(kind, beta, train_head):
    """With everything on: cap, scale, bias, temperature, weights, other vocabulary, stop class."""
    f64 = torch.float64
    h, w, b = (random(*s, seed=i, dtype=f64) for i, s in enumerate([(5, 4), (9, 4), (9,)]))
    t, teacher = random(5, 3, seed=4, dtype=f64), DoubleHead(random(8, 3, seed=5, dtype=f64))
    vocabulary = SharedVocabulary.of(9, 8, shared=7, eos_class=([2, 8], [4]))
    weights = random(5, seed=6, dtype=f64)

    def f(h, w, b):
        head = DoubleHead(w, b, 2.0, 0.7)
        return divergence(
            h, head, t, teacher, weights=weights, kind=kind, beta=beta, kl_temperature=0.8, vocabulary=vocabulary, chunk_rows=2
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(f, (h.requires_grad_(), w.requires_grad_(train_head), b.requires_grad_(train_head)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_all_gradients_of_a_model_are_those_of_its_logits(family):
    """Heads that are untied (llama), tied (qwen3), tied and capped (gemma2); a teacher of another width and family."""
    policy = tiny_policy(family)
    teacher = tiny_policy("qwen2", seed=1, hidden_size=32)
    ids = torch.arange(3, 27)[None]
    positions = torch.arange(24)[None]
    with torch.no_grad():
        t = teacher.hidden(ids, positions, CausalContext())[0]
    weights = torch.linspace(0.0, 1.0, 24)

    def gradients(loss):
        policy.model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in policy.trainable_parameters().items()}

    logits = policy.model(input_ids=ids, position_ids=positions, use_cache=False, leanroll=CausalContext()).logits[0]
    log_q = teacher.head.logits(t).log_softmax(-1).detach()
    expected = (weights * naive(logits.log_softmax(-1), log_q, "reverse_kl")).sum()
    h = policy.hidden(ids, positions, CausalContext())[0]
    actual = divergence(h, policy.head, t, teacher.head, weights=weights, chunk_rows=7).loss.sum()
    assert_close(actual, expected, name="loss")
    wanted, got = gradients(expected), gradients(actual)
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        assert_close(got[name], gradient, name=name)
    assert all(p.grad is None for p in teacher.model.parameters())


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_bfloat16_is_within_a_rounding_of_float32(kind, beta, train_head):
    """The values are not rounded at all, gradients once in the logits' gradient and once in the result."""
    h, t = random(64, 32, dtype=torch.bfloat16), random(64, 48, seed=1, dtype=torch.bfloat16)
    head, teacher = LmHead(random(500, 32, seed=2).bfloat16()), LmHead(random(500, 48, seed=3).bfloat16())
    exact = [h.float().requires_grad_(), head.weight.float().requires_grad_(train_head)]
    log_p, log_q = (exact[0] @ exact[1].T).log_softmax(-1), (t.float() @ teacher.weight.float().T).log_softmax(-1)
    expected = naive(log_p, log_q, kind, beta)
    expected.sum().backward()

    h.requires_grad_()
    head.weight.requires_grad_(train_head)
    actual = divergence(h, head, t, teacher, kind=kind, beta=beta, chunk_rows=16)
    actual.loss.sum().backward()
    assert actual.loss.dtype == torch.float32
    assert_close(actual.loss, expected, torch.float32)
    assert_close(h.grad, exact[0].grad, torch.bfloat16)
    if train_head:
        assert_close(head.weight.grad, exact[1].grad, torch.bfloat16)


def test_by_products_are_those_of_the_distributions_compared():
    h, t = random(6, 5).requires_grad_(), random(6, 8, seed=1)
    head, teacher = LmHead(random(11, 5, seed=2), softcap=3.0), LmHead(random(11, 8, seed=3))
    log_p, log_q = (head.logits(h) / 0.7).log_softmax(-1), (teacher.logits(t) / 0.7).log_softmax(-1)
    for kind, beta in KINDS:
        out = divergence(h, head, t, teacher, kind=kind, beta=beta, kl_temperature=0.7, chunk_rows=4)
        assert_close(out.reverse_kl, naive(log_p, log_q, "reverse_kl"))
        assert_close(out.forward_kl, naive(log_p, log_q, "forward_kl"))
        assert_close(out.student_entropy, -(log_p.exp() * log_p).sum(-1))
        assert_close(out.teacher_entropy, -(log_q.exp() * log_q).sum(-1))
        assert_close(out.student_top1, log_p.exp().amax(-1))
        order = log_q.argsort(dim=-1, descending=True).tolist()
        assert out.teacher_rank.tolist() == [
            row.index(best) + 1 for row, best in zip(order, log_p.argmax(-1).tolist(), strict=True)
        ]
        assert not any(x.requires_grad for x in (out.reverse_kl, out.student_entropy, out.student_top1))
        assert out.student_dropped.abs().max() == out.teacher_dropped.abs().max() == 0.0


def test_a_selector_can_ask_for_the_by_products_alone():
    h, head = random(6, 5).requires_grad_(), LmHead(random(11, 5, seed=2).requires_grad_())
    t, teacher = random(6, 8, seed=1), LmHead(random(11, 8, seed=3))
    with torch.no_grad():
        alone = divergence(h, head, t, teacher)
    assert not alone.loss.requires_grad
    assert torch.equal(alone.reverse_kl, divergence(h, head, t, teacher).reverse_kl)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_model_can_teach_itself_through_one_head(kind, beta):
    """The head's gradient is that of the student's side alone."""
    h, t = random(6, 5).requires_grad_(), random(6, 5, seed=1)
    head = LmHead(random(11, 5, seed=2).requires_grad_())
    own, copy = (
        torch.autograd.grad(
            divergence(h, head, t, teacher, kind=kind, beta=beta, chunk_rows=4).loss.sum(), [h, head.weight]
        )
        for teacher in (head, LmHead(head.weight.detach().clone()))
    )
    for a, e in zip(own, copy, strict=True):
        assert_close(a, e)
    same = divergence(h, head, h, head, kind=kind, beta=beta)
    assert same.loss.detach().abs().max() < 1e-6
    assert (same.teacher_rank == 1).all()
    assert all(g.abs().max() < 1e-5 for g in torch.autograd.grad(same.loss.sum(), [h, head.weight]))


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("train_head", [False, True])
def test_far_apart_distributions_stay_finite(kind, beta, train_head):
    """Probabilities that underflow on either side: p log p at 0, q / p beyond the range of float32."""
    weight = torch.eye(4).requires_grad_(train_head)
    h = torch.tensor([[60.0, 0.0, 0.0, -60.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    t = torch.tensor([[-60.0, 0.0, 0.0, 60.0], [0.0, 0.0, 0.0, 0.0]])
    out = divergence(h, LmHead(weight), t, LmHead(torch.eye(4)), kind=kind, beta=beta)
    out.loss.sum().backward()
    if kind != "jsd":
        assert_close(out.loss.detach(), torch.tensor([120.0, 0.0]))
    else:
        assert_close(out.loss.detach(), torch.tensor([-(beta * math.log(beta) + (1 - beta) * math.log(1 - beta)), 0.0]))
    assert h.grad.isfinite().all()
    assert h.grad[1].abs().max() < 1e-6


@pytest.mark.parametrize("train_head", [False, True])
def test_micro_batches_and_chunks_do_not_matter(train_head):
    h, t = random(12, 5), random(12, 8, seed=1)
    weight = random(11, 5, seed=2).requires_grad_(train_head)
    sample_ids = torch.tensor([0] * 5 + [1] * 1 + [2] * 6)
    for normalizer in ("trajectory_mean", "token_mean", "sum"):
        weights = token_weights(torch.bincount(sample_ids), normalizer)
        results = []
        for sizes, chunk in (([12], None), ([12], 1), ([5, 7], 3), ([1] * 12, 4)):
            leaves = [h.clone().requires_grad_(), weight]
            parts = zip(*(x.split(sizes) for x in (leaves[0], t, sample_ids)), strict=True)
            head, teacher = LmHead(weight), LmHead(random(11, 8, seed=3))
            losses = [divergence(a, head, b, teacher, weights=weights[i], chunk_rows=chunk).loss for a, b, i in parts]
            loss = torch.cat(losses).sum()
            results.append((loss.detach(), *torch.autograd.grad(loss, leaves if train_head else leaves[:1])))
        for other in results[1:]:
            for a, e in zip(other, results[0], strict=True):
                assert_close(a, e)


def test_normalisers_by_hand():
    lengths = torch.tensor([2, 0, 6])
    assert_close(token_weights(lengths), torch.tensor([1 / 6, 1 / 3, 1 / 18]))
    assert_close(token_weights(lengths, "token_mean"), torch.full((3,), 1 / 8))
    assert_close(token_weights(lengths, "sum"), torch.full((3,), 1 / 3))
    # Two processes that average their gradients, each with half of the totals.
    assert_close(token_weights(lengths[:2], num_samples=1.5, num_tokens=4.0), torch.tensor([1 / 3, 2 / 3]))
    assert_close(token_weights(lengths[:2], "token_mean", num_samples=1.5, num_tokens=4.0), torch.full((2,), 1 / 4))
    with pytest.raises(ConfigError, match="'mean'; expected one of trajectory_mean, token_mean, sum"):
        token_weights(lengths, "mean")
    with pytest.raises(UserError, match="3 trajectories with 0 tokens in the loss; expected at least one"):
        token_weights(torch.zeros(3))


@pytest.mark.parametrize("train_head", [False, True])
def test_the_largest_tensor_does_not_grow_with_the_number_of_tokens(train_head):
    vocab, chunk = 600, 8
    vocabulary = SharedVocabulary.of(vocab, vocab + 4, shared=vocab - 3, eos_class=([1], [2]))
    largest = []
    for rows in (16, 160):
        h = random(rows, 5).requires_grad_()
        head = LmHead(random(vocab, 5, seed=2).requires_grad_(train_head), softcap=3.0)
        t, teacher = random(rows, 6, seed=1), LmHead(random(vocab + 4, 6, seed=3))
        with LargestTensor() as seen:
            divergence(
                h, head, t, teacher, kind="jsd", beta=0.5, vocabulary=vocabulary, chunk_rows=chunk
            ).loss.sum().backward()
        largest.append(seen.numel)
    assert largest == [chunk * (vocab + 4)] * 2


def test_bad_options_and_shapes_say_what_to_do():
    h, t = random(6, 5), random(6, 8, seed=1)
    head, teacher = LmHead(random(11, 5, seed=2)), LmHead(random(11, 8, seed=3))

    def message(error, args=(h, head, t, teacher), **options):
        with pytest.raises(error) as caught:
            divergence(*args, **options)
        return str(caught.value)

    assert "'kl'; expected one of reverse_kl, forward_kl, jsd" in message(ConfigError, kind="kl")
    for temperature in (0.0, -1.0, math.nan, math.inf):
        assert "expected a positive number" in message(ConfigError, kl_temperature=temperature)
    for beta in (None, 0.0, 1.0, math.nan):
        assert "between 0 and 1, both excluded" in message(ConfigError, kind="jsd", beta=beta)
    assert "beta is 0.5, but the divergence 'forward_kl' has none" in message(ConfigError, kind="forward_kl", beta=0.5)
    assert "student hidden states of shape (6, 8) with a head of (11, 5)" in message(UserError, (t, head, t, teacher))
    assert "teacher hidden states of shape (6,)" in message(UserError, (h, head, t[:, 0], teacher))
    assert "6 student rows and 4 teacher rows" in message(UserError, (h, head, t[:4], teacher))
    assert "weights of shape (3,) for 6 tokens" in message(UserError, weights=torch.ones(3))
    small = LmHead(teacher.weight[:9])
    assert "11 ids and the teacher 9" in message(ConfigError, (h, head, t, small))
    vocabulary = SharedVocabulary.of(11, 9, shared=9)
    assert "for 11 student and 9 teacher ids" in message(UserError, vocabulary=vocabulary)
