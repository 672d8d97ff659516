"""The page of a distillation, and what only it draws."""

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from leanroll.cli.main import main
from leanroll.config import DistillConfig, to_toml, validate
from leanroll.report import distill_page, positions, write_report
from leanroll.report.positions import draw_position_map, first_middle_last, thirds
from leanroll.report.tables import phase_table
from leanroll.rundir import RunDir
from tests.report_folders import DISTILL_PLOTS, write_distillation

pytest.importorskip("matplotlib")


def page_of(run: RunDir) -> str:
    write_report(run, run.path / "page.html")
    return (run.path / "page.html").read_text()


def plots(page: str) -> list[str]:
    return re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,\w', page)


def text_of(page: str) -> str:
    """What one reads, pictures and style left out."""
    return html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", "", page, flags=re.DOTALL))


def test_page_is_whole_and_self_contained(tmp_path: Path) -> None:
    run = write_distillation(tmp_path / "run")
    assert main(["report", str(run.path)]) == 0
    page = (run.path / "report.html").read_text()
    assert plots(page) == DISTILL_PLOTS
    assert not re.search(r'(src|href)="(?!data:)|url\(|@import', page)
    assert "<b>p</b>" not in page
    assert "<teacher>" not in page
    text = text_of(page)
    # In quotes it is a value of the recipe: sharding = "none".
    assert not re.search(r'(?<!")\b(nan|inf|None)\b(?!")', text, re.IGNORECASE)
    assert "demo distillation, run" in text
    assert (
        "learns from org/<teacher> with a system prompt of its own, on its own completions of at most 49 to 64 tokens."
        in text
    )
    assert "24 steps." in text
    assert (
        "Held-out reward: step 0: 0.200 [0.120, 0.280]; step 24: 0.400 [0.320, 0.480]; teacher: 0.500 [0.420, 0.580], +0.300 "
        "[+0.200, +0.400] against the student before training."
    ) in text
    assert "mean reward, teacher" in text
    assert "0.375" in text, "the teacher's reward by kind"
    assert "distill/pos_<start>/reverse_kl" in text, "families of metrics are explained once"
    assert "distill/pos_16/reverse_kl" not in text


def test_interrupted_without_evaluation(tmp_path: Path) -> None:
    page = page_of(write_distillation(tmp_path / "run", done=7, evaluated=False))
    held_out = {"Reward", "Rewards by name", "Held-out completion length", "Signs of collapse"}
    assert plots(page) == [t for t in DISTILL_PLOTS if t not in {*held_out, "P(EOS)", "Full-length completions"}]
    text = text_of(page)
    assert "7 of 24 steps done." in text
    assert "No held-out evaluation." in text
    assert re.findall(r"<h2>([^<]*)</h2>", page) == [
        "Divergence of student and teacher", "Tokens", "Updates", "Time and memory", "Completions of step 7", "Recipe",
        "Environment", "Metrics",
    ]  # fmt: skip


def test_stopped_after_the_evaluation_before_training(tmp_path: Path) -> None:
    page = page_of(write_distillation(tmp_path / "run", done=0))
    assert plots(page)[:1] == ["Reward"]
    assert "KL by position" not in plots(page)
    assert "<h2>Updates</h2>" not in page
    assert "step 0: 0.200 [0.120, 0.280]; teacher: 0.500" in text_of(page)


def test_what_never_varies_is_not_drawn(tmp_path: Path) -> None:
    """One vocabulary, all of the KV read, positions in one bin, one step."""
    config = validate(DistillConfig, {"teacher": {"system_prompt": "x"}, "distill": {"bin_tokens": 64}})
    run = RunDir.create(tmp_path / "run", config_toml=to_toml(config), environment={})
    run.append_metrics({
        "step": 1, "distill/reverse_kl": 0.5, "distill/student_dropped": 0.0, "distill/teacher_dropped": 0.0,
        "kv_share_read": 1.0, "distill/pos_0/reverse_kl": 0.5, "distill/pos_0/tokens": 9,
    })  # fmt: skip
    page = page_of(run)
    assert plots(page) == ["KL of student and teacher", "KL by position"]
    assert "learns from its own start with a system prompt of its own. 1 of " in text_of(page)


def test_moves_of_n(tmp_path: Path) -> None:
    config = validate(DistillConfig, {"teacher": {"system_prompt": "x"}})
    run = RunDir.create(tmp_path / "run", config_toml=to_toml(config), environment={})
    common = {"distill/reverse_kl": 0.5, "adapt/head_kl": 0.4, "adapt/probe_head_kl": 0.25, "probe/alarms": 0}
    run.append_metrics({"step": 1, "distill/num_tokens": 8, **common, "adapt/move": 0})
    run.append_metrics({"step": 2, "distill/num_tokens": 8, **common, "adapt/move": 1, "adapt/head_share": 0.375,
                        "adapt/probe_tail_kl": 0.75})  # fmt: skip
    run.append_metrics({"step": 3, "distill/num_tokens": 12, **common, "adapt/move": -1, "probe/alarms": 2})
    page = page_of(run)
    assert {"Tokens per completion, N", "What N is moved by"} <= set(plots(page))
    section = page[page.index("<h2>N over the steps</h2>") :]
    rows = re.findall(r"<tr>(.*?)</tr>", section[: section.index("</table>")])
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in rows][1:]
    assert cells == [
        ["2", "extended", "8", "0.375", "0.250", "0.750", "0"],
        ["3", "shrunk", "12", "", "0.250", "", "2"],
    ]


def test_a_lower_bound_is_named_as_one(tmp_path: Path) -> None:
    config = validate(DistillConfig, {"teacher": {"system_prompt": "x"}, "distill": {"top_k": 4, "bin_tokens": 64}})
    run = RunDir.create(tmp_path / "run", config_toml=to_toml(config), environment={})
    for step in (1, 2):
        run.append_metrics({"step": step, "distill/topk_reverse_kl": 0.5, "distill/student_tail": 0.1,
                            "distill/pos_0/topk_reverse_kl": 0.5, "distill/pos_0/tokens": 9})  # fmt: skip
    page = page_of(run)
    assert plots(page) == ["KL of student and teacher, lower bound", "The bucket for the rest", "KL by position"]
    assert "a lower bound at the start" in text_of(page)


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ({"model": "a/b"}, "a/b"),
        ({"model": "a/b", "adapter": "runs/x"}, "a/b with the adapter runs/x"),
        ({"weights": "current", "privileged": True}, "itself with the task's privileged prompt"),
        (
            {"privileged": True, "system_prompt": ""},
            "its own start with a system prompt of its own and the task's privileged prompt",
        ),
    ],
)  # fmt: skip
def test_teachers_in_words(teacher: dict[str, Any], words: str) -> None:
    assert distill_page._teacher(teacher) == words


def test_stages_of_a_run() -> None:
    def labels(make: Any, count: int) -> list[str]:
        return [stage.label for stage in make([{"step": step + 1} for step in range(count)])]

    assert [labels(first_middle_last, n) for n in (0, 1, 2)] == [[], ["step 1"], ["step 1", "step 2"]]
    assert labels(first_middle_last, 12) == ["step 1", "step 6", "step 12"]
    assert labels(first_middle_last, 100) == ["steps 1–10", "steps 46–55", "steps 91–100"]
    assert [labels(thirds, n) for n in (0, 1, 2)] == [[], ["step 1"], ["step 1", "step 2"]]
    assert labels(thirds, 12) == ["steps 1–4", "steps 5–8", "steps 9–12"]
    stage = thirds([{"step": 1, "p/0/kl": 1.0, "p/0/tokens": 3}, {"step": 2, "p/0/kl": 5.0, "p/0/tokens": 1}] * 3)[0]
    assert stage.mean("p/", 0, "kl") == 2.0, "weighted by tokens"
    assert stage.mean("p/", 16, "kl") is None


def test_map_keeps_its_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that generated less, one without an update, and a bin that no step reached."""
    drawn: dict[str, Any] = {}

    class Axes:
        figure: Any = None

        def pcolormesh(self, x: list[float], y: list[int], values: list[list[float]], **_: Any) -> None:
            drawn.update(x=x, y=y, values=values)
            raise InterruptedError

    monkeypatch.setattr(positions, "plot", lambda title, paint, **_: paint(Axes()))
    records: list[dict[str, Any]] = [
        {"step": 0}, {"step": 1, "p/0/kl": 1.0}, {"step": 2, "loss": 1.0}, {"step": 3, "p/0/kl": 2.0, "p/32/kl": 3.0},
    ]  # fmt: skip
    with pytest.raises(InterruptedError):
        draw_position_map("map", records, "p/", 16, "kl", note="", unit="")
    assert drawn["x"] == [0.5, 1.5, 2.5, 3.5]
    assert drawn["y"] == [0, 16, 32, 48]
    nan = math.nan
    expected = [[1.0, nan, 2.0], [nan, nan, nan], [nan, nan, 3.0]]
    assert json.dumps(drawn["values"]) == json.dumps(expected)
    assert draw_position_map("map", records[:2], "p/", 16, "kl", note="", unit="") == "", "one step"


def test_phase_medians() -> None:
    records = [{"step": 0, "time/eval_s": 99.0}]
    records += [{"step": i, "time/rollout_s": float(i), "time/step_s": 2.0 * i} for i in (1, 2, 6)]
    records[-1]["time/eval_s"] = 3.0
    rows = re.findall(r"<tr>(.*?)</tr>", phase_table(records))
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in rows]
    assert cells[1:] == [["rollout", "2", "3", "0.750"], ["eval", "3", "1", "0.250"], ["whole step", "4", "3", ""]]
    assert phase_table(records[:1]) == ""
