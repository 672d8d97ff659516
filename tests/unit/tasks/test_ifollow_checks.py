from __future__ import annotations

from typing import Any

import pytest

from leanroll.tasks.ifollow_checks import num_sentences, words
from leanroll.tasks.ifollow_kinds import BY_NAME

JSON_PARAMS = {"keys": ("topic", "summary")}

# kind, parameters, text that satisfies it, text that does not
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("lowercase", {}, "the moon is far — 384,400 km away!", "The moon is far."),
    ("lowercase", {}, "été à paris", "Été à paris"),
    ("uppercase", {}, "THE MOON IS FAR: 384 KM.", "THE MOON is far."),
    ("capital_words", {"n": 2}, "The MOON is VERY far.", "The MOON is A far I."),
    ("no_commas", {}, "The moon is far; it is cold.", "The moon is far, and cold."),
    ("ends_question", {}, 'Far away. "Is it cold?"', "Is it cold? Yes."),
    ("ends_question", {}, "Is it **cold?**\n", "Is it cold"),
    ("semicolons", {"n": 2}, "One; two; three.", "One; two, three."),
    ("quoted", {}, ' "The moon is far." ', '"The moon" is far.'),
    ("quoted", {}, "“The moon is far.”", "'The moon is far.'"),
    ("placeholders", {"n": 2}, "Dear [name], see you on [date].", "Dear [name], see you on []."),
    ("highlights", {"n": 2}, "The *moon* is **very far** away.", "The *moon* is far."),
    ("highlights", {"n": 2}, "* a *b c* point\n* another *d*", "* one point\n* another point\n* third"),
    ("highlights", {"n": 1}, "Only *a*.", "2 * 3 * 4 and f*x*y"),
    ("title", {}, "<<The Moon>>\nIt is far.", "<The Moon>\nIt is far."),
    ("title", {}, "Text <<a b>> text", "<< >> text"),
    ("numbers", {"n": 3}, "In 1969, 2 men went 384,400 km.", "In 1969, 2 men went far."),
    ("numbers", {"n": 2}, "1. born 1969\n2. died 2012", "1. born\n2. died\n3. buried"),
    ("keyword", {"word": "people", "n": 2}, "People like people.", "People like peoples and townspeople."),
    ("include_words", {"pair": ("simple", "world")}, "A Simple plan for the world.", "A simply worldly plan."),
    ("forbidden_word", {"word": "is"}, "This island exists.", "It IS far."),
    ("starts_with", {"phrase": "To be honest"}, '"To be honest, it is far."', "It is far, to be honest."),
    ("starts_with", {"phrase": "Good news"}, "**Good news!** It is near.", "Good newspapers say so."),
    ("ends_with", {"phrase": "The end."}, "It is far. The end!\n", "It is far. The end. Bye."),
    ("ends_with", {"phrase": "Good luck."}, 'I wish you "good luck"', "I wish you bad good lucks"),
    ("letter_frequency", {"letter": "b", "n": 3}, "Bob blinks.", "Bob links."),
    ("min_words", {"n": 4}, "The moon is far.", "It is far."),
    ("max_words", {"n": 3}, "It is far.", "The moon is far."),
    ("word_range", {"bounds": (2, 3)}, "Far away.", "Far."),
    ("word_range", {"bounds": (2, 3)}, "It is far.", "The moon is far."),
    ("exact_sentences", {"n": 2}, "It is far. Is it 3.5 times as far?", "It is far. It is cold. Very."),
    ("exact_sentences", {"n": 2}, 'She said "go." Then we left', "She went"),
    ("bullets", {"n": 2}, "Points:\n* one\n- two\n", "* one\n* two\n* three"),
    ("numbered_list", {"n": 2}, "Here:\n1. one\n2. two", "1. one\n3. two"),
    ("numbered_list", {"n": 2}, "1) one\n2) two", "1. one\n2. two\n3. three"),
    ("dash_lines", {}, "- one\n\n- two", "- one\ntwo"),
    ("dash_lines", {}, "-one\n–two", "- only one line"),
    ("starred_paragraphs", {"n": 2}, "First part.\n***\nSecond part.", "First part.\n\nSecond part."),
    ("starred_paragraphs", {"n": 2}, "First part.\n\n ***\n\nSecond.", "First.\n***\nSecond.\n***\nThird."),
    ("starred_paragraphs", {"n": 2}, "A.\n***\nB.", "A and B.\n***\n"),
    ("two_responses", {}, "It is far.\n******\nIt is cold.", "It is far.\n***\nIt is cold."),
    ("two_responses", {}, "It is far.\n******\nIt is cold.", "It is far.\n******\nIt is far."),
    ("postscript", {}, "It is far.\n\nP.S. It is cold.", "It is far.\n\nPS It is cold."),
    ("postscript", {}, "It is far. p. s. cold", "P.S. It is cold."),
    ("postscript", {}, "Far. P.S. cold", "It is far. P.S."),
    ("json_object", JSON_PARAMS, '{"topic": "moon", "summary": "far"}', '{"topic": "moon"}'),
    (
        "json_object",
        JSON_PARAMS,
        '```json\n{"topic": "moon", "summary": ["far"]}\n```',
        '{"topic": "moon", "summary": ""}',
    ),
    ("json_object", JSON_PARAMS, '{"topic": 1, "summary": 2, "x": 3}', 'Here: {"topic": "moon", "summary": "far"}'),
    ("json_object", JSON_PARAMS, '{"topic": 1, "summary": 2}', '[{"topic": 1, "summary": 2}]'),
    ("json_object", JSON_PARAMS, '{"topic": 1, "summary": 2}', "[" * 100_000),
    ("exclamations", {"n": 2}, "Far! Cold!", "Far! Cold."),
    ("parentheses", {"n": 2}, "The moon (far) is cold (very).", "The moon (far) is cold ()."),
    ("max_sentences", {"n": 2}, "It is far. It is cold.", "It is far. It is cold. It is dark."),
    ("sections", {"n": 2}, "Section 1\nFar.\n\n## Section 2: cold\nCold.", "Section 1\nFar.\nSection 3\nCold."),
    ("sections", {"n": 2}, "**Section 1** a\n**Section 2** b", "In section 1 and section 2"),
]


@pytest.mark.parametrize(("kind", "params", "good", "bad"), CASES)
def test_check(kind: str, params: dict[str, Any], good: str, bad: str) -> None:
    check = BY_NAME[kind].check
    assert check(good, **params) == 1.0
    assert 0.0 <= check(bad, **params) < 1.0


def test_every_kind_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(BY_NAME)


@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize(
    "text", ["", " \n", "word", "*", "{", '"', "\x00 \u202e", "?!" * 50, "a," * 500, "\n-\n- \n***\n"]
)
def test_values_stay_in_range_on_odd_text(kind: str, text: str) -> None:
    params = next(params for name, params, _, _ in CASES if name == kind)
    assert 0.0 <= BY_NAME[kind].check(text, **params) <= 1.0


@pytest.mark.parametrize(
    ("kind", "params", "texts"),
    [
        ("numbers", {"n": 4}, ["none", "7", "7 8", "7 8 9", "7 8 9 10"]),
        ("max_words", {"n": 10}, ["w " * 20, "w " * 15, "w " * 11, "w " * 10]),
        ("exact_sentences", {"n": 4}, ["A b.", "A. B.", "A. B. C.", "A. B. C. D."]),
        ("no_commas", {}, ["a, b, c, d " * 5, "one two three four " * 20 + ",", "one two"]),
        ("uppercase", {}, ["all small", "ALL small", "ALL CAPITALS"]),
    ],
)
def test_partial_credit_grows_towards_the_goal(kind: str, params: dict[str, Any], texts: list[str]) -> None:
    values = [BY_NAME[kind].check(text, **params) for text in texts]
    assert values == sorted(values)
    assert values[0] < values[-2] < values[-1] == 1.0


def test_words_and_sentences() -> None:
    assert words("Don't stop: well-known 3.5 été_x") == ["Don't", "stop", "well-known", "3", "5", "été", "x"]
    assert num_sentences("1. First one.\n2. Second one!") == 2
    assert num_sentences("Really?! Yes... (He left.) No end") == 4
    assert num_sentences("") == 0
