"""What the system refuses becomes one error that says where, why and what to do; everything else passes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from leanroll.errors import LeanrollError, RewardError, StorageError
from leanroll.rundir_storage import storing, system_error


def chained(outer: Exception, inner: Exception, *, cause: bool) -> Exception:
    """As `raise outer from inner` leaves it, or `raise outer` while `inner` is handled."""
    outer.__context__ = inner
    if cause:
        outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EROFS, "Read-only file system"), errno.EROFS),
        (PermissionError(errno.EACCES, "Permission denied", "x"), errno.EACCES),
        (RuntimeError("I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (chained(RuntimeError("unexpected pos 704"), OSError(errno.ENOSPC, "full"), cause=False), errno.ENOSPC),
        (chained(ValueError("wrapped"), OSError(errno.EDQUOT, "quota"), cause=True), errno.EDQUOT),
        (OSError("no number"), None),
        (ValueError("Out of range float values are not JSON compliant"), None),
    ],
)
def test_the_reason_is_found_under_wrappers(error: Exception, number: int | None) -> None:
    assert system_error(error) == number


@pytest.mark.parametrize(
    ("number", "reason", "advice"),
    [
        (errno.ENOSPC, "No space left on device", "Make room"),
        (errno.EDQUOT, "Disk quota exceeded", "Make room"),
        (errno.EROFS, "Read-only file system", "Make it writable"),
        (errno.EIO, "Input/output error", "Repair it"),
    ],
)
def test_the_message(tmp_path: Path, number: int, reason: str, advice: str) -> None:
    path = tmp_path / "not" / "there.json"
    with pytest.raises(StorageError) as caught, storing(path):
        raise OSError(number, "")
    message = str(caught.value)
    assert message.startswith(f"'{path}' cannot be written ({reason}; ")
    assert "MiB free)" in message
    assert f"{advice}, then continue with --resume" in message
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("error", [ValueError("a NaN"), RewardError("from below"), KeyboardInterrupt(), OSError("?")])
def test_what_is_not_the_disks_doing_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, storing(Path("x")):
        raise error
    assert caught.value is error


def test_an_error_of_ours_is_not_wrapped_again() -> None:
    inner = StorageError("the file inside")
    with pytest.raises(LeanrollError) as caught, storing(Path("outer")):
        raise inner
    assert caught.value is inner
