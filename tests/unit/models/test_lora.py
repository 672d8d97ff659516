"""The leaner LoRA forward: peft's numbers, values and gradients, and peft's behaviour wherever it steps aside."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from leanroll.kernels.products import is_emulated
from leanroll.models import CausalContext, Policy, lora
from leanroll.models.lora import install_lora
from tests.assertions import assert_close
from tests.tiny import FAMILIES, tiny_policy

IDS = torch.randint(3, 259, (1, 24), generator=torch.Generator().manual_seed(2))
POSITIONS = torch.arange(24)[None]


def adapted(policy: Policy) -> list[LoraLinear]:
    return [m for m in policy.model.modules() if isinstance(m, LoraLinear)]


def use_pefts_forward(policy: Policy) -> Policy:
    for layer in adapted(policy):
        del layer.__dict__["forward"]
    return policy


def run(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of a text, and gradients."""
    policy.model.zero_grad()
    logits = policy.head.logits(policy.hidden(IDS, POSITIONS, CausalContext()))
    logprobs = logits.log_softmax(-1)[0, :-1].gather(1, IDS[0, 1:, None])
    (logprobs.sum() / 24).backward()
    return logprobs.detach(), {
        n: p.grad.clone() for n, p in policy.trainable_parameters().items() if p.grad is not None
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_pefts(family: str) -> None:
    policy = tiny_policy(family, adapter=True)
    assert all("forward" in layer.__dict__ for layer in adapted(policy))
    logprobs, gradients = run(policy)
    expected, expected_gradients = run(use_pefts_forward(tiny_policy(family, adapter=True)))
    assert gradients.keys() == expected_gradients.keys() == policy.trainable_parameters().keys()
    assert_close(logprobs, expected)
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], name=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_the_truth_as_peft(family: str) -> None:
    def policy() -> Policy:
        return tiny_policy(family, adapter=True, dtype=torch.bfloat16)

    exact = use_pefts_forward(policy())
    exact.model.float()
    truth, true_gradients = run(exact)
    logprobs, gradients = run(policy())
    pefts, pefts_gradients = run(use_pefts_forward(policy()))
    assert gradients.keys() == true_gradients.keys()
    # A value that rounds the other way changes what all later layers see: single errors vary, sums over the model do not.
    assert (logprobs - truth).norm() <= 1.5 * (pefts - truth).norm()
    ours = sum(float((g - true_gradients[n]).square().sum()) for n, g in gradients.items())
    theirs = sum(float((g - true_gradients[n]).square().sum()) for n, g in pefts_gradients.items())
    assert ours <= 1.5**2 * theirs


def layer_in(dtype: torch.dtype, wide: torch.dtype, bias: bool) -> LoraLinear:
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(24, 17, bias=bias), "default", config=LoraConfig(r=3), r=3, lora_alpha=5).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.base_layer.to(dtype).requires_grad_(False)
    layer.lora_A.to(wide)
    layer.lora_B.to(wide)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_layer_is_pefts(dtype: torch.dtype, bias: bool) -> None:
    plain, leaner = layer_in(dtype, torch.float32, bias), layer_in(dtype, torch.float32, bias)
    assert install_lora(nn.ModuleList([leaner])) == 1
    g = torch.randn(2, 50, 17).to(dtype)
    x = torch.randn(2, 50, 24).to(dtype)
    with torch.no_grad():
        assert_close(leaner(x), plain(x))
    results = []
    for layer in (plain, leaner):
        leaf = x.clone().requires_grad_()
        leaves = [leaf, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        results.append([layer(leaf), *torch.autograd.grad(layer(leaf), leaves, g)])
    for expected, got in zip(*results, strict=True):
        assert got.dtype is expected.dtype
        assert_close(got, expected, dtype)  # on a bf16 layer the gradients of fp32 weights are bf16 products


def test_gradients_by_finite_differences() -> None:
    layer = layer_in(torch.float64, torch.float64, bias=True)
    install_lora(nn.ModuleList([layer]))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True)
    weight, bias = layer.base_layer.weight, layer.base_layer.bias
    assert torch.autograd.gradcheck(lambda *t: lora._LoraProduct.apply(t[0], weight, bias, t[1], t[2], 1.7), (x, a, b))


def test_the_input_is_kept_once_and_not_widened() -> None:
    layers = [layer_in(torch.bfloat16, torch.float32, bias=False) for _ in range(3)]
    install_lora(nn.ModuleList(layers))
    x = torch.randn(400, 24, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[0] == 400:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = [layer(x) for layer in layers]
    low = torch.float32 if is_emulated(x) else torch.bfloat16
    assert sorted((t.shape[1], t.dtype) for t in kept.values()) == [(3, low)] * 3 + [(24, torch.bfloat16)]
    sum(out.sum() for out in outputs).backward()


def test_states_that_are_pefts_own() -> None:
    plain, leaner = layer_in(torch.float32, torch.float32, bias=True), layer_in(torch.float32, torch.float32, bias=True)
    install_lora(nn.ModuleList([leaner]))
    x = torch.randn(5, 24)
    both = (plain, leaner)

    def check() -> None:
        assert torch.equal(leaner(x), plain(x))
        assert lora._plain_adapter(leaner, x) is None

    for layer in both:
        layer._disable_adapters = True
    check()
    for layer in both:
        layer._disable_adapters = False
        layer.merge()
    check()
    for layer in both:
        layer.unmerge()
        layer.base_layer.weight.requires_grad_(True)
    check()
    leaner(x).sum().backward()
    assert leaner.base_layer.weight.grad is not None
    for layer in both:
        layer.base_layer.weight.requires_grad_(False)
        layer.update_layer("second", 2, lora_alpha=4, config=LoraConfig(r=2))
        nn.init.constant_(layer.lora_B["second"].weight, 0.1)
        nn.init.constant_(layer.lora_A["second"].weight, 0.1)
        layer.set_adapter(["default", "second"])
    check()
    for layer in both:
        layer.set_adapter(["second"])
    assert lora._plain_adapter(leaner, x) == "second"
    assert_close(leaner(x), plain(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check()


def test_checkpointing_gives_the_same_gradients() -> None:
    policy = tiny_policy("llama", adapter=True, dtype=torch.bfloat16)
    logprobs, gradients = run(policy)
    policy.enable_gradient_checkpointing()
    again, recomputed = run(policy)
    assert torch.equal(logprobs, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, recomputed[name])


def test_saved_adapters_are_pefts(tmp_path: Path) -> None:
    policy, plain = tiny_policy("llama", adapter=True), use_pefts_forward(tiny_policy("llama", adapter=True))
    assert list(policy.model.state_dict()) == list(plain.model.state_dict())
    policy.base.name_or_path = plain.base.name_or_path = "tiny"
    policy.save_pretrained(tmp_path / "leaner")
    plain.save_pretrained(tmp_path / "plain")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "leaner" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_a_copied_layer_uses_its_own_weights() -> None:
    layer = adapted(tiny_policy("llama", adapter=True))[0]
    copied = copy.deepcopy(layer)
    x = torch.randn(2, 64)
    assert torch.equal(copied(x), layer(x))
    with torch.no_grad():
        copied.lora_B["default"].weight.zero_()
    assert not torch.equal(copied(x), layer(x))
