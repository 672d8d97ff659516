"""What every trainer is made of: policy, task, rewards, engine, optimizer, evaluation, checkpoints, the run's records.

A trainer adds how a batch is made and how the policy is updated on it (`collect`, `update`); `train.loop` says when, and
`train.session` what surrounds it all.
"""

from __future__ import annotations

import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch import nn

from leanroll.config import DistillConfig, RLConfig, to_dict, to_toml
from leanroll.errors import ConfigError, LeanrollError, RankError
from leanroll.models import Policy
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import CHECKPOINTS, RunDir
from leanroll.tasks.rewards import RewardRunner
from leanroll.train import checkpoint as ckpt
from leanroll.train import setup
from leanroll.train.evaluation import Evaluation, evaluate
from leanroll.train.loop import Halt, LoopPlan, LoopResult, run_loop
from leanroll.train.optim import MasterAdamW
from leanroll.train.progress import RunDisplay
from leanroll.train.ranks import ALONE, Ranks, fingerprint
from leanroll.train.sharding import ShardedAdamW, ShardedWeights
from leanroll.train.stepper import Stepper

ConfigT = TypeVar("ConfigT", RLConfig, DistillConfig)
BatchT = TypeVar("BatchT")
ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Trainer(ABC, Generic[ConfigT, BatchT]):
    """The objects of a run, and the `Algorithm` of the step loop. Close it after use."""

    def __init__(self, config: ConfigT, schedule: BudgetSchedule, display: RunDisplay, ranks: Ranks = ALONE) -> None:
        """Nothing is written, and no worker process is started yet. ranks: the processes of the run, each with a trainer.

        Raises:
            ConfigError, ModelError, BackendUnavailable: something in the recipe cannot be used.
        """
        _check(config)
        self.config: ConfigT = config
        self.schedule, self.display, self.ranks = schedule, display, ranks
        # Of the global generators, which rewards in this process may draw from.
        set_seed((config.train.seed + ranks.rank) % 2**32)
        self.policy: Policy = setup.build_policy(
            config.model, config.adapter, training=True, seed=config.train.seed % 2**31
        )
        if ranks.size > 1:
            ranks.check_equal(fingerprint(self.policy), "weights")
        self.weights = ShardedWeights(self.policy, ranks) if ranks.sharded else None
        if config.train.gradient_checkpointing:
            self.policy.enable_gradient_checkpointing()
        self.task = setup.build_task(config.task)
        self.encoder = setup.PromptEncoder(self.policy, config.task)
        self.rewards: RewardRunner = setup.build_rewards(config.task, self.task, ranks)
        self.engine = setup.build_engine(self.policy, schedule, config.rollout, ranks)
        self.eval_items = self.task.eval_items(config.eval.num_prompts) if config.eval.num_prompts else []
        self.eval_prompts = self.encoder.encode(self.eval_items)
        self.eval_sampling = setup.eval_sampling(self.policy, config.rollout, config.eval)
        self.engine.check(self.eval_prompts, self.eval_sampling)
        self.optimizer = self._optimizer()
        self.accelerator = Accelerator(
            cpu=self.policy.device.type == "cpu",
            # Whatever the environment says: the engine samples without autocast, and losses are normalised already.
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            log_with=list(config.train.trackers) or None,
            project_dir=".",  # must be named here; `train` puts the run directory in its place
        )
        self.stepper = Stepper(
            self.policy,
            self.optimizer,
            self.accelerator,
            max_grad_norm=config.optimizer.max_grad_norm,
            ranks=ranks,
        )
        self.halt: Halt | None = None
        self.last_evaluation: Evaluation | None = None
        self._run: RunDir | None = None
        self._random: list[dict[str, Any]] = []

    # -- Algorithm ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def collect(self, step: int) -> BatchT:
        """Make the step's training batch."""

    @abstractmethod
    def update(self, step: int, batch: BatchT) -> dict[str, float]:
        """Update the policy; return the step's metrics."""

    @abstractmethod
    def step_line(self, step: int, metrics: Mapping[str, float]) -> str:
        """What the user sees of a step: its own figures; `timing_text` has the rest."""

    def _optimizer(self) -> MasterAdamW:
        config = self.config.optimizer
        make: Callable[..., MasterAdamW] = partial(MasterAdamW, self.policy.trainable_parameters().items())
        if self.weights is not None:
            make = partial(ShardedAdamW, self.weights, self.ranks)
        return make(lr=config.learning_rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far."""
        return self.stepper.num_updates

    @property
    def run(self) -> RunDir:
        """Set by `train`."""
        assert self._run is not None
        return self._run

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
                progress=self.display.show_rollout,
            )
        self.last_evaluation = result
        record = result.to_json()
        self.run.write_eval(step, record)
        metrics = {f"eval/reward/{name}": value for name, value in record["rewards"].items()}
        metrics["eval/reward/mean"] = record["mean_reward"]
        for key in ("low_95", "high_95", "mean_length", "truncated_share", "missing"):
            metrics[f"eval/{key}"] = record[key]
        return metrics

    def react(self, alarm: str, action: str, last_calm: int) -> None:
        """Answer an alarm that stands in words: "warn" says it, "stop" halts too, "roll_back" halts and goes back to the newest
        checkpoint of step `last_calm` or before (0: to before training)."""
        self.display.say(alarm)
        if action == "stop":
            self.halt = Halt(alarm)
        elif action == "roll_back":
            target = max((step for step in self.run.checkpoint_steps() if step <= last_calm), default=0)
            if last_calm and not target:
                self.halt = Halt(f"{alarm} No checkpoint of step {last_calm} or before is left; this step was saved.")
            else:
                self.halt = Halt(f"{alarm} Back to step {target}.", target)

    # -- the run ------------------------------------------------------------------------------------------------------

    def train(self, run: RunDir) -> LoopResult:
        """Run the loop on a run directory, from its latest checkpoint if it has one."""
        config, display = self.config, self.display
        self._run = run
        checkpoints = ckpt.Checkpoints(run.path / CHECKPOINTS, config.train.keep_checkpoints)
        done = self._restore(checkpoints)
        if config.train.trackers:
            self.accelerator.project_configuration.logging_dir = str(run.path)
            self.accelerator.init_trackers(config.name, config={"recipe": to_toml(config)})
        if done < 0:
            metrics = self.before_training()
            self._log(0, metrics | _timings(display))
            if "eval/reward/mean" in metrics:
                display.say(f"before training · held-out {metrics['eval/reward/mean']:.3f}")
            done = 0
        else:
            self.on_resume(done)
        display.clock.take()
        result = run_loop(
            self,
            LoopPlan(done + 1, config.train.steps, config.eval.every, config.train.save_every),
            display,
            log=self._log,
            save=lambda step: self._save(checkpoints, step),
            rescue=lambda step, error: self._rescue(checkpoints, step, error),
            forget=lambda step: self._go_back(checkpoints, step),
            summarise=self.step_line,
            agree=lambda flag: self.ranks.any(flag, "interrupt"),
        )
        for tracker in self.accelerator.trackers:  # `end_training` would also end what the processes share
            tracker.finish()
        return result

    def prepare(self, module: ModuleT) -> ModuleT:
        """A module for training. Never wrapped for several processes: `Stepper.combine` sums their gradients."""
        prepared: ModuleT = self.accelerator.prepare_model(module, device_placement=False, evaluation_mode=True)
        return prepared

    def before_training(self) -> dict[str, float]:
        """Metrics of step 0."""
        return self.evaluate(0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs besides policy, optimizer and generators: tensors and plain values."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""

    def went_back(self, state: Mapping[str, Any]) -> None:
        """Called in the main process when later checkpoints were dropped. state: what `state` returned at the one that now counts;
        empty where none is left."""

    def on_resume(self, step: int) -> None:
        """Called instead of `before_training` when a run goes on after `step`."""

    def checksum(self) -> float:
        """A number that differs between processes whose trained weights do."""
        return self.optimizer.checksum()

    def memory(self) -> dict[str, float]:
        """Peak memory so far, as metrics."""
        # ru_maxrss is in KiB on Linux, in bytes on macOS.
        unit = 2**30 if sys.platform == "darwin" else 2**20
        metrics = {"memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
        if self.policy.device.type == "cuda":
            metrics["memory/peak_device_gib"] = torch.cuda.max_memory_allocated(self.policy.device) / 2**30
        return metrics

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.append_metrics({"step": step, **metrics})
        # A checkpoint of this step may only be written when the next one fails, after its rewards have drawn numbers; and then
        # the ranks meet no more.
        self._random = self.ranks.gather(ckpt.random_state(), "random states")
        if self.ranks.size > 1:
            self.ranks.check_equal(self.checksum(), "updated weights")
        if self.config.train.trackers:
            self.accelerator.log(dict(metrics), step=step)

    def _save(self, checkpoints: ckpt.Checkpoints, step: int) -> None:
        with self.display.phase("checkpoint"):
            optimizer = self.optimizer.state_dict()  # shards are put together by all
        if not self.ranks.is_main:
            return

        def write(directory: Path) -> None:
            model = None if self.weights is None else self.weights.state_dict()
            self.policy.save_pretrained(directory / ckpt.POLICY_DIR, state_dict=model)
            if self.policy.sampler is not None:
                self.policy.sampler.save(directory / ckpt.SAMPLER_DIR)
            state = {
                "optimizer": optimizer,
                "random": self._random[0],
                "random_of_others": self._random[1:],
                "num_updates": self.num_updates,
                "policy_version": self.policy.version,
                **self.state(),
            }
            # Through a file of Python's: torch's own writer does not say why it failed.
            with (directory / ckpt.TRAINER_FILE).open("wb") as file:
                torch.save(state, file)

        with self.display.phase("checkpoint"):
            checkpoints.save(step, write, {"config": to_dict(self.config)})

    def _rescue(self, checkpoints: ckpt.Checkpoints, step: int, error: LeanrollError) -> None:
        """Save a step because the next one failed. Shards need all processes for that."""
        if self.weights is None:
            return self._save(checkpoints, step)
        try:
            if self.ranks.meet_after(error, (step, self.weights.is_whole)):
                self.weights.gather()
                return self._save(checkpoints, step)
        except RankError:  # another one is gone since
            pass
        self.display.say(f"Step {step} is not saved: its state is split over processes, and not all of them are left.")

    def _go_back(self, checkpoints: ckpt.Checkpoints, step: int) -> None:
        """Drop the checkpoints later than a step."""
        if not self.ranks.is_main:
            return
        checkpoints.go_back_to(step)
        latest = checkpoints.latest()
        self.went_back({} if latest is None else _load(latest))

    def _restore(self, checkpoints: ckpt.Checkpoints) -> int:
        """Load the latest checkpoint and forget what came after it; returns its step, -1 without one."""
        latest, step = None, -1
        if self.ranks.is_main:
            latest = checkpoints.latest()
            step = -1 if latest is None else int(ckpt.read_state(latest)["step"])
            self.run.truncate_after(step)
            checkpoints.drop_newer_than(step)
        latest, step = self.ranks.from_main((latest, step), "checkpoint")
        if latest is None:
            return -1
        state: dict[str, Any] = _load(latest)
        self.optimizer.load_state_dict(state["optimizer"])
        self._random = [state["random"], *state.get("random_of_others", [])]  # a run before there were several has none
        if self.ranks.rank < len(self._random):  # a rank that the run did not have begins with its seed
            ckpt.set_random_state(self._random[self.ranks.rank])
        self.stepper.num_updates = state["num_updates"]
        self.policy.version = state["policy_version"]
        self.load_state(state)
        return step


def _load(checkpoint: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint, on the CPU: generators' states must be there; the rest is copied to where the weights
    are."""
    state: dict[str, Any] = torch.load(checkpoint / ckpt.TRAINER_FILE, map_location="cpu", weights_only=True)
    return state


def _check(config: RLConfig | DistillConfig) -> None:
    if config.eval.num_prompts and config.eval.split != "eval":
        raise ConfigError(f"eval.split is {config.eval.split!r}; training evaluates on the task's split 'eval'.")
    available = {str(tracker) for tracker in get_available_trackers()}
    missing = [name for name in config.train.trackers if name not in available]
    if missing:
        raise ConfigError(
            f"train.trackers names {', '.join(missing)}, which is not installed; run `pip install 'leanroll[trackers]'`, or "
            "take it out."
        )


def _timings(display: RunDisplay) -> dict[str, float]:
    return {f"time/{name}_s": seconds for name, seconds in display.clock.take().items()}


def timing_text(metrics: Mapping[str, float]) -> str:
    """The end of a step's line: its seconds, and where they went."""
    timed = ("rollout", "reward", "measure", "teacher", "score", "update", "sampler", "eval", "checkpoint")
    phases = [f"{name} {metrics[f'time/{name}_s']:.1f}" for name in timed if f"time/{name}_s" in metrics]
    return f"{metrics['time/step_s']:.1f} s ({', '.join(phases)})"
