"""Top-k distillation with a tail bucket, against its definition over full logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanroll.errors import ConfigError, UserError
from leanroll.losses.distill import divergence
from leanroll.losses.topk import TeacherTopk, teacher_topk, topk_divergence
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.models.head import LmHead
from tests.assertions import assert_close
from tests.heads import DoubleHead, LargestTensor

VOCAB = 11


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(rows=6, dtype=torch.float32, head=LmHead, **options):
    """A teacher so flat that what is left of 1 by its top 10 is far above rounding."""
    h, t = random(rows, 5, dtype=dtype), 0.3 * random(rows, 8, seed=1, dtype=dtype)
    student = head(random(VOCAB, 5, seed=2, dtype=dtype), random(VOCAB, seed=4, dtype=dtype), **options)
    sampled = torch.randint(VOCAB, (rows,), generator=torch.Generator().manual_seed(5))
    return h, student, t, head(random(VOCAB, 8, seed=3, dtype=dtype)), sampled


def pair(top):
    return top.ids, top.logprobs


def naive(log_p, log_q, ids):
    """Buckets by hand: rows one at a time, autograd for the gradient."""
    losses = []
    for row_p, row_q, slots in zip(log_p, log_q, ids.tolist(), strict=True):
        kept = [i for i in slots if i >= 0]
        rest = [i for i in range(VOCAB) if i not in kept]
        loss = (row_p[kept].exp() * (row_p[kept] - row_q[kept])).sum()
        if rest:
            tail_p, tail_q = row_p[rest].exp().sum(), row_q[rest].exp().sum()
            loss = loss + tail_p * (tail_p / tail_q).log()
        losses.append(loss)
    return torch.stack(losses) if losses else log_p.sum(-1)


@settings(max_examples=30)
@given(
    rows=st.integers(0, 7),
    k=st.integers(1, VOCAB),
    chunk=st.integers(1, 8),
    temperature=st.sampled_from([0.6, 1.0]),
    softcap=st.sampled_from([0.0, 3.0]),
    train_head=st.booleans(),
)
def test_values_and_gradients_equal_the_definition(rows, k, chunk, temperature, softcap, train_head):
    """In float64: what float32 log-probs leave of 1 is known to 1e-7 only."""
    h, head, t, teacher, sampled = make(rows, torch.float64, DoubleHead, softcap=softcap, scale=0.8)
    leaves = [h, head.weight, head.bias] if train_head else [h]
    for leaf in leaves:
        leaf.requires_grad_()
    ids, log_q = pair(teacher_topk(t, teacher, k, sampled, kl_temperature=temperature, chunk_rows=chunk))
    full_q = (teacher.logits(t) / temperature).log_softmax(-1)
    log_p = (head.logits(h) / temperature).log_softmax(-1)
    weights = torch.linspace(-1.0, 2.0, rows, dtype=torch.float64)
    expected = weights * naive(log_p, full_q, ids)
    out = topk_divergence(
        h, head, ids, log_q, weights=weights, kl_temperature=temperature, tail_floor=1e-12, chunk_rows=chunk
    )
    assert_close(out.loss, expected, scale=1.0)
    wanted = torch.autograd.grad(expected.sum(), leaves)
    for a, e in zip(torch.autograd.grad(out.loss.sum(), leaves), wanted, strict=True):
        assert_close(a, e, scale=0.1)
    assert_close(out.student_entropy, -(log_p.exp() * log_p).sum(-1))
    assert_close(out.student_top1, log_p.exp().amax(-1) if rows else log_p.new_zeros(0))
    kept = torch.zeros(rows, VOCAB + 1, dtype=torch.bool).scatter_(1, ids.where(ids >= 0, VOCAB), True)[:, :VOCAB]
    assert_close(out.student_tail, log_p.exp().masked_fill(kept, 0.0).sum(-1), scale=0.1)
    assert_close(out.teacher_tail, full_q.exp().masked_fill(kept, 0.0).sum(-1), scale=0.1)
    assert not out.clamped.any()


def test_gradcheck_in_float64():
    h, head, t, teacher, sampled = make(5, dtype=torch.float64, head=DoubleHead)
    ids, log_q = pair(teacher_topk(t, teacher, 3, sampled))

    def f(h, w, b):
        return topk_divergence(h, DoubleHead(w, b, 2.0, 0.7), ids, log_q, kl_temperature=0.8, chunk_rows=2).loss

    leaves = (h.requires_grad_(), head.weight.requires_grad_(), head.bias.requires_grad_())
    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_and_bfloat16(dtype, train_head):
    h, t = random(40, 32).to(dtype), (0.1 * random(40, 48, seed=1)).to(dtype)
    head, teacher = LmHead(random(VOCAB, 32, seed=2).to(dtype)), LmHead(random(VOCAB, 48, seed=3).to(dtype))
    exact = [h.double().requires_grad_(), head.weight.double().requires_grad_(train_head)]
    ids, log_q = pair(teacher_topk(t, teacher, 3, torch.arange(40) % VOCAB))
    full_q = (t.double() @ teacher.weight.double().T).log_softmax(-1)
    expected = naive((exact[0] @ exact[1].T).log_softmax(-1), full_q, ids)
    expected.sum().backward()
    h.requires_grad_()
    head.weight.requires_grad_(train_head)
    out = topk_divergence(h, head, ids, log_q, chunk_rows=16)
    out.loss.sum().backward()
    assert_close(out.loss, expected, torch.float32)
    assert_close(h.grad, exact[0].grad, dtype)
    if train_head:
        assert_close(head.weight.grad, exact[1].grad, dtype)


def test_it_is_a_lower_bound_that_grows_to_the_full_divergence():
    h, head, t, teacher, sampled = make(40, torch.float64, DoubleHead)
    full = divergence(h, head, t, teacher).reverse_kl
    bounds = []
    for k in range(1, VOCAB + 1):
        out = topk_divergence(h, head, *pair(teacher_topk(t, teacher, k, sampled)), tail_floor=1e-12)
        assert (out.divergence <= full + 1e-9).all()
        assert (out.divergence >= -1e-9).all(), "a divergence, unlike the sum without the bucket"
        bounds.append(float(out.divergence.mean()))
    assert bounds == sorted(bounds)
    assert bounds[0] < 0.7 * bounds[-1]
    assert_close(out.divergence, full)  # k is the vocabulary: nothing is left
    assert (out.teacher_tail == 0).all()


def test_teacher_topk_holds_the_sampled_token_once():
    _, _, t, teacher, _ = make(4)
    log_q = teacher.logits(t).log_softmax(-1)
    order = log_q.argsort(dim=-1, descending=True)
    sampled = torch.stack([order[0, 0], order[1, 2], order[2, 3], order[3, -1]])
    ids, values = pair(teacher_topk(t, teacher, 3, sampled, chunk_rows=3))
    assert torch.equal(ids[:, :3], order[:, :3])
    assert ids[:, 3].tolist() == [-1, -1, int(order[2, 3]), int(order[3, -1])]
    assert_close(values, log_q.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf))
    assert_close(teacher_topk(t, teacher, 3, sampled, kl_temperature=2.0).logprobs[:, :3],
                 (teacher.logits(t) / 2).log_softmax(-1).gather(1, ids[:, :3]))  # fmt: skip


def test_a_tail_without_teacher_mass_is_clamped_and_counted():
    head = LmHead(torch.eye(4))
    h = torch.tensor([[1.0, 0.0, 0.5, 0.0]] * 2, requires_grad=True)
    log_q = torch.tensor([[0.5, 0.5], [0.5, 0.25]]).log()
    out = topk_divergence(h, head, torch.tensor([[0, 1], [0, 1]]), log_q, tail_floor=1e-3)
    assert out.clamped.tolist() == [True, False]
    assert_close(out.teacher_tail, torch.tensor([1e-3, 0.25]))
    p = h.detach().softmax(-1)[0]
    tail = p[2:].sum()
    expected = (p[:2] * (p[:2] / 0.5).log()).sum() + tail * (tail / 1e-3).log()
    assert_close(out.divergence[0], expected)
    out.loss.sum().backward()
    assert h.grad.isfinite().all()


def test_a_tail_that_underflows_and_an_empty_one_are_finite():
    head = LmHead(torch.eye(3))
    h = torch.tensor([[200.0, 0.0, 0.0], [3.0, 0.0, 0.0]], requires_grad=True)
    ids = torch.tensor([[0, -1, -1], [0, 1, 2]])
    log_q = torch.tensor([[0.5, 1.0, 1.0], [0.5, 0.3, 0.2]]).log()  # values of unused slots do not matter
    out = topk_divergence(h, head, ids, log_q)
    out.loss.sum().backward()
    assert_close(out.divergence[0], -torch.tensor(0.5).log())
    log_p = h.detach()[1].log_softmax(-1)
    assert_close(out.divergence[1], (log_p.exp() * (log_p - log_q[1])).sum())
    assert h.grad.isfinite().all()
    assert not out.clamped[1]


def test_the_largest_tensor_does_not_grow_with_the_number_of_tokens():
    largest = []
    for rows in (16, 160):
        h, head = random(rows, 5).requires_grad_(), LmHead(random(600, 5, seed=2).requires_grad_())
        t, teacher = random(rows, 6, seed=1), LmHead(random(600, 6, seed=3))
        with LargestTensor() as seen:
            pairs = pair(teacher_topk(t, teacher, 4, torch.zeros(rows, dtype=torch.int64), chunk_rows=8))
            topk_divergence(h, head, *pairs, chunk_rows=8).loss.sum().backward()
        largest.append(seen.numel)
    assert largest == [8 * 600] * 2


def test_what_is_not_log_probs_is_refused():
    h, head, t, teacher, sampled = make()
    ids, log_q = pair(teacher_topk(t, teacher, 3, sampled))

    def message(error, ids=ids, log_q=log_q, **options):
        with pytest.raises(error) as caught:
            topk_divergence(h, head, ids, log_q, **options)
        return str(caught.value)

    logits = teacher.logits(t).gather(1, ids.clamp(min=0))
    assert "subtract their logsumexp" in message(UserError, log_q=logits)
    assert "subtract their logsumexp" in message(UserError, log_q=log_q + 2.0)
    assert "finite" in message(UserError, log_q=log_q.masked_fill(ids == ids[0, 0], torch.nan))
    topk_divergence(h, head, ids, log_q.bfloat16())  # rounding is no offence
    twice = torch.cat([ids[:, :1], ids[:, :1], ids[:, 2:]], -1)
    assert "same id in two slots" in message(UserError, ids=twice)
    assert "0 to 10" in message(UserError, ids=ids.masked_fill(ids == ids[0, 0], VOCAB))
    assert "[R, k + 1]" in message(UserError, log_q=log_q[:, :2])
    assert "expected one per token" in message(UserError, weights=torch.ones(2))
    assert "expected a positive number" in message(ConfigError, kl_temperature=0.0)
    assert "tail_floor is 0.0" in message(ConfigError, tail_floor=0.0)
    for k in (0, VOCAB + 1):
        with pytest.raises(ConfigError, match=f"k is {k} with a vocabulary of 11; expected 1 to 11"):
            teacher_topk(t, teacher, k, sampled)
    with pytest.raises(UserError, match="Sampled ids run from 11 to 11"):
        teacher_topk(t, teacher, 2, torch.full((6,), 11))
    with pytest.raises(UserError, match=r"\(3,\) sampled tokens"):
        teacher_topk(t, teacher, 2, sampled[:3])


@pytest.mark.parametrize("train_head", [False, True])
def test_vocabularies_that_differ_and_a_stop_class(train_head):
    """Padding, a map of ids, own and common stop ids: with all outcomes it is `divergence`; with fewer, a lower bound."""
    h, t = random(9, 5, dtype=torch.float64), 0.3 * random(9, 8, seed=1, dtype=torch.float64)
    head, teacher = (
        DoubleHead(random(13, 5, seed=2, dtype=torch.float64)),
        DoubleHead(random(16, 8, seed=3, dtype=torch.float64)),
    )
    ours, theirs = torch.tensor([9, 0, 3, 4, 7, 11, 2]), torch.tensor([1, 0, 15, 4, 8, 12, 5])
    vocabulary = SharedVocabulary.of(13, 16, shared=(ours, theirs), eos_class=([3, 5], [4, 14]))
    head.weight.requires_grad_(train_head)
    leaves = [h.requires_grad_(), head.weight] if train_head else [h.requires_grad_()]
    sampled = vocabulary.student.outcomes(torch.tensor([9, 0, 3, 5, 4, 7, 11, 2, 9]))
    assert sampled.tolist() == [0, 1, 2, 2, 2, 4, 5, 6, 0], "3, 4 and the student's own 5 are the stop class"
    assert vocabulary.student.outcomes(torch.tensor([[6, 12]])).tolist() == [[-1, -1]]
    full = divergence(h, head, t, teacher, vocabulary=vocabulary)
    wanted = torch.autograd.grad(full.loss.sum(), leaves)
    size = vocabulary.student.num_outcomes
    assert size == vocabulary.teacher.num_outcomes == 7
    for k in (2, size):
        top = teacher_topk(t, teacher, k, sampled, side=vocabulary.teacher, chunk_rows=4)
        out = topk_divergence(h, head, top.ids, top.logprobs, side=vocabulary.student, tail_floor=1e-12, chunk_rows=4)
        assert (out.divergence <= full.reverse_kl + 1e-9).all()
        assert_close(out.student_dropped, full.student_dropped)
        assert_close(top.dropped, full.teacher_dropped)
        assert_close(top.entropy, full.teacher_entropy)
        assert_close(out.student_entropy, full.student_entropy)
        assert_close(out.student_top1, full.student_top1)
    assert_close(out.loss, full.loss)
    for a, e in zip(torch.autograd.grad(out.loss.sum(), leaves), wanted, strict=True):
        assert_close(a, e, scale=0.1)
    with pytest.raises(UserError, match="Sampled ids run from -1"):
        teacher_topk(t, teacher, 2, vocabulary.student.outcomes(torch.full((9,), 12)), side=vocabulary.teacher)


def test_a_teachers_rows_are_cut_and_joined():
    _, _, t, teacher, sampled = make()
    whole = teacher_topk(t, teacher, 3, sampled)
    again = TeacherTopk.join(whole.split([1, 0, 3, 2])).to("cpu")
    for name in ("ids", "logprobs", "entropy", "dropped"):
        assert torch.equal(getattr(again, name), getattr(whole, name))
