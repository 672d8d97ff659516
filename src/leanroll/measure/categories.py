r"""Kinds of tokens, read from their text in the completion, and the KL of each kind by position (D9; arXiv 2605.27028).

| category | characters |
|---|---|
| planning | words that say how to go on: wait, let me, therefore, step; so, then, first … where a sentence starts |
| structural | line breaks and other layout, markup (bullets, headings, bold, code fences), punctuation, brackets |
| number | digits with the separators and the percent sign inside a number; not the marker of a numbered list |
| operator | mathematical symbols; `-`, `*`, `/` only between operands or before a number |
| latex | commands, `$` around formulas, and inside formulas or arguments `{ } ^ _ &` |
| continuation | everything else: the words themselves |
| stop | stop and other special tokens, which have no text |

Worked example: "So x = 3.5 m." → planning "So", continuation "x" and "m", operator "=", number "3.5", structural ".". A token
counts where most of its characters lie, blanks left out; on a tie the earlier of `CATEGORIES`. A category that a task never
produces has no tokens and no mean. The lists are ours: the source names the categories and defines none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from leanroll.errors import UserError
from leanroll.measure.bootstrap import (
    Estimate,
    check_same_lengths,
    check_settings,
    pad_trajectories,
    ratio_estimate,
    resample_counts,
    safe_ratio,
    trajectory_lengths,
)
from leanroll.measure.token_text import TokenText

CATEGORIES = ("stop", "latex", "number", "operator", "planning", "structural", "continuation")
"""A token's code is its place here."""

_STOP, _LATEX, _NUMBER, _OPERATOR, _PLANNING, _STRUCTURAL, _CONTINUATION = range(len(CATEGORIES))
_BLANK = -1  # counts only where a token is nothing else

_ANYWHERE = (
    r"wait|hmm+|let(?:'|’)s|let me|let us|therefore|thus|hence|alternatively|however|finally|recall|suppose|assume|verify|"
    r"double[- ]check|step|note that|in order to|in conclusion|in summary|we need to|we can|we have to|i need to|i should|i will"
)
_AT_START = (
    r"so|then|now|next|first(?:ly)?|second(?:ly)?|third(?:ly)?|lastly|but|since|because|okay|ok|actually|maybe|perhaps|consider|"
    r"given|if|to (?:find|solve|do|get|check|answer)|check"
)
_START = r"(?:(?<=[.!?:;,\n])[ \t\n]*|\A\s*|^[ \t]*)"
_PLAN = re.compile(rf"\b(?:{_ANYWHERE})\b|{_START}\b(?P<start>{_AT_START})\b", re.IGNORECASE | re.MULTILINE)
_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*%?")
_LAYOUT = re.compile(
    r"^[ \t]*(?:[-*+•]|\d+[.)])(?=[ \t])"  # list markers
    r"|^[ \t]*#{1,6}(?=[ \t])"
    r"|^[ \t]*(?:[-*_=][ \t]*){3,}$"  # rules
    r"|`+|(?<!\w)\*\*|\*\*(?!\w)|\|",
    re.MULTILINE,
)
_FORMULAS = re.compile(
    r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|\\begin\{(\w+\*?)\}.+?\\end\{\1\}"
    # A price is no formula: no blank inside next to the dollars, no digit after the second one (as in Pandoc).
    r"|(?<!\\)\$(?=\S)[^$\n]+?(?<=\S)\$(?!\d)",
    re.DOTALL,
)
_COMMAND = re.compile(r"\\(?:[A-Za-z]+\*?|[^A-Za-z0-9\s])")
_IN_FORMULA = frozenset("{}^_&$")
_LIKE_OPERATORS = frozenset("-*/−–")
_LONGEST_ARGUMENT = 400  # characters


def token_categories(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], special_ids: Collection[int]
) -> np.ndarray:
    """The category of each token of a completion, int64 [T], places in `CATEGORIES`.

    decode: ids → text without special tokens. special_ids: stop and other special tokens.
    """
    found = TokenText.of(token_ids, decode)
    labels = character_categories(found.text)
    special = set(special_ids)
    codes = [
        _STOP if i in special else _most(labels[start:stop])
        for i, (start, stop) in zip(token_ids, found.spans, strict=True)
    ]
    return np.asarray(codes, dtype=np.int64)


def character_categories(text: str) -> list[int]:
    """A place in `CATEGORIES` per character, -1 for blanks. Later rules win: planning, operators, numbers, layout, LaTeX."""
    labels = [_plain(c) for c in text]

    def mark(start: int, stop: int, category: int, over: tuple[int, ...]) -> None:
        for i in range(start, stop):
            if labels[i] in over:
                labels[i] = category

    anything = (_CONTINUATION, _STRUCTURAL, _OPERATOR)
    for match in _PLAN.finditer(text):
        start = match.start("start") if match["start"] else match.start()
        mark(start, match.end(), _PLANNING, (_CONTINUATION, _STRUCTURAL))
    for i, c in enumerate(text):
        if c in _LIKE_OPERATORS and _joins_operands(text, i):
            labels[i] = _OPERATOR
        elif c in "'’-–/" and 0 < i < len(text) - 1 and text[i - 1].isalpha() and text[i + 1].isalpha():
            mark(i, i + 1, _CONTINUATION, (_STRUCTURAL,))  # inside a word
    for match in _NUMBERS.finditer(text):
        mark(*match.span(), _NUMBER, anything)
    for match in _LAYOUT.finditer(text):
        mark(*match.span(), _STRUCTURAL, (*anything, _NUMBER, _PLANNING))
    _mark_latex(text, labels)
    return labels


def _plain(c: str) -> int:
    """Of a character by itself."""
    if c in "\n\r":
        return _STRUCTURAL
    if c.isspace():
        return _BLANK
    kind = unicodedata.category(c)
    if c == "^" or (kind == "Sm" and c not in "|~"):
        return _OPERATOR
    return _STRUCTURAL if kind[0] in "PS" else _CONTINUATION


def _joins_operands(text: str, i: int) -> bool:
    """Whether the sign at i stands between operands (numbers, brackets, single letters) or before a number of its own."""
    left, right = i - 1, i + 1
    while left >= 0 and text[left] == " ":
        left -= 1
    while right < len(text) and text[right] in " *":
        right += 1
    if right == len(text):
        return False
    if text[i] in "-−" and right == i + 1 and text[right].isdigit() and (i == 0 or not text[i - 1].isalnum()):
        return True

    def operand(j: int, step: int, brackets: str) -> bool:
        if j < 0:
            return False
        if text[j].isdigit() or text[j] in brackets:
            return True
        alone = not 0 <= j + step < len(text) or not text[j + step].isalpha()
        return text[j].isalpha() and alone

    return operand(left, -1, ")]}*") and operand(right, 1, "([{\\-−")


def _mark_latex(text: str, labels: list[int]) -> None:
    inside = np.zeros(len(text), dtype=bool)
    for match in _FORMULAS.finditer(text):
        inside[match.start() : match.end()] = True
    for match in _COMMAND.finditer(text):
        for i in range(*match.span()):
            labels[i] = _LATEX
        i = match.end()
        while i < len(text) and text[i] == "{":  # its arguments, however deeply nested
            depth, stop = 1, i + 1
            while depth and stop < min(len(text), i + _LONGEST_ARGUMENT):
                depth += (text[stop] == "{") - (text[stop] == "}")
                stop += 1
            if depth:
                break  # it never closes
            inside[i:stop] = True
            i = stop
    for i in np.flatnonzero(inside).tolist():
        if text[i] in _IN_FORMULA:
            labels[i] = _LATEX


def _most(labels: Sequence[int]) -> int:
    counts = np.bincount([label for label in labels if label != _BLANK] or [_STRUCTURAL], minlength=len(CATEGORIES))
    return int(counts.argmax())


@dataclass(frozen=True, slots=True)
class CategoryKL:
    """KL of one category's tokens; all in nats.

    num_tokens: with which num_trajectories have one. token_share, kl_share: of all tokens and of all KL (None without any KL).
    mean: per token, with its interval over trajectories; None without tokens.
    bin_tokens, bin_mean, bin_share: [B] by bin of positions: tokens, mean (NaN without tokens), share of all KL (NaN without any).
    """

    category: str
    num_tokens: int
    num_trajectories: int
    token_share: float
    kl_share: float | None
    mean: Estimate | None
    bin_tokens: np.ndarray
    bin_mean: np.ndarray
    bin_share: np.ndarray


@dataclass(frozen=True, slots=True)
class CategoryTable:
    """starts: int64 [B], first position of each bin. rows: one per entry of `CATEGORIES`, in that order."""

    starts: np.ndarray
    rows: tuple[CategoryKL, ...]


def category_kl(
    categories: Sequence[np.ndarray],
    reverse_kl: Sequence[np.ndarray],
    *,
    bin_tokens: int,
    level: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> CategoryTable:
    """Mean KL and share of the total KL per category and bin of positions (D9).

    Args:
        categories: int64 [T_i] per trajectory, as `token_categories` returns them. reverse_kl: nats, [T_i], of the same tokens.

    Raises:
        ConfigError: bin_tokens, level or num_resamples out of range.
        UserError: no trajectories, an empty one, values that are not finite, codes that are no category, or lengths that differ.
    """
    check_settings(level, num_resamples, bin_tokens)
    lengths, codes, kl = _checked(categories, reverse_kl, "reverse_kl")
    starts = np.arange(0, lengths.max(), bin_tokens)
    total, draws = kl.sum(), resample_counts(len(lengths), num_resamples, seed)
    rows = []
    for code, name in enumerate(CATEGORIES):
        of_it = codes == code
        counts, sums = of_it.sum(axis=1), np.where(of_it, kl, 0.0).sum(axis=1)
        bin_counts = np.add.reduceat(of_it.sum(axis=0), starts)
        bin_sums = np.add.reduceat(np.where(of_it, kl, 0.0).sum(axis=0), starts)
        rows.append(
            CategoryKL(
                category=name,
                num_tokens=int(counts.sum()),
                num_trajectories=int((counts > 0).sum()),
                token_share=float(counts.sum() / lengths.sum()),
                kl_share=float(sums.sum() / total) if total > 0 else None,
                mean=ratio_estimate(sums, counts, counts > 0, draws, level) if counts.any() else None,
                bin_tokens=bin_counts,
                bin_mean=safe_ratio(bin_sums, bin_counts),
                bin_share=safe_ratio(bin_sums, np.full(len(starts), total)),
            )
        )
    return CategoryTable(starts, tuple(rows))


def category_ratios(
    categories: Sequence[np.ndarray],
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    *,
    level: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Estimate | None]:
    """Per category, all its KL after training / before, with a paired interval over trajectories; None without KL before.

    Raises:
        As `category_kl`.
    """
    check_settings(level, num_resamples)
    lengths, codes, kl_before = _checked(categories, before, "before")
    _, _, kl_after = _checked(categories, after, "after")
    draws = resample_counts(len(lengths), num_resamples, seed)
    found: dict[str, Estimate | None] = {}
    for code, name in enumerate(CATEGORIES):
        of_it = codes == code
        top, bottom = (np.where(of_it, kl, 0.0).sum(axis=1) for kl in (kl_after, kl_before))
        found[name] = ratio_estimate(top, bottom, of_it.any(axis=1), draws, level) if bottom.sum() > 0 else None
    return found


def _checked(
    categories: Sequence[np.ndarray], kl: Sequence[np.ndarray], name: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths [R], codes [R, L] (-1 past the end) and KL [R, L]."""
    lengths = trajectory_lengths(kl, name)
    check_same_lengths(lengths, name, trajectory_lengths(categories, "categories"), "categories")
    joined = np.concatenate(categories)
    if joined.dtype.kind not in "iu" or joined.min() < 0 or joined.max() >= len(CATEGORIES):
        raise UserError(
            f"categories has {joined.dtype} values from {joined.min()} to {joined.max()}; expected integers from 0 to "
            f"{len(CATEGORIES) - 1}: take them from token_categories."
        )
    return (
        lengths,
        pad_trajectories([c + 1 for c in categories], lengths).astype(np.int64) - 1,
        pad_trajectories(kl, lengths),
    )
