"""Budget schedules: presets, lookup by length, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanroll.errors import ConfigError
from leanroll.rollout.schedule import UNLIMITED, BudgetSchedule, preset_names

OURS = [name for name in preset_names() if name.startswith("smollm2-135m-")]
PUBLISHED = [name for name in preset_names() if name != "dense" and name not in OURS]


def test_twenty_published_presets() -> None:
    assert len(PUBLISHED) == 20
    assert preset_names()[0] == "dense"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_preset(name: str) -> None:
    schedule = BudgetSchedule.load(name)
    assert (schedule.name, schedule.page_size, schedule.bin_pages) == (name, 16, 125)
    assert (schedule.first_pages, schedule.last_pages, schedule.dense_layers) == (1, 2, (0, 1))
    assert (schedule.scorer, schedule.quantile) == ("mean", 0.05)
    assert len(schedule.pages) == 20
    assert schedule.target == pytest.approx(float(name.rpartition("-")[2]))
    assert not schedule.is_dense
    assert "model" in schedule.provenance


def test_presets_that_calibrate_made() -> None:
    assert "smollm2-135m-0.86" in OURS
    for name in OURS:
        schedule = BudgetSchedule.load(name)
        assert schedule.name == name
        assert schedule.target == pytest.approx(float(name.rpartition("-")[2]))
        provenance = schedule.provenance
        assert (provenance["made_by"], provenance["model"], provenance["complete"]) == (
            "leanroll calibrate",
            "smollm2-135m",
            True,
        )
        assert provenance["max_tokens"] == 8192
        assert schedule.pages[-1] == UNLIMITED  # nothing is known beyond
        assert min(provenance["tail_per_bin"]) >= schedule.target


def test_budget_changes_at_1985_not_2000() -> None:
    # 1984 tokens are 124 pages, bin 0; 1985 are 125 pages, bin 1: the release's lookup, which presets reproduce.
    schedule = BudgetSchedule.load("qwen3-1.7b-0.86")
    assert schedule.pages[:2] == (32, 64)
    assert schedule.budget(1984) == 32
    assert schedule.budget(1985) == 64
    assert schedule.budget(2000) == 64
    assert schedule.budget(1) == 32
    assert schedule.budget(10**7) == schedule.pages[-1]


@given(st.integers(1, 100_000), st.sampled_from(PUBLISHED))
def test_budget_follows_the_formula_and_arrays_agree(length: int, name: str) -> None:
    schedule = BudgetSchedule.load(name)
    expected = schedule.pages[min(((length + 15) // 16) // 125, 19)]
    assert schedule.budget(length) == expected
    budgets = schedule.budgets(np.array([[length, 1]]))
    assert budgets.dtype == np.int32
    assert budgets.tolist() == [[expected, schedule.pages[0]]]


@given(st.integers(1, 50_000), st.integers(1, 50_000))
def test_budget_never_decreases(a: int, b: int) -> None:
    schedule = BudgetSchedule.load("qwen3-8b-0.86")
    assert schedule.budget(min(a, b)) <= schedule.budget(max(a, b))


def test_dense() -> None:
    schedule = BudgetSchedule.load("dense")
    assert schedule.is_dense
    assert schedule.budget(10**6) == UNLIMITED
    assert BudgetSchedule.dense(32).page_size == 32


def test_sparse_layers() -> None:
    schedule = BudgetSchedule(name="mine", pages=(4,), dense_layers=(0, 3))
    assert schedule.sparse_layers((0, 0, 8, 0, 0)) == (1, 4)
    with pytest.raises(ConfigError, match=r"layers \[3\] dense; the model has layers 0 to 2"):
        schedule.sparse_layers((0, 0, 0))
    with pytest.raises(ConfigError, match="leaves no layer of the model sparse"):
        schedule.sparse_layers((0, 8, 8, 0))
    assert BudgetSchedule.dense().sparse_layers((8, 8)) == ()


def test_file_round_trip(tmp_path: Path) -> None:
    schedule = BudgetSchedule(
        name="mine", page_size=32, pages=(4, 8), bin_pages=16, scorer="softmax", target=0.9, quantile=0.05
    )
    path = tmp_path / "mine.json"
    path.write_text(schedule.to_json())
    assert BudgetSchedule.load(path) == schedule


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pages": [16, 8]}, "must not decrease"),
        ({"pages": [2]}, "fewer than the 3 reserved"),
        ({"pages": []}, "at least one budget"),
        ({"page_size": 24}, "power of two"),
        ({"page_size": 4}, "power of two"),
        ({"page_size": 256}, "power of two"),
        ({"last_pages": 0}, "last_pages >= 1"),
        ({"first_pages": -1}, "first_pages >= 0"),
        ({"bin_pages": 0}, "at least 1"),
        ({"page": [8]}, "unknown keys"),
        ({"pages": "many"}, "list of integers"),
        ({"pages": [8.5]}, "list of integers"),
        ({"page_size": "16"}, "integers"),
        ({"page_size": True}, "integers"),
        ({"bin_pages": 2.5}, "integers"),
        ({"first_pages": 1.5}, "integers"),
        ({"dense_layers": [0, -1]}, "count from 0"),
        ({"pages": [8, 2**31]}, "stands for all"),
        ({"scorer": 3}, "text"),
        ({"target": "high"}, "from 0 to 1"),
        ({"provenance": []}, "object"),
    ],
)
def test_bad_schedule(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"pages": [8, 16], **values}))
    with pytest.raises(ConfigError, match=message):
        BudgetSchedule.load(path)


def test_not_an_object(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="JSON object"):
        BudgetSchedule.load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        BudgetSchedule.load(path)


def test_unknown_name_lists_presets() -> None:
    with pytest.raises(ConfigError, match=r"neither a file nor a preset.*qwen3-4b-0\.86"):
        BudgetSchedule.load("qwen3-4b-0.87")
