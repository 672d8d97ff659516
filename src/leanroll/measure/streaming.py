"""What streams a language-model head over rows: logits of a chunk at a temperature, gradients back through it, row functions.

Legend: R rows (tokens), n rows of a chunk, H hidden size, V vocabulary. Logits are what `LmHead.logits` gives, float32 products
that are never rounded to bfloat16, divided by the temperature. Autocast does not reach the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanroll.kernels.cpu import has_tiles, wide_products
from leanroll.kernels.products import product

CHUNK_BYTES = 100 * 2**20
"""Float32 logits of one chunk: 530 rows at a vocabulary of 49,152."""
WIDE_BYTES = 2**30
"""Largest float32 copy of a bfloat16 head that is kept during one call on a CPU."""


class Head(Protocol):
    """`LmHead`: logits = cap(scale · (hidden · weightᵀ + bias)), cap(x) = softcap · tanh(x / softcap)."""

    @property
    def weight(self) -> Tensor:
        """[V, H]."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """[V] or None."""
        ...

    @property
    def softcap(self) -> float:
        """0 means none."""
        ...

    @property
    def scale(self) -> float:
        """Factor on the product."""
        ...

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] → hidden · weightᵀ [..., V] in float32 (or wider)."""
        ...


@dataclass(frozen=True, slots=True)
class TemperedHead:
    """A head at a temperature: from hidden rows to logits / temperature, and back from their gradient."""

    head: Head
    temperature: float
    wide_weight: Tensor | None = None
    tiles: bool = False

    @classmethod
    def of(cls, head: Head, temperature: float, num_rows: int) -> TemperedHead:
        """Off the GPU, where products of bfloat16 come out in bfloat16, the weight is widened once and not in every chunk."""
        weight = head.weight
        if weight.dtype is torch.bfloat16 and weight.is_cpu and weight.is_contiguous() and has_tiles():
            return cls(head, float(temperature), tiles=True)
        small = 4 * weight.numel() <= WIDE_BYTES and num_rows > 0
        if weight.dtype in (torch.bfloat16, torch.float16) and not weight.is_cuda and small:
            return cls(head, float(temperature), weight.detach().float())
        return cls(head, float(temperature), None)

    @property
    def slope(self) -> float:
        """d tempered logit / d product, without the softcap."""
        return self.head.scale / self.temperature

    def logits(self, hidden: Tensor, buffer: Tensor | None = None) -> Tensor:
        """Tempered logits [n, V] of rows [n, H], in a tensor of their own or at the start of the buffer [>= n, V]."""
        head = self.head
        if self.tiles and hidden.dtype is torch.bfloat16:
            size = (hidden.shape[0], head.weight.shape[0])
            out = torch.empty(size, dtype=torch.float32) if buffer is None else buffer[: hidden.shape[0]]
            x = wide_products(hidden.detach(), head.weight.detach(), out)
        elif self.wide_weight is None:
            x = head.project(hidden)
        else:
            x = torch.mm(hidden.float(), self.wide_weight.T, out=None if buffer is None else buffer[: hidden.shape[0]])
        if head.bias is not None:
            x += head.bias
        if head.scale != 1.0:
            x *= head.scale
        if head.softcap:
            x.div_(head.softcap).tanh_().mul_(head.softcap)
        return x.div_(self.temperature) if self.temperature != 1.0 else x

    def product_grad(self, grad: Tensor, tempered: Tensor) -> Tensor:
        """The gradient [n, V] of the products from that of the tempered logits, which it overwrites."""
        if self.slope != 1.0:
            grad *= self.slope
        return self.through_cap(grad, tempered)

    def through_cap(self, grad: Tensor, tempered: Tensor) -> Tensor:
        """grad [n, V] times the slope of the softcap at the tempered logits, in place."""
        if self.head.softcap:
            # Outside a support the logit is -inf and the gradient is 0; their product would be NaN.
            capped = tempered.masked_fill(tempered == -torch.inf, 0.0).mul_(self.temperature / self.head.softcap)
            grad *= 1.0 - capped.square_()
        return grad


class HeadGradients:
    """Gradients of hidden rows, weight and bias, gathered from chunks of the products' gradient.

    Chunks are summed in float32: in bfloat16 the later ones would be rounded away.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> None:
        """needed: which of the three."""
        self._inputs = (hidden, weight, bias)
        dtype = wide(weight.dtype)
        self._hidden = torch.empty_like(hidden) if needed[0] else None
        self._weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self._bias = torch.zeros_like(bias, dtype=dtype) if needed[2] and bias is not None else None

    def add(self, rows: slice, dz: Tensor) -> None:
        """dz: [n, V], the gradient of the products of these rows. Every row comes once."""
        hidden, weight, _ = self._inputs
        if self._bias is not None:
            self._bias += dz.sum(dim=0)
        if self._hidden is not None:
            self._hidden[rows] = product(dz, weight).to(hidden.dtype)
        if self._weight is not None:
            self._weight += product(dz.T, hidden[rows].to(weight.dtype))

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the dtypes of hidden, weight and bias; None where not needed."""
        _, weight, bias = self._inputs
        return (
            self._hidden,
            None if self._weight is None else self._weight.to(weight.dtype),
            None if self._bias is None or bias is None else self._bias.to(bias.dtype),
        )


class Scratch:
    """Tensors that serve all chunks: pages that are fresh in every chunk cost a CPU more than the arithmetic on them."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def like(self, name: str, x: Tensor) -> Tensor:
        """An uninitialised tensor of x's shape and dtype: the one of this name from the last chunk, where that is large enough."""
        held = self._held.get(name)
        if held is None or held.shape[0] < x.shape[0] or held.shape[1:] != x.shape[1:] or held.dtype != x.dtype:
            held = self._held[name] = torch.empty_like(x)
        return held[: x.shape[0]]

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Row-wise, [n, C] twice → [n]. (`bmm` of vectors takes a CPU three times as long, and loses most of a digit.)"""
        return torch.mul(a, b, out=self.like("product", a)).sum(dim=-1)

    def logits(self, name: str, head: TemperedHead, hidden: Tensor) -> Tensor:
        """`TemperedHead.logits`, in the buffer of this name where the head can use one."""
        self._held[name] = x = head.logits(hidden, self._held.get(name))
        return x


class RowFunction(Protocol):
    """A value per row of tempered logits."""

    def __call__(
        self, x: Tensor, rows: slice, scratch: Scratch, *, first: bool, with_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Values [n] of the rows' logits x [n, V], which it leaves as they are, and d value / d x [n, V] (None unless asked for).

        The gradient may lie in the scratch and is overwritten by the caller. first: the forward pass, in which by-products can
        be recorded; the backward pass may come again.
        """
        ...


def row_values(hidden: Tensor, head: TemperedHead, function: RowFunction, chunk_rows: int) -> Tensor:
    """function(tempered logits) per row, [R], float32 (or wider), differentiable in hidden and the head's weight and bias.

    Never holds [R, V]. If only `hidden` [R, H] needs a gradient (a frozen head), its rows' gradients are computed in the
    forward; otherwise the backward recomputes the logits chunk by chunk.
    """
    plain, needs_grad = head.head, torch.is_grad_enabled()  # always off inside a Function
    return _RowValues.apply(hidden, plain.weight, plain.bias, head, function, chunk_rows, needs_grad)


class _RowValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tempered: TemperedHead,
        function: RowFunction,
        chunk: int,
        needs_grad: bool,
    ) -> Tensor:
        num_rows = hidden.shape[0]
        values = hidden.new_empty(num_rows, dtype=wide(weight.dtype))
        head_grad = needs_grad and (weight.requires_grad or (bias is not None and bias.requires_grad))
        # d value / d hidden of a row is independent of the other rows, so it can be made here and scaled later.
        jacobian = torch.empty_like(hidden) if needs_grad and hidden.requires_grad and not head_grad else None
        scratch = Scratch()
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in chunks(num_rows, chunk):
                x = scratch.logits("logits", tempered, hidden[rows])
                values[rows], dx = function(x, rows, scratch, first=True, with_grad=jacobian is not None)
                if jacobian is not None and dx is not None:
                    jacobian[rows] = product(tempered.product_grad(dx, x), weight).to(hidden.dtype)
        ctx.has_jacobian = jacobian is not None
        if jacobian is not None:
            ctx.save_for_backward(jacobian)
        elif head_grad:
            ctx.settings = (tempered, function, chunk)
            ctx.save_for_backward(hidden, weight, bias)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 4
        if ctx.has_jacobian:
            (jacobian,) = ctx.saved_tensors
            return ((jacobian * grad[:, None]).to(jacobian.dtype), None, None, *nothing)
        hidden, weight, bias = ctx.saved_tensors
        tempered, function, chunk = ctx.settings
        gradients, scratch = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3]), Scratch()
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in chunks(hidden.shape[0], chunk):
                x = scratch.logits("logits", tempered, hidden[rows])
                _, dx = function(x, rows, scratch, first=False, with_grad=True)
                assert dx is not None
                gradients.add(rows, tempered.product_grad(dx, x).mul_(grad[rows, None]))
        return (*gradients.result(), *nothing)


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64 weights."""
    return torch.promote_types(dtype, torch.float32)


def default_chunk_rows(vocab_size: int) -> int:
    """Rows per chunk that fit `CHUNK_BYTES` of float32 logits."""
    return max(16, CHUNK_BYTES // (4 * vocab_size))


def row_function_rows(vocab_size: int) -> int:
    """Rows per chunk of a row function: half as many, since it holds up to six tensors of a chunk's size."""
    return max(16, default_chunk_rows(vocab_size) // 2)


def chunks(num_rows: int, chunk: int) -> Iterator[slice]:
    """Slices of at most `chunk` rows, in order."""
    for start in range(0, num_rows, chunk):
        yield slice(start, min(start + chunk, num_rows))
