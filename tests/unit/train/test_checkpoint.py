"""Atomic checkpoints: what is in force after a kill at any moment."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from leanroll.errors import ResumeError
from leanroll.train import checkpoint as ckpt


def write(directory: Path) -> None:
    (directory / "policy").mkdir()
    (directory / "policy" / "weights").write_text("w")


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_keeps_the_newest_and_points_to_it(tmp_path: Path) -> None:
    store = ckpt.Checkpoints(tmp_path / "c", keep=2)
    assert store.latest() is None
    for step in (1, 2, 10):
        store.save(step, write, {"hash": "h"})
    assert names(tmp_path / "c") == ["latest", "step-000002", "step-000010"]
    latest = store.latest()
    assert latest is not None
    assert ckpt.read_state(latest) == {"hash": "h", "step": 10}
    assert (tmp_path / "c" / "latest" / "policy" / "weights").read_text() == "w"


def test_failed_write_leaves_the_old_one_in_force(tmp_path: Path) -> None:
    store = ckpt.Checkpoints(tmp_path, keep=0)
    store.save(1, write, {})

    def broken(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(2, broken, {})
    assert store.latest() == tmp_path / "step-000001"
    store.drop_newer_than(1)
    assert names(tmp_path) == ["latest", "step-000001"]
    store.save(2, write, {})
    assert store.latest() == tmp_path / "step-000002"


def test_kill_between_rename_and_pointer(tmp_path: Path) -> None:
    store = ckpt.Checkpoints(tmp_path, keep=0)
    store.save(1, write, {})
    (tmp_path / "step-000002").mkdir()  # renamed into place, but `latest` never moved
    assert store.latest() == tmp_path / "step-000001"
    store.drop_newer_than(1)
    assert names(tmp_path) == ["latest", "step-000001"]


def test_a_lost_pointer_does_not_lose_checkpoints(tmp_path: Path) -> None:
    """Copied without links, or killed before the very first pointer was made."""
    store = ckpt.Checkpoints(tmp_path, keep=0)
    for step in (1, 999_999, 1_000_000):
        store.save(step, write, {})
    (tmp_path / "latest").unlink()
    (tmp_path / "step-1000001").mkdir()
    assert store.latest() == tmp_path / "step-1000000"
    (tmp_path / "latest").mkdir()  # copied with links followed
    with pytest.raises(ResumeError, match="not a symbolic link"):
        store.latest()


def test_pruning_counts_steps_as_numbers(tmp_path: Path) -> None:
    store = ckpt.Checkpoints(tmp_path, keep=1)
    for step in (999_999, 1_000_000):
        store.save(step, write, {})
    assert names(tmp_path) == ["latest", "step-1000000"]


def test_pointer_to_nothing_is_an_error(tmp_path: Path) -> None:
    store = ckpt.Checkpoints(tmp_path, keep=0)
    store.save(1, write, {})
    (tmp_path / "step-000001" / "state.json").unlink()
    with pytest.raises(ResumeError, match="not a complete checkpoint"):
        store.latest()


def test_random_state_round_trip(tmp_path: Path) -> None:
    torch.save(ckpt.random_state(), tmp_path / "r.pt")
    draws = lambda: (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: E731
    first = draws()
    ckpt.set_random_state(torch.load(tmp_path / "r.pt", weights_only=True))
    assert draws() == first
