"""Checks of the `ifollow` constraints: pure functions of the completion's text.

`check(text, **params)` returns 1.0 exactly when the constraint holds; a smaller value is partial credit: how near the
text came, 0.9 at most. Letters mean Unicode letters; words, sentences and lines are counted by the helpers below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")
_SENTENCE_END = re.compile(r"[.!?…]+(?=[\"”’')\]*]*(?:\s|$))")
_LIST_NUMBER = re.compile(r"^\s*\d+[.)]\s+", re.MULTILINE)
_TRAILING_MARKS = re.compile(r"[\W_]+$")
_FENCE = re.compile(r"^```[a-zA-Z]*\s*\n(.*?)\n?```$", re.DOTALL)
_NEAR_MISS = 0.9


def words(text: str) -> list[str]:
    """Words in order; "don't" and "well-known" are one word each."""
    return _WORD.findall(text)


def count_word(text: str, word: str) -> int:
    """How often `word` (or phrase) occurs as a whole word, case ignored."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def num_sentences(text: str) -> int:
    """Runs of . ! ? before white space or the end, plus one for an unfinished last sentence; list numbers ignored."""
    body = _LIST_NUMBER.sub("", text).strip()
    ends = [match.end() for match in _SENTENCE_END.finditer(body)]
    rest = body[ends[-1] :] if ends else body
    return len(ends) + bool(words(rest))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _exactly(count: int, target: int) -> float:
    return 1.0 if count == target else _NEAR_MISS * max(0.0, 1.0 - abs(count - target) / max(target, 1))


def _at_least(count: int, target: int) -> float:
    return 1.0 if count >= target else _NEAR_MISS * count / target


def _at_most(count: int, target: int) -> float:
    # Twice the limit or more earns nothing.
    return 1.0 if count <= target else _NEAR_MISS * max(0.0, 2.0 - count / max(target, 1))


def _rare(num_bad: int, num_words: int, natural_share: float) -> float:
    """1.0 without bad words; 0 at the share that ordinary text has, so that only an effort earns partial credit."""
    if num_bad == 0:
        return 1.0
    return _NEAR_MISS * max(0.0, 1.0 - num_bad / max(num_words * natural_share, 1.0))


# Letter case


def lowercase(text: str) -> float:
    """No capital letter."""
    found = words(text)
    return _rare(sum(word != word.lower() for word in found), len(found), 0.12)


def uppercase(text: str) -> float:
    """No small letter."""
    found = words(text)
    bad = sum(word != word.upper() for word in found)
    return 1.0 if bad == 0 else _NEAR_MISS * (1.0 - bad / len(found))


def capital_words(text: str, n: int) -> float:
    """At least n words of two or more letters entirely in capitals."""
    return _at_least(sum(len(word) > 1 and word.isupper() for word in words(text)), n)


# Punctuation and marks


def no_commas(text: str) -> float:
    """No comma."""
    return _rare(text.count(","), len(words(text)), 0.06)


def ends_question(text: str) -> float:
    """The last visible character, quotes and markdown aside, is a question mark."""
    return 1.0 if text.rstrip().rstrip("\"'*_”’ \n").endswith("?") else _NEAR_MISS * 0.3 * ("?" in text)


def exclamations(text: str, n: int) -> float:
    """At least n exclamation marks."""
    return _at_least(text.count("!"), n)


def parentheses(text: str, n: int) -> float:
    """At least n non-empty pairs of round brackets."""
    return _at_least(len(re.findall(r"\([^()\n]*\w[^()\n]*\)", text)), n)


def semicolons(text: str, n: int) -> float:
    """At least n semicolons."""
    return _at_least(text.count(";"), n)


def quoted(text: str) -> float:
    """The whole text stands between double quotes."""
    body = text.strip()
    opens, closes = body[:1] in ('"', "“"), body[-1:] in ('"', "”")
    return 1.0 if len(body) > 2 and opens and closes else _NEAR_MISS * 0.5 * (opens or closes)


def placeholders(text: str, n: int) -> float:
    """At least n non-empty [placeholders] in square brackets."""
    return _at_least(len(re.findall(r"\[[^\[\]\n]*\w[^\[\]\n]*\]", text)), n)


def highlights(text: str, n: int) -> float:
    """At least n spans between single or double asterisks on one line; a bullet's asterisk does not count."""
    spans = re.findall(r"(?<![*\w])\*{1,2}(?=[^\s*])[^*\n]*[^\s*]\*{1,2}(?![*\w])|(?<![*\w])\*{1,2}\w\*{1,2}", text)
    return _at_least(len(spans), n)


def title(text: str) -> float:
    """A non-empty title in double angular brackets, <<like this>>."""
    if re.search(r"<<[^<>\n]*\w[^<>\n]*>>", text):
        return 1.0
    return _NEAR_MISS * 0.5 * ("<<" in text or ">>" in text)


def numbers(text: str, n: int) -> float:
    """At least n numbers in digits; the numbers of a list do not count."""
    return _at_least(len(re.findall(r"\d+(?:[.,]\d+)*", _LIST_NUMBER.sub("", text))), n)


# Words and phrases


def keyword(text: str, word: str, n: int) -> float:
    """The word at least n times, as a whole word, case ignored."""
    return _at_least(count_word(text, word), n)


def include_words(text: str, pair: Sequence[str]) -> float:
    """Every word of the list at least once."""
    found = sum(count_word(text, word) > 0 for word in pair)
    return _at_least(found, len(pair))


def forbidden_word(text: str, word: str) -> float:
    """The word nowhere, as a whole word, case ignored."""
    return 1.0 / (1 + count_word(text, word))


def starts_with(text: str, phrase: str) -> float:
    """The text begins with the phrase; case, and a quote or markdown mark before it, are ignored."""
    body = text.lstrip(" \n\t\"'“*_#").lower()
    if re.match(rf"{re.escape(phrase.lower())}(?!\w)", body):
        return 1.0
    return _NEAR_MISS * 0.3 * (count_word(text, phrase) > 0)


def ends_with(text: str, phrase: str) -> float:
    """The text ends with the phrase; case and closing punctuation are ignored."""
    body, ending = (_TRAILING_MARKS.sub("", part).lower() for part in (text, phrase))
    if re.search(rf"(?<!\w){re.escape(ending)}$", body):
        return 1.0
    return _NEAR_MISS * 0.3 * (count_word(text, phrase) > 0)


def letter_frequency(text: str, letter: str, n: int) -> float:
    """The letter at least n times, case ignored."""
    return _at_least(text.lower().count(letter.lower()), n)


# Length


def min_words(text: str, n: int) -> float:
    """At least n words."""
    return _at_least(len(words(text)), n)


def max_words(text: str, n: int) -> float:
    """At most n words."""
    return _at_most(len(words(text)), n)


def word_range(text: str, bounds: Sequence[int]) -> float:
    """From bounds[0] to bounds[1] words."""
    count = len(words(text))
    return _at_least(count, bounds[0]) if count < bounds[0] else _at_most(count, bounds[1])


def exact_sentences(text: str, n: int) -> float:
    """Exactly n sentences."""
    return _exactly(num_sentences(text), n)


def max_sentences(text: str, n: int) -> float:
    """At most n sentences."""
    return _at_most(num_sentences(text), n)


# Layout


def bullets(text: str, n: int) -> float:
    """Exactly n lines that start with '* ', '- ' or '• '."""
    return _exactly(len(re.findall(r"^\s*[*\-•]\s+\S", text, re.MULTILINE)), n)


def numbered_list(text: str, n: int) -> float:
    """Exactly n numbered lines, numbered 1 to n in order."""
    found = [int(number) for number in re.findall(r"^\s*[*_]{0,2}(\d{1,4})[.)][*_]{0,2}\s*\S", text, re.MULTILINE)]
    if found == list(range(1, n + 1)):
        return 1.0
    return min(_NEAR_MISS * 0.9, _exactly(len(found), n))


def dash_lines(text: str) -> float:
    """At least two lines, and every line that is not empty starts with a dash."""
    found = _lines(text)
    good = sum(bool(re.match(r"[-–—](?!-)", line)) for line in found)
    if good == len(found):
        return 1.0 if good >= 2 else _NEAR_MISS * 0.5 * good
    return _NEAR_MISS * good / len(found)


def starred_paragraphs(text: str, n: int) -> float:
    """Exactly n paragraphs, separated by lines of three asterisks."""
    parts = re.split(r"^\s*\*\*\*\s*$", text.strip(), flags=re.MULTILINE)
    if len(parts) == 1 or not all(words(part) for part in parts):
        return 0.0
    return _exactly(len(parts), n)


def two_responses(text: str) -> float:
    """Two different, non-empty answers separated by a line of six asterisks."""
    parts = [part.strip() for part in re.split(r"^\s*\*{6}\s*$", text.strip(), flags=re.MULTILINE)]
    if len(parts) == 2 and all(words(part) for part in parts):
        return 1.0 if parts[0] != parts[1] else _NEAR_MISS * 0.5
    return _NEAR_MISS * 0.3 * ("******" in text)


def sections(text: str, n: int) -> float:
    """Headings 'Section 1' to 'Section n', each at the start of a line, in order, and no further one."""
    found = [
        int(number) for number in re.findall(r"^[\s#*_]*section\s+(\d{1,4})\b", text, re.MULTILINE | re.IGNORECASE)
    ]
    return 1.0 if found == list(range(1, n + 1)) else min(_NEAR_MISS * 0.9, _exactly(len(found), n))


def postscript(text: str) -> float:
    """A last part that starts with 'P.S.' and says something, after other text."""
    match = re.search(r"(?<!\w)p\.\s?s\.?(?!\w)", text, re.IGNORECASE)
    if match is None:
        return 0.0
    return 1.0 if words(text[: match.start()]) and words(text[match.end() :]) else _NEAR_MISS * 0.5


def json_object(text: str, keys: Sequence[str]) -> float:
    """One JSON object and nothing else (a code fence is allowed), with every key, none of them empty."""
    body = text.strip()
    fence = _FENCE.match(body)
    try:
        value = json.loads(fence.group(1) if fence else body)
    except (ValueError, RecursionError):
        return _NEAR_MISS * 0.3 * body.startswith(("{", "```"))
    if not isinstance(value, dict):
        return _NEAR_MISS * 0.3
    return _at_least(sum(bool(value.get(key)) for key in keys), len(keys))
