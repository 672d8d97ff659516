"""Can a teacher score the ids that a student sampled, and on which ids can the two be compared?

The ids go to the teacher unchanged, so that a token counts as shared only where both tokenizers give it the same id. Tokenizers of
one family differ by padding rows of the head (151,936 against 152,064) and a few added tokens (Qwen3 gives <think> … ids that are
padding in Qwen2.5): such pairs are compatible, on the rest. Pairs that split ordinary text differently are refused.

Worked example: both have the tokens 0…4, the teacher adds <think> as 5; the student's head has 8 rows, the teacher's 7.

    check_compatible(student, teacher)   Compatibility(shared=5, student_only=(), teacher_only=("<think>",))
    unshared_student_ids(…)              5 6 7: never to be sampled
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypedDict

import jinja2
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from leanroll.errors import ModelError
from leanroll.models.policy import Policy

MAX_UNSHARED = 0.01
"""Ids that may name different added tokens, or an ordinary token on one side alone, as a share of the ids that both have."""

# What a tokenizer that cannot be serialised is compared by: spaces, digits, case, accents, scripts, code, bytes, long words.
_SAMPLES = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "  two spaces,\ttabs\n\nand lines\r\n",
    "x_1 = 3.14159 * (y - 2**10)  # don't; isn't HTTPError",
    "Ångström naïve cafe\u0301 ﬁn Ⅷ",
    "東京 Москва 서울 مرحبا 👩‍🔬 \u00a0\u200b",
    "antidisestablishmentarianism 1234567890 \\boxed{\\frac{1}{2}}",
)
_SYSTEM, _USER = "Be brief: leanroll-system.", "What is 2 + 2? leanroll-user"
_CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "user": [{"role": "user", "content": _USER}],
    "system + user": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}],
}
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Compatibility:
    """The ids of a compatible pair that mean the same token on both sides.

    shared: the number of leading ids if it is those; otherwise the ids, int64 [K] ascending on the CPU, once per side (equal).
    student_only, teacher_only: tokens without their equal at the same id of the other side, by id. Rows of a head that no token
    belongs to are padding: neither shared nor listed.
    """

    shared: int | tuple[Tensor, Tensor]
    student_only: tuple[str, ...]
    teacher_only: tuple[str, ...]

    @property
    def ids(self) -> Tensor:
        """The shared ids, int64 [K] ascending, on the CPU."""
        return torch.arange(self.shared) if isinstance(self.shared, int) else self.shared[0]


class VocabularyArguments(TypedDict):
    """What `SharedVocabulary.of` takes, the device apart."""

    student_size: int
    teacher_size: int
    shared: int | tuple[Tensor, Tensor]
    eos_class: tuple[Sequence[int], Sequence[int]] | None


def check_compatible(student: Policy, teacher: Policy) -> Compatibility:
    """Compare the tokenizers of two policies, within the rows that their heads have.

    Raises:
        ModelError: they give different ids to ordinary text.
    """
    return compare_tokenizers(student.tokenizer, teacher.tokenizer, _head_size(student), _head_size(teacher))


def compare_tokenizers(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, student_size: int, teacher_size: int
) -> Compatibility:
    """Which ids mean the same token on both sides.

    student_size, teacher_size: rows of the heads. A token whose id has no row cannot be predicted and counts as missing.

    Raises:
        ModelError: ordinary tokens, merges, scores, normaliser or pre-tokeniser differ, or more than `MAX_UNSHARED` of the ids do.
    """
    ours, theirs = _tokens(student, student_size), _tokens(teacher, teacher_size)
    ours_added, theirs_added = student.added_tokens_decoder.keys(), teacher.added_tokens_decoder.keys()
    common = sorted(ours.keys() & theirs.keys())
    different = [i for i in common if ours[i] != theirs[i]]
    for i in different:
        if i not in ours_added or i not in theirs_added:
            raise _refusal(f"id {i} is {ours[i]!r} in the student's tokenizer and {theirs[i]!r} in the teacher's")
    if student is not teacher:
        difference = _encoding_difference(student, teacher)
        if difference is not None:
            raise _refusal(difference)

    alone = sorted((ours.keys() - theirs.keys() - ours_added) | (theirs.keys() - ours.keys() - theirs_added))
    if len(different) + len(alone) > MAX_UNSHARED * len(common):
        i = min(different + alone)
        raise _refusal(
            f"{len(different)} ids name different added tokens and {len(alone)} an ordinary token on one side alone, more than "
            f"{MAX_UNSHARED:.0%} of the {len(common)} ids that both have; the first is id {i}, {_shown(ours.get(i))} in the "
            f"student's tokenizer and {_shown(theirs.get(i))} in the teacher's"
        )
    conflicting = set(different)
    same = [i for i in common if i not in conflicting]
    if not same:
        raise _refusal("no id names a token on both sides")
    ids = torch.tensor(same, dtype=torch.int64)
    kept = set(same)
    return Compatibility(
        shared=len(same) if same[-1] == len(same) - 1 else (ids, ids),
        student_only=tuple(ours[i] for i in sorted(ours) if i not in kept),
        teacher_only=tuple(theirs[i] for i in sorted(theirs) if i not in kept),
    )


def vocabulary_arguments(
    student: Policy, teacher: Policy, compatibility: Compatibility, *, eos_class: bool
) -> VocabularyArguments:
    """The arguments of `losses.SharedVocabulary.of`, which this layer may not import: `of(**arguments, device=device)`.

    eos_class: let the stop ids of both sides form one outcome.
    """
    return VocabularyArguments(
        student_size=_head_size(student),
        teacher_size=_head_size(teacher),
        shared=compatibility.shared,
        eos_class=(_stop_ids(student), _stop_ids(teacher)) if eos_class else None,
    )


def unshared_student_ids(student: Policy, compatibility: Compatibility, *, eos_class: bool) -> Tensor:
    """Ids that the student could sample and the teacher cannot score, padding included: to be masked in sampling.

    eos_class: as in `vocabulary_arguments`. With it the student's own stop ids may be sampled even where the teacher has another
    token: they count as a stop, and nothing follows them. Such an id must not be *fed* to the teacher.

    Returns:
        int64 [M], ascending, on the CPU.

    Raises:
        ModelError: without the class no stop id is shared: under the mask no completion could end.
    """
    allowed = torch.zeros(_head_size(student), dtype=torch.bool)
    allowed[compatibility.ids] = True
    stops = torch.tensor(_stop_ids(student), dtype=torch.int64)
    if eos_class:
        allowed[stops] = True
    elif not bool(allowed[stops].any()):
        raise ModelError(
            f"The student {student.name!r} ends completions with {_named(student, stops.tolist())}, none of which the teacher has "
            "at that id; expected a shared stop token, as no completion could end. Turn eos_class on, or pick another teacher."
        )
    return (~allowed).nonzero()[:, 0]


def template_differences(student: Policy, teacher: Policy) -> list[str]:
    """What differs between the two sides' stop tokens and chat templates, one sentence each; empty if nothing does.

    A template that refuses or drops a system message, or is missing, is noted too, even where both sides agree in that.
    A report for people: nothing of it makes a pair incompatible, but each is a usual cause of a large KL at the first tokens.
    """
    found: list[str] = []
    stops = [_named(policy, policy.spec.stop_token_ids) for policy in (student, teacher)]
    if stops[0] != stops[1]:
        found.append(f"Stop tokens: the student has {stops[0]}, the teacher {stops[1]}.")
    sides = {"student": student, "teacher": teacher}
    without = [side for side, policy in sides.items() if policy.tokenizer.chat_template is None]
    if without:
        return found + [f"The {side} has no chat template: chat prompts cannot be encoded." for side in without]

    for conversation, messages in _CONVERSATIONS.items():
        texts: list[str] = []
        for side, policy in sides.items():
            try:
                texts.append(_render(policy, messages, generation_prompt=False))
            except jinja2.TemplateError as error:
                found.append(f"The {side}'s chat template refuses a conversation of {conversation}: {error}.")
                continue
            lost = [m["role"] for m in messages if m["content"] not in texts[-1]]
            if lost:
                found.append(f"The {side}'s chat template leaves out or changes the {' and the '.join(lost)} message.")
        if len(texts) == 2 and texts[0] != texts[1]:
            found.append(f"A conversation of {conversation} {_text_difference(texts[0], texts[1])}.")
    prompts = _generation_prompts(sides)
    if prompts and prompts[0] != prompts[1]:
        found.append(f"The generation prompt {_text_difference(prompts[0], prompts[1])}.{_think_note(prompts)}")
    return found + _bos_difference(sides)


def _head_size(policy: Policy) -> int:
    return policy.head.weight.shape[0]


def _stop_ids(policy: Policy) -> list[int]:
    """Those that the head can predict."""
    return [i for i in policy.spec.stop_token_ids if i < _head_size(policy)]


def _named(policy: Policy, ids: Sequence[int]) -> str:
    return ", ".join(f"{i} {policy.tokenizer.convert_ids_to_tokens(i)!r}" for i in ids) or "none"


def _tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[int, str]:
    """id → token, of the ids below size."""
    tokens = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens |= {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    return {i: token for i, token in tokens.items() if i < size}


def _refusal(difference: str) -> ModelError:
    return ModelError(
        f"The student's and the teacher's tokenizers differ: {difference}. Expected the same tokens at the same ids, and the same "
        "splitting of text (padding and a few added tokens aside): distillation across tokenizers is not supported yet. Pick a "
        "teacher of the student's family."
    )


def _encoding_difference(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> str | None:
    """The first difference in how text becomes ids, given that the tokens are the same."""
    backends = [getattr(tokenizer, "backend_tokenizer", None) for tokenizer in (student, teacher)]
    if None in backends:
        for text in _SAMPLES:
            ids = [list(tokenizer.encode(text, add_special_tokens=False)) for tokenizer in (student, teacher)]
            if ids[0] != ids[1]:
                return _first_difference(ids[0], ids[1], f"the encoding of {text!r}")
        return None
    ours, theirs = (_read_backend(json.loads(str(backend.to_str()))) for backend in backends if backend is not None)
    scores = _score_difference(ours.pop("scores"), theirs.pop("scores"))
    return _first_difference(ours, theirs, "") or scores


def _read_backend(serialised: dict[str, Any]) -> dict[str, Any]:
    """What decides how text is split, of a serialised fast tokenizer, in the order in which differences are named."""
    model = dict(serialised["model"])
    vocab = model.pop("vocab", None)
    merges = model.pop("merges", None) or []
    return {
        "model.type": model.pop("type", None),
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "model": _plain(model),
        "normalizer": _plain(serialised.get("normalizer")),
        "pre_tokenizer": _plain(serialised.get("pre_tokenizer")),
        # A unigram model lists tokens with scores, which decide where merges do elsewhere.
        "scores": [tuple(entry) for entry in vocab] if isinstance(vocab, list) else [],
    }


def _score_difference(ours: Sequence[tuple[str, float]], theirs: Sequence[tuple[str, float]]) -> str | None:
    for (token, score), (other, other_score) in zip(ours, theirs, strict=False):
        if token == other and score != other_score:
            return f"the score of {token!r} is {score} in the student's tokenizer and {other_score} in the teacher's"
    return None


def _plain(part: Any) -> Any:
    """A component without what has no effect on ids: sequences of one or none, unset options, offsets."""
    if isinstance(part, list):
        return [_plain(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Sequence":
        steps = [_plain(step) for step in part.get("normalizers") or part.get("pretokenizers") or []]
        return steps if len(steps) > 1 else steps[0] if steps else None
    # Not "if not value": an unk_id of 0 is set.
    unset = {key for key, value in part.items() if value is None or value is False or value == ""}
    return {key: _plain(value) for key, value in part.items() if key not in unset and key != "trim_offsets"}


def _first_difference(ours: Any, theirs: Any, path: str) -> str | None:
    """Where two JSON values first differ, in words; path names what is compared."""
    if ours == theirs:
        return None
    if isinstance(ours, dict) and isinstance(theirs, dict):
        key = next(key for key in [*ours, *theirs] if ours.get(key) != theirs.get(key))
        return _first_difference(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    if isinstance(ours, list) and isinstance(theirs, list):
        pairs = enumerate(zip_longest(ours, theirs))
        i, (one, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        return _first_difference(one, other, f"{path}[{i}]")
    return f"{path} is {_shown(ours)} in the student's tokenizer and {_shown(theirs)} in the teacher's"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _agreement(one: str, other: str) -> int:
    """Number of leading characters that are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _text_difference(student: str, teacher: str) -> str:
    """Two texts at their first difference, with a little of what comes before it."""
    at = _agreement(student, teacher)
    start = max(0, at - 10)
    ours, theirs = student[start : start + _SHOWN], teacher[start : start + _SHOWN]
    return f"differs from character {at}: the student has {ours!r}, the teacher {theirs!r}"


def _render(policy: Policy, messages: Sequence[Mapping[str, str]], *, generation_prompt: bool) -> str:
    return str(
        policy.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation_prompt
        )
    )


def _generation_prompts(sides: Mapping[str, Policy]) -> list[str]:
    """What comes after the user's message when an answer is asked for; empty if a template refuses (which is noted already)."""
    prompts = []
    for policy in sides.values():
        try:
            closed, asked = (_render(policy, _CONVERSATIONS["user"], generation_prompt=on) for on in (False, True))
        except jinja2.TemplateError:
            return []
        prompts.append(asked[_agreement(closed, asked) :])
    return prompts


def _think_note(prompts: Sequence[str]) -> str:
    thinking = [side for side, prompt in zip(("student", "teacher"), prompts, strict=True) if "think" in prompt]
    if len(thinking) != 1:
        return ""
    return f" Only the {thinking[0]}'s has a think prefix."


def _bos_difference(sides: Mapping[str, Policy]) -> list[str]:
    """Whether one side alone starts a conversation with its BOS token."""
    starts = {}
    for side, policy in sides.items():
        try:
            ids = policy.encode_chat(_CONVERSATIONS["user"])
        except ModelError:
            return []  # refused: noted already
        starts[side] = bool(ids) and ids[0] == policy.tokenizer.bos_token_id
    if starts["student"] == starts["teacher"]:
        return []
    side = "student" if starts["student"] else "teacher"
    return [f"Only the {side}'s encoded chat starts with a BOS token ({sides[side].tokenizer.bos_token!r})."]
