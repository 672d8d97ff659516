"""Final answers: where a completion states one, and how it is compared with the reference."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from types import ModuleType
from typing import Any, Literal

from leanroll.errors import ConfigError

Scoring = Literal["exact", "numeric", "math_verify", "none"]

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARKS = (re.compile(r"####\s*"), re.compile(r"answer\**(?:\s+is|\s*:)\**:?[ \t]*", re.IGNORECASE))
_SENTENCE_END = re.compile(r"[.!?]\s")
_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_NUMBER = re.compile(r"(?<![\w.])[-+−]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?(?:/\d+)?%?")


def stated_answer(text: str) -> str | None:
    r"""What the text marks as its answer: the last \boxed{}, else <answer></answer>, else the rest of the line after the last
    ####, else after the last "answer is" or "answer:"; None without a mark."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    tags = _TAG.findall(text)
    if tags:
        return _bare(tags[-1])
    for mark in _MARKS:
        lines = [text[match.end() :].partition("\n")[0] for match in mark.finditer(text)]
        stated = [line for line in lines if line.strip()]
        if stated:
            return _bare(stated[-1])
    return None


def last_number(text: str) -> Fraction | None:
    r"""The last number in the text, exactly: 1,234 · -0.5 · 3/4 · \frac{3}{4} · 12% (= 0.12) · $5 · 1e3; None without."""
    for match in reversed(_NUMBER.findall(_FRACTION.sub(r"\1/\2", text))):
        number = _to_fraction(match)
        if number is not None:
            return number
    return None


def numeric_answer(text: str) -> Fraction | None:
    """The last number of the stated answer's first sentence with one; of the whole text when no answer is stated."""
    stated = stated_answer(text)
    if stated is None:
        return last_number(text)
    return next((n for n in map(last_number, _SENTENCE_END.split(stated)) if n is not None), None)


def exact_answer(text: str) -> str:
    """The stated answer, else the whole text; white space collapsed, one closing full stop taken off."""
    stated = stated_answer(text)
    return " ".join((text if stated is None else stated).split()).removesuffix(".")


def exact_reward(completions: Sequence[str], answer: Sequence[Any], **_columns: Any) -> list[float]:
    """1.0 where the answers agree as text (case counts), else 0.0."""
    return [
        float(exact_answer(text) == exact_answer(str(gold))) for text, gold in zip(completions, answer, strict=True)
    ]


def numeric_reward(completions: Sequence[str], answer: Sequence[Any], **_columns: Any) -> list[float]:
    """1.0 where the answers are the same number within 1e-6 relative, else 0.0.

    Raises:
        ValueError: a reference without a number.
    """
    rewards = []
    for text, gold in zip(completions, answer, strict=True):
        target, found = numeric_answer(str(gold)), numeric_answer(text)
        if target is None:
            raise ValueError(f"the reference answer {gold!r} contains no number")
        rewards.append(float(found is not None and abs(found - target) <= Fraction(1, 10**6) * abs(target)))
    return rewards


def math_verify_reward(completions: Sequence[str], answer: Sequence[Any], **_columns: Any) -> list[float]:
    """1.0 where math-verify holds the completion's answer equal to the reference, else 0.0 (also where it finds none).

    Raises:
        ValueError: a reference that math-verify cannot read.
    """
    library = require_math_verify()
    # Our own time limit ends a call that hangs; theirs needs signals and is switched off.
    parse = functools.partial(library.parse, parsing_timeout=None)
    rewards = []
    for text, gold in zip(completions, answer, strict=True):
        target = parse(str(gold)) or parse(f"${gold}$")
        if not target:
            raise ValueError(f"math-verify cannot read the reference answer {gold!r}")
        rewards.append(float(library.verify(target, parse(text), timeout_seconds=None)))
    return rewards


def require_math_verify() -> ModuleType:
    """The package math-verify.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        raise ConfigError(
            f"Scoring 'math_verify' needs the package math-verify ({error}); install leanroll with the extra `tasks`: "
            "pip install 'leanroll[tasks]'."
        ) from None


REWARDS: dict[str, Callable[..., list[float]]] = {
    "exact": exact_reward,
    "numeric": numeric_reward,
    "math_verify": math_verify_reward,
}


def vote_key(text: str, scoring: Scoring) -> Hashable | None:
    """What majority voting counts: the number (numeric), or the stated answer without white space; None without one."""
    if scoring == "numeric":
        return numeric_answer(text)
    if scoring == "exact":
        return exact_answer(text) or None
    if scoring == "math_verify":
        stated = stated_answer(text)
        return "".join(stated.split()).rstrip(".") or None if stated is not None else None
    return None


def _bare(answer: str) -> str:
    return answer.strip(" \t\n*_`").removesuffix(".").rstrip("*_` ")


def _to_fraction(token: str) -> Fraction | None:
    plain = token.replace(",", "").replace("$", "").replace("−", "-")
    percent = plain.endswith("%")
    numerator, _, denominator = plain.removesuffix("%").partition("/")
    if len(plain) > 60 or not any(c.isdigit() for c in numerator):
        return None
    mantissa, _, exponent = numerator.lower().partition("e")
    if denominator and int(denominator) == 0:
        return None
    if exponent and abs(int(exponent)) > 300:
        return None
    value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0) / int(denominator or 1)
    return value / 100 if percent else value


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None  # cut off inside the box
