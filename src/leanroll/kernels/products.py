"""Matrix products of 16-bit floats on CPUs that have no instructions for them: most laptops, and servers without AVX-512.

There torch multiplies them 4 to 60 times slower than float32. Here both factors are widened while their product is computed, and
the product is rounded once, to the type that it would have had. On every other device these are torch's own products.

1,024 rows, 576 to 1,536 numbers, AMD EPYC with AVX2, two threads, ms:

    product                    bfloat16   widened
    x Wᵀ                            159        19
    grad W                          963        17
    gradᵀ x                          80        21
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def is_emulated(x: Tensor) -> bool:
    """Whether torch's products of tensors like x are to be avoided: 16 bits, on a CPU that only knows wider ones."""
    return x.is_cpu and x.dtype in (torch.bfloat16, torch.float16) and not _has_instructions(x.dtype)


@functools.cache
def _has_instructions(dtype: torch.dtype) -> bool:
    support = torch.ops.mkldnn
    name = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(getattr(support, name)())


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [N, K] · b [K, M] in b's dtype. A wider `a` is rounded to it first, unless the product is widened anyway."""
    if is_emulated(b):
        return (a.float() @ b.float()).to(b.dtype)
    return a.to(b.dtype) @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] · weightᵀ [N, K] + bias [N], differentiable in all of them; all in one dtype, as `F.linear` wants it."""
    if not is_emulated(x):
        return F.linear(x, weight, bias)
    out: Tensor = _WideLinear.apply(x, weight, bias)
    return out


class _WideLinear(torch.autograd.Function):
    """Keeps the 16-bit factors for the backward, where autograd would keep their wide copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            product(rows, weight).view_as(x) if need_x else None,
            product(rows.T, x.reshape(-1, x.shape[-1])) if need_weight else None,
            rows.float().sum(dim=0).to(weight.dtype) if need_bias else None,
        )
