"""Atomic checkpoints.

    checkpoints/step-000012/policy/       HF or peft format: load it with transformers or peft, nothing of ours needed
                            sampler/      the sampler's own adapter in peft format, where there is one
                            trainer.pt    fp32 masters, optimizer moments, random state: what exact resume needs
                            state.json    step and what identifies the run
    checkpoints/latest                    symbolic link to the one in force

A checkpoint is written under a temporary name, flushed to disk and renamed, then `latest` is replaced: a kill at any
moment leaves the previous one in force. Without `latest` (the first checkpoint was just renamed, or the folder was
copied without links) the newest complete one counts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leanroll.errors import ResumeError
from leanroll.rundir import step_name, sync_folder, write_json
from leanroll.rundir_storage import storing

LATEST = "latest"
STATE_FILE = "state.json"
TRAINER_FILE = "trainer.pt"
POLICY_DIR = "policy"
SAMPLER_DIR = "sampler"
_PREFIX, _TEMP = "step-", ".tmp-"


class Checkpoints:
    """The checkpoints of one run directory. `keep`: how many to keep, the newest ones; 0 keeps all."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Write one checkpoint: `write(directory)` fills it, `state` becomes state.json together with the step.

        Raises:
            StorageError: the disk refused it; the checkpoint in force stays, and the unfinished one gives its room back.
        """
        final = self.directory / step_name(step)
        temp = self.directory / f"{_TEMP}{final.name}"
        with storing(final):
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temp, ignore_errors=True)
            try:
                temp.mkdir()
                write(temp)
                write_json(temp / STATE_FILE, {**state, "step": step})
                _sync_tree(temp)
            except BaseException:
                shutil.rmtree(temp, ignore_errors=True)  # or else a full disk stays full
                raise
            if final.exists():  # left by a run that was killed before `latest` moved
                shutil.rmtree(final)
            os.replace(temp, final)
            sync_folder(self.directory)
            self._point_to(final)
            self._prune()
        return final

    def latest(self) -> Path | None:
        """The checkpoint in force, or None when the run has none yet.

        Raises:
            ResumeError: `latest` is not a link, or leads to something incomplete.
        """
        link = self.directory / LATEST
        if not link.is_symlink():
            if link.exists():
                raise ResumeError(
                    f"{link} is not a symbolic link (was the run copied with its links followed?); remove it, and the newest "
                    "checkpoint counts."
                )
            complete = [path for path in self._complete() if (path / STATE_FILE).is_file()]
            return complete[-1] if complete else None
        path = self.directory / os.readlink(link)
        if not (path / STATE_FILE).is_file():
            raise ResumeError(f"{link} points to {path.name}, not a complete checkpoint; point it to one that is.")
        return path

    def drop_newer_than(self, step: int) -> None:
        """Remove temporary directories and checkpoints after `step`, left by a kill. Raises StorageError."""
        with storing(self.directory):
            for path in self._complete():
                if _step(path) > step:
                    shutil.rmtree(path)
            for path in self.directory.glob(f"{_TEMP}{_PREFIX}*"):
                shutil.rmtree(path)

    def go_back_to(self, step: int) -> None:
        """Put the newest checkpoint of `step` or before in force and remove the later ones; without one, all are removed.

        Raises:
            StorageError: the disk refused it.
        """
        with storing(self.directory):
            kept = [path for path in self._complete() if _step(path) <= step]
            if kept:
                self._point_to(kept[-1])
            else:
                (self.directory / LATEST).unlink(missing_ok=True)
        self.drop_newer_than(step)

    def _point_to(self, checkpoint: Path) -> None:
        link = self.directory / f"{_TEMP}{LATEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint.name)
        os.replace(link, self.directory / LATEST)
        sync_folder(self.directory)

    def _complete(self) -> list[Path]:
        return sorted((p for p in self.directory.glob(f"{_PREFIX}[0-9]*") if p.is_dir()), key=_step)

    def _prune(self) -> None:
        if self.keep:
            for path in self._complete()[: -self.keep]:
                shutil.rmtree(path)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    state: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    return state


def random_state() -> dict[str, Any]:
    """State of the global generators. Sampling and data order do not use them; user rewards in the main process may."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        # Plain values, which torch.load(weights_only=True) reads.
        "numpy": (name, np.asarray(keys).tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([device.cpu() for device in state["cuda"]])


def _sync_tree(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            with (Path(directory) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(directory))
