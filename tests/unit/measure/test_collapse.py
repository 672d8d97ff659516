"""Signs of collapse: fast against brute force, boxes against a character-by-character reader, alarms one at a time."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanroll.errors import ConfigError, UserError
from leanroll.measure.collapse import (
    Alarm,
    BoxedStats,
    CollapseLimits,
    CollapseReport,
    LengthStats,
    boxed,
    compare,
    distinct_n,
    first_boxed,
    last_boxed,
    periodic_tail,
    repeated_blocks,
)
from leanroll.types import Rollout

few = st.lists(st.integers(0, 2), max_size=40)


def completion(ids, reason="stop", text=""):
    return Rollout(0, 0, tuple(ids), (-1.0,) * len(ids), reason, text=text)


def brute_tail(ids, max_period, min_repeats):
    """Tries every block as it is written in the definition."""
    for period in range(1, max_period + 1):
        block = ids[-period:]
        if len(ids) >= period * min_repeats and ids[-period * min_repeats :] == block * min_repeats:
            return period
    return 0


@given(
    few, st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(0, 5), st.integers(1, 12), st.integers(2, 4)
)
def test_periodic_tail_is_the_brute_one(head, block, repeats, max_period, min_repeats):
    for ids in (head, head + block * repeats, head + block * repeats + head[:1]):
        assert periodic_tail(ids, max_period, min_repeats) == brute_tail(ids, max_period, min_repeats)


def test_periodic_tail_by_hand():
    block = list(range(60))
    assert periodic_tail([5, 1, 2, 1, 2, 1, 2]) == 2
    assert periodic_tail([7, *block * 3]) == 60
    assert periodic_tail(block * 3 + block[:7]) == 60, "cut inside the block: rotated, it repeats still"
    assert periodic_tail((block * 3)[1:]) == 0, "one token short of three repeats"
    assert periodic_tail([*block, 60] * 3) == 0, "a period of 61 is none"
    assert periodic_tail([4, 4, 4]) == 1
    assert periodic_tail([4, 4, 4, 9]) == 0, "stopped by itself"
    assert periodic_tail([]) == periodic_tail([1, 1]) == 0
    assert periodic_tail(np.array([3, 8, 8, 8])) == 1


def brute_blocks(ids, n):
    covered = set()
    for i in range(len(ids) - n + 1):
        if any(ids[j : j + n] == ids[i : i + n] for j in range(i)):
            covered |= set(range(i, i + n))
    return len(covered) / len(ids) if ids else 0.0


@given(few, st.integers(1, 6))
def test_repeated_blocks_are_the_brute_ones(ids, n):
    assert repeated_blocks(ids, n) == brute_blocks(ids, n)


def test_repeated_blocks_by_hand():
    rng = np.random.default_rng(0)
    fresh = rng.permutation(10_000).tolist()
    assert repeated_blocks(fresh) == 0.0
    assert repeated_blocks(fresh[:100] + fresh[20:70] + fresh[200:250]) == 0.25, "50 of 200 tokens were copied"
    assert repeated_blocks([1] * 16) == 0.0
    assert repeated_blocks([1] * 64) == 63 / 64


@given(few, st.integers(1, 4))
def test_distinct_n_counts_n_grams(ids, n):
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    assert distinct_n(ids, n) == (len(set(grams)) / len(grams) if grams else None)


def test_long_completions_are_no_problem():
    # Quadratic in any of these would take hours.
    ids = [1, 2, 3] * 100_000
    assert periodic_tail(ids) == 3
    assert repeated_blocks(ids) == pytest.approx(1.0, abs=1e-5)
    assert distinct_n(ids, 2) == 3 / (len(ids) - 1)
    assert boxed("\\boxed{" * 200_000) == ()
    assert boxed("\\" * 200_001 + "boxed{4}") == ("4",)
    assert len(boxed("\\boxed{4}" * 200_000)) == 200_000
    assert boxed("\\boxed{" * 200_000 + "}" * 200_000)[0].startswith("\\boxed{\\boxed{")


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"so \boxed{4}.", ("4",)),
        (r"\boxed{\frac{1}{2}} or \boxed{0.5}", (r"\frac{1}{2}", "0.5")),
        (r"\boxed{\{1, 2\}}", (r"\{1, 2\}",)),
        (r"\boxed{\left\{ x \right.} and {y}", (r"\left\{ x \right.",)),
        (r"\boxed{a \\} }", (r"a \\",)),
        (r"\boxed {4}", ("4",)),
        (r"'\\boxed{4}'", ("4",)),
        (r"\boxed{\boxed{4}} \boxed{5}", (r"\boxed{4}", "5")),
        (r"\boxed{4} and then \boxed{5", ("4",)),
        (r"\boxed{oops, \boxed{4}", ("4",)),
        (r"} \boxed{}", ("",)),
        (r"\fbox{4} boxed{5} \boxed 6", ()),
        ("", ()),
    ],
)
def test_boxes(text, contents):
    assert boxed(text) == contents
    assert first_boxed(text) == (contents[0] if contents else None)
    assert last_boxed(text) == (contents[-1] if contents else None)


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "x", " "]), max_size=25).map("".join))
def test_boxes_are_those_of_a_reader(text):
    # Balanced scans from every box, an outer one hiding those inside.
    spans, position = [], 0
    while (start := text.find("\\boxed{", position)) >= 0:
        begin, depth = start + len("\\boxed{"), 1
        for end in range(begin, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                spans.append(text[begin:end])
                position = end
                break
        else:
            position = begin
    assert boxed(text) == tuple(spans)


def test_report_by_hand():
    rollouts = [
        completion([1, 2, 3, 4], text=r"\boxed{1}"),
        completion([7, 8, 7, 8, 7, 8, 7, 8], "length", text=r"\boxed{1} \boxed{1} \boxed{1}"),
        completion([1, 1], text="no"),
        completion([9], text="no"),
    ]
    eos = [np.full(len(r.token_ids), p) for r, p in zip(rollouts, (0.1, 0.0, 0.4, 0.8), strict=True)]
    report = CollapseReport.of(rollouts, 8, eos_probs=eos)
    assert (report.num_completions, report.max_completion_length) == (4, 8)
    assert (report.cap_rate, report.periodic_tail, report.repeated) == (0.25, 0.25, 0.0)
    assert report.distinct_2 == pytest.approx((1.0 + 2 / 7 + 1.0) / 3), "one token has no pair"
    assert report.lengths == LengthStats(*np.quantile([1, 2, 4, 8], [0.1, 0.5, 0.9]).tolist(), 3.75)
    assert report.eos_prob == pytest.approx((4 * 0.1 + 2 * 0.4 + 0.8) / 15), "per token, not per completion"
    assert report.boxed == BoxedStats(share_many=0.25, mean_count=1.0)

    plain = CollapseReport.of([completion([9], text="no"), completion([1] * 40, "length")], 40)
    assert (plain.eos_prob, plain.boxed) == (None, None)
    assert plain.repeated == pytest.approx(39 / 40 / 2)
    assert CollapseReport.of([completion([9])], 40).distinct_2 is None


HEALTHY = CollapseReport(
    num_completions=100,
    max_completion_length=512,
    cap_rate=0.02,
    periodic_tail=0.01,
    repeated=0.05,
    distinct_2=0.9,
    lengths=LengthStats(50.0, 120.0, 300.0, 140.0),
    eos_prob=0.008,
    boxed=BoxedStats(0.1, 1.1),
)


def lengths(p50):
    return LengthStats(1.0, p50, 512.0, p50)


@pytest.mark.parametrize(
    ("change", "within", "reason"),
    [
        ({"cap_rate": 0.41}, {"cap_rate": 0.22}, "cap rate rose from 0.02 to 0.41; allowed 0.2 more"),
        (
            {"periodic_tail": 0.5},
            {"periodic_tail": 0.11},
            "share of completions that end in a loop rose from 0.01 to 0.50; allowed 0.1 more",
        ),
        (
            {"repeated": 0.3},
            {"repeated": 0.25},
            "share of tokens in repeated blocks rose from 0.05 to 0.30; allowed 0.2 more",
        ),
        ({"distinct_2": 0.5}, {"distinct_2": 0.7}, "distinct-2 fell from 0.90 to 0.50; allowed 0.2 less"),
        ({"eos_prob": 0.0}, {"eos_prob": 0.002}, "mean P(EOS) fell from 0.008 to 0; allowed 0.002 or more"),
        (
            {"lengths": lengths(500.0)},
            {"lengths": lengths(360.0)},
            "median length rose from 120 to 500; allowed 360 or less",
        ),
        ({"lengths": lengths(5.0)}, {"lengths": lengths(40.0)}, "median length fell from 120 to 5; allowed 40 or more"),
        (
            {"boxed": BoxedStats(0.8, 9.0)},
            {"boxed": BoxedStats(0.4, 9.0)},
            r"share of completions with two \boxed or more rose from 0.10 to 0.80; allowed 0.3 more",
        ),
    ],
)
def test_each_alarm_alone_and_its_limit(change, within, reason):
    (alarm,) = compare(HEALTHY, dataclasses.replace(HEALTHY, **change))
    assert isinstance(alarm, Alarm)
    assert alarm.reason == reason
    assert reason.startswith(alarm.statistic)
    assert alarm.before != alarm.now
    assert compare(HEALTHY, dataclasses.replace(HEALTHY, **within)) == [], "just allowed"
    off = CollapseLimits(**{f.name: None for f in dataclasses.fields(CollapseLimits)})
    assert compare(HEALTHY, dataclasses.replace(HEALTHY, **change), off) == []


def test_improvement_is_no_alarm():
    better = dataclasses.replace(
        HEALTHY, cap_rate=0.0, periodic_tail=0.0, repeated=0.0, distinct_2=1.0, eos_prob=0.5, boxed=None
    )
    assert compare(HEALTHY, better) == []
    assert compare(HEALTHY, HEALTHY, CollapseLimits(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)) == []


def test_what_is_not_available_is_not_compared():
    bare = dataclasses.replace(HEALTHY, eos_prob=None, distinct_2=None, boxed=None)
    strict = CollapseLimits(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    assert compare(HEALTHY, bare, strict) == []
    (alarm,) = compare(bare, HEALTHY, strict)
    assert (alarm.before, alarm.now) == (0.0, 0.1), r"no \boxed at all is a share of 0"


def test_several_alarms_at_once():
    rng = np.random.default_rng(0)
    healthy = CollapseReport.of([completion(rng.permutation(500)[:n].tolist()) for n in rng.integers(40, 90, 20)], 400)
    looping = CollapseReport.of([completion([*rng.permutation(500)[:20].tolist(), *[3, 4] * 190], "length")] * 20, 400)
    assert [a.statistic for a in compare(healthy, looping)] == [
        "cap rate",
        "share of completions that end in a loop",
        "share of tokens in repeated blocks",
        "distinct-2",
        "median length",
    ]
    assert compare(healthy, healthy) == []


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: periodic_tail([1], 0), ConfigError, "max_period=0"),
        (lambda: periodic_tail([1], 5, 1), ConfigError, "min_repeats=1"),
        (lambda: repeated_blocks([1], 0), ConfigError, "block_tokens is 0"),
        (lambda: distinct_n([1], 0), ConfigError, "n is 0"),
        (lambda: CollapseReport.of([], 5), UserError, "no completions"),
        (lambda: CollapseReport.of([completion([])], 5), UserError, "0 to 0 tokens"),
        (lambda: CollapseReport.of([completion([1] * 6)], 5), UserError, "6 to 6 tokens; expected 1 to .*=5"),
        (lambda: CollapseReport.of([completion([1])], 5, eos_probs=[np.zeros(2)]), UserError, "one value per token"),
        (lambda: CollapseReport.of([completion([1])], 5, eos_probs=[]), UserError, "one value per token"),
        (lambda: CollapseReport.of([completion([1])], 5, eos_probs=[np.array([-2.0])]), UserError, "not log-probs"),
        (lambda: CollapseLimits(cap_rate=-0.1), ConfigError, "cap_rate is -0.1"),
        (lambda: CollapseLimits(length_factor=0.5), ConfigError, "length_factor is 0.5; expected 1 or more"),
        (
            lambda: compare(HEALTHY, dataclasses.replace(HEALTHY, max_completion_length=9)),
            UserError,
            "512 .* 9; expected one",
        ),
    ],
)
def test_bad_input_says_what_is_wrong(call, error, says):
    with pytest.raises(error, match=says):
        call()
