"""`leanroll calibrate` on a tiny model: from texts, from a task, broken off and continued, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from leanroll.calibrate import rollout_speed
from leanroll.calibrate.devices import Device
from leanroll.cli.main import main
from leanroll.report import calibration
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
        "--rollout.kv_memory_gib", "0.1", "--calibrate.run_dir", str(run_dir),
        *([] if "--calibrate.speed_batch_size" in more else ["--calibrate.measure_speed", "false"]), *more,
    ]  # fmt: skip


TWO_TARGETS = ["--targets", "0.8", "0.9", "--calibrate.speed_batch_size", "2"]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """One round of timing, and a device that is given instead of measured."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rollout_speed, "prediction_device", lambda *_, **__: (Device("slow", 1e8, 1e10), "a slow one"))
        patched.setattr(rollout_speed, "ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def output() -> list[str]:
    """What the calibration of `finished` printed."""
    return []


@pytest.fixture(scope="module")
def finished(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory, output: list[str]) -> Path:
    run_dir = tmp_path_factory.mktemp("calibration") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(arguments(model, run_dir, "--texts", f"{texts}/*.txt", *TWO_TARGETS)) == 0
    output.append(printed.getvalue())
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


def test_speed_is_predicted_and_measured(finished: Path, output: list[str]) -> None:
    page = (finished / "report.html").read_text()
    targets = json.loads((finished / "calibration.json").read_text())["targets"]
    assert len(list((finished / "speed").iterdir())) == len({tuple(r["pages"]) for r in targets})
    closing = output[0].splitlines()
    for result in targets:
        speed = result["speed"]
        assert (speed["batch"], speed["prompt_length"], speed["max_length"]) == (2, 12, 248)
        assert speed["lengths"] == [row["length"] for row in speed["rows"]] == [12, 34, 94, 158, 222, 248]
        assert 0 < speed["measured"] < math.inf
        assert 0 < speed["predicted"] < math.inf
        assert speed["reason"] is None
        (line,) = (text for text in closing if text.startswith(f"target {result['target']:g}: "))
        assert f"{result['kv_share']:.2f} of the KV read" in line
        assert f"predicted {speed['predicted']:.2f}x, measured {speed['measured']:.2f}x [" in line
        assert "at batch 2 from 12 to 248 tokens" in line
        assert "timed at 12, 34, 94, 158, 222, 248 tokens" in line
        assert f"<td>{speed['predicted']:.2f}x</td><td>{speed['measured']:.2f}x [" in page


def test_a_page_without_speed(finished: Path) -> None:
    # As a kill before the measurement leaves it, and as older calibrations are.
    summary = json.loads((finished / "calibration.json").read_text())
    for result in summary["targets"]:
        del result["speed"]
        assert "Decode steps of" not in calibration._target_table(summary, result)
    assert "<td>none yet</td><td>none yet</td>" in calibration._overview(summary)


def test_continuing_repeats_nothing_and_decides_the_same(
    finished: Path, model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--texts", f"{texts}/*.txt", *TWO_TARGETS]
    for name in ("prediction_device", "measure_speed"):
        monkeypatch.setattr(rollout_speed, name, lambda *_, **__: pytest.fail("measured again"))
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
        same = ("pages", "fit", "held_out", "continuations", "passes", "speed")
        assert {k: old[k] for k in same} == {k: new[k] for k in same}


def test_no_time_left_for_speed(
    finished: Path, model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir, ignore=shutil.ignore_patterns("speed"))
    monkeypatch.setattr(rollout_speed, "SETUP_SECONDS", 1e6)
    monkeypatch.setattr(rollout_speed, "measure_speed", lambda *_, **__: pytest.fail("measured"))
    options = ["--texts", f"{texts}/*.txt", *TWO_TARGETS, "--time-budget", "1000", "--resume"]
    assert main(arguments(model, run_dir, *options)) == 0
    for result in json.loads((run_dir / "calibration.json").read_text())["targets"]:
        speed = result["speed"]
        assert (result["complete"], speed["predicted"], speed["measured"]) == (True, None, None)
        assert speed["reason"].startswith("time budget: about 1000000 s needed, ")
    assert "none (time budget" in (run_dir / "report.html").read_text()


def test_resuming_with_other_options_names_them(
    finished: Path, model: Path, texts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(model, finished, "--texts", f"{texts}/*.txt", "--resume", "--calibrate.scorer", "mean")) == 2
    said = capfd.readouterr().err
    assert "calibrate.scorer was 'peak4-int4', is 'mean'" in said
    assert "measure_speed" not in said, "it may change"


def test_one_process_calibrates_in_a_folder(
    model: Path, texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with run_lock(tmp_path / "run"):
        assert main(arguments(model, tmp_path / "run", "--texts", f"{texts}/*.txt")) == 2
    assert "is in use by process" in capfd.readouterr().err
    assert not (tmp_path / "run" / "config.toml").exists()


def test_from_a_task(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
    assert (result["speed"]["measured"], result["speed"]["reason"]) == (None, "calibrate.measure_speed is false")
    assert "no speed-up measured (calibrate.measure_speed is false)" in capfd.readouterr().out
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
        (["--texts", "it's.txt"], 'no file matches "it\'s.txt"'),
        (["--calibrate.trajectories", "15"], "expected at least 15 to fit on"),
        (["--calibrate.budgets", "[2, 9]"], "reserved"),
        (["--calibrate.scorer", "nonsense"], "nonsense"),
        (["--calibrate.dense_layers", "[7]"], "layers"),
        (["--calibrate.warm_start", "nothing"], "No schedule 'nothing'"),
        (["--rollout.schedule", "qwen3-4b-0.86"], "rollout.schedule has no effect"),
        (["--task", "ifollow"], "task.name has no effect"),
        (
            ["--calibrate.measure_speed", "false", "--calibrate.speed_batch_size", "4"],
            "calibrate.speed_batch_size has no effect, because calibrate.measure_speed is false",
        ),
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


def test_out_of_time_leaves_a_usable_schedule(
    model: Path, texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    options = ["--texts", f"{texts}/*.txt", "--targets", "0.9", "--time-budget", "0.000001"]
    assert main(arguments(model, run_dir, *options, "--calibrate.speed_batch_size", "2")) == 0
    (result,) = json.loads((run_dir / "calibration.json").read_text())["targets"]
    assert not result["complete"]
    assert result["passes"] == 1
    speed = result["speed"]
    assert (speed["predicted"], speed["measured"]) == (None, None)
    assert speed["reason"] == "the schedule reads every page, so there is nothing to compare"
    assert f"no speed-up measured ({speed['reason']})" in capfd.readouterr().out
    schedule = BudgetSchedule.load(run_dir / "schedules" / "calibration-0.90.json")
    assert not schedule.provenance["complete"]


def test_trains_a_sampler_adapter_first(model: Path, texts: Path, tmp_path: Path) -> None:
    schedule = tmp_path / "few.json"
    schedule.write_text(json.dumps({"page_size": 8, "pages": [6], "dense_layers": [0], "scorer": "softmax"}))
    options = ["--texts", f"{texts}/*.txt", "--targets", "0.8", "--distill-sparse", "3", "--sampler_adapter.r", "4"]
    run = arguments(
        model,
        tmp_path / "run",
        *options,
        "--rollout.schedule",
        str(schedule),
        "--sampler_adapter.learning_rate",
        "0.001",
    )
    assert main(run) == 0
    losses = [json.loads(line) for line in (tmp_path / "run" / "distill_sparse.jsonl").read_text().splitlines()]
    assert [r["step"] for r in losses] == [1, 2, 3]
    assert losses[2]["sampler_adapter/kl"] < losses[0]["sampler_adapter/kl"]
    found = BudgetSchedule.load(tmp_path / "run" / "schedules" / "calibration-0.80.json")
    assert found.provenance["with_sampler_adapter"]
    weights = tmp_path / "run" / "sampler_adapter" / "adapter_model.safetensors"
    before = weights.stat().st_mtime_ns
    assert main([*run, "--resume"]) == 0
    assert weights.stat().st_mtime_ns == before, "an adapter that is trained is not trained again"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--distill-sparse", "3"], "give sampler_adapter.r"),
        (["--distill-sparse", "3", "--sampler_adapter.r", "4"], "name a sparse schedule"),
        (["--sampler_adapter.r", "4"], "sampler_adapter.r has no effect, because no sampler adapter is trained"),
        (["--calibrate.distill_tokens", "4"], "distill_tokens is set but has no effect"),
        (
            ["--distill-sparse", "3", "--sampler_adapter.r", "4", "--rollout.schedule", "qwen3-4b-0.86",
             "--sampler_adapter.ppo_weight", "2.0"],
            "sampler_adapter.ppo_weight has no effect, because there are no rewards",
        ),
    ],
)  # fmt: skip
def test_refuses_sampler_options_without_effect(
    options: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(model, tmp_path / "run", *options)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
