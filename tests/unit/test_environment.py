"""How long waiting threads spin: limited by the command line, unless the user has a say in it or it is too late."""

import os
import subprocess
import sys

import pytest

from leanroll.environment import SPIN_COUNT, describe, last_level_cache_bytes, limit_spinning


@pytest.fixture(autouse=True)
def _as_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever the test does to it
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_the_limit_is_set_and_recorded() -> None:
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == describe()["gomp_spincount"] == str(SPIN_COUNT)


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")])
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    limit_spinning()
    assert os.environ[name] == value
    assert (os.environ.get("GOMP_SPINCOUNT") is None) == (name != "GOMP_SPINCOUNT")


def test_once_torch_is_loaded_nothing_is_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is torch's OpenMP runtime on Linux")
def test_the_command_line_comes_before_the_runtime() -> None:
    """Asked of libgomp itself, which reads the variable when it is loaded."""
    done = subprocess.run(
        [sys.executable, "-m", "leanroll.cli.main", "doctor", "--no-model"],
        env={**os.environ, "OMP_DISPLAY_ENV": "verbose", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in done.stderr
    assert f"GOMP_SPINCOUNT {SPIN_COUNT}, OMP_WAIT_POLICY not set" in done.stdout


def test_the_last_level_cache_holds_a_page_at_least() -> None:
    size = last_level_cache_bytes()
    assert size is None or size >= 2**15
