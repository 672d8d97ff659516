"""From rollouts with the teacher's hidden states to one optimizer update.

Weights of tokens are computed once for the whole step, so gradients do not depend on `train.micro_batch_tokens`. A micro-batch
that does not fit in memory is never skipped: the gradients so far are dropped and the update starts again with smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor, nn

from leanroll.config import DistillConfig
from leanroll.errors import OutOfMemory, TrainingDiverged
from leanroll.losses.distill import Divergence, divergence, token_weights
from leanroll.losses.selection import Chosen, TokenStatistics, needs_statistics, token_factors
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.measure.logprobs import batch_hidden
from leanroll.measure.packing import PackedBatch, pack
from leanroll.models import Policy
from leanroll.models.head import LmHead
from leanroll.rundir import RunDir
from leanroll.train.diagnosis import write_diagnosis
from leanroll.train.progress import RunDisplay
from leanroll.train.stepper import Stepper
from leanroll.types import RolloutGroup

_SAVED = ("reverse_kl", "forward_kl", "student_entropy", "teacher_entropy", "student_top1", "teacher_rank")
_DROPPED = ("student_dropped", "teacher_dropped")


@dataclass(frozen=True, slots=True)
class DistillBatch:
    """groups: the rollouts of a step. states: per rollout of the flattened own groups, the teacher's hidden states [T, H_t].
    own: which groups this process runs the models on; all of them in a process alone.
    """

    groups: tuple[RolloutGroup, ...]
    states: tuple[Tensor, ...]
    metrics: dict[str, float]
    own: slice = field(default_factory=lambda: slice(None))

    @property
    def own_groups(self) -> tuple[RolloutGroup, ...]:
        """Packed samples count through these."""
        return self.groups[self.own]

    @property
    def own_samples(self) -> slice:
        """Where the rollouts of the own groups lie among those of all."""
        first = sum(len(g.rollouts) for g in self.groups[: self.own.start or 0])
        return slice(first, first + sum(len(g.rollouts) for g in self.own_groups))


class StudentModule(nn.Module):
    """The student from packed tokens to its divergence from the teacher, as one forward (see `train.policy_module`)."""

    def __init__(
        self, student: Policy, teacher_head: LmHead, vocabulary: SharedVocabulary, config: DistillConfig
    ) -> None:
        super().__init__()
        self.model = student.model
        self._student, self._teacher_head = student, teacher_head
        self._vocabulary, self._options = vocabulary, config.distill

    def forward(self, batch: PackedBatch, teacher_states: Tensor, weights: Tensor | None) -> Divergence:
        """Per completion token of the batch, [R]; teacher_states [R, H_t], weights [R]."""
        return divergence(
            batch_hidden(self._student, batch),
            self._student.head,
            teacher_states,
            self._teacher_head,
            weights=weights,
            kind=self._options.divergence,
            beta=self._options.beta,
            kl_temperature=self._options.kl_temperature,
            vocabulary=self._vocabulary,
        )


@dataclass(frozen=True, slots=True)
class DivergenceRecord:
    """What a micro-batch leaves behind, on the CPU, all [R].

    values: fields of `Divergence` by name. factors: 0 where a token is not in the loss. positions: index in the completion.
    """

    values: dict[str, np.ndarray]
    factors: np.ndarray
    positions: np.ndarray
    sample_ids: np.ndarray

    @classmethod
    def of(cls, result: Divergence, factors: np.ndarray, batch: PackedBatch) -> DivergenceRecord:
        values = {f.name: getattr(result, f.name).detach().to("cpu", copy=True).numpy() for f in fields(result)}
        return cls(values, factors, batch.positions.cpu().numpy(), batch.sample_ids.cpu().numpy())


class DistillUpdater:
    """Runs the update of a step."""

    def __init__(
        self,
        student: Policy,
        module: Callable[..., Divergence],
        stepper: Stepper,
        config: DistillConfig,
        run: RunDir,
        display: RunDisplay,
    ) -> None:
        """module: the prepared `StudentModule`."""
        self._student, self._module, self._stepper = student, module, stepper
        self._config, self._run, self._display = config, run, display
        self._max_tokens = config.train.micro_batch_tokens

    def update(self, step: int, batch: DistillBatch) -> dict[str, float]:
        """One update on all rollouts; returns metrics.

        Raises:
            TrainingDiverged: a loss or gradient is not finite; parameters are those before the update.
            OutOfMemory: not even one sequence at a time fits.
        """
        optimizer = self._config.optimizer
        factor = optimizer.rate_factor(step, self._config.train.steps)
        chosen = self._choose(step, batch)
        rate = {"learning_rate": optimizer.learning_rate * factor}
        if not any(f.any() for f in chosen.factors):
            return rate | {"updates": 0, "trained_tokens": 0}
        with self._display.phase("update"):
            loss, norm, records = self._with_less_memory(batch, lambda: self._backward(step, batch, chosen))
            loss, norm = self._stepper.combine(loss, norm)
            self._stepper.apply(factor, norm)
        records = self._stepper.ranks.join_lists(records, "token statistics")
        trained = sum(int(np.count_nonzero(f)) for f in chosen.factors)
        metrics = rate | {"updates": 1, "trained_tokens": trained, "loss": loss, "grad_norm": norm}
        return metrics | divergence_metrics(records, bin_tokens=self._config.distill.bin_tokens)

    def rehearse(self, step: int, batch: DistillBatch) -> None:
        """All of an update but the optimizer's step: what it costs is measured without learning from it."""
        chosen = self._choose(step, batch)
        with self._display.phase("update"):
            self._with_less_memory(batch, lambda: self._backward(step, batch, chosen))
            self._stepper.combine(0.0, 0.0)
            self._stepper.abandon()

    def _with_less_memory(
        self, batch: DistillBatch, run: Callable[[], tuple[float, float, list[DivergenceRecord]]]
    ) -> tuple[float, float, list[DivergenceRecord]]:
        longest = max(len(g.prompt.token_ids) + len(r.token_ids) - 1 for g in batch.groups for r in g.rollouts)
        while True:
            try:
                return run()
            except torch.OutOfMemoryError as error:
                self._stepper.abandon()
                if self._max_tokens <= longest:
                    raise OutOfMemory(
                        f"An update does not fit in memory with micro-batches of {self._max_tokens} tokens, which hold one "
                        "sequence of this step. Lower distill.num_tokens, turn train.gradient_checkpointing on, or take a "
                        "smaller model."
                    ) from error
                self._max_tokens = max(longest, self._max_tokens // 2)
            self._display.say(
                f"Out of memory: starting this update again with micro-batches of {self._max_tokens} tokens (the gradient is the "
                "same)."
            )
            if self._student.device.type == "cuda":
                torch.cuda.empty_cache()

    def _choose(self, step: int, batch: DistillBatch) -> Chosen:
        """Which tokens enter the loss."""
        options = self._config.distill
        rollouts = [r for g in batch.groups for r in g.rollouts]
        stops = set(self._student.spec.stop_token_ids)
        masks = [np.ones(len(r.token_ids), dtype=bool) for r in rollouts]
        if not options.score_stop:
            for mask, rollout in zip(masks, rollouts, strict=True):
                mask[-1] = not (rollout.finish_reason == "stop" and rollout.token_ids[-1] in stops)
        statistics = self._statistics(batch) if needs_statistics(options.selection) else None
        return token_factors(
            options.selection,
            options.selected_tokens,
            [len(r.token_ids) for r in rollouts],
            masks=masks,
            statistics=statistics,
            keys=[(step, r.prompt_index, r.sample_index) for r in rollouts],
            seed=self._config.train.seed,
        )

    def _statistics(self, batch: DistillBatch) -> list[TokenStatistics]:
        """Of every token, by a pass without gradient."""
        names = [f.name for f in fields(TokenStatistics)]
        found: dict[int, TokenStatistics] = {}
        with self._display.phase("score"), torch.no_grad():
            for part in pack(batch.own_groups, self._max_tokens):
                result = self._module(part.to(self._student.device), self._states(part, batch), None)
                values = {name: getattr(result, name).cpu().numpy() for name in names}
                sample_ids = part.sample_ids.numpy()
                for sample in part.samples:
                    found[sample] = TokenStatistics(**{n: v[sample_ids == sample] for n, v in values.items()})
        own = [found[sample] for sample in sorted(found)]
        return self._stepper.ranks.join_lists(own, "statistics of tokens")

    def _states(self, part: PackedBatch, batch: DistillBatch) -> Tensor:
        return torch.cat([batch.states[s] for s in part.samples]).to(self._student.device)

    def _backward(self, step: int, batch: DistillBatch, chosen: Chosen) -> tuple[float, float, list[DivergenceRecord]]:
        """Accumulate the gradients of the own groups; returns their loss, and the norm."""
        own = batch.own_samples
        per_sample = token_weights(torch.from_numpy(chosen.lengths), self._config.distill.normalizer)[own]
        per_token = chosen.factors[own]
        parts = pack(batch.own_groups, self._max_tokens)
        records: list[DivergenceRecord] = []
        total = norm = 0.0
        for number, part in enumerate(parts):
            self._display.advance(number, len(parts))
            factors = np.concatenate([per_token[s] for s in part.samples])
            weights = per_sample[part.sample_ids] * torch.from_numpy(factors)
            result = self._module(
                part.to(self._student.device), self._states(part, batch), weights.to(self._student.device)
            )
            loss, norm = self._stepper.backward(result.loss.sum())
            record = DivergenceRecord.of(result, factors, part)
            if not math.isfinite(norm):
                self._stop(step, loss, norm, part, record)
            total += loss
            records.append(record)
        return total, norm, records

    def _stop(self, step: int, loss: float, norm: float, part: PackedBatch, record: DivergenceRecord) -> None:
        """Save the offending micro-batch and raise."""
        path = write_diagnosis(
            self._run,
            step,
            loss=loss,
            grad_norm=norm,
            bad_gradients=self._stepper.bad_gradients(),
            batch=part,
            values={name: record.values[name] for name in (*_SAVED, *_DROPPED)},
            sample_ids=record.sample_ids,
            sums={"loss": loss},
        )
        self._stepper.abandon()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        raise TrainingDiverged(
            f"Step {step}: {what} in one micro-batch; expected a finite number. The update was not applied. Its completions and "
            f"statistics are in {path}. A lower learning rate or max_grad_norm usually helps."
        )


def divergence_metrics(records: Sequence[DivergenceRecord], *, bin_tokens: int) -> dict[str, float]:
    """Over all generated tokens, whether they were in the loss or not (names and units: `leanroll.rundir_metrics`)."""
    values = {
        name: np.concatenate([r.values[name] for r in records]).astype(np.float64) for name in (*_SAVED, *_DROPPED)
    }
    positions = np.concatenate([r.positions for r in records])
    kl = values["reverse_kl"]
    metrics = {f"distill/{name}": float(values[name].mean()) for name in (*_SAVED[:5], *_DROPPED)}
    metrics["distill/teacher_top1_share"] = float((values["teacher_rank"] == 1).mean())
    metrics["distill/first_token_kl"] = float(kl[positions == 0].mean())
    bins = positions // bin_tokens
    for index in np.unique(bins):
        inside = bins == index
        metrics[f"distill/pos_{index * bin_tokens}/reverse_kl"] = float(kl[inside].mean())
        metrics[f"distill/pos_{index * bin_tokens}/tokens"] = int(inside.sum())
    return metrics
