"""The table of signs of collapse on the page of a run's profile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from leanroll.report import profile_run
from leanroll.rundir import PROFILE
from tests.report_folders import RUN_PROFILE_PLOTS, write_run_profile


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page is drawn from; plots are their titles."""
    monkeypatch.setattr(profile_run, "plot", lambda title, *_, **__: f"<h3>{title}</h3>")
    data: dict[str, Any] = json.loads((write_run_profile(tmp_path / "profile") / PROFILE).read_text())
    return data


def rows(page: str) -> dict[str, list[str]]:
    lines = (re.findall(r"<td[^>]*>(.*?)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", page))
    return {cells[0]: cells[1:] for cells in lines if cells}


def test_stops_and_boxes(found: dict[str, Any]) -> None:
    page = "".join(profile_run.run_parts(found))
    table = rows(page)
    assert table["P(EOS) per token"] == ["0.0111", "0.0143", "0.01"]
    assert table["P(EOS) per token, base completions"] == ["0.011", "0.014", "4e-05"]
    assert table[r"first \boxed right, share"] == ["n/a", "0.520", "n/a"]
    assert table[r"last \boxed right, share"] == ["n/a", "0.480", "n/a"]
    assert table[r"any \boxed right, share"] == ["n/a", "0.530", "n/a"]
    assert "at temperature 0.7 and before top-k" in page
    assert re.findall(r"<h3>(.*?)</h3>", page) == RUN_PROFILE_PLOTS


def test_a_profile_of_an_older_version(found: dict[str, Any]) -> None:
    del found["stops"]
    for made in found["completions"].values():
        del made["boxed_accuracy"]
        made["report"]["eos_prob"] = None
    page = "".join(profile_run.run_parts(found))
    for label in ("P(EOS) per token", "P(EOS) per token, base completions", r"first \boxed right, share"):
        assert rows(page)[label] == ["n/a"] * 3
    assert "temperature" not in page
    assert [t for t in RUN_PROFILE_PLOTS if not t.startswith("P(EOS)")] == re.findall(r"<h3>(.*?)</h3>", page)
