"""Policy: adapters, head, saving and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, CohereConfig, GraniteConfig

from leanroll.errors import ModelError
from leanroll.models import CausalContext, LmHead, LoraSpec, Policy, load_policy
from tests.tiny import FAMILIES, tiny_model, tiny_policy, tiny_tokenizer

IDS = torch.randint(3, 259, (1, 12), generator=torch.Generator().manual_seed(2))
POSITIONS = torch.arange(12)[None]


@torch.no_grad()
def logits_of(policy: Policy) -> torch.Tensor:
    return policy.head.logits(policy.hidden(IDS, POSITIONS, CausalContext()))


def test_adapter_freezes_the_base_and_full_does_not() -> None:
    with_adapter, full = tiny_policy("llama", adapter=True), tiny_policy("llama")
    assert all("lora_" in name for name in with_adapter.trainable_parameters())
    assert all(p.requires_grad for p in full.model.parameters())
    assert with_adapter.has_adapter
    assert not full.has_adapter


def test_adapter_disabled_is_the_base_and_restores() -> None:
    policy, base = tiny_policy("gemma3", adapter=True), tiny_policy("gemma3")
    before = logits_of(policy)
    trainable = set(policy.trainable_parameters())
    with policy.adapter_disabled():
        assert torch.equal(logits_of(policy), logits_of(base))
        assert set(policy.trainable_parameters()) == trainable
        with policy.adapter_disabled():
            pass
        assert torch.equal(logits_of(policy), logits_of(base))
    assert torch.equal(logits_of(policy), before)
    assert not torch.allclose(before, logits_of(base), atol=1e-2)


def test_adapter_disabled_restores_after_an_error() -> None:
    policy = tiny_policy("llama", adapter=True)
    before = logits_of(policy)
    with pytest.raises(RuntimeError, match="stop"), policy.adapter_disabled():
        raise RuntimeError("stop")
    assert torch.equal(logits_of(policy), before)


def test_adapter_disabled_without_adapter_raises() -> None:
    with pytest.raises(ModelError, match="no adapter"), tiny_policy("llama").adapter_disabled():
        pass


def test_adapter_initialisation_depends_on_its_seed_alone() -> None:
    first, second, other = (
        Policy(tiny_model("llama"), tiny_tokenizer(), name="x", adapter=LoraSpec(seed=seed)).trainable_parameters()
        for seed in (3, 3, 4)
    )
    name = next(n for n in first if "lora_A" in n)
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], other[name])


def test_bad_adapters_raise(tmp_path: Path) -> None:
    for spec in (LoraSpec(r=0), LoraSpec(target_modules=("no_such_layer",)), LoraSpec(path=tmp_path)):
        with pytest.raises(ModelError):
            Policy(tiny_model("llama"), tiny_tokenizer(), name="x", adapter=spec)


def test_dropout_is_removed() -> None:
    policy = tiny_policy("llama", attention_dropout=0.5)
    policy.model.train()
    assert torch.equal(logits_of(policy), logits_of(policy))


def test_bf16_policy_has_a_wide_adapter() -> None:
    policy = tiny_policy("qwen2", adapter=True, dtype=torch.bfloat16)
    assert policy.dtype == torch.bfloat16
    assert {p.dtype for p in policy.trainable_parameters().values()} == {torch.float32}
    assert policy.hidden(IDS, POSITIONS, CausalContext()).dtype == torch.bfloat16


def test_version_grows() -> None:
    policy = tiny_policy("llama")
    assert policy.version == 0
    assert policy.bump_version() == 1 == policy.version


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_accumulates_in_fp32(dtype: torch.dtype) -> None:
    hidden = torch.randn(3, 5, 64, dtype=dtype)
    weight, bias = torch.randn(20_000, 64, dtype=dtype), torch.randn(20_000, dtype=dtype)
    head = LmHead(weight, bias, softcap=30.0, scale=0.5)
    expected = 0.5 * F.linear(hidden.double(), weight.double(), bias.double())
    expected = 30.0 * torch.tanh(expected / 30.0)
    logits = head.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)


def test_head_is_differentiable() -> None:
    hidden = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(9000, 64, dtype=torch.bfloat16, requires_grad=True)
    LmHead(weight).logits(hidden).logsumexp(-1).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert weight.grad[8500:].abs().sum() > 0


def test_scaled_heads() -> None:
    sizes = {"vocab_size": 259, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48}
    for config in (CohereConfig(**sizes, logit_scale=0.25), GraniteConfig(**sizes, logits_scaling=4.0)):
        policy = Policy(AutoModelForCausalLM.from_config(config), tiny_tokenizer(), name="scaled")
        assert policy.head.scale == 0.25


@pytest.mark.parametrize("family", FAMILIES)
def test_full_model_round_trip(family: str, tmp_path: Path) -> None:
    policy = tiny_policy(family)
    policy.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, logits_of(policy), rtol=1e-4, atol=1e-4)
    again = load_policy(tmp_path, dtype="float32")
    assert torch.equal(logits_of(again), logits_of(policy))
    assert again.encode_chat([{"role": "user", "content": "hi"}]) == policy.encode_chat(
        [{"role": "user", "content": "hi"}]
    )


def test_adapter_round_trip(tmp_path: Path) -> None:
    tiny_policy("qwen3").save_pretrained(tmp_path / "base")
    policy = load_policy(tmp_path / "base", dtype="float32", adapter=LoraSpec(r=2))
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.normal_(std=0.1)
    policy.save_pretrained(tmp_path / "adapter")
    expected = logits_of(policy)

    assert torch.equal(logits_of(load_policy(tmp_path / "adapter", dtype="float32")), expected)
    resumed = load_policy(tmp_path / "base", dtype="float32", adapter=LoraSpec(path=tmp_path / "adapter"))
    assert torch.equal(logits_of(resumed), expected)
    assert set(resumed.trainable_parameters()) == set(policy.trainable_parameters())
    plain = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").eos_token == "<|end|>"


def test_adapter_of_another_model_raises(tmp_path: Path) -> None:
    tiny_policy("llama", adapter=True).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="does not fit"):
        Policy(tiny_model("llama", hidden_size=32), tiny_tokenizer(), name="x", adapter=LoraSpec(path=tmp_path))


def test_chat_is_encoded_up_to_the_assistants_turn() -> None:
    policy = tiny_policy("llama")
    ids = policy.encode_chat([{"role": "user", "content": "hé"}])
    assert policy.decode(ids, skip_special_tokens=False) == "<|start|>user\nhé<|end|>\n<|start|>assistant\n"
    assert policy.decode(ids) == "user\nhé\nassistant\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [("./nowhere", "No such directory"), ("/nowhere/at/all", "No such directory"), ("a/b/c", "No such directory")],
)
def test_missing_models_raise(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_policy(name)


def test_hub_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"some-org/no-such-model.*(hub|spelling)"):
        load_policy("some-org/no-such-model")


def test_unreadable_directory_and_useless_options_raise(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="save_pretrained"):
        load_policy(tmp_path)
    with pytest.raises(ModelError, match="revision"):
        load_policy(tmp_path, revision="main")
    with pytest.raises(ModelError, match="dtype"):
        load_policy(tmp_path, dtype="int8")


def _saved(folder: Path) -> Path:
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_damaged_and_incomplete_weights_raise(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lack 1 tensors"):
        load_policy(folder, dtype="float32")
    save_file({k: v[:-1].clone() for k, v in tensors.items()}, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="Cannot load"):
        load_policy(folder, dtype="float32")
    weights.write_bytes(b"not a tensor file at all")
    with pytest.raises(ModelError, match="Cannot load"):
        load_policy(folder, dtype="float32")


def test_a_device_that_is_not_there_raises(tmp_path: Path) -> None:
    device = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ModelError, match="CUDA devices"):
        load_policy(_saved(tmp_path), dtype="float32", device=device)


def test_malformed_adapter_configuration_raises(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="expected JSON"):
        load_policy(tmp_path, dtype="float32")


def test_chat_templates_that_raise_are_the_users_business() -> None:
    policy = tiny_policy("llama")
    for template in ("{{ raise_exception('no system') }}", "{% for"):
        policy.set_chat_template(template)
        with pytest.raises(ModelError, match=r"conversation of \[system\]"):
            policy.encode_chat([{"role": "system", "content": "x"}])
    policy.set_chat_template("{% for m in messages %}{{ m['content'] + '<|start|>' }}{% endfor %}")
    assert policy.spec.stop_token_ids == (1, 2)
