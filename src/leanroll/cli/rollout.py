"""`leanroll rollout`: prompts in, JSON lines of completions with log-probs out."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from leanroll.cli.output import check_output, remark
from leanroll.cli.progress import generation_progress, status
from leanroll.cli.prompts import check_lengths, encode_rows, read_prompts, takes_system, task_items
from leanroll.config import GenerateConfig, load_config
from leanroll.errors import ConfigError
from leanroll.rundir import write_jsonl

if TYPE_CHECKING:
    from leanroll.types import RolloutGroup

HELP = "Complete prompts (of a file, or of the recipe's task) and write tokens, log-probs and texts as JSON lines."
SCHEMA = GenerateConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments besides the options of the recipe."""
    parser.add_argument("recipe", nargs="?", help="TOML file; tables that only training uses are left aside")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="text file, one prompt per line, or .jsonl with prompt or messages; else the task's",
    )
    parser.add_argument(
        "--plain", action="store_true", help="give prompts of a file to the model as they are, without a chat template"
    )
    parser.add_argument(
        "--output", "-o", metavar="FILE", required=True, help="JSON-lines file, replaced when all is done"
    )


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    """Generate; returns the exit code."""
    config = load_config(GenerateConfig, arguments.recipe, overrides)
    output = check_output(arguments.output)
    if arguments.plain and arguments.prompts is None:
        raise ConfigError("--plain has no effect on the task's prompts, which are conversations; give --prompts FILE.")
    rows = read_prompts(Path(arguments.prompts)) if arguments.prompts is not None else None
    if rows is not None:
        if config.num_prompts > len(rows):
            raise ConfigError(
                f"num_prompts is {config.num_prompts}, but {arguments.prompts} has {len(rows)} prompts; lower it."
            )
        rows = rows[: config.num_prompts or None]
        check_inert(config, overrides, rows, plain=arguments.plain)

    from leanroll.train import setup

    schedule = setup.build_schedule(config.rollout)
    remark(setup.check_sampler(schedule, config.sampler_adapter))
    items = []
    if rows is None:
        items = task_items(setup.build_task(config.task), config.split, config.num_prompts, "num_prompts")
    with status(f"Loading {config.model.name} …"):
        policy = setup.build_policy(config.model, config.adapter, training=False)
        setup.load_sampler(policy, config.sampler_adapter)
        engine = setup.build_engine(policy, schedule, config.rollout)
    if rows is None:
        prompts = setup.PromptEncoder(policy, config.task).encode(items)
    else:
        prompts = encode_rows(policy, rows, plain=arguments.plain, system=config.task.system_prompt)
    check_lengths(prompts, config.rollout.max_completion_length, policy.spec.max_position)
    sampling = setup.sampling_params(policy, config.rollout, seed=config.seed, num_top_logprobs=config.num_top_logprobs)
    with generation_progress("completions") as progress:
        groups = engine.generate(prompts, sampling, config.num_samples, progress=progress)
    write_jsonl(output, records(groups))
    _summarise(groups, output)
    return 0


def check_inert(
    config: GenerateConfig, overrides: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Any]], *, plain: bool
) -> None:
    """Raise ConfigError when an option was set that does nothing to the prompts of a file.

    Which task a recipe names, and its rewards, are left aside like the tables that only training uses. On the command
    line they are an error, as is, wherever it stands, what would have changed the prompts.
    """
    inert = [
        key for key, text in overrides if key.startswith("task.") and key != "task.system_prompt" and text != "null"
    ]
    for field in ("few_shot", "few_shot_file"):
        if getattr(config.task, field):
            inert.append(f"task.{field}")
    if "split" in config.model_fields_set:
        inert.append("split")
    if inert:
        raise ConfigError(
            f"{inert[0]} has no effect on the prompts of a file; leave it out (--{inert[0]} null takes it out of a recipe), "
            "or leave out --prompts."
        )
    if config.task.system_prompt is not None and not any(takes_system(row, plain=plain) for row in rows):
        reason = "--plain gives them to the model as they are" if plain else "each has a system message of its own"
        raise ConfigError(
            f"task.system_prompt has no effect on the prompts of this file, because {reason}; leave it out "
            "(--task.system_prompt null takes it out of a recipe), or change that."
        )


def records(groups: Sequence[RolloutGroup]) -> Iterator[dict[str, Any]]:
    """One JSON-ready record per sample, prompts in order; a sample that could not be generated has `error`."""
    for group in groups:
        for rollout in group.rollouts:
            record: dict[str, Any] = {
                "prompt_index": rollout.prompt_index,
                "sample_index": rollout.sample_index,
                "prompt": group.prompt.text,
                "text": rollout.text,
                "finish_reason": rollout.finish_reason,
                "token_ids": list(rollout.token_ids),
                "logprobs": list(rollout.logprobs),
                "kv_share_read": rollout.pages_read / rollout.pages_total if rollout.pages_total else None,
            }
            if rollout.top_token_ids is not None and rollout.top_logprobs is not None:
                record["top_token_ids"] = rollout.top_token_ids.tolist()
                record["top_logprobs"] = rollout.top_logprobs.tolist()
            yield record
        for failure in group.failures:
            yield {
                "prompt_index": failure.prompt_index,
                "sample_index": failure.sample_index,
                "prompt": group.prompt.text,
                "error": failure.reason,
            }


def _summarise(groups: Sequence[RolloutGroup], output: Path) -> None:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failures = [failure for group in groups for failure in group.failures]
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    held = sum(rollout.pages_total for rollout in rollouts)
    share = f", KV share read {sum(rollout.pages_read for rollout in rollouts) / held:.3f}" if held else ""
    Console(stderr=True, soft_wrap=True).print(
        f"{len(rollouts)} completions, {tokens} tokens{share} → {output}", markup=False
    )
    if failures:
        raise ConfigError(
            f"{len(failures)} of {len(failures) + len(rollouts)} samples could not be generated (the others are in {output}): "
            f"{failures[0].reason}"
        )
