"""The kinds of constraint of `ifollow`: wording, parameters, checker.

KINDS is frozen: it was fixed before any training run was tuned on it. Results are comparable only while it stays
as it is; a new kind belongs in a new task.

A parameter has two sets of values, for training and for evaluation, which never overlap, except for the counts of
`keyword`. Held-out kinds appear in evaluation only and have no values for training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from leanroll.tasks import ifollow_checks as checks
from leanroll.tasks.base import Split

Values = tuple[Any, ...]
DEFAULT_MIN_WORDS = 20


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of constraint.

    phrasings: instruction templates; `{name}` stands for a parameter.
    params: parameter name -> (values in training, values in evaluation).
    min_words: fewer words than this fail whatever the check says, so that an empty answer never wins.
    tags: two kinds that share a tag are never asked for together.
    alone: never combined with another kind.
    """

    name: str
    check: Callable[..., float]
    phrasings: tuple[str, ...]
    params: Mapping[str, tuple[Values, Values]] = field(default_factory=dict)
    min_words: int = DEFAULT_MIN_WORDS
    tags: frozenset[str] = frozenset()
    alone: bool = False
    held_out: bool = False

    def sample(self, rng: random.Random, split: Split) -> dict[str, Any]:
        """Parameters drawn from the split's values; plain JSON types."""
        column = 0 if split == "train" else 1
        return {name: rng.choice(values[column]) for name, values in self.params.items()}

    def instruction(self, rng: random.Random, params: Mapping[str, Any]) -> str:
        """One of the phrasings, filled in."""
        return rng.choice(self.phrasings).format(**params)

    def conflicts(self, other: Kind) -> bool:
        """Whether the two cannot be asked for in one prompt."""
        return self.alone or other.alone or self.name == other.name or bool(self.tags & other.tags)


def _split(text: str) -> Values:
    return tuple(part.strip() for part in text.replace("\n", " ").split(";"))


_TRAIN_WORDS = _split(
    "little; people; world; simple; important; always; every; beautiful; strong; careful; future; history; morning; "
    "children; secret; energy; reason; balance; moment; together; answer; healthy; safe; journey; wonderful; special"
)
_EVAL_WORDS = _split(
    "great; different; better; early; curious; gentle; popular; evening; memory; useful; adventure; quick"
)
_TRAIN_COMMON = _split("is; and; of; it; are; can; with; very; also; they; that; as")
_EVAL_COMMON = _split("to; in; for; you; this; be; we; but")
_TRAIN_STARTS = _split(
    "Let me tell you; Once upon a time; To be honest; Good news; Every day; It all began; Picture this; Dear reader; "
    "Long ago; Believe it or not; Here is the truth; In my view; Most people think; Imagine a world; First of all; Hello there"
)
_EVAL_STARTS = _split(
    "Believe me; Not long ago; The truth is; Welcome back; In simple words; My dear friend; As you know"
)
_TRAIN_ENDS = _split(
    "That is all.; The end.; Thank you for reading.; Have a nice day.; Now you know.; I hope this helps.; "
    "And that is the story.; Think about it.; See you soon.; Good luck.; Stay curious.; It is worth it."
)
_EVAL_ENDS = _split(
    "Take care.; Thanks for listening.; And so it goes.; Enjoy your day.; Until next time.; Best wishes."
)
_TRAIN_KEYS = (("topic", "summary"), ("name", "reason"), ("title", "text"), ("question", "answer"), ("fact", "source"))
_EVAL_KEYS = (("subject", "details"), ("idea", "example"), ("heading", "body"))


def _pairs(values: Values) -> Values:
    """Each word with the one that follows it, cyclically: pairs of one split stay inside it."""
    return tuple((value, values[(i + 1) % len(values)]) for i, value in enumerate(values))


def _tags(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Frozen before tuning: do not add, remove, reorder or edit entries.
KINDS: tuple[Kind, ...] = (
    Kind(
        "lowercase",
        checks.lowercase,
        (
            "Use only lowercase letters.",
            "Write everything in lowercase, with no capital letters.",
            "Do not use any capital letters.",
        ),
        tags=_tags("case"),
    ),
    Kind(
        "uppercase",
        checks.uppercase,
        ("Use only CAPITAL LETTERS.", "Write everything in capital letters.", "YOUR WHOLE ANSWER MUST BE IN ALL CAPS."),
        tags=_tags("case"),
    ),
    Kind(
        "capital_words",
        checks.capital_words,
        (
            "Write {n} or more words in ALL CAPS.",
            "Put {n} or more words in CAPITAL letters.",
            "Use {n} or more words in all capital letters.",
        ),
        {"n": ((1, 3), (2,))},
        tags=_tags("case"),
    ),
    Kind(
        "no_commas",
        checks.no_commas,
        ("Do not use any commas.", "Write without commas.", "Your answer must not contain a comma."),
        tags=_tags("comma"),
    ),
    Kind(
        "ends_question",
        checks.ends_question,
        ("End with a question.", "Your answer must end with a question mark.", "Finish with a question to the reader."),
        tags=_tags("end"),
    ),
    Kind(
        "semicolons",
        checks.semicolons,
        (
            "Use {n} or more semicolons.",
            "Include {n} or more semicolons (;).",
            "Your answer needs {n} or more semicolons.",
        ),
        {"n": ((1, 3), (2,))},
    ),
    Kind(
        "quoted",
        checks.quoted,
        (
            "Put your whole answer in double quotes.",
            "Wrap the entire answer in double quotation marks.",
            'Start and end your answer with a double quote (").',
        ),
        tags=_tags("start end"),
    ),
    Kind(
        "placeholders",
        checks.placeholders,
        (
            "Include {n} or more placeholders in square brackets, such as [name].",
            "Use {n} or more placeholders like [date] in square brackets.",
            "Your answer must have {n} or more [placeholders] in square brackets.",
        ),
        {"n": ((1, 3), (2,))},
    ),
    Kind(
        "highlights",
        checks.highlights,
        (
            "Highlight {n} or more parts with asterisks, like *this*.",
            "Mark {n} or more phrases with asterisks, like *this phrase*.",
            "Use *asterisks* to highlight {n} or more words.",
        ),
        {"n": ((1, 3), (2,))},
    ),
    Kind(
        "title",
        checks.title,
        (
            "Give a title in double angular brackets, like <<My Title>>.",
            "Include a title written as <<title>>.",
            "Your answer needs a title inside << and >>.",
        ),
        tags=_tags("title"),
    ),
    Kind(
        "numbers",
        checks.numbers,
        (
            "Include {n} or more numbers written in digits.",
            "Use {n} or more numbers, such as 7 or 1990.",
            "Mention {n} or more numbers in digits.",
        ),
        {"n": ((1, 3), (2,))},
    ),
    Kind(
        "keyword",
        checks.keyword,
        (
            'Use the word "{word}" {n} or more times.',
            'Include the word "{word}" {n} or more times.',
            'The word "{word}" must appear {n} or more times.',
        ),
        {"word": (_TRAIN_WORDS, _EVAL_WORDS), "n": ((1, 2), (1, 2))},
    ),
    Kind(
        "include_words",
        checks.include_words,
        (
            'Use the words "{pair[0]}" and "{pair[1]}".',
            'Include both "{pair[0]}" and "{pair[1]}" in your answer.',
            'Your answer must contain the words "{pair[0]}" and "{pair[1]}".',
        ),
        {"pair": (_pairs(_TRAIN_WORDS), _pairs(_EVAL_WORDS))},
    ),
    Kind(
        "forbidden_word",
        checks.forbidden_word,
        ('Do not use the word "{word}".', 'Never use the word "{word}".', 'Avoid the word "{word}" in your answer.'),
        {"word": (_TRAIN_COMMON, _EVAL_COMMON)},
        tags=_tags("start end"),
    ),
    Kind(
        "starts_with",
        checks.starts_with,
        ('Start with "{phrase}".', 'Begin your answer with "{phrase}".', 'The first words must be "{phrase}".'),
        {"phrase": (_TRAIN_STARTS, _EVAL_STARTS)},
        tags=_tags("start case"),
    ),
    Kind(
        "ends_with",
        checks.ends_with,
        ('End with "{phrase}"', 'Finish your answer with "{phrase}"', 'The last words must be "{phrase}"'),
        {"phrase": (_TRAIN_ENDS, _EVAL_ENDS)},
        tags=_tags("end case"),
    ),
    Kind(
        "letter_frequency",
        checks.letter_frequency,
        (
            'Use the letter "{letter}" at least {n} times.',
            'The letter "{letter}" should appear {n} or more times.',
            'Include at least {n} letters "{letter}".',
        ),
        {"letter": (("b", "w", "m", "f"), ("p", "g")), "n": ((8, 12), (10,))},
        tags=_tags("length"),
    ),
    Kind(
        "min_words",
        checks.min_words,
        ("Write at least {n} words.", "Use {n} words or more.", "Your answer must have at least {n} words."),
        {"n": ((50, 70, 90, 110), (60, 80, 100))},
        tags=_tags("length"),
    ),
    Kind(
        "max_words",
        checks.max_words,
        ("Use at most {n} words.", "Write no more than {n} words.", "Keep it to {n} words or fewer."),
        {"n": ((30, 40, 50, 60, 80), (35, 45, 70))},
        min_words=8,
        tags=_tags("length"),
    ),
    Kind(
        "word_range",
        checks.word_range,
        (
            "Write between {bounds[0]} and {bounds[1]} words.",
            "Use {bounds[0]} to {bounds[1]} words.",
            "Your answer must have from {bounds[0]} to {bounds[1]} words.",
        ),
        {"bounds": (((20, 60), (30, 70), (40, 90), (60, 120)), ((40, 80), (50, 110)))},
        tags=_tags("length"),
    ),
    Kind(
        "exact_sentences",
        checks.exact_sentences,
        ("Write exactly {n} sentences.", "Use exactly {n} sentences.", "Your answer must have exactly {n} sentences."),
        {"n": ((2, 3, 5), (4,))},
        min_words=10,
        tags=_tags("length"),
    ),
    Kind(
        "bullets",
        checks.bullets,
        (
            'Use exactly {n} bullet points, each starting with "* ".',
            'Answer with exactly {n} bullets that start with "* ".',
            'Include exactly {n} bullet points, like "* point".',
        ),
        {"n": ((2, 3, 5), (4,))},
        tags=_tags("layout"),
    ),
    Kind(
        "numbered_list",
        checks.numbered_list,
        (
            "Answer with a numbered list of exactly {n} items.",
            'Give exactly {n} numbered points, starting with "1.".',
            "Include a numbered list with exactly {n} items.",
        ),
        {"n": ((3, 5, 6), (4,))},
        tags=_tags("layout start"),
    ),
    Kind(
        "dash_lines",
        checks.dash_lines,
        (
            'Start every line with "-".',
            'Write several lines and begin each one with a dash ("-").',
            'Each line of your answer must start with "-".',
        ),
        tags=_tags("layout start title"),
    ),
    Kind(
        "starred_paragraphs",
        checks.starred_paragraphs,
        (
            "Write {n} paragraphs and put a line with *** between them.",
            "Give {n} paragraphs separated by a line of three asterisks: ***",
            "Separate your {n} paragraphs with a line that says ***.",
        ),
        {"n": ((2, 4), (3,))},
        tags=_tags("layout length"),
    ),
    Kind(
        "two_responses",
        checks.two_responses,
        (
            "Give two different answers, with a line of six asterisks (******) between them.",
            "Write two answers separated by a line with ******.",
            "Answer twice in different ways. Put ****** on a line between the two.",
        ),
        alone=True,
    ),
    Kind(
        "postscript",
        checks.postscript,
        (
            "At the end, add a postscript that starts with P.S.",
            'Add a "P.S." at the end.',
            "Finish with a postscript starting with P.S.",
        ),
        tags=_tags("end case"),
    ),
    Kind(
        "json_object",
        checks.json_object,
        (
            'Answer only with a JSON object with the keys "{keys[0]}" and "{keys[1]}".',
            'Reply in JSON, using the keys "{keys[0]}" and "{keys[1]}".',
            'Your whole answer must be one JSON object: {{"{keys[0]}": "...", "{keys[1]}": "..."}}',
        ),
        {"keys": (_TRAIN_KEYS, _EVAL_KEYS)},
        min_words=8,
        alone=True,
    ),
    # Held out: evaluation only.
    Kind(
        "exclamations",
        checks.exclamations,
        (
            "Use {n} or more exclamation marks.",
            "Include {n} or more exclamation marks (!).",
        ),
        {"n": ((), (1, 2))},
        held_out=True,
    ),
    Kind(
        "parentheses",
        checks.parentheses,
        (
            "Use parentheses (like this) {n} or more times.",
            "Include {n} or more remarks in round brackets (like this).",
        ),
        {"n": ((), (1, 2))},
        held_out=True,
    ),
    Kind(
        "max_sentences",
        checks.max_sentences,
        ("Use at most {n} sentences.", "Write no more than {n} sentences."),
        {"n": ((), (2, 3))},
        min_words=10,
        tags=_tags("length"),
        held_out=True,
    ),
    Kind(
        "sections",
        checks.sections,
        (
            'Split your answer into {n} parts, headed "Section 1", "Section 2" and so on.',
            'Write {n} parts. Begin them with "Section 1", "Section 2" and so on.',
        ),
        {"n": ((), (2, 3))},
        tags=_tags("layout start length case"),
        held_out=True,
    ),
)

BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}
SEEN_KINDS: tuple[Kind, ...] = tuple(kind for kind in KINDS if not kind.held_out)
HELD_OUT_KINDS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind.held_out)
