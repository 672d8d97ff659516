"""From groups with advantages to optimizer updates.

Old log-probs: the loss compares the policy with itself before the first update on a rollout batch. When the batch
gives exactly one update (one pass, one mini-batch) those are the update's own log-probs, detached, so no separate
scoring pass is run; otherwise a pass over the whole batch comes first. Both are the trainer's dense forward, never
the sampler's log-probs; what the sampler was is put right by the importance correction.

Normalisers are computed per update over all of its micro-batches, so gradients do not depend on
`train.micro_batch_tokens`, nor on the number of processes: each knows all groups, and runs the model on its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from leanroll.config import RLConfig
from leanroll.errors import TrainingDiverged
from leanroll.losses.correction import correction
from leanroll.losses.policy import completion_mask, denominators, policy_loss
from leanroll.measure.logprobs import score
from leanroll.measure.packing import PackedBatch, pack
from leanroll.models import Policy
from leanroll.rundir import RunDir
from leanroll.train.diagnosis import write_diagnosis
from leanroll.train.progress import RunDisplay
from leanroll.train.stepper import Stepper
from leanroll.train.token_stats import TokenRecord, TokenStats
from leanroll.types import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A group that enters the loss. advantages: float64 [G], one per rollout of the group."""

    group: RolloutGroup
    advantages: np.ndarray


@dataclass(frozen=True, slots=True)
class _Part:
    """One mini-batch. own: which of its groups this process runs the model on. old, ref: per rollout of those, in order, log-probs
    [T]; None where not needed."""

    groups: Sequence[TrainingGroup]
    own: range
    old: Sequence[Tensor] | None
    ref: Sequence[Tensor] | None


class PolicyUpdater:
    """Runs the updates of a step."""

    def __init__(
        self,
        policy: Policy,
        module: nn.Module,
        stepper: Stepper,
        config: RLConfig,
        run: RunDir,
        display: RunDisplay,
        reference: Policy | None = None,
    ) -> None:
        """module: the prepared `PolicyModule`. reference: frozen starting policy, where it is not the policy without
        adapter."""
        self._policy, self._module, self._stepper = policy, module, stepper
        self._config, self._run, self._display = config, run, display
        self._reference = reference

    def update(self, step: int, groups: Sequence[TrainingGroup]) -> dict[str, float]:
        """All passes over the groups; returns metrics.

        Raises:
            TrainingDiverged: a loss or gradient is not finite; parameters are those before that update.
        """
        rl, optimizer = self._config.rl, self._config.optimizer
        factor = optimizer.rate_factor(step, self._config.train.steps)
        parts = self._parts(groups)
        stats = TokenStats(
            bin_tokens=self._config.measure.bin_tokens, num_passes=rl.num_iterations, ranks=self._stepper.ranks
        )
        losses: list[float] = []
        norms: list[float] = []
        tokens = sum(len(r.token_ids) for g in groups for r in g.group.rollouts if self._counts(r))
        metrics: dict[str, float] = {"trained_tokens": tokens}
        for _ in range(rl.num_iterations):
            for part in parts:
                if not any(self._counts(r) for g in part.groups for r in g.group.rollouts):
                    continue  # every completion was cut and masked: nothing to learn from, and AdamW must not coast
                with self._display.phase("update"):
                    loss, norm = self._update_once(step, part, tokens / len(parts), factor, stats)
                losses.append(loss)
                norms.append(norm)
        metrics |= stats.metrics() | {"updates": len(losses), "learning_rate": optimizer.learning_rate * factor}
        if losses:
            metrics |= {"loss": float(np.mean(losses)), "grad_norm": float(np.mean(norms))}
        return metrics

    def _counts(self, rollout: Rollout) -> bool:
        return not (self._config.rl.mask_truncated_completions and rollout.finish_reason == "length")

    def _parts(self, groups: Sequence[TrainingGroup]) -> list[_Part]:
        """Cut into mini-batches, with the log-probs that must be known before the first update."""
        rl = self._config.rl
        count = min(rl.num_mini_batches, len(groups))
        cut: list[tuple[list[TrainingGroup], range]] = []
        for indices in np.array_split(np.arange(len(groups)), count) if groups else []:
            cut.append(([groups[i] for i in indices], self._stepper.ranks.share(len(indices))))
        plain = [chosen[i].group for chosen, own in cut for i in own]
        old = ref = None
        if count > 1 or rl.num_iterations > 1:
            with self._display.phase("score"):
                old = self._score(self._policy, plain)
        if rl.beta > 0:
            with self._display.phase("score"):
                if self._reference is not None:
                    ref = self._score(self._reference, plain)
                else:
                    with self._policy.adapter_disabled():
                        ref = self._score(self._policy, plain)
        parts: list[_Part] = []
        first = 0
        for chosen, own in cut:
            last = first + sum(len(chosen[i].group.rollouts) for i in own)
            parts.append(_Part(chosen, own, old and old[first:last], ref and ref[first:last]))
            first = last
        return parts

    def _score(self, policy: Policy, groups: Sequence[RolloutGroup]) -> tuple[Tensor, ...]:
        scores = score(
            policy,
            groups,
            temperature=self._config.rollout.temperature,
            max_tokens=self._config.train.micro_batch_tokens,
            with_entropy=False,
        )
        return scores.logprobs

    def _update_once(
        self, step: int, part: _Part, tokens_per_update: float, lr_factor: float, stats: TokenStats
    ) -> tuple[float, float]:
        """One optimizer update; returns its loss and gradient norm."""
        config = self._config
        lengths = torch.tensor([len(r.token_ids) * self._counts(r) for g in part.groups for r in g.group.rollouts])
        divisors = denominators(
            config.rl.loss_type,
            lengths,
            max_completion_length=config.rollout.max_completion_length,
            num_tokens=tokens_per_update if config.rl.loss_type == "dapo" else None,
        ).to(self._policy.device)
        advantages = torch.from_numpy(np.concatenate([g.advantages for g in part.groups])).to(self._policy.device)
        groups = [part.groups[i].group for i in part.own]
        rollouts = [r for g in groups for r in g.rollouts]
        first = sum(len(g.group.rollouts) for g in part.groups[: part.own.start])
        divisors, advantages = (x[first : first + len(rollouts)] for x in (divisors, advantages))
        batches = pack(groups, config.train.micro_batch_tokens)
        total = norm = 0.0
        for number, batch in enumerate(batches):
            self._display.advance(number, len(batches))
            loss, record = self._loss(batch.to(self._policy.device), part, rollouts, advantages, divisors)
            value, norm = self._stepper.backward(loss)
            if not math.isfinite(norm):
                self._stop(step, value, norm, batch, record)
            total += value
            stats.add(record)
        total, norm = self._stepper.combine(total, norm)
        self._stepper.apply(lr_factor, norm)
        return total, norm

    def _loss(
        self, batch: PackedBatch, part: _Part, rollouts: Sequence[Rollout], advantages: Tensor, divisors: Tensor
    ) -> tuple[Tensor, TokenRecord]:
        rl, device = self._config.rl, self._policy.device
        logprobs, entropy = self._module(batch, self._config.rollout.temperature)
        join = lambda values: torch.cat([values[s] for s in batch.samples])  # noqa: E731
        old = logprobs.detach() if part.old is None else join(part.old)
        sampler = torch.tensor([x for s in batch.samples for x in rollouts[s].logprobs], device=device)
        mask = completion_mask([r.finish_reason for r in rollouts], batch.sample_ids, rl.mask_truncated_completions)
        corrected = correction(
            old, sampler, batch.sample_ids, rl.importance_sampling_mode, cap=rl.importance_sampling_cap, mask=mask
        )
        loss, sums = policy_loss(
            logprobs,
            old,
            advantages,
            divisors,
            batch.sample_ids,
            clip_low=rl.epsilon,
            clip_high=rl.epsilon_high,
            delta=rl.delta,
            beta=rl.beta,
            use_bias_correction_kl=rl.use_bias_correction_kl,
            weights=corrected.weights,
            ref_logprobs=None if part.ref is None else join(part.ref),
            mask=mask,
            entropy=entropy,
        )
        record = TokenRecord.of(
            old=old,
            sampler=sampler,
            logprobs=logprobs,
            entropy=entropy,
            weights=corrected.weights,
            mask=mask,
            sample_ids=batch.sample_ids,
            positions=batch.positions,
            clipped=corrected.clipped,
            sums=sums,
        )
        return loss, record

    def _stop(self, step: int, loss: float, norm: float, batch: PackedBatch, record: TokenRecord) -> None:
        """Save the offending micro-batch and raise."""
        bad = self._stepper.bad_gradients()
        path = write_diagnosis(
            self._run,
            step,
            loss=loss,
            grad_norm=norm,
            bad_gradients=bad,
            batch=batch,
            values={name: getattr(record, name) for name in ("logprobs", "old", "sampler", "entropy", "weights")},
            sample_ids=record.sample_ids,
            sums=record.sums,
        )
        self._stepper.abandon()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        raise TrainingDiverged(
            f"Step {step}: {what} in one micro-batch; expected a finite number. The update was not applied. Its completions and "
            f"statistics are in {path}. A lower learning rate, max_grad_norm or importance_sampling_cap usually helps."
        )
