"""Speed-ups of fitted schedules: one definition for both numbers, what is left out and why, and what is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leanroll.calibrate import rollout_speed
from leanroll.calibrate.cost import step_cost
from leanroll.calibrate.devices import Device
from leanroll.calibrate.probe import shape_of
from leanroll.calibrate.rollout_speed import MARGIN, NUM_STEPS, RolloutSpeed, SpeedMeter, timed_lengths
from leanroll.calibrate.speed import pool_gib, typical_length
from leanroll.errors import RolloutError
from leanroll.models import Policy
from leanroll.rollout.schedule import UNLIMITED, BudgetSchedule
from tests.tiny import tiny_policy

SCHEDULE = BudgetSchedule("fitted", 8, dense_layers=(0,), bin_pages=8, pages=(4, 5, 6, UNLIMITED), scorer="softmax")
LENGTHS = (12, 34, 94, 158, 184)
DEVICE = Device("slow", 1e8, 1e10)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy("llama")


@pytest.fixture(scope="module", autouse=True)
def probed() -> Iterator[list[str]]:
    """The device is given instead of measured; an entry for each time it was asked for. One round is enough here."""
    asked: list[str] = []

    def given(_policy: Policy, _schedule: BudgetSchedule, name: str, **_: Any) -> tuple[Device, str]:
        asked.append(name)
        return DEVICE, "a slow one"

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rollout_speed, "prediction_device", given)
        patched.setattr(rollout_speed, "ROUNDS", 1)
        yield asked


@pytest.fixture
def probes(probed: list[str]) -> list[str]:
    """Those of one test."""
    probed.clear()
    return probed


def meter(policy: Policy, folder: Path, **changed: Any) -> SpeedMeter:
    options = {"kernel": "reference", "kv_dtype": policy.dtype, "kv_memory_gib": 0.1, "batch_size": 2, "folder": folder}
    return SpeedMeter(policy, **options | changed)


def test_both_are_sums_over_the_same_steps_and_are_kept(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probes: list[str]
) -> None:
    folder = tmp_path / "speed"
    found = meter(policy, folder).measure(SCHEDULE)
    assert (found.batch, found.lengths, found.prompt_length, found.max_length) == (2, LENGTHS, 12, 184)
    assert [row["length"] for row in found.rows] == list(LENGTHS)
    assert found.reason is None
    assert (found.prediction, probes) == ("a slow one", ["auto"])
    assert found.measured is not None
    assert found.measured_low is not None
    assert found.measured_high is not None
    assert 0 < found.measured_low <= found.measured <= found.measured_high < math.inf
    dense, sparse = (
        sum(float(step_cost(shape_of(policy), s, [n, n]).step_seconds(DEVICE)) for n in range(13, 185))
        for s in (BudgetSchedule.dense(8), SCHEDULE)
    )
    assert found.predicted == pytest.approx(dense / sparse)
    assert found.predicted > 1.1

    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["measured"] == found.measured
    for name in ("measure_speed", "decode_seconds"):
        monkeypatch.setattr(rollout_speed, name, lambda *_, **__: pytest.fail("timed again"))
    # Also when there is no time left, and under another name; but not for another batch.
    again = meter(policy, folder, deadline=0.0).measure(replace(SCHEDULE, name="other", target=0.9))
    assert again == found
    assert len(probes) == 1
    other = meter(policy, folder, deadline=0.0, batch_size=1).measure(SCHEDULE)
    assert (other.batch, other.measured) == (1, None)


def test_measured_is_the_sum_of_what_was_timed(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that follows the budget: 1 ms per page read. Lines inside the bins are summed exactly from the bins' middles.
    def timed(_policy: Policy, schedule: BudgetSchedule, *, context: int, num_steps: int, **_: Any) -> list[float]:
        length = typical_length(context, num_steps)
        return [1e-3 * min(schedule.budget(length), length / 8)] * num_steps

    monkeypatch.setattr("leanroll.calibrate.bench.decode_seconds", timed)
    monkeypatch.setattr("leanroll.calibrate.bench.check_decoding", lambda *_, **__: None)
    found = meter(policy, tmp_path).measure(SCHEDULE)
    lengths = range(13, 185)
    exact = sum(n / 8 for n in lengths) / sum(min(SCHEDULE.budget(n), n / 8) for n in lengths)
    assert found.measured == pytest.approx(exact, rel=0.03)


def test_lengths_lie_inside_the_bins() -> None:
    assert timed_lengths(SCHEDULE) == LENGTHS
    middles = [typical_length(n, NUM_STEPS) for n in LENGTHS[1:-1]]
    assert [SCHEDULE.budget(n) for n in middles] == [4, 5, 6], "one in each bin"
    assert SCHEDULE.budget(LENGTHS[-1]) == 6, "no step is in the open bin"
    many = replace(SCHEDULE, pages=(*range(4, 36), UNLIMITED))
    lengths = timed_lengths(many)
    assert len(lengths) == 6
    assert list(lengths) == sorted(lengths)
    assert many.budget(lengths[-1]) == 35


def test_time_budget(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probes: list[str]) -> None:
    now = [100.0]
    monkeypatch.setattr(rollout_speed, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pilots: list[int] = []

    def pilot(*_: Any, context: int, **__: Any) -> list[float]:
        pilots.append(context)
        now[0] += 1.0 + context / 100
        return []

    monkeypatch.setattr(rollout_speed, "decode_seconds", pilot)
    monkeypatch.setattr(rollout_speed, "measure_speed", lambda *_, **__: pytest.fail("timed"))
    # Not even the device is measured.
    none = meter(policy, tmp_path, deadline=101.0).measure(SCHEDULE)
    assert (none.predicted, none.measured, none.reason) == (None, None, "time budget: about 30 s needed, 1 s left")
    assert (probes, pilots) == ([], [])
    # Both run lengths follow the same line, so the estimate is exact.
    needed = MARGIN * 2 * sum(1.0 + n / 100 for n in LENGTHS)
    spent = sum(1.0 + n / 100 for n in (12, 33))
    monkeypatch.setattr(rollout_speed, "SETUP_SECONDS", 2.0)
    some = meter(policy, tmp_path, deadline=now[0] + spent + needed - 1).measure(SCHEDULE)
    assert some.measured is None
    assert some.reason == f"time budget: about {needed:.0f} s needed, {needed - 1:.0f} s left"
    assert some.predicted is not None
    assert pilots == [12, 33]
    assert not list(tmp_path.iterdir()), "a later run with more time may measure it"
    with pytest.raises(pytest.fail.Exception, match="timed"):
        meter(policy, tmp_path, deadline=now[0] + spent + needed + 1).measure(SCHEDULE)


def test_the_batch_is_what_memory_holds(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_speed, "check_work", lambda *_, batch, **__: pytest.fail(f"batch {batch}"))
    one = pool_gib(policy, SCHEDULE, 1, LENGTHS[-1])
    for wanted, expected in ((2, 2), (8, 3), (0, 3)):
        with pytest.raises(pytest.fail.Exception, match=f"batch {expected}"):
            meter(policy, tmp_path, batch_size=wanted, kv_memory_gib=3.5 * one).measure(SCHEDULE)
    none = meter(policy, tmp_path, kv_memory_gib=0.5 * one).measure(SCHEDULE)
    assert none.batch == 0
    assert "one sequence of 184 tokens needs" in str(none.reason)


def test_what_goes_wrong_is_said(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = replace(SCHEDULE, pages=(8, 16, 24, UNLIMITED))
    found = meter(policy, tmp_path).measure(everything)
    assert (found.predicted, found.measured) == (None, None)
    assert "nothing to compare" in str(found.reason)

    def wrong(*_: Any, **__: Any) -> None:
        raise RolloutError("decoding is not right")

    monkeypatch.setattr("leanroll.calibrate.bench.check_decoding", wrong)
    found = meter(policy, tmp_path).measure(SCHEDULE)
    assert (found.measured, found.reason) == (None, "decoding is not right")
    assert found.predicted is not None
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(rollout_speed, "prediction_device", lambda *_, **__: (None, "no such thing"))
    found = meter(policy, tmp_path).measure(SCHEDULE)
    assert (found.predicted, found.prediction) == (None, "no such thing")


def test_json_and_back(tmp_path: Path) -> None:
    speed = RolloutSpeed(batch=2, lengths=(12, 184), measured=1.5, rows=({"length": 12},))
    (tmp_path / "x.json").write_text(json.dumps(speed.as_dict()))
    assert RolloutSpeed.read(tmp_path / "x.json") == speed
