"""Faults in the middle of a run: the error is a typed one, and the resumed run is the run that met no fault (docs/faults.md).

Real filesystems are mounted where that is allowed (root); elsewhere those tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from leanroll.cli.main import main
from leanroll.cli.training import write_page
from leanroll.errors import ConfigError, RewardError, StorageError, TrainingDiverged
from leanroll.losses.distill import divergence
from leanroll.rundir import METRICS, RunDir
from leanroll.train import checkpoint, distill, objectives, rl, trainer
from tests import distilling
from tests.invariants.kill_and_resume import differences
from tests.recipe import HERE, poison_loss, save_tiny_model, tiny_recipe

CHANGES: dict[str, Any] = {
    "rl__prompts_per_step": 2,
    "rollout__max_completion_length": 8,
    "train__steps": 2,
    "train__save_every": 1,
    "eval__every": 1,
    "eval__num_prompts": 2,
    "measure__alpha_trajectories": 2,
}
REWARD = [{"function": f"{HERE / 'faulty_rewards.py'}:share_of_liked_ids"}]
"""The same values under the same name as the reward of `tiny_recipe`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without a fault."""
    run = tmp_path_factory.mktemp("straight") / "run"
    rl.run(tiny_recipe(model, run, **CHANGES), quiet=True)
    return run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return distilling.save_pair(tmp_path_factory.mktemp("pair"))


def mount(*arguments: str) -> None:
    """mount(8), or the test is skipped."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a filesystem needs root")
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no filesystem can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """A file that takes all room of the disk but `leave` bytes."""
    found = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(found.f_bavail * found.f_frsize - leave))
    return ballast


def before(
    patch: pytest.MonkeyPatch, owner: type, name: str, act: Callable[[], object], is_due: Callable[..., bool]
) -> None:
    """Call `act` just before the method gets a step that is due."""
    method = getattr(owner, name)

    def wrapped(self: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        if is_due(step):
            act()
        return method(self, step, *args, **kwargs)

    patch.setattr(owner, name, wrapped)


def never(*_: object) -> None:
    pytest.fail("no page can be written on a disk that takes no record")


WRITES = {
    "rollouts": (RunDir, "write_rollouts", lambda step: step == 2, "rollouts/step-000002.jsonl", 0),
    "eval": (RunDir, "write_eval", lambda step: step == 2, "eval/step-000002.json", 0),
    "metrics": (RunDir, "append_metrics", lambda record: record["step"] == 2, METRICS, 0),
    # The weights still fit, the optimizer does not.
    "checkpoint": (checkpoint.Checkpoints, "save", lambda step: step == 2, "checkpoints/step-000002", 200_000),
}


@pytest.mark.parametrize(("owner", "method", "is_due", "written", "leave"), WRITES.values(), ids=list(WRITES))
def test_full_disk(
    model: Path, straight: Path, disk: Path, owner: type, method: str, is_due: Any, written: str, leave: int
) -> None:
    run = disk / "run"
    config = tiny_recipe(model, run, **CHANGES)
    with pytest.MonkeyPatch.context() as patch:
        before(patch, owner, method, lambda: fill(disk, leave), is_due)
        with pytest.raises(StorageError) as caught:
            rl.run(config, quiet=True, at_end=never)
    message = str(caught.value)
    assert message.startswith(f"'{run / written}' cannot be written (No space left on device; ")
    assert "of 4.0 MiB free" in message
    assert "Make room, then continue with --resume" in message
    assert os.readlink(run / "checkpoints" / "latest") == "step-000001"
    assert not [p for p in run.rglob("*") if ".tmp" in p.name], "the room of unfinished files is given back"
    (disk / "ballast").unlink()
    rl.run(config, resume=True, quiet=True)
    assert differences(straight, run) == []


def test_full_disk_in_the_command_line(model: Path, disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and no traceback; a page for which there is no room does not fail a run that is complete."""
    run = disk / "run"
    no_eval = {"eval__num_prompts": 0, "eval__num_samples": None, "eval__every": None}
    rl.run(tiny_recipe(model, run, **{**CHANGES, **no_eval, "train__steps": 1}), quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        before(patch, RunDir, "write_rollouts", lambda: fill(disk), lambda step: True)
        assert main(["rl", str(run), "--resume", "--train.steps", "2"]) == 1
    shown = capfd.readouterr().err
    assert "error: " in shown
    assert "Traceback" not in shown
    said: list[str] = []
    write_page(RunDir.open(run), said.append)
    assert f"No report.html written (No space left on device). Run `leanroll report {run}`" in said[0]
    # What is changed first when resuming is refused as well, and the run stays what it was.
    assert main(["rl", str(run), "--resume"]) == 2
    assert "No space left on device" in capfd.readouterr().err
    assert os.readlink(run / "checkpoints" / "latest") == "step-000001"


def test_full_disk_while_saving_because_of_another_error(
    model: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = disk / "run"
    poison_loss(monkeypatch, call=2)
    before(monkeypatch, checkpoint.Checkpoints, "save", lambda: fill(disk), lambda step: True)
    with pytest.raises(
        StorageError, match=r"(?s)step-000001' cannot be written.*another error:\nStep 2: the loss is nan"
    ):
        rl.run(tiny_recipe(model, run, **{**CHANGES, "train__save_every": 0}), quiet=True)


def test_full_disk_in_a_distillation(pair: tuple[Path, Path], disk: Path) -> None:
    """The same with a guard's baseline and a teacher that is evaluated."""
    straight, run = disk.parent / "straight", disk / "run"
    changes = {"train__steps": 2, "train__save_every": 1, "teacher__evaluate": True, "teacher__min_margin": -1.0}
    changes |= {"guard__every": 1, "guard__num_prompts": 2}
    distill.run(distilling.recipe(pair, straight, **changes), quiet=True)
    config = distilling.recipe(pair, run, **changes)
    for owner, method in ((RunDir, "write_teacher_eval"), (RunDir, "write_rollouts"), (checkpoint.Checkpoints, "save")):
        with pytest.MonkeyPatch.context() as patch:
            before(patch, owner, method, lambda: fill(disk), lambda step: True)
            with pytest.raises(StorageError, match="No space left on device"):
                distill.run(config, resume=run.exists(), quiet=True)
        (disk / "ballast").unlink()
    distill.run(config, resume=True, quiet=True)
    assert differences(straight, run) == []


def test_read_only_in_the_middle(model: Path, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_recipe(model, run, **CHANGES)
    mounted = False

    def become_read_only() -> None:
        nonlocal mounted
        mount("--bind", str(run), str(run))
        mounted = True
        mount("-o", "remount,bind,ro", str(run))

    try:
        with pytest.MonkeyPatch.context() as patch:
            before(patch, RunDir, "write_rollouts", become_read_only, lambda step: step == 2)
            with pytest.raises(StorageError, match=r"(?s)step-000002.jsonl.*Read-only file system.*Make it writable"):
                rl.run(config, quiet=True, at_end=never)
        with pytest.raises(ConfigError, match=r"cannot be written or locked \(Read-only file system\)"):
            rl.run(config, resume=True, quiet=True)
        with pytest.raises(ConfigError, match="cannot be written or locked"):
            rl.run(tiny_recipe(model, run / "rollouts" / "new", **CHANGES), quiet=True)
    finally:
        if mounted:
            subprocess.run(["umount", str(run)], check=True)
    rl.run(config, resume=True, quiet=True)
    assert differences(straight, run) == []


def test_nan_in_one_micro_batch(model: Path, tmp_path: Path) -> None:
    """The second of a step, so that a gradient was there already; the step is repeated from its beginning."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    changes = {**CHANGES, "train__save_every": 0, "train__micro_batch_tokens": 192}
    rl.run(tiny_recipe(model, straight, **changes), quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        poison_loss(patch, call=4)
        with pytest.raises(TrainingDiverged, match=r"Step 2: the loss is nan in one micro-batch"):
            rl.run(tiny_recipe(model, run, **changes), quiet=True)
    diagnosis = json.loads((run / "diagnosis" / "step-000002.json").read_text())
    assert (diagnosis["loss"], len(diagnosis["completions"])) == ("nan", 4), "one of two groups"
    assert os.readlink(run / "checkpoints" / "latest") == "step-000001"
    rl.run(tiny_recipe(model, run, **changes), resume=True, quiet=True)
    assert differences(straight, run) == []


def test_nan_in_a_distillation(pair: tuple[Path, Path], tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    changes = {**distilling.QUICK, "train__steps": 3, "train__save_every": 0}
    distill.run(distilling.recipe(pair, straight, **changes), quiet=True)
    calls = 0

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = divergence(*args, **kwargs)
        calls += kwargs["weights"] is not None
        if kwargs["weights"] is None or calls != 2:
            return result
        fields = {name: getattr(result, name) for name in result.__slots__ if name != "loss"}
        return type(result)(**fields, loss=result.loss * torch.nan)

    config = distilling.recipe(pair, run, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objectives, "divergence", poisoned)
        with pytest.raises(TrainingDiverged, match=r"Step 2: the loss is nan"):
            distill.run(config, quiet=True)
    distill.run(config, resume=True, quiet=True)
    assert differences(straight, run) == []


@pytest.mark.parametrize("fault", ["flood", "killed"])
def test_a_reward_that_floods_and_one_whose_worker_is_killed(
    model: Path,
    straight: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    """Neither changes the run: 8 MB per call go nowhere, and a call that somebody cuts off is made again."""
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULT_MARK", str(tmp_path / "mark"))
    run = tmp_path / "run"
    capfd.readouterr()
    rl.run(tiny_recipe(model, run, **CHANGES, task__rewards=REWARD, task__reward_workers=1), quiet=True)
    assert differences(straight, run) == []
    assert (tmp_path / "mark").exists() == (fault == "killed")
    assert len("".join(capfd.readouterr())) < 10_000


def test_a_reward_that_hangs(model: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stops within the limit, what was trained is saved, and the mended reward goes on from there."""
    run = tmp_path / "run"
    changes = {**CHANGES, "task__rewards": REWARD, "task__reward_workers": 1, "task__reward_timeout_s": 1.0}
    config = tiny_recipe(model, run, **changes)
    mark = tmp_path / "mark"
    monkeypatch.setenv("FAULT", "hang")
    monkeypatch.setenv("FAULT_MARK", str(mark))
    with pytest.MonkeyPatch.context() as patch:
        before(patch, rl.RLTrainer, "collect", mark.touch, lambda step: step == 2)
        with pytest.raises(RewardError, match=r"took longer than 1 s and was killed"):
            rl.run(config, quiet=True)
    assert os.readlink(run / "checkpoints" / "latest") == "step-000001"
    mark.unlink()
    rl.run(config, resume=True, quiet=True)
    assert differences(straight, run) == []


def test_the_clock_jumps(model: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Years back and forth at every look: durations come from a clock that only goes forward, and nothing else asks."""
    real, looks = time.time, 0

    def jumping() -> float:
        nonlocal looks
        looks += 1
        return real() + (-1) ** looks * 3e8

    monkeypatch.setattr(time, "time", jumping)
    run = tmp_path / "run"
    config = tiny_recipe(model, run, **CHANGES, task__rewards=REWARD, task__reward_workers=1)
    rl.run(config, quiet=True)
    assert time.time() != time.time()
    assert differences(straight, run) == []
    durations = [v for r in RunDir.open(run).read_metrics() for k, v in r.items() if k.startswith("time/")]
    assert durations
    assert 0 <= min(durations) <= max(durations) < 600


def test_a_name_that_an_earlier_run_has(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that went back can lead to the name of a run that is there; it is not touched."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20260102-030405")
    (tmp_path / "runs" / "tiny-20260102-030405").mkdir(parents=True)
    (tmp_path / "runs" / "tiny-20260102-030405" / METRICS).write_text("{}\n")
    config = tiny_recipe(model, tmp_path / "unused", **CHANGES)
    config = config.model_copy(update={"train": config.train.model_copy(update={"run_dir": None})})
    with pytest.raises(ConfigError, match="tiny-20260102-030405' is not empty"):
        rl.run(config, quiet=True)


def test_trainer_files_are_what_torch_reads(straight: Path) -> None:
    """They are written through a file of Python's, so that an error of the disk keeps its reason."""
    state = torch.load(straight / "checkpoints" / "latest" / trainer.ckpt.TRAINER_FILE, weights_only=True)
    assert state["num_updates"] == 2
