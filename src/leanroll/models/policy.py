"""The policy: one set of module objects that the rollout engine samples from and the trainer updates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from leanroll.errors import ModelError
from leanroll.models.attention import AttentionContext, install_attention, reject_padding
from leanroll.models.head import LmHead, read_head
from leanroll.models.linear import install_linear
from leanroll.models.lora import LoraSpec, install_lora
from leanroll.models.sampler import SamplerAdapter
from leanroll.models.spec import ModelSpec, read_spec, stop_token_ids
from leanroll.models.verify import verify_model

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BASE_FILE = "leanroll_base.json"
"""Written beside an adapter: the name its base model was loaded by."""


class Policy:
    """A causal LM, its tokenizer and its version.

    model: the PreTrainedModel, or the PeftModel around it. decoder: the part that ends in `.last_hidden_state`, adapters included.
    head: from hidden states to logits. version: grows with every update of the weights; rollouts carry it.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str, adapter: LoraSpec | None = None
    ) -> None:
        """Take over a loaded model: hook its attention, check it against its own logits, add the adapter.

        name: what the model was loaded by. The model's modules are changed in place and stay in eval mode.

        Raises:
            ModelError: the model, its tokenizer or the adapter is not supported.
        """
        dtype = next(model.parameters()).dtype
        if dtype not in SUPPORTED_DTYPES:
            raise ModelError(f"The model is in {dtype}; expected one of {', '.join(map(str, SUPPORTED_DTYPES))}.")
        _remove_dropout(model)
        model.eval()
        install_attention(model)
        install_linear(model)
        self.name = name
        self.tokenizer = tokenizer
        self.decoder: nn.Module = model.get_decoder()
        self.head: LmHead = read_head(model)
        self.spec: ModelSpec = read_spec(model, tokenizer)
        verify_model(model, self.decoder, self.head, self.spec)
        self.decoder.register_forward_pre_hook(_reject_mask, with_kwargs=True)
        self.base: PreTrainedModel = model
        self.model: PreTrainedModel | PeftModel = model
        if adapter is None:
            model.requires_grad_(True)
        else:
            self.model = _add_adapter(model, adapter)
            install_lora(self.model)
        self.sampler: SamplerAdapter | None = None
        self.version = 0
        self._checkpointed: list[GradientCheckpointingLayer] = []

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the base weights and the hidden states."""
        return self.head.weight.dtype

    @property
    def has_adapter(self) -> bool:
        return isinstance(self.model, PeftModel)

    def bump_version(self) -> int:
        """Note that the weights have changed; returns the new version."""
        self.version += 1
        return self.version

    def hidden(self, input_ids: Tensor, position_ids: Tensor, ctx: AttentionContext) -> Tensor:
        """Final hidden states [B, T, H] of input_ids [B, T] at position_ids [B, T], attending through ctx."""
        if self._checkpointed:
            self._checkpoint_in_backward_only()
        with nullcontext() if self.sampler is None else self.sampler.on(ctx.sparse_rows):
            out = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, leanroll=ctx)
        return out.last_hidden_state

    def add_sampler(self, spec: LoraSpec) -> SamplerAdapter:
        """Give the policy a sampler adapter (`models.sampler`): it counts at tokens that attend sparsely, nowhere else.

        Raises:
            ModelError: the policy has one already, or it cannot be made.
        """
        self.sampler = SamplerAdapter(self.base, self.decoder, spec, self.dtype)
        return self.sampler

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, no parameter of the policy itself needs a gradient; the sampler adapter's do. For forward and backward."""
        parameters = list(self.trainable_parameters().values())
        try:
            for parameter in parameters:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Name → parameter, of those with requires_grad, in the model's order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        """Inside, the model is its frozen base (reference log-probs). Without an adapter this raises ModelError.

        Unlike peft's own context manager this touches no requires_grad, and it restores what it found. A backward pass
        with gradient checkpointing recomputes the forward: it must run in the same context as the forward did.
        """
        layers = [m for m in self.model.modules() if isinstance(m, BaseTunerLayer)]
        if not layers:
            raise ModelError(
                "The policy has no adapter to disable; a full fine-tune needs a reference copy of the model instead."
            )
        before = [layer.disable_adapters for layer in layers]
        try:
            for layer in layers:
                layer._disable_adapters = True
                if not layer.disable_adapters:  # peft keeps this flag in a private attribute: notice if that changes
                    raise ModelError(
                        "This version of peft keeps the adapter switch elsewhere; install a supported version."
                    )
            yield
        finally:
            for layer, flag in zip(layers, before, strict=True):
                layer._disable_adapters = flag

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward pass instead of keeping its activations (non-reentrant, same context object)."""
        layers = [m for m in self.base.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise ModelError(f"{type(self.base).__name__} does not support gradient checkpointing; turn it off.")
        options = {"use_reentrant": False, "context_fn": self._recompute_contexts}
        model: Any = self.base
        if hasattr(model, "activation_checkpointing_enable"):  # its name in newer transformers
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        self._checkpointed = layers
        self._checkpoint_in_backward_only()

    def _recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        # Asked when a layer's forward begins. When it is recomputed, `hidden` has long returned.
        return nullcontext(), nullcontext() if self.sampler is None else self.sampler.as_now()

    def _checkpoint_in_backward_only(self) -> None:
        # transformers checkpoints a layer when the layer is in training mode. Only that flag of the layer itself is set,
        # and only when a graph is being built: everything inside stays in eval mode, and rollouts do not pay.
        wanted = torch.is_grad_enabled()
        if self._checkpointed[0].training != wanted:
            for layer in self._checkpointed:
                layer.training = wanted

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant's next message starts.

        Raises:
            ModelError: the tokenizer has no chat template, or it is broken or refuses such a conversation.
        """
        if self.tokenizer.chat_template is None:
            raise ModelError(
                f"The tokenizer of {self.name!r} has no chat template, which chat prompts need; use an "
                "instruction-tuned model, or set tokenizer.chat_template and save the tokenizer."
            )
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ModelError(
                f"The chat template of {self.name!r} does not take a conversation of [{roles}] ({type(error).__name__}: "
                f"{error}); leave a system prompt out if it is that, or give another template (model.chat_template)."
            ) from error
        return list(encoded["input_ids"])

    def set_chat_template(self, template: str) -> None:
        """Use another chat template (Jinja text); the token that ends a turn in it becomes a stop token."""
        self.tokenizer.chat_template = template
        self.spec = replace(self.spec, has_chat_template=True, stop_token_ids=stop_token_ids(self.base, self.tokenizer))

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens the tokenizer puts around a document's start."""
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def refresh_head(self) -> None:
        """Read the head's parameters anew, after the model got other ones."""
        self.head = read_head(self.base)

    def save_pretrained(self, directory: Path | str, *, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapter (peft format) or the whole model (transformers format), with the tokenizer. Not atomic by itself.

        state_dict: the model's, where its own method is not to be asked for it.
        """
        state: Any = None if state_dict is None else dict(state_dict)
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if isinstance(self.model, PeftModel):
            # "auto" would ask the hub whether the base model's vocabulary was resized.
            self.model.save_pretrained(str(directory), save_embedding_layers=False, state_dict=state)
            (directory / BASE_FILE).write_text(json.dumps({"base": self.name}) + "\n")
        else:
            self.model.save_pretrained(directory, state_dict=state)
        self.tokenizer.save_pretrained(directory)


def _reject_mask(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    reject_padding(kwargs.get("attention_mask", args[1] if len(args) > 1 else None))


def _remove_dropout(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    for field in (
        "attention_dropout",
        "attn_pdrop",
        "resid_pdrop",
        "embd_pdrop",
        "hidden_dropout",
        "residual_dropout",
        "embedding_dropout",
        "activation_dropout",
        "dropout",
    ):
        if getattr(config, field, None):
            setattr(config, field, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def _add_adapter(model: PreTrainedModel, spec: LoraSpec) -> PeftModel:
    if spec.path is not None:
        return _load_adapter(model, spec.path)
    if spec.r < 1:
        raise ModelError(f"LoRA rank {spec.r} is not possible; expected r ≥ 1.")
    targets = spec.target_modules if isinstance(spec.target_modules, str) else list(spec.target_modules)
    config = LoraConfig(
        r=spec.r,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # peft takes any number
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        try:
            wrapped = get_peft_model(model, config)
        except ValueError as error:
            raise ModelError(
                f"LoRA cannot be put on target_modules={spec.target_modules!r} ({error}); name linear layers of the model, or use "
                '"all-linear".'
            ) from error
    assert isinstance(wrapped, PeftModel)
    return wrapped.eval()


def _load_adapter(model: PreTrainedModel, path: Path) -> PeftModel:
    if not (path / "adapter_config.json").is_file():
        raise ModelError(f"No adapter in {path}: expected adapter_config.json, as peft's save_pretrained writes it.")
    config = PeftConfig.from_pretrained(str(path))
    if not isinstance(config, LoraConfig) or config.modules_to_save or config.bias != "none":
        raise ModelError(
            f"The adapter in {path} is {type(config).__name__} with modules_to_save={getattr(config, 'modules_to_save', None)} and "
            f"bias={getattr(config, 'bias', None)!r}; expected plain LoRA with neither."
        )
    config.lora_dropout = 0.0
    config.inference_mode = False
    try:
        return PeftModel.from_pretrained(
            model, str(path), config=config, is_trainable=True, local_files_only=True
        ).eval()
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"The adapter in {path} does not fit {type(model).__name__} ({error}); load the model it was made for."
        ) from error
