"""C++ attention kernels against the reference, for every instruction set. Selection and attention are tested apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from leanroll.errors import BackendUnavailable, UserError
from leanroll.kernels.cpu import CpuBackend
from leanroll.kernels.cpu.backend import scorer_code
from leanroll.kernels.cpu.native import native
from leanroll.kernels.layout import DecodeBatch, PagedLayer
from leanroll.kernels.reference import ReferenceBackend
from leanroll.kernels.scorers import MeanScorer, QuantisedScorer, bytes_per_page, get_scorer, scorer_names
from tests.assertions import assert_close
from tests.kernels.cases import Case, Shape, poison_bytes, shapes

pytestmark = pytest.mark.usefixtures("isa")
EXAMPLES = settings(max_examples=25, deadline=None)
REFERENCE = ReferenceBackend()

LARGE = Shape(
    lengths=(1300, 511, 2049, 17), budgets=(40, 2**30, 20, 8), num_kv_heads=3, group=3, head_dim=64, page_size=16,
    first_pages=1, last_pages=2, kv_dtype=torch.bfloat16, q_dtype=torch.bfloat16, scorer="mean", softcap=0.0, window=0, seed=7,
)  # fmt: skip


@EXAMPLES
@given(shapes())
def test_attention_over_given_pages(shape: Shape) -> None:
    case, cpu = Case(shape), CpuBackend()
    for selected in (case.random_selection(), None):
        arguments = (case.q, case.layer, case.batch, selected, case.scale, shape.softcap, shape.window)
        assert_close(cpu.decode_attention(*arguments), REFERENCE.decode_attention(*arguments))


@EXAMPLES
@given(shapes())
def test_scores(shape: Shape) -> None:
    case = Case(shape)
    arguments = (case.q, case.layer, case.batch, case.scorer)
    actual, expected = CpuBackend().score_pages(*arguments), REFERENCE.score_pages(*arguments)
    assert_close(actual, expected, scale=case.score_scale)


@pytest.mark.parametrize("scorer", scorer_names())
@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_scorer_on_a_large_batch(scorer: str, head_dim: int, dtype: torch.dtype) -> None:
    shape = replace(LARGE, scorer=scorer, head_dim=head_dim, group=7, kv_dtype=dtype, q_dtype=dtype)
    case, cpu = Case(shape), CpuBackend()
    arguments = (case.q * 3, case.layer, case.batch, case.scorer)  # sharp distributions
    scores = cpu.score_pages(*arguments)
    assert_close(scores, REFERENCE.score_pages(*arguments), scale=3 * case.score_scale)
    again = cpu.score_pages(*arguments)
    assert torch.equal(scores, again), "whatever else the scratch memory holds"
    for b in range(case.batch.size):
        alone, rows = case.sequence(b)
        assert torch.equal(cpu.score_pages(case.q[rows] * 3, case.layer, alone, case.scorer), scores[rows])


@pytest.mark.parametrize("scorer", ["peak4-int4", "peak8-int4"])
@EXAMPLES
@example(shape=replace(LARGE, page_size=8, group=7))  # several chunks of rows
@given(shape=shapes())
def test_peaks_are_the_same_to_the_last_bit(scorer: str, shape: Shape) -> None:
    """On every instruction set and in plain torch, whatever order sums are taken in."""
    case = Case(replace(shape, scorer=scorer))
    arguments = (case.q, case.layer, case.batch, case.scorer)
    assert torch.equal(CpuBackend().score_pages(*arguments), REFERENCE.score_pages(*arguments))


@EXAMPLES
@given(shapes())
def test_selection_from_given_scores(shape: Shape) -> None:
    case = Case(shape)
    scores = REFERENCE.score_pages(case.q, case.layer, case.batch, case.scorer)
    ties = (scores * 2).round() / 2  # many equal scores, zeros of both signs among them
    for given_scores in (scores, ties):
        expected = REFERENCE.select_pages(given_scores, case.batch, shape.page_size)
        assert torch.equal(CpuBackend().select_pages(given_scores, case.batch, shape.page_size), expected)


@EXAMPLES
@given(shapes())
def test_fused_step(shape: Shape) -> None:
    case, cpu = Case(shape, pending=True), CpuBackend()
    layer, expected_layer = case.copy_of_layer(), case.copy_of_layer()
    # Windows belong to dense layers.
    scorer, window = (None, shape.window) if shape.window else (case.scorer, 0)
    width = case.batch.selection_width(shape.page_size) + 1
    selected, expected_selected = (
        torch.zeros(case.batch.size, shape.num_kv_heads, width, dtype=torch.int32) for _ in range(2)
    )
    step = (case.q, case.k, case.v)
    rest = (case.batch, scorer, case.scale, shape.softcap, window)
    expected = REFERENCE.decode_layer(*step, expected_layer, *rest, selected_out=expected_selected)
    actual = cpu.decode_layer(*step, layer, *rest, selected_out=selected)
    assert torch.equal(layer.k.nan_to_num(), expected_layer.k.nan_to_num())
    assert torch.equal(layer.v.nan_to_num(), expected_layer.v.nan_to_num())
    if scorer is not None:
        assert_same_landmarks(layer, expected_layer)
        # Rounding may swap pages of equal score: compare the scores of what was chosen, then attend over the same pages.
        scores = REFERENCE.score_pages(case.q, expected_layer, case.batch, scorer)
        chosen, expected_chosen = chosen_scores(scores, selected), chosen_scores(scores, expected_selected)
        assert_close(chosen, expected_chosen, shape.kv_dtype, scale=case.score_scale)
        expected = REFERENCE.decode_attention(
            case.q, expected_layer, case.batch, selected, case.scale, shape.softcap, window
        )
    assert_close(actual, expected)


def assert_same_landmarks(actual: PagedLayer, expected: PagedLayer) -> None:
    """Packed ones to the byte. Others up to one rounding: the order of the sum may decide a tie between two bf16 neighbours."""
    assert actual.landmarks is not None
    assert expected.landmarks is not None
    if expected.landmarks.dtype == torch.uint8:
        assert torch.equal(actual.landmarks, expected.landmarks)
        return
    assert torch.equal(actual.landmarks.isnan(), expected.landmarks.isnan())
    assert_close(actual.landmarks.nan_to_num(), expected.landmarks.nan_to_num())


def chosen_scores(scores: Tensor, selected: Tensor) -> Tensor:
    """Sorted finite scores of the selected pages, zero elsewhere: [B, Hk, K]."""
    picked = scores.gather(2, selected.long().clamp_min(0)).masked_fill(selected < 0, -torch.inf)
    return picked.sort(dim=-1).values.masked_fill(picked.sort(dim=-1).values.isinf(), 0.0)


@EXAMPLES
@given(shapes())
def test_landmarks_and_writes(shape: Shape) -> None:
    case, cpu = Case(shape), CpuBackend()
    layer = case.copy_of_layer()
    assert layer.landmarks is not None
    poison_bytes(layer.landmarks)
    cpu.update_landmarks(layer, case.full_pages, case.scorer)
    assert_same_landmarks(layer, case.layer)
    slots = torch.randperm(layer.k.shape[0] * shape.page_size)[: case.q.shape[0]]
    expected = case.copy_of_layer()
    REFERENCE.write_kv(expected, case.k, case.v, slots)
    cpu.write_kv(layer, case.k, case.v, slots)
    assert torch.equal(layer.k.nan_to_num(), expected.k.nan_to_num())
    assert torch.equal(layer.v.nan_to_num(), expected.v.nan_to_num())


@pytest.mark.parametrize("name", scorer_names())
def test_both_sides_agree_on_the_size_of_landmarks(name: str) -> None:
    scorer = get_scorer(name)
    for dim in (8, 64, 72, 80, 256):
        for size in (8, 128):
            for code, dtype in enumerate((torch.float32, torch.bfloat16)):
                expected = bytes_per_page(scorer, 3, dim, size, dtype)
                assert 3 * native().landmark_bytes(scorer_code(scorer, size), code, dim) == expected


def test_output_depends_neither_on_batch_nor_on_threads() -> None:
    case, cpu = Case(LARGE, pending=True), CpuBackend()
    threads = torch.get_num_threads()
    for scorer in (case.scorer, None):
        arguments = (scorer, case.scale)
        together = cpu.decode_layer(case.q, case.k, case.v, case.copy_of_layer(), case.batch, *arguments)
        try:
            torch.set_num_threads(3 - min(threads, 2))
            other = cpu.decode_layer(case.q, case.k, case.v, case.copy_of_layer(), case.batch, *arguments)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(together, other)
        for b in range(case.batch.size):
            alone, rows = case.sequence(b)
            single = cpu.decode_layer(case.q[rows], case.k[rows], case.v[rows], case.copy_of_layer(), alone, *arguments)
            assert torch.equal(together[rows], single)


def test_budget_of_all_pages_is_dense() -> None:
    case, cpu = Case(replace(LARGE, budgets=(2**30,) * 4), pending=True), CpuBackend()
    sparse = cpu.decode_layer(case.q, case.k, case.v, case.copy_of_layer(), case.batch, case.scorer, case.scale)
    dense = cpu.decode_layer(case.q, case.k, case.v, case.copy_of_layer(), case.batch, None, case.scale)
    assert torch.equal(sparse, dense)


def test_many_heads_and_long_sequence() -> None:
    shape = replace(LARGE, lengths=(5000,), budgets=(64,), num_kv_heads=2, group=9, scorer="softmax")
    case, cpu = Case(shape), CpuBackend()
    for selected in (
        cpu.select_pages(cpu.score_pages(case.q, case.layer, case.batch, case.scorer), case.batch, 16),
        None,
    ):
        arguments = (case.q, case.layer, case.batch, selected, case.scale)
        assert_close(cpu.decode_attention(*arguments), REFERENCE.decode_attention(*arguments))


def test_a_nan_that_was_read_is_not_hidden() -> None:
    case, cpu = Case(LARGE), CpuBackend()
    layer = case.copy_of_layer()
    layer.k[int(case.batch.block_table[0, 3]), 1, 5, 7] = torch.nan
    out = cpu.decode_attention(case.q, layer, case.batch, None, case.scale)
    bad = out.isnan().any(-1)
    assert bad[0, 3:6].all()
    assert bad.sum() == 3


def test_extreme_scores_stay_finite() -> None:
    case, cpu = Case(replace(LARGE, kv_dtype=torch.float32, q_dtype=torch.float32)), CpuBackend()
    arguments = (case.q * 300, case.layer, case.batch, None, case.scale)
    assert_close(cpu.decode_attention(*arguments), REFERENCE.decode_attention(*arguments))


def test_wrong_arguments_are_named() -> None:
    case, cpu = Case(LARGE), CpuBackend()
    with pytest.raises(UserError, match=r"q is \(3, 9, 64\)"):
        cpu.decode_attention(case.q[:3], case.layer, case.batch, None, case.scale)
    with pytest.raises(UserError, match="bfloat16 and float32"):
        cpu.decode_attention(case.q.half(), case.layer, case.batch, None, case.scale)
    with pytest.raises(UserError, match="selected is"):
        cpu.decode_attention(case.q, case.layer, case.batch, case.random_selection().long(), case.scale)
    narrow = torch.zeros(4, 3, 5, dtype=torch.int32)
    with pytest.raises(UserError, match="selected_out"):
        cpu.decode_layer(case.q, case.k, case.v, case.layer, case.batch, case.scorer, case.scale, selected_out=narrow)
    odd = PagedLayer(torch.zeros(2, 3, 12, 64), torch.zeros(2, 3, 12, 64))
    batch = DecodeBatch(
        torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.full((1,), 9, dtype=torch.int32)
    )
    with pytest.raises(UserError, match="multiples of 8"):
        cpu.decode_attention(case.q[:1].float(), odd, batch, None, case.scale)

    class Custom(MeanScorer):
        name = "custom"

    with pytest.raises(BackendUnavailable, match="'custom' has no C"):
        cpu.score_pages(case.q, case.layer, case.batch, Custom())
    with pytest.raises(UserError, match="landmarks is"):
        cpu.score_pages(case.q, case.layer, case.batch, QuantisedScorer("mine", 4, 4))
    thirds = QuantisedScorer("thirds", 4, 3)
    layer = PagedLayer(case.layer.k, case.layer.v, torch.zeros(case.layer.k.shape[0], 3, 3 * 34, dtype=torch.uint8))
    with pytest.raises(UserError, match="into 3 runs"):
        cpu.score_pages(case.q, layer, case.batch, thirds)
