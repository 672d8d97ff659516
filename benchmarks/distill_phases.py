"""What a distillation step costs: early-stopped rollouts of N tokens against full ones, phase by phase.

    python -m benchmarks.distill_phases [--tokens 100 1024 2048] [--prompts 16] [--repeats 3]

The default model learns from a second copy of itself (LoRA r 32, bf16, AdamW), on prompts of at most 48 tokens; stop tokens are
ignored on both sides, so that lengths are exact. Every length runs in a process of its own, whose memory is not another one's; the
lengths take turns. First, one step of full rollouts with all but N tokens masked must have the loss of N generated tokens.

Memory is the resident set, its peak read and reset at the borders of phases; a sum over phases would count the weights thrice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._common import print_result, progress
from leanroll.calibrate.speed import text_prompts
from leanroll.calibrate.summary import Summary
from leanroll.config import DistillConfig, to_toml, validate
from leanroll.rollout.schedule import BudgetSchedule
from leanroll.rundir import RunDir
from leanroll.train.distill import DistillTrainer
from leanroll.train.distill_update import DistillBatch, DistillUpdater
from leanroll.train.progress import RunDisplay
from leanroll.types import Prompt

PHASES = ("teacher scoring", "student generation", "student training")
PROMPT_TOKENS, CHECK_TOKENS, CHECK_PROMPTS, TOLERANCE = 48, 8, 2, 1e-3


def recipe(tokens: int, prompts: int, **distill: Any) -> DistillConfig:
    """The default model under a copy of itself."""
    return validate(
        DistillConfig,
        {
            "adapter": {"r": 32, "alpha": 64.0},
            "teacher": {"model": "smollm2-135m", "preflight_prompts": 1},
            "rollout": {
                "max_completion_length": max(tokens, 2 * CHECK_TOKENS),
                "kv_memory_gib": 3.0,
                "temperature": 0.7,
            },
            "distill": {"num_tokens": tokens, "prompts_per_step": prompts, **distill},
            "train": {"steps": 1, "micro_batch_tokens": max(2200, tokens + PROMPT_TOKENS)},
            "eval": {"num_prompts": 0},
        },
    )


class Step:
    """One step, phase by phase."""

    def __init__(self, config: DistillConfig, folder: Path) -> None:
        self.config = config
        self.display = RunDisplay(1, 1, quiet=True)
        self.trainer = DistillTrainer(config, BudgetSchedule.dense(), self.display)
        run = RunDir.create(folder, config_toml=to_toml(config), environment={})
        self.updater = DistillUpdater(
            self.trainer.policy, self.trainer.module, self.trainer.stepper, config, run, self.display
        )
        rows = text_prompts(self.trainer.policy.tokenizer, config.distill.prompts_per_step, PROMPT_TOKENS)
        self.prompts = [Prompt(index, tuple(ids)) for index, ids in enumerate(rows)]

    def run(self, tokens: int) -> dict[str, tuple[float, float]]:
        """Seconds and peak resident GiB per phase, and the loss under "loss"."""
        result: dict[str, tuple[float, float]] = {}
        trainer = self.trainer
        sampling = replace(trainer.sampling, max_completion_length=tokens, ignore_stop=True)
        with _Phase(result, "student generation"):
            groups = trainer.engine.generate(self.prompts, sampling, 1, step=1)
        with _Phase(result, "teacher scoring"):
            states = trainer.teacher.hidden_states(groups, self.prompts, self.config.train.micro_batch_tokens)
        with _Phase(result, "student training"):
            metrics = self.updater.update(1, DistillBatch(tuple(groups), states, {}))
        result["loss"] = (metrics["loss"], 0.0)
        return result


class _Phase:
    """Seconds and peak resident memory of a block."""

    def __init__(self, result: dict[str, tuple[float, float]], name: str) -> None:
        self.result, self.name = result, name

    def __enter__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.result[self.name] = (time.perf_counter() - self.start, _peak_gib())


def _peak_gib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 2**20


def check() -> float:
    """Relative difference of the losses of N generated tokens and of full rollouts with all but N masked; exits if too large."""
    losses = []
    for distill in ({}, {"selection": "prefix", "selected_tokens": CHECK_TOKENS}):
        with tempfile.TemporaryDirectory() as folder:
            step = Step(recipe(CHECK_TOKENS, CHECK_PROMPTS, **distill), Path(folder) / "run")
            # Not zero: the student is not its teacher.
            for name, parameter in step.trainer.policy.trainable_parameters().items():
                if "lora_B" in name:
                    parameter.data.fill_(0.01)
            losses.append(step.run(2 * CHECK_TOKENS if distill else CHECK_TOKENS)["loss"][0])
    difference = abs(losses[0] - losses[1]) / losses[0]
    progress(f"early stop against masked tail: losses {losses[0]:.5f} and {losses[1]:.5f}")
    if not difference < TOLERANCE:
        raise SystemExit(f"the losses differ by {difference:.1e}; expected less than {TOLERANCE:g}. Nothing was timed.")
    return difference


def measure(tokens: int, prompts: int) -> dict[str, Any]:
    """One length, in this process: a short step to warm up, then the step."""
    with tempfile.TemporaryDirectory() as folder:
        step = Step(recipe(tokens, prompts), Path(folder) / "run")
        step.run(8)
        return {name: values for name, values in step.run(tokens).items() if name in PHASES}


def main() -> None:
    """The command line of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[100, 1024, 2048], help="the first one is early stopped"
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.prompts)))
        return
    difference = check()
    found: dict[int, list[dict[str, Any]]] = {tokens: [] for tokens in options.tokens}
    for repeat in range(options.repeats):
        for tokens in options.tokens:
            command = [
                sys.executable,
                "-m",
                "benchmarks.distill_phases",
                "--one",
                str(tokens),
                "--prompts",
                str(options.prompts),
            ]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[tokens].append(json.loads(output.splitlines()[-1]))
            total = sum(found[tokens][-1][phase][0] for phase in PHASES)
            progress(f"round {repeat + 1}, {tokens} tokens: {total:.1f} s per step")
    early, *full = options.tokens
    result: dict[str, Any] = {"prompts": options.prompts, "prompt_tokens": PROMPT_TOKENS, "loss_difference": difference}
    seconds = {
        tokens: {phase: Summary.of([run[phase][0] for run in runs]) for phase in PHASES}
        | {"step": Summary.of([sum(run[phase][0] for phase in PHASES) for run in runs])}
        for tokens, runs in found.items()
    }
    memory = {
        tokens: {phase: max(run[phase][1] for run in runs) for phase in PHASES}
        | {"step": max(run[phase][1] for run in runs for phase in PHASES)}
        for tokens, runs in found.items()
    }
    print(
        f"{'phase':<20}"
        + "".join(f"{f'N = {t}':>26}" for t in options.tokens)
        + "".join(f"{f'/ {t}':>9}" for t in full)
    )
    for phase in (*PHASES, "step"):
        cells = "".join(
            f"{f'{seconds[t][phase].median:.2f} s, {memory[t][phase]:.2f} GiB':>26}" for t in options.tokens
        )
        ratios = "".join(f"{seconds[t][phase].median / seconds[early][phase].median:>8.1f}x" for t in full)
        print(f"{phase:<20}{cells}{ratios}")
    result["seconds"] = {str(t): {phase: s.as_dict(3) for phase, s in row.items()} for t, row in seconds.items()}
    result["peak_gib"] = {str(t): {phase: round(x, 3) for phase, x in row.items()} for t, row in memory.items()}
    result["times_early_stop"] = {
        str(t): {p: round(seconds[t][p].median / seconds[early][p].median, 2) for p in (*PHASES, "step")} for t in full
    }
    print_result("distill_phases", result)


if __name__ == "__main__":
    main()
