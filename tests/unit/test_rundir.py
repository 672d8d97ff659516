"""The run directory: creation, atomic writes, the metrics schema, and cutting back for a resume."""

import json
import os
from pathlib import Path

import pytest

from leanroll import environment
from leanroll.errors import ConfigError, ResumeError
from leanroll.rundir import (
    RunDir,
    atomic_file,
    read_jsonl,
    staged_folder,
    step_name,
    write_json,
    write_jsonl,
    write_text,
)
from leanroll.rundir_lock import run_lock
from leanroll.rundir_metrics import SCHEMA, check_record, describe_metric, is_timing


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs" / "a", config_toml='name = "a"\n', environment={"versions": {}})


def test_create_and_open(run: RunDir) -> None:
    again = RunDir.open(run.path)
    assert again.read_config() == {"name": "a"}
    assert again.read_environment() == {"versions": {}}
    assert again.read_metrics() == []
    assert again.checkpoint_path(12) == run.path / "checkpoints" / "step-000012"


def test_refuses_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match=r"not empty.*--resume"):
        RunDir.create(tmp_path, config_toml="", environment={})
    assert sorted(os.listdir(tmp_path)) == ["x"]


@pytest.mark.parametrize("killed_at", ["folder", "lock", "folders", "temporary", "environment"])
def test_a_killed_creation_is_begun_again(tmp_path: Path, killed_at: str) -> None:
    """Everything that a kill can leave before the recipe is there; `create` makes a whole run of it."""
    stages = ("folder", "lock", "folders", "temporary", "environment")
    reached = stages[: stages.index(killed_at) + 1]
    if "lock" in reached:
        with run_lock(tmp_path):
            pass
    if "folders" in reached:
        for name in ("rollouts", "eval", "checkpoints", "diagnosis"):
            (tmp_path / name).mkdir()
    if "temporary" in reached:
        (tmp_path / ".environment.json.ab12.tmp").write_text("{")
    if "environment" in reached:
        write_json(tmp_path / "environment.json", {})
    assert RunDir.is_unstarted(tmp_path)
    run = RunDir.create(tmp_path, config_toml='name = "a"\n', environment={"versions": {}})
    assert not RunDir.is_unstarted(tmp_path)
    run.truncate_after(-1)
    assert (run.read_config(), run.read_environment()) == ({"name": "a"}, {"versions": {}})
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("foreign", ["notes.txt", "rollouts/mine.jsonl", "mine/", "environment.json"])
def test_a_folder_of_something_else_is_not_unstarted(tmp_path: Path, foreign: str) -> None:
    path = tmp_path / foreign
    if foreign.endswith("/"):
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert not RunDir.is_unstarted(tmp_path)
    with pytest.raises(ConfigError, match="not empty"):
        RunDir.check_free(tmp_path)


def test_refuses_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDir.create(tmp_path / "file" / "run", config_toml="", environment={})


def test_refuses_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # root could write to a read-only folder
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDir.create(tmp_path / "run", config_toml="", environment={})


def test_open_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="No run in"):
        RunDir.open(tmp_path)


def test_metrics_round_trip(run: RunDir) -> None:
    run.append_metrics({"reward/mean": 0.5, "step": 1, "time/rollout_s": 2})
    run.append_metrics({"step": 2, "alpha/bin_512/p05": 0.9})
    assert run.read_metrics() == [
        {"step": 1, "reward/mean": 0.5, "time/rollout_s": 2},
        {"step": 2, "alpha/bin_512/p05": 0.9},
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"loss": 1.0}, "integer `step`"),
        ({"step": True}, "integer `step`"),
        ({"step": 1.0}, "integer `step`"),
        ({"step": 1, "rewrd/mean": 1.0}, "not in the schema"),
        ({"step": 1, "reward/a/b": 1.0}, "not in the schema"),
        ({"step": 1, "loss": float("nan")}, "finite"),
        ({"step": 1, "loss": float("inf")}, "finite"),
        ({"step": 1, "loss": "1"}, "finite"),
        ({"step": 1, "loss": None}, "finite"),
        ({"step": 1, "loss": True}, "finite"),
    ],
)
def test_bad_metrics_write_nothing(run: RunDir, record: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run.append_metrics(record)
    assert not run.metrics_path.exists()


def test_schema() -> None:
    for name, metric in SCHEMA.items():
        assert metric.unit, name
        assert metric.meaning.endswith("."), name
    assert describe_metric("reward/mean") is SCHEMA["reward/mean"]
    assert describe_metric("reward/exact") is SCHEMA["reward/<name>"]
    assert describe_metric("time/rollout_s") is SCHEMA["time/<phase>_s"]
    assert describe_metric("alpha/bin_0/p05") is SCHEMA["alpha/bin_<start>/p05"]
    assert describe_metric("time/rollout") is None
    assert describe_metric("alpha/bin_0/p06") is None
    assert is_timing("time/rollout_s")
    assert is_timing("tokens_per_second")
    assert not is_timing("reward/mean")
    assert list(check_record({"loss": 1.0, "step": 3})) == ["step", "loss"]


def test_truncate_after(run: RunDir) -> None:
    for step in range(5):
        run.append_metrics({"step": step, "loss": float(step)})
        run.write_rollouts(step, [{"text": "é"}])
        run.write_eval(step, {"mean_reward": 0.5})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 5, "lo')  # killed while appending
    assert [record["step"] for record in run.read_metrics()] == [0, 1, 2, 3, 4]
    run.truncate_after(2)
    assert [record["step"] for record in run.read_metrics()] == [0, 1, 2]
    assert run.rollout_steps() == run.eval_steps() == [0, 1, 2]
    run.append_metrics({"step": 3, "loss": 3.0})
    assert [record["step"] for record in run.read_metrics()] == [0, 1, 2, 3]
    for folder in (run.path, run.path / "rollouts"):
        (folder / ".metrics.jsonl.x1.tmp").write_text("half")  # killed while rewriting
    write_json(run.diagnosis_path("step-000004.json"), {})
    run.truncate_after(-1)
    assert run.diagnosis_path("step-000004.json").exists(), "it says why the run stopped"
    assert not list(run.path.rglob("*.tmp"))
    assert run.read_metrics() == []
    assert run.rollout_steps() == []


def test_unfinished_checkpoints_do_not_count(run: RunDir) -> None:
    for name in (step_name(3), step_name(10), ".step-000011.tmp", "step-12"):
        (run.path / "checkpoints" / name).mkdir()
    assert run.checkpoint_steps() == [3, 10]


def test_atomic_file_keeps_the_old_content_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail() -> None:
        with atomic_file(path) as file:
            file.write("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]
    write_text(path, "new")
    assert path.read_text() == "new"


def test_atomic_file_has_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "atomic", "")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_json_refuses_nan(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"x": float("nan")})
    assert not path.exists()


def test_jsonl_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "line\u2028separator\nand é"}, {"n": 1}]
    assert write_jsonl(path, rows) == 2
    assert list(read_jsonl(path)) == rows


def test_environment_is_json_and_complete() -> None:
    facts = environment.describe({"device": "cpu"})
    json.dumps(facts)
    assert facts["versions"]["python"]
    assert facts["versions"]["torch"]
    assert facts["cpu"]["cores"] >= 1
    assert facts["device"] == "cpu"
    assert set(facts["git"]) == {"commit", "dirty"}


def test_git_state_outside_a_checkout(tmp_path: Path) -> None:
    assert environment.git_state(tmp_path) == {"commit": None, "dirty": None}


def test_a_staged_folder_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    with staged_folder(folder) as files:
        write_text(files / "x", "1")
        assert not folder.exists()
    assert [entry.name for entry in folder.parent.iterdir()] == ["c"]
    assert (folder / "x").read_text() == "1"
    empty = tmp_path / "empty"
    empty.mkdir()
    with staged_folder(empty) as files:
        write_text(files / "y", "2")
    assert (empty / "y").read_text() == "2"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_staged_folder_that_failed_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def failing(folder: Path) -> None:
        with staged_folder(folder) as files:
            (files / "inner").mkdir()
            raise error

    (tmp_path / "kept").mkdir()
    for folder in (tmp_path / "a" / "b" / "c", tmp_path / "kept" / "c"):
        with pytest.raises(error):
            failing(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]


def test_a_staged_folder_takes_no_foreign_files_away(tmp_path: Path) -> None:
    def overtaken(folder: Path) -> None:
        with staged_folder(folder):
            folder.mkdir()
            (folder / "mine").touch()

    with pytest.raises(OSError, match="not empty"):
        overtaken(tmp_path / "a" / "c")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "c", "mine"]
