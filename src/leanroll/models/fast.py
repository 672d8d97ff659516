"""Faster decode steps of any model on CPU: `with fast_decode(policy): ...`.

While the context is active, the forward methods of linear layers (with or without LoRA), gated MLPs, RMS norms, the rotary
embedding and the head are replaced by calls to the C++ kernels wherever a call has few rows and builds no graph. What a module
is, is found by structure, and by watching one decode step for layers that read the same tensor; a replacement is kept only if
it reproduces the module's own output on random input. In the end the whole step is compared. Weights are not copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from leanroll.errors import LeanrollError, ModelError
from leanroll.kernels.cpu.native import native
from leanroll.models.fast_layers import FastGroup, FastHead, FastMlp, FastNorm, FastProduct, FastRope
from leanroll.models.policy import Policy
from leanroll.models.sampler import SamplerAdapter
from leanroll.models.verify import CausalContext

_ROPE = "apply_rotary_pos_emb"
# Relative RMS of a module's output. Both sides accumulate in fp32 (or better). In bf16 one unit in the last place is left, and with
# an adapter another one: its products are fp32 here and bf16 in the module (`models/lora.py`).
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
# The same for the final hidden states of a step: the differences of all layers.
_STEP_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass
class FastPlan:
    """Which replacements agree with the modules of one policy.

    parts: groups of linear layers, MLPs and norms. ropes: modules of Python code whose rotary function is replaced.
    sampler: the adapter the policy had then; its layers' own forward methods are another's with another one.
    head: whether the head's products agree. rejected: what looked right and computed something else; it keeps its own forward.
    """

    parts: list[FastGroup | FastMlp | FastNorm] = field(default_factory=list)
    ropes: dict[ModuleType, FastRope] = field(default_factory=dict)
    head: bool = False
    rejected: list[str] = field(default_factory=list)
    sampler: SamplerAdapter | None = None

    def describe(self) -> str:
        """One line for `leanroll doctor`."""
        counts = {kind: sum(isinstance(part, kind) for part in self.parts) for kind in (FastGroup, FastMlp, FastNorm)}
        return (
            f"{counts[FastGroup]} groups of linear layers, {counts[FastMlp]} MLPs, {counts[FastNorm]} norms, "
            f"{len(self.ropes)} rotary functions and {'the' if self.head else 'no'} head replaced; {len(self.rejected)} rejected"
        )


_PLANS: WeakKeyDictionary[Policy, FastPlan] = WeakKeyDictionary()


@contextmanager
def fast_decode(policy: Policy) -> Iterator[FastPlan]:
    """Replace what can be replaced, and restore it at the end. Nested use is fine.

    The first use on a policy takes a few decode steps to find and verify the replacements.

    Raises:
        ModelError: the policy is not on the CPU, or neither bf16 nor fp32.
        BackendUnavailable: the C++ kernels are not built.
        LeanrollError: all replacements agree by themselves, and the step does not (a bug; use accelerate_modules=False).
    """
    if policy.device.type != "cpu" or policy.dtype not in _TOLERANCE:
        raise ModelError(
            f"fast_decode got a policy in {policy.dtype} on {policy.device}; expected bfloat16 or float32 on the CPU. "
            "Turn accelerate_modules off."
        )
    native()
    plan = _PLANS.get(policy)
    if plan is None or plan.sampler is not policy.sampler:
        with torch.inference_mode():
            plan = _make_plan(policy)
            _verify_step(policy, plan)
        _PLANS[policy] = plan
    with _installed(policy, plan):
        yield plan


@contextmanager
def _installed(policy: Policy, plan: FastPlan) -> Iterator[None]:
    forwards = [pair for part in plan.parts for pair in part.forwards()]
    before = [module.__dict__.get("forward") for module, _ in forwards]
    functions = {code: getattr(code, _ROPE) for code in plan.ropes}
    head = policy.head
    try:
        if plan.head:
            policy.head = FastHead.of(head)
        for module, forward in forwards:
            module.forward = forward
        for code, replacement in plan.ropes.items():
            setattr(code, _ROPE, replacement)
        yield
    finally:
        policy.head = head
        for code, function in functions.items():
            setattr(code, _ROPE, function)
        for (module, _), previous in zip(forwards, before, strict=True):
            if previous is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = previous
        for part in plan.parts:
            part.reset()


def _make_plan(policy: Policy) -> FastPlan:
    plan = FastPlan(sampler=policy.sampler)
    calls = _watch(policy)
    names = {module: name for name, module in policy.decoder.named_modules()}
    dtype = policy.dtype
    inside_mlp: set[nn.Module] = set()
    for module in names:
        if FastMlp.recognises(module):
            mlp = FastMlp(module)
            if _agrees(module, mlp.forwards()[0][1], mlp.inner[0].width, dtype):
                plan.parts.append(mlp)
                inside_mlp.update(module.modules())
            else:
                plan.rejected.append(names[module])
    for group in _groups(calls, inside_mlp):
        products = [p for p in group if _agrees(p.module, FastGroup([p]).forwards()[0][1], p.width, dtype)]
        plan.rejected += [names[p.module] for p in group if p not in products]
        if products:
            plan.parts.append(FastGroup(products))
    for module in names:
        if FastNorm.recognises(module):
            width = module.get_parameter("weight").shape[0]
            candidates = (FastNorm(module, offset, wide) for offset, wide in ((0.0, False), (1.0, True)))
            chosen = next((c for c in candidates if _agrees(module, c.forwards()[0][1], width, dtype)), None)
            if chosen is None:
                plan.rejected.append(names[module])
            else:
                plan.parts.append(chosen)
    plan.ropes = _ropes(policy)
    plan.head = _head_agrees(policy)
    if not plan.head:
        plan.rejected.append("head")
    return plan


def _step(policy: Policy) -> Tensor:
    """Final hidden states of one decode step of two sequences (each attends to its own token alone)."""
    ids = torch.tensor([[3], [5]]) % policy.spec.vocab_size
    return policy.hidden(ids, torch.tensor([[4], [9]]), CausalContext())


def _watch(policy: Policy) -> list[tuple[FastProduct, Tensor]]:
    """The linear layers that one step calls, in order, with what they read."""
    calls: list[tuple[FastProduct, Tensor]] = []
    handles = []
    inner: set[nn.Module] = set()
    for module in policy.decoder.modules():
        if module not in inner and FastProduct.recognises(module):
            inner.update(module.modules())
            product = FastProduct(module)
            handles.append(module.register_forward_pre_hook(lambda _m, args, p=product: calls.append((p, args[0]))))
    try:
        _step(policy)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _groups(calls: list[tuple[FastProduct, Tensor]], excluded: set[nn.Module]) -> list[list[FastProduct]]:
    """Consecutive layers that read the same tensor. A layer that is called twice in a step stays alone."""
    counts: dict[nn.Module, int] = {}
    for product, _ in calls:
        counts[product.module] = counts.get(product.module, 0) + 1
    groups: list[list[FastProduct]] = []
    previous: Tensor | None = None
    seen: set[nn.Module] = set()
    for product, x in calls:
        if product.module in excluded or product.module in seen:
            previous = None
            continue
        seen.add(product.module)
        once = counts[product.module] == 1
        if groups and once and x is previous:
            groups[-1].append(product)
        else:
            groups.append([product])
        previous = x if once else None
    return groups


def _agrees(module: nn.Module, forward: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> bool:
    if any(p.dtype != dtype for name, p in module.named_parameters() if "lora_" not in name):
        return False
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 7):
        # A long-tailed input, as hidden states are.
        x = torch.randn(rows, 1, width, generator=generator).pow(3).to(dtype)
        expected = module(x)
        if not _close(forward(x), expected, _TOLERANCE[dtype]):
            return False
    return True


def _head_agrees(policy: Policy) -> bool:
    head, generator = policy.head, torch.Generator().manual_seed(0)
    x = torch.randn(3, head.weight.shape[1], generator=generator).pow(3).to(head.weight.dtype)
    return _close(FastHead.of(head).logits(x), head.logits(x), _TOLERANCE[torch.float32])


def _close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    error = (got.float() - expected.float()).pow(2).mean().sqrt()
    return bool(error <= tolerance * expected.float().pow(2).mean().sqrt().clamp_min(1e-12))


def _ropes(policy: Policy) -> dict[ModuleType, FastRope]:
    """The rotary functions of the Python modules that the policy's layers are defined in, where ours agrees."""
    found: dict[ModuleType, FastRope] = {}
    heads, dim, dtype = policy.spec.num_heads, policy.spec.head_dim, policy.dtype
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 1, heads, dim, generator=generator).to(dtype).transpose(1, 2)
    angles = torch.rand(3, 1, dim // 2, generator=generator).repeat(1, 1, 2) * 6.0
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for code in {sys.modules[type(module).__module__] for module in policy.decoder.modules()}:
        original = getattr(code, _ROPE, None)
        if original is None:
            continue
        original = original.original if isinstance(original, FastRope) else original
        replacement = FastRope(original)
        pairs = zip(replacement(q, q[:, :1], cos, sin), original(q, q[:, :1], cos, sin), strict=True)
        if all(_close(got, expected, _TOLERANCE[dtype]) for got, expected in pairs):
            found[code] = replacement
    return found


def _verify_step(policy: Policy, plan: FastPlan) -> None:
    expected = _step(policy)
    with _installed(policy, plan):
        got = _step(policy)
    if not _close(got, expected, _STEP_TOLERANCE[policy.dtype]):
        raise LeanrollError(
            f"The accelerated decode step of {policy.name!r} differs from the model's own; this is a bug. Turn "
            "accelerate_modules off and report the model's family."
        )
