"""Widened products: the same values and gradients as fp32 products of the same 16-bit factors, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leanroll.kernels import products
from leanroll.kernels.segment import MAX_SHORT_KEYS, segment_attention
from leanroll.measure.head import token_logprobs
from leanroll.models.head import LmHead
from leanroll.models.linear import install_linear
from tests.assertions import assert_close

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(params=[True, False], ids=["instructions", "emulated"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A CPU with and without instructions for 16-bit floats, whatever this one is."""
    monkeypatch.setattr(products, "_has_instructions", lambda dtype: request.param)
    return bool(request.param)


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_only_16_bit_tensors_are_emulated(dtype: torch.dtype, instructions: bool) -> None:
    assert products.is_emulated(torch.zeros(1, dtype=dtype)) == (dtype in HALF and not instructions)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_the_wide_product_rounded_once(dtype: torch.dtype, bias: bool, instructions: bool) -> None:
    leaves = [_random(2, 5, 48, dtype=dtype), _random(40, 48, dtype=dtype)]
    leaves += [_random(40, dtype=dtype)] if bias else []
    grad = _random(2, 5, 40, dtype=dtype)
    for leaf in leaves:
        leaf.requires_grad_()
    out = products.linear(*leaves)
    gradients = torch.autograd.grad(out, leaves, grad)
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = nn.functional.linear(*wide)
    if not instructions:
        assert torch.equal(out, expected.to(dtype))
    assert_close(out, expected.to(dtype))
    for got, want in zip(gradients, torch.autograd.grad(expected, wide, grad.float()), strict=True):
        assert got.dtype is dtype
        assert_close(got, want.to(dtype))


def test_the_wider_factor_is_not_rounded_where_the_product_is_wide() -> None:
    a, b = _random(7, 33, dtype=torch.float32), _random(33, 9, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_has_instructions", lambda dtype: False)
        assert torch.equal(products.product(a, b), (a @ b.float()).bfloat16())
        patch.setattr(products, "_has_instructions", lambda dtype: True)
        assert torch.equal(products.product(a, b), a.bfloat16() @ b)


@pytest.mark.parametrize("dtype", HALF)
def test_a_models_layers_are_replaced_only_where_it_pays(dtype: torch.dtype, instructions: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False)).to(dtype)
    names = list(model.state_dict())
    assert install_linear(model) == (0 if instructions else 2)
    assert ("forward" in vars(model[0])) is not instructions
    assert list(model.state_dict()) == names
    assert install_linear(model.float()) == 0


def test_attention_of_long_stretches_keeps_value_and_gradients(instructions: bool) -> None:
    length = MAX_SHORT_KEYS + 3
    leaves = [_random(1, heads, length, 16, dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2)]
    grad = _random(1, 4, length, 16, dtype=torch.bfloat16)
    out = segment_attention(*leaves, scale=0.25)
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = segment_attention(*wide, scale=0.25)
    assert out.dtype is torch.bfloat16
    assert_close(out, expected.bfloat16())
    gradients = torch.autograd.grad(out, leaves, grad)
    for got, want in zip(gradients, torch.autograd.grad(expected, wide, grad.float()), strict=True):
        assert_close(got, want.bfloat16())


def test_gradients_through_the_head(instructions: bool) -> None:
    hidden, weight = _random(9, 24, dtype=torch.bfloat16), _random(70, 24, dtype=torch.bfloat16)
    targets = torch.arange(9)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for trained in (False, True):
            leaves = [hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_(trained)]
            logprobs = token_logprobs(leaves[0], LmHead(leaves[1]), targets, 1.0).logprobs
            results.append(torch.autograd.grad(logprobs.sum(), [x for x in leaves if x.requires_grad]))
    for got, want in zip(results[:2], results[2:], strict=True):
        for one, other in zip(got, want, strict=True):
            assert_close(one, other.bfloat16())
