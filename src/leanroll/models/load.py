"""From a name to a policy: the embedded default, a directory, an adapter's directory, or a hub id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from leanroll.errors import ModelError
from leanroll.models.default import DEFAULT_MODEL, default_model_dir
from leanroll.models.lora import LoraSpec
from leanroll.models.policy import BASE_FILE, Policy
from leanroll.models.spec import refuse_unsupported

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_policy(
    name: str | Path = DEFAULT_MODEL,
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    device: torch.device | str = "cpu",
    adapter: LoraSpec | None = None,
    revision: str | None = None,
) -> Policy:
    """Load a causal LM and its tokenizer.

    name: "smollm2-135m" (embedded, never touches the network), a directory in transformers' or peft's format, or a hub id.
    adapter: LoRA on a frozen base; None trains all weights. The directory of a saved adapter is loaded on its own base model.
    revision: of a hub id.

    Raises:
        ModelError: not found, gated, offline, unreadable, or an architecture that is not supported.
    """
    torch_dtype = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if torch_dtype is None or torch_dtype not in _DTYPES.values():
        raise ModelError(f"dtype {dtype!r} is not supported; expected one of {', '.join(_DTYPES)}.")
    name = str(name)
    folder = Path(name).expanduser()
    if (folder / "adapter_config.json").is_file():
        if adapter is not None and adapter.path is None:
            raise ModelError(
                f"{folder} holds an adapter already, and a new one was asked for; pass adapter=None, or name the base model."
            )
        spec = adapter or LoraSpec(path=folder)
        return load_policy(_base_of(folder), dtype=torch_dtype, device=device, adapter=spec, revision=revision)

    _check_device(torch.device(device))
    local = name == DEFAULT_MODEL or folder.is_dir()
    source = str(default_model_dir()) if name == DEFAULT_MODEL else str(folder) if local else name
    if not local and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(f"No such directory: {name}; expected one with config.json, or a hub id like org/name.")
    if local and revision is not None:
        raise ModelError(f"revision={revision!r} has no effect on the local model {name!r}; leave it out.")
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, local_files_only=local)
        refuse_unsupported(config)  # before gigabytes are read
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, local_files_only=local)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, revision=revision, local_files_only=local, dtype=torch_dtype, output_loading_info=True
        )
    except ModelError:
        raise
    # RuntimeError: shapes that do not fit the configuration. ImportError: a package that this tokenizer or model needs.
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(_explain(name, local, error)) from error
    model, loading = loaded
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights of {name!r} lack {len(missing)} tensors of {type(model).__name__}, such as {missing[0]}, which would "
            "stay random; expected a complete checkpoint of a causal LM."
        )
    torch.nn.Module.to(model, torch.device(device))  # transformers' own `to` is typed for quantised models only
    return Policy(model, tokenizer, name=name, adapter=adapter)


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device is {str(device)!r}, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; use "
            "another one, or 'cpu'."
        )


def _base_of(folder: Path) -> str:
    own, config = folder / BASE_FILE, folder / "adapter_config.json"
    file, key = (own, "base") if own.is_file() else (config, "base_model_name_or_path")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); expected JSON, as save_pretrained writes it.") from error
    base = data.get(key) if isinstance(data, dict) else None
    if not base:
        raise ModelError(
            f"The adapter in {folder} does not name its base model; load the base with adapter=LoraSpec(path=...)."
        )
    return str(base)


def _explain(name: str, local: bool, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if local:
        return f"Cannot load {name} ({reason}); expected a causal LM as save_pretrained writes it, with its tokenizer."
    text = str(error).lower()
    if "gated" in text or "401" in text or "403" in text:
        hint = "the repository is gated or private: accept its terms on the hub and log in with `hf auth login`"
    elif "offline" in text or "connect" in text or "couldn't" in text:
        hint = "the hub cannot be reached: check the connection, or download the model elsewhere and pass its directory"
    else:
        hint = f"check the spelling; expected {DEFAULT_MODEL!r}, a directory, or a hub id like org/name"
    return f"Cannot load the model {name!r} ({reason}): {hint}."
