"""From groups with advantages to optimizer updates.

Old log-probs: the loss compares the policy with itself before the first update on a rollout batch. When the batch
gives exactly one update (one pass, one mini-batch) those are the update's own log-probs, detached, so no separate
scoring pass is run; otherwise, and where completions or tokens are rejected for their ratios, which must be decided
before the first micro-batch, a pass over the whole batch comes first. Both are the trainer's dense forward, never
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
from leanroll.train.rejection import Rejected, ratio_limits, reject_rollouts
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
    """One mini-batch; rejected and outliers have one entry per rollout, in order.

    own: which of its groups this process runs the model on. old, ref: per rollout of those, in order, log-probs [T]; None where
    not needed. rejected: for its ratios. outliers: bool [T], tokens whose weight is 0; None where not looked for.
    """

    groups: Sequence[TrainingGroup]
    own: range
    old: Sequence[Tensor] | None
    ref: Sequence[Tensor] | None
    rejected: Sequence[bool]
    outliers: Sequence[Tensor] | None

    @property
    def rollouts(self) -> list[Rollout]:
        return [r for g in self.groups for r in g.group.rollouts]

    @property
    def own_rollouts(self) -> slice:
        """Where the rollouts of the own groups lie among those of all."""
        sizes = [len(g.group.rollouts) for g in self.groups]
        first = sum(sizes[: self.own.start])
        return slice(first, first + sum(sizes[i] for i in self.own))


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
        self._limits = ratio_limits(config.rl)

    def update(self, step: int, groups: Sequence[TrainingGroup]) -> dict[str, float]:
        """All passes over the groups; returns metrics.

        Raises:
            TrainingDiverged: a loss or gradient is not finite; parameters are those before that update.
        """
        rl, optimizer = self._config.rl, self._config.optimizer
        factor = optimizer.rate_factor(step, self._config.train.steps)
        parts, metrics = self._parts(groups)
        stats = TokenStats(
            bin_tokens=self._config.measure.bin_tokens, num_passes=rl.num_iterations, ranks=self._stepper.ranks
        )
        losses: list[float] = []
        norms: list[float] = []
        tokens = sum(sum(self._lengths(part)) for part in parts)
        metrics["trained_tokens"] = tokens
        for _ in range(rl.num_iterations):
            for part in parts:
                if self._is_empty(part):  # nothing to learn from, and AdamW must not coast
                    if part.old is not None:
                        own = part.rollouts[part.own_rollouts]
                        if own:
                            stats.add(TokenRecord.unused(own, part.old, [self._counts(r) for r in own]))
                    continue
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

    def _lengths(self, part: _Part) -> list[int]:
        """Tokens of each rollout in the loss. Outliers have weight 0 there, but they are in it."""
        return [
            0 if rejected or not self._counts(r) else len(r.token_ids)
            for r, rejected in zip(part.rollouts, part.rejected, strict=True)
        ]

    def _is_empty(self, part: _Part) -> bool:
        """Whether every token is masked, rejected or an outlier."""
        lengths = self._lengths(part)
        if part.outliers is None:
            return not any(lengths)
        return all(not n or bool(o.all()) for n, o in zip(lengths, part.outliers, strict=True))

    def _parts(self, groups: Sequence[TrainingGroup]) -> tuple[list[_Part], dict[str, float]]:
        """Cut into mini-batches, with what must be known before the first update; and metrics of what was rejected."""
        rl = self._config.rl
        count = min(rl.num_mini_batches, len(groups))
        cut: list[tuple[list[TrainingGroup], range]] = []
        for indices in np.array_split(np.arange(len(groups)), count) if groups else []:
            cut.append(([groups[i] for i in indices], self._stepper.ranks.share(len(indices))))
        plain = [chosen[i].group for chosen, own in cut for i in own]
        old = ref = None
        if groups and (count > 1 or rl.num_iterations > 1 or self._limits.active):
            with self._display.phase("score"):
                old = self._score(self._policy, plain)
        if rl.beta > 0:
            with self._display.phase("score"):
                if self._reference is not None:
                    ref = self._score(self._reference, plain)
                else:
                    with self._policy.adapter_disabled():
                        ref = self._score(self._policy, plain)
        rejected = None
        if old is not None and self._limits.active:
            rejected = self._reject(cut, old)
        parts: list[_Part] = []
        first = all_first = 0
        for chosen, own in cut:
            last = first + sum(len(chosen[i].group.rollouts) for i in own)
            every = slice(all_first, all_first + sum(len(g.group.rollouts) for g in chosen))
            parts.append(
                _Part(
                    chosen,
                    own,
                    old and old[first:last],
                    ref and ref[first:last],
                    rejected.completions[every] if rejected else (False,) * (every.stop - every.start),
                    rejected.outliers[every] if rejected else None,
                )
            )
            all_first = every.stop
            first = last
        return parts, dict(rejected.metrics) if rejected else {}

    def _reject(self, cut: Sequence[tuple[list[TrainingGroup], range]], old: Sequence[Tensor]) -> Rejected:
        """What is rejected of all rollouts, the same on every rank; old: log-probs of the own ones."""
        rollouts: list[Rollout] = []
        places: list[int] = []
        for chosen, own in cut:
            for number, group in enumerate(chosen):
                if number in own:
                    places += range(len(rollouts), len(rollouts) + len(group.group.rollouts))
                rollouts += group.group.rollouts
        pairs = [(place, logprobs.cpu()) for place, logprobs in zip(places, old, strict=True)]
        found = dict(self._stepper.ranks.join_lists(pairs, "log-probs before the update"))
        ordered = [found[place].to(self._policy.device) for place in range(len(rollouts))]
        return reject_rollouts(self._limits, rollouts, ordered, [self._counts(r) for r in rollouts])

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
        divisors = denominators(
            config.rl.loss_type,
            torch.tensor(self._lengths(part)),
            max_completion_length=config.rollout.max_completion_length,
            num_tokens=tokens_per_update if config.rl.loss_type == "dapo" else None,
        ).to(self._policy.device)
        advantages = torch.from_numpy(np.concatenate([g.advantages for g in part.groups])).to(self._policy.device)
        groups, own = [part.groups[i].group for i in part.own], part.own_rollouts
        rollouts, divisors, advantages = part.rollouts[own], divisors[own], advantages[own]
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
        could = completion_mask([r.finish_reason for r in rollouts], batch.sample_ids, rl.mask_truncated_completions)
        own = part.own_rollouts
        mask = could & ~torch.tensor(part.rejected[own], device=device)[batch.sample_ids]
        corrected = correction(
            old, sampler, batch.sample_ids, rl.importance_sampling_mode, cap=rl.importance_sampling_cap, mask=mask
        )
        weights = corrected.weights
        if part.outliers is not None:
            weights = (torch.ones_like(old) if weights is None else weights).masked_fill(join(part.outliers[own]), 0.0)
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
            weights=weights,
            ref_logprobs=None if part.ref is None else join(part.ref),
            mask=mask,
            entropy=entropy,
        )
        record = TokenRecord.of(
            old=old,
            sampler=sampler,
            logprobs=logprobs,
            entropy=entropy,
            weights=weights,
            mask=mask,
            could=could,
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
