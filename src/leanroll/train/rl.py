"""Reinforcement learning on sparse rollouts: `run(config)` is what `leanroll rl` does.

A step: prompts → groups from the engine → rewards → advantages → dense log-probs → importance-corrected policy loss →
AdamW → an update of the sampler's own adapter, if it has one → the engine follows, since it runs the policy's own modules.
Source of the method: Sparrow, arXiv 2606.08446.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from leanroll.config import RLConfig
from leanroll.measure.alarm import Watcher
from leanroll.measure.selection import SparsePlan
from leanroll.models import Policy
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import HELD_SCHEDULE, RunDir, write_text
from leanroll.rundir_storage import storing
from leanroll.train import setup
from leanroll.train.alpha import alpha_metrics, choose_trajectories
from leanroll.train.collect import Collector, RLBatch
from leanroll.train.hold import HeldSchedule
from leanroll.train.loop import LoopResult
from leanroll.train.policy_module import PolicyModule
from leanroll.train.progress import RunDisplay
from leanroll.train.ranks import ALONE, Ranks
from leanroll.train.sampler_adapter import PolicyTerms, SamplerAdapterTrainer
from leanroll.train.session import AtEnd, run_session
from leanroll.train.speed import Speed, compare_speed
from leanroll.train.trainer import Trainer, timing_text
from leanroll.train.update import PolicyUpdater, TrainingGroup

_LOGGED_COMPLETIONS = 32
"""Completions per step written to the run directory, rounded up to whole groups."""

_SPEED_SAMPLES, _SPEED_TOKENS = 16, 96
"""Size of the side-by-side speed figure of the closing line: seconds, not minutes."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run came to; numbers that were not measured are None.

    before, after: held-out mean reward. alpha_p05: 5th percentile of exact acceptance at the last measurement.
    kv_share_read: of the last step, where budgets moved (rollout.control = "hold"); else None.
    interrupted: stopped by Ctrl-C after `last_step`; resume to go on. halted: why the alarm stopped it.
    """

    run_dir: Path
    last_step: int
    interrupted: bool
    halted: str | None
    before: float | None
    after: float | None
    alpha_p05: float | None
    kv_share_read: float | None
    speed: Speed | None
    seconds: float

    def line(self) -> str:
        """The closing line."""
        parts = []
        if self.before is not None and self.after is not None:
            parts.append(f"held-out reward {self.before:.3f} → {self.after:.3f}")
        if self.alpha_p05 is not None:
            parts.append(f"5th-percentile acceptance {self.alpha_p05:.3f}")
        if self.kv_share_read is not None:
            parts.append(f"KV read {self.kv_share_read:.2f}")
        if self.speed is not None:
            parts.append(f"tokens/s dense {self.speed.dense:,.0f}, sparse {self.speed.sparse:,.0f}")
        if self.interrupted:
            parts.append(f"interrupted after step {self.last_step}, continue with --resume")
        if self.halted is not None:
            parts.append(f"stopped by itself: {self.halted}")
        return " · ".join([*parts, str(self.run_dir)])


def run(
    config: RLConfig,
    resume: bool = False,
    *,
    quiet: bool = False,
    at_end: AtEnd | None = None,
) -> RunSummary:
    """Train a policy.

    resume: continue the run in `config.train.run_dir` from its latest checkpoint; from the start when it has none, or
        when it was killed before its first files were complete.
    quiet: no progress and no closing line.
    at_end: called before the closing line while the run directory is still locked: when the run is finished or interrupted,
        and when an error of leanroll's stops it.

    Raises:
        ConfigError, ModelError, BackendUnavailable: something in the recipe cannot be used, or the run directory cannot
            be written; nothing has been written.
        ResumeError: no run there, it cannot be written, or its recipe or schedule differs in something that matters.
        RunDirInUse: another process trains in the run directory.
        RewardError: a reward failed and task.on_reward_error is "fail".
        TrainingDiverged: a loss or gradient is not finite; see diagnosis/ in the run directory.
        RankError: with several processes, one is gone, or does not go the way of the others.
        StorageError: the disk of the run directory is full, has become read-only, or failed; no page is written then.
    """
    return run_session(config, partial(RLTrainer, config), _summary, resume=resume, quiet=quiet, at_end=at_end)


class RLTrainer(Trainer[RLConfig, RLBatch]):
    """GRPO and its kin, corrected for the sampler's mismatch."""

    def __init__(self, config: RLConfig, schedule: BudgetSchedule, display: RunDisplay, ranks: Ranks = ALONE) -> None:
        super().__init__(config, schedule, display, ranks)
        self.sampling = setup.sampling_params(
            self.policy, config.rollout, seed=config.train.seed, num_top_logprobs=config.measure.num_top_logprobs
        )
        self.collector = Collector(config, self.task, self.encoder, self.engine, self.rewards, self.sampling, display)
        self.collector.check(step=1)
        self.plan = None
        if not schedule.is_dense:
            kv_dtype = setup.DTYPES[config.rollout.kv_dtype] if config.rollout.kv_dtype is not None else None
            self.plan = SparsePlan.of(self.policy.spec, schedule, kv_dtype=kv_dtype)
        self.sampler = self._sampler_adapter()
        self.held: HeldSchedule | None = None
        if config.rollout.control == "hold":
            # A micro-batch must hold every sequence, but for its last token.
            longest = min(config.train.micro_batch_tokens + 1, self.policy.spec.max_position)
            self.held = HeldSchedule(
                schedule, config.rollout, longest, with_sampler_adapter=config.sampler_adapter.is_on
            )
            self._first_control = self.held.state()
            self._use(self.held.schedule)
        self.module = self.prepare(PolicyModule(self.policy))
        self.alarm = None if config.alarm.on_alarm == "off" else Watcher(config.alarm)
        self._reference: Policy | None = None
        if config.rl.beta > 0 and (config.adapter.type == "none" or config.adapter.path is not None):
            # Without its adapter the policy is where a new adapter starts, but not where a loaded one does, be it named by
            # adapter.path or by model.name.
            self._reference = setup.build_policy(config.model, config.adapter, training=True)
            self._reference.model.requires_grad_(False)

    def collect(self, step: int) -> RLBatch:
        """Roll out and score."""
        batch = self.collector.collect(step)
        self.run.write_rollouts(step, batch.records(_LOGGED_COMPLETIONS))
        return batch

    def update(self, step: int, batch: RLBatch) -> dict[str, float]:
        """Measure acceptance when it is due (before the weights move), then update; at the very end, the next step's budgets."""
        metrics = dict(batch.metrics)
        measure = self.config.measure
        every = measure.alpha_every if self.held is None else 1
        sample = choose_trajectories(batch.sampled, measure.alpha_trajectories)
        rates: tuple[np.ndarray, ...] = ()
        if self.plan is not None and every and (step - 1) % every == 0:
            with self.display.phase("measure"):
                acceptance, rates = alpha_metrics(
                    self.policy,
                    sample,
                    self.plan,
                    temperature=self.config.rollout.temperature,
                    max_tokens=self.config.train.micro_batch_tokens,
                    bin_tokens=measure.bin_tokens,
                    with_top_logprobs=measure.num_top_logprobs > 0,
                    ranks=self.ranks,
                )
                metrics |= acceptance
        updater = PolicyUpdater(
            self.policy, self.module, self.stepper, self.config, self.run, self.display, self._reference
        )
        metrics |= self._update_both(step, batch.training, updater)
        metrics |= self._watch(step, metrics) | self.memory()
        if self.held is not None:
            # Not before: a step that fails leaves the state of the one before it.
            control, moves = self.held.observe(step, sample, rates)
            metrics |= control
            self._use(self.held.schedule)
            self._write_schedule()
            if moves:
                self.display.say(f"step {step} · budgets {', '.join(moves)}")
        return metrics

    def before_training(self) -> dict[str, float]:
        self._write_schedule()
        return super().before_training()

    def on_resume(self, step: int) -> None:
        self._write_schedule()
        if self.alarm is not None:
            self.alarm.replay(self.run.read_metrics())

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.held is not None:
            state["control"] = self.held.state()
        if self.sampler is not None:
            state["sampler_adapter"] = self.sampler.state_dict()
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.sampler is not None:
            self.sampler.load_state_dict(state["sampler_adapter"])
        if self.held is not None:
            self.held.load_state(state["control"])
            self._use(self.held.schedule)

    def went_back(self, state: Mapping[str, Any]) -> None:
        if self.held is not None:
            self.held.load_state(state.get("control", self._first_control))
            self._use(self.held.schedule)
            self._write_schedule()

    def checksum(self) -> float:
        return super().checksum() + (0.0 if self.sampler is None else self.sampler.checksum())

    def _use(self, schedule: BudgetSchedule) -> None:
        """Sample with these budgets from now on; what was sampled must have been measured."""
        assert self.plan is not None
        self.engine.use_schedule(schedule)
        self.schedule, self.plan = schedule, replace(self.plan, schedule=schedule)
        if self.sampler is not None:
            self.sampler.plan = self.plan

    def _write_schedule(self) -> None:
        if self.held is not None and self.ranks.is_main:
            path = self.run.path / HELD_SCHEDULE
            with storing(path):
                write_text(path, self.held.schedule.to_json() + "\n")

    def _sampler_adapter(self) -> SamplerAdapterTrainer | None:
        """The sampler's own adapter and its optimizer (DistillSparse), where the recipe has one."""
        options = self.config.sampler_adapter
        note = setup.check_sampler(self.schedule, options)
        if note is not None:
            self.display.say(note)
        if not options.is_on:
            return None
        assert self.plan is not None
        setup.add_sampler(self.policy, options, seed=self.config.train.seed % 2**31)
        return SamplerAdapterTrainer(
            self.policy,
            self.plan,
            self.accelerator,
            options,
            self.config.optimizer,
            temperature=self.config.rollout.temperature,
            max_tokens=self.config.train.micro_batch_tokens,
        )

    def _update_both(self, step: int, groups: Sequence[TrainingGroup], updater: PolicyUpdater) -> dict[str, float]:
        """The policy, then the sampler's adapter towards what the policy was before."""
        if self.sampler is None or not groups:
            return updater.update(step, groups)
        plain = [g.group for g in groups]
        with self.display.phase("sampler"):
            targets = self.sampler.targets(plain)
        metrics = updater.update(step, groups)
        with self.display.phase("sampler"):
            return metrics | self.sampler.update(step, plain, targets, PolicyTerms.of(self.config, groups))

    def _watch(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Look for signs of collapse, and answer them."""
        if self.alarm is None:
            return {}
        verdict = self.alarm.observe({"step": step, **metrics})
        if verdict.raised:
            self.run.write_alarm(step, verdict.to_json())
            text = f"step {step} may have collapsed: {verdict.text()}."
            self.react(text, self.config.alarm.on_alarm, verdict.last_calm)
        return verdict.metrics()

    def step_line(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"step {step}", f"reward {metrics['reward/mean']:.3f}"]
        if "eval/reward/mean" in metrics:
            parts.append(f"held-out {metrics['eval/reward/mean']:.3f}")
        if "alpha/p05" in metrics:
            parts.append(f"alpha p05 {metrics['alpha/p05']:.3f}")
        parts += [
            f"length {metrics['completion_length/mean']:.0f}",
            f"KV read {metrics['kv_share_read']:.2f}",
            f"{metrics['tokens_per_second']:,.0f} tokens/s",
        ]
        return " · ".join([*parts, timing_text(metrics)])

    def speed(self) -> Speed | None:
        """Dense and sparse decoding side by side, on two prompts; None where nothing is sparse, or another process measures."""
        if self.plan is None or not self.ranks.is_main:
            return None
        some = min(2, 2 if self.task.num_train is None else self.task.num_train)
        prompts = self.eval_prompts or self.encoder.encode([self.task.train_item(i) for i in range(some)])
        with self.display.phase("speed"):
            return compare_speed(
                self.policy,
                self.schedule,
                self.config.rollout,
                prompts[:2],
                self.sampling,
                num_samples=_SPEED_SAMPLES // 2,
                num_tokens=min(_SPEED_TOKENS, self.config.rollout.max_completion_length),
            )


def _summary(trainer: RLTrainer, run: RunDir, result: LoopResult, began: float) -> RunSummary:
    speed = None if result.interrupted or result.halted is not None else trainer.speed()
    records = run.read_metrics()
    held_out = [r["eval/reward/mean"] for r in records if "eval/reward/mean" in r]
    alphas = [r["alpha/p05"] for r in records if "alpha/p05" in r]
    shares = [r["kv_share_read"] for r in records if "kv_share_read" in r and trainer.held is not None]
    return RunSummary(
        run_dir=run.path,
        last_step=result.last_step,
        interrupted=result.interrupted,
        halted=result.halted,
        before=held_out[0] if held_out else None,
        after=held_out[-1] if len(held_out) > 1 else None,
        alpha_p05=alphas[-1] if alphas else None,
        kv_share_read=shares[-1] if shares else None,
        speed=speed,
        seconds=time.perf_counter() - began,
    )
