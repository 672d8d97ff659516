"""leanroll's engine against vLLM's CPU build and transformers' `generate`: time of one decode step on the same work.

    benchmarks/peers/setup_vllm.sh VENV_DIR
    python -m benchmarks.peers.compare --vllm-python VENV_DIR/bin/python

Every engine runs in a process of its own, one at a time, on all cores, with the same model directory, the same prompts
(all different, equally long) and the same number of tokens; none stops at an end token. A step is what lies between two
tokens of a sequence once all sequences decode; prefill is not part of it. First, greedy completions of short prompts in
fp32 must agree between all engines.

`leanroll.calibrate.peers` says what a job and a result are.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._common import print_result, progress, wait_for_idle
from leanroll.calibrate.peers.engines import SCRIPTS, run_job, vllm_variables
from leanroll.calibrate.speed import text_prompts
from leanroll.calibrate.summary import Summary
from leanroll.environment import usable_cores
from leanroll.models.default import DEFAULT_MODEL, default_model_dir
from leanroll.models.load import load_policy

VLLM_CHUNK = 2048
"""Tokens that vLLM prefills per step, as `run_vllm` sets it."""
SHORT_CONTEXT, SHORT_TOKENS, NUM_AGREEING = 600, 12, 8


@dataclass(frozen=True, slots=True)
class Runner:
    """command: to be followed by a job file. num_tokens: decoded per sequence when timed."""

    name: str
    command: list[str]
    num_tokens: int
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The runner's result. Raises BackendUnavailable when the process fails."""
        return run_job(self.name, self.command, job, self.variables)


def runners(options: argparse.Namespace) -> list[Runner]:
    """Those asked for, in the order of a round."""
    ours = [sys.executable, "-m", "benchmarks.peers.run_leanroll"]
    found = [
        Runner("leanroll dense", ours, options.tokens),
        Runner(f"leanroll {options.pages} pages", [*ours, "--pages", str(options.pages)], options.tokens),
    ]
    if options.vllm_python is not None:
        variables = vllm_variables(options.vllm_python)
        found.append(Runner("vllm", [str(options.vllm_python), str(SCRIPTS["vllm"])], options.tokens, variables))
    if not options.without_transformers:
        command = [sys.executable, "-m", "leanroll.calibrate.peers.run_transformers"]
        found.append(Runner("transformers", command, options.transformers_tokens))
    return found


def check(found: list[Runner], job: dict[str, Any]) -> int:
    """The number of greedy tokens on which all engines agree, over all prompts; exits with 1 if it is too small."""
    completions = {}
    for runner in found:
        # A short context of fewer pages than the budget: sparse attention reads everything and must agree as well.
        completions[runner.name] = runner.run(job)["token_ids"]
    agreeing = [
        next((i for i, ids in enumerate(zip(*rows, strict=True)) if len(set(ids)) > 1), len(rows[0]))
        for rows in zip(*completions.values(), strict=True)
    ]
    progress(f"greedy fp32 tokens on which all engines agree, per prompt: {agreeing} of {SHORT_TOKENS}")
    if min(agreeing) < NUM_AGREEING:
        raise SystemExit(f"the engines disagree: {completions}. Nothing was timed.")
    return min(agreeing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="python of the environment that setup_vllm.sh made")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory, or the embedded default")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=8000, help="prompt tokens of each sequence")
    parser.add_argument("--tokens", type=int, default=48, help="decoded per sequence")
    parser.add_argument("--transformers-tokens", type=int, default=6, help="the same for transformers, which is slow")
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="rounds over all engines")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--most-load", type=float, default=0.5, help="wait until the machine's load average is below")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for that, before every process")
    options = parser.parse_args()
    chunks = -(-options.batch * options.context // VLLM_CHUNK)
    if options.vllm_python is not None and options.tokens < chunks + 8:
        parser.error(
            f"--tokens is {options.tokens}; vLLM decodes its first sequences while it prefills the last, in {chunks} steps, so "
            f"that fewer than {chunks + 8} tokens leave no step in which all decode. Raise --tokens."
        )

    model = str(default_model_dir()) if options.model == DEFAULT_MODEL else options.model
    tokenizer = load_policy(model).tokenizer
    job = {"model": model, "threads": usable_cores()}
    found = runners(options)
    steps: dict[str, list[float]] = {runner.name: [] for runner in found}
    versions: dict[str, dict[str, str]] = {}
    prefill: dict[str, list[float]] = {runner.name: [] for runner in found}
    agreeing = None
    if not options.skip_check:
        short = {"prompts": text_prompts(tokenizer, 2, SHORT_CONTEXT), "num_tokens": SHORT_TOKENS}
        agreeing = check(found, job | short | {"dtype": "float32", "temperature": 0.0})
    prompts = text_prompts(tokenizer, options.batch, options.context)
    for round_number in range(options.rounds):
        for runner in found:
            load = wait_for_idle(options.most_load, options.patience)
            timed = {"prompts": prompts, "num_tokens": runner.num_tokens, "dtype": "bfloat16", "temperature": 1.0}
            result = runner.run(job | timed)
            steps[runner.name] += result["step_seconds"]
            prefill[runner.name].append(round(result["prefill_seconds"], 1))
            versions[runner.name] = result["versions"]
            median = Summary.of(result["step_seconds"]).median
            progress(f"round {round_number + 1}, {runner.name}: {median * 1e3:.1f} ms per step; load was {load:.2f}")
    summary = {name: Summary.of(values).scaled(1e3) for name, values in steps.items()}
    ours = summary["leanroll dense"].median
    print(f"{'engine':<22} {'ms per step':<32} {'tokens/s':>9} {'of leanroll dense':>18}")
    for name, step in summary.items():
        print(f"{name:<22} {step!s:<32} {options.batch / step.median * 1e3:>9.1f} {step.median / ours:>17.2f}x")
    print_result(
        "peers",
        {
            "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
            "step_ms": {name: step.as_dict(3) for name, step in summary.items()},
            "times_leanroll_dense": {name: round(step.median / ours, 3) for name, step in summary.items()},
            "prefill_seconds": prefill,
            "greedy_tokens_agreeing": agreeing,
            "versions": versions,
        },
    )


if __name__ == "__main__":
    main()
