"""The teacher of on-policy distillation: another model, the student's base with or without an adapter, or the student itself
with a privileged prompt. It scores the student's own token ids, which are never tokenised again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from leanroll.config import DistillConfig, ProfileConfig
from leanroll.errors import ConfigError
from leanroll.losses.topk import TeacherTopk, teacher_topk
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.measure.logprobs import each_hidden, split_by_sample
from leanroll.measure.packing import PackedBatch
from leanroll.models import LoraSpec, Policy, load_policy
from leanroll.rundir import CHECKPOINTS, CONFIG
from leanroll.tasks import TaskItem
from leanroll.train import setup
from leanroll.train.checkpoint import LATEST, POLICY_DIR
from leanroll.types import Prompt, RolloutGroup


class Teacher:
    """policy: the student's own object, with its adapter off or on while it teaches, or one of its own."""

    def __init__(self, config: DistillConfig | ProfileConfig, student: Policy, *, student_changes: bool = True) -> None:
        """Load it, in eval mode and without gradients.

        student_changes: whether the student's weights will. If not, a student without an adapter is its own frozen base.

        Raises:
            ModelError: it cannot be loaded. ConfigError: no adapter at teacher.adapter, or options that this device lacks.
        """
        options = config.teacher
        is_base = not student_changes and options.dtype in (None, config.model.dtype)
        self._student_teaches = options.is_student and (options.weights == "current" or student.has_adapter or is_base)
        self._adapter_off = self._student_teaches and options.weights == "frozen" and student.has_adapter
        self.policy = student if self._student_teaches else _load(config, student)
        if not self._student_teaches:
            self.policy.model.requires_grad_(False)
        self.differs_in_prompt = options.privileged or options.system_prompt is not None
        task = config.task
        if options.system_prompt is not None:
            task = task.model_copy(update={"system_prompt": options.system_prompt})
        self._encoder = setup.PromptEncoder(self.policy, task, privileged=options.privileged)
        self._home = student.device if options.offload else None
        if options.offload and student.device.type == "cpu":
            raise ConfigError(
                "teacher.offload is set, but the student is on the CPU already, so there is nowhere to keep the teacher; leave "
                "it out."
            )

    def encode(self, items: Sequence[TaskItem]) -> list[Prompt]:
        """The prompts as the teacher sees them.

        Raises:
            ConfigError: an item without a privileged text, where the teacher is to see one.
            ModelError: the teacher's chat template refuses the conversation.
        """
        return self._encoder.encode(items)

    @contextmanager
    def scoring(self) -> Iterator[Policy]:
        """Inside, the policy is the teacher: no gradient, the student's adapter off where it is no part of it."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._adapter_off:
                stack.enter_context(self.policy.adapter_disabled())
            if self._home is not None:
                move_body(self.policy, self._home)
                stack.callback(move_body, self.policy, torch.device("cpu"))
            yield self.policy

    def hidden_states(
        self, groups: Sequence[RolloutGroup], prompts: Sequence[Prompt], max_tokens: int
    ) -> tuple[Tensor, ...]:
        """Hidden states that predict the completion tokens, per rollout of the flattened groups: [T, H] in the teacher's dtype.

        Each prompt is computed once for all completions of its group.

        Args:
            prompts: the teacher's, one per group. max_tokens: inputs per forward; more where one sequence alone is longer.
        """
        states: dict[int, Tensor] = {}
        for batch, hidden, _ in self._read(groups, prompts, max_tokens):
            states |= split_by_sample(hidden, batch)
        return tuple(states[sample] for sample in sorted(states))

    def likeliest(
        self,
        groups: Sequence[RolloutGroup],
        prompts: Sequence[Prompt],
        max_tokens: int,
        *,
        k: int,
        vocabulary: SharedVocabulary,
        kl_temperature: float,
    ) -> tuple[TeacherTopk, ...]:
        """Its k likeliest tokens at each completion token, and the sampled one, per rollout of the flattened groups.

        Args:
            groups, prompts, max_tokens: as for `hidden_states`.

        Raises:
            ConfigError: k is larger than the shared vocabulary.
        """
        found: dict[int, TeacherTopk] = {}
        for batch, hidden, policy in self._read(groups, prompts, max_tokens):
            sampled = vocabulary.student.outcomes(batch.targets.to(hidden.device))
            top = teacher_topk(hidden, policy.head, k, sampled, side=vocabulary.teacher, kl_temperature=kl_temperature)
            lengths = [int((batch.sample_ids == sample).sum()) for sample in batch.samples]
            found |= dict(zip(batch.samples, top.split(lengths), strict=True))
        return tuple(found[sample] for sample in sorted(found))

    def _read(
        self, groups: Sequence[RolloutGroup], prompts: Sequence[Prompt], max_tokens: int
    ) -> Iterator[tuple[PackedBatch, Tensor, Policy]]:
        """Micro-batches with the hidden states [R, H] that predict their completion tokens."""
        seen = [replace(g, prompt=p) for g, p in zip(groups, prompts, strict=True)]
        with self.scoring() as policy:
            for batch, hidden in each_hidden(policy, seen, max_tokens):
                yield batch, hidden, policy


def move_body(policy: Policy, to: torch.device | torch.dtype) -> None:
    """Move all of a model but its head, in place: the head's weight is read by the loss too, outside of scoring."""
    head = {id(tensor) for tensor in (policy.head.weight, policy.head.bias) if tensor is not None}
    for tensor in (*policy.model.parameters(), *policy.model.buffers()):
        if id(tensor) not in head:
            tensor.data = tensor.data.to(to)


def _load(config: DistillConfig | ProfileConfig, student: Policy) -> Policy:
    options = config.teacher
    name, revision = (options.model, options.revision) if options.model else (config.model.name, config.model.revision)
    path = None if options.adapter is None else adapter_folder(options.adapter)
    teacher = load_policy(
        name,
        dtype=setup.DTYPES[options.dtype or config.model.dtype],
        device=student.device,
        adapter=None if path is None else LoraSpec(path=path),
        revision=revision,
    )
    if options.model is None and student.has_adapter and options.dtype in (None, config.model.dtype):
        share_base(teacher, student)
    if teacher.tokenizer.chat_template is None and options.model is not None:
        teacher.set_chat_template(str(student.tokenizer.chat_template))
    return teacher


def adapter_folder(path: str) -> Path:
    """The adapter in a folder of peft's format or in the latest checkpoint of a run directory.

    Raises:
        ConfigError: neither of them, or a run without an adapter in its checkpoints.
    """
    folder = Path(path)
    if (folder / CONFIG).is_file():
        checkpoint = folder / CHECKPOINTS / LATEST / POLICY_DIR
        if not checkpoint.is_dir():
            raise ConfigError(
                f"teacher.adapter is the run {path!r}, which has no checkpoint yet; let it save one first."
            )
        folder = checkpoint
    if not (folder / "adapter_config.json").is_file():
        whole = (folder / "config.json").is_file()
        raise ConfigError(
            f"teacher.adapter is {path!r}, where {'there is a whole model' if whole else 'there is no adapter'}; expected a folder "
            "with adapter_config.json, or a run directory of `leanroll rl` that trains an adapter."
            + (f" Name it as teacher.model = {str(folder)!r} instead." if whole else "")
        )
    return folder


def share_base(policy: Policy, owner: Policy) -> None:
    """Let a policy's base weights be another's frozen ones where they are the same numbers, held once."""
    own = {name.replace(".base_layer", ""): p for name, p in owner.base.named_parameters() if "lora_" not in name}
    with torch.no_grad():
        for name, parameter in policy.base.named_parameters():
            shared = own.get(name.replace(".base_layer", ""))
            if "lora_" not in name and shared is not None and torch.equal(shared, parameter):
                parameter.data = shared.data
