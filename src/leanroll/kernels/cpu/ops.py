"""The rest of a decode step in C++: products with few rows, norms, activations, rotation, sampling.

Every function returns new tensors, has no gradient, and rounds where the eager Hugging Face module rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leanroll.errors import BackendUnavailable, RolloutError, UserError
from leanroll.kernels.cpu.native import check, dtype_code, native


class LoraWeights(NamedTuple):
    """One adapter of one linear layer: a [r, K], b [N, r], contiguous, of one dtype; y += scaling * b(a(x))."""

    a: Tensor
    b: Tensor
    scaling: float


def linear_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    lora: Sequence[LoraWeights | None] | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """y_i = x W_i^T (+ bias_i) (+ scaling_i B_i A_i x) for weights that share x, accumulated in float32.

    A row's result does not depend on the other rows. Rounding follows nn.Linear and peft's unmerged LoRA: the base product
    to x's dtype, each adapter product to the adapter's dtype.

    Args:
        x: [M, K], bfloat16 or float32, M up to 64 (beyond, torch is as fast).
        weights: [N_i, K] each, dtype of x. biases: [N_i] or None each. lora: adapter or None each.
        out_dtype: of the results; None is x's dtype. float32 on bfloat16 inputs keeps what was accumulated (logits).
    Returns:
        [M, N_i] each.
    Raises:
        UserError: shapes or dtypes that do not fit.
    """
    module = native()
    x = x.contiguous()
    num_rows, width = x.shape
    if num_rows > module.MAX_LINEAR_ROWS:
        raise UserError(
            f"linear_group got {num_rows} rows; expected at most {module.MAX_LINEAR_ROWS}. Use torch beyond."
        )
    dtype = x.dtype
    out_dtype = dtype if out_dtype is None else out_dtype
    items, outputs = [], []
    for i, weight in enumerate(weights):
        size = weight.shape[0]
        bias = biases[i] if biases is not None else None
        adapter = lora[i] if lora is not None else None
        out = torch.empty(num_rows, size, dtype=out_dtype)
        a = b = code = rank = 0
        scaling = 0.0
        if adapter is not None:
            rank, code, scaling = adapter.a.shape[0], dtype_code(adapter.a, "lora A"), adapter.scaling
            if rank > module.MAX_RANK:
                raise UserError(f"a LoRA adapter has rank {rank}; expected at most {module.MAX_RANK}.")
            a = check(adapter.a, "lora A", (rank, width), adapter.a.dtype)
            b = check(adapter.b, "lora B", (size, rank), adapter.a.dtype)
        bias_address = 0 if bias is None else check(bias, "bias", (size,), dtype)
        address = check(weight, "weight", (size, width), dtype)
        items.append((address, bias_address, size, a, b, code, rank, scaling, out.data_ptr()))
        outputs.append(out)
    module.linear_group(
        dtype_code(x, "x"), check(x, "x", (num_rows, width), dtype), num_rows, width, items,
        dtype_code(outputs[0], "out_dtype"), torch.get_num_threads(),
    )  # fmt: skip
    return outputs


def has_tiles() -> bool:
    """Whether `wide_products` beats a float32 product of widened factors: the extension is built and uses AMX."""
    try:
        return bool(native().isa() == "amx_bf16")
    except BackendUnavailable:
        return False


def wide_products(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """out = x W^T of bfloat16 factors, accumulated and kept in float32, for any number of rows.

    Args:
        x: [M, K] bfloat16. weight: [N, K] bfloat16. out: [M, N] float32, contiguous, overwritten.

    Raises:
        UserError: shapes or dtypes that do not fit.
    """
    module, x = native(), x.contiguous()
    (rows, width), size = x.shape, weight.shape[0]
    source = check(x, "x", (rows, width), torch.bfloat16)
    address = check(weight, "weight", (size, width), torch.bfloat16)
    target = check(out, "out", (rows, size), torch.float32)
    for first in range(0, rows, module.MAX_LINEAR_ROWS):
        count = min(module.MAX_LINEAR_ROWS, rows - first)
        item = (address, 0, size, 0, 0, 0, 0, 0.0, target + 4 * first * size)
        module.linear_group(1, source + 2 * first * width, count, width, [item], 0, torch.get_num_threads())
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, float_weight: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, computed in float32.

    float_weight False (Llama, Qwen): the normalised x is rounded to its dtype before the weight is applied. True (Gemma, with
    offset 1): everything is float32 until the end.

    Args:
        x: [..., H]. weight: [H], dtype of x.
    """
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty_like(x)
    native().rms_norm(
        dtype_code(x, "x"), check(x, "x", tuple(x.shape), x.dtype), check(weight, "weight", (width,), x.dtype), out.data_ptr(),
        x.numel() // max(width, 1), width, eps, offset, float_weight, torch.get_num_threads(),
    )  # fmt: skip
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, any shape; silu is rounded to the dtype before the product."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    native().silu_mul(
        dtype_code(gate, "gate"), check(gate, "gate", tuple(gate.shape), gate.dtype),
        check(up, "up", tuple(gate.shape), gate.dtype), out.data_ptr(), gate.numel(), torch.get_num_threads(),
    )  # fmt: skip
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation: x * cos + rotate_half(x) * sin, both products rounded to x's dtype.

    Args:
        x: [B, H, D]. cos, sin: [B, D], dtype of x.
    """
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    num_seqs, num_heads, head_dim = x.shape
    out = torch.empty_like(x)
    shape = (num_seqs, head_dim)
    native().rope(
        dtype_code(x, "x"), check(x, "x", tuple(x.shape), x.dtype), check(cos, "cos", shape, x.dtype),
        check(sin, "sin", shape, x.dtype), out.data_ptr(), num_seqs, num_heads, head_dim, torch.get_num_threads(),
    )  # fmt: skip
    return out


def sample_rows(logits: Tensor, u: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution in vocabulary order.

    Args:
        logits: [B, V] float32; -inf excludes an entry.
        u: [B] float64, uniform in [0, 1).
        temperature: > 0.
    Returns:
        ids int64 [B], and the log-probabilities float32 [B] of the drawn ids under softmax(logits / temperature).
    Raises:
        UserError: temperature not positive, wrong shapes. RolloutError: a row holds NaN, +inf, or only -inf.
    """
    if temperature <= 0.0:
        raise UserError(f"temperature is {temperature}; expected > 0 (greedy decoding is an argmax, not a draw).")
    logits, u = logits.contiguous(), u.contiguous()
    num_rows, vocab = logits.shape
    ids, logprobs = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.float32)
    bad = native().sample_rows(
        check(logits, "logits", (num_rows, vocab), torch.float32), num_rows, vocab,
        check(u, "u", (num_rows,), torch.float64), temperature, ids.data_ptr(), logprobs.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise RolloutError(f"the logits of row {bad} hold NaN, +inf or only -inf; expected finite logits.")
    return ids, logprobs
