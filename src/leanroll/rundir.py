"""The run directory: file names, atomic writes, the metrics writer and the readers. Never imports torch.

runs/quickstart-20260102-030405/
  config.toml             the resolved recipe; `leanroll rl config.toml` starts the same run again
  environment.json        versions, hardware, git commit, command line
  schedule.json           the budget schedule of the recipe
  held-schedule.json      with rollout.control = "hold": the budgets of the next step
  metrics.jsonl           one flat record per step (names and units: leanroll.rundir_metrics)
  rollouts/step-000012.jsonl    completions of that step
  eval/step-000012.json         held-out evaluation
  eval/teacher.json             the same of the teacher, before a distillation
  full-step.json          a step against one of full rollouts (distill.compare_full)
  checkpoints/step-000012/      Hugging Face / peft format plus the trainer's state
  diagnosis/                    what was saved when a run stopped on its own
  diagnosis/alarm-000012.json   a collapse alarm of that step, in words; it stays when the run goes back before it
  profile/                what `leanroll profile` found after training
  report.html             the page of `leanroll report`
  .lock                         held while a process trains here (leanroll.rundir_lock)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from leanroll.errors import ConfigError, ResumeError
from leanroll.rundir_lock import LOCK
from leanroll.rundir_metrics import check_record
from leanroll.rundir_storage import storing

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SCHEDULE = "schedule.json"
HELD_SCHEDULE = "held-schedule.json"
REPORT = "report.html"
CALIBRATION = "calibration.json"
"""Summary that makes a folder one of `leanroll calibrate`."""
PROFILE, PROFILE_PAGE = "profile.json", "profile.html"
"""What `leanroll profile` found, and its page."""
TRAJECTORIES = "trajectories.jsonl"
"""Beside it: the completions, with what was measured at each token."""
ROLLOUTS, EVAL, CHECKPOINTS, DIAGNOSIS = "rollouts", "eval", "checkpoints", "diagnosis"

TEACHER_EVAL = "teacher.json"
FULL_STEP = "full-step.json"

_FOLDERS = (ROLLOUTS, EVAL, CHECKPOINTS, DIAGNOSIS)
_UNFINISHED = re.compile(rf"^\.({CONFIG}|{ENVIRONMENT})\..*\.tmp$")
_STEP = re.compile(r"^step-(\d{6,})$")


class RunDir:
    """One run on disk. Make it with `create` or `open`; every path below it comes from here."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: str | Path, *, config_toml: str, environment: Mapping[str, Any]) -> RunDir:
        """Start a new run directory.

        config_toml: the resolved recipe. environment: JSON-ready facts, see `leanroll.environment.describe`.

        Raises:
            ConfigError: the directory holds something already, is a file, or cannot be written.
        """
        run = cls(Path(path).absolute())
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            cls.check_free(run.path)
            for name in _FOLDERS:
                (run.path / name).mkdir(exist_ok=True)
            write_json(run.path / ENVIRONMENT, environment)
            # The recipe comes last: a directory that has one is complete.
            write_text(run.path / CONFIG, config_toml)
        except OSError as error:
            raise ConfigError(
                f"Run directory {str(run.path)!r} cannot be written ({error.strerror or error}); expected a writable folder. "
                "Choose another train.run_dir."
            ) from error
        return run

    @staticmethod
    def check_free(path: str | Path) -> None:
        """Raise ConfigError unless `path` is a new or empty folder, or one where `create` was cut short; touches nothing."""
        path = Path(path).absolute()
        if path.exists() and not RunDir.is_unstarted(path):
            raise ConfigError(
                f"Run directory {str(path)!r} is not empty; expected a new or empty folder. Choose another train.run_dir, or "
                "continue that run with --resume."
            )

    @staticmethod
    def is_unstarted(path: str | Path) -> bool:
        """Whether `path` is a folder with nothing in it but what a kill before the end of `create` can leave."""
        path = Path(path).absolute()
        locked = (path / LOCK).is_file()

        def left_by_create(entry: Path) -> bool:
            if entry.is_dir():
                return entry.name in _FOLDERS and not any(entry.iterdir())
            # A file named as ours is only taken for ours beside the lock, which no other program makes.
            return locked and (entry.name in (LOCK, ENVIRONMENT) or _UNFINISHED.match(entry.name) is not None)

        return path.is_dir() and all(map(left_by_create, path.iterdir()))

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run. Raises ResumeError when there is none at `path`."""
        run = cls(Path(path).absolute())
        if not run.config_path.is_file():
            raise ResumeError(
                f"No run in {str(run.path)!r}: expected a folder with a {CONFIG}, as `leanroll rl` writes it. Check train.run_dir."
            )
        return run

    @property
    def config_path(self) -> Path:
        return self.path / CONFIG

    @property
    def metrics_path(self) -> Path:
        return self.path / METRICS

    def rollouts_path(self, step: int) -> Path:
        return self.path / ROLLOUTS / f"{step_name(step)}.jsonl"

    def eval_path(self, step: int) -> Path:
        return self.path / EVAL / f"{step_name(step)}.json"

    def checkpoint_path(self, step: int) -> Path:
        return self.path / CHECKPOINTS / step_name(step)

    def diagnosis_path(self, name: str) -> Path:
        return self.path / DIAGNOSIS / name

    def read_config(self) -> dict[str, Any]:
        """The resolved recipe as nested tables (options that are None are absent)."""
        return tomllib.loads(self.config_path.read_text(encoding="utf-8"))

    def read_environment(self) -> dict[str, Any]:
        """Versions, hardware, git commit, command line."""
        data: dict[str, Any] = json.loads((self.path / ENVIRONMENT).read_text(encoding="utf-8"))
        return data

    def read_metrics(self) -> list[dict[str, Any]]:
        """All records, in step order; empty before the first step."""
        return list(read_jsonl(self.metrics_path)) if self.metrics_path.exists() else []

    def checkpoint_steps(self) -> list[int]:
        """Steps with a complete checkpoint folder, ascending (folders under other names are unfinished)."""
        return _steps(self.path / CHECKPOINTS, "")

    def rollout_steps(self) -> list[int]:
        """Steps with a rollouts file, ascending."""
        return _steps(self.path / ROLLOUTS, ".jsonl")

    def eval_steps(self) -> list[int]:
        """Steps with an evaluation, ascending."""
        return _steps(self.path / EVAL, ".json")

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one step's record and force it to disk.

        Raises:
            ValueError: a name that the schema does not know, no `step`, or a value that is not a finite number.
            StorageError: the disk refused it; as much of the line as it took is dropped by `truncate_after`.
        """
        line = json.dumps(check_record(record), allow_nan=False) + "\n"
        with storing(self.metrics_path), self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write a step's completions, atomically; one JSON object per line. Raises StorageError."""
        path = self.rollouts_path(step)
        with storing(path):
            write_jsonl(path, records)
        return path

    def write_eval(self, step: int, result: Mapping[str, Any]) -> Path:
        """Write an evaluation's result, atomically. Raises StorageError."""
        path = self.eval_path(step)
        with storing(path):
            write_json(path, result)
        return path

    def write_teacher_eval(self, result: Mapping[str, Any]) -> Path:
        """Write the teacher's evaluation, atomically. Raises StorageError."""
        path = self.path / EVAL / TEACHER_EVAL
        with storing(path):
            write_json(path, result)
        return path

    def write_alarm(self, step: int, alarm: Mapping[str, Any]) -> Path:
        """Write what a collapse alarm said, atomically; the step is added."""
        path = self.path / DIAGNOSIS / f"alarm-{step:06d}.json"
        with storing(path):
            write_json(self.diagnosis_path(path.name), {"step": step, **alarm})
        return path

    def read_alarms(self) -> list[dict[str, Any]]:
        """All that `write_alarm` wrote, in step order."""
        paths = (self.path / DIAGNOSIS).glob("alarm-*.json")
        found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        return sorted(found, key=lambda alarm: int(alarm["step"]))

    def truncate_after(self, step: int) -> None:
        """Forget everything later than `step`, for resuming from that step's checkpoint.

        Metrics are rewritten atomically, a half-written last line (killed while appending) is dropped. Rollouts and
        evaluations of later steps are removed, and temporary files that a kill left. Diagnoses stay: they say why a run
        stopped. Checkpoints are the trainer's.

        Raises:
            StorageError: the disk refused it; what is left can be resumed again.
        """
        with storing(self.path):
            self._truncate_after(step)

    def _truncate_after(self, step: int) -> None:
        if self.metrics_path.exists():
            kept: list[str] = []
            for line in self.metrics_path.read_text(encoding="utf-8").splitlines(keepends=True):
                # A line without its newline was cut by a kill; a resumed run writes that step again.
                if line.endswith("\n") and int(json.loads(line)["step"]) <= step:
                    kept.append(line)
            write_text(self.metrics_path, "".join(kept))
        for later, path_of in ((self.rollout_steps(), self.rollouts_path), (self.eval_steps(), self.eval_path)):
            for other in later:
                if other > step:
                    path_of(other).unlink()
        for folder in (self.path, self.path / ROLLOUTS, self.path / EVAL, self.path / DIAGNOSIS):
            for left in folder.glob(".*.tmp"):
                left.unlink()


class ReadOnlyRunDir(RunDir):
    """The run directory for a process that computes what another one writes: its writers do nothing.

    `diagnosis_path` is for writing nevertheless: only the process that met the number knows what to write.
    """

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Nothing."""
        return self.rollouts_path(step)

    def write_eval(self, step: int, result: Mapping[str, Any]) -> Path:
        """Nothing."""
        return self.eval_path(step)

    def write_teacher_eval(self, result: Mapping[str, Any]) -> Path:
        """Nothing."""
        return self.path / EVAL / TEACHER_EVAL

    def write_alarm(self, step: int, alarm: Mapping[str, Any]) -> Path:
        """Nothing."""
        return self.path / DIAGNOSIS / f"alarm-{step:06d}.json"

    def truncate_after(self, step: int) -> None:
        """Nothing."""


def step_name(step: int) -> str:
    """`step-000012`."""
    return f"step-{step:06d}"


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A temporary file that replaces `path` when the block ends well, and vanishes when it raises.

    The content is forced to disk before the rename and the folder after it, so that a kill leaves the old or the new file.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends well, and vanishes when it raises.

    path: a new or empty folder. Missing parents are made, and taken away again where nothing is left in them.

    Raises:
        OSError: it cannot be written, or `path` holds something by the end.
    """
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".tmp-{path.name}-"))
        try:
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o777 & ~umask)
            yield temporary
            sync_folder(temporary)
            temporary.replace(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except BaseException:
        for parent in made:  # the innermost first
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk (needed after renaming into it)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, atomically."""
    with atomic_file(path) as file:
        file.write(text)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace `path` by indented JSON, atomically. Raises ValueError for NaN and infinities."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Replace `path` by one JSON object per line, atomically; returns the number of lines."""
    count = 0
    with atomic_file(path) as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line cut by a kill (no newline) is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _steps(folder: Path, suffix: str) -> list[int]:
    if not folder.is_dir():
        return []
    names = (entry.name.removesuffix(suffix) for entry in folder.iterdir() if entry.name.endswith(suffix))
    return sorted(int(match[1]) for match in map(_STEP.match, names) if match)
