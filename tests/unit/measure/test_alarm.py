"""The collapse alarm on synthetic traces: quiet on healthy noise, prompt and in words on each way to collapse."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from leanroll.config import AlarmConfig
from leanroll.measure.alarm import Verdict, Watcher
from leanroll.rundir_metrics import check_record

Change = Callable[[dict[str, float], int], None]


def trace(seed: int, steps: int, change: Change | None = None) -> list[dict[str, Any]]:
    """A run that learns: reward 0.2 → 0.6, entropy 2.4 → 0.8, length 120 → 250, all noisy; change(record, step) spoils it."""
    rng = np.random.default_rng(seed)
    records = []
    for step in range(1, steps + 1):
        done = step / 500
        kl = 0.007 * (1 + done) * math.exp(0.3 * rng.normal())
        record = {
            "completion_length/mean": 120 * (250 / 120) ** done * math.exp(0.12 * rng.normal()),
            "entropy": 2.4 / 3**done * math.exp(0.08 * rng.normal()),
            "reward/mean": 0.2 + 0.4 * done + 0.06 * rng.normal(),
            "sampler_kl": kl,
            "mismatch/rise": 0.003 + 0.004 * rng.normal(),
        }
        if step % 5 == 1:
            record["alpha/p05"] = 0.9 - 0.02 * done + 0.02 * rng.normal()
        if change is not None:
            change(record, step)
        records.append({"step": step, **record})
    return records


def alarms(records: list[dict[str, Any]], **options: Any) -> list[tuple[int, Verdict]]:
    return [(step, verdict) for step, verdict in Watcher(AlarmConfig(**options)).replay(records) if verdict.raised]


def scaled(start: int, **factors: float) -> Change:
    """From a step on, metrics times a factor that is reached over ten steps; underscores stand for slashes, rise for the KL's."""
    names = {"length": "completion_length/mean", "reward": "reward/mean", "tail": "alpha/p05", "entropy": "entropy"}

    def change(record: dict[str, float], step: int) -> None:
        share = min(max(step - start, 0) / 10, 1.0)
        for key, factor in factors.items():
            if key == "rise":
                record["mismatch/rise"] += factor * share
            elif names[key] in record:
                record[names[key]] *= factor**share if factor else 1.0 - share

    return change


@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_run_is_quiet(seed: int) -> None:
    assert alarms(trace(seed, 500)) == []


@pytest.mark.parametrize(
    ("change", "signals"),
    [
        ({"length": 0.35, "rise": 0.03}, {"length", "kl_growth"}),
        ({"length": 0.33, "tail": 0.8}, {"length", "tail"}),
        ({"entropy": 0.1}, {"entropy"}),
        ({"entropy": 8.0}, {"entropy"}),
        ({"reward": 0.0}, {"reward"}),
        ({"length": 0.1}, {"length"}),
        ({"rise": 0.2}, {"kl_growth"}),
        ({"tail": 0.5}, {"tail"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "+".join(sorted(value)),
)
def test_each_way_to_collapse_is_found(change: dict[str, float], signals: set[str]) -> None:
    """Ten steps to fall, and at most eleven more: patience, and measurements of acceptance every five steps."""
    for seed in range(3):
        found = alarms(trace(seed, 230, scaled(200, **change)))
        assert found, seed
        step, verdict = found[0]
        assert 203 <= step <= 221, (seed, step)
        assert {sign.signal for sign in verdict.signs} == signals
        assert 190 <= verdict.last_calm <= step - 5
        assert check_record({"step": step, **verdict.metrics()})["alarm/raised"] == 1


def test_the_alarm_speaks_in_numbers() -> None:
    """Constant values, so that every number is known."""

    def record(step: int) -> dict[str, Any]:
        gone = step > 30
        return {
            "step": step,
            "completion_length/mean": 40.0 if gone else 120.0,
            "mismatch/rise": 0.05 if gone else 0.01,
            "sampler_kl": 0.01,
        }

    verdicts = Watcher(AlarmConfig()).replay(record(step) for step in range(1, 80))
    (step, verdict), *more = [(s, v) for s, v in verdicts if v.raised]
    assert (step, more) == (35, []), "after five steps, and once"
    assert verdict.last_calm == 30
    assert verdict.text() == (
        "mean completion length fell from 120 to 40 (allowed: a factor 2) since step 31; rise of the sampler's KL from the first "
        "positions to the last rose from 0.01 to 0.05 (allowed: 2 times its usual mean more) since step 31"
    )
    assert verdict.sizes == pytest.approx({"length": math.log(3) / math.log(2), "kl_growth": 2.0})
    assert [v.alarm for s, v in verdicts if s >= 35][:20] == [True] * 20, "it lasts"
    assert not verdicts[-1][1].alarm, "what lasts longer than the window is the new normal"


def test_one_sign_is_not_enough_unless_it_is_hard() -> None:
    half = trace(0, 230, scaled(200, length=0.33))
    assert alarms(half) == []
    signs = [v.signs for _, v in Watcher(AlarmConfig()).replay(half)]
    assert any(s.signal == "length" for found in signs for s in found)
    assert alarms(half, hard=1.1) != []


def test_a_sign_must_last() -> None:
    def spike(record: dict[str, float], step: int) -> None:
        if 100 <= step < 104:
            record["reward/mean"] = 0.0
            record["entropy"] *= 0.1

    assert alarms(trace(0, 150, spike)) == []
    assert [step for step, _ in alarms(trace(0, 150, spike), patience=4)] == [103]


def test_one_measurement_of_acceptance_is_chance() -> None:
    def once(record: dict[str, float], step: int) -> None:
        if step == 101:
            record["alpha/p05"] = 0.3

    assert alarms(trace(0, 130, once)) == []


def test_noise_is_not_a_sign() -> None:
    """A reward that is mostly noise halves by chance."""
    rng = np.random.default_rng(3)
    records = [{"step": step, "reward/mean": float(0.1 + 0.4 * rng.normal())} for step in range(1, 1001)]
    assert alarms(records) == []
    assert alarms(records, num_mads=0.0, patience=2) != []


def test_a_reward_around_zero_has_no_share_to_lose() -> None:
    rng = np.random.default_rng(5)
    records = [{"step": step, "reward/mean": float(0.02 * rng.normal())} for step in range(1, 501)]
    assert alarms(records) == []
    for record in records[300:]:
        record["reward/mean"] -= 0.5
    assert [300 <= step <= 306 for step, _ in alarms(records)] == [True]


def test_a_slow_collapse_needs_the_start_as_reference() -> None:
    def slow(record: dict[str, float], step: int) -> None:
        record["entropy"] *= 0.99**step

    records = trace(0, 400, slow)
    assert alarms(records) == []
    found = alarms(records, reference="start")
    assert found
    assert {sign.signal for sign in found[0][1].signs} == {"entropy"}


def test_nothing_is_judged_before_the_window() -> None:
    records = [{"step": step, "reward/mean": 1.0 if step < 10 else 0.0} for step in range(1, 25)]
    verdicts = Watcher(AlarmConfig()).replay(records)
    assert all(v.sizes == {} and not v.alarm for _, v in verdicts)
    assert Watcher(AlarmConfig()).replay([*records, {"step": 25, "reward/mean": 0.0}])[-1][1].sizes.keys() == {"reward"}


def test_what_is_no_longer_measured_is_not_judged() -> None:
    records: list[dict[str, Any]] = [{"step": step, "entropy": 1.0 if step < 40 else 0.01} for step in range(1, 50)]
    records += [{"step": step} for step in range(50, 90)]
    verdicts = dict(Watcher(AlarmConfig()).replay(records))
    assert verdicts[49].alarm
    assert verdicts[80].sizes == {}
    assert not verdicts[80].alarm


def test_a_watcher_that_reads_the_records_again_goes_on_the_same() -> None:
    """Through JSON, as metrics.jsonl stores them; cut at every step around the alarm."""
    records = trace(1, 225, scaled(200, length=0.35, rise=0.05))
    straight = dict(Watcher(AlarmConfig()).replay(records))
    for cut in (1, 150, 202, 207, 224):
        resumed = Watcher(AlarmConfig())
        resumed.replay([{"step": 0}, *(json.loads(json.dumps(r)) for r in records[:cut])])
        for record in records[cut:]:
            assert resumed.observe(record) == straight[record["step"]]


def test_signals_can_be_left_out() -> None:
    records = trace(0, 230, scaled(200, entropy=0.1))
    assert alarms(records, entropy_factor=0.0) == []
    names = {name for _, v in Watcher(AlarmConfig(reward_drop=0.0)).replay(records) for name in v.sizes}
    assert names == {"length", "kl_growth", "tail", "entropy"}
