"""What a privileged teacher of `ifollow` is told besides: each constraint spelled out, with a worked example.

The example is about another subject and satisfies its constraint with the item's own parameters (tested for every
kind). A generator of its own draws the subject, so that texts differ from item to item and no item changes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanroll.tasks.ifollow_checks import words

# No sentence has a comma, a digit or a word that `forbidden_word` may rule out, so that any of them fits any constraint.
SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "kites": (
        "A kite climbs when steady wind pushes against its sail.",
        "The tail keeps the nose up on gusty days.",
        "Children run across the field while the line hums.",
        "Good flyers let out more string before the wind drops.",
        "Bright colors make a small kite easy for everyone.",
    ),
    "sandcastles": (
        "A sandcastle starts on wet ground near the water.",
        "Small hands press the sand until the walls hold.",
        "Shells make fine windows while a feather makes a flag.",
        "Each wave takes a little more until the towers fall.",
        "Tomorrow the shore offers a clean place again.",
    ),
    "mills": (
        "A mill turns its broad arms toward the breeze.",
        "Heavy stones inside grind the grain into flour.",
        "The miller listens closely because each creak tells a story.",
        "Stormy days call upon strong ropes plus a calm head.",
        "Some old mills still work beside modern farms.",
    ),
    "snowmen": (
        "A snowman begins when one small ball rolls across the yard.",
        "Every turn adds weight until two friends must push together.",
        "A carrot makes the nose while dark stones make the eyes.",
        "Neighbors lend a scarf or an old hat.",
        "Warm days melt the whole thing yet nobody feels sad.",
    ),
    "lanterns": (
        "A paper lantern throws soft light over the garden table.",
        "Thin wooden strips hold the shape while the glue dries.",
        "Families hang them on ropes above the narrow street.",
        "Insects circle the glow until someone blows out the flame.",
        "Morning finds only ash beside a few drops where wax fell.",
    ),
    "scarecrows": (
        "A scarecrow guards the corn from hungry birds all summer.",
        "Workers stuff old shirts until the arms look strong.",
        "A straw hat hides the face on bright mornings.",
        "Crows soon learn the trick yet still keep their distance.",
        "Rain ruins the clothes so each spring brings a new guard.",
    ),
}

_LETTERS = {
    "b": "Bob brought big blue bags because both brothers bake brown bread before breakfast.",
    "w": "We wonder why wild winds whistle when winter weather waits west.",
    "m": "My mom makes many mild meals most Monday mornings.",
    "f": "Five fine friends found fresh figs far from four foggy fields.",
    "p": "Peter plans proper parties plus plenty of puzzles people prefer.",
    "g": "Good gray geese gladly gather green grass along great big gates.",
}
_NUMBERS = (
    "One of them lasted 12 days.",
    "The first was made in 1874.",
    "A good one costs about 30 dollars.",
)
_PLACEHOLDERS = (
    "My friend [name] knows more about this.",
    "Ask again on [date].",
    "You can meet us at [place].",
)

_KEYWORDS = ("The best word here is", "Let us repeat it:")

Sentences = Sequence[str]
Build = Callable[[Sentences, Mapping[str, Any]], str]


def _text(sentences: Sentences) -> str:
    return " ".join(sentences)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _up_to(sentences: Sentences, num_words: int) -> str:
    """The shortest beginning with at least that many words."""
    count = 1
    while len(words(_text(sentences[:count]))) < num_words:
        count += 1
    return _text(sentences[:count])


def _joined(sentences: Sentences, n: int) -> str:
    """The first sentences joined by n semicolons, and two more."""
    clauses = [sentences[0], *map(_lower_first, sentences[1 : n + 1])]
    return _text(["; ".join(clause.removesuffix(".") for clause in clauses) + ".", *sentences[n + 1 : n + 3]])


def _lines(sentences: Sentences, n: int) -> list[str]:
    """n lines; with two sentences each where one would make the answer too short."""
    per_line = 2 if n < 3 else 1
    return [_text(sentences[i * per_line : (i + 1) * per_line]) for i in range(n)]


def _capitals(sentences: Sentences, n: int) -> str:
    parts = sentences[0].split()
    long = [i for i, part in enumerate(parts) if len(part) > 3][:n]
    first = " ".join(part.upper() if i in long else part for i, part in enumerate(parts))
    return _text([first, *sentences[1:3]])


def _highlights(sentences: Sentences, n: int) -> str:
    marked = ["*{}* {}".format(" ".join(s.split()[:2]), " ".join(s.split()[2:])) for s in sentences[:n]]
    return _text([*marked, *sentences[n:3]])


def _endings(sentences: Sentences, n: int, ending: str) -> str:
    """Three sentences, of which the first n end otherwise."""
    return _text([s.removesuffix(".") + ending if i < n else s for i, s in enumerate(sentences[:3])])


@dataclass(frozen=True, slots=True)
class Lesson:
    """rule: template of the instruction; example: from at least 30 sentences, those of one subject first."""

    rule: str
    example: Build


LESSONS: Mapping[str, Lesson] = {
    "lowercase": Lesson(
        "Write every word in small letters, even the first word of a sentence and all names.",
        lambda s, p: _text(s[:3]).lower(),
    ),
    "uppercase": Lesson(
        "WRITE EVERY WORD IN CAPITAL LETTERS, FROM THE FIRST TO THE LAST.",
        lambda s, p: _text(s[:3]).upper(),
    ),
    "capital_words": Lesson(
        "Write at least {n} words entirely in capital letters.",
        lambda s, p: _capitals(s, p["n"]),
    ),
    "no_commas": Lesson(
        "Write short sentences, and do not put a single comma in them.",
        lambda s, p: _text(s[:4]),
    ),
    "ends_question": Lesson(
        "Write three short sentences, and then ask the reader a question. The question mark is the last thing you write.",
        lambda s, p: _text([*s[:3], "What do you think about it?"]),
    ),
    "semicolons": Lesson(
        "Join sentences with semicolons (;), at least {n} of them.",
        lambda s, p: _joined(s, p["n"]),
    ),
    "quoted": Lesson(
        'The first character of your answer is " and the last character of your answer is ".',
        lambda s, p: f'"{_text(s[:3])}"',
    ),
    "placeholders": Lesson(
        "Put at least {n} words in square brackets, like [name].",
        lambda s, p: _text([*s[:2], *_PLACEHOLDERS[: p["n"]]]),
    ),
    "highlights": Lesson(
        "Put asterisks around at least {n} words or phrases, like *this*.",
        lambda s, p: _highlights(s, p["n"]),
    ),
    "title": Lesson(
        "Begin with a line that holds a title between << and >>. Then write the text.",
        lambda s, p: f"<<{' '.join(s[0].split()[:2]).title()}>>\n{_text(s[:3])}",
    ),
    "numbers": Lesson(
        "Write at least {n} numbers in digits, such as 7 or 1990.",
        lambda s, p: _text([*s[:2], *_NUMBERS[: p["n"]]]),
    ),
    "keyword": Lesson(
        'Write the word "{word}" at least {n} times.',
        lambda s, p: _text([*s[:2], *(f"{start} {p['word']}." for start in _KEYWORDS[: p["n"]])]),
    ),
    "include_words": Lesson(
        'Write the word "{pair[0]}" and the word "{pair[1]}".',
        lambda s, p: _text([*s[:2], f"The best words here are {p['pair'][0]} and {p['pair'][1]}."]),
    ),
    "forbidden_word": Lesson(
        'Never write the word "{word}". Find other words for what you mean.',
        lambda s, p: _text(s[:3]),
    ),
    "starts_with": Lesson(
        'The first words of your answer are "{phrase}". Go on from there.',
        lambda s, p: f"{p['phrase']}, {_lower_first(_text(s[:3]))}",
    ),
    "ends_with": Lesson(
        'Write three short sentences, and then, as the very last words, "{phrase}" Write nothing after it.',
        lambda s, p: f"{_text(s[:3])} {p['phrase']}",
    ),
    "letter_frequency": Lesson(
        'Choose words with the letter "{letter}", so that it appears at least {n} times.',
        lambda s, p: _text([_LETTERS[p["letter"]], *s[:3]]),
    ),
    "min_words": Lesson(
        "Write a long answer, of {n} words or more.",
        lambda s, p: _up_to(s, p["n"] + 5),
    ),
    "max_words": Lesson(
        "Write two short sentences, and then stop: {n} words are the limit.",
        lambda s, p: _text(s[:2]),
    ),
    "word_range": Lesson(
        "Write more than {bounds[0]} words, and stop before {bounds[1]} words.",
        lambda s, p: _up_to(s, p["bounds"][0] + 5),
    ),
    "exact_sentences": Lesson(
        "Write {n} sentences, then stop.",
        lambda s, p: _text(s[: p["n"]]),
    ),
    "bullets": Lesson(
        'Write {n} lines and nothing else. Each line begins with "* ".',
        lambda s, p: "\n".join(f"* {x}" for x in _lines(s, p["n"])),
    ),
    "numbered_list": Lesson(
        "Write {n} lines and nothing else. They begin with 1. and 2. and so on up to {n}.",
        lambda s, p: "\n".join(f"{i}. {x}" for i, x in enumerate(s[: p["n"]], 1)),
    ),
    "dash_lines": Lesson(
        'Write three lines and nothing else. Each line begins with "- ".',
        lambda s, p: "\n".join(f"- {x}" for x in s[:3]),
    ),
    "starred_paragraphs": Lesson(
        "Write {n} short paragraphs. Between two paragraphs stands a line that is just ***",
        lambda s, p: "\n***\n".join(_text(s[2 * i : 2 * i + 2]) for i in range(p["n"])),
    ),
    "two_responses": Lesson(
        "Write a short answer, then a line that is just ******, then another short answer.",
        lambda s, p: f"{_text(s[:2])}\n******\n{_text(s[2:4])}",
    ),
    "postscript": Lesson(
        "Write three short sentences. Then begin a new paragraph with P.S. and add one sentence.",
        lambda s, p: f"{_text(s[:3])}\n\nP.S. {s[3]}",
    ),
    "json_object": Lesson(
        'Write {{, then "{keys[0]}": and a text in double quotes, a comma, "{keys[1]}": and a text in double quotes, then }}.',
        lambda s, p: json.dumps({p["keys"][0]: s[0], p["keys"][1]: _text(s[1:3])}),
    ),
    "exclamations": Lesson(
        "End at least {n} sentences with an exclamation mark (!).",
        lambda s, p: _endings(s, p["n"], "!"),
    ),
    "parentheses": Lesson(
        "Add at least {n} remarks in round brackets (like this).",
        lambda s, p: _endings(s, p["n"], " (at least most of the time)."),
    ),
    "max_sentences": Lesson(
        "Write {n} sentences, then stop.",
        lambda s, p: _text(s[: p["n"]]),
    ),
    "sections": Lesson(
        'Write {n} short parts. Above each stands a line with its heading, from "Section 1" to "Section {n}".',
        lambda s, p: "\n\n".join(f"Section {i + 1}\n{_text(s[2 * i : 2 * i + 2])}" for i in range(p["n"])),
    ),
}


def worked_example(kind: str, params: Mapping[str, Any], subject: str) -> str:
    """An answer about the subject (one of SUBJECTS) that satisfies the constraint."""
    others = [sentence for name, text in SUBJECTS.items() if name != subject for sentence in text]
    return LESSONS[kind].example([*SUBJECTS[subject], *others], params)


def privileged_text(rng: random.Random, topic: str, constraints: Sequence[Mapping[str, Any]]) -> str:
    """What the teacher is told about an item. The examples have different subjects, one per constraint.

    constraints: each {"kind": name, "params": {...}}, 1 to 3.
    """
    parts = []
    for constraint, subject in zip(constraints, rng.sample(list(SUBJECTS), len(constraints)), strict=True):
        rule = LESSONS[constraint["kind"]].rule.format(**constraint["params"])
        example = worked_example(constraint["kind"], constraint["params"], subject)
        parts.append(f"{rule}\n\nHere is an example of a correct answer, about {subject}:\n\n{example}")
    return "\n\n".join([*parts, f"Now write your answer, about {topic}."])
