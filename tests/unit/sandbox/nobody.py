"""Run a Python file as a user without rights, from root: `python nobody.py FILE`. The interpreter is made readable for it where a
folder above is not, in a mount namespace of this process. Exit code 77: that is not possible here."""

import os
import runpy
import sys
from pathlib import Path

from leanroll.sandbox import linux

NOBODY = 65534
NOT_POSSIBLE = 77


def become_nobody() -> None:
    base = Path(sys.base_prefix).resolve()
    closed = [folder for folder in reversed(base.parents) if not folder.stat().st_mode & 1]
    if closed:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        interpreter = os.open(base, os.O_PATH)
        linux.mount("tmpfs", str(closed[0]), "tmpfs", 0, "mode=755")
        base.mkdir(parents=True)
        linux.mount(f"/proc/self/fd/{interpreter}", str(base), "", linux.MS_BIND | linux.MS_REC)
        os.close(interpreter)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


if __name__ == "__main__":
    try:
        become_nobody()
    except OSError as error:
        print(error)
        sys.exit(NOT_POSSIBLE)
    runpy.run_path(sys.argv[1], run_name="__main__")
