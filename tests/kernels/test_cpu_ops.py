"""Small-batch products, norms, activations, rotation and sampling in C++ against torch, for every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear, silu

from leanroll.errors import RolloutError, UserError
from leanroll.kernels.cpu import LoraWeights, linear_group, rms_norm, rope, sample_rows, silu_mul, wide_products
from leanroll.kernels.reference import ReferenceBackend
from tests.assertions import assert_close

pytestmark = pytest.mark.usefixtures("isa")
EXAMPLES = settings(max_examples=25, deadline=None)
DTYPES = (torch.bfloat16, torch.float32)


def expected_linear(x: Tensor, weight: Tensor, bias: Tensor | None, lora: LoraWeights | None) -> Tensor:
    """What nn.Linear under peft's unmerged LoRA computes."""
    out = linear(x, weight, bias)
    if lora is not None:
        out = (out + linear(linear(x.to(lora.a.dtype), lora.a), lora.b) * lora.scaling).to(x.dtype)
    return out


@EXAMPLES
@given(
    rows=st.integers(1, 24) | st.sampled_from((33, 64)), width=st.integers(1, 300),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES), lora_dtype=st.sampled_from((None, *DTYPES)), rank=st.integers(1, 40),
    biased=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_linear_group(
    rows: int,
    width: int,
    sizes: list[int],
    dtype: torch.dtype,
    lora_dtype: torch.dtype | None,
    rank: int,
    biased: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    x = normal(rows, width).to(dtype)
    weights = [(normal(n, width) / width**0.5).to(dtype) for n in sizes]
    biases = [normal(n).to(dtype) if biased else None for n in sizes]
    # The first weight never has an adapter: mixed groups are the normal case.
    lora: list[LoraWeights | None] = [
        None
        if lora_dtype is None or i == 0
        else LoraWeights((normal(rank, width) / width**0.5).to(lora_dtype), normal(n, rank).to(lora_dtype), 0.7)
        for i, n in enumerate(sizes)
    ]
    actual = linear_group(x, weights, biases, lora)
    loosest = torch.bfloat16 if torch.bfloat16 in (dtype, lora_dtype) else torch.float32
    for weight, bias, adapter, out in zip(weights, biases, lora, actual, strict=True):
        assert out.dtype == dtype
        assert_close(out, expected_linear(x, weight, bias, adapter), dtype if adapter is None else loosest, scale=1.0)
    for row in range(rows):  # a row's result is its own
        alone = linear_group(x[row : row + 1], weights, biases, lora)
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(actual, alone, strict=True))


@given(rows=st.integers(1, 150), width=st.integers(1, 200), size=st.integers(1, 100))
def test_wide_products_keep_what_was_accumulated(rows: int, width: int, size: int) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    x = torch.randn(rows, width, generator=generator).bfloat16()
    weight = torch.randn(size, width, generator=generator).bfloat16()
    out = torch.full((rows, size), torch.nan)
    assert wide_products(x, weight, out) is out
    assert_close(out, x.float() @ weight.float().T, scale=width**0.5)


def test_wide_products_refuses() -> None:
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    with pytest.raises(UserError, match="out is"):
        wide_products(x, weight, torch.empty(4, 3, dtype=torch.bfloat16))
    with pytest.raises(UserError, match="weight is"):
        wide_products(x, weight.float(), torch.empty(4, 3))


def test_linear_group_reads_only_its_weights() -> None:
    memory = torch.full((3, 4, 33), torch.nan)
    memory[1] = torch.randn(4, 33)
    x = torch.randn(2, 33)
    assert_close(linear_group(x, [memory[1]])[0], x @ memory[1].T)


def test_linear_group_refuses() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(UserError, match="weight is"):
        linear_group(x, [torch.randn(4, 9)])
    with pytest.raises(UserError, match="weight is"):
        linear_group(x, [torch.randn(4, 8).bfloat16()])
    with pytest.raises(UserError, match="not contiguous"):
        linear_group(x, [torch.randn(8, 4).T])
    with pytest.raises(UserError, match="at most"):
        linear_group(torch.randn(100, 8), [torch.randn(4, 8)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 203, 576])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(3, 2, width) * 5).to(dtype), torch.randn(width).to(dtype)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert_close(rms_norm(x, weight, 1e-6), weight * normed.to(dtype))
    gemma = (normed * (1.0 + weight.float())).to(dtype)
    assert_close(rms_norm(x, weight, 1e-6, offset=1.0, float_weight=True), gemma)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(5, 211) * 20).to(dtype), torch.randn(5, 211).to(dtype)
    assert_close(silu_mul(gate, up), silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, cos, sin = (torch.randn(*size).to(dtype) for size in ((3, 4, 80), (3, 80), (3, 80)))
    rotated = torch.cat((-x[..., 40:], x[..., :40]), dim=-1)
    assert torch.equal(rope(x, cos, sin), x * cos[:, None] + rotated * sin[:, None])


@EXAMPLES
@given(
    rows=st.integers(1, 6), vocab=st.integers(1, 6000), temperature=st.sampled_from((0.3, 1.0, 1.7)), seed=st.integers(0, 2**16),
    masked=st.booleans(),
)  # fmt: skip
def test_sample_rows(rows: int, vocab: int, temperature: float, seed: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    if masked:
        logits[:, torch.rand(vocab, generator=generator) < 0.9] = -torch.inf
        logits[:, int(torch.randint(vocab, (), generator=generator))] = 1.0
    u = torch.rand(rows, generator=generator, dtype=torch.float64)
    ids, logprobs = sample_rows(logits, u, temperature)
    exact = (logits.double() / temperature).log_softmax(-1)
    assert_close(logprobs, exact.gather(1, ids[:, None])[:, 0], torch.float32, scale=1.0)
    # The draw lies in the interval that the token owns, up to rounding of the sums.
    upper = exact.exp().cumsum(-1).gather(1, ids[:, None])[:, 0]
    lower = upper - exact.exp().gather(1, ids[:, None])[:, 0]
    assert ((u >= lower - 1e-6) & (u <= upper + 1e-6)).all()
    expected, _ = ReferenceBackend().sample_rows(logits, u, temperature)
    inside = (u > lower + 1e-6) & (u < upper - 1e-6)
    assert torch.equal(ids[inside], expected[inside])


def test_sampling_ends_of_the_interval_and_threads() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50000)
    logits[:, 0] = logits[:, -1] = -torch.inf
    u = torch.tensor([0.0, 1.0 - 2**-53, 0.25, 0.75], dtype=torch.float64)
    ids, logprobs = sample_rows(logits, u)
    assert ids[0] == 1
    assert ids[1] == 49998
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        again = sample_rows(logits, u)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(ids, again[0])
    assert torch.equal(logprobs, again[1])


def test_sampling_refuses_what_has_no_distribution() -> None:
    u = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for bad in (torch.nan, torch.inf):
        logits = torch.zeros(2, 3000)
        logits[1, 2500] = bad
        with pytest.raises(RolloutError, match="row 1"):
            sample_rows(logits, u)
    with pytest.raises(RolloutError, match="only -inf"):
        sample_rows(torch.full((2, 10), -torch.inf), u)
    with pytest.raises(UserError, match="temperature is 0"):
        sample_rows(torch.zeros(2, 10), u, 0.0)
