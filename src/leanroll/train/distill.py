"""On-policy distillation with early-stopped rollouts: `run(config)` is what `leanroll distill` does.

A step: prompts → completions of at most N tokens from the student → hidden states of the teacher on the same token ids →
divergence over the full vocabulary → AdamW. Source of the method: early-stopped rollouts (ESR), arXiv 2605.27028.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from leanroll.config import DistillConfig
from leanroll.errors import ConfigError, RolloutError, TeacherError
from leanroll.measure.stops import rollout_stop_probs
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import EVAL, FULL_STEP, TEACHER_EVAL, RunDir, read_json, write_json
from leanroll.rundir_storage import storing
from leanroll.tasks import TaskItem
from leanroll.tasks.metrics import mean_at_k, paired_difference
from leanroll.train import setup
from leanroll.train.adaptive import HEAD_KL, NumTokensController, ProbeKl
from leanroll.train.collect import rollout_metrics
from leanroll.train.distill_update import DistillBatch, DistillUpdater
from leanroll.train.evaluation import Evaluation, evaluate
from leanroll.train.full_step import FullComparison, StepMeasurement
from leanroll.train.guard import CollapseGuard
from leanroll.train.loop import LoopResult
from leanroll.train.objectives import StudentModule, TeacherRows
from leanroll.train.preflight import preflight
from leanroll.train.progress import RunDisplay
from leanroll.train.prompts import PromptOrder, largest_own_limit, with_own_limits
from leanroll.train.ranks import ALONE, Ranks
from leanroll.train.session import AtEnd, run_session
from leanroll.train.teacher import Teacher
from leanroll.train.trainer import Trainer, timing_text
from leanroll.types import Prompt, RolloutGroup

_LOG = logging.getLogger(__name__)

_LOGGED_COMPLETIONS = 32
"""Completions per step written to the run directory."""

_IN_FULL = "of the last step does not fit in the comparison with full rollouts (distill.compare_full)"


@dataclass(frozen=True, slots=True)
class DistillSummary:
    """What a run came to; numbers that were not measured are None.

    before, after, teacher: held-out mean reward of the student before and after, and of the teacher. step_s: median seconds per
    step, without evaluations and checkpoints. peak_gib: largest resident memory of the process (of the GPU, where there is one).
    comparison: with distill.compare_full.
    """

    run_dir: Path
    last_step: int
    interrupted: bool
    halted: str | None
    before: float | None
    teacher: float | None
    after: float | None
    step_s: float | None
    peak_gib: float | None
    comparison: FullComparison | None
    seconds: float

    def line(self) -> str:
        """The closing line."""
        parts = []
        if self.before is not None and self.after is not None:
            parts.append(f"held-out reward {self.before:.3f} → {self.after:.3f}")
        if self.teacher is not None:
            parts.append(f"teacher {self.teacher:.3f}")
        if self.comparison is not None:
            parts.append(self.comparison.line())
        elif self.step_s is not None:
            parts.append(f"{self.step_s:.1f} s per step")
        if self.peak_gib is not None:
            parts.append(f"{self.peak_gib:.1f} GiB at most")
        if self.interrupted:
            parts.append(f"interrupted after step {self.last_step}, continue with --resume")
        if self.halted is not None:
            parts.append(f"stopped by itself: {self.halted}")
        return " · ".join([*parts, str(self.run_dir)])


def run(
    config: DistillConfig,
    resume: bool = False,
    *,
    quiet: bool = False,
    at_end: AtEnd | None = None,
    twin: RunDir | None = None,
) -> DistillSummary:
    """Train a student.

    resume, quiet, at_end: as for `rl.run`. twin: a run that began with the same student, teacher and held-out prompts, whose
        evaluations before training are taken over instead of repeated.

    Raises:
        What `rl.run` raises, and besides
        ModelError: teacher and student have different tokenizers.
        TeacherError: their templates or stop tokens do not fit, or the teacher is not better than the student by
            teacher.min_margin.
        OutOfMemory: a step does not fit in memory, however small its micro-batches.
        StorageError: the disk of the run directory is full, has become read-only, or failed; no page is written then.
    """
    build = partial(DistillTrainer, config, twin=twin)
    return run_session(config, build, _summary, resume=resume, quiet=quiet, at_end=at_end)


class DistillTrainer(Trainer[DistillConfig, DistillBatch]):
    """The student follows the teacher on the beginnings of its own completions."""

    def __init__(
        self,
        config: DistillConfig,
        schedule: BudgetSchedule,
        display: RunDisplay,
        ranks: Ranks = ALONE,
        *,
        twin: RunDir | None = None,
    ) -> None:
        """twin: see `run`."""
        super().__init__(config, schedule, display, ranks)
        self._twin = twin
        options = config.distill
        self.order = PromptOrder(self.task.num_train, options.prompts_per_step, 1, config.train.seed)
        self.teacher = Teacher(config, self.policy)
        # Of the first steps: what a run would meet soon is better met before anything is written.
        count = config.teacher.preflight_prompts
        steps = range(1, 1 + -(-count // options.prompts_per_step))
        items = [self.task.train_item(i) for step in steps for i in self.order.indices(step)][:count]
        prompts = self.encoder.encode(items)
        with display.phase("preflight"):
            self.preflight = preflight(config, self.policy, self.teacher, prompts, self.teacher.encode(items))
        outcomes = self.preflight.vocabulary.student.num_outcomes
        if options.top_k is not None and options.top_k > outcomes:
            raise ConfigError(
                f"distill.top_k is {options.top_k}, but student and teacher share {outcomes} tokens; expected 1 to {outcomes}, or "
                "leave it out for the full vocabulary."
            )
        for note in self.preflight.notes:
            display.say(f"note: {note}")
        self.sampling = replace(
            setup.sampling_params(self.policy, config.rollout, seed=config.train.seed),
            forbidden_token_ids=self.preflight.forbidden,
        )
        longest = self._longest(items)
        prompts = self._with_limits(prompts, items)
        need = max(len(p.token_ids) + (p.max_completion_length or longest) for p in prompts) - 1
        if need > config.train.micro_batch_tokens:
            raise ConfigError(
                f"train.micro_batch_tokens is {config.train.micro_batch_tokens}, but a prompt with {longest} completion tokens can "
                f"take {need}; raise the former, or generate fewer tokens."
            )
        self.engine.check(prompts, replace(self.sampling, max_completion_length=longest))
        if options.compare_full:
            self._check_comparison()
        self.module = self.prepare(
            StudentModule(self.policy, self.teacher.policy.head, self.preflight.vocabulary, config)
        )
        self._updater: DistillUpdater | None = None
        self.guard = self._guard()
        adapt = config.adapt
        self.controller = NumTokensController(adapt, options.num_tokens) if adapt.max_num_tokens else None

    # -- Algorithm ----------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> DistillBatch:
        """Generate up to the step's number of tokens, and let the teacher read along."""
        batch = self._batch(step, self._limit(step))
        self.run.write_rollouts(step, _records(batch.groups))
        return batch

    def _limit(self, step: int) -> int | None:
        """Tokens of a completion at most; None for full ones."""
        if self.controller is not None:
            return self.controller.num_tokens
        return self.config.distill.tokens_at(step, self.config.train.steps)

    def _batch(self, step: int, tokens: int | None, *, own_limits: bool = True) -> DistillBatch:
        """Completions of at most `tokens` tokens (None: full ones), and what the teacher says of them.

        own_limits: with distill.per_prompt_tokens those of the prompts count.
        """
        config = self.config
        items = [self.task.train_item(i) for i in self.order.indices(step)]
        prompts = self.encoder.encode(items)
        if own_limits:
            prompts = self._with_limits(prompts, items)
        sampling = self.sampling if tokens is None else replace(self.sampling, max_completion_length=tokens)
        samples = config.distill.num_generations
        with self.display.phase("rollout", total=len(prompts) * samples):
            groups = self.engine.generate(prompts, sampling, samples, step=step, progress=self.display.show_rollout)
        for failure in [f for g in groups for f in g.failures]:
            _LOG.warning("Step %d, prompt %d: %s", step, failure.prompt_index, failure.reason)
        kept = [(group, item) for group, item in zip(groups, items, strict=True) if group.rollouts]
        if not kept:
            raise RolloutError(
                f"Step {step}: no completion could be generated. First reason: {groups[0].failures[0].reason}"
            )
        groups = [group for group, _ in kept]
        share = self.ranks.share(len(groups))
        own = slice(share.start, share.stop)
        with self.display.phase("teacher") if config.distill.asks_teacher else nullcontext():
            rows = self._ask_teacher(groups[own], [item for _, item in kept[own]])
        metrics = rollout_metrics(groups)
        metrics["tokens_per_second"] = metrics["generated_tokens"] / self.display.clock.seconds["rollout"]
        metrics["distill/num_tokens"] = max(p.max_completion_length or sampling.max_completion_length for p in prompts)
        return DistillBatch(tuple(groups), rows, metrics, own)

    def _longest(self, items: Sequence[TaskItem]) -> int:
        """Tokens of the longest completion of any step. items: what an endless task is judged by."""
        config, full = self.config, self.config.rollout.max_completion_length
        if config.distill.per_prompt_tokens:
            size = self.task.num_train
            return largest_own_limit(items if size is None else (self.task.train_item(i) for i in range(size)), full)
        if config.adapt.max_num_tokens:
            return config.adapt.max_num_tokens
        ends = [config.distill.tokens_at(step, config.train.steps) for step in (1, config.train.steps)]
        return max(tokens or full for tokens in ends)

    def _with_limits(self, prompts: list[Prompt], items: Sequence[TaskItem]) -> list[Prompt]:
        """The prompts of the items, with limits of their own where the recipe wants that."""
        if not self.config.distill.per_prompt_tokens:
            return prompts
        full = self.config.rollout.max_completion_length
        return with_own_limits(
            prompts, items, full, self.policy.spec.max_position, self.config.train.micro_batch_tokens
        )

    def _ask_teacher(self, groups: Sequence[RolloutGroup], items: Sequence[TaskItem]) -> tuple[TeacherRows, ...]:
        """What the teacher says of every completion, nothing where it is not asked; items: one per group."""
        options, most = self.config.distill, self.config.train.micro_batch_tokens
        if not options.asks_teacher:
            return ()
        prompts = self.teacher.encode(items)
        if options.top_k is None:
            return self.teacher.hidden_states(groups, prompts, most)
        return self.teacher.likeliest(
            groups,
            prompts,
            most,
            k=options.top_k,
            vocabulary=self.preflight.vocabulary,
            kl_temperature=options.kl_temperature,
        )

    def update(self, step: int, batch: DistillBatch) -> dict[str, float]:
        """Update the student on the batch."""
        metrics = batch.metrics | self.updater.update(step, batch)
        if self.controller is not None and HEAD_KL in metrics:
            self.controller.observe(metrics[HEAD_KL])
        if self.guard is not None and self.guard.is_due(step):
            found, alarms = self.guard.check(step)
            metrics |= found
            if self.controller is not None:
                metrics |= self._adapt(step, self.controller, self.guard.groups, len(alarms))
            self._react(step, alarms)
        return metrics | self.memory()

    @property
    def updater(self) -> DistillUpdater:
        """Made once the run directory is known."""
        if self._updater is None:
            self._updater = DistillUpdater(self.policy, self.module, self.stepper, self.config, self.run, self.display)
        return self._updater

    def compare_full(self) -> FullComparison:
        """One more step as it is and one with full rollouts, on the same prompts; neither is applied.

        The full one comes last: what it leaves in the process's memory is not charged to the other.
        """
        with self.display.phase("comparison"):
            steps = [StepMeasurement.of(partial(self._rehearse, full), self.policy.device) for full in (False, True)]
        return FullComparison(*steps)

    def _check_comparison(self) -> None:
        """Raise ConfigError unless every prompt that `compare_full` will run can be completed in full and trained on: one that was
        left out would make the full step look cheaper than it is."""
        full, most = self.config.rollout.max_completion_length, self.config.train.micro_batch_tokens
        items = [self.task.train_item(i) for i in self.order.indices(self.config.train.steps)]
        for prompt in self.encoder.encode(items):
            need = len(prompt.token_ids) + full - 1
            try:
                self.engine.check([prompt], self.sampling)
            except ConfigError as error:
                raise ConfigError(f"Training prompt {prompt.index} {_IN_FULL}: {error}") from error
            if need > most:
                raise ConfigError(
                    f"Training prompt {prompt.index} {_IN_FULL}: with {full} completion tokens it takes {need} of a micro-batch, "
                    f"and train.micro_batch_tokens is {most}. Raise it, or leave out distill.compare_full."
                )

    def _rehearse(self, full: bool) -> DistillBatch:
        step = self.config.train.steps
        batch = self._batch(step, None if full else self._limit(step), own_limits=not full)
        self.updater.rehearse(step, batch)
        return batch

    def _react(self, step: int, alarms: list[str]) -> None:
        if not alarms:
            return
        assert self.guard is not None
        text = f"step {step} may have collapsed: {'; '.join(alarms)}."
        self.react(text, self.config.guard.on_alarm, self.guard.last_calm)

    def _adapt(
        self, step: int, controller: NumTokensController, groups: Sequence[RolloutGroup], num_alarms: int
    ) -> dict[str, float]:
        """Move N after a probe; groups: its completions."""
        kept = [(group, item) for group, item in zip(groups, self._probe_items, strict=True) if group.rollouts]
        with self.display.phase("probe"):
            curves = self.ranks.split(kept, self._probe_kl, "KL of probes")
        before, head = controller.num_tokens, self.config.adapt.min_num_tokens
        tail = np.concatenate([curve[before:] for curve in curves])
        probe = ProbeKl(
            float(np.concatenate([curve[:head] for curve in curves]).mean(dtype=np.float64)),
            float(tail.mean(dtype=np.float64)) if tail.size else None,
        )
        decision = controller.decide(step, probe, num_alarms)
        if decision.move:
            self.display.say(f"step {step}: N {before} → {decision.num_tokens} tokens; {decision.reason}.")
        return probe.metrics() | decision.metrics()

    def _probe_kl(self, probed: Sequence[tuple[RolloutGroup, TaskItem]]) -> list[np.ndarray]:
        """KL per token of every completion, nats [T]."""
        if not probed:
            return []
        groups = [group for group, _ in probed]
        rows = self._ask_teacher(groups, [item for _, item in probed])
        return self.updater.token_kl(DistillBatch(tuple(groups), rows, {}))

    def _guard(self) -> CollapseGuard | None:
        options = self.config.guard
        if not options.every:
            return None
        self._probe_items = self.task.eval_items(options.num_prompts)
        prompts = self.encoder.encode(self._probe_items)
        sampling = replace(self.sampling, max_completion_length=self.config.rollout.max_completion_length)
        self.engine.check(prompts, sampling)
        stops = partial(
            rollout_stop_probs, self.policy, sampling=sampling, max_tokens=self.config.train.micro_batch_tokens
        )
        return CollapseGuard(
            options,
            self.engine,
            prompts,
            sampling,
            self.display,
            lambda groups: self.ranks.split(groups, stops, "P(EOS) of probes"),
        )

    def step_line(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"step {step}"]
        if "distill/reverse_kl" in metrics:
            parts.append(f"KL {metrics['distill/reverse_kl']:.3f}")
        if "distill/topk_reverse_kl" in metrics:
            parts.append(f"KL at least {metrics['distill/topk_reverse_kl']:.3f}")
        if "eval/reward/mean" in metrics:
            parts.append(f"held-out {metrics['eval/reward/mean']:.3f}")
        if "distill/pushed_share" in metrics:
            parts.append(f"pushed down {metrics['distill/pushed_share']:.1%}")
        parts += [
            f"tokens {metrics['completion_length/mean']:.0f} of at most {metrics['distill/num_tokens']:.0f}",
            f"{metrics['tokens_per_second']:,.0f} tokens/s",
        ]
        return " · ".join([*parts, timing_text(metrics)])

    # -- before training ----------------------------------------------------------------------------------------------

    def before_training(self) -> dict[str, float]:
        """Held-out rewards of the student and of the teacher on the same prompts.

        Raises:
            TeacherError: the lower end of the teacher's margin is below teacher.min_margin.
        """
        metrics = self.preflight.metrics()
        if self.guard is not None:
            metrics |= self.guard.set_baseline(self.run.path / EVAL if self.ranks.is_main else None)
        if self._twin is not None:
            return metrics | self._take_over(self._twin)
        metrics |= self.evaluate(0)
        least = self.config.teacher.min_margin
        if not self.config.teacher.evaluate or not self.eval_items:
            return metrics
        teacher = self._evaluate_teacher()
        self.run.write_teacher_eval(teacher.to_json())
        assert self.last_evaluation is not None
        margin = paired_difference(mean_at_k(teacher.rewards), mean_at_k(self.last_evaluation.rewards))
        mean = teacher.interval().mean
        self.display.say(
            f"teacher · held-out {mean:.3f}, {margin.mean:+.3f} [{margin.low:+.3f}, {margin.high:+.3f}] against the student"
        )
        if margin.low < least:
            raise TeacherError(
                f"The teacher's held-out reward is {mean:.3f}, {margin.mean:+.3f} against the student's (95 % interval "
                f"{margin.low:+.3f} to {margin.high:+.3f}, {len(self.eval_items)} prompts); expected at least {least:+.3f} at its "
                "lower end (teacher.min_margin). Take a better teacher, evaluate on more prompts, or set teacher.min_margin lower."
            )
        return metrics | {
            "eval/teacher/mean": mean,
            "eval/teacher/margin": margin.mean,
            "eval/teacher/margin_low_95": margin.low,
            "eval/teacher/margin_high_95": margin.high,
        }

    def _take_over(self, twin: RunDir) -> dict[str, float]:
        """The twin's evaluations before training: files and metrics."""
        self.run.write_eval(0, read_json(twin.eval_path(0)))
        teacher = twin.path / EVAL / TEACHER_EVAL
        if teacher.is_file():
            self.run.write_teacher_eval(read_json(teacher))
        (first,) = (r for r in twin.read_metrics() if r["step"] == 0)
        return {name: value for name, value in first.items() if name.startswith("eval/")}

    def on_resume(self, step: int) -> None:
        if self.guard is not None:
            self.guard.read_baseline(self.run.path / EVAL)
            calm = [r["step"] for r in self.run.read_metrics() if r.get("probe/alarms") == 0]
            self.guard.last_calm = max(calm, default=0)
        if self.controller is not None:
            self.controller.replay(self.run.read_metrics())

    def _evaluate_teacher(self) -> Evaluation:
        """The teacher answers the held-out prompts as it sees them."""
        config = self.config
        with self.teacher.scoring() as policy, self.display.phase("teacher", total=len(self.eval_items)):
            dense = BudgetSchedule.dense()
            rollout = config.rollout.model_copy(update={"schedule": "dense"})
            engine = setup.build_engine(policy, dense, rollout, self.ranks)
            return evaluate(
                engine,
                self.rewards,
                self.eval_items,
                self.teacher.encode(self.eval_items),
                setup.eval_sampling(policy, config.rollout, config.eval),
                config.eval.num_samples,
                progress=self.display.show_rollout,
            )


def _records(groups: Sequence[RolloutGroup]) -> Iterator[dict[str, Any]]:
    """The first completions of a step, as they are written to rollouts/step-NNNNNN.jsonl."""
    count = 0
    for group in groups:
        for rollout in group.rollouts:
            if count >= _LOGGED_COMPLETIONS:
                return
            count += 1
            yield {
                "prompt_index": group.prompt.index,
                "sample_index": rollout.sample_index,
                "prompt": group.prompt.text,
                "completion": rollout.text,
                "length": len(rollout.token_ids),
                "finish_reason": rollout.finish_reason,
                "weights_version": rollout.weights_version,
            }


def _summary(trainer: DistillTrainer, run: RunDir, result: LoopResult, began: float) -> DistillSummary:
    comparison = None
    if trainer.config.distill.compare_full and not result.interrupted and result.halted is None:
        comparison = trainer.compare_full()
        if trainer.ranks.is_main:
            with storing(run.path / FULL_STEP):
                write_json(run.path / FULL_STEP, asdict(comparison))
    records = run.read_metrics()
    held_out = [r["eval/reward/mean"] for r in records if "eval/reward/mean" in r]
    teacher = [r["eval/teacher/mean"] for r in records if "eval/teacher/mean" in r]
    phases = ("time/rollout_s", "time/teacher_s", "time/score_s", "time/update_s")
    seconds = [sum(r.get(phase, 0.0) for phase in phases) for r in records if r["step"] > 0]
    memory = "memory/peak_device_gib" if trainer.policy.device.type == "cuda" else "memory/peak_rss_gib"
    peaks = [r[memory] for r in records if memory in r]
    return DistillSummary(
        run_dir=run.path,
        last_step=result.last_step,
        interrupted=result.interrupted,
        halted=result.halted,
        before=held_out[0] if held_out else None,
        teacher=teacher[0] if teacher else None,
        after=held_out[-1] if len(held_out) > 1 else None,
        step_s=float(np.median(seconds)) if seconds else None,
        peak_gib=max(peaks) if peaks else None,
        comparison=comparison,
        seconds=time.perf_counter() - began,
    )
