"""What is trained, split over the processes by FSDP2 (`torch.distributed.fsdp.fully_shard`): `train.sharding = "fsdp2"`.

Each process keeps a shard of every trained parameter in fp32, which is the master AdamW works on, and of its moments and summed
gradient. The engine, scoring and backward passes want whole weights. FSDP2 gathers and frees them in the forward and backward of
the modules it wraps; here processes have different numbers of those, sometimes none, and some would wait for ever. So it wraps
groups of modules that are never called, and weights are gathered and freed at places which all processes come to:

    whole weights: rollouts, scoring, backward passes → freed → gradients reduced to shards → AdamW on shards → whole weights

Whole weights are in the model's dtype: FSDP2 rounds the fp32 shards on their way. Frozen parameters (below a LoRA adapter) are left
as they are. The parameter objects of the whole weights stay the same ones, so references to them never go stale.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from leanroll.errors import ConfigError, ModelError
from leanroll.models import Policy
from leanroll.train.optim import MasterAdamW, check_shapes
from leanroll.train.ranks import Ranks, peers

_BY_ROWS = (Shard(0),)


class _Group(nn.Module):
    """Modules whose parameters FSDP2 gathers together."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)


class ShardedWeights:
    """The trained parameters of a policy, whole or as shards. Whole after construction.

    parameters: name → whole parameter, in the model's order; without storage while freed. shapes: theirs. masters: name → this
        process's rows in fp32, [rows / processes, ...]; the last processes may have fewer, or none.
    """

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        """Split the parameters, in place. Called by all ranks together, on equal weights.

        Raises:
            ConfigError: nothing is trained. ModelError: a parameter without rows.
        """
        if not policy.trainable_parameters():
            raise ConfigError("The model has no trainable parameter; give it a LoRA adapter or unfreeze its weights.")
        scalars = [name for name, p in policy.trainable_parameters().items() if p.dim() == 0]
        if scalars:
            raise ModelError(
                f"FSDP2 splits parameters by rows, but {scalars[0]} of {policy.name!r} is a single number; leave sharding out."
            )
        self._policy, self._ranks = policy, ranks
        self._mesh: DeviceMesh = init_device_mesh(policy.device.type, (ranks.size,))
        # Asked before FSDP2 is there: its hooks on `state_dict` free the weights.
        self._keys = list(policy.model.state_dict())
        self._groups = [self._split(*group) for group in _cut(policy)]
        shards = policy.trainable_parameters()
        self.shapes = {name: p.shape for name, p in shards.items()}
        self.masters: dict[str, Tensor] = {name: _local(p) for name, p in shards.items()}
        self.is_whole = False
        self.gather()
        self.parameters = policy.trainable_parameters()
        policy.refresh_head()

    def gather(self) -> None:
        """Make the weights whole, as the masters say; nothing where they are. Called by all ranks together."""
        if self.is_whole:
            return
        self._ranks.gather(None, "weights")  # a rank that failed is met here, not missed below
        with peers():
            for group in self._groups:
                group.unshard()
        self.is_whole = True

    def free(self) -> None:
        """Keep shards alone."""
        for group in self._groups:
            group.reshard()
        self.is_whole = False

    def reduce(self, grad: Tensor) -> Tensor:
        """Sum tensors of one parameter's shape over the ranks; returns this rank's rows. Called by all ranks together."""
        with peers():
            partial = DTensor.from_local(grad.contiguous(), self._mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=_BY_ROWS).to_local()

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor of a parameter's shape."""
        chunks = whole.chunk(self._ranks.size)
        return chunks[self._ranks.rank] if self._ranks.rank < len(chunks) else whole[:0]

    def put_together(self, name: str, rows: Tensor) -> Tensor:
        """The rows of all ranks, of a parameter or of what has its shape. Called by all ranks together."""
        shape = self.shapes[name]
        with peers():
            spread = DTensor.from_local(
                rows,
                self._mesh,
                _BY_ROWS,
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )
            return spread.full_tensor()

    def state_dict(self) -> dict[str, Tensor]:
        """Of the policy's model, whole, without copies; what the model's own would be without sharding."""
        model = self._policy.model
        tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        return {key: tensors[key].detach() for key in self._keys}

    def _split(self, members: Sequence[nn.Module], own: set[nn.Parameter], dtype: torch.dtype) -> FSDPModule:
        group = _Group(members)
        for parameter in own:
            parameter.data = parameter.data.float()
        policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype)
        others = {p for p in group.parameters() if p not in own}
        sharded: FSDPModule = fully_shard(group, mesh=self._mesh, mp_policy=policy, ignored_params=others)
        return sharded


class ShardedAdamW(MasterAdamW):
    """AdamW on the shards of `ShardedWeights`. Steps, norms and states are those of `MasterAdamW`, up to the order of sums.

    `sum_over`, `step`, `state_dict` and `load_state_dict` are called by all ranks together.
    """

    def __init__(self, weights: ShardedWeights, ranks: Ranks, **options: Any) -> None:
        """options: of `MasterAdamW`."""
        super().__init__(weights.parameters.items(), masters=weights.masters, **options)
        self._weights, self._ranks = weights, ranks
        # Gradients in fp32 of whole parameters in another dtype; fp32 parameters hold their own.
        self._sums: dict[str, Tensor] = {}
        self._reduced = False

    def accumulate(self) -> None:
        for name, p in self.parameters.items():
            if p.dtype == torch.float32 or p.grad is None:
                continue
            if name in self._sums:
                self._sums[name] += p.grad
            else:
                self._sums[name] = p.grad.float()
            p.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Own and whole before `sum_over`; after it this rank's rows of the sum."""
        if self._reduced:
            return super().gradients()
        own = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        return own | self._sums

    def grad_norm(self) -> float:
        """Of the own gradients before `sum_over`; after it of the sum, asked by all ranks together."""
        norm = super().grad_norm()
        return math.hypot(*self._ranks.gather(norm, "gradient norm")) if self._reduced else norm

    def sum_over(self, ranks: Ranks) -> None:
        own = self.gradients()
        present = set(ranks.join_lists(list(own), "gradients"))
        self._weights.free()
        for name in [name for name in self.parameters if name in present]:
            grad = own.pop(name, None)
            whole = torch.zeros(self._weights.shapes[name], device=self.masters[name].device) if grad is None else grad
            del grad
            self._sums.pop(name, None)
            self.parameters[name].grad = None  # or all of them would be held until the last is reduced
            self.masters[name].grad = self._weights.reduce(whole)
        self._reduced = True

    def checksum(self) -> float:
        """Of the whole weights as this rank has gathered them: shards are not the same on two ranks."""
        return float(
            sum(p.detach().double().sum() + p.detach().double().square().sum() for p in self.parameters.values())
        )

    def zero_grad(self) -> None:
        """Drop all gradients; whole weights are back, as after a step, where `sum_over` had freed them."""
        super().zero_grad()
        self._sums.clear()
        self._reduced = False
        self._weights.gather()

    def state_dict(self) -> dict[str, Any]:
        """As without sharding, on the CPU; empty on ranks other than the main one."""
        masters = {name: self._whole(name, m.detach()) for name, m in self.masters.items()}
        adamw, names = self.adamw.state_dict(), self._names()
        adamw["state"] = {
            index: {key: self._whole(names[index], v) if _is_moment(v) else v for key, v in state.items()}
            for index, state in adamw["state"].items()
        }
        return {"masters": masters, "adamw": adamw} if self._ranks.is_main else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_shapes(state["masters"], self._weights.shapes)
        rows = self._weights.rows
        moments = {
            index: {key: rows(v).clone() if _is_moment(v) else v for key, v in own.items()}
            for index, own in state["adamw"]["state"].items()
        }
        masters = {name: rows(tensor) for name, tensor in state["masters"].items()}
        super().load_state_dict({"masters": masters, "adamw": {**state["adamw"], "state": moments}})

    def _round_into_model(self) -> None:
        self._weights.free()
        self._weights.gather()

    def _names(self) -> list[str]:
        """By the indices that AdamW's state has."""
        names = {id(m): name for name, m in self.masters.items()}
        return [names[id(m)] for group in self.adamw.param_groups for m in group["params"]]

    def _whole(self, name: str, rows: Tensor) -> Tensor:
        whole = self._weights.put_together(name, rows)
        return whole.cpu() if self._ranks.is_main else rows


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _cut(policy: Policy) -> list[tuple[list[nn.Module], set[nn.Parameter], torch.dtype]]:
    """Groups of trained parameters of one dtype: modules they are in, and which they are. One layer each, and the rest."""
    layers = [m for m in policy.base.modules() if isinstance(m, GradientCheckpointingLayer)]
    layer_of = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
    homes: dict[nn.Parameter, set[int | None]] = defaultdict(set)
    for module in policy.model.modules():
        for parameter in module.parameters(recurse=False):
            homes[parameter].add(layer_of.get(module))
    groups: dict[tuple[int | None, torch.dtype], set[nn.Parameter]] = defaultdict(set)
    for parameter in policy.trainable_parameters().values():
        places = homes[parameter]  # several where layers share it
        groups[next(iter(places)) if len(places) == 1 else None, parameter.dtype].add(parameter)
    return [([policy.model if home is None else layers[home]], own, dtype) for (home, dtype), own in groups.items()]


def _local(parameter: nn.Parameter) -> Tensor:
    shard = parameter.detach()
    assert isinstance(shard, DTensor)
    return shard.to_local()
