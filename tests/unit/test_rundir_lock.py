"""One writer per run directory, and no lock outlives the process that took it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leanroll.errors import ConfigError, RunDirInUse
from leanroll.rundir_lock import LOCK, run_lock

# Holds the lock while a reward worker and a fork of its own live; prints their process ids.
HOLDER = """
import os, pickle, sys, time
from leanroll.rundir_lock import run_lock
from leanroll.tasks.reward_pool import RewardPool

with run_lock(sys.argv[1]):
    pool = RewardPool([pickle.dumps(len)], ["len"], 1)
    pool.start()
    ready, say_ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(say_ready, b"!")
        time.sleep(600)
    os.read(ready, 1)
    print(pool._workers[0].process.pid, child, flush=True)
    time.sleep(600)
"""


def test_the_second_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    with run_lock(run):
        with pytest.raises(RunDirInUse, match=rf"{run}' is in use by process {os.getpid()} on \S+; expected"):
            run_lock(run).__enter__()
        with run_lock(tmp_path / "runs" / "b"):
            pass
    with run_lock(run):
        pass
    assert [entry.name for entry in run.iterdir()] == [LOCK]


def test_an_error_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), run_lock(tmp_path):
        raise ValueError("mine")
    with run_lock(tmp_path):
        pass


def test_nothing_that_a_killed_holder_started_keeps_the_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    others = [int(word) for word in holder.stdout.readline().split()]
    try:
        assert len(others) == 2
        for pid in others:
            os.kill(pid, signal.SIGSTOP)  # so that they are there still when the holder is gone
        with pytest.raises(RunDirInUse, match=f"process {holder.pid} "):
            run_lock(tmp_path).__enter__()
        holder.kill()
        holder.wait()
        with run_lock(tmp_path):
            for pid in others:
                os.kill(pid, 0)
    finally:
        holder.kill()
        holder.wait()
        for pid in others:
            os.kill(pid, signal.SIGKILL)


def test_a_fork_does_not_end_the_lock_of_its_parent(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(RunDirInUse):
            run_lock(tmp_path).__enter__()


def test_a_folder_that_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written or locked.*Choose another run directory"):
        run_lock(tmp_path / "file" / "run").__enter__()

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")  # what a mount without locks says

    monkeypatch.setattr("leanroll.rundir_lock.fcntl.flock", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written or locked \(Function not implemented\)"):
        run_lock(tmp_path).__enter__()
