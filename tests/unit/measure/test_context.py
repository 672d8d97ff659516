"""Packed attention against the plain one, dense and sparse; sparse against step-by-step decoding with the reference kernel."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from leanroll.errors import ConfigError, UserError
from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.reference import ReferenceBackend
from leanroll.kernels.scorers import get_scorer, scorer_names
from leanroll.measure import context as context_module
from leanroll.measure.context import PackedContext
from leanroll.measure.packing import pack, pack_tokens
from leanroll.measure.selection import PageIndex, SparsePlan, page_mask
from leanroll.models.attention import AttentionCall
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.types import Prompt, Rollout, RolloutGroup
from tests.assertions import assert_close


def qkv(num_tokens, heads=4, kv_heads=2, dim=8, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, h, num_tokens, dim, generator=g).to(dtype) for h in (heads, kv_heads, kv_heads)]


def plain(q, k, v, scale, softcap=0.0, window=0, mask=None):
    """One sequence on its own, everything materialised, float64: [1, Hq, T, D]."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(length)
    visible = position[None] <= position[:, None]
    if window:
        visible = visible & (position[None] > position[:, None] - window)
    if mask is not None:
        visible = visible & mask
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).to(q.dtype)


def sequences(batch):
    """Row indices of each sequence: prompt, then completion."""
    for group in batch.groups:
        for segment in group.completions:
            yield [*range(group.start, group.stop), *range(segment.start, segment.stop)], group, segment


def gradient(loss, leaves):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)])


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    lengths=st.lists(st.integers(1, 12), min_size=3, max_size=6),
    softcap=st.sampled_from([0.0, 2.0]),
    window=st.sampled_from([0, 1, 4, 100]),
    heads=st.sampled_from([(2, 2), (4, 2), (8, 1)]),
)
def test_dense_packing_is_each_sequence_alone_with_gradients(prompts, lengths, softcap, window, heads):
    completions = [[[0] * n for n in lengths[i :: len(prompts)]] for i in range(len(prompts))]
    (batch,) = pack_tokens([[0] * p for p in prompts], completions, 10_000)
    q, k, v = qkv(batch.num_inputs, *heads)
    call = AttentionCall(layer=0, scale=0.3, softcap=softcap, window=window)
    packed = [x.clone().requires_grad_() for x in (q, k, v)]
    alone = [x.clone().requires_grad_() for x in (q, k, v)]
    out = PackedContext(batch).attend(*packed, call)
    seen = torch.zeros_like(out)
    loss_packed = loss_alone = torch.zeros(())
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for rows, _, _ in sequences(batch):
        expected = plain(*[x[:, :, rows] for x in alone], 0.3, softcap, window).transpose(1, 2)
        assert_close(out[:, rows], expected)
        seen[:, rows] = 1.0
        loss_packed = loss_packed + (out[:, rows] * weight[:, rows]).sum()
        loss_alone = loss_alone + (expected * weight[:, rows]).sum()
    assert seen.all()
    # Together, since a window of one makes the gradient of q and k an exact zero, beside which rounding is infinite.
    assert_close(gradient(loss_packed, packed), gradient(loss_alone, alone), name="gradient")


def decode_stepwise(q, k, v, prompt_length, schedule, scorer_name, call):
    """Outputs [n, Hq, D] and page ids of the completion's inputs, one decode step at a time in a paged cache."""
    backend, scorer, size = ReferenceBackend(), get_scorer(scorer_name), schedule.page_size
    length = q.shape[2]
    num_pages = -(-length // size)
    _, heads, _, dim = k.shape
    # Physical pages in reverse order; whatever was never written is NaN.
    table = torch.arange(num_pages - 1, -1, -1, dtype=torch.int32)[None]
    cache = [torch.full((num_pages, heads, size, dim), torch.nan) for _ in range(2)]
    landmarks = scorer.allocate(num_pages, heads, dim, size, torch.float32, torch.device("cpu"))
    landmarks.view(torch.uint8).fill_(0xFF)  # NaN
    layer = PagedLayer(cache[0], cache[1], landmarks)
    positions = torch.arange(prompt_length)
    slots = table[0, positions // size].long() * size + positions % size
    backend.write_kv(layer, k[0, :, :prompt_length].transpose(0, 1), v[0, :, :prompt_length].transpose(0, 1), slots)
    backend.update_landmarks(layer, table[0, : prompt_length // size], scorer)
    outputs, pages = [], []
    for t in range(prompt_length, length):
        batch = DecodeBatch(
            block_table=table,
            lengths=torch.tensor([t + 1], dtype=torch.int32),
            budgets=torch.tensor([schedule.budget(t + 1)], dtype=torch.int32),
            first_pages=schedule.first_pages,
            last_pages=schedule.last_pages,
        )
        chosen = torch.full((1, heads, num_pages), -1, dtype=torch.int32)
        outputs.append(
            backend.decode_layer(
                q[:, :, t],
                k[:, :, t],
                v[:, :, t],
                layer,
                batch,
                scorer,
                call.scale,
                call.softcap,
                0,
                selected_out=chosen,
            )
        )
        pages.append(chosen)
    return torch.cat(outputs), torch.cat(pages)


@settings(max_examples=25, deadline=None)
@given(
    prompt=st.integers(1, 40),
    length=st.integers(2, 60),
    heads=st.sampled_from([(2, 2), (4, 2), (8, 1)]),
    first=st.integers(0, 2),
    last=st.integers(1, 3),
    scorer=st.sampled_from(scorer_names()),
    softcap=st.sampled_from([0.0, 2.0]),
    block=st.sampled_from([1, 7, 256]),
)
def test_sparse_packing_is_step_by_step_decoding(prompt, length, heads, first, last, scorer, softcap, block):
    schedule = BudgetSchedule(
        "test", 8, first, last, dense_layers=(), bin_pages=4, pages=(first + last + 1, first + last + 2)
    )
    plan = SparsePlan(schedule, (0,), scorer)
    call = AttentionCall(layer=0, scale=0.3, softcap=softcap)
    rollout = Rollout(0, 0, (0,) * length, (0.0,) * length, "length")
    (batch,) = pack([RolloutGroup(Prompt(0, (0,) * prompt), (rollout,))], 10_000)
    q, k, v = qkv(batch.num_inputs, *heads, seed=prompt * 100 + length)
    expected, pages = decode_stepwise(q, k, v, prompt, schedule, scorer, call)
    before, context_module.MAX_QUERIES = context_module.MAX_QUERIES, block
    try:
        actual = PackedContext(batch, plan).attend(q, k, v, call)[0]
        assert_close(actual[prompt:], expected, name="own selection")
        recorded = Rollout(0, 0, rollout.token_ids, rollout.logprobs, "length", pages=pages[:, None].numpy())
        (batch,) = pack([RolloutGroup(Prompt(0, (0,) * prompt), (recorded,))], 10_000)
        replayed = PackedContext(batch, SparsePlan(schedule, (0,), scorer, recorded=True)).attend(q, k, v, call)[0]
        assert_close(replayed[prompt:], expected, name="recorded pages")
    finally:
        context_module.MAX_QUERIES = before
    dense = plain(q, k, v, 0.3, softcap)[0].transpose(0, 1)
    assert_close(actual[:prompt], dense[:prompt], name="prompts are dense")


def test_sparse_gradients_are_those_of_masked_attention():
    schedule = BudgetSchedule("test", 8, 1, 1, dense_layers=(), pages=(3,))
    (batch,) = pack_tokens([[0] * 20], [[[0] * 30, [0] * 41]], 1000)
    for softcap in (0.0, 2.0):
        call = AttentionCall(layer=0, scale=0.3, softcap=softcap)
        packed = [x.requires_grad_() for x in qkv(batch.num_inputs)]
        alone = [x.detach().clone().requires_grad_() for x in packed]
        out = PackedContext(batch, SparsePlan(schedule, (0,))).attend(*packed, call)
        for_packed = for_alone = torch.zeros(())
        for rows, group, _ in sequences(batch):
            q, k, v = (x[:, :, rows] for x in alone)
            length = len(rows)
            index = PageIndex(k[0].detach(), schedule, "mean")
            chosen = index.select(q[0], np.arange(1, length + 1))
            chosen[:, : group.prompt_length] = True
            mask = chosen.repeat_interleave(8, -1)[..., :length].repeat_interleave(2, 0)[None]
            assert not mask[:, :, -1].all(), "the last query is sparse"
            expected = plain(q, k, v, 0.3, softcap, mask=mask).transpose(1, 2)
            assert_close(out[:, rows], expected)
            for_packed, for_alone = for_packed + out[:, rows].square().sum(), for_alone + expected.square().sum()
        assert_close(gradient(for_packed, packed), gradient(for_alone, alone), name="gradient")


def test_keys_and_values_are_rounded_to_the_cache():
    schedule = BudgetSchedule("test", 8, 1, 1, dense_layers=(), pages=(100,))
    (batch,) = pack_tokens([[0] * 20], [[[0] * 30]], 1000)
    q, k, v = qkv(batch.num_inputs)
    rounded = [x.bfloat16().float() for x in (k, v)]
    call = AttentionCall(0, 0.3)
    actual = PackedContext(batch, SparsePlan(schedule, (0,), kv_dtype=torch.bfloat16)).attend(q, k, v, call)
    assert_close(actual, plain(q, *rounded, 0.3).transpose(1, 2), name="prompt and completion")


def test_window_layers_and_dense_layers_stay_dense():
    schedule = BudgetSchedule("test", 8, 1, 1, dense_layers=(0,), pages=(2,))

    class Spec:
        windows = (0, 4, 0)

    plan = SparsePlan.of(Spec(), schedule, scorer="softmax")
    assert (plan.sparse_layers, plan.scorer) == ((2,), "softmax")
    (batch,) = pack_tokens([[0] * 20], [[[0] * 30]], 1000)
    q, k, v = qkv(batch.num_inputs)
    context = PackedContext(batch, plan)
    for layer, window in ((0, 0), (1, 4)):
        out = context.attend(q, k, v, AttentionCall(layer, 0.3, window=window))
        assert_close(out, plain(q, k, v, 0.3, window=window).transpose(1, 2))
    sparse = context.attend(q, k, v, AttentionCall(2, 0.3))
    assert not torch.allclose(sparse, plain(q, k, v, 0.3).transpose(1, 2), atol=1e-3)


def test_page_mask_ignores_padding():
    assert page_mask(torch.tensor([[0, 2, -1], [1, -1, -1]]), 3).int().tolist() == [[1, 0, 1], [0, 1, 0]]
    assert F.one_hot(torch.tensor(2), 4).tolist() == page_mask(torch.tensor([2, -1]), 4).int().tolist()


def test_bad_input_says_what_to_do():
    schedule = BudgetSchedule("deep", dense_layers=(0, 9))

    class Spec:
        windows = (0, 0)

    with pytest.raises(ConfigError, match=r"layers \[9\] dense; the model has layers 0 to 1"):
        SparsePlan.of(Spec(), schedule)
    with pytest.raises(ConfigError, match="scorer 'best' is unknown"):
        SparsePlan.of(Spec(), BudgetSchedule("x", dense_layers=()), scorer="best")
    rollout = Rollout(0, 0, (1, 2, 3), (0.0,) * 3, "stop")
    (batch,) = pack([RolloutGroup(Prompt(0, (1, 2)), (rollout,))], 100)
    with pytest.raises(UserError, match=r"sample 0: .*\[2, 1, KV heads, K\].*got none.*record_pages=True"):
        PackedContext(batch, SparsePlan(schedule, (1,), recorded=True))
    batch.rollouts[0] = Rollout(0, 0, (1, 2, 3), (0.0,) * 3, "stop", pages=np.full((2, 1, 2, 3), 4, dtype=np.int32))
    with pytest.raises(UserError, match=r"ids of 1 pages, got shape \(2, 1, 2, 3\), largest id 4"):
        PackedContext(batch, SparsePlan(schedule, (1,), recorded=True))
    with pytest.raises(UserError, match="4 tokens got queries of shape"):
        PackedContext(batch).attend(*qkv(5), AttentionCall(0, 1.0))
