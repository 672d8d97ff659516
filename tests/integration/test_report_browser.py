"""The pages of `leanroll report` in a real browser, on a phone and on a desk: every plot is there, nothing sticks out."""

from __future__ import annotations

from pathlib import Path

import pytest

from leanroll.cli.main import main
from tests.browser import DESKTOP, PHONE, find_browser, open_page
from tests.report_folders import (
    CALIBRATION_PLOTS,
    DISTILL_PLOTS,
    PROFILE_PLOTS,
    RUN_PLOTS,
    RUN_PROFILE_PLOTS,
    write_calibration,
    write_distillation,
    write_profile,
    write_run,
    write_run_profile,
)  # fmt: skip

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    find_browser()
    folder = tmp_path_factory.mktemp("pages")
    folders = {
        "run": write_run(folder / "run").path,
        "distillation": write_distillation(folder / "distillation").path,
        "calibration": write_calibration(folder / "calibration"),
        "profile": write_profile(folder / "profile"),
        "run profile": write_run_profile(folder / "run profile"),
    }
    for path in folders.values():
        assert main(["report", str(path)]) == 0
    return {kind: path / ("profile.html" if "profile" in kind else "report.html") for kind, path in folders.items()}


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize(
    ("kind", "titles"),
    [
        ("run", RUN_PLOTS),
        ("distillation", DISTILL_PLOTS),
        ("calibration", CALIBRATION_PLOTS),
        ("profile", PROFILE_PLOTS),
        ("run profile", RUN_PROFILE_PLOTS),
    ],
)
def test_page_is_whole(pages: dict[str, Path], tmp_path: Path, kind: str, titles: list[str], width: int) -> None:
    opened = open_page(pages[kind], width, tmp_path)
    assert opened.titles == titles
    for image in opened.images:
        assert image["drawn"], image
        # Text of 8 points is 8/72 of an inch; a plot of 4.4 inches on less than 280 pixels would shrink it below 7.
        assert 280 <= image["shown"] <= width, image
    assert opened.screen_width == width
    assert opened.page_width == width, "the page scrolls sideways"
    assert opened.stopped == [], "the page asks for what is not in the file"
    with Image.open(opened.screenshot) as picture:
        assert picture.width == width
        assert len(picture.convert("RGB").getcolors(2**24)) > 100, "a blank page"


def test_the_browser_sees_what_is_wrong(tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    page = tmp_path / "bad.html"
    blank = "R0lGODlhAQABAIAAAP///wAAACH5BAAAAAAALAAAAAABAAEAAAICRAEAOw=="
    page.write_text(
        '<!doctype html><html><meta charset="utf-8"><link rel="stylesheet" href="http://127.0.0.1:9/style.css"><body>'
        f'<img alt="lost" src="http://127.0.0.1:9/x.png"><img alt="broken" src="data:image/png;base64,AAAA">'
        f'<img alt="blank" src="data:image/gif;base64,{blank}"><div style="width:700px">wide</div></body></html>'
    )
    opened = open_page(page, PHONE, tmp_path)
    assert [(image["title"], image["drawn"]) for image in opened.images] == [
        ("lost", False), ("broken", False), ("blank", False),
    ]  # fmt: skip
    assert opened.page_width > opened.screen_width == PHONE
    assert sorted(opened.stopped) == ["http://127.0.0.1:9/style.css", "http://127.0.0.1:9/x.png"]
