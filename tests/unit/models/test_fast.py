"""The accelerated decode step: same numbers as the modules it stands in for, and nothing left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from leanroll.errors import BackendUnavailable, ModelError
from leanroll.kernels.cpu.native import native
from leanroll.models import CausalContext, Policy, linear, lora
from leanroll.models.fast import FastGroup, FastMlp, FastNorm, fast_decode
from tests.tiny import FAMILIES, tiny_policy

try:
    native()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

NORMS = {"llama": 9, "qwen2": 9, "qwen3": 17, "gemma2": 17, "gemma3": 25}
"""Norms of four layers: two per layer, two more of q and k (Qwen3, Gemma3), two more around blocks (Gemma), one final."""

_ALWAYS = (lora._forward, linear._forward)


@pytest.fixture(autouse=True)
def no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def step(policy: Policy, batch: int = 5, length: int = 1) -> Tensor:
    """Logits of a decode step whose sequences attend to their own tokens."""
    ids = torch.arange(3, 3 + batch * length).view(batch, length)
    positions = torch.arange(batch)[:, None] * 7 + torch.arange(length)
    return policy.head.logits(policy.hidden(ids, positions, CausalContext()))


def forwards(policy: Policy) -> dict[str, object]:
    """Replaced forward methods, but for those that always are: LoRA's training forward, and linear's where the CPU needs one."""
    own = {name: m.__dict__["forward"] for name, m in policy.model.named_modules() if "forward" in m.__dict__}
    return {name: forward for name, forward in own.items() if getattr(forward, "__func__", None) not in _ALWAYS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_step_is_the_models_own(family: str, adapter: bool, dtype: torch.dtype) -> None:
    policy = tiny_policy(family, adapter=adapter, dtype=dtype)
    expected = step(policy)
    rotary = sys.modules[type(policy.base).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
    with fast_decode(policy) as plan:
        assert plan.rejected == []
        assert sum(isinstance(part, FastMlp) for part in plan.parts) == 4
        groups = [len(part.products) for part in plan.parts if isinstance(part, FastGroup)]
        assert groups == [3, 1] * 4
        assert sum(isinstance(part, FastNorm) for part in plan.parts) == NORMS[family]
        assert len(plan.ropes) == 1
        got = step(policy)
        single = step(policy, batch=1)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert (got - expected).norm() <= tolerance * expected.norm()
    torch.testing.assert_close(single, got[:1], rtol=0, atol=0)
    # Nothing is left behind.
    assert forwards(policy) == {}
    assert sys.modules[type(policy.base).__module__].apply_rotary_pos_emb is rotary  # type: ignore[attr-defined]
    assert torch.equal(step(policy), expected)


@pytest.mark.parametrize("adapter", [False, True])
def test_weights_are_read_anew_in_every_step(adapter: bool) -> None:
    policy = tiny_policy("llama", adapter=adapter)
    with fast_decode(policy):
        before = step(policy)
        for parameter in policy.trainable_parameters().values():
            parameter.mul_(1.3)
        after = step(policy)
    assert not torch.allclose(before, after, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(after, step(policy), rtol=1e-4, atol=1e-4)
    # A checkpoint may replace the parameter objects themselves.
    layer = policy.base.model.layers[1].mlp.down_proj
    layer = layer.base_layer if adapter else layer
    with fast_decode(policy):
        layer.weight = nn.Parameter(layer.weight * 2.0, requires_grad=False)
        replaced = step(policy)
    assert not torch.allclose(replaced, after, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(replaced, step(policy), rtol=1e-4, atol=1e-4)


def test_adapter_switch_is_seen() -> None:
    policy = tiny_policy("qwen3", adapter=True)
    with policy.adapter_disabled():
        base = step(policy)
    with fast_decode(policy):
        torch.testing.assert_close(step(policy), step(policy), rtol=0, atol=0)
        with policy.adapter_disabled():
            torch.testing.assert_close(step(policy), base, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(step(policy), base, atol=1e-2)


def test_many_rows_and_graphs_go_to_the_model() -> None:
    policy = tiny_policy("llama", dtype=torch.bfloat16)
    expected = step(policy, batch=3, length=40)
    with fast_decode(policy), torch.enable_grad():
        step(policy).sum().backward()
        assert policy.head.weight.grad is not None
    with fast_decode(policy):
        got = step(policy, batch=3, length=40)
    assert (got - expected).norm() <= 3e-2 * expected.norm()


def test_nested_and_failing_uses_restore() -> None:
    policy = tiny_policy("gemma3")
    expected, head = step(policy), policy.head
    with fast_decode(policy):
        outer = forwards(policy)
        with fast_decode(policy):
            step(policy)
        assert forwards(policy).keys() == outer.keys()
        torch.testing.assert_close(step(policy), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="stop"), fast_decode(policy):
        raise RuntimeError("stop")
    assert forwards(policy) == {}
    assert policy.head is head


class Doubled(nn.Module):
    """Looks like an RMS norm, is none."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = inner.weight, 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


def test_lookalikes_are_rejected() -> None:
    policy = tiny_policy("llama")
    policy.base.model.norm = Doubled(policy.base.model.norm)
    mlp = policy.base.model.layers[0].mlp
    mlp.act_fn.forward = lambda x: x
    expected = step(policy)
    with fast_decode(policy) as plan:
        assert sorted(plan.rejected) == ["layers.0.mlp", "norm"]
        torch.testing.assert_close(step(policy), expected, rtol=1e-4, atol=1e-4)


def test_half_precision_is_refused() -> None:
    with pytest.raises(ModelError, match="float16"), fast_decode(tiny_policy("llama", dtype=torch.float16)):
        pass
