"""DistillSparse: train the sampler's own adapter, so that sparse attention samples what the dense policy would.

    L = ppo_weight · (clipped policy loss of the sparse sampler) + kl_weight · sum_t w_t KL(sparse_t ‖ dense_t)

on the completions of the step, over the full vocabulary, by the pages and budgets that sampled them. The policy is frozen; the
dense side is the policy before its own update. Weights of tokens are computed once for the step, so gradients do not depend on the
size of micro-batches. Source: Sparrow, arXiv 2606.08446 (DistillSparse).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from leanroll.config import OptimizerConfig, RLConfig, SamplerAdapterConfig
from leanroll.errors import ConfigError, ModelError, TrainingDiverged
from leanroll.losses.distill import divergence
from leanroll.losses.policy import completion_mask, denominators, policy_loss
from leanroll.losses.tail import needs_alpha, tail_weights
from leanroll.measure.head import acceptance_rates, token_logprobs
from leanroll.measure.logprobs import batch_hidden, batch_support, hidden_states
from leanroll.measure.packing import PackedBatch, pack
from leanroll.measure.selection import SparsePlan, tokens_past_dense
from leanroll.models import Policy
from leanroll.models.head import LmHead
from leanroll.train.optim import MasterAdamW
from leanroll.train.stepper import Stepper
from leanroll.train.update import TrainingGroup
from leanroll.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class DenseTargets:
    """The policy before its update. states: per rollout of the flattened groups, final hidden states [T, H], on the CPU."""

    states: tuple[Tensor, ...]
    head: LmHead


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """What the sampler's policy loss needs, per rollout of the flattened groups (N of them).

    advantages, divisors: [N]. clip_low, clip_high, delta: see `losses.policy.policy_loss`. mask_truncated: leave out completions
    that were cut.
    """

    advantages: Tensor
    divisors: Tensor
    clip_low: float
    clip_high: float
    delta: float | None
    mask_truncated: bool

    @classmethod
    def of(cls, config: RLConfig, groups: Sequence[TrainingGroup]) -> PolicyTerms:
        """As the policy's own loss has them."""
        rl = config.rl
        rollouts = [r for g in groups for r in g.group.rollouts]
        counted = [
            len(r.token_ids) * (not rl.mask_truncated_completions or r.finish_reason == "stop") for r in rollouts
        ]
        return cls(
            advantages=torch.from_numpy(np.concatenate([g.advantages for g in groups])),
            divisors=denominators(
                rl.loss_type,
                torch.tensor(counted),
                max_completion_length=config.rollout.max_completion_length,
            ),
            clip_low=rl.epsilon,
            clip_high=rl.epsilon_high,
            delta=rl.delta,
            mask_truncated=rl.mask_truncated_completions,
        )


class SamplerModule(nn.Module):
    """The sparse sampler from packed tokens to hidden states and log-probs, as one forward (see `train.policy_module`)."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model, self.sampler = policy.model, policy.sampler
        self._policy = policy

    def forward(
        self, batch: PackedBatch, plan: SparsePlan, temperature: float, *, with_logprobs: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [R, H] that predict the completion tokens, and the tokens' log-probs [R]; both differentiable."""
        hidden = batch_hidden(self._policy, batch, plan)
        if not with_logprobs:
            return hidden, None
        support = batch_support(batch, hidden.device)
        return hidden, token_logprobs(hidden, self._policy.head, batch.targets, temperature, support=support).logprobs


@dataclass(frozen=True, slots=True)
class _Work:
    """The rollouts of a step that sparse attention touches. samples: their indices in the flattened groups of the step.

    counts, weights: per one of these rollouts, bool [T] and float64 [T]: tokens that count, and their weights in the KL.
    """

    groups: list[RolloutGroup]
    samples: list[int]
    counts: list[np.ndarray]
    weights: list[np.ndarray]
    alpha_p05: float | None = None


class SamplerAdapterTrainer:
    """Updates a policy's sampler adapter; has an optimizer of its own. `state_dict` and the adapter's folder are all its state."""

    def __init__(
        self,
        policy: Policy,
        plan: SparsePlan,
        accelerator: Accelerator,
        config: SamplerAdapterConfig,
        optimizer: OptimizerConfig,
        *,
        temperature: float,
        max_tokens: int,
    ) -> None:
        """plan: pages and budgets of the engine. temperature: of both distributions. max_tokens: inputs per micro-batch.

        Raises:
            ModelError: the policy has no sampler adapter. ConfigError: the schedule is dense.
        """
        if policy.sampler is None:
            raise ModelError("The policy has no sampler adapter to train; give it one with add_sampler.")
        if plan.schedule.is_dense:
            raise ConfigError(
                f"A sampler adapter has no effect with the schedule {plan.schedule.name!r}, which reads every page; leave it "
                "out, or use a sparse schedule."
            )
        self._policy, self.plan, self._config = policy, plan, config
        self._temperature, self._max_tokens = temperature, max_tokens
        self._module = SamplerModule(policy)
        self._optimizer = MasterAdamW(
            policy.sampler.trainable_parameters().items(),
            lr=config.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self._stepper = Stepper(policy, self._optimizer, accelerator, max_grad_norm=optimizer.max_grad_norm)

    def targets(self, groups: Sequence[RolloutGroup]) -> DenseTargets:
        """The dense side as the policy is now: call it before the policy's update."""
        states = tuple(s.to("cpu") for s in hidden_states(self._policy, groups, self._max_tokens))
        head = self._policy.head
        weight, bias = (
            None if t is None else t.detach().clone() if t.requires_grad else t for t in (head.weight, head.bias)
        )
        assert weight is not None
        return DenseTargets(states, replace(head, weight=weight, bias=bias))

    def update(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        targets: DenseTargets,
        terms: PolicyTerms | None = None,
        *,
        lr_factor: float = 1.0,
    ) -> dict[str, float]:
        """One update on the completions; returns metrics, without any where no token attends sparsely.

        targets: of the same groups. terms: for the policy loss; None trains the KL alone, whatever its weight.

        Raises:
            TrainingDiverged: a loss or gradient is not finite; the adapter is as it was.
        """
        work = self._work(groups)
        if not work.groups:
            return {}
        work = self._weigh(work, targets)
        use_policy = terms is not None and self._config.ppo_weight > 0
        kl_sum = loss_sum = policy_sum = 0.0
        norm = math.nan
        with self._policy.frozen():
            for cpu_batch in pack(work.groups, self._max_tokens):
                batch = cpu_batch.to(self._policy.device)
                loss, kl, policy_part = self._loss(batch, work, targets, terms if use_policy else None)
                value, norm = self._stepper.backward(loss)
                if not math.isfinite(norm):
                    self._stop(step, value, norm)
                counts = np.concatenate([work.counts[s] for s in batch.samples])
                kl_sum += float(kl[torch.from_numpy(counts).to(kl.device)].sum())
                loss_sum, policy_sum = loss_sum + value, policy_sum + policy_part
        self._stepper.apply(lr_factor, norm)
        tokens = int(sum(c.sum() for c in work.counts))
        metrics = {"loss": loss_sum, "kl": kl_sum / tokens, "grad_norm": norm, "tokens": tokens}
        if use_policy:
            metrics["policy_loss"] = policy_sum
        if work.alpha_p05 is not None:
            metrics["alpha_p05"] = work.alpha_p05
        return {f"sampler_adapter/{name}": value for name, value in metrics.items()}

    def checksum(self) -> float:
        """See `MasterAdamW.checksum`."""
        return self._optimizer.checksum()

    def state_dict(self) -> dict[str, Any]:
        """Everything that exact resume needs, the adapter's weights included."""
        return {"optimizer": self._optimizer.state_dict(), "num_updates": self._stepper.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it. Raises ResumeError when the saved adapter is another one."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._stepper.num_updates = state["num_updates"]

    def _work(self, groups: Sequence[RolloutGroup]) -> _Work:
        work = _Work([], [], [], [])
        first = 0
        for group in groups:
            kept = []
            for index, rollout in enumerate(group.rollouts):
                counts = tokens_past_dense(self.plan, len(group.prompt.token_ids), len(rollout.token_ids))
                if counts.any():
                    kept.append(rollout)
                    work.samples.append(first + index)
                    work.counts.append(counts)
            if kept:
                work.groups.append(replace(group, rollouts=tuple(kept)))
            first += len(group.rollouts)
        return work

    def _weigh(self, work: _Work, targets: DenseTargets) -> _Work:
        counts, alpha = np.concatenate(work.counts), None
        if needs_alpha(self._config.tail_weighting) and self._config.kl_weight > 0:
            alpha = np.concatenate(self._alpha(work, targets))
        weighting = self._config.tail_weighting if alpha is not None else "none"
        weights = tail_weights(counts, weighting, alpha, share=self._config.tail_share)
        tail = None if alpha is None else float(np.quantile(alpha[counts], 0.05))
        ends = np.cumsum([len(c) for c in work.counts])[:-1]
        return replace(work, weights=np.split(weights, ends), alpha_p05=tail)

    @torch.no_grad()
    def _alpha(self, work: _Work, targets: DenseTargets) -> list[np.ndarray]:
        """Acceptance of the sampler as it is now by the targets, per rollout of the work."""
        found: dict[int, np.ndarray] = {}
        for cpu_batch in pack(work.groups, self._max_tokens):
            batch = cpu_batch.to(self._policy.device)
            hidden, _ = self._module(batch, self.plan, self._temperature, with_logprobs=False)
            dense = self._states(batch, work, targets)
            rates = acceptance_rates(dense, targets.head, hidden, self._policy.head, self._temperature).cpu().numpy()
            ids = cpu_batch.sample_ids.numpy()
            found |= {s: rates[ids == s] for s in batch.samples}
        return [found[s] for s in sorted(found)]

    def _states(self, batch: PackedBatch, work: _Work, targets: DenseTargets) -> Tensor:
        return torch.cat([targets.states[work.samples[s]] for s in batch.samples]).to(self._policy.device)

    def _loss(
        self, batch: PackedBatch, work: _Work, targets: DenseTargets, terms: PolicyTerms | None
    ) -> tuple[Tensor, Tensor, float]:
        """Loss of a micro-batch, KL per token [R], and the policy's part of the loss."""
        config, policy = self._config, self._policy
        hidden, logprobs = self._module(batch, self.plan, self._temperature, with_logprobs=terms is not None)
        weights = config.kl_weight * np.concatenate([work.weights[s] for s in batch.samples])
        result = divergence(
            hidden if config.kl_weight > 0 else hidden.detach(),
            policy.head,
            self._states(batch, work, targets),
            targets.head,
            weights=torch.from_numpy(weights).to(hidden.device),
            kind="reverse_kl",
            kl_temperature=self._temperature,
        )
        loss, policy_part = result.loss.sum(), 0.0
        if terms is not None:
            assert logprobs is not None
            part = config.ppo_weight * self._policy_loss(batch, work, logprobs, terms)
            loss, policy_part = loss + part, float(part.detach())
        return loss, result.reverse_kl, policy_part

    def _policy_loss(self, batch: PackedBatch, work: _Work, logprobs: Tensor, terms: PolicyTerms) -> Tensor:
        """Of the sparse sampler on its own completions: the sampler that drew them is its old policy."""
        device = logprobs.device
        rollouts = [r for g in work.groups for r in g.rollouts]
        drawn = torch.tensor([x for s in batch.samples for x in rollouts[s].logprobs], device=device)
        chosen = torch.tensor(work.samples)
        loss, _ = policy_loss(
            logprobs,
            drawn,
            terms.advantages[chosen].to(device),
            terms.divisors[chosen].to(device),
            batch.sample_ids,
            clip_low=terms.clip_low,
            clip_high=terms.clip_high,
            delta=terms.delta,
            mask=completion_mask([r.finish_reason for r in rollouts], batch.sample_ids, terms.mask_truncated),
        )
        return loss

    def _stop(self, step: int, loss: float, norm: float) -> None:
        bad = self._stepper.bad_gradients()
        self._stepper.abandon()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm} (first in {bad[0]})"
        raise TrainingDiverged(
            f"Step {step}, sampler adapter: {what} in one micro-batch; expected a finite number. The adapter was not updated. A "
            "lower sampler_adapter.learning_rate or optimizer.max_grad_norm usually helps."
        )


def train_sampler_adapter(
    policy: Policy,
    groups: Sequence[RolloutGroup],
    plan: SparsePlan,
    *,
    config: SamplerAdapterConfig,
    optimizer: OptimizerConfig | None = None,
    steps: int,
    groups_per_step: int = 4,
    temperature: float = 1.0,
    max_tokens: int = 4096,
    seed: int = 0,
    after_step: Callable[[int, dict[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Train the adapter by itself, on given completions and without rewards: the KL alone, the policy as it is.

    Args:
        groups: prompts with completions, the policy's own or any text's; gone through in shuffled rounds.
        config: the adapter must have been added to the policy already; of this, rate and weights count.
        steps: updates; the learning rate falls linearly over them. after_step: called with the number, from 1, and the metrics.

    Returns:
        Per step the metrics of `SamplerAdapterTrainer.update`.

    Raises:
        ConfigError: no group, steps or groups_per_step below 1, or no token of the groups attends sparsely.
        ModelError: the policy has no sampler adapter. TrainingDiverged: see `SamplerAdapterTrainer.update`.
    """
    if not groups or steps < 1 or groups_per_step < 1:
        raise ConfigError(
            f"{len(groups)} groups, steps = {steps} and groups_per_step = {groups_per_step}; expected at least 1 of each."
        )
    if not any(
        tokens_past_dense(plan, len(g.prompt.token_ids), len(r.token_ids)).any() for g in groups for r in g.rollouts
    ):
        raise ConfigError(
            f"No token of the {len(groups)} groups attends sparsely under the schedule {plan.schedule.name!r}, so there is "
            "nothing to train; give longer completions, or a schedule of fewer pages."
        )
    config = config.with_values(ppo_weight=0.0) if config.ppo_weight else config
    accelerator = Accelerator(cpu=policy.device.type == "cpu", mixed_precision="no")
    trainer = SamplerAdapterTrainer(
        policy,
        plan,
        accelerator,
        config,
        optimizer or OptimizerConfig(),
        temperature=temperature,
        max_tokens=max_tokens,
    )
    rng = np.random.default_rng(seed)
    order: list[int] = []
    records: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        while len(order) < groups_per_step:
            order += rng.permutation(len(groups)).tolist()
        chosen, order = [groups[i] for i in order[:groups_per_step]], order[groups_per_step:]
        factor = 1.0 - (step - 1) / steps
        records.append(trainer.update(step, chosen, trainer.targets(chosen), lr_factor=factor))
        if after_step is not None:
            after_step(step, records[-1])
    return records
