from __future__ import annotations

import sys
from fractions import Fraction

import pytest

from leanroll.errors import ConfigError
from leanroll.tasks.answers import (
    exact_reward,
    math_verify_reward,
    numeric_answer,
    numeric_reward,
    require_math_verify,
    stated_answer,
    vote_key,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("<answer> 7 </answer> <ANSWER>8</ANSWER>", "8"),
        ("steps\n#### 72\n", "72"),
        ("The answer is **42**.", "42"),
        ("**Answer:** Paris.", "Paris"),
        ("The answer is .5", ".5"),
        ("**Answer**: 42", "42"),
        ("Answer: The answer is 42.", "42"),
        ("The answer is 4. No, the answer is 5.", "5"),
        ("Answer:\n7", None),
        (r"cut off \boxed{12", None),
        ("no mark", None),
    ],
)
def test_stated_answer(text: str, answer: str | None) -> None:
    assert stated_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 1,234.", 1234),
        ("-0.5", Fraction(-1, 2)),
        ("−3", -3),
        ("3/4 of a cup", Fraction(3, 4)),
        (r"\boxed{-\frac{1}{2}}", Fraction(-1, 2)),
        ("12%", Fraction(12, 100)),
        ("about $5.00", 5),
        ("1e3", 1000),
        ("10-5", 5),
        ("5, then 6", 6),
        ("first 5; the answer is 7 of 9", 9),
        ("#### 72 then 80\nbut 3", 80),
        ("The answer is 18. She sells the 9 others.", 18),
        ("The answer is clear. It is 7.", 7),
        ("4/0", None),
        ("1e999", None),
        ("x2 v1.2.3", None),
        ("9" * 100, None),
        ("", None),
    ],
)
def test_numeric_answer(text: str, number: Fraction | int | None) -> None:
    assert numeric_answer(text) == number


def test_exact() -> None:
    texts = ["Paris", " the answer is  Paris. ", "paris", "In Paris"]
    assert exact_reward(completions=texts, answer=["Paris"] * 4) == [1, 1, 0, 0]
    assert exact_reward(completions=["3"], answer=[3]) == [1]


def test_numeric() -> None:
    texts = ["It is 0.5", "1/2", "50%", "0.51", "none"]
    assert numeric_reward(completions=texts, answer=["#### 0.5"] * 5) == [1, 1, 1, 0, 0]
    assert numeric_reward(completions=["0"], answer=[0]) == [1]
    with pytest.raises(ValueError, match="no number"):
        numeric_reward(completions=["1"], answer=["one"])


def test_math_verify() -> None:
    pytest.importorskip("math_verify")
    texts = [r"thus \boxed{0.5}", r"$\frac{2}{4}$", r"\boxed{3}", "no idea"]
    assert math_verify_reward(completions=texts, answer=[r"\frac{1}{2}"] * 4) == [1, 1, 0, 0]
    assert math_verify_reward(completions=[r"\boxed{1+x}"], answer=["x+1"]) == [1]


def test_math_verify_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"leanroll\[tasks\]"):
        require_math_verify()


def test_vote_keys() -> None:
    assert vote_key("the answer is 1/2", "numeric") == vote_key("0.50", "numeric")
    assert vote_key("The answer is A B.", "exact") == vote_key("A  B", "exact")
    assert vote_key(r"\boxed{x + 1}", "math_verify") == "x+1"
    assert vote_key("x + 1", "math_verify") is None
    assert vote_key("x", "none") is None
    assert vote_key("", "exact") is None
