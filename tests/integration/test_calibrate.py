"""`leanroll calibrate` on a tiny model: from texts, from a task, broken off and continued, and what it refuses."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from leanroll.cli.main import main
from leanroll.rollout.schedule import UNLIMITED, BudgetSchedule
from leanroll.rundir_lock import run_lock
from tests.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pq = pytest.importorskip("pyarrow.parquet")

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "box",
    "and",
    "nobody",
    "minds",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(7):
        rng = random.Random(number)
        (folder / f"{number}.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(240)))
    return folder


def arguments(model: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        "calibrate", "--model", str(model), "--model.dtype", "float32", "--max-tokens", "256", "--calibrate.page_size", "8",
        "--calibrate.bin_pages", "8", "--calibrate.dense_layers", "[0]", "--calibrate.trajectories", "4",
        "--calibrate.held_out", "2", "--calibrate.min_trajectories", "3", "--calibrate.continuations", "6",
        "--rollout.kv_memory_gib", "0.1", "--calibrate.run_dir", str(run_dir), *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("calibration") / "run"
    assert main(arguments(model, run_dir, "--texts", f"{texts}/*.txt", "--targets", "0.8", "0.9")) == 0
    return run_dir


def test_schedules_are_usable_and_reach_their_targets(finished: Path) -> None:
    summary = json.loads((finished / "calibration.json").read_text())
    assert [r["target"] for r in summary["targets"]] == [0.8, 0.9]
    budgets = []
    for result in summary["targets"]:
        schedule = BudgetSchedule.load(finished / "schedules" / f"calibration-{result['target']:.2f}.json")
        assert schedule.pages[-1] == UNLIMITED, "lengths beyond what was measured are dense"
        assert list(schedule.pages[:-1]) == result["pages"]
        assert schedule.provenance["max_tokens"] == 256
        assert schedule.target == result["target"]
        assert all(b["tail_low"] >= result["target"] for b in result["fit"])
        assert result["complete"]
        budgets.append(result["pages"])
    assert all(low <= high for low, high in zip(*budgets, strict=True)), "a higher target needs as many pages or more"
    assert budgets[0][-1] < 31, "sparse at the end"


def test_table_and_page(finished: Path) -> None:
    rows = pq.read_table(finished / "acceptance.parquet").to_pylist()
    assert {r["measured_on"] for r in rows} == {"fit", "held_out", "continuation"}
    assert {r["target"] for r in rows} == {None, 0.8, 0.9}
    assert all(r["tail_low"] <= r["tail"] <= r["tail_high"] <= 1.0 + 1e-6 for r in rows if r["num_tokens"] > 50)
    page = (finished / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1 + 2 * 2 + 2, "schedules; per target tail and distribution; budgets"
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_continuing_repeats_nothing_and_decides_the_same(
    finished: Path, model: Path, texts: Path, tmp_path: Path
) -> None:
    options = ["--texts", f"{texts}/*.txt", "--targets", "0.8", "0.9"]
    before = json.loads((finished / "calibration.json").read_text())
    files = {p.name: p.stat().st_mtime_ns for p in (finished / "passes").iterdir()}
    assert main(arguments(model, finished, *options)) == 2, "only with --resume"
    # As a kill leaves it: some of the results, and no summary.
    for name in sorted(files)[::2]:
        (finished / "passes" / name).unlink()
    (finished / "calibration.json").unlink()
    assert main(arguments(model, finished, *options, "--resume")) == 0
    after = json.loads((finished / "calibration.json").read_text())
    assert {p.name for p in (finished / "passes").iterdir()} == set(files)
    assert all((finished / "passes" / n).stat().st_mtime_ns == files[n] for n in sorted(files)[1::2])
    for old, new in zip(before["targets"], after["targets"], strict=True):
        assert {k: old[k] for k in ("pages", "fit", "held_out", "continuations", "passes")} == {
            k: new[k] for k in ("pages", "fit", "held_out", "continuations", "passes")
        }


def test_resuming_with_other_options_names_them(
    finished: Path, model: Path, texts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(model, finished, "--texts", f"{texts}/*.txt", "--resume", "--calibrate.scorer", "mean")) == 2
    assert "calibrate.scorer was 'softmax', is 'mean'" in capfd.readouterr().err


def test_one_process_calibrates_in_a_folder(
    model: Path, texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with run_lock(tmp_path / "run"):
        assert main(arguments(model, tmp_path / "run", "--texts", f"{texts}/*.txt")) == 2
    assert "is in use by process" in capfd.readouterr().err
    assert not (tmp_path / "run" / "config.toml").exists()


def test_from_a_task(model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    more = [
        "--task",
        "ifollow",
        "--rollout.max_completion_length",
        "150",
        "--targets",
        "0.85",
        "--calibrate.max_tokens",
        "400",
    ]
    assert main(arguments(model, run_dir, *more, "--calibrate.min_trajectories", "2")) == 0
    (result,) = json.loads((run_dir / "calibration.json").read_text())["targets"]
    measured = [b is not None for b in result["fit"]]
    assert not measured[0], "inside the prompts nothing is drawn"
    assert any(measured)
    assert all(i in result["dense_bins"] for i, there in enumerate(measured) if not there)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--targets", "1.0"], "calibrate.targets"),
        (["--targets", "0"], "calibrate.targets"),
        (["--targets", "0.9", "0.9"], "twice"),
        (["--max-tokens", "1024"], "context holds 512"),
        (["--texts", "nowhere/*.txt"], "no file matches"),
        (["--calibrate.trajectories", "15"], "expected at least 15 to fit on"),
        (["--calibrate.budgets", "[2, 9]"], "reserved"),
        (["--calibrate.scorer", "nonsense"], "nonsense"),
        (["--calibrate.dense_layers", "[7]"], "layers"),
        (["--calibrate.warm_start", "nothing"], "No schedule 'nothing'"),
        (["--rollout.schedule", "qwen3-4b-0.86"], "rollout.schedule has no effect"),
        (["--task", "ifollow"], "task.name has no effect"),
    ],
)
def test_refusals(
    model: Path, texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    base = arguments(model, tmp_path / "run")
    if "--texts" not in more:
        base += ["--texts", f"{texts}/*.txt"]
    assert main([*base, *more]) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "run").exists(), "nothing half-written"


def test_texts_too_short_to_fill_a_bin(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("too short")
    assert main(arguments(model, tmp_path / "run", "--texts", str(tmp_path / "short.txt"))) == 2
    assert "longest has 9" in capfd.readouterr().err


def test_out_of_time_leaves_a_usable_schedule(model: Path, texts: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ["--texts", f"{texts}/*.txt", "--targets", "0.9", "--time-budget", "0.000001"]
    assert main(arguments(model, run_dir, *options)) == 0
    (result,) = json.loads((run_dir / "calibration.json").read_text())["targets"]
    assert not result["complete"]
    assert result["passes"] == 1
    schedule = BudgetSchedule.load(run_dir / "schedules" / "calibration-0.90.json")
    assert not schedule.provenance["complete"]
