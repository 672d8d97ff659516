"""Categories of tokens and their KL (D9), against hand-made texts and naive sums."""

from __future__ import annotations

import random

import numpy as np
import pytest

from leanroll.errors import ConfigError, UserError
from leanroll.measure.categories import (
    CATEGORIES,
    category_kl,
    category_ratios,
    character_categories,
    token_categories,
)
from leanroll.measure.token_text import TokenText
from tests.tiny import tiny_tokenizer

LETTERS = {name: letter for name, letter in zip(CATEGORIES, "!LNOPSc", strict=True)}


def letters(text: str) -> str:
    return "".join("." if code < 0 else LETTERS[CATEGORIES[code]] for code in character_categories(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So x = 3.5 m.", "PP.c.O.NNN.cS"),
        ("I did so, then.", "c.ccc.ccS.PPPPS"),
        ("Wait, let me", "PPPPS.PPP.PP"),
        ("waiting", "ccccccc"),
        ("isn't well-known and/or", "ccccc.cccccccccc.cccccc"),
        ("2 - 3*4/a", "N.O.NONOc"),
        ("is -5, top-5", "cc.ONS.cccSN"),
        ("dash - item", "cccc.S.cccc"),
        ("1,000 is 50%", "NNNNN.cc.NNN"),
        ("1. a\n- b\n# c\n| d |", "SS.cSS.cSS.cSS.c.S"),
        ("**bold** 2**3", "SSccccSS.NOON"),
        ("`x` (y)", "ScS.ScS"),
        (r"$x^2$ for $5 and $6", "LcLNL.ccc.SN.ccc.SN"),
        (r"\frac{1}{2} {3}", "LLLLLLNLLNL.SNS"),
        (r"\boxed{a_1 + 2}", "LLLLLLLcLN.O.NL"),
        ("\\[a\n= b\\]", "LLcSO.cLL"),
        (r"\text{never closed _ ", "LLLLLSccccc.cccccc.S."),
        ("a ≤ b → c", "c.O.c.O.c"),
        ("", ""),
    ],
)
def test_characters(text: str, expected: str) -> None:
    assert letters(text) == expected


def test_tokens_of_a_byte_tokenizer() -> None:
    """Halves of a character count where the whole does, and the stop token has a category of its own."""
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer.encode("x ≤ 12\n", add_special_tokens=False), 2]
    codes = token_categories(ids, lambda part: tokenizer.decode(part, skip_special_tokens=True), {0, 1, 2})
    names = [CATEGORIES[code] for code in codes]
    assert names == [
        "continuation", "structural", "operator", "operator", "operator", "structural", "number", "number", "structural", "stop",
    ]  # fmt: skip


def test_a_token_counts_where_most_of_it_lies() -> None:
    pieces = ["So", " what", ").\n", " x=", "=12", "x)", " "]
    codes = token_categories(range(len(pieces)), lambda ids: "".join(pieces[i] for i in ids), ())
    assert [CATEGORIES[code] for code in codes] == [
        "planning", "continuation", "structural", "operator", "number", "structural", "structural",
    ]  # fmt: skip


class TestTokenText:
    @staticmethod
    def decode(ids: list[int] | tuple[int, ...]) -> str:
        """Bytes, ids from 256 on special."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def test_worked_example(self) -> None:
        found = TokenText.of([*"a€".encode(), 256], self.decode)
        assert found == TokenText("a€", ((0, 1), (1, 2), (1, 2), (1, 2), (2, 2)))

    def test_broken_characters(self) -> None:
        assert TokenText.of(b"\xffa", self.decode).spans == ((0, 1), (1, 2))
        assert TokenText.of(b"a\xe2\x82", self.decode).spans == ((0, 1), (1, 2), (1, 2))

    def test_any_bytes(self) -> None:
        """The text is that of one decode; every character belongs to a token and the spans ascend."""
        rng = random.Random(0)
        for _ in range(300):
            ids = [rng.choice([*b"A \xe2\x82\xac\xf0\x9f\x98\x80\xff\xc3\xa9", 300]) for _ in range(rng.randint(1, 40))]
            found = TokenText.of(ids, self.decode)
            assert found.text == self.decode(ids)
            assert len(found.spans) == len(ids)
            assert {i for start, stop in found.spans for i in range(start, stop)} == set(range(len(found.text)))
            starts = [start for start, _ in found.spans]
            assert starts == sorted(starts)

    def test_whole_characters_have_their_own_place(self) -> None:
        text = "naïve – 文字 🙂 x"
        ids = list(text.encode())
        owners = [i for i, c in enumerate(text) for _ in c.encode()]
        assert TokenText.of(ids, self.decode).spans == tuple((i, i + 1) for i in owners)

    def test_a_decoder_that_drops_the_first_space(self) -> None:
        pieces = [" one", " two", "-", " three"] * 5
        found = TokenText.of(range(len(pieces)), lambda ids: "".join(pieces[i] for i in ids).lstrip(" "))
        assert found.text == "".join(pieces).lstrip(" ")
        joined = [found.text[start:stop] for start, stop in found.spans]
        assert joined == ["one", *pieces[1:]]


@pytest.fixture
def scored() -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, size=12)
    codes = [rng.choice([1, 2, 4, 5, 6], size=n) for n in lengths]
    before = [rng.exponential(size=n) for n in lengths]
    return codes, before, [kl * (0.5 + 0.1 * c) for kl, c in zip(before, codes, strict=True)]


def test_table_is_the_naive_one(scored: tuple[list[np.ndarray], ...]) -> None:
    codes, kl, _ = scored
    found = category_kl(codes, kl, bin_tokens=7, num_resamples=50)
    assert [row.category for row in found.rows] == list(CATEGORIES)
    tokens = [(c, t, x) for cs, xs in zip(codes, kl, strict=True) for t, (c, x) in enumerate(zip(cs, xs, strict=True))]
    total = sum(x for _, _, x in tokens)
    for code, row in enumerate(found.rows):
        mine = [(t, x) for c, t, x in tokens if c == code]
        assert row.num_tokens == len(mine)
        assert row.num_trajectories == sum(code in cs for cs in codes)
        assert row.kl_share == pytest.approx(sum(x for _, x in mine) / total)
        if not mine:
            assert row.mean is None
            continue
        assert row.mean is not None
        assert row.mean.value == pytest.approx(np.mean([x for _, x in mine]))
        assert row.mean.low <= row.mean.value <= row.mean.high
        for number, start in enumerate(found.starts):
            inside = [x for t, x in mine if start <= t < start + 7]
            assert row.bin_tokens[number] == len(inside)
            assert row.bin_share[number] == pytest.approx(sum(inside) / total)
            if inside:
                assert row.bin_mean[number] == pytest.approx(np.mean(inside))
            else:
                assert np.isnan(row.bin_mean[number])
    assert sum(row.token_share for row in found.rows) == pytest.approx(1.0)
    assert sum(row.kl_share or 0.0 for row in found.rows) == pytest.approx(1.0)


def test_intervals_resample_trajectories() -> None:
    """Two trajectories of one category: only three draws differ, and their means bound the interval."""
    codes = [np.full(2, 6), np.full(4, 6)]
    found = category_kl(codes, [np.ones(2), np.full(4, 2.0)], bin_tokens=4, level=0.99).rows[6].mean
    assert found is not None
    assert (found.low, found.value, found.high) == (1.0, pytest.approx(10 / 6), 2.0)
    alone = category_kl([np.array([6]), np.array([2])], [np.ones(1)] * 2, bin_tokens=4).rows[6].mean
    assert alone is not None
    assert np.isnan(alone.low)


def test_ratios(scored: tuple[list[np.ndarray], ...]) -> None:
    codes, before, after = scored
    ratios = category_ratios(codes, before, after)
    for code, name in enumerate(CATEGORIES):
        ratio = ratios[name]
        if code in (0, 3):
            assert ratio is None
        else:
            assert ratio is not None
            assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(0.5 + 0.1 * code),) * 3


@pytest.mark.parametrize(
    ("codes", "kl", "options", "error", "says"),
    [
        ([[7]], [[1.0]], {}, UserError, "from 7 to 7; expected integers from 0 to 6"),
        ([[-1]], [[1.0]], {}, UserError, "from -1 to -1"),
        ([[0.5]], [[1.0]], {}, UserError, "float64 values"),
        ([[1, 1]], [[1.0]], {}, UserError, "Trajectory 0 has 1 tokens in reverse_kl and 2 in categories"),
        ([], [], {}, UserError, "no trajectories"),
        ([[1]], [[np.nan]], {}, UserError, "not finite"),
        ([[1]], [[1.0]], {"bin_tokens": 0}, ConfigError, "bin_tokens=0"),
    ],
)
def test_bad_input(codes: list, kl: list, options: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        category_kl([np.array(c) for c in codes], [np.array(k) for k in kl], **{"bin_tokens": 4, **options})
