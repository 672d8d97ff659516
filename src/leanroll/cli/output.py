"""Where results go: a file, written at the end and at once, checked before the work starts; remarks go to stderr."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from leanroll.errors import ConfigError


def check_output(path: str, option: str = "--output") -> Path:
    """The output file's path. Raises ConfigError, which names `option`, when its folder does not exist or cannot be written."""
    file = Path(path).absolute()
    if file.is_dir():
        raise ConfigError(f"{option} {path!r} is a folder; give the name of a file.")
    if file.exists() and not file.is_file():
        raise ConfigError(f"{option} {path!r} is a device or a pipe, and would be replaced; give the name of a file.")
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {path!r}: the folder {str(file.parent)!r} does not exist; make it first.")
    try:
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise ConfigError(
            f"{option} {path!r}: the folder {str(file.parent)!r} is not writable ({error.strerror or error}); choose another."
        ) from error
    return file


def remark(line: str | None) -> None:
    """Print a line on stderr; None prints nothing."""
    if line is not None:
        Console(stderr=True, soft_wrap=True, highlight=False).print(line, markup=False)
