"""Vocabularies that differ, and stop ids as one class."""

import pytest
import torch

from leanroll.errors import ConfigError
from leanroll.losses.distill import divergence
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.models import CausalContext
from leanroll.models.head import LmHead
from tests.assertions import assert_close
from tests.tiny import tiny_policy


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair(student_size, teacher_size):
    h, t = random(6, 5).requires_grad_(), random(6, 8, seed=1)
    return h, LmHead(random(student_size, 5, seed=2), softcap=3.0), t, LmHead(random(teacher_size, 8, seed=3))


def test_padding_on_either_side_is_masked_and_reported():
    for sizes in ((11, 16), (16, 11), (14, 16)):
        h, head, t, teacher = pair(*sizes)
        out = divergence(h, head, t, teacher, vocabulary=SharedVocabulary.of(*sizes, shared=11), chunk_rows=4)
        x, y = head.logits(h), teacher.logits(t)
        log_p, log_q = x[:, :11].log_softmax(-1), y[:, :11].log_softmax(-1)
        expected = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert_close(out.loss, expected)
        assert_close(out.student_dropped, x.softmax(-1)[:, 11:].sum(-1))
        assert_close(out.teacher_dropped, y.softmax(-1)[:, 11:].sum(-1))
        assert_close(torch.autograd.grad(out.loss.sum(), h)[0], torch.autograd.grad(expected.sum(), h)[0])


def test_dropped_mass_is_exact_where_it_is_tiny():
    head = LmHead(torch.eye(3))
    out = divergence(torch.tensor([[0.0, 0.0, -40.0]]), head, torch.zeros(1, 3), head,
                     vocabulary=SharedVocabulary.of(3, 3, shared=2))  # fmt: skip
    assert float(out.student_dropped) == pytest.approx(0.5 * torch.tensor(-40.0).exp().item(), rel=1e-5)
    assert float(out.teacher_dropped) == pytest.approx(1 / 3)


@pytest.mark.parametrize("train_head", [False, True])
def test_a_map_of_ids_renames_the_teachers_tokens(train_head):
    """A teacher whose rows are shuffled is the same teacher."""
    h, head, t, teacher = pair(11, 11)
    head.weight.requires_grad_(train_head)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    shuffled = LmHead(teacher.weight[order])
    student_ids = torch.tensor([9, 0, 3, 4, 7])
    plain = SharedVocabulary.of(11, 11, shared=(student_ids, student_ids), eos_class=([3], [4]))
    renamed = SharedVocabulary.of(
        11, 11, shared=(student_ids, order.argsort()[student_ids]), eos_class=([3], [int(order.argsort()[4])])
    )
    leaves = [h, head.weight] if train_head else [h]
    expected, actual = (
        divergence(h, head, t, q, vocabulary=v) for q, v in ((teacher, plain), (shuffled, renamed))
    )  # fmt: skip
    assert_close(actual.loss, expected.loss)
    assert torch.equal(actual.teacher_rank, expected.teacher_rank)
    assert_close(actual.teacher_dropped, expected.teacher_dropped)
    for a, e in zip(*(torch.autograd.grad(o.loss.sum(), leaves) for o in (actual, expected)), strict=True):
        assert_close(a, e)


@pytest.mark.parametrize("eos_class", [([2], [4]), ([2, 8], [4]), ([8], [9, 10]), ([8], [5])])
def test_the_stop_class_is_one_outcome(eos_class):
    """Its probability on a side is that of all stop ids that the side has: its own, and shared ones of the other."""
    h, head, t, teacher = pair(9, 11)  # ids 0 … 6 are shared, 7 and 8 are the student's, 7 … 10 the teacher's
    vocabulary = SharedVocabulary.of(9, 11, shared=7, eos_class=eos_class)
    out = divergence(h, head, t, teacher, vocabulary=vocabulary, chunk_rows=4)

    stops = {i for ids in eos_class for i in ids if i < 7}
    plain = [i for i in range(7) if i not in stops]

    def outcomes(logits, own):
        p = logits.softmax(-1)
        p = torch.cat([p[:, plain], p[:, sorted(stops | set(own))].sum(-1, keepdim=True)], -1)
        return (p / p.sum(-1, keepdim=True)).log(), 1 - p.sum(-1)

    log_p, student_dropped = outcomes(head.logits(h), eos_class[0])
    log_q, teacher_dropped = outcomes(teacher.logits(t), eos_class[1])
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert_close(out.loss, expected)
    assert_close(out.student_entropy, -(log_p.exp() * log_p).sum(-1))
    assert_close(out.teacher_entropy, -(log_q.exp() * log_q).sum(-1))
    assert_close(out.student_dropped, student_dropped, scale=0.1)
    assert_close(out.teacher_dropped, teacher_dropped, scale=0.1)
    ranks = 1 + (log_q > log_q.gather(1, log_p.argmax(-1, keepdim=True))).sum(-1)
    assert torch.equal(out.teacher_rank, ranks)
    assert_close(torch.autograd.grad(out.loss.sum(), h)[0], torch.autograd.grad(expected.sum(), h)[0])


def test_a_clone_with_swapped_stop_rows_has_no_loss_with_the_class():
    """A teacher that is the student but for the names of two stop tokens: large KL where one is due, none with the class."""
    a, b = 2, 1
    policy, clone = tiny_policy("qwen3"), tiny_policy("qwen3")
    embedding = clone.base.get_input_embeddings().weight  # tied: also the head
    with torch.no_grad():
        embedding[[a, b]] = embedding[[b, a]]
    ids = torch.tensor([[5, 90, 17, 240, 33]])
    positions = torch.arange(5)[None]
    t = clone.hidden(ids, positions, CausalContext())[0].detach()
    h = policy.hidden(ids, positions, CausalContext())[0]
    assert_close(h, t, name="the same context")
    # A stop site: hidden states that point at the student's stop token.
    direction = policy.head.weight[a].detach()
    h, t = (x.detach() + 2.0 * direction for x in (h, t))
    size = policy.head.weight.shape[0]

    def loss_and_gradients(vocabulary):
        hidden = h.clone().requires_grad_()
        out = divergence(hidden, policy.head, t, clone.head, vocabulary=vocabulary)
        grads = torch.autograd.grad(out.loss.sum(), [hidden, policy.head.weight])
        return float(out.loss.detach().abs().max()), max(float(g.abs().max()) for g in grads)

    for own, other in (([a], [b]), ([a, b], [b]), ([a, b], [a, b])):
        with_class = loss_and_gradients(SharedVocabulary.of(size, size, eos_class=(own, other)))
        assert max(with_class) < 1e-5
    without = loss_and_gradients(SharedVocabulary.of(size, size))
    assert min(without) > 1.0


def test_nonsense_is_refused():
    for shared in (0, -1, 12):
        with pytest.raises(
            ConfigError, match=r"shared ids. The student has 11 ids and the teacher 16; expected 1 to 11"
        ):
            SharedVocabulary.of(11, 16, shared=shared)
    with pytest.raises(ConfigError, match="student has 11 ids and the teacher 16; expected equally many"):
        SharedVocabulary.of(11, 16)
    ids = torch.tensor([1, 2, 2])
    with pytest.raises(ConfigError, match=r"\(3,\) and \(2,\)"):
        SharedVocabulary.of(11, 16, shared=(ids, ids[:2]))
    with pytest.raises(ConfigError, match="student's shared ids run from 1 to 2, 2 different ones of 3"):
        SharedVocabulary.of(11, 16, shared=(ids, ids))
    with pytest.raises(ConfigError, match="teacher's shared ids run from 14 to 16"):
        SharedVocabulary.of(11, 16, shared=(torch.arange(3), torch.arange(14, 17)))
    with pytest.raises(ConfigError, match=r"teacher's stop ids are \[\]"):
        SharedVocabulary.of(11, 11, eos_class=([2], []))
    with pytest.raises(ConfigError, match=r"student's stop ids are \[11\]; expected one or more ids from 0 to 10"):
        SharedVocabulary.of(11, 11, eos_class=([11], [2]))
