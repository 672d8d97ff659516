"""`share_of_liked_ids` of tests/rewards.py, which misbehaves as the environment says. Imports little: workers load it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def share_of_liked_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """FAULT is flood, killed (FAULT_MARK is a file that says it has been) or hang (while FAULT_MARK exists); or not set."""
    fault = os.environ.get("FAULT")
    if fault == "flood":
        for _i in range(40):
            print("x" * 100_000)
            os.write(2, b"y" * 100_000)
    mark = Path(os.environ.get("FAULT_MARK", ""))
    if fault == "killed" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang" and mark.exists():
        time.sleep(600)
    return [sum(token % 8 == 3 for token in ids) / len(ids) for ids in completion_ids]
