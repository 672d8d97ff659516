"""The report: one self-contained page from a run directory."""

import re
import sys
from pathlib import Path

import pytest

from leanroll.cli.main import main
from leanroll.config import AlarmConfig, RLConfig, to_toml
from leanroll.errors import MissingExtra, ResumeError
from leanroll.measure.alarm import Watcher
from leanroll.report import write_report
from leanroll.report.mismatch import acceptance_table
from leanroll.report.plots import length_bins
from leanroll.report.positions import bin_starts
from leanroll.rundir import RunDir
from tests.report_folders import RUN_PLOTS, write_run

pytest.importorskip("matplotlib")


def plots(page: str) -> list[str]:
    return re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,\w', page)


def test_page_is_self_contained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_report(run, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert plots(page) == RUN_PLOTS
    assert not re.search(r'(src|href)="(?!data:)|url\(|@import', page)
    assert "&lt;b&gt;p&lt;/b&gt;" in page
    assert "<b>p</b>" not in page
    assert "5th percentile over tokens" in page
    assert "mismatch/pos_&lt;start&gt;/kl" in page, "families of metrics are explained once"
    assert "mismatch/pos_128/kl" not in page


def test_run_without_most_metrics(tmp_path: Path) -> None:
    """A dense run of an earlier version, after one step."""
    run = RunDir.create(tmp_path / "run", config_toml=to_toml(RLConfig(name="demo")), environment={})
    run.append_metrics({"step": 0, "eval/reward/mean": 0.1, "time/load_s": 1.0})
    write_report(run, tmp_path / "before.html")
    assert plots((tmp_path / "before.html").read_text()) == ["Reward"]
    run.append_metrics({"step": 1, "reward/mean": 0.1, "reward/exact": 0.1, "time/rollout_s": 1.0, "time/step_s": 1.0})
    assert main(["report", str(run.path)]) == 0
    assert plots((run.path / "report.html").read_text()) == ["Reward", "Time per phase"]


def test_alarms_are_told_in_words(tmp_path: Path) -> None:
    """Two alarms, since the entropy comes back between them."""
    recipe = RLConfig(name="demo", alarm=AlarmConfig(window=5, patience=2))
    run = RunDir.create(tmp_path / "run", config_toml=to_toml(recipe), environment={})
    watcher = Watcher(recipe.alarm)
    for step in range(1, 40):
        record = {"step": step, "entropy": 0.1 if step in (10, 11, 12, 30, 31) else 1.5}
        verdict = watcher.observe(record)
        run.append_metrics(record | verdict.metrics())
        if verdict.raised:
            run.write_alarm(step, verdict.to_json())
    write_report(run, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert plots(page) == ["Signs of collapse", "Entropy"]
    reason = r"<td>entropy fell from 1\.5 to 0\.1 \(allowed: a factor 2\) since step"
    found = re.findall(rf'<td class="n">(\d+)</td>{reason} (\d+)</td><td class="n">(\d+)</td>', page)
    assert found == [("11", "10", "9"), ("31", "30", "29")]


def test_bins_are_in_order_of_length() -> None:
    record = {"step": 3}
    for start, tokens in ((1024, 7), (0, 500), (512, 90)):
        record |= {f"alpha/bin_{start}/p05": 0.9, f"alpha/bin_{start}/tokens": tokens}
    assert bin_starts([record], "alpha/bin_") == [0, 512, 1024]
    text = acceptance_table([record, {"step": 4}])
    assert "step 3" in text
    assert re.findall(r"from \d+", text) == ["from 0", "from 512", "from 1024"]
    assert re.findall(r">(\d+)<", text) == ["500", "90", "7"]


def test_bins_of_length_are_labelled_and_coloured_in_order() -> None:
    bins = length_bins(list(range(0, 800, 100)))
    assert [start for start, _, _ in bins] == list(range(0, 800, 100))
    assert [label for _, label, _ in bins] == [
        "from 0 tokens", "_", "from 200 tokens", "_", "from 400 tokens", "_", "from 600 tokens", "from 700 tokens",
    ]  # fmt: skip
    brightness = [sum(colour[:3]) for _, _, colour in bins]
    assert brightness == sorted(brightness), "from dark to light"
    assert length_bins([]) == []


def test_run_without_metrics(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", config_toml="", environment={})
    with pytest.raises(ResumeError, match="no metrics yet"):
        write_report(run, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", steps=1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install 'leanroll\[report\]'"):
        write_report(run, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
