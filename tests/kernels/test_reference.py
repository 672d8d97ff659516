"""The reference kernels against independent statements of what they mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import scaled_dot_product_attention

from leanroll.errors import ConfigError, UserError
from leanroll.kernels.layout import DecodeBatch, PagedLayer, current_slots
from leanroll.kernels.reference import ReferenceBackend, decode_attention, select_pages, write_kv
from leanroll.kernels.scorers import get_scorer
from tests.assertions import assert_close
from tests.kernels.cases import Case, Shape, shapes

EXAMPLES = settings(max_examples=25, deadline=None)


def tokens_of(case: Case, b: int, pages: list[int], head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values [t, D] float32 and positions of the cached tokens of some logical pages."""
    size, length = case.shape.page_size, case.shape.lengths[b]
    positions = torch.cat([torch.arange(p * size, min((p + 1) * size, length)) for p in pages])
    physical = case.batch.block_table[b, (positions // size).long()].long()
    slots = positions % size
    return case.layer.k[physical, head, slots].float(), case.layer.v[physical, head, slots].float(), positions


@EXAMPLES
@given(shapes())
def test_attention_is_softmax_over_the_listed_tokens(shape: Shape) -> None:
    case = Case(shape)
    selected = case.random_selection()
    out = decode_attention(case.q, case.layer, case.batch, selected, case.scale, shape.softcap, shape.window)
    for b, length in enumerate(shape.lengths):
        for head in range(shape.num_kv_heads):
            pages = [p for p in selected[b, head].tolist() if p >= 0]
            keys, values, positions = tokens_of(case, b, pages, head)
            if shape.window:
                inside = positions >= length - shape.window
                keys, values = keys[inside], values[inside]
            rows = slice(head * shape.group, (head + 1) * shape.group)
            scores = case.q[b, rows].float() @ keys.T * case.scale
            if shape.softcap:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            expected = scores.softmax(dim=-1) @ values
            assert_close(out[b, rows], expected, shape.q_dtype)


def test_dense_decoding_is_causal_attention() -> None:
    """Token by token through the fused step = torch's attention over the prefix."""
    torch.manual_seed(0)
    length, heads, group, dim, size = 37, 2, 3, 16, 8
    q, k, v = torch.randn(length, heads * group, dim), torch.randn(length, heads, dim), torch.randn(length, heads, dim)
    layer = PagedLayer(torch.full((5, heads, size, dim), torch.nan), torch.full((5, heads, size, dim), torch.nan))
    table = torch.tensor([[3, 0, 4, 1, 2]], dtype=torch.int32)
    for t in range(length):
        batch = DecodeBatch(table, torch.tensor([t + 1], dtype=torch.int32), torch.tensor([9], dtype=torch.int32))
        step = (q[t : t + 1], k[t : t + 1], v[t : t + 1])
        actual = ReferenceBackend().decode_layer(*step, layer, batch, None, dim**-0.5)
        expected = scaled_dot_product_attention(
            q[t, None, :, None], k[None, : t + 1].transpose(1, 2), v[None, : t + 1].transpose(1, 2), enable_gqa=True
        )
        assert_close(actual, expected[:, :, 0])


@EXAMPLES
@given(shapes())
def test_selection_keeps_reserved_pages_and_the_best(shape: Shape) -> None:
    case = Case(shape)
    scores = case.scorer.score(case.q, case.layer, case.batch)
    selected = select_pages(scores, case.batch, shape.page_size)
    for b, (length, budget) in enumerate(zip(shape.lengths, shape.budgets, strict=True)):
        count = -(-length // shape.page_size)
        for head in range(shape.num_kv_heads):
            pages = [p for p in selected[b, head].tolist() if p >= 0]
            if count <= budget:
                assert pages == list(range(count))
                continue
            middle = list(range(shape.first_pages, count - shape.last_pages))
            best = sorted(middle, key=lambda p, row=scores[b, head]: (-float(row[p]), p))
            kept = best[: budget - shape.first_pages - shape.last_pages]
            reserved = [*range(shape.first_pages), *range(count - shape.last_pages, count)]
            assert pages == sorted(reserved + kept)


def test_ties_go_to_the_earlier_page() -> None:
    batch = DecodeBatch(
        torch.zeros(1, 8, dtype=torch.int32), torch.tensor([64], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    )
    scores = torch.tensor([[[-torch.inf, 1.0, 2.0, 1.0, 1.0, 0.0, -torch.inf, -torch.inf]]])
    assert select_pages(scores, batch, 8).tolist() == [[[0, 1, 2, 6, 7]]]


@EXAMPLES
@given(shapes())
def test_scores_are_products_with_mean_keys(shape: Shape) -> None:
    case = Case(shape)
    scores = case.scorer.score(case.q, case.layer, case.batch)
    for b, length in enumerate(shape.lengths):
        candidates = range(shape.first_pages, -(-length // shape.page_size) - shape.last_pages)
        assert torch.isinf(scores[b]).sum() == (scores.shape[-1] - len(candidates)) * shape.num_kv_heads
        for head in range(shape.num_kv_heads):
            if not candidates:
                continue
            means = torch.stack([tokens_of(case, b, [p], head)[0].mean(0) for p in candidates]).to(shape.kv_dtype).float()
            q = case.q[b, head * shape.group : (head + 1) * shape.group].float()
            if shape.scorer == "mean":
                expected = means @ q.mean(0)
            else:
                expected = (q @ means.T * shape.head_dim**-0.5).softmax(-1).sum(0)
            # In bf16 a mean may round to the other neighbour when the order of its sum differs.
            actual = scores[b, head, list(candidates)]
            assert_close(actual, expected, shape.kv_dtype, scale=case.score_scale)


def test_writing_and_slots() -> None:
    layer = PagedLayer(torch.zeros(3, 2, 8, 16, dtype=torch.bfloat16), torch.zeros(3, 2, 8, 16, dtype=torch.bfloat16))
    batch = DecodeBatch(
        torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([11], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    )
    slots = current_slots(batch, 8)
    assert slots.tolist() == [1 * 8 + 2]
    k, v = torch.randn(1, 2, 16), torch.randn(1, 2, 16)
    write_kv(layer, k, v, slots)
    assert torch.equal(layer.k[1, :, 2], k[0].bfloat16())
    assert torch.equal(layer.v[1, :, 2], v[0].bfloat16())
    assert layer.k.count_nonzero() <= 32


def test_bad_batches_say_what_is_wrong() -> None:
    table, lengths = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    with pytest.raises(UserError, match="at least the 3 reserved pages"):
        DecodeBatch(table, lengths, torch.tensor([2], dtype=torch.int32))
    with pytest.raises(UserError, match="length 0"):
        DecodeBatch(table, torch.zeros(1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
    with pytest.raises(UserError, match="int32"):
        DecodeBatch(table.long(), lengths, torch.tensor([3], dtype=torch.int32))
    with pytest.raises(UserError, match="last_pages=0"):
        DecodeBatch(table, lengths, torch.tensor([3], dtype=torch.int32), last_pages=0)
    with pytest.raises(ConfigError, match="unknown"):
        get_scorer("median")
