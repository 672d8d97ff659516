"""From rollouts with what the teacher says of them to one optimizer update.

Weights of tokens are computed once for the whole step, so gradients do not depend on `train.micro_batch_tokens`. A micro-batch
that does not fit in memory is never skipped: the gradients so far are dropped and the update starts again with smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from leanroll.config import DistillConfig
from leanroll.errors import OutOfMemory, TrainingDiverged
from leanroll.losses.distill import token_weights
from leanroll.losses.selection import Chosen, TokenStatistics, needs_statistics, token_factors
from leanroll.measure.packing import PackedBatch, pack
from leanroll.models import Policy
from leanroll.rundir import RunDir
from leanroll.train.adaptive import HEAD_KL
from leanroll.train.diagnosis import write_diagnosis
from leanroll.train.objectives import KL_NAMES, TeacherRows, TokenLoss, join_rows, recorded_values
from leanroll.train.progress import RunDisplay
from leanroll.train.stepper import Stepper
from leanroll.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class DistillBatch:
    """groups: the rollouts of a step. teacher: per rollout of the flattened own groups, what the teacher says of its T tokens;
    empty where it is not asked. own: which groups this process runs the models on; all of them in a process alone.
    """

    groups: tuple[RolloutGroup, ...]
    teacher: tuple[TeacherRows, ...]
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


@dataclass(frozen=True, slots=True)
class DivergenceRecord:
    """What a micro-batch leaves behind, on the CPU, all [R].

    values: `recorded_values`. factors: 0 where a token is not in the loss. positions: index in the completion.
    """

    values: dict[str, np.ndarray]
    factors: np.ndarray
    positions: np.ndarray
    sample_ids: np.ndarray

    @classmethod
    def of(
        cls, result: TokenLoss, teacher: TeacherRows | None, factors: np.ndarray, batch: PackedBatch
    ) -> DivergenceRecord:
        values = recorded_values(result, teacher)
        return cls(values, factors, batch.positions.cpu().numpy(), batch.sample_ids.cpu().numpy())


class DistillUpdater:
    """Runs the update of a step."""

    def __init__(
        self,
        student: Policy,
        module: Callable[..., TokenLoss],
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
        if self._config.adapt.max_num_tokens:
            metrics |= head_metrics(records, self._config.adapt.min_num_tokens)
        return metrics | divergence_metrics(records, bin_tokens=self._config.distill.bin_tokens)

    def rehearse(self, step: int, batch: DistillBatch) -> None:
        """All of an update but the optimizer's step: what it costs is measured without learning from it."""
        chosen = self._choose(step, batch)
        with self._display.phase("update"):
            self._with_less_memory(batch, lambda: self._backward(step, batch, chosen))
            self._stepper.combine(0.0, 0.0)
            self._stepper.abandon()

    def token_kl(self, batch: DistillBatch) -> list[np.ndarray]:
        """Without gradient, per rollout of the flattened groups, which may be longer than those of a step: the KL of its tokens,
        nats [T] (with distill.top_k its lower bound)."""
        found = self._score(batch, max(self._max_tokens, _longest(batch.groups)))
        (name,) = set(KL_NAMES) & found[0].keys()
        return [values[name] for values in found]

    def _with_less_memory(
        self, batch: DistillBatch, run: Callable[[], tuple[float, float, list[DivergenceRecord]]]
    ) -> tuple[float, float, list[DivergenceRecord]]:
        longest = _longest(batch.groups)
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
        with self._display.phase("score"):
            found = self._score(batch, self._max_tokens)
        own = [TokenStatistics(**{name: values[name] for name in names}) for values in found]
        return self._stepper.ranks.join_lists(own, "statistics of tokens")

    def _score(self, batch: DistillBatch, max_tokens: int) -> list[dict[str, np.ndarray]]:
        """`recorded_values` per rollout of the flattened own groups, each [T], without gradient."""
        found: dict[int, dict[str, np.ndarray]] = {}
        with torch.no_grad():
            for part in pack(batch.own_groups, max_tokens):
                teacher = self._teacher_rows(part, batch)
                values = recorded_values(self._module(part.to(self._student.device), teacher, None), teacher)
                sample_ids = part.sample_ids.numpy()
                for sample in part.samples:
                    found[sample] = {name: value[sample_ids == sample] for name, value in values.items()}
        return [found[sample] for sample in sorted(found)]

    def _teacher_rows(self, part: PackedBatch, batch: DistillBatch) -> TeacherRows | None:
        if not batch.teacher:
            return None
        return join_rows([batch.teacher[s] for s in part.samples], self._student.device)

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
            teacher = self._teacher_rows(part, batch)
            result = self._module(part.to(self._student.device), teacher, weights.to(self._student.device))
            loss, norm = self._stepper.backward(result.loss.sum())
            record = DivergenceRecord.of(result, teacher, factors, part)
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
            values=record.values,
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
    values = {name: np.concatenate([r.values[name] for r in records]).astype(np.float64) for name in records[0].values}
    positions = np.concatenate([r.positions for r in records])
    rank = values.pop("teacher_rank", None)
    metrics = {f"distill/{name}": float(value.mean()) for name, value in values.items()}
    if rank is not None:
        metrics["distill/teacher_top1_share"] = float((rank == 1).mean())
    bins = positions // bin_tokens
    for name in set(KL_NAMES) & values.keys():
        metrics[f"distill/first_token_{name.replace('reverse_', '')}"] = float(values[name][positions == 0].mean())
        for index in np.unique(bins):
            metrics[f"distill/pos_{index * bin_tokens}/{name}"] = float(values[name][bins == index].mean())
    for index, count in zip(*np.unique(bins, return_counts=True), strict=True):
        metrics[f"distill/pos_{index * bin_tokens}/tokens"] = int(count)
    return metrics


def head_metrics(records: Sequence[DivergenceRecord], num_tokens: int) -> dict[str, float]:
    """Mean KL of the first num_tokens positions, for a number of tokens that adapts."""
    (name,) = set(KL_NAMES) & records[0].values.keys()
    kl = np.concatenate([r.values[name] for r in records]).astype(np.float64)
    return {HEAD_KL: float(kl[np.concatenate([r.positions for r in records]) < num_tokens].mean())}


def _longest(groups: Sequence[RolloutGroup]) -> int:
    """Inputs of the longest sequence; the last token of a completion is predicted, not fed."""
    return max(len(g.prompt.token_ids) + len(r.token_ids) - 1 for g in groups for r in g.rollouts)
