"""The attention hook: reaches every layer of every family, gives the model's own logits, refuses what it does not implement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, MistralConfig, PreTrainedConfig
from transformers.models.bert import BertLMHeadModel

from leanroll.errors import ModelError
from leanroll.models import CausalContext, Policy
from leanroll.models.attention import _attention
from tests.tiny import FAMILIES, WINDOW, tiny_model, tiny_policy, tiny_tokenizer

TOKENS = 3 * WINDOW + 1


def some_tokens(batch: int = 2, length: int = TOKENS) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 259, (batch, length), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(length).expand(batch, -1)


def own_logits(policy: Policy, ids: Tensor) -> Tensor:
    """What transformers computes by itself, with the adapter if there is one."""
    policy.base.set_attn_implementation("eager")
    logits = policy.model(input_ids=ids, use_cache=False).logits
    policy.base.set_attn_implementation("leanroll")
    return logits


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_models_own(family: str, adapter: bool) -> None:
    policy = tiny_policy(family, adapter=adapter)
    ids, positions = some_tokens()
    context = CausalContext()
    with torch.no_grad():
        logits = policy.head.logits(policy.hidden(ids, positions, context))
        expected = own_logits(policy, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert [call.layer for call in context.calls] == [0, 1, 2, 3]
    assert tuple(call.window for call in context.calls) == policy.spec.windows


def test_windows_and_caps_are_seen() -> None:
    assert tiny_policy("gemma2").spec.windows == (WINDOW, 0, WINDOW, 0)
    assert tiny_policy("gemma2").spec.softcap == 5.0
    assert tiny_policy("gemma2").head.softcap == 3.0
    assert tiny_policy("gemma3").spec.windows == (WINDOW, 0, WINDOW, 0)
    qwen = {"sliding_window": WINDOW, "max_window_layers": 2}
    assert tiny_policy("qwen2", use_sliding_window=True, **qwen).spec.windows == (0, 0, WINDOW, WINDOW)
    assert tiny_policy("qwen2", use_sliding_window=False, **qwen).spec.windows == (0, 0, 0, 0)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_reaches_the_context_and_keeps_gradients(family: str, adapter: bool) -> None:
    grads = []
    for checkpointing in (False, True):
        policy = tiny_policy(family, adapter=adapter)
        if checkpointing:
            policy.enable_gradient_checkpointing()
        context = CausalContext()
        policy.hidden(*some_tokens(), context).pow(2).mean().backward()
        # The recomputation in the backward pass goes through the same context once more.
        assert len(context.calls) == (8 if checkpointing else 4)
        grads.append({name: p.grad for name, p in policy.trainable_parameters().items() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert len(grads[0]) > 4
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=lambda text, name=name: f"{name}: {text}")


def test_checkpointing_costs_nothing_without_a_graph() -> None:
    policy = tiny_policy("llama")
    policy.enable_gradient_checkpointing()
    with torch.no_grad():
        policy.hidden(*some_tokens(), CausalContext())
    assert not any(module.training for module in policy.model.modules())


def test_padding_mask_raises() -> None:
    policy = tiny_policy("llama")
    ids, positions = some_tokens()
    with pytest.raises(ModelError, match="padding mask"):
        policy.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, leanroll=CausalContext())
    with pytest.raises(ModelError, match="padding mask"):
        policy.decoder(ids, torch.ones_like(ids), positions)


def test_no_context_raises() -> None:
    policy = tiny_policy("llama")
    with pytest.raises(ModelError, match="without a batch context"):
        policy.model(input_ids=some_tokens()[0], use_cache=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"position_bias": torch.zeros(4)}, "position_bias"),
        ({"is_causal": False}, "both directions"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "attention mask"),
    ],
)
def test_unknown_attention_options_raise(options: dict[str, Any], message: str) -> None:
    module = tiny_model("llama").model.layers[0].self_attn
    q = torch.zeros(1, 4, 2, 16)
    arguments = {"attention_mask": None, "leanroll": CausalContext(), "position_ids": torch.zeros(1, 2), **options}
    with pytest.raises(ModelError, match=message):
        _attention(module, q, q[:, :2], q[:, :2], **arguments)


def from_config(config: PreTrainedConfig) -> Policy:
    return Policy(AutoModelForCausalLM.from_config(config), tiny_tokenizer(), name="unknown")


def test_unverified_families_pass_the_check_or_raise() -> None:
    sizes = {"vocab_size": 259, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    mistral = from_config(
        MistralConfig(**sizes, num_key_value_heads=2, intermediate_size=48, sliding_window=WINDOW, head_dim=8)
    )
    assert mistral.spec.windows == (WINDOW, WINDOW)
    gpt2 = from_config(GPT2Config(vocab_size=259, n_embd=32, n_head=4, n_layer=2, n_positions=64))
    assert gpt2.spec.num_kv_heads == 4
    bert = BertLMHeadModel(BertConfig(**sizes, intermediate_size=48, is_decoder=False))
    with pytest.raises(ModelError):
        Policy(bert, tiny_tokenizer(), name="bert")


def test_a_model_that_lies_about_its_attention_is_refused() -> None:
    model = tiny_model("llama")
    model.config.sliding_window = WINDOW  # the configuration claims windows that the layers do not ask for
    with pytest.raises(ModelError, match="windows"):
        Policy(model, tiny_tokenizer(), name="liar")
    model = tiny_model("llama")
    model.config.logit_scale = 0.5
    with pytest.raises(ModelError, match="head"):
        Policy(model, tiny_tokenizer(), name="liar")
    model = tiny_model("gemma2")
    model.model.layers[1].self_attn.attn_logit_softcapping = None
    with pytest.raises(ModelError, match="caps"):
        Policy(model, tiny_tokenizer(), name="liar")
