"""The report: one self-contained page from a run directory."""

import re
from pathlib import Path

import pytest

from leanroll.cli.main import main
from leanroll.config import RLConfig, to_toml
from leanroll.errors import ResumeError
from leanroll.report import write_report
from leanroll.rundir import RunDir

pytest.importorskip("matplotlib")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(
        tmp_path / "run", config_toml=to_toml(RLConfig(name="demo")), environment={"versions": {"torch": "x"}}
    )
    for step in range(3):
        record = {
            "step": step,
            "reward/mean": 0.1 * step,
            "alpha/p05": 0.9,
            "alpha/bin_0/p05": 0.9,
            "alpha/bin_512/p05": 0.8,
        }
        run.append_metrics(record)
        table = {"title": {"mean_reward": 0.1 * step, "num_prompts": 3}}
        run.write_eval(step, {"mean_reward": 0.1 * step, "tables": {"kind": table}})
    run.write_rollouts(2, [{"prompt": "<b>p</b>", "text": "answer & more", "reward": 1.0}])
    return run


def test_page_is_self_contained(run: RunDir, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    write_report(run, output)
    page = output.read_text()
    assert "data:image/png;base64," in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "&lt;b&gt;p&lt;/b&gt;" in page
    assert "<b>p</b>" not in page
    assert "from 512" in page
    assert "5th percentile over tokens" in page
    assert "title" in page


def test_command(run: RunDir) -> None:
    assert main(["report", str(run.path)]) == 0
    assert (run.path / "report.html").is_file()


def test_run_without_metrics(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", config_toml="", environment={})
    with pytest.raises(ResumeError, match="no metrics yet"):
        write_report(run, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
