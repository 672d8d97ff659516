"""One writer per run directory: an advisory lock that ends with the process that holds it. Never imports torch.

The lock is `flock` on a file that stays. The kernel drops it when its holder ends, however it ends, so nothing that a
kill leaves can block a resume. Readers (`leanroll report`) need no lock: files are replaced or appended to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from leanroll.errors import ConfigError, RunDirInUse

LOCK = ".lock"
"""The lock's file in a run directory; it holds the process id and host of the last writer."""

_held: set[int] = set()


def _drop_in_child() -> None:
    # Closing is not unlocking: the parent keeps its lock. A child that kept the descriptor would hold the lock on after a
    # killed parent. Processes that are not forks (reward workers) never get it: Python opens files close-on-exec.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_drop_in_child)


@contextlib.contextmanager
def run_lock(path: str | Path) -> Iterator[None]:
    """Be the only process that writes to a run directory while the block runs; the folder is made if it does not exist.

    Raises:
        RunDirInUse: another process (or another run in this one) holds it.
        ConfigError: the folder cannot be written, or its filesystem has no locks.
    """
    path = Path(path).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        _held.add(descriptor)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError:
            # Empty when its holder has not written yet.
            holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip() or "another process"
            raise RunDirInUse(
                f"Run directory {str(path)!r} is in use by {holder}; expected one that nothing else writes to. Wait for it, "
                "stop it, or choose another run directory."
            ) from None
        except OSError as error:
            raise _unusable(path, error) from error
        yield
    finally:
        if descriptor in _held:  # not in a forked child
            _held.remove(descriptor)
            os.close(descriptor)


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"Run directory {str(path)!r} cannot be written or locked ({error.strerror or error}); expected a writable folder on "
        "a filesystem with file locks. Choose another run directory."
    )
