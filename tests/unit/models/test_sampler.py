"""The sampler's own adapter: it follows the attention, and touches nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from leanroll.errors import ModelError
from leanroll.models import CausalContext, LoraSpec, Policy, SamplerAdapter
from leanroll.models.fast import fast_decode
from leanroll.models.sampler import sampler_term
from tests.assertions import assert_close
from tests.tiny import tiny_model, tiny_policy

IDS = torch.randint(3, 259, (1, 24), generator=torch.Generator().manual_seed(2))
POSITIONS = torch.arange(24)[None]


class MarkedContext(CausalContext):
    """Causal attention that calls some tokens sparse."""

    def __init__(self, sparse_rows: bool | Tensor) -> None:
        super().__init__()
        self.sparse_rows = sparse_rows  # type: ignore[assignment]


def with_sampler(policy: Policy, **options: Any) -> SamplerAdapter:
    """An adapter that has an effect."""
    sampler = policy.add_sampler(LoraSpec(**{"r": 3, "alpha": 6.0, "seed": 4, **options}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for b in sampler.b:
            b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    return sampler


def hidden(policy: Policy, rows: bool | Tensor) -> Tensor:
    return policy.hidden(IDS, POSITIONS, MarkedContext(rows))


@pytest.fixture(params=[False, True], ids=["plain", "lora"])
def adapter(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_on_it_is_the_sum_of_products(family: str, adapter: bool) -> None:
    """Against a copy of the model whose weights hold the adapter."""
    policy, merged = tiny_policy(family, adapter=adapter), tiny_policy(family, adapter=adapter)
    sampler = with_sampler(policy)
    modules = dict(merged.base.named_modules())
    assert len(sampler.targets) == 4 * 7
    with torch.no_grad():
        for name, a, b in zip(sampler.targets, sampler.a, sampler.b, strict=True):
            layer = modules[name]
            getattr(layer, "base_layer", layer).weight.add_(sampler.scaling * b @ a)
        expected, plain = hidden(merged, False), hidden(tiny_policy(family, adapter=adapter), False)
        assert_close(hidden(policy, True), expected)
        assert float((expected - plain).norm()) > 0.05 * float(plain.norm()), "the adapter has an effect"


def test_off_it_is_the_policy_to_the_bit(adapter: bool) -> None:
    policy = tiny_policy("llama", adapter=adapter)
    expected, names = hidden(policy, False), list(policy.model.state_dict())
    trainable = policy.trainable_parameters().keys()
    sampler = with_sampler(policy)
    assert torch.equal(hidden(policy, False), expected)
    with sampler.disabled():
        assert torch.equal(hidden(policy, True), expected)
    assert not torch.equal(hidden(policy, True), expected)
    assert torch.equal(hidden(policy, False), expected)
    assert list(policy.model.state_dict()) == names
    assert policy.trainable_parameters().keys() == trainable


def test_a_new_adapter_changes_nothing() -> None:
    policy = tiny_policy("qwen3", adapter=True)
    expected = hidden(policy, False)
    policy.add_sampler(LoraSpec(r=3))
    assert torch.equal(hidden(policy, True), expected)


def test_rows_are_told_apart() -> None:
    """Tokens before the first sparse one do not see the adapter; in layers of one token each, no other row does."""
    policy = tiny_policy("llama", adapter=True)
    with_sampler(policy)
    rows = torch.arange(24)[None] >= 10
    with torch.no_grad():
        dense, mixed, sparse = hidden(policy, False), hidden(policy, rows), hidden(policy, True)
    assert torch.equal(mixed[:, :10], dense[:, :10])
    assert not torch.isclose(mixed[:, 10:], dense[:, 10:]).all(dim=-1).any()
    assert not torch.isclose(mixed[:, 10:], sparse[:, 10:]).all(dim=-1).any(), "they read keys without the adapter"


def gradients(policy: Policy, sampler: SamplerAdapter, rows: bool | Tensor) -> list[Tensor]:
    with policy.frozen():
        hidden(policy, rows).square().sum().backward()
    found = [p.grad.clone() for p in sampler.parameters() if p.grad is not None]
    sampler.zero_grad()
    assert all(p.grad is None for p in policy.model.parameters()), "the policy is frozen"
    return found


@pytest.mark.parametrize("rows", [True, torch.arange(24)[None] >= 10], ids=["all", "some"])
def test_gradients_are_those_of_plain_operations(rows: bool | Tensor, adapter: bool) -> None:
    policy = tiny_policy("qwen3", adapter=adapter)
    sampler = with_sampler(policy)
    ours = gradients(policy, sampler, rows)
    assert len(ours) == 2 * len(sampler.targets)
    modules = dict(policy.base.named_modules())
    for name in sampler.targets:
        term = sampler_term(modules[name])
        assert term is not None

        def plain(x: Tensor, term: Any = term) -> Tensor:
            mask = 1.0 if rows is True else term.switch.rows[..., None]
            return term.inner(x) + term.scaling * mask * (x @ term.a.T) @ term.b.T

        modules[name].forward = plain
    for got, expected in zip(ours, gradients(policy, sampler, rows), strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("before", [True, False])
def test_recomputed_layers_have_the_adapter_of_their_context(before: bool) -> None:
    rows = torch.arange(24)[None] >= 10
    plain = tiny_policy("llama", adapter=True)
    expected = gradients(plain, with_sampler(plain), rows)
    policy = tiny_policy("llama", adapter=True)
    if before:
        policy.enable_gradient_checkpointing()
    sampler = with_sampler(policy)
    if not before:
        policy.enable_gradient_checkpointing()
    for got, reference in zip(gradients(policy, sampler, rows), expected, strict=True):
        assert_close(got, reference)
    # A dense graph whose backward comes after a sparse forward: each recomputes its own.
    reference = tiny_policy("llama", adapter=True)
    hidden(reference, False).square().sum().backward()
    dense = hidden(policy, False)
    hidden(policy, True)
    dense.square().sum().backward()
    for name, parameter in policy.trainable_parameters().items():
        other = reference.trainable_parameters()[name].grad
        assert parameter.grad is not None
        assert other is not None
        assert_close(parameter.grad, other, name=name)
    assert all(p.grad is None for p in sampler.parameters())


def test_frozen_restores_after_an_error(adapter: bool) -> None:
    policy = tiny_policy("llama", adapter=adapter)
    before = {n: p.requires_grad for n, p in policy.model.named_parameters()}
    with pytest.raises(RuntimeError), policy.frozen():
        raise RuntimeError
    assert {n: p.requires_grad for n, p in policy.model.named_parameters()} == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [True, False, torch.tensor([[True], [False], [True]])], ids=["all", "none", "some"])
def test_the_accelerated_step_has_the_adapter(dtype: torch.dtype, rows: bool | Tensor, adapter: bool) -> None:
    policy = tiny_policy("llama", adapter=adapter, dtype=dtype)
    with fast_decode(policy):
        pass  # a plan from before the adapter
    with_sampler(policy)
    ids, positions = torch.tensor([[3], [5], [90]]), torch.tensor([[4], [9], [2]])
    with torch.inference_mode():
        expected = policy.hidden(ids, positions, MarkedContext(rows))
        with fast_decode(policy) as plan:
            got = policy.hidden(ids, positions, MarkedContext(rows))
    assert not plan.rejected
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < (1e-5 if dtype is torch.float32 else 2e-2)  # four layers, each rounded to bf16 several times


def test_the_accelerated_step_follows_updates() -> None:
    policy = tiny_policy("llama", adapter=True)
    sampler = with_sampler(policy)
    ids, positions = torch.tensor([[3]]), torch.tensor([[4]])
    with torch.inference_mode(), fast_decode(policy):
        policy.hidden(ids, positions, MarkedContext(True))
        for parameter in (sampler.b[0], next(iter(policy.trainable_parameters().values()))):
            parameter.mul_(2.0)
            got = policy.hidden(ids, positions, MarkedContext(True))
        expected = policy.hidden(ids.repeat(65, 1), positions.repeat(65, 1), MarkedContext(True))[
            :1
        ]  # torch's products
    assert_close(got, expected)


def test_saved_in_pefts_format_and_loaded(tmp_path: Path, adapter: bool) -> None:
    policy = tiny_policy("llama", adapter=adapter)
    sampler = with_sampler(policy, target_modules=("q_proj", "down_proj"))
    assert len(sampler.targets) == 8
    sampler.save(tmp_path)
    other = tiny_policy("llama", adapter=adapter)
    loaded = other.add_sampler(LoraSpec(path=tmp_path))
    assert loaded.targets == sampler.targets
    assert torch.equal(hidden(other, True), hidden(policy, True))
    if not adapter:
        model = tiny_model("llama")
        wrapped = PeftModel.from_pretrained(model, str(tmp_path)).eval()
        with torch.no_grad():
            logits = wrapped(IDS).logits
        assert_close(policy.head.logits(hidden(policy, True)), logits)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"r": 0}, "rank is 0"),
        ({"target_modules": ("q_proj", "nothing")}, "match no linear layer.*nothing"),
        ({"target_modules": ()}, "none given"),
        ({"path": Path("/nowhere")}, "No sampler adapter"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        tiny_policy("llama").add_sampler(LoraSpec(**options))


def test_what_does_not_fit(tmp_path: Path) -> None:
    policy = tiny_policy("llama")
    sampler = with_sampler(policy)
    with pytest.raises(ModelError, match="already"):
        policy.add_sampler(LoraSpec())
    sampler.save(tmp_path)
    with pytest.raises(ModelError, match="of shape"):
        tiny_policy("llama", intermediate_size=80).add_sampler(LoraSpec(path=tmp_path))
    with pytest.raises(ModelError, match="does not fit the model"):
        tiny_policy("llama", num_hidden_layers=2).add_sampler(LoraSpec(path=tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot be read"):
        tiny_policy("llama").add_sampler(LoraSpec(path=tmp_path))
    layer: nn.Module = policy.base.get_submodule(sampler.targets[0])
    with pytest.raises(ModelError, match="must see every token once"), sampler.on(torch.ones(1, 5, dtype=torch.bool)):
        layer(torch.zeros(7, np.asarray(sampler.a[0].shape)[1]))
