"""Position curves, the choice of N, decay, cascade and commitment: against loops, exact enumerations and published numbers."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leanroll.errors import ConfigError, UserError
from leanroll.measure.commitment import TokenScores, commitment
from leanroll.measure.positions import PositionCurves, cascade, choose_num_tokens, decay_threshold, own_cascade

lengths_of = st.lists(st.integers(1, 14), min_size=1, max_size=6)
seeds = st.integers(0, 10_000)


def trajectories(lengths, seed):
    rng = np.random.default_rng(seed)
    return [rng.exponential(size=n).astype(np.float32) for n in lengths]


def stopped(kl):
    return ["stop"] * len(kl)


def draws_of(num, num_resamples, seed):
    """The same draws as the library's, as index lists."""
    counts = np.random.Generator(np.random.Philox(seed)).multinomial(num, np.full(num, 1 / num), size=num_resamples)
    return [np.repeat(np.arange(num), c) for c in counts]


@given(lengths_of, st.integers(1, 6), seeds)
def test_curves_are_the_naive_ones(lengths, width, seed):
    kl, entropy = trajectories(lengths, seed), trajectories(lengths, seed + 1)
    curves = PositionCurves.of(kl, entropy, bin_tokens=width, num_resamples=50, level=0.8, seed=seed)
    assert curves.starts.tolist() == list(range(0, max(lengths), width))
    assert curves.teacher_entropy is None
    for b, start in enumerate(curves.starts):
        inside = [i for i, n in enumerate(lengths) if n > start]
        assert curves.num_trajectories[b] == len(inside)
        assert curves.num_tokens[b] == sum(len(kl[i][start : start + width]) for i in inside)
        for curve, values in ((curves.reverse_kl, kl), (curves.student_entropy, entropy)):
            mean = np.concatenate([x[start : start + width] for x in values]).mean(dtype=np.float64)
            assert curve.mean[b] == pytest.approx(mean)
            resampled = [
                np.concatenate([values[i][start : start + width] for i in draw]).astype(np.float64)
                for draw in draws_of(len(lengths), 50, seed)
            ]
            means = [x.mean() for x in resampled if len(x)]
            if len(inside) < 2:
                assert np.isnan([curve.low[b], curve.high[b]]).all()
            else:
                low, high = np.quantile(means, [0.1, 0.9])
                assert (curve.low[b], curve.high[b]) == (pytest.approx(low), pytest.approx(high))


def test_many_positions_are_resampled_in_blocks():
    kl = trajectories([1300, 700, 1100], 0)
    curve = PositionCurves.of(kl, num_resamples=40, level=0.9).reverse_kl
    for t in (0, 511, 512, 1023, 1024, 1099):
        means = [np.mean([kl[i][t] for i in d if len(kl[i]) > t] or np.nan) for d in draws_of(3, 40, 0)]
        assert (curve.low[t], curve.high[t]) == pytest.approx(np.nanquantile(means, [0.05, 0.95]), rel=1e-5)
    assert np.isnan(curve.low[1100:]).all()


def test_trajectories_are_resampled_and_not_tokens():
    kl = [np.zeros(1000), np.ones(1000)]
    curve = PositionCurves.of(kl, bin_tokens=1000).reverse_kl
    # A quarter of the draws is one of them twice. Resampled tokens would give 0.5 ± 0.03.
    assert (curve.mean[0], curve.low[0], curve.high[0]) == (0.5, 0.0, 1.0)


def test_draws_are_seeded():
    kl = trajectories([30, 20, 25, 7] * 4, 0)
    a, b, c = (PositionCurves.of(kl, num_resamples=100, seed=s).reverse_kl for s in (3, 3, 4))
    np.testing.assert_array_equal(a.low, b.low)
    np.testing.assert_array_equal(a.high, b.high)
    assert (a.low != c.low).any()
    choices = [choose_num_tokens(kl, stopped(kl), num_resamples=100, seed=s) for s in (3, 3)]
    assert choices[0] == choices[1]
    ratios = [
        cascade(kl, [x * y for x, y in zip(kl, kl, strict=True)], 5, 10, seed=s).untrained_ratio for s in (3, 3, 4)
    ]
    assert ratios[0] == ratios[1] != ratios[2]


def test_interval_covers_the_known_mean_as_often_as_it_says():
    rng, covered = np.random.default_rng(0), 0
    for trial in range(300):
        # Trajectories differ in level (mean 1), so that tokens of one are far from independent.
        kl = [rng.gamma(4.0, 0.25) + 0.1 * rng.normal(size=20) for _ in range(40)]
        curve = PositionCurves.of(kl, bin_tokens=20, level=0.9, num_resamples=200, seed=trial).reverse_kl
        covered += bool(curve.low[0] <= 1.0 <= curve.high[0])
    assert 0.83 < covered / 300 < 0.95, covered / 300


@given(lengths_of, st.sampled_from([0.1, 0.45, 0.5, 0.9, 1.0]), seeds)
def test_n_is_the_first_that_holds_the_share(lengths, share, seed):
    kl = trajectories(lengths, seed)
    choice = choose_num_tokens(kl, stopped(kl), share=share, num_resamples=30, seed=seed, level=0.8)

    def naive(chosen):
        total = sum(float(x.sum(dtype=np.float64)) for x in chosen)
        for n in range(1, max(lengths) + 1):
            held = 0.0
            for t in range(n):
                reached = [float(x[t]) for x in chosen if len(x) > t]
                held += len(reached) * np.mean(reached) if reached else 0.0  # n_t K_t
            if held >= share * total * (1 - 1e-9):
                return n
        raise AssertionError

    assert choice.num_tokens == naive(kl)
    if len(lengths) < 2:
        assert (choice.low, choice.high) == (None, None)
    else:
        drawn = [naive([kl[i] for i in d]) for d in draws_of(len(kl), 30, seed)]
        expected = np.quantile(drawn, [0.1, 0.9], method="inverted_cdf")
        assert [choice.low, choice.high] == expected.tolist()


def test_interval_of_n_spans_what_single_trajectories_say():
    early, late = np.repeat([1.0, 0.0], [10, 90]), np.repeat([0.0, 1.0], [90, 10])
    choice = choose_num_tokens([early, late], stopped([early, late]), share=0.5)
    assert (choice.num_tokens, choice.low, choice.high) == (10, 5, 95)
    same = choose_num_tokens([early] * 5, stopped([early] * 5), share=0.5)
    assert (same.num_tokens, same.low, same.high) == (5, 5, 5)


def test_rounding_costs_no_token():
    kl = [np.full(20, 0.1)]  # the sum of twenty is a little above 2, in floating point
    chosen = [choose_num_tokens(kl, ["stop"], share=k / 20, num_resamples=1).num_tokens for k in range(1, 21)]
    assert chosen == list(range(1, 21))


def test_draws_without_kl_have_no_n():
    kl = [np.zeros(4), np.array([0.0, 0.0, 0.0, 1.0])]
    choice = choose_num_tokens(kl, stopped(kl))
    assert (choice.low, choice.high) == (4, 4)


@given(st.integers(20, 300), st.floats(0.01, 0.2))
def test_knee_of_an_exponential_is_where_its_slope_is_the_chords(length, rate):
    kl = [np.exp(-rate * np.arange(length))]
    knee = choose_num_tokens(kl, ["stop"], num_resamples=1).knee
    analytic = np.log(rate * length / (1 - np.exp(-rate * length))) / rate
    assert abs(knee - analytic) <= 1.0


def test_knee_is_the_point_furthest_from_the_chord():
    kl = np.random.default_rng(0).exponential(size=60) * np.linspace(2, 0.2, 60)
    curve = np.concatenate([[0.0], np.cumsum(kl)])
    chord = np.array([60.0, curve[-1]])
    points = np.stack([np.arange(61.0), curve], axis=1) / chord  # both axes normalised, perpendicular to (1, 1)
    distance = (points[:, 1] - points[:, 0]) / np.sqrt(2)
    assert choose_num_tokens([kl], ["stop"], num_resamples=1).knee == distance.argmax() > 1
    for flat in (np.ones(50), np.full(7, 0.1), np.linspace(0.1, 1, 50)):
        assert choose_num_tokens([flat], ["stop"], num_resamples=1).knee is None


def test_warnings_each_for_its_own_reason():
    clean = [np.exp(-np.arange(400) / 50.0)] * 4

    def warnings(kl, reasons=None):
        return choose_num_tokens(kl, reasons or stopped(kl), num_resamples=10).warnings

    assert warnings(clean) == ()

    mismatch = [x.copy() for x in clean]
    for x in mismatch:
        x[0] = 31.8
    (said,) = warnings(mismatch)
    assert "Position 0 holds 39.1% of the total KL (31.8 nats" in said
    assert "an even spread gives 0.2%" in said
    # Without position 0 the sum begins at e^(-1/50): the first 45 % are held after 1 + 30 tokens.
    assert "without it N would be 31" in said

    (said,) = warnings(clean, ["stop", "length", "stop", "stop"])
    assert said.startswith("1 of 4 trajectories (25.0%) were cut at the cap")

    (said,) = warnings([np.ones(400)] * 4)
    assert said.startswith("N = 180 is 45% of the median length 400")
    assert warnings([np.repeat([1.0, 0.0], [80, 100])] * 2) == (), "36 of 180, below a quarter"
    assert len(warnings([np.repeat([1.0, 0.0], [104, 74])] * 2)) == 1, "47 of 178, above it"
    (said,) = warnings([np.repeat([1.0, 0.0], [100, n]) for n in (20, 50, 900)])
    assert said.startswith("N = 45 is 30% of the median length 150"), "neither of the mean nor of the longest"


def test_choice_reports_what_n_depends_on():
    kl = [np.array([1.0, 3.0, 1.0]), np.array([1.0]), np.array([2.0, 2.0])]
    choice = choose_num_tokens(kl, ["length", "stop", "length"], share=0.5)
    assert (choice.num_tokens, choice.median_length, choice.num_capped, choice.num_trajectories) == (2, 2.0, 2, 3)
    assert choice.first_share == pytest.approx(0.4)
    assert (choice.share, choice.level) == (0.5, 0.95)


def test_decay_threshold_on_the_published_curve():
    ks, accuracies, gap = (0, 100, 200, 300), (65.30, 62.70, 56.3, 51.75), 65.30 - 50.95
    found = [decay_threshold(ks, accuracies, gap, delta) for delta in (0.0, 0.1, 0.2, 0.65, 1.0)]
    assert found == [0, 0, 100, 200, 300]
    assert decay_threshold((0, 5, 9), (0.5, 0.3, 0.45), 0.5, 0.2) == 9, "the largest k, whatever lies between"
    assert decay_threshold((0, 5, 9), (0.5, 0.4, np.nan), 0.5, 0.2) == 5, "on the edge; not measured"


def test_decay_threshold_on_the_same_prompts():
    # Rollouts longer than 50 tokens belong to harder prompts: the teacher alone has 0.4 there, so nothing decayed.
    assert decay_threshold((0, 50), (0.8, 0.4), 0.3, 0.1) == 0
    assert decay_threshold((0, 50), (0.8, 0.4), 0.3, 0.1, at_zero=(0.8, 0.4)) == 50
    assert decay_threshold((0, 50), (0.8, 0.37), (0.3, 0.2), 0.1, at_zero=(0.8, 0.4)) == 0
    assert decay_threshold((0, 50), (0.8, 0.37), (0.3, 0.4), 0.1, at_zero=(0.8, 0.4)) == 50


@given(lengths_of, st.integers(1, 6), st.integers(0, 16), seeds)
def test_cascade_is_the_naive_one(lengths, width, trained, seed):
    before, after = trajectories(lengths, seed), trajectories(lengths, seed + 1)
    found = cascade(before, after, width, trained, num_resamples=40, level=0.8, seed=seed)
    assert found.starts[0] == 0
    assert found.stops[-1] == max(lengths)
    assert (found.starts[1:] == found.stops[:-1]).all()
    assert set(found.starts) == set(range(0, max(lengths), width)) | ({trained} if trained < max(lengths) else set())
    for b, (start, stop) in enumerate(zip(found.starts, found.stops, strict=True)):
        x, y = (np.concatenate([v[start:stop] for v in side]).astype(np.float64) for side in (before, after))
        assert found.num_tokens[b] == len(x)
        assert found.num_trajectories[b] == sum(n > start for n in lengths)
        assert (found.before[b], found.after[b]) == (pytest.approx(x.mean()), pytest.approx(y.mean()))
        assert found.ratio[b] == pytest.approx(y.mean() / x.mean())
        assert found.trained[b] == (start < trained) == (stop <= trained)
    for estimate, part in ((found.trained_ratio, slice(0, trained)), (found.untrained_ratio, slice(trained, None))):
        num = sum(len(x[part]) > 0 for x in before)
        if not num:
            assert estimate is None
            continue
        sums = np.array([[x[part].sum(dtype=np.float64) for x in side] for side in (after, before)])
        assert estimate.value == pytest.approx(sums[0].sum() / sums[1].sum())
        if num < 2:
            assert np.isnan([estimate.low, estimate.high]).all()
        else:
            pairs = [sums[:, d].sum(axis=1) for d in draws_of(len(lengths), 40, seed)]
            ratios = [a / b for a, b in pairs if b > 0]
            assert [estimate.low, estimate.high] == pytest.approx(np.quantile(ratios, [0.1, 0.9]).tolist())


def test_cascade_finds_the_ratio_that_was_put_in():
    rng = np.random.default_rng(0)
    # Levels differ a thousandfold between trajectories: an interval that broke the pairs would be as wide as that.
    before = [rng.exponential(size=n) * 10.0 ** rng.uniform(-1.5, 1.5) for n in rng.integers(80, 200, 30)]
    after = [np.concatenate([x[:50] * 0.2, x[50:] * 0.65]) for x in before]
    found = cascade(before, after, 20, 50)
    np.testing.assert_allclose(found.ratio[found.trained], 0.2)
    np.testing.assert_allclose(found.ratio[~found.trained], 0.65)
    for estimate, ratio in ((found.trained_ratio, 0.2), (found.untrained_ratio, 0.65)):
        assert [estimate.value, estimate.low, estimate.high] == pytest.approx([ratio] * 3)
    noisy = [x * rng.uniform(0.5, 1.5, len(x)) for x in after]
    estimate = cascade(before, noisy, 20, 50, level=0.99).untrained_ratio
    assert estimate.low < 0.65 < estimate.high
    assert 0.0 < estimate.high - estimate.low < 0.2


def test_cascade_where_there_was_nothing_to_fall():
    found = cascade([np.zeros(4), np.zeros(4)], [np.zeros(4), np.ones(4)], 2, 2)
    assert np.isnan(found.ratio).all()
    assert np.isnan([found.untrained_ratio.value, found.untrained_ratio.low]).all()


def test_own_cascade_compares_means_per_token():
    """Twice as long and half the KL per token: the sums would say that nothing changed."""
    rng = np.random.default_rng(0)
    before = [rng.uniform(0.5, 1.5, size=20) for _ in range(30)]
    after = [0.5 * np.concatenate([kl, kl]) for kl in before]
    found = own_cascade(before, after, 8, 10)
    inside, outside = found.trained_ratio, found.untrained_ratio
    assert inside.value == pytest.approx(0.5)
    assert inside.low == pytest.approx(0.5), "paired: what the prompts differ in cancels"
    tail = np.concatenate([kl[10:] for kl in after]).mean() / np.concatenate([kl[10:] for kl in before]).mean()
    assert outside.value == pytest.approx(tail)
    assert outside.low < tail < outside.high
    assert list(found.before.starts) == [0, 8, 16]
    assert list(found.after.starts) == [0, 8, 16, 24, 32]
    short = own_cascade(before, [kl[:10] for kl in before], 8, 10)
    assert (short.trained_ratio.value, short.untrained_ratio) == (1.0, None)
    one = own_cascade(ONE, ONE, 8, 1)
    assert one.untrained_ratio.value == 1.0
    assert np.isnan(one.untrained_ratio.low)


def test_commitment_by_hand():
    base = TokenScores(
        kl=np.array([9.0, 8.0, 7.0, 1.0, 0.0, 0.1, 0.2, 0.3]),
        top1=np.array([0.9, 0.7, 0.5, 0.3, 1.0, 1.0, 1.0, 1.0]),
        teacher_rank=np.array([1, 2, 5, 6, 1, 1, 1, 1]),
    )
    trained = TokenScores(kl=base.kl[::-1].copy(), top1=base.top1 / 2, teacher_rank=np.array([1, 1, 1, 1, 7, 3, 6, 1]))
    found = commitment({"base": base, "trained": trained}, top_share=0.375)
    own = found["base"].own
    assert (own.num_positions, own.top1) == (3, pytest.approx(0.7))
    assert (own.rank_1, own.rank_2_to_5, own.rank_above_5) == pytest.approx((1 / 3, 2 / 3, 0.0))
    own = found["trained"].own  # positions 7, 6, 5
    assert (own.top1, own.rank_1, own.rank_2_to_5, own.rank_above_5) == pytest.approx((0.5, 1 / 3, 1 / 3, 1 / 3))
    # Mean KL: 4.65 at positions 0 and 7, 4.1 at 1 and 6, 3.55 at 2 and 5: the first three by value, earlier on ties.
    common = [found[name].common for name in ("base", "trained")]
    assert [c.top1 for c in common] == pytest.approx([(0.9 + 1.0 + 0.7) / 3, (0.9 + 1.0 + 0.7) / 6])
    given_set = np.isin(np.arange(8), [3, 4])
    found = commitment({"base": base, "trained": trained}, common=given_set)
    assert found["base"].common.rank_above_5 == 0.5
    assert found["trained"].common.rank_above_5 == 0.5
    assert found["trained"].common.top1 == pytest.approx(0.325)
    assert found["base"].own.num_positions == 1, "10 % of 8 tokens, at least one"


@settings(max_examples=50)
@given(st.integers(1, 400), st.sampled_from([0.1, 0.07, 1.0]), seeds)
def test_own_positions_are_the_highest(num, share, seed):
    rng = np.random.default_rng(seed)
    kl = rng.permutation(num).astype(np.float64)
    # top1 tells where it was read: its mean over the highest positions is known.
    found = commitment({"m": TokenScores(kl, kl / num, rng.integers(1, 9, num))}, top_share=share)["m"]
    count = next(n for n in itertools.count(1) if n >= share * num - 1e-9)
    assert found.own.num_positions == count
    assert found.own.top1 == pytest.approx(np.arange(num - count, num).mean() / num)
    assert found.own == found.common
    assert found.own.rank_1 + found.own.rank_2_to_5 + found.own.rank_above_5 == pytest.approx(1.0)


ONE = [np.ones(3)]
SCORES = TokenScores(np.ones(2), np.ones(2), np.ones(2, dtype=np.int64))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: PositionCurves.of([]), UserError, "no trajectories"),
        (lambda: PositionCurves.of([np.ones(2), np.ones(0)]), UserError, r"reverse_kl\[1\] has shape \(0,\)"),
        (lambda: PositionCurves.of([np.array([1.0, np.nan])]), UserError, "not finite"),
        (lambda: PositionCurves.of(ONE, [np.ones(2)]), UserError, "3 tokens in reverse_kl and 2 in student_entropy"),
        (lambda: PositionCurves.of(ONE, ONE, ONE * 2), UserError, "1 trajectories and teacher_entropy 2"),
        (lambda: PositionCurves.of(ONE, bin_tokens=0), ConfigError, "bin_tokens=0"),
        (lambda: PositionCurves.of(ONE, level=1.0), ConfigError, "level=1.0"),
        (lambda: choose_num_tokens(ONE, ["stop"], num_resamples=0), ConfigError, "num_resamples=0"),
        (lambda: choose_num_tokens(ONE, ["stop"], share=0.0), ConfigError, "share is 0.0"),
        (lambda: choose_num_tokens(ONE, ["stop"], share=1.1), ConfigError, "share is 1.1"),
        (lambda: choose_num_tokens(ONE, ["stop", "stop"]), UserError, "2 finish reasons for 1"),
        (lambda: choose_num_tokens(ONE, ["eos"]), UserError, "among them .'eos'"),
        (lambda: choose_num_tokens([np.zeros(3)], ["stop"]), UserError, "sums to 0"),
        (lambda: decay_threshold((1, 2), (1, 1), 1, 0.1), ConfigError, "ascend from 0"),
        (lambda: decay_threshold((0, 2, 2), (1, 1, 1), 1, 0.1), ConfigError, "ascend from 0"),
        (lambda: decay_threshold((0, 2), (1, 1, 1), 1, 0.1), UserError, "accuracies has 3 entries for 2"),
        (lambda: decay_threshold((0, 2), (1, 1), 1, 0.1, at_zero=(1,)), UserError, "at_zero has 1 entries for 2"),
        (lambda: decay_threshold((0, 2), (1, 1), -0.1, 0.1), ConfigError, "gap is -0.1"),
        (lambda: decay_threshold((0, 2), (1, 1), 1, 1.5), ConfigError, "delta is 1.5"),
        (lambda: decay_threshold((0, 2), (np.nan, 1), 1, 0.1), UserError, r"A\(0\) is missing"),
        (lambda: cascade(ONE, [np.ones(4)], 2, 2), UserError, "Trajectory 0 has 3 tokens in before and 4 in after"),
        (lambda: cascade(ONE, ONE, 2, -1), ConfigError, "trained is -1"),
        (lambda: own_cascade(ONE, ONE, 2, -1), ConfigError, "trained is -1"),
        (lambda: own_cascade(ONE, [*ONE, *ONE], 2, 1), UserError, "1 trajectories and after 2"),
        (lambda: commitment({}), UserError, "no models"),
        (lambda: commitment({"a": SCORES}, top_share=0.0), ConfigError, "top_share is 0.0"),
        (lambda: commitment({"a": SCORES}, common=np.zeros(2, dtype=bool)), UserError, "with 0 positions"),
        (lambda: commitment({"a": SCORES}, common=np.array([0, 1])), UserError, "common is int64"),
        (lambda: commitment({"a": TokenScores(np.ones(2), np.ones(2), np.zeros(2))}), UserError, "rank below 1"),
        (lambda: commitment({"a": TokenScores(np.ones(2), np.full(2, np.nan), np.ones(2))}), UserError, "not finite"),
        (lambda: commitment({"a": SCORES, "b": TokenScores(*[np.ones(3)] * 3)}), UserError, r"b has .*\(2,\) for all"),
    ],
)
def test_bad_input_says_what_is_wrong(call, error, says):
    with pytest.raises(error, match=says):
        call()
