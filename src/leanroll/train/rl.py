"""Reinforcement learning on sparse rollouts: `run(config)` is what `leanroll rl` does.

A step: prompts → groups from the engine → rewards → advantages → dense log-probs → importance-corrected policy loss →
AdamW → the engine follows, since it runs the policy's own modules. Source of the method: Sparrow, arXiv 2606.08446.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, set_seed

from leanroll.config import RLConfig, read_resolved, resume_conflicts, to_dict, to_toml
from leanroll.environment import describe
from leanroll.errors import ConfigError, LeanrollError, ResumeError
from leanroll.measure.selection import SparsePlan
from leanroll.models import Policy
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import CHECKPOINTS, SCHEDULE, RunDir, write_text
from leanroll.rundir_lock import run_lock
from leanroll.tasks.rewards import RewardRunner
from leanroll.train import checkpoint as ckpt
from leanroll.train import setup
from leanroll.train.alpha import alpha_metrics, choose_trajectories
from leanroll.train.collect import Collector, RLBatch
from leanroll.train.evaluation import evaluate
from leanroll.train.loop import LoopPlan, run_loop
from leanroll.train.optim import MasterAdamW
from leanroll.train.policy_module import PolicyModule
from leanroll.train.progress import RunDisplay
from leanroll.train.speed import Speed, compare_speed
from leanroll.train.update import PolicyUpdater

AtEnd = Callable[[RunDir, Callable[[str], None]], None]
"""What a caller of `run` does with the run directory at the end; the second argument prints a line."""

_LOGGED_COMPLETIONS = 32
"""Completions per step written to the run directory, rounded up to whole groups."""

_SPEED_SAMPLES, _SPEED_TOKENS = 16, 96
"""Size of the side-by-side speed figure of the closing line: seconds, not minutes."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run came to; numbers that were not measured are None.

    before, after: held-out mean reward. alpha_p05: 5th percentile of exact acceptance at the last measurement.
    interrupted: stopped by Ctrl-C after `last_step`; resume to go on.
    """

    run_dir: Path
    last_step: int
    interrupted: bool
    before: float | None
    after: float | None
    alpha_p05: float | None
    speed: Speed | None
    seconds: float

    def line(self) -> str:
        """The closing line."""
        parts = []
        if self.before is not None and self.after is not None:
            parts.append(f"held-out reward {self.before:.3f} → {self.after:.3f}")
        if self.alpha_p05 is not None:
            parts.append(f"5th-percentile acceptance {self.alpha_p05:.3f}")
        if self.speed is not None:
            parts.append(f"tokens/s dense {self.speed.dense:,.0f}, sparse {self.speed.sparse:,.0f}")
        if self.interrupted:
            parts.append(f"interrupted after step {self.last_step}, continue with --resume")
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
    """
    began = time.perf_counter()
    schedule = setup.build_schedule(config.rollout)
    path = config.train.run_dir or f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with ExitStack() as lock, RunDisplay(config.train.steps, 1, quiet=quiet) as display:
        previous = None
        if resume:
            _check_resumable(config)
            lock.enter_context(run_lock(path))
            previous = _open_run(path, config, schedule)
            if previous is None:
                display.say(f"{path} holds no run yet; starting from the beginning.")
        else:
            RunDir.check_free(path)  # before a large model is read
        with display.phase("load"):
            trainer = Trainer(config, schedule, display)
        with trainer.rewards:
            with display.phase("load"):
                trainer.rewards.start()
            if not resume:
                lock.enter_context(run_lock(path))
            run_dir = previous or _create_run(path, config, schedule, trainer.policy)
            try:
                summary = trainer.train(run_dir, began)
            except LeanrollError:
                _finish(at_end, run_dir, display)
                raise
            _finish(at_end, run_dir, display)
        display.say(summary.line())
    return summary


def _finish(at_end: AtEnd | None, run_dir: RunDir, display: RunDisplay) -> None:
    if at_end is not None:
        with display.phase("report"):
            at_end(run_dir, display.say)


class Trainer:
    """The objects of a run, and the `Algorithm` of the step loop."""

    def __init__(self, config: RLConfig, schedule: BudgetSchedule, display: RunDisplay) -> None:
        _check(config)
        self.config, self.schedule, self.display = config, schedule, display
        set_seed(config.train.seed % 2**32)  # of the global generators, which rewards in this process may draw from
        self.policy: Policy = setup.build_policy(
            config.model, config.adapter, training=True, seed=config.train.seed % 2**31
        )
        if config.train.gradient_checkpointing:
            self.policy.enable_gradient_checkpointing()
        task = setup.build_task(config.task)
        self.task = task
        self.encoder = setup.PromptEncoder(self.policy, config.task)
        self.rewards: RewardRunner = setup.build_rewards(config.task, task)
        self.engine = setup.build_engine(self.policy, schedule, config.rollout)
        self.sampling = setup.sampling_params(
            self.policy, config.rollout, seed=config.train.seed, num_top_logprobs=config.measure.num_top_logprobs
        )
        self.eval_items = task.eval_items(config.eval.num_prompts) if config.eval.num_prompts else []
        self.eval_prompts = self.encoder.encode(self.eval_items)
        self.collector = Collector(config, task, self.encoder, self.engine, self.rewards, self.sampling, display)
        self.collector.check(step=1)
        self.eval_sampling = setup.eval_sampling(self.policy, config.rollout, config.eval)
        self.engine.check(self.eval_prompts, self.eval_sampling)
        self.optimizer = MasterAdamW(
            self.policy.trainable_parameters().items(),
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
        )
        self.plan = None
        if not schedule.is_dense:
            kv_dtype = setup.DTYPES[config.rollout.kv_dtype] if config.rollout.kv_dtype is not None else None
            self.plan = SparsePlan.of(self.policy.spec, schedule, kv_dtype=kv_dtype)
        self.accelerator = Accelerator(
            cpu=self.policy.device.type == "cpu",
            # Whatever the environment says: the engine samples without autocast, and losses are normalised already.
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            log_with=list(config.train.trackers) or None,
            project_dir=".",  # must be named here; `train` puts the run directory in its place
        )
        if self.accelerator.num_processes > 1:
            raise ConfigError(
                f"Started as {self.accelerator.num_processes} processes; training runs in one for now. Start it without a "
                "multi-process launcher."
            )
        self.module = self.accelerator.prepare_model(PolicyModule(self.policy), device_placement=False)
        self._reference: Policy | None = None
        if config.rl.beta > 0 and (config.adapter.type == "none" or config.adapter.path is not None):
            # Without its adapter the policy is where a new adapter starts, but not where a loaded one does, be it named by
            # adapter.path or by model.name.
            self._reference = setup.build_policy(config.model, config.adapter, training=True)
            self._reference.model.requires_grad_(False)
        self._updater: PolicyUpdater | None = None
        self._run: RunDir | None = None
        self._random: dict[str, Any] = {}

    # -- Algorithm ----------------------------------------------------------------------------------------------------

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far."""
        return self.updater.num_updates

    @property
    def updater(self) -> PolicyUpdater:
        """Set up by `train`."""
        assert self._updater is not None
        return self._updater

    @property
    def run(self) -> RunDir:
        """Set up by `train`."""
        assert self._run is not None
        return self._run

    def collect(self, step: int) -> RLBatch:
        """Roll out and score."""
        batch = self.collector.collect(step)
        self.run.write_rollouts(step, batch.records(_LOGGED_COMPLETIONS))
        return batch

    def update(self, step: int, batch: RLBatch) -> dict[str, float]:
        """Measure acceptance when it is due (before the weights move), then update."""
        metrics = dict(batch.metrics)
        measure = self.config.measure
        if self.plan is not None and measure.alpha_every and (step - 1) % measure.alpha_every == 0:
            with self.display.phase("measure"):
                metrics |= alpha_metrics(
                    self.policy,
                    choose_trajectories(batch.sampled, measure.alpha_trajectories),
                    self.plan,
                    temperature=self.config.rollout.temperature,
                    max_tokens=self.config.train.micro_batch_tokens,
                    bin_tokens=measure.bin_tokens,
                    with_top_logprobs=measure.num_top_logprobs > 0,
                )
        metrics |= self.updater.update(step, batch.training)
        return metrics | _memory(self.policy.device)

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out reward with the run's sampler; the whole result goes to eval/step-NNNNNN.json."""
        evaluation = self.config.eval
        if not self.eval_items:
            return {}
        total = len(self.eval_items) * evaluation.num_samples
        with self.display.phase("eval", total=total):
            result = evaluate(
                self.engine,
                self.rewards,
                self.eval_items,
                self.eval_prompts,
                self.eval_sampling,
                evaluation.num_samples,
                progress=lambda p: self.display.advance(
                    p.num_finished, p.num_samples, f"{p.tokens_per_second:,.0f} tokens/s"
                ),
            )
        record = result.to_json()
        self.run.write_eval(step, record)
        metrics = {f"eval/reward/{name}": value for name, value in record["rewards"].items()}
        metrics["eval/reward/mean"] = record["mean_reward"]
        for key in ("low_95", "high_95", "mean_length", "truncated_share", "missing"):
            metrics[f"eval/{key}"] = record[key]
        return metrics

    # -- the run ------------------------------------------------------------------------------------------------------

    def train(self, run: RunDir, began: float) -> RunSummary:
        """Run the loop on a run directory, from its latest checkpoint if it has one."""
        config, display = self.config, self.display
        self._run = run
        self._updater = PolicyUpdater(
            self.policy, self.module, self.optimizer, self.accelerator, config, run, display, self._reference
        )
        checkpoints = ckpt.Checkpoints(run.path / CHECKPOINTS, config.train.keep_checkpoints)
        done = self._restore(checkpoints)
        if config.train.trackers:
            self.accelerator.project_configuration.logging_dir = str(run.path)
            self.accelerator.init_trackers(config.name, config={"recipe": to_toml(config)})
        if done < 0:
            metrics = self.evaluate(0)
            self._log(0, metrics | _timings(display))
            if metrics:
                display.say(f"before training · held-out {metrics['eval/reward/mean']:.3f}")
            done = 0
        display.clock.take()
        result = run_loop(
            self,
            LoopPlan(done + 1, config.train.steps, config.eval.every, config.train.save_every),
            display,
            log=self._log,
            save=lambda step: self._save(checkpoints, step),
            summarise=_step_line,
        )
        if config.train.trackers:
            self.accelerator.end_training()
        speed = None if result.interrupted or self.plan is None else self._speed()
        return _summary(run, result.last_step, result.interrupted, speed, time.perf_counter() - began)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.append_metrics({"step": step, **metrics})
        # A checkpoint of this step may only be written when the next one fails, after its rewards have drawn numbers.
        self._random = ckpt.random_state()
        if self.config.train.trackers:
            self.accelerator.log(dict(metrics), step=step)

    def _save(self, checkpoints: ckpt.Checkpoints, step: int) -> None:
        def write(directory: Path) -> None:
            self.policy.save_pretrained(directory / ckpt.POLICY_DIR)
            state = {
                "optimizer": self.optimizer.state_dict(),
                "random": self._random,
                "num_updates": self.num_updates,
                "policy_version": self.policy.version,
            }
            torch.save(state, directory / ckpt.TRAINER_FILE)

        with self.display.phase("checkpoint"):
            checkpoints.save(step, write, {"config": to_dict(self.config)})

    def _restore(self, checkpoints: ckpt.Checkpoints) -> int:
        """Load the latest checkpoint and forget what came after it; returns its step, -1 without one."""
        latest = checkpoints.latest()
        step = -1 if latest is None else int(ckpt.read_state(latest)["step"])
        self.run.truncate_after(step)
        checkpoints.drop_newer_than(step)
        if latest is None:
            return -1
        state: dict[str, Any] = torch.load(
            latest / ckpt.TRAINER_FILE,
            map_location="cpu",  # generators' states must be there; the rest is copied to where the weights are
            weights_only=True,
        )
        self.optimizer.load_state_dict(state["optimizer"])
        self._random = state["random"]
        ckpt.set_random_state(self._random)
        self.updater.num_updates = state["num_updates"]
        self.policy.version = state["policy_version"]
        return step

    def _speed(self) -> Speed:
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


def _check(config: RLConfig) -> None:
    if config.eval.num_prompts and config.eval.split != "eval":
        raise ConfigError(f"eval.split is {config.eval.split!r}; training evaluates on the task's split 'eval'.")
    available = {str(tracker) for tracker in get_available_trackers()}
    missing = [name for name in config.train.trackers if name not in available]
    if missing:
        raise ConfigError(
            f"train.trackers names {', '.join(missing)}, which is not installed; run `pip install 'leanroll[trackers]'`, or "
            "take it out."
        )


def _check_resumable(config: RLConfig) -> None:
    """Raise ResumeError unless the run directory is a run's; a folder of something else is not even locked."""
    if config.train.run_dir is None:
        raise ResumeError("Nothing to resume: train.run_dir is not set; give the run directory to continue.")
    if not RunDir.is_unstarted(config.train.run_dir):
        RunDir.open(config.train.run_dir)


def _open_run(path: str, config: RLConfig, schedule: BudgetSchedule) -> RunDir | None:
    """The run to continue; None when it was killed before its recipe was written, so that there is nothing to continue."""
    if RunDir.is_unstarted(path):
        return None
    run = RunDir.open(path)
    steps_done = max(run.checkpoint_steps(), default=0)
    conflicts = resume_conflicts(read_resolved(RLConfig, run.config_path), config, steps_done)
    if conflicts:
        changes = "; ".join(f"{key}: {old!r} → {new!r}" for key, (old, new) in conflicts.items())
        raise ResumeError(
            f"Cannot resume {run.path}: {len(conflicts)} options changed since the run began ({changes}). Undo the changes, or "
            "start a new run directory."
        )
    saved = run.path / SCHEDULE
    if saved.is_file() and not schedule.same_reading(BudgetSchedule.load(saved)):
        raise ResumeError(
            f"Cannot resume {run.path}: the content of rollout.schedule {schedule.name!r} differs from the run's "
            f"{SCHEDULE}. Restore the schedule, or start a new run directory."
        )
    try:
        write_text(run.config_path, to_toml(config))
        write_text(saved, schedule.to_json() + "\n")
    except OSError as error:
        raise ResumeError(
            f"Cannot resume {run.path}: it cannot be written ({error.strerror or error}). Make it writable, or copy it to a "
            "place that is."
        ) from error
    return run


def _create_run(path: str, config: RLConfig, schedule: BudgetSchedule, policy: Policy) -> RunDir:
    environment = describe({"device": str(policy.device), "dtype": str(policy.dtype).removeprefix("torch.")})
    run = RunDir.create(path, config_toml=to_toml(config), environment=environment)
    write_text(run.path / SCHEDULE, schedule.to_json() + "\n")
    return run


def _summary(run: RunDir, last_step: int, interrupted: bool, speed: Speed | None, seconds: float) -> RunSummary:
    records = run.read_metrics()
    held_out = [r["eval/reward/mean"] for r in records if "eval/reward/mean" in r]
    alphas = [r["alpha/p05"] for r in records if "alpha/p05" in r]
    return RunSummary(
        run_dir=run.path,
        last_step=last_step,
        interrupted=interrupted,
        before=held_out[0] if held_out else None,
        after=held_out[-1] if len(held_out) > 1 else None,
        alpha_p05=alphas[-1] if alphas else None,
        speed=speed,
        seconds=seconds,
    )


def _timings(display: RunDisplay) -> dict[str, float]:
    return {f"time/{name}_s": seconds for name, seconds in display.clock.take().items()}


def _memory(device: torch.device) -> dict[str, float]:
    # ru_maxrss is in KiB on Linux, in bytes on macOS.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    metrics = {"memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if device.type == "cuda":
        metrics["memory/peak_device_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return metrics


def _step_line(step: int, metrics: Mapping[str, float]) -> str:
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
    timed = ("rollout", "reward", "measure", "score", "update", "eval", "checkpoint")
    phases = [f"{name} {metrics[f'time/{name}_s']:.1f}" for name in timed if f"time/{name}_s" in metrics]
    return " · ".join([*parts, f"{metrics['time/step_s']:.1f} s ({', '.join(phases)})"])
