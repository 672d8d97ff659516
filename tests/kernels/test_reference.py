"""The reference kernels against independent statements of what they mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import scaled_dot_product_attention

from leanroll.errors import ConfigError, UserError
from leanroll.kernels.landmarks import unpack
from leanroll.kernels.layout import DecodeBatch, PagedLayer, current_slots
from leanroll.kernels.reference import ReferenceBackend, decode_attention, select_pages, write_kv
from leanroll.kernels.scorers import get_scorer, landmarks_of
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
        torch.zeros(1, 8, dtype=torch.int32),
        torch.tensor([64], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
    )
    scores = torch.tensor([[[-torch.inf, 1.0, 2.0, 1.0, 1.0, 0.0, -torch.inf, -torch.inf]]])
    assert select_pages(scores, batch, 8).tolist() == [[[0, 1, 2, 6, 7]]]


def page_logits(case: Case, b: int, head: int, q: torch.Tensor, page: int) -> torch.Tensor:
    """What the scorer's definition says of one page: unnormalised log mass per query head, [G]."""
    shape, keys = case.shape, tokens_of(case, b, [page], head)[0]
    scale = shape.head_dim**-0.5
    if shape.scorer == "softmax":
        return q @ keys.mean(0).to(shape.kv_dtype).float() * scale
    if shape.scorer == "minmax":
        return torch.maximum(q * keys.amin(0), q * keys.amax(0)).sum(-1) * scale
    if shape.scorer == "oracle-mass":
        return (q @ keys.T * scale).logsumexp(-1)
    name, bits = shape.scorer.split("-int")
    rows = keys if name == "keys" else keys.view(int(name[-1]), -1, shape.head_dim).mean(1)
    packed = landmarks_of(case.layer)[int(case.batch.block_table[b, page]), head]
    stored = unpack(packed, len(rows), shape.head_dim, int(bits))
    step = rows.abs().amax(-1, keepdim=True) / (2 ** (int(bits) - 1) - 1)
    assert ((stored - rows).abs() <= 0.51 * step + 1e-6).all(), "quantised to the nearest step"
    if name.startswith("peak"):
        step = q.abs().amax(-1, keepdim=True) / 127
        whole = (q / step).round() * step
        return (whole @ stored.T).amax(-1)
    return (q @ stored.T * scale).logsumexp(-1)


@EXAMPLES
@given(shapes())
def test_scores_are_what_their_definitions_say(shape: Shape) -> None:
    case = Case(shape)
    scores = case.scorer.score(case.q, case.layer, case.batch)
    assert scores.dtype == torch.float32
    for b, length in enumerate(shape.lengths):
        num_pages = -(-length // shape.page_size)
        candidates = range(shape.first_pages, num_pages - shape.last_pages)
        assert torch.isinf(scores[b]).sum() == (scores.shape[-1] - len(candidates)) * shape.num_kv_heads
        for head in range(shape.num_kv_heads):
            if not candidates:
                continue
            q = case.q[b, head * shape.group : (head + 1) * shape.group].float()
            if shape.scorer == "mean":
                means = [tokens_of(case, b, [p], head)[0].mean(0) for p in candidates]
                expected = torch.stack(means).to(shape.kv_dtype).float() @ q.mean(0)
            else:
                competing = range(num_pages) if shape.scorer == "oracle-mass" else candidates
                logits = torch.stack([page_logits(case, b, head, q, p) for p in competing], dim=-1)
                if shape.scorer.startswith("peak"):
                    expected = (logits - logits.amax(-1, keepdim=True)).amax(0)
                else:
                    expected = logits.softmax(-1).sum(0)[[competing.index(p) for p in candidates]]
            # In bf16 a mean may round to the other neighbour when the order of its sum differs.
            actual = scores[b, head, list(candidates)]
            assert_close(actual, expected, shape.kv_dtype, scale=case.score_scale)


@EXAMPLES
@given(shapes())
def test_rows_given_or_gathered_score_alike(shape: Shape) -> None:
    """Queries of one sequence, as `PageIndex` scores them: its rows once, instead of once per query."""
    case = Case(shape)
    alone, _ = case.sequence(0)
    count = int(alone.num_pages(shape.page_size))
    lengths = torch.arange(1, shape.lengths[0] + 1, max(1, shape.lengths[0] // 7), dtype=torch.int32)
    table = alone.block_table[:, :count].repeat(len(lengths), 1)
    batch = DecodeBatch(table, lengths, alone.budgets.repeat(len(lengths)), shape.first_pages, shape.last_pages)
    q = torch.randn(len(lengths), *case.q.shape[1:]).to(shape.q_dtype)
    shared = case.scorer.score_rows(q, case.scorer.rows(case.layer, table[0].long()), batch, shape.page_size)
    assert_close(shared, case.scorer.score(q, case.layer, batch), scale=case.score_scale)


def test_writing_and_slots() -> None:
    layer = PagedLayer(torch.zeros(3, 2, 8, 16, dtype=torch.bfloat16), torch.zeros(3, 2, 8, 16, dtype=torch.bfloat16))
    batch = DecodeBatch(
        torch.tensor([[2, 1]], dtype=torch.int32),
        torch.tensor([11], dtype=torch.int32),
        torch.tensor([9], dtype=torch.int32),
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
