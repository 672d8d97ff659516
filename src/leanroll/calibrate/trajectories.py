"""What a calibration runs on: token sequences, from long texts or from a task's own dense rollouts."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from leanroll.errors import ConfigError
from leanroll.types import Prompt, Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Trajectory:
    """token_ids: the whole sequence. prompt_length: tokens that are dense, as in prefill. source: where it comes from; trajectories
    of one source are never split between calibration and validation."""

    source: str
    token_ids: tuple[int, ...]
    prompt_length: int = 0

    @property
    def key(self) -> str:
        """Identifies the content; names its file of results."""
        text = f"{self.prompt_length}:{','.join(map(str, self.token_ids))}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def from_texts(
    paths: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    min_tokens: int,
    per_file: int,
    seed: int,
) -> list[Trajectory]:
    """Windows of at most max_tokens tokens of each file, without special tokens, in an order shuffled by the seed.

    Windows shorter than min_tokens are left out, since they would say nothing about the bins that are hard to fill; of a long file
    the first `per_file` windows are taken, so that no single text dominates.

    Raises:
        ConfigError: a file cannot be read as text, or none is long enough.
    """
    found: list[Trajectory] = []
    longest = 0
    for path in sorted(set(paths)):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ConfigError(f"No text {str(path)!r}: the file does not exist.") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Text {str(path)!r} cannot be read ({error}); expected a UTF-8 file.") from error
        # A token is at least one byte: no more of the text can be needed.
        ids = tokenizer(text[: 16 * max_tokens * per_file], add_special_tokens=False, verbose=False)["input_ids"]
        longest = max(longest, len(ids))
        for start in range(0, min(len(ids), max_tokens * per_file), max_tokens):
            window = tuple(ids[start : start + max_tokens])
            if len(window) >= min_tokens:
                found.append(Trajectory(str(path), window))
    if not found:
        raise ConfigError(
            f"None of the {len(paths)} texts has {min_tokens} tokens (the longest has {longest}); give longer texts or lower "
            "calibrate.max_tokens."
        )
    # By source, so that a file's windows stay together when the list is split.
    sources = sorted({t.source for t in found})
    random.Random(seed).shuffle(sources)
    return [t for source in sources for t in found if t.source == source]


def from_groups(groups: Sequence[RolloutGroup], max_tokens: int) -> list[Trajectory]:
    """One per completion that has tokens beyond its first; cut at max_tokens."""
    return [
        Trajectory(
            f"prompt {group.prompt.index}",
            tuple((*group.prompt.token_ids, *rollout.token_ids))[:max_tokens],
            len(group.prompt.token_ids),
        )
        for group in groups
        for rollout in group.rollouts
        if len(rollout.token_ids) > 1
    ]


def to_groups(trajectories: Sequence[Trajectory]) -> list[RolloutGroup]:
    """As rollouts to train on, one per trajectory; without a prompt of its own the first token is it. Log-probs are 0: nobody drew
    them."""
    groups = []
    for index, trajectory in enumerate(trajectories):
        start = max(1, trajectory.prompt_length)
        rest = trajectory.token_ids[start:]
        rollout = Rollout(index, 0, rest, (0.0,) * len(rest), "length")
        groups.append(RolloutGroup(Prompt(index, trajectory.token_ids[:start]), (rollout,)))
    return groups


def split(
    trajectories: Sequence[Trajectory], num_fit: int, num_held_out: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """The first num_fit for fitting, and up to num_held_out of other sources for validation.

    Raises:
        ConfigError: too few trajectories, or all of one source.
    """
    fit = list(trajectories[:num_fit])
    used = {t.source for t in fit}
    held_out = [t for t in trajectories[num_fit:] if t.source not in used][:num_held_out]
    if len(fit) < num_fit or len(held_out) < num_held_out:
        raise ConfigError(
            f"There are {len(trajectories)} trajectories of {len({t.source for t in trajectories})} sources; expected at least "
            f"{num_fit} to fit on and {num_held_out} of other sources to validate on. Give more texts or prompts, or lower "
            "calibrate.trajectories and calibrate.held_out."
        )
    return fit, held_out
