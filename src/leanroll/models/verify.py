"""The check every model passes at load: our attention and our head give the model's own logits.

A short random input is run twice, once with transformers' eager attention and once through the hook with a plain causal
context. The families in `spec.VERIFIED_FAMILIES` have tests; any other architecture is accepted on the strength of this
check alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from leanroll.errors import ModelError
from leanroll.models.attention import AttentionCall, install_attention
from leanroll.models.head import LmHead
from leanroll.models.spec import ModelSpec

_NUM_TOKENS = 16
_LONGEST_WINDOW = 64  # windows up to this length are exceeded by the input, so that their masks are compared too
# Relative RMS of the difference of logits. In fp32 both sides round alike; in bf16 and fp16 each layer adds rounding noise.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
# The head alone differs by the model's rounding of its logits (0.0017 measured in bf16).
_HEAD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.01, torch.float16: 0.002}


class CausalContext:
    """Causal attention of a batch of equally long sequences over itself, in fp32, honouring scale, cap and window.

    Keeps nothing between layers but the calls it got. Meant for checks and short inputs: memory is quadratic in the length.
    """

    sparse_rows = False

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.shapes: list[tuple[torch.Size, torch.Size, torch.Size]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """q [B, Hq, T, D], k and v [B, Hk, T, D] → [B, T, Hq, D] in the dtype of q."""
        self.calls.append(call)
        self.shapes.append((q.shape, k.shape, v.shape))
        groups = q.shape[1] // k.shape[1]
        k, v = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
        scores = q.float() @ k.transpose(-1, -2) * call.scale
        if call.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position[None, :]
        visible = distance >= 0
        if call.window:
            visible &= distance < call.window
        scores = scores.masked_fill(~visible, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).to(q.dtype)


@torch.no_grad()
def verify_model(model: PreTrainedModel, decoder: nn.Module, head: LmHead, spec: ModelSpec) -> None:
    """Compare hook and head with the model's own logits; leaves the hook installed.

    Raises:
        ModelError: a difference: in what the layers ask of their attention, in the logits, or in the head.
    """
    windows = [w for w in spec.windows if 0 < w <= _LONGEST_WINDOW]
    num_tokens = min(max([_NUM_TOKENS, *(w + 8 for w in windows)]), spec.max_position)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, spec.vocab_size, (1, num_tokens), generator=generator).to(head.weight.device)
    positions = torch.arange(num_tokens, device=ids.device)[None]

    model.set_attn_implementation("eager")
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    install_attention(model)
    context = CausalContext()
    captured: list[Tensor] = []
    handle = decoder.register_forward_hook(lambda _module, _args, out: captured.append(out.last_hidden_state))
    try:
        own = model(input_ids=ids, position_ids=positions, use_cache=False, leanroll=context).logits.float()
    finally:
        handle.remove()

    name = type(model).__name__
    _check_calls(name, context, spec)
    tolerance = _TOLERANCE[head.weight.dtype]
    difference = _relative_rms(own, expected)
    if not difference <= tolerance:
        raise ModelError(
            f"{name}: logits through leanroll's attention differ from the model's own by {difference:.2g} (relative "
            f"RMS), expected at most {tolerance}. Its attention does something that is not supported; use another model."
        )
    tolerance = _HEAD_TOLERANCE[head.weight.dtype]
    difference = _relative_rms(head.logits(captured[-1]), own)
    if not difference <= tolerance:
        raise ModelError(
            f"{name}: logits of its head differ from the model's own by {difference:.2g} (relative RMS), expected at most "
            f"{tolerance}. The head is more than a linear layer, a scale and a cap; use another model."
        )


def _check_calls(name: str, context: CausalContext, spec: ModelSpec) -> None:
    layers = [call.layer for call in context.calls]
    if layers != list(range(spec.num_layers)):
        raise ModelError(
            f"{name}: attention was called for layers {layers}, expected each of the {spec.num_layers} layers once and in order. "
            "Architectures with other layers than attention, or with an attention of their own, are not supported."
        )
    windows = tuple(call.window for call in context.calls)
    if windows != spec.windows:
        raise ModelError(
            f"{name}: layers ask for windows {windows}, its configuration says {spec.windows}; not supported."
        )
    caps = {call.softcap for call in context.calls}
    if caps != {spec.softcap}:
        raise ModelError(
            f"{name}: layers ask for score caps {sorted(caps)}, its configuration says {spec.softcap}; not supported."
        )
    for layer, (q, k, v) in enumerate(context.shapes):
        got = (q[1], k[1], v[1], q[3], k[3], v[3])
        expected = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim, spec.head_dim)
        if got != expected:
            raise ModelError(
                f"{name}: layer {layer} attends with (query heads, key heads, value heads, their dims) = {got}, expected "
                f"{expected} in every layer; such a model is not supported."
            )


def _relative_rms(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt().clamp_min(1e-12))
