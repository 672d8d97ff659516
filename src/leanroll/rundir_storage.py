"""What a run directory's disk refuses, as one typed error: full, over quota, read-only, broken. Never imports torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from leanroll.errors import LeanrollError, StorageError

# How Rust libraries (safetensors, tokenizers) report an error of the system.
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn a refusal of the system inside the block, in which a run's `path` is written, into a StorageError.

    Other exceptions pass, also those of libraries: only what the system itself refused is the disk's doing.

    Raises:
        StorageError: the block met an error of the system.
    """
    try:
        yield
    except LeanrollError:
        raise
    except Exception as error:  # libraries wrap what the system says into classes of their own
        number = system_error(error)
        if number is None:
            raise
        raise StorageError(
            f"{str(path)!r} cannot be written ({os.strerror(number)}{_room(path)}); expected a writable disk with room for it. "
            f"{_advice(number)}, then continue with --resume: what the run directory holds is intact, and steps after its last "
            "checkpoint are repeated with the same draws."
        ) from error


def system_error(error: BaseException | None) -> int | None:
    """The errno at the root of an exception, also where a library has wrapped or replaced the OSError; None without one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        found = _RUST_ERROR.search(str(error))
        if found is not None:
            return int(found[1])
        error = error.__cause__ or error.__context__
    return None


def _room(path: Path) -> str:
    """Room for files of ours on the filesystem of `path`, or of its nearest folder that exists."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(folder)
            room = f"; {found.f_bavail * found.f_frsize / 2**20:,.1f} of {found.f_blocks * found.f_frsize / 2**20:,.1f} MiB free"
            return room + ("" if found.f_favail or not found.f_files else ", no file entry left")
    return ""


def _advice(number: int) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Make room"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "Make it writable"
    return "Repair it"
