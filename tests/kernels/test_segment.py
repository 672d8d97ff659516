"""Attention of one run of queries: short ones on the CPU, with gradients, against fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanroll.kernels import segment
from leanroll.kernels.segment import segment_attention
from tests.assertions import assert_close


def truth(q, k, v, scale):
    """Causal attention in the inputs' dtype, one row of weights at a time."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    outputs = []
    for i in range(q.shape[2]):
        seen = k.shape[2] - q.shape[2] + i + 1
        weights = (scale * torch.einsum("nhd,nhkd->nhk", q[:, :, i], k[:, :, :seen])).softmax(-1)
        outputs.append(torch.einsum("nhk,nhkd->nhd", weights, v[:, :, :seen]))
    return torch.stack(outputs, dim=2)


def make(batch, kv_heads, groups, queries, before, dim, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(batch, kv_heads * groups, queries, dim)] + [(batch, kv_heads, before + queries, dim)] * 2
    # As a model hands them over: [N, T, H, D] transposed.
    return [torch.randn(n, t, h, d, generator=g).to(dtype).transpose(1, 2).requires_grad_() for n, h, t, d in shapes]


@settings(max_examples=25)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    groups=st.sampled_from([1, 3, 8]),
    queries=st.sampled_from([2, 5, 63, 64, 65, 130]),
    before=st.sampled_from([0, 1, 17, 100]),
    dim=st.sampled_from([16, 80]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_short_runs_are_exact(batch, kv_heads, groups, queries, before, dim, dtype):
    tensors = make(batch, kv_heads, groups, queries, before, dim, dtype)
    grad = torch.randn_like(tensors[0])
    out = segment_attention(*tensors, scale=0.3)
    assert out.dtype == dtype
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = truth(*wide, scale=0.3)
    assert_close(out, expected.to(dtype), name="output")
    got = torch.autograd.grad(out, tensors, grad)
    wanted = torch.autograd.grad(expected, wide, grad.double())
    for name, a, e in zip("qkv", got, wanted, strict=True):
        assert_close(a, e.to(dtype), name=f"gradient of {name}")


def test_blocks_shrink_with_the_number_of_heads(monkeypatch):
    tensors = make(1, 2, 2, 70, 30, 16, torch.bfloat16)
    whole = segment_attention(*tensors, scale=0.25)
    monkeypatch.setattr(segment, "SHORT_SCORES", 1)
    assert [b - a for a, b, _ in segment._blocks(*tensors[:2])] == [16, 16, 16, 16, 6]
    assert_close(segment_attention(*tensors, scale=0.25), whole)


def test_short_runs_keep_no_weights():
    tensors = make(1, 3, 3, 100, 50, 16, torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        segment_attention(*tensors, scale=0.25)
    assert [(t.shape, t.dtype) for t in kept] == [(t.shape, torch.bfloat16) for t in tensors]


@pytest.mark.parametrize("case", ["fp32", "long", "one query", "softcap", "window", "autocast"])
def test_others_are_torchs(case, monkeypatch):
    monkeypatch.setattr(segment._ShortAttention, "apply", lambda *_: pytest.fail("not a short run"))
    monkeypatch.setattr(segment, "MAX_SHORT_KEYS", 30)
    dtype = torch.float32 if case == "fp32" else torch.bfloat16
    queries = {"long": 31, "one query": 1}.get(case, 12)
    tensors = make(1, 1, 2, queries, 0, 16, dtype)
    options = {"softcap": {"softcap": 5.0}, "window": {"window": 4}}.get(case, {})
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast"):
        out = segment_attention(*tensors, scale=0.25, **options)
    assert out.shape == tensors[0].shape
